"""The checks, in the order in which they run. A new check is a file and a row here."""

from megatron.operation.preflight.check import Check
from megatron.operation.preflight.clocks import Clocks
from megatron.operation.preflight.disk import Disk
from megatron.operation.preflight.gpu import Gpu
from megatron.operation.preflight.host_memory import HostMemory
from megatron.operation.preflight.identity import Identity
from megatron.operation.preflight.links import Links
from megatron.operation.preflight.product import Product
from megatron.operation.preflight.sums import Sums

CHECKS: tuple[Check, ...] = (
    Identity(),
    Clocks(),
    HostMemory(),
    Gpu(),  # before the product, which uses memory
    Product(),
    Disk(),
    Sums(),  # before the links: NCCL connects all ranks in it
    Links(),
)

"""The checks, in the order in which they run. A new check is a file and a row here."""

from megatron.features.preflight.check import Check
from megatron.features.preflight.host import Disk, Gpu, HostMemory, Identity, Product
from megatron.features.preflight.network import Clocks, Links, Sums

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

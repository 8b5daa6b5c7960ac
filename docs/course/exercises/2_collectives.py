"""Exercise 2: reduce-scatter and the ring all-reduce from messages. The page is docs/course/2_collectives.md.

Fill the two holes, then: megatron-llama course check 2
"""

from torch import Tensor

from megatron.core.communication import Communicator


def chunks(vector: Tensor, size: int) -> tuple[Tensor, ...]:
    """The ``size`` chunks of ``vector``, as views; their lengths differ by at most one."""
    return vector.tensor_split(size)


def all_gather(communicator: Communicator, own: Tensor, length: int) -> Tensor:
    """The vector ``[length]`` of which every rank has the chunk ``own``, numbered by its rank. Given, as an example.

    In each step a rank sends to the next one in the ring what it received in the step before.
    """
    rank, size = communicator.rank, communicator.size
    vector = own.new_empty(length)
    parts = chunks(vector, size)
    parts[rank].copy_(own)
    for step in range(size - 1):
        sent, received = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        send = communicator.start_send(sent, (rank + 1) % size)  # `sent` must not change before send.wait()
        receive = communicator.start_receive(received, (rank - 1) % size)  # `received` is NaN before receive.wait()
        receive.wait()
        send.wait()
    return vector


def reduce_scatter(communicator: Communicator, vector: Tensor) -> Tensor:
    """Chunk number ``rank`` of the sum of the ``vector`` ``[length]`` of all ranks, on each rank.

    Messages go to the next rank of the ring, or all to the previous one. No rank sends a number twice: of its chunks it
    sends all but one. ``vector`` does not change. Any ``length`` and any number of ranks, also one.
    """
    raise NotImplementedError("fill this hole")


def all_reduce(communicator: Communicator, vector: Tensor) -> Tensor:
    """The sum of the ``vector`` of all ranks, on every rank, for twice the bytes of :func:`reduce_scatter`."""
    raise NotImplementedError("fill this hole")

"""Mistakes in the answer to exercise 2: old text, new text, a part of the sentence."""

STEP = """        send = communicator.start_send(sent, (rank + 1) % size)
        communicator.start_receive(arriving, (rank - 1) % size).wait()
        received += arriving
        send.wait()
"""
INDICES = "parts[(rank - step - 1) % size], parts[(rank - step - 2) % size]"
DIRECT = """    for step in range(1, size):
        send = communicator.start_send(parts[(rank + step) % size], (rank + step) % size)
        arriving = parts[rank].new_empty(parts[rank].shape)
        communicator.start_receive(arriving, (rank - step) % size).wait()
        parts[rank].add_(arriving)
        send.wait()
"""
LOOP = f"""    for step in range(size - 1):
        sent, received = {INDICES}
        arriving = received.new_empty(received.shape)
{STEP}"""
WHOLE = """    moving = vector
    for step in range(size - 1):
        arriving = vector.new_empty(vector.shape)
        send = communicator.start_send(moving, (rank + 1) % size)
        communicator.start_receive(arriving, (rank - 1) % size).wait()
        send.wait()
        parts[rank].add_(chunks(arriving, size)[rank])
        moving = arriving
"""
GATHER = "all_gather(communicator, reduce_scatter(communicator, vector), len(vector))"

MISTAKES = [
    (STEP, "\n".join([STEP.splitlines()[1], STEP.splitlines()[0], *STEP.splitlines()[2:], ""]), "must send before it"),
    (INDICES, "parts[(rank - step) % size], parts[(rank - step - 1) % size]", "returns its own numbers, without those"),
    ("(rank - step - 2)", "(rank - step)", "add what arrives to the chunk that the other"),
    ("received += arriving", "received.copy_(arriving)", "add what arrives, where it now overwrites"),
    ("chunks(vector.clone(), size)", "chunks(vector, size)", "it still belongs: add into a copy"),
    (
        "for step in range(size - 1):\n        sent, received = parts[(rank - step - 1)",
        "for step in range(size):\n        sent, received = parts[(rank - step - 1)",
        "n - 1 steps complete the sums",
    ),
    (
        "for step in range(size - 1):\n        sent, received = parts[(rank - step - 1)",
        "for step in range(1, size - 1):\n        sent, received = parts[(rank - step - 1)",
        "returns a sum without rank",
    ),
    (
        "        received += arriving\n        send.wait()",
        "        received += arriving",
        "all of its sends: their memory may not",
    ),
    (
        "        communicator.start_receive(arriving, (rank - 1) % size).wait()\n        received += arriving",
        "        receive = communicator.start_receive(arriving, (rank - 1) % size)\n        received += arriving\n"
        "        receive.wait()",
        "memory was read before it was written",
    ),
    ("% size).wait()\n        received +=", "% size)\n        received +=", "all of its receives: their memory is not"),
    (
        "        received += arriving\n        send.wait()",
        "        received += arriving\n        sent.zero_()\n        send.wait()",
        "has changed a tensor between",
    ),
    ("    return parts[rank]", "    return parts[rank] / size", "times the sum: the caller divides"),
    ("    return parts[rank]", "    return parts[(rank + 1) % size]", "return the chunk whose last sum was made here"),
    (LOOP, DIRECT, "send to one neighbour alone"),
    (LOOP, WHOLE, "crosses the slowest link for nothing"),
    (
        "    return parts[rank]",
        "    return communicator.reduce_scatter(vector)",
        "make it of start_send and start_receive",
    ),
    (
        "received.new_empty(received.shape)",
        "parts[rank].new_empty(parts[rank].shape)",
        "for which the other has made room",
    ),
    ("    return parts[rank]", "    return vector", "whose sum is complete there"),
    (GATHER, "reduce_scatter(communicator, vector)", "returns a chunk: an all-gather makes"),
    (
        GATHER,
        "all_gather(communicator, chunks(vector, communicator.size)[communicator.rank], len(vector))",
        "all-gather the chunks of reduce_scatter by rank",
    ),
]

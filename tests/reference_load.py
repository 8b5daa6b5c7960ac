"""A fixed load with which the seconds of all tests are compared: it imports everything, and trains a tiny model."""

from dataclasses import replace

import torch

from tests.parallel.layout_run import Layout, train
from tests.parallel.tasks import DEEP_SGD

STEPS = 200


def main() -> None:
    torch.set_num_threads(1)
    train(replace(DEEP_SGD, steps=STEPS), Layout(microbatches=4))


if __name__ == "__main__":
    main()

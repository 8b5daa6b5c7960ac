"""A run of an experiment of ``megatron-llama diff``: ``record_step.py REQUEST FLAGS``; REQUEST is a file of
:class:`~megatron.comparison.experiment.Request`."""

import json
import sys
from functools import partial
from pathlib import Path

from megatron.commands.pretrain_llama import import_for_training, run, train

if __name__ == "__main__":
    import_for_training()
    from megatron.comparison.experiment import Request

    request, *flags = sys.argv[1:]
    run(flags, partial(train, parts=Request(**json.loads(Path(request).read_text())).parts()))

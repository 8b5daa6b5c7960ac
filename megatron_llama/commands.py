"""The verbs of ``megatron-llama``, from the shell and from Python: each imports the module of its command, and starts
it."""

import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from megatron.errors import ConfigError, ExitCode

PROGRAM = "megatron-llama"


@dataclass(frozen=True)
class Verb:
    """A verb, the module that it starts, and its line in the help."""

    name: str
    module: str
    summary: str
    function: str = "main"
    """``main…`` returns the exit code, ``run…`` ends the process with it."""
    takes_arguments: bool = False  # whether the function takes the words after the verb; others read sys.argv


VERBS = (
    Verb("train", "megatron.commands.pretrain_llama", "train, dry run, layout search (pretrain_llama.py)", "run", True),
    Verb("launch", "megatron.operation.launch", "start processes: torchrun that obeys our exit codes", "run", True),
    Verb("preprocess", "megatron.commands.preprocess_data", "text to tokens"),
    Verb("train-tokenizer", "megatron.commands.train_tokenizer", "train a SentencePiece or byte-level tokenizer"),
    Verb("merge-data", "megatron.commands.datasets", "join tokenized corpora", "main_merge"),
    Verb("inspect-data", "megatron.commands.datasets", "show and check a tokenized corpus", "main_inspect"),
    Verb("convert", "megatron.commands.convert_checkpoint", "from and to Hugging Face, from Megatron-LM"),
    Verb("average-checkpoints", "megatron.commands.checkpoints", "average the weights of checkpoints", "main_average"),
    Verb("inspect-checkpoint", "megatron.commands.checkpoints", "show and check a checkpoint", "main_inspect"),
    Verb("generate", "megatron.commands.generate_text", "continue a text with a trained model", "run"),
    Verb("evaluate", "megatron.commands.evaluate", "loss, perplexity and bits per byte of whole texts", "run", True),
    Verb("evaluate-tasks", "megatron.commands.evaluate", "tasks of lm-eval on a trained model", "run_tasks"),
    Verb("plan", "megatron.commands.planning", "search the fastest layouts that fit"),
    Verb("explore", "megatron.commands.explore", "write a page in which a layout can be moved"),
    Verb("estimate", "megatron.commands.estimate", "the arithmetic of large runs, each formula with its numbers"),
    Verb("simulate-run", "megatron.commands.simulate_run", "simulate the failures and restarts of a run"),
    Verb("course", "megatron_llama.course.command", "lessons on distributed training, and checks of their exercises"),
    Verb("report", "megatron.commands.report_run", "report a run: attempts, failures, effective time"),
    Verb("plot", "megatron.commands.loss_curves", "plot the losses of runs", "main_plot"),
    Verb("overfit", "megatron.commands.overfit_check", "overfit a few samples in each layout"),
    Verb("diff", "megatron.commands.compare_runs", "say why the losses of two runs differ", "main_diff"),
    Verb(
        "check-layouts",
        "megatron.commands.compare_runs",
        "run flags scaled down in their layout and in one process",
        "main_check",
    ),
    Verb("compare-losses", "megatron.commands.loss_curves", "compare the losses of two runs", "main_compare"),
    Verb("schedule", "megatron.commands.pipeline_schedule", "simulate and draw a pipeline schedule"),
    Verb("rank-groups", "megatron.commands.rank_pictures", "print and draw the ranks of every group", "main_groups"),
    Verb("parallelism-pictures", "megatron.commands.rank_pictures", "draw what each rank holds", "main_pictures"),
    Verb("predict", "megatron.commands.predict_runs", "predict the step times of a table of runs"),
    Verb("calibrate-cluster", "megatron.commands.machines", "measure a machine for the planner", "main_calibrate"),
    Verb("check-node", "megatron.commands.machines", "check this node before a run", "main_check"),
)


def start(arguments: Sequence[str]) -> int:
    """Run the verb ``arguments[0]`` with the words after it; the exit code."""
    name, *rest = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        print(help_text())
        return ExitCode.COMPLETE
    verb = next((verb for verb in VERBS if verb.name == name), None)
    if verb is None:
        print(f"ERROR: {unknown(name)}", file=sys.stderr)
        return ExitCode.ACTION_REQUIRED
    return run(verb, rest)


def run(verb: Verb, words: list[str]) -> int:
    """Start the module of ``verb`` with the ``words`` after it; the exit code."""
    sys.argv = [f"{PROGRAM} {verb.name}", *words]
    function: Callable[..., int] = getattr(import_module(verb.module), verb.function)
    return function(words) if verb.takes_arguments else function()


def help_text() -> str:
    width = max(len(verb.name) for verb in VERBS)
    lines = [f"usage: {PROGRAM} VERB [FLAGS]", "", "verbs:"]
    lines += [f"  {verb.name:{width}}  {verb.summary}" for verb in VERBS]
    lines += ["", f"{PROGRAM} VERB --help lists the flags of a verb. Several processes:"]
    lines.append(f"{PROGRAM} launch --nproc-per-node N -m megatron.commands.pretrain_llama FLAGS")
    return "\n".join(lines)


def unknown(name: str) -> str:
    """The message about a word that is no verb."""
    close = get_close_matches(name, [verb.name for verb in VERBS], 1)
    hint = f"did you mean {close[0]}?" if close else f"{PROGRAM} --help lists the verbs."
    if name.startswith("-"):
        hint = f"a verb comes first, for example {PROGRAM} train {name} …"
    return f"{name} is not a verb of {PROGRAM}: {hint}"


def command(verb: str, *words: str | float) -> None:
    """Run ``megatron-llama verb words`` in this process; raises :class:`RuntimeError` if it fails.

    Verbs that end their process (train, generate) or start others (launch) are refused with the alternative.
    """
    found = next((one for one in VERBS if one.name == verb), None)
    if found is None:
        raise ConfigError(unknown(verb))
    if not found.function.startswith("main"):
        raise ConfigError(f"{PROGRAM} {verb} ends its process: use megatron_llama.Run, or start it in another process.")
    arguments, on_terminate = sys.argv, signal.getsignal(signal.SIGTERM)
    try:
        code: object = start([verb, *map(str, words)])
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = arguments
        if signal.getsignal(signal.SIGTERM) is not on_terminate:
            signal.signal(signal.SIGTERM, on_terminate)
    if code:
        raise RuntimeError(f"{PROGRAM} {verb} failed with exit code {code}: its output says why.")

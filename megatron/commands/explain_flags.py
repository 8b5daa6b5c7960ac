"""Where the flags of a command line come from, and what becomes of those of a recipe of Megatron-LM
(``--explain-flags``)."""

import os
import shlex
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron.command_line.parser import values_by_field
from megatron.config.bash.evaluation import Started, started_by
from megatron.config.checks import check_run, flags_in
from megatron.config.command_line import CommandLine, ParsedLine
from megatron.config.megatron_lm import NO_EFFECT
from megatron.config.recipes import Recipes, edited, read_recipes, recipe_of
from megatron.errors import ConfigError, ExitCode
from megatron.flags import require_at_least, values_of, words_of

# Flags whose defaults make another model.
OTHER_DEFAULTS = {
    "--swiglu": "GELU without a gate there, SwiGLU here",
    "--normalization": "LayerNorm there, RMSNorm here",
    "--disable-bias-linear": "linear layers with biases there, without here",
    "--position-embedding-type": "learned there, rope here",
    "--rotary-base": "10000 there, 500000 here",
    "--untie-embeddings-and-output-weights": "shared weights there, separate ones here",
    "--hidden-dropout": "0.1 there, 0 here",
    "--attention-dropout": "0.1 there, 0 here",
}


@dataclass(frozen=True)
class Explained:
    """The flags of a recipe, by what becomes of them."""

    kept: tuple[str, ...]
    no_effect: tuple[str, ...]
    corrections: tuple[str, ...]  # a sentence for everything that keeps the run from starting
    inferred: tuple[str, ...]  # flags that follow from others, with the reason
    unstated: tuple[str, ...]  # flags of OTHER_DEFAULTS that are not given


def explain(words: Sequence[str], world_size: int) -> Explained:
    """The flags in ``words`` in a run of ``world_size`` ranks, by what becomes of them."""
    given = CommandLine.of(words)
    line = given.parse()
    corrections = [sentence for error in line.mistakes for sentence in error.sentences]
    wrong = {flag for sentence in corrections for flag in flags_in(sentence)}
    try:
        check_run(line.config, world_size)
    except ConfigError as error:
        corrections += [one for one in error.sentences if not wrong & set(flags_in(one))]
    except Exception:
        # A check may fail on values that a mistake has left at their defaults.
        if not corrections:
            raise
    # A sentence begins with the flag that it corrects.
    subjects = {flag for sentence in corrections for flag in flags_in(sentence)[:1]}
    idle = {flags_in(typed)[0] for typed in line.no_effect}
    kept = [
        one.as_typed for one in given.given if not subjects & {one.flag, *flags_in(one.flag)} and one.flag not in idle
    ]
    stated = {one.flag for one in given.given}
    unstated = [flag for flag in OTHER_DEFAULTS if flag not in stated and "--model" not in stated]
    return Explained(tuple(kept), line.no_effect, tuple(corrections), line.inferred, tuple(unstated))


def describe_origins(line: ParsedLine) -> str:
    """A row for each flag whose value is not the default: the flag, and where the value comes from."""
    values = values_by_field(line.config)
    rows = [
        (shlex.join(words_of(name, values[name])), origin)
        for name, origin in line.origins.items()
        if name != "explain_flags"
    ]
    width = min(max((len(words) for words, _ in rows), default=0), 60)
    return "\n".join(f"{words:{width}}  {origin}" for words, origin in sorted(rows, key=lambda row: row[1]))


def explain_files(line: CommandLine, environment: Mapping[str, str]) -> ExitCode:
    """Explain the recipes of ``--explain-flags``, with the other flags of ``line`` beside theirs. Scripts are read in
    ``environment``."""
    config = line.parse().config
    flags, num_gpus = config.flag_files, config.dry_run.num_gpus
    flags.check()
    assert flags.explain_flags
    require_at_least(1, values_of(config.dry_run, "num_gpus"))
    path = Path(flags.explain_flags[0])
    recipes = recorded(path, environment) if flags.explain_run_script else read_recipes(path, environment)
    own = {"explain_flags", "explain_edit", "explain_run_script"}
    own |= set() if config.dry_run.dry_run or config.plan.plan else {"num_gpus"}
    others = line.without(own).words
    explained: dict[str, Explained] = {}
    for name, recipe in recipes.by_name.items():
        words = [*(edited(recipe.words) if flags.explain_edit else recipe.words), *others]
        ranks, origin = _ranks_of(words, num_gpus, recipe.num_ranks)
        explained[name] = explain(words, ranks)
        if len(recipes.by_name) == 1:
            print(_one(f"{name}, on {ranks} GPUs ({origin})", name, explained[name], recipe.remarks))
    if len(recipes.by_name) != 1 or recipes.skipped:
        print(_several(explained, recipes.skipped))
    starts = explained and not any(one.corrections for one in explained.values())
    return ExitCode.COMPLETE if starts else ExitCode.ACTION_REQUIRED


def _ranks_of(words: Sequence[str], num_gpus: int | None, of_launcher: int | None) -> tuple[int, str]:
    """The number of ranks on which a recipe is checked, and where it comes from: that of ``--num-gpus``, that of its
    launcher if the layout is possible on them, or the fewest."""
    config = CommandLine.of(words).parse().config
    if num_gpus is not None:
        return num_gpus, "--num-gpus"
    least = max(config.parallel.least_world_size(bool(config.model.num_experts)), 1)
    if of_launcher and of_launcher % least == 0:
        return of_launcher, "as its torchrun starts"
    besides = f"; its torchrun starts {of_launcher}" if of_launcher else ""
    return least, f"the fewest for its layout{besides}; --num-gpus sets another number"


def _one(heading: str, name: str, explained: Explained, remarks: Sequence[str]) -> str:
    reasons = {flag: one.reason for flag, one in NO_EFFECT.items()}
    reasons |= {"--expert-tensor-parallel-size": "the model has no experts"}
    idle = [f"{typed}: {reasons.get(flags_in(typed)[0], 'the run always does so')}" for typed in explained.no_effect]
    unstated = [f"{flag}: {OTHER_DEFAULTS[flag]}" for flag in explained.unstated]
    parts: dict[str, Sequence[str]] = {
        "kept": explained.kept,
        "without effect here": idle,
        "added": explained.inferred,
        "to correct": explained.corrections,
        "not stated, with other defaults than in Megatron-LM": unstated,
        "not decided by reading (see --explain-run-script)": remarks,
    }
    lines = [heading]
    for title, items in parts.items():
        lines += ["", f"{len(items)} {title}", *(f"  {item}" for item in items)] if items else []
    counts = f"{len(explained.kept)} kept, {len(idle)} without effect, {len(explained.corrections)} to correct"
    verdict = "would not start" if explained.corrections else "would start"
    return "\n".join([*lines, "", f"{name} {verdict}: {counts}."])


def _several(explained: dict[str, Explained], skipped: Sequence[str]) -> str:
    """How many recipes would start, and what the others need, most frequent first."""
    starting = [name for name, one in explained.items() if not one.corrections]
    reasons = Counter(sentence for one in explained.values() for sentence in one.corrections)
    lines = [f"{count:5}  {sentence}" for sentence, count in reasons.most_common()]
    if lines:
        lines = ["recipes  correction", *lines, ""]
    if skipped:
        lines += ["skipped", *(f"  {sentence}" for sentence in skipped), ""]
    share = f" ({100 * len(starting) / len(explained):.1f} %)" if explained else ""
    besides = f", {len(skipped)} skipped" if skipped else ""
    return "\n".join([*lines, f"{len(starting)} of {len(explained)} recipes would start{share}{besides}."])


STUBS = ("torchrun", "python", "python3", "srun", "sbatch", "mpirun", "nsys", "ft_launcher", "uv")
# Variable with the directory of the records.
_RECORDS = "EXPLAINED_COMMANDS"
_STUB = f"""#!/bin/bash
# A script may compute a value with python -c.
case "${{0##*/}} $1" in python*" -c" | python*" -V" | python*" --version")
    PATH=${{PATH#*:}} exec "${{0##*/}}" "$@" ;;
esac
number=$(ls "${_RECORDS}" | wc -l)
# A batch job is part of the script.
case "${{0##*/}}" in sbatch)
    for word in "$@"; do [ -f "$word" ] && exec bash "$word"; done
    exec bash ;;
esac
printf '%s\\0' "${{0##*/}}" "$@" > "${_RECORDS}/$(printf %06d $number)-$$"
"""
LIMIT_S = 120


def recorded(path: Path, environment: Mapping[str, str]) -> Recipes:
    """The recipe of the training that the script ``path`` would start, run with bash and stubs.

    Raises :class:`ConfigError` if it starts none, or does not end.
    """
    if not path.is_file() or path.suffix in (".yaml", ".yml", ".json"):
        raise ConfigError(f"--explain-run-script runs a shell script, which {path} is not: remove it.")
    with TemporaryDirectory() as folder:
        stubs, records = Path(folder, "bin"), Path(folder, "records")
        stubs.mkdir()
        records.mkdir()
        for name in STUBS:
            (stubs / name).write_text(_STUB)
            (stubs / name).chmod(0o755)
        inherited = environment.get("PATH", os.defpath)
        variables = {**environment, "PATH": f"{stubs}{os.pathsep}{inherited}", _RECORDS: str(records)}
        try:
            ended = subprocess.run(
                ["bash", str(path)], env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{path} has not ended after {LIMIT_S} s: remove --explain-run-script.") from None
        calls = [file.read_bytes().decode(errors="replace").split("\0")[:-1] for file in sorted(records.iterdir())]
    started = [Started(0, one.words) for call in calls for one in started_by(call, environment)]
    if not started:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ConfigError(
            f"{path} ended with {ended.returncode} and started no Python file by {', '.join(STUBS)}"
            f"{f' ({last[0]})' if last else ''}: remove --explain-run-script, or correct the script."
        )
    return Recipes({path.name: recipe_of(started)}, [])

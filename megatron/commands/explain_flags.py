"""``--explain-flags``: what becomes of every flag of a recipe of Megatron-LM."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.commands.explain_flags import recorded
from megatron.config.checks import check_run, flags_in
from megatron.config.command_line import parse_line
from megatron.config.megatron_lm import NO_EFFECT
from megatron.config.recipes import edited, read_recipes
from megatron.config.words import split_words
from megatron.errors import ConfigError, ExitCode
from megatron.flags import require_at_least, values_of

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
"""Flags whose defaults make another model."""


@dataclass(frozen=True)
class Explained:
    """What becomes of the flags of a recipe."""

    kept: tuple[str, ...]
    no_effect: tuple[str, ...]
    corrections: tuple[str, ...]
    """A sentence for everything that keeps the run from starting."""
    inferred: tuple[str, ...]
    """Flags that follow from others, with the reason."""
    unstated: tuple[str, ...]
    """Flags of ``OTHER_DEFAULTS`` that are not given."""


def explain(words: Sequence[str], world_size: int) -> Explained:
    """What becomes of the flags in ``words`` in a run of ``world_size`` ranks."""
    line = parse_line(words)
    errors = list(line.mistakes)
    corrections = [sentence for error in errors for sentence in error.sentences]
    wrong = {flag for sentence in corrections for flag in flags_in(sentence)}
    try:
        check_run(line.config, world_size)
    except ConfigError as error:
        corrections += [one for one in error.sentences if not wrong & set(flags_in(one))]
    except Exception:
        if not corrections:
            raise
    subjects = {flag for sentence in corrections for flag in flags_in(sentence)[:1]}
    given = split_words(words)
    idle = {flags_in(typed)[0] for typed in line.no_effect}
    kept = [one.as_typed for one in given if not subjects & {one.flag, *flags_in(one.flag)} and one.flag not in idle]
    stated = {one.flag for one in given}
    unstated = [flag for flag in OTHER_DEFAULTS if flag not in stated and "--model" not in stated]
    return Explained(tuple(kept), line.no_effect, tuple(corrections), line.inferred, tuple(unstated))


def explain_files(arguments: Sequence[str], environment: Mapping[str, str]) -> ExitCode:
    """Explain the recipes of ``--explain-flags``, with the other ``arguments`` beside their flags. Scripts are read in
    ``environment``."""
    config = parse_line(arguments).config
    flags, num_gpus = config.flag_files, config.dry_run.num_gpus
    if flags.explain_flags is None:
        raise ConfigError("--explain-flags needs a recipe: add its path.")
    flags.check()
    require_at_least(1, values_of(config.dry_run, "num_gpus"))
    path = Path(flags.explain_flags)
    recipes = recorded(path, environment) if flags.explain_run_script else read_recipes(path, environment)
    own = {"--explain-flags", "--explain-edit", "--explain-run-script"}
    own |= set() if config.dry_run.dry_run or config.plan.plan else {"--num-gpus"}
    others = [word for one in split_words(arguments) if one.flag not in own for word in (one.flag, *one.values)]
    explained: dict[str, Explained] = {}
    for name, recipe in recipes.by_name.items():
        words = [*(edited(recipe.words) if flags.explain_edit else recipe.words), *others]
        ranks = _ranks_of(words, num_gpus, recipe.num_ranks)
        explained[name] = explain(words, ranks.number)
        if len(recipes.by_name) == 1:
            print(_one(name, explained[name], ranks, recipe.remarks))
    if len(recipes.by_name) != 1 or recipes.skipped:
        print(_several(explained, recipes.skipped))
    starts = explained and not any(one.corrections for one in explained.values())
    return ExitCode.COMPLETE if starts else ExitCode.ACTION_REQUIRED


class _Ranks(NamedTuple):
    number: int
    origin: str
    """Why it is this number."""


def _ranks_of(words: Sequence[str], num_gpus: int | None, of_launcher: int | None) -> _Ranks:
    """The ranks on which a recipe is checked: those of ``--num-gpus``, those of its launcher if the layout is possible
    on them, or the fewest."""
    config = parse_line(words).config
    if num_gpus is not None:
        return _Ranks(num_gpus, "--num-gpus")
    least = max(config.parallel.least_world_size(bool(config.model.num_experts)), 1)
    if of_launcher and of_launcher % least == 0:
        return _Ranks(of_launcher, "as its torchrun starts")
    besides = f"; its torchrun starts {of_launcher}" if of_launcher else ""
    return _Ranks(least, f"the fewest for its layout{besides}; --num-gpus sets another number")


def _one(name: str, explained: Explained, ranks: _Ranks, remarks: Sequence[str]) -> str:
    reasons = {flag: one.reason for flag, one in NO_EFFECT.items()}
    reasons |= {"--expert-tensor-parallel-size": "the model has no experts"}
    idle = [f"{typed}: {reasons.get(flags_in(typed)[0], 'the run always does so')}" for typed in explained.no_effect]
    parts = [
        (f"{len(explained.kept)} kept", explained.kept),
        (f"{len(idle)} without effect here", idle),
        (f"{len(explained.inferred)} added", explained.inferred),
        (f"{len(explained.corrections)} to correct", explained.corrections),
        (
            f"{len(explained.unstated)} not stated, with other defaults than in Megatron-LM",
            [f"{flag}: {OTHER_DEFAULTS[flag]}" for flag in explained.unstated],
        ),
    ]
    parts.append((f"{len(remarks)} not decided by reading (see --explain-run-script)", remarks))
    lines = [f"{name}, on {ranks.number} GPUs ({ranks.origin})"]
    for title, items in parts:
        lines += ["", title, *(f"  {item}" for item in items)] if items else []
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

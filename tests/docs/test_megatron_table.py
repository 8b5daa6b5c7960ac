"""Every row of the table in docs/coming_from_megatron.md says what the parser and the checks do with the flag.

The rows are read from the page, and every value that Megatron-LM documents is given to ``pretrain_llama.py``.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron.commands.flag_reference import MegatronFlag, accepted_flags, megatron_flags
from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.config.help import Flag
from megatron.config.megatron_lm import NO_EFFECT, NOT_SUPPORTED
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs/coming_from_megatron.md"
RANKS = 8

RUN = {
    "--model": "tiny",
    "--mock-data": "",
    "--vocab-size": "1000",
    "--seq-length": "64",
    "--micro-batch-size": "2",
    "--train-iters": "10",
    "--lr": "1e-3",
}
"""A run that is accepted, to which the row's flag is added."""

FP8 = "--bf16 --fp8-format hybrid"
FULL = "--recompute-granularity full"
SELECTIVE = "--recompute-granularity selective"
SAMPLES = "--train-iters= --train-samples 1000"
STAGES = "--pipeline-model-parallel-size 2 --num-layers 8"
EXPERTS = "--num-experts 8"
SHARED_EXPERT = f"{EXPERTS} --moe-shared-expert-intermediate-size 64"
SIGMOID = f"{EXPERTS} --moe-router-score-function sigmoid"
CORPUS = "--mock-data= --tokenizer-type NullTokenizer"
PRECISION_AWARE = "--use-precision-aware-optimizer --bf16"

FLAGS_THAT_NEED = {
    "--pipeline-model-parallel-size 2 --num-layers 7": [
        *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
    ],
    "--save run": ["--async-save", "--save-interval", "--save-retain-interval"],
    "--load run": ["--ckpt-step", "--exit-on-missing-checkpoint", "--finetune", "--use-checkpoint-args"],
    CORPUS: ["--data-args-path", "--data-path", "--per-split-data-args-path", "--train-data-path"],
    f"{CORPUS} --data-path a": ["--full-validation", "--multiple-validation-sets"],
    f"{CORPUS} --train-data-path corpus": ["--test-data-path", "--valid-data-path"],
    STAGES: [
        *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
        *("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
        "--pipeline-model-parallel-layout",
    ],
    f"{STAGES} --num-virtual-stages-per-pipeline-rank 2": ["--microbatch-group-size-per-virtual-pipeline-stage"],
    "--decoupled-lr 1e-3": ["--decoupled-min-lr"],
    "--eval-interval 2": ["--eval-global-batch-size"],
    EXPERTS: [
        *("--moe-", "--moe-router-dtype fp32", "--moe-router-load-balancing-type none"),
        *("--expert-model-parallel-size", "--expert-tensor-parallel-size"),
    ],
    f"{EXPERTS} --fp64": ["--moe-router-dtype fp64"],
    f"{EXPERTS} --moe-router-num-groups 4": ["--moe-router-group-topk"],
    f"{EXPERTS} --moe-router-group-topk 2": ["--moe-router-num-groups"],
    f"{EXPERTS} --moe-aux-loss-coeff 1e-2": ["--moe-router-load-balancing-type"],
    f"{EXPERTS} {SELECTIVE}": ["--recompute-modules moe", "--recompute-modules moe_act"],
    f"{SHARED_EXPERT} {SELECTIVE}": ["--recompute-modules shared_experts"],
    SHARED_EXPERT: ["--moe-shared-expert-overlap"],
    SIGMOID: ["--moe-router-enable-expert-bias"],
    f"{SIGMOID} --moe-router-topk 1": ["--moe-apply-probs-on-input"],
    f"{SIGMOID} --moe-router-enable-expert-bias": ["--moe-router-bias-update-rate"],
    "--optimizer muon": ["--muon-"],
    "--use-mup": ["--mup-"],
    PRECISION_AWARE: ["--exp-avg-dtype", "--main-grads-dtype"],
    f"{PRECISION_AWARE} --adam-beta2 0.95": ["--exp-avg-sq-dtype"],
    "--bf16": ["--fp8-format"],
    FP8: ["--first-last-layers-bf16", "--fp8-amax-compute-algo"],
    f"{FP8} --use-distributed-optimizer": ["--fp8-param-gather"],
    f"{FP8} --transformer-impl transformer_engine": ["--fp8-recipe"],
    "--fp16": ["--loss-scale"],
    "--context-parallel-size 4 --cp-comm-type a2a+p2p": ["--hierarchical-context-parallel-sizes"],
    "--train-iters=": ["--train-samples"],
    SAMPLES: ["--lr-decay-samples"],
    "--lr-wsd-decay-iters 2": ["--lr-decay-style WSD"],
    "--lr-decay-style WSD": ["--lr-wsd-decay-iters"],
    "--lr-decay-style WSD --lr-wsd-decay-iters 2": ["--lr-wsd-decay-style"],
    f"{SAMPLES} --lr-decay-style WSD": ["--lr-wsd-decay-samples"],
    "--start-weight-decay 0.1 --weight-decay-incr-style linear": ["--end-weight-decay"],
    "--end-weight-decay 0.2 --weight-decay-incr-style linear": ["--start-weight-decay"],
    "--start-weight-decay 0.1 --end-weight-decay 0.2": [
        *("--weight-decay-incr-style linear", "--weight-decay-incr-style cosine")
    ],
    "--use-distributed-optimizer": ["--overlap-param-gather"],
    "--data-parallel-sharding-strategy optim_grads_params": ["--use-megatron-fsdp"],
    "--yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64": ["--position-embedding-type yarn"],
    "--profile": ["--profile-ranks"],
    "--profile --save run": ["--use-pytorch-profiler"],
    SELECTIVE: ["--recompute-modules"],
    "--recompute-method uniform --recompute-num-layers 1": ["--recompute-granularity full"],
    f"{FULL} --recompute-num-layers 1": ["--recompute-method"],
    f"{FULL} --recompute-method uniform": ["--recompute-num-layers"],
    f"{FULL} --recompute-method uniform --recompute-num-layers 1 --tensor-model-parallel-size 2": [
        "--distribute-saved-activations"
    ],
    "--tokenizer-model file": ["--tokenizer-type"],
    "--tokenizer-type TikTokenizer": ["--tokenizer-model"],
    "--tokenizer-type HuggingFaceTokenizer --tokenizer-model file": ["--tiktoken-pattern"],
    "--vocab-file file --merge-file file": ["--tokenizer-type GPT2BPETokenizer"],
    "--wandb-project llama": ["--wandb-entity", "--wandb-exp-name", "--wandb-save-dir"],
}
"""Flags, flags with a value and beginnings of flags, by what they need beside them; ``--flag=`` takes a flag of RUN
away."""
NEEDS = {flag: needed for needed, flags in FLAGS_THAT_NEED.items() for flag in flags}

ALONE = {"--data-parallel-sharding-strategy", "--ddp-num-buckets", "--use-torch-fsdp2", "--use-mup", "--fp16"}
ALONE |= {"--qk-l2-norm", "--use-checkpoint-opt-param-scheduler"}
"""Flags that need nothing, but contradict another flag of the table."""

EXAMPLES = {
    "--ddp-bucket-size": "1000000",
    "--ddp-num-buckets": "4",
    "--decoupled-min-lr": "0",
    "--hidden-size": "128",
    "--hierarchical-context-parallel-sizes": "2 2",
    "--kv-channels": "16",
    "--lr": "1e-3",
    "--expert-tensor-parallel-size": "1",
    "--moe-aux-loss-coeff": "0.01",
    "--moe-router-group-topk": "2",
    "--moe-router-num-groups": "4",
    "--moe-ffn-hidden-size": "64",
    "--moe-shared-expert-intermediate-size": "64",
    "--lr-warmup-fraction": "0.1",
    "--no-rope-freq": "4",
    "--num-layers": "8",
    "--num-attention-heads": "8",
    "--pipeline-model-parallel-layout": "Etttt|ttttL",
    "--profile-ranks": "0",
    "--rampup-batch-size": "16 16 320",
    "--save-interval": "100",
    "--split": "99,1,0",
    "--step-batch-size-schedule": "0:16 1M:32",
    "--num-virtual-stages-per-pipeline-rank": "2",
    "--num-layers-per-virtual-pipeline-stage": "2",
    "--decoder-first-pipeline-num-layers": "3",
    "--decoder-last-pipeline-num-layers": "3",
    "--microbatch-group-size-per-virtual-pipeline-stage": "4",
    "--global-batch-size": "32",
    "--eval-global-batch-size": "32",
    "--max-position-embeddings": "64",
    "--seq-length": "64",
    "--recompute-num-layers": "1",
    "--lr-wsd-decay-iters": "2",
}
"""A value that Megatron-LM documents, for flags that take any; where there is none, one of the flag's type."""

BY_TYPE = {"integer": "8", "number": "0.5", "text": "text", "one or more: integer": "3", "one or more: text": "corpus"}

SEVERAL_WORDS = ("--hierarchical-context-parallel-sizes", "--rampup-batch-size")


class Row(NamedTuple):
    """A row of the table."""

    asked: MegatronFlag
    answer: str

    @property
    def refused_values(self) -> list[str]:
        """The values behind the word "not"."""
        listed = re.search(r"; not ([^;]*)$", self.answer)
        return listed[1].split(", ") if listed else []

    @property
    def is_refused(self) -> bool:
        return self.answer.startswith("refused")

    @property
    def values(self) -> list[str]:
        """The values that Megatron-LM documents; one empty word for a flag without a value."""
        if self.asked.choices:
            return self.asked.choices.split()
        if self.asked.flag in NO_EFFECT:
            values = NO_EFFECT[self.asked.flag].values
            return [""] if values is None else (values.strip("*") or "text").split("|")
        flag = our_flag(self.asked.flag)
        if flag is None or flag.values == "on, off":
            return [""]
        if self.answer.startswith("no effect"):
            return [flag.default]
        is_number = re.fullmatch(r"[\d.e+-]+", self.asked.default)
        return [EXAMPLES.get(flag.name) or (self.asked.default if is_number else BY_TYPE[flag.values])]


OURS = accepted_flags()


def our_flag(name: str) -> Flag | None:
    return OURS.get(name) or OURS.get("--" + name.removeprefix("--no-"))


def rows_of(page: str) -> list[Row]:
    by_name = {flag.flag: flag for flag in megatron_flags()}
    found = re.findall(r"^\| `(--[\w-]+)` \| [^|]* \| (.*) \|$", page, re.MULTILINE)
    return [Row(by_name[name], answer) for name, answer in found]


ROWS = rows_of(PAGE.read_text(encoding="utf-8"))


Given = tuple[str, str]
"""A flag and its value."""


def accept(given: Sequence[Given], beside: str = "") -> RunConfig:
    """Parse and check a run with these flags; raises ConfigError where one is refused."""
    removed = {word[:-1] for word in beside.split() if word.endswith("=")} | {flag for flag, _ in given}
    arguments = [word for item in RUN.items() if item[0] not in removed for word in item if word]
    arguments += [word for word in beside.split() if not word.endswith("=")]
    for flag, value in given:
        arguments += [flag, *(value.split() if flag in SEVERAL_WORDS else [value] * bool(value))]
    config = parse_command_line(arguments)
    check_run(config, RANKS)
    return config


def needs_of(flag: str, value: str) -> str | None:
    family = "-".join(flag.split("-")[:3]) + "-"  # --moe-
    known = (NEEDS[name] for name in (f"{flag} {value}", flag, family) if name in NEEDS)
    return next(known, "" if flag in ALONE else None)


def value_of(config: RunConfig, flag: str) -> Any:
    """What the parser made of a flag; the negation for ``--no-``."""
    ours = our_flag(flag)
    assert ours is not None
    name = ours.name[2:].replace("-", "_")
    groups = [getattr(config, group.name) for group in fields(RunConfig)]
    value = next(getattr(group, name) for group in groups if hasattr(group, name))
    return not value if ours.name != flag else value


def is_same(found: Any, value: str) -> bool:
    if isinstance(found, bool):
        return found is (value in ("", "True"))
    if isinstance(found, tuple):
        return [str(one) for one in found] == value.split()
    return str(found) == value or float(found) == float(value)


def test_every_row_is_read() -> None:
    assert [row.asked.flag for row in ROWS] == [flag.flag for flag in megatron_flags()]


def test_a_row_excludes_only_values_that_are_documented() -> None:
    for row in ROWS:
        assert set(row.refused_values) <= set(row.values), row


ACCEPTED = [
    [(row.asked.flag, value) for value in row.values if value not in row.refused_values]
    for row in ROWS
    if not row.is_refused
]
IN_NEED = [given for values in ACCEPTED for given in values if needs_of(*given) is not None]
# Parsing takes a tenth of a second, so flags that need nothing go together: the first line has the first value of each.
LINES = [[given for given in line if given is not None and needs_of(*given) is None] for line in zip_longest(*ACCEPTED)]


def assert_taken(config: RunConfig, given: Iterable[Given]) -> None:
    for flag, value in given:
        if flag in NO_EFFECT:
            continue  # tests/config/test_command_line.py shows that these change nothing.
        found = value_of(config, flag)
        assert is_same(found, value), f"{flag} {value} became {found!r}"


@pytest.mark.parametrize("line", LINES, ids=len)
def test_flags_that_need_no_other_are_accepted_with_the_values_of_their_rows(line: list[Given]) -> None:
    assert_taken(accept(line), line)


@pytest.mark.parametrize(("flag", "value"), IN_NEED)
def test_a_flag_is_accepted_beside_what_it_needs(flag: str, value: str) -> None:
    assert_taken(accept([(flag, value)], needs_of(flag, value) or ""), [(flag, value)])


# Rows of NOT_SUPPORTED are that dictionary; tests/config/test_command_line.py shows that the parser refuses its flags.
REFUSED = [
    (row.asked.flag, value)
    for row in ROWS
    if row.asked.flag not in NOT_SUPPORTED
    for value in (row.values if row.is_refused else row.refused_values)
]


@pytest.mark.parametrize(("flag", "value"), REFUSED)
def test_what_a_row_calls_refused_is_refused_by_name(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{flag}(?![\w-])"):
        accept([(flag, value)], needs_of(flag, value) or "")

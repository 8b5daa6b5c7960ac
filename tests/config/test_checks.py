"""Every refusal is reached, names flags that exist, and says what to do; good combinations pass."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import NoneType, TracebackType
from typing import get_args, get_type_hints

import pytest

import megatron
from megatron.config.checks import check_resolved_architecture, check_run
from megatron.config.command_line import CommandLine, parse_command_line
from megatron.config.megatron_lm import NO_EFFECT, remedy_of
from megatron.config.model import preset
from megatron.config.run_parser import RUN_PARSER
from megatron.errors import ConfigError
from megatron.flags import flag_of
from megatron.schedules.catalog import SCHEDULES
from tests.messages import assert_helpful, assert_names

GOOD = "--model tiny --mock-data --vocab-size 1000 --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
UNSIZED = GOOD.replace("--model tiny ", "")
EXPERTS = f"{GOOD} --num-experts 8"
SIGMOID = f"{EXPERTS} --moe-router-score-function sigmoid"
ENGINE = f"{GOOD} --transformer-impl transformer_engine"
YARN = "--position-embedding-type yarn --yarn-rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64"
FULL = "--recompute-granularity full"
COMMANDS = {
    "GOOD": GOOD,
    "CORPUS": GOOD.replace("--mock-data", "--tokenizer-type NullTokenizer"),
    "SAMPLES": GOOD.replace("--train-iters 10", "--train-samples 1000"),
    "STAGES": f"{GOOD} --num-layers 8 --pipeline-model-parallel-size 2",
    "UNSIZED": UNSIZED,
    "UNKNOWN": f"{UNSIZED} --load run --use-checkpoint-args",
    "MUON": f"{GOOD} --optimizer muon",
    "YARN": f"{GOOD} {YARN}",
    "FP8": f"{GOOD} --bf16 --fp8-format hybrid",
    "BLOCKS": f"{GOOD} --bf16 --fp8-format e4m3 --fp8-recipe blockwise --kv-channels 32",
    "ENGINE": ENGINE,
    "OVERLAP": f"{ENGINE} --tp-comm-overlap --sequence-parallel",
    "EXPERTS": EXPERTS,
    "SIGMOID": SIGMOID,
    "GROUPS": f"{SIGMOID} --moe-router-num-groups 4 --moe-router-group-topk",
    "BARE": "",
}
"""What a row can begin with; it begins with GOOD unless it says so."""

ABBREVIATIONS = {
    **COMMANDS,
    "FULL": FULL,
    "UNIFORM": f"{FULL} --recompute-method uniform --recompute-num-layers",
    "SELECTIVE": "--recompute-granularity selective --recompute-modules",
    "SAVES": "--save run --save-interval 10",
    "TE": "--transformer-impl transformer_engine",
    "TP": "--tensor-model-parallel-size",
    "PP": "--pipeline-model-parallel-size",
    "CP": "--context-parallel-size",
    "EP": "--expert-model-parallel-size",
    "ETP": "--expert-tensor-parallel-size",
    "SP": "--sequence-parallel",
    "LAYOUT": "--pipeline-model-parallel-layout",
    "LOSS": "--moe-router-load-balancing-type",
}


def rows_of(name: str) -> Iterator[tuple[str, int, str]]:
    """The rows of a table, ``[processes: ]arguments[ -> named]``: arguments, number of processes (1 unless it is
    given), and the flags, values and figures that the message must name, comma-separated. An indented line continues
    the last one. ``{a / b}`` makes a row of each alternative, the same in all braces of the line; ``{}`` stands for the
    first braces."""
    text = re.sub(r"\n +", " ", Path(__file__).with_name(name).read_text())
    for line in text.splitlines():
        if line.startswith("# "):
            continue
        first, *_ = [*re.findall(r"{.+?}", line), ""]
        line = line.replace("{}", first)
        for number in range(max((braces.count(" / ") for braces in re.findall(r"{.*?}", line)), default=0) + 1):
            row = re.sub(r"{(.*?)}", lambda braces, at=number: braces[1].split(" / ")[at], line)  # type: ignore[misc]
            words = re.fullmatch(r"(?:(\d+): )?(.*?)(?: -> (.*))?", row)
            assert words is not None
            processes, arguments, named = words.groups(default="")
            if arguments.split(" ")[0] not in COMMANDS:
                arguments = f"GOOD {arguments}"
            yield expanded(arguments), int(processes or 1), expanded(named)


def expanded(text: str) -> str:
    """``text`` without abbreviations."""
    return re.sub(r"\b[A-Z][A-Z0-9]+\b", lambda word: ABBREVIATIONS.get(word[0], word[0]), text).strip()


BAD = list(rows_of("refused_flags.txt"))
GOOD_ROWS = [(arguments, processes) for arguments, processes, _ in rows_of("accepted_flags.txt")]
GOOD_ROWS += [(f"{GOOD} --pipeline-schedule {schedule} --no-overlap-p2p-communication", 1) for schedule in SCHEDULES]
GOOD_ROWS += [
    (expanded(f"STAGES --pipeline-schedule {schedule}"), 2) for schedule in SCHEDULES if schedule != "interleaved"
]

# --- bounds of numbers ---------------------------------------------------------------------------------------

BOUNDS = {
    "be at least 1": (("0",), "1"),
    "be finite and not negative": (("-1", "nan"), "0"),
    "be positive and finite": (("0", "nan"), "0.5"),
    "be at least 0 and below 1": (("1.0", "-0.1"), "0"),
    "be from 0 to 1": (("1.1", "nan"), "1"),
}
"""Values outside of a bound, and a value inside; all of them exclude -1."""

BOUND_OF_FLAG = {
    flag: bound
    for line in re.sub(r"\n +", " ", Path(__file__).with_name("bounds_of_flags.txt").read_text()).splitlines()
    for bound, _, flags in [line.partition(": ")]
    if not line.startswith("#")
    for flag in flags.split()
}
"""A bound that changes in the code must be changed there, too."""

OTHER_NUMBERS = """
    spike-window min-lr ckpt-step straggler-threshold profile-step-end rotary-percent hidden-dropout
    attention-dropout
"""
"""The bounds of these are rows of the table, because they depend on other flags."""


def flags_with_numbers() -> Iterator[tuple[str, bool]]:
    """All flags whose value is one number, and whether it is an integer."""
    config = parse_command_line(GOOD.split())
    for group in (getattr(config, field.name) for field in fields(config)):
        for name, hint in get_type_hints(type(group)).items():
            types = {*(get_args(hint) or (hint,))} - {NoneType}
            if types and types <= {int, float}:
                yield flag_of(name), types == {int}


def is_other(flag: str) -> bool:
    return flag.removeprefix("--") in OTHER_NUMBERS.split()


def test_every_number_stands_once_in_a_table() -> None:
    listed = [f"--{name}" for name in (*BOUND_OF_FLAG, *OTHER_NUMBERS.split())]
    assert sorted(listed) == sorted(flag for flag, _ in flags_with_numbers())


@pytest.mark.parametrize(("flag", "is_integer"), [one for one in flags_with_numbers() if not is_other(one[0])])
def test_a_number_outside_of_its_bound_is_refused_by_name_and_one_inside_is_not(flag: str, is_integer: bool) -> None:
    bound = re.search(rf"{flag} -1(\.0)? must ([^.]*)\.", str(refuse(f"{GOOD} {flag} -1", 1)))
    assert bound is not None, "the number has no bound"
    assert bound[2] == BOUND_OF_FLAG[flag.removeprefix("--")]
    outside, inside = BOUNDS[bound[2]]
    for value in outside:
        if not (is_integer and value == "nan"):
            message = str(refuse(f"{GOOD} {flag} {value}", 1))
            assert_helpful(message, f"{flag} {value if is_integer else float(value)}")
            assert re.search(rf"{flag} {value}(\.0)? must {bound[2]}\.", message), message
    try:
        check_run(parse_command_line(f"{GOOD} {flag} {inside}".split()), 1)
    except ConfigError as error:
        # It may need another flag.
        assert not re.search(rf"{flag} \S+ must", str(error)), error


# --- other refusals ------------------------------------------------------------------------------------------


@cache
def refuse(arguments: str, world_size: int) -> ConfigError:
    """The refusal; the flag that comes last in ``arguments`` counts."""
    with pytest.raises(ConfigError) as raised:
        check_run(parse_command_line(shlex.split(arguments)), world_size)
    return raised.value


@pytest.mark.parametrize(("arguments", "world_size", "named"), BAD)
def test_a_bad_combination_is_refused_by_a_sentence_that_helps(arguments: str, world_size: int, named: str) -> None:
    message = str(refuse(arguments, world_size))
    assert_helpful(message, named)
    known = {*RUN_PARSER.flags, *("--no-" + name[2:] for name in RUN_PARSER.flags), "--sequence-length"}
    known |= {*NO_EFFECT, "--learning-rate", "--help"}
    for flag in set(re.findall(r"--[a-z][a-z0-9-]*", message)) - known:
        assert remedy_of(flag), f"the message names {flag}, which does not exist"


@pytest.mark.parametrize(
    "message",
    [
        "--lr 3 is wrong: lower it.",  # another value
        "--lr-decay 2 is wrong: lower it.",  # another flag
        "--lr 2 is wrong.",  # no remedy
        "--lr 2 is wrong: it is high.",
        "--lr 2 is wrong. It is high: lower it.",
        "--lr 2 is wrong: lower it",
    ],
)
def test_a_message_that_does_not_help_is_noticed(message: str) -> None:
    assert_helpful("--lr 2 is wrong: lower it.", "--lr 2")
    with pytest.raises(AssertionError):
        assert_helpful(message, "--lr 2")


def test_following_the_sentence_on_wsd_helps_a_run_counted_in_samples() -> None:
    assert_names(str(refuse(expanded("SAMPLES --lr-decay-style WSD"), 1)), "--lr-wsd-decay-samples")


def places_of(error: ConfigError) -> Iterator[tuple[Path, int]]:
    """Where the error, or those that it collects, were raised."""
    for one in error.causes or [error]:
        yield raised_at(one.__traceback__)


def raised_at(traceback: TracebackType | None) -> tuple[Path, int]:
    """(file, line) of the innermost frame."""
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return Path(traceback.tb_frame.f_code.co_filename), traceback.tb_lineno


def test_every_refusal_of_the_flag_groups_is_in_the_table() -> None:
    (package,) = megatron.__path__
    modules = [Path(package, name) for name in ("urls.py", "flags.py", "schedules/stages.py", "command_line/words.py")]
    modules += Path(package, "update_rules").glob("[!r]*.py")
    # test_fault_grammar.py has the table of --inject-fault, test_run_yaml.py and test_megatron_recipes.py of files;
    # tests/inference of the flags of tools that use a model.
    others: tuple[str, ...] = ("faults.py", "recipes.py", "inference.py", "run_yaml.py")
    others += tuple(file.name for file in Path(package, "config/bash").iterdir())
    modules += (file for file in sorted(Path(package, "config").rglob("*.py")) if file.name not in others)
    trees = {file: ast.parse(file.read_text()) for file in modules}
    # Of a writer's file, the check of its flags; what it raises when it opens depends on files and packages.
    trees |= {
        file: ast.Module([node for node in ast.walk(tree) if getattr(node, "name", "") == "check"], [])  # type: ignore[misc]
        for file in sorted(Path(package, "metrics").glob("*.py"))
        for tree in [ast.parse(file.read_text())]
    }
    reached = {place for arguments, world_size, _ in BAD for place in places_of(refuse(arguments, world_size))}
    missed = [
        f"{file.name}:{node.lineno}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and node.exc is not None
        # An error that collects others, and the end of --help.
        and ast.unparse(node.exc).partition("(")[0] not in ("ConfigError.of", "SystemExit")
        and not any((file, line) in reached for line in range(node.lineno, (node.end_lineno or 0) + 1))
    ]
    assert not missed, f"no row of the table reaches {missed}"


@pytest.mark.parametrize(("arguments", "world_size"), GOOD_ROWS)
def test_a_good_combination_passes(arguments: str, world_size: int) -> None:
    check_run(parse_command_line(arguments.split()), world_size)


def test_an_architecture_that_came_later_is_checked_like_one_of_the_flags() -> None:
    arguments = expanded("UNKNOWN TP 8").split()
    for defaults, named in (
        (replace(preset("tiny"), num_layers=None), "--num-layers"),
        (preset("tiny"), "--num-query-groups 4, --tensor-model-parallel-size 8"),
    ):
        config = CommandLine.of(arguments).over_model("a checkpoint", defaults)
        check_run(config, 8)
        with pytest.raises(ConfigError) as raised:
            check_resolved_architecture(config, 8)
        assert_helpful(str(raised.value), named)
    check_resolved_architecture(CommandLine.of(arguments).over_model("a checkpoint", preset("llama3-8b")), 8)


def test_buckets_are_cut_where_the_reduction_overlaps_or_where_asked() -> None:
    def sizes(*arguments: str) -> list[int | None]:
        return [parse_command_line(arguments).parallel.bucket_size(ranks, 1000) for ranks in (1, 40, 64)]

    assert sizes() == [None, None, None]
    assert sizes("--overlap-grad-reduce") == [40_000_000, 40_000_000, 64_000_000]
    assert sizes("--ddp-bucket-size", "1000") == [1000, 1000, 1000]
    assert sizes("--ddp-num-buckets", "3") == [334, 334, 334]
    assert sizes("--ddp-bucket-size", "1000", "--overlap-grad-reduce") == [1000, 1000, 1000]


def test_sizes_left_out_follow_from_the_others() -> None:
    config = parse_command_line(f"{UNSIZED} --num-layers 2 --hidden-size 4096 --num-attention-heads 32".split())
    model = config.model.resolve(vocab_size=1000, tensor_parallel_size=2, seq_length=64)
    assert model.ffn_hidden_size == int(4096 * 4 * 2 / 3 / 64) * 64 == 10880
    assert (model.num_query_groups, model.kv_channels, model.max_position_embeddings) == (32, 128, 64)
    assert (model.vocab_size, model.padded_vocab_size) == (1000, 1024)
    assert (model.query_size, model.key_value_size) == (4096, 4096)

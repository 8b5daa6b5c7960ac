"""The command line: help without torch, every flag explained, mistakes answered by the way out, recipes accepted."""

import inspect
import re
import shlex
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest

from megatron.command_line.words import COMMAND_LINE
from megatron.commands.pretrain_llama import log_flags, main
from megatron.config.checks import check_run
from megatron.config.command_line import CommandLine, ParsedLine, parse_command_line
from megatron.config.compatibility import DESCRIPTIVE
from megatron.config.megatron_lm import NO_EFFECT, NOT_SUPPORTED_VALUES, REFUSED, remedy_of
from megatron.config.model import ModelConfig, preset
from megatron.config.run import RunConfig
from megatron.config.run_parser import RUN_PARSER, SYNONYMS
from megatron.config.training import TrainingConfig
from megatron.errors import ConfigError
from tests.end_to_end.megatron_recipe import recipe
from tests.end_to_end.run_process import run_python

SCRIPT = Path(__file__).parents[2] / "pretrain_llama.py"
GROUPS = [type(getattr(RunConfig(), field.name)) for field in fields(RunConfig)]


RUN = "--model tiny --mock-data --vocab-size 100 --seq-length 64 --micro-batch-size 2 --train-iters 1 --lr 1e-3"


def refusal(*arguments: str) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_command_line(arguments)
    return str(raised.value)


def parse_line(words: Sequence[str]) -> ParsedLine:
    return CommandLine.of(words).parse()


def over(words: Sequence[str], defaults: ModelConfig) -> ModelConfig:
    return CommandLine.of(words).over_model("a checkpoint", defaults).model


# Help


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "exit_code"), [(["--help"], 0), (["--model", "tiny"], 2)], ids=["help", "a refused combination"]
)
def test_flags_are_explained_without_importing_torch(arguments: list[str], exit_code: int) -> None:
    finished = run_python("-X", "importtime", str(SCRIPT), *arguments)
    assert finished.returncode == exit_code
    lines = [line for line in finished.stderr.splitlines() if line.startswith("import time")]
    modules = {line.rpartition("|")[2].strip() for line in lines}
    assert "megatron.config.run" in modules, "the trace shows nothing"
    assert not {name for name in modules if name.partition(".")[0] in ("torch", "numpy", "transformers")}


@pytest.mark.processes
def test_help_shows_every_flag_with_its_docstring() -> None:
    printed = run_python(str(SCRIPT), "--help", "all", COLUMNS="100").stdout
    shown = " ".join(printed.split())
    for flag in RUN_PARSER.flags:
        assert re.search(rf"^  {flag}( |$)", printed, re.MULTILINE), f"{flag} is not in --help all"
    for group in GROUPS:
        source = inspect.getsource(group)
        for text in re.findall(r'^    """(.*?)"""$', source, re.DOTALL | re.MULTILINE)[1:]:
            first_words = " ".join(text.split()[:4])
            assert first_words in shown, f"the help lacks {first_words!r}"


def test_no_two_groups_have_a_flag_of_the_same_name() -> None:
    names = [field.name for group in GROUPS for field in fields(group)]
    assert len(names) == len(set(names)) > 300


# Mistakes


UNKNOWN = "is not a flag of pretrain_llama.py: did you mean"
NO_VALUE = "which a switch does not take: write"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        # An unknown flag is answered with the nearest one, also of another program; one like no other with the help.
        ("--micro-batch 3", f"--micro-batch {UNKNOWN} --micro-batch-size?"),
        ("--tensor-parallel-size 2", f"--tensor-parallel-size {UNKNOWN} --tensor-model-parallel-size?"),
        ("--seq-lenght=64", f"--seq-lenght {UNKNOWN} --seq-length?"),
        ("--num_layer 3", f"--num-layer {UNKNOWN} --num-layers?"),
        ("--model tiny --no-save-optimizer", f"--no-save-optimizer {UNKNOWN} --no-save-optim?"),
        ("--no-progress-bar", f"--no-progress-bar {UNKNOWN} --progress-bar?"),
        ("--learning-rate 3", "did you mean --lr?"),
        ("--tp 3", "did you mean --tensor-model-parallel-size?"),
        ("--max_steps 3", "did you mean --train-iters?"),
        ("--fp8 3", "did you mean --fp8-format?"),
        ("--adam-betas 3", "did you mean --adam-beta1 or --adam-beta2?"),
        ("--frobnicate 3", "--frobnicate is not a flag of pretrain_llama.py: see --help."),
        # A switch with a value is answered with its spelling.
        ("--bf16 true", f"{NO_VALUE} --bf16."),
        ("--bf16=True", f"{NO_VALUE} --bf16."),
        ("--bf16 False", f"{NO_VALUE} --no-bf16."),
        ("--no-save-optim no", f"{NO_VALUE} --save-optim."),
        ("--no-save-optim on", f"{NO_VALUE} --no-save-optim."),
        # An unknown value is answered with the nearest one; one like no other with all.
        ("--model Llama3-8B", "--model 'Llama3-8B' is unknown: did you mean llama3-8b?"),
        ("--model llama-3.1-70b", "--model 'llama-3.1-70b' is unknown: did you mean llama3.1-70b?"),
        ("--lr-decay-style Cosine", "--lr-decay-style 'Cosine' is unknown: did you mean cosine?"),
        ("--optimizer AdamW", "is unknown: did you mean adam, whose weight decay is decoupled as AdamW's?"),
        ("--optimizer lion", "--optimizer 'lion' is unknown: use adam, muon or sgd."),
    ],
)
def test_a_mistake_is_answered_with_what_was_meant(words: str, sentence: str) -> None:
    assert refusal(*words.split()).endswith(sentence)


@pytest.mark.parametrize("remedy", REFUSED)
def test_a_megatron_flag_that_is_not_supported_says_so_and_what_to_do(remedy: str) -> None:
    for pattern in REFUSED[remedy].split():
        flag = pattern.replace("*", "x")
        expected = f"{flag} of Megatron-LM is not supported: {remedy}"
        assert refusal("--model", "tiny", flag) == refusal("--model", "tiny", flag, "7") == expected
    assert refusal(flag.replace("-", "_").replace("__", "--", 1), "7") == refusal(f"{flag}=7") == expected


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in NOT_SUPPORTED_VALUES.items() for value in values]
)
def test_a_megatron_value_that_is_not_supported_says_so_and_what_to_do(flag: str, value: str) -> None:
    expected = f"{flag} {value} of Megatron-LM is not supported: {NOT_SUPPORTED_VALUES[flag][value]}"
    assert refusal("--model", "tiny-moe", flag, value) == expected
    assert refusal(f"{flag.replace('-', '_').replace('__', '--', 1)}={value}") == expected
    # A value of another flag is no reason.
    assert refusal("--run-dir", value, flag, "other").startswith(f"{flag} 'other' is unknown: use ")


PARSER = Path(__file__).parent / "recipes/megatron_lm_parser.txt"
"""The names of all flags of Megatron-LM's parser at d98e8a6, August 2026."""


def test_every_flag_of_the_parser_of_megatron_has_an_answer() -> None:
    names = PARSER.read_text().split()
    known = {*RUN_PARSER.spellings, *NO_EFFECT, *(f"--{name}" for name in SYNONYMS), "--help", "-h"}
    assert len(names) > 840
    assert not [name for name in names if name not in known and remedy_of(name) is None]


def test_no_supported_flag_is_called_unsupported_and_remedies_name_real_flags() -> None:
    known = {*RUN_PARSER.flags, *("--no-" + name[2:] for name in RUN_PARSER.flags)}
    refused = {pattern for patterns in REFUSED.values() for pattern in patterns.split()}
    assert not known & NO_EFFECT.keys() and not refused & (known | NO_EFFECT.keys())
    for remedy in {*REFUSED, *(one.reason for one in NO_EFFECT.values())}:
        assert set(re.findall(r"--[a-z][a-z0-9-]*", remedy)) <= known, remedy


def test_only_one_rank_speaks(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        for arguments in (["--frobnicate"], ["--lr", "fast"], ["--model", "llama9"]):
            assert main(arguments) == 2
            assert capfd.readouterr().err.startswith("ERROR: ") is (rank == "0")
        with pytest.raises(SystemExit):
            main(["--help"])
        output = capfd.readouterr()
        assert bool(output.out + output.err) is (rank == "0")


def test_everything_that_is_wrong_is_said_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "--model tiny --mock-data --seq-length 8k --lr fast --learning-rate 1 --spec a b --optimizer soap "
        "--hidden-dropout 0.1 --tensor-model-parallel-size 3 --async-save --no-swiglu"
    )
    assert main(arguments.split()) == 2
    first, *others = capfd.readouterr().err.splitlines()
    assert first == f"ERROR: {len(others)} corrections are needed:"
    named = [
        "--seq-length needs a whole number",
        "--lr needs a number",
        "--learning-rate is not a flag",
        "--spec of Megatron-LM is not supported",
        "--optimizer 'soap' is unknown",
        "--async-save needs --save",
        "--no-swiglu is not supported",
        "--hidden-dropout 0.1 is not supported",
        "--micro-batch-size is missing",
        "--train-iters (or --train-samples) is missing",
        "1 processes are not a multiple of --tensor-model-parallel-size 3",
        "--mock-data without a tokenizer needs a vocabulary size",
    ]
    for sentence in named:
        assert sum(line.startswith(f"- {sentence}") for line in others) == 1, (sentence, others)
    # Flags with a mistake are not also called missing, and nothing is said twice.
    assert len(others) == len(set(others)) == len(named), others


def test_a_first_start_names_all_flags_that_are_missing() -> None:
    with pytest.raises(ConfigError) as raised:
        check_run(parse_command_line([]), 1)
    for flag in ("--seq-length", "--micro-batch-size", "--lr", "--train-iters", "--num-layers", "--hidden-size"):
        assert sum(flag in sentence.split()[0] for sentence in raised.value.sentences) == 1, raised.value
    assert "No corpus: set --data-path to a tokenized corpus, or add --mock-data." in raised.value.sentences


def test_synonyms_are_no_flags_and_name_flags() -> None:
    for name, flag in SYNONYMS.items():
        assert f"--{name}" not in RUN_PARSER.spellings, name
        assert set(flag.split(" or ")) <= {*RUN_PARSER.spellings}, flag


# Flags without effect


def given(flag: str) -> list[str]:
    """The words that set a flag of ``NO_EFFECT``."""
    values = NO_EFFECT[flag].values
    return [flag] if values is None else [flag, (values or "value").split("|")[0].replace("*", "a")]


def test_flags_without_effect_are_accepted_and_listed() -> None:
    words = [word for flag in NO_EFFECT for word in given(flag)]
    line = parse_line(RUN.split() + words)
    assert not line.mistakes
    assert line.config == parse_command_line(RUN.split())
    assert list(line.no_effect) == [" ".join(given(flag)) for flag in NO_EFFECT]


def test_what_describes_the_model_is_not_listed_and_what_is_machinery_is() -> None:
    words = "--swiglu --normalization RMSNorm --use-mcore-models --ckpt-format torch --bf16"
    assert parse_line(words.split()).no_effect == ("--use-mcore-models", "--ckpt-format torch")
    assert {f"--{name.replace('_', '-')}" for name in DESCRIPTIVE} <= set(RUN_PARSER.flags)
    shards = "--expert-tensor-parallel-size 4"
    assert parse_line(shards.split()).no_effect == ("--expert-tensor-parallel-size",)
    assert not parse_line(f"{shards} --num-experts 8".split()).no_effect


TWO_FILES = "--data-path corpus --vocab-file vocab.json --merge-file merges.txt"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (TWO_FILES, "GPT2BPETokenizer"),
        (f"{TWO_FILES} --mock-data", None),
        (f"{TWO_FILES} --tokenizer-model tokenizer.model", None),
        (f"{TWO_FILES} --tokenizer-type NullTokenizer", "NullTokenizer"),
        ("--data-path corpus --vocab-file vocab.json", None),
    ],
)
def test_two_files_of_gpt2_name_their_tokenizer_and_the_log_says_so(
    words: str, kind: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_command_line(words.split()).tokenizer.tokenizer_type == kind
    log_flags(parse_line(words.split()))
    said = "> --tokenizer-type GPT2BPETokenizer: --vocab-file and --merge-file are its files\n"
    assert (said in capsys.readouterr().out) is (kind == "GPT2BPETokenizer")


# Where values come from


def test_every_value_says_where_it_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "base.yaml"
    file.write_text("lr: 3e-4\nbf16: true\nnum-layers: 5\n")
    words = f"--seq-length 64 --config {file} --model llama3-8b --lr 1e-3 --no_save_optim".split()
    line = CommandLine.of(words).with_defaults(
        RunConfig(model=ModelConfig(qk_layernorm=True), training=TrainingConfig(seed=7)), "the checkpoint"
    )
    parsed = line.over(["--kv-channels", "64", "--seq-length", "32"], "--load-hf here").parse()
    assert not parsed.mistakes
    assert (parsed.config.data.seq_length, parsed.config.learning_rate.lr, parsed.config.training.seed) == (64, 1e-3, 7)
    assert parsed.config.model == replace(preset("llama3-8b"), num_layers=5, kv_channels=64)
    typed = dict.fromkeys(("seq_length", "model", "lr", "save_optim"), COMMAND_LINE)
    of_preset = {field.name for field in fields(ModelConfig) if getattr(preset("llama3-8b"), field.name)} - {"model"}
    found = dict(parsed.origins)
    assert typed.items() <= found.items()
    assert (found["bf16"], found["num_layers"]) == (f"{file}, line 2", f"{file}, line 3")
    assert (found["kv_channels"], found["seed"]) == ("--load-hf here", "the checkpoint")
    assert found["hidden_size"] == found["num_query_groups"] == "--model llama3-8b"
    assert set(found) <= {*typed, *of_preset, "bf16", "num_layers", "kv_channels", "seed", "qk_layernorm"}
    assert "4 from the command line" in parsed.describe_origins()
    assert f"2 from {file}" in parsed.describe_origins()
    log_flags(parsed)
    assert capsys.readouterr().out.startswith(f"> flags: {parsed.describe_origins()} (--explain-flags lists them)\n")
    assert not parse_line(["--lr", "1"]).describe_origins()  # nothing to tell apart


def test_explain_flags_without_a_recipe_lists_where_values_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "base.yaml"
    file.write_text("data-path: [0.7, a b, 0.3, c]\n")
    assert main(["--explain-flags", "--lr", "1e-3", "--no-save-optim", "--config", str(file), "--model", "tiny"]) == 0
    rows = dict(line.rsplit("  ", 1) for line in capsys.readouterr().out.splitlines())
    found = {words.strip(): origin for words, origin in rows.items()}
    assert found["--data-path 0.7 'a b' 0.3 c"] == f"{file}, line 1"
    assert found["--lr 0.001"] == found["--no-save-optim"] == found["--model tiny"] == "the command line"
    assert found["--num-layers 4"] == "--model tiny"
    assert main(["--explain-flags", "--lrr", "1"]) == 2


# Presets and spellings


def test_flags_that_are_not_given_take_other_defaults_where_there_are_some() -> None:
    """Those of a checkpoint, for which a flag that is given goes, even one that says what the class has by default."""
    defaults = ModelConfig(num_layers=3, rotary_base=10000, untie_embeddings_and_output_weights=False)
    assert over([], defaults) == defaults
    given = ["--rotary-base", "500000", "--untie-embeddings-and-output-weights"]
    assert over(given, defaults) == ModelConfig(num_layers=3)
    assert over(["--model", "tiny"], defaults) == preset("tiny")
    assert parse_command_line([]) == RunConfig()


def test_flags_override_the_preset_wherever_they_stand_and_the_last_preset_wins() -> None:
    for words, name, wanted in (
        ("--num_layers=2 --model=llama3-8b", "num_layers", 2),
        ("--model llama3.1-8b", "use_rope_scaling", True),
        ("--model llama3.1-8b --no-use-rope-scaling", "use_rope_scaling", False),
        ("--model llama3.2-1b", "untie_embeddings_and_output_weights", False),
        ("--model llama3.2-1b --untie-embeddings-and-output-weights", "untie_embeddings_and_output_weights", True),
    ):
        assert getattr(parse_command_line(words.split()).model, name) == wanted, words
    assert parse_command_line(["--model", "tiny", "--model", "llama3-70b"]).model == preset("llama3-70b")


WITHOUT_FUSION = (
    "--no-masked-softmax-fusion --no-bias-dropout-fusion --no-persist-layer-norm --no-rope-fusion "
    "--no-bias-swiglu-fusion --no-gradient-accumulation-fusion --cuda-graph-impl none"
)
RECIPE = [*recipe(Path("out")), "--tensor-model-parallel-size", "2", *WITHOUT_FUSION.split()]


def test_a_megatron_recipe_for_llama_3_8b_runs_unchanged() -> None:
    config = parse_command_line(RECIPE)
    check_run(config, 16)
    architecture = config.model.resolve(128256, tensor_parallel_size=2, seq_length=8192)
    assert architecture.num_parameters() == 8_030_261_248
    assert architecture.padded_vocab_size == 128256
    assert config.parallel.sharding_strategy == "optim"
    assert config.parallel.data_parallel_size(16) == 8
    assert config.optimizer.adam_beta2 == 0.95
    for operation, implementation in (("rope", "eager"), ("swiglu", "eager"), ("weight_gradient", "separate")):
        wanted = config.kernels.wanted(operation)
        assert wanted is not None and wanted.implementation == implementation
    assert config.kernels.wanted("rms_norm") is None


PIPELINE = """
    --model llama3.1-405b --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248
    --num-attention-heads 128 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8
    --num-layers-per-virtual-pipeline-stage 2 --microbatch-group-size-per-virtual-pipeline-stage 16
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --no-overlap-p2p-communication
    --overlap-grad-reduce --ddp-bucket-size 200000000
"""


def test_a_megatron_recipe_with_a_pipeline_runs_unchanged() -> None:
    config = parse_command_line([*RECIPE, *PIPELINE.split()])
    check_run(config, 1024)
    assert config.pipeline.num_chunks(126, 8) == 8
    assert config.pipeline.schedule(126, 8) == "interleaved"
    assert config.parallel.bucket_size(config.parallel.data_parallel_size(1024), 10**9) == 200_000_000


def test_the_first_run_on_a_gpu_node_has_good_flags() -> None:
    """tests/docs has the other flags and places that pages name."""
    page = (SCRIPT.parent / "docs/gpu_node.md").read_text(encoding="utf-8")
    command = re.search(r"pretrain_llama\.py \\\n(.*?)```", page, re.DOTALL)
    assert command is not None
    config = parse_command_line(shlex.split(command[1].replace("\\\n", " ")))
    check_run(config, 8)
    assert config.model.resolve(128256, 4, config.seq_length).num_parameters() == 8_030_261_248

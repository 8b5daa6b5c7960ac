"""Data of one's own: a module that the user names, a loader from Python, texts that are tokenized while training."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import megatron_llama as ml
from tests.end_to_end.run_process import (
    REPOSITORY,
    TINY_RUN,
    Corpus,
    Flags,
    FlagValue,
    assert_close,
    assert_same_tensors,
    call_training,
    checkpoint_of,
    computed,
    fork_training,
    losses,
    saving_in,
    words_of,
    write_documents,
)

EXAMPLE = f"{REPOSITORY / 'examples/data_module.py'}:build"


def flags(corpus: Corpus, **changes: FlagValue) -> list[str]:
    """Six iterations in fp64, with a thread that reads ahead."""
    tokenizer: Flags = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": corpus.tokenizer}
    run: Flags = {
        "train_iters": 6,
        "lr_decay_iters": 6,
        "global_batch_size": 4,
        "fp64": True,
        "num_workers": 2,
        "split": None,
    }
    return words_of({**TINY_RUN, **tokenizer, **run, **changes})


def module(folder: Path, text: str) -> str:
    """--data-module of a file with the function ``build``."""
    (folder / "module.py").write_text(text)
    return f"{folder / 'module.py'}:build"


COUNTING = """
class Loader:
    def __init__(self, context):
        self.context, self.count = context, 0

    def __next__(self):
        self.count += 1
        first = 31 * self.count + 77 * self.context.rank
        return [(first * place) % 300 for place in range(self.context.config.seq_length + 1)]

    def state_dict(self):
        return {"count": self.count, "rank": self.context.rank}

    def load_state_dict(self, state):
        assert state["rank"] == self.context.rank, state
        self.count = state["count"]


def build(context):
    return Loader(context) if context.split == "train" else None
"""


def resumed_and_straight(tmp_path: Path, run: Any, **changes: FlagValue) -> None:
    """Three iterations after a checkpoint are those of the run that saved it and went on, bit for bit; its loader has
    read ahead. ``run`` trains with flags."""
    straight, parted = tmp_path / "straight", tmp_path / "parted"
    run(**{**saving_in(straight), **changes, "save_interval": 3})
    run(**{**saving_in(parted), **changes, "load": straight, "ckpt_step": 3})
    found, wanted = (
        [line for line in computed(place / "metrics.jsonl") if line.get("iteration", 0) > 3]
        for place in (parted, straight)
    )
    assert len(wanted) >= 3 and found == wanted
    assert_same_tensors(checkpoint_of(parted, 6), checkpoint_of(straight, 6), ("model/", "optimizer/", "loader/"))


@pytest.mark.parametrize("kind", ["files", "object store", "stream"])
def test_a_run_on_texts_continues_bit_for_bit(corpus: Corpus, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        write_documents(folder / f"{number}.jsonl", documents=12, first=12 * number)
    path = f"dataset:{folder}" if kind == "stream" else str(folder)
    if kind == "object store":
        for file in folder.iterdir():
            with fsspec.open(f"memory://own_data/{file.name}", "wb") as stored:
                stored.write(file.read_bytes())
        path = "memory://own_data/*.jsonl"
    middle: Flags = {f"fim_{part}_token": token for part, token in zip(("prefix", "middle", "suffix"), "{}[")}
    changes: Flags = {"train_text_path": path, "fim_data": True, "eval_interval": 3, "eval_iters": 1, **middle}
    changes |= {"valid_text_path": path, "async_save": kind == "files"}
    resumed_and_straight(tmp_path, lambda **more: call_training(flags(corpus, **more)).succeeded(), **changes)


def test_ranks_continue_with_the_states_of_their_own(corpus: Corpus, tmp_path: Path) -> None:
    """The loader compares the rank. With another number of ranks it is refused, because it cannot divide states."""
    changes: Flags = {"data_module": module(tmp_path, COUNTING), "micro_batch_size": 1}
    resumed_and_straight(tmp_path, lambda **more: fork_training(flags(corpus, **more), 2).succeeded(), **changes)
    saved = saving_in(tmp_path / "parted")
    call_training(flags(corpus, **changes, **saved)).refusal(
        "has the loader's states of 2 data-parallel ranks, this run has 1, and the loader of --data-module",
        "has no redivide: use ranks and parallel sizes that give data-parallel size 2, define redivide",
    )
    others: Flags = {**changes, "data_module": EXAMPLE, "train_iters": 8}
    call_training(flags(corpus, **others, **saved)).refusal(
        "the state of a loader, and the loader of", "has no load_state_dict: begin these data"
    )
    call_training(
        flags(corpus, **others, **saved, new_data_stage="sums", override_opt_param_scheduler=True)
    ).succeeded()
    state: Flags = {"data_module": changes["data_module"], "train_iters": 10, "override_opt_param_scheduler": True}
    call_training(flags(corpus, **state, **saved)).refusal(
        "has no state, and the loader of --data-module", "needs one: begin these"
    )
    corpora: Flags = {"data_path": corpus.prefix, "train_iters": 10}
    call_training(flags(corpus, **corpora, **saved)).refusal(
        "in place of corpora: --data-module in the checkpoint, none now"
    )


def test_a_run_on_texts_changes_its_number_of_ranks(corpus: Corpus, tmp_path: Path) -> None:
    write_documents(tmp_path / "texts.jsonl", documents=12)
    changes: Flags = {
        "train_text_path": tmp_path / "texts.jsonl",
        "micro_batch_size": 1,
        "save_interval": 2,
        **saving_in(tmp_path / "run"),
    }
    call_training(flags(corpus, **changes, exit_interval=2)).succeeded()
    fork_training(flags(corpus, **changes, exit_interval=4), 2).succeeded()
    call_training(flags(corpus, **changes)).succeeded()
    assert len(losses(tmp_path / "run/metrics.jsonl")) == 6


def test_the_example_in_a_layout_is_the_example_in_one_process(corpus: Corpus, tmp_path: Path) -> None:
    changes: Flags = {"data_module": EXAMPLE, "eval_interval": 3, "eval_iters": 1, "rampup_batch_size": [2, 2, 4]}
    one, four = tmp_path / "one.jsonl", tmp_path / "four.jsonl"
    call_training(flags(corpus, **changes, metrics_jsonl=one)).succeeded()
    layout: Flags = {"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "micro_batch_size": 1}
    fork_training(flags(corpus, **changes, **layout, metrics_jsonl=four), 4).succeeded()
    assert_close(losses(four), losses(one), 1e-9)
    validation = [
        [line["validation_loss"] for line in computed(file) if "validation_loss" in line] for file in (one, four)
    ]
    assert len(validation[0]) == 2
    assert_close(validation[1], validation[0], 1e-9)


MISTAKES = {
    "x = 1": "has no function build: define it, or name another.",
    "def build(context): return [1]": "returned list, which has no __next__: return an iterator of samples.",
    "def build(context): return 1 / 0": "raised ZeroDivisionError division by zero (",
    "raise OSError('no such disk')": "raised OSError no such disk (",
    "def build(context): yield [1, 2]": "returned the sample int64[2]: return 33 token ids (--seq-length + 1), or a",
    "def build(context): yield [1 / 0] * 33": "raised ZeroDivisionError division by zero (",
    "def build(context): yield [9999] * 33": "has token id 9999, but the largest id of the tokenizer is 383",
    "def build(context): yield ([1] * 33, [1.0] * 33)": "returned the sample int64[33] and float64[33]: return 33",
    "def build(context): yield [1] * 33": "have ended: train for fewer iterations.",
    COUNTING.replace("load_state_dict", "load"): "with one of state_dict and load_state_dict: define both.",
    COUNTING.replace('{"count"', '{set: 1, "count"'): "state_dict of --data-module",
    COUNTING.replace("range(self.context.config.seq_length + 1)", "range(33)") + "#evaluates": "and --data-module",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_in_the_module_is_one_sentence(corpus: Corpus, tmp_path: Path, text: str) -> None:
    changes: Flags = {"eval_interval": 1, "eval_iters": 1} if "#evaluates" in text else {}
    outcome = call_training(flags(corpus, data_module=module(tmp_path, text), **changes))
    assert outcome.exit_code == 2
    outcome.refusal(MISTAKES[text])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_module": "missing.py:build"}, "--data-module missing.py:build: missing.py is not a file: name"),
        ({"data_module": "build"}, "--data-module build is not FILE.py:FUNCTION: name a file and a function."),
        ({"data_module": EXAMPLE, "mock_data": True}, "exclude each other: remove all but one of them."),
        ({"data_module": EXAMPLE, "sample_order": "extendable"}, "--sample-order orders the samples of corpora"),
        ({"mock_data": True, "fim_data": True}, "--fim-data needs --train-text-path: add it, or remove --fim-data."),
        ({"train_text_path": REPOSITORY / "README.md", "fim_data": True}, "--fim-prefix-token <fim_prefix> is not"),
        ({"train_text_path": "dataset:no/data"}, "The dataset no/data cannot be opened ("),
        ({"train_text_path": "no/texts"}, "no/texts does not exist or is not a file: check --train-text-path."),
        ({"data_module": EXAMPLE, "full_validation": True, "eval_interval": 1}, "--full-validation needs corpora"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_flags_is_one_sentence(corpus: Corpus, changes: dict[str, FlagValue], words: str) -> None:
    outcome = call_training(flags(corpus, **changes))
    assert outcome.exit_code == 2
    outcome.refusal(words)


def test_a_loader_from_python_is_that_of_the_command(corpus: Corpus, tmp_path: Path) -> None:
    """Also its evaluation of every checkpoint, with ``--skip-train``."""
    words = flags(corpus, eval_interval=10, eval_iters=2)
    metrics = tmp_path / "metrics.jsonl"
    call_training([*words, "--data-module", EXAMPLE, "--metrics-jsonl", str(metrics)]).succeeded()

    def build(context: ml.DataContext) -> Iterator[Any]:
        namespace: dict[str, Any] = {}
        exec((REPOSITORY / "examples/data_module.py").read_text(), namespace)
        return namespace["build"](context)

    with ml.Run.from_flags(words, parts=ml.RunParts(build_loader=build)) as run:
        assert [step.loss for step in run.steps()] == losses(metrics)
        first = run.evaluate().loss
        assert run.evaluate().loss == first
        run.save(tmp_path / "saved")
    words = [*words, "--load", str(tmp_path / "saved"), "--data-module", EXAMPLE]
    call_training([*words, "--skip-train", "--metrics-jsonl", str(tmp_path / "evaluated")]).succeeded()
    (record,) = [json.loads(line) for line in (tmp_path / "evaluated").read_text().splitlines()]
    assert record["validation_loss"] == first

"""Tasks of lm-eval on our models have the results that lm-eval finds for the same model by transformers."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.commands import evaluate as evaluate_tasks
from megatron.commands import generate_text
from megatron.commands.generate_text import GenerateConfig
from megatron.errors import ConfigError
from tests.end_to_end.run_process import fork_training

transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("lm_eval")
sampling_of: Any = import_module("megatron.inference.lm_eval_model").sampling_of

QUESTIONS = [
    {"question": "def add(a, b): return a", "choices": [" + b", " - b", " * c"], "answer": 0},
    {"question": "import", "choices": [" os", " sys", " numpy as np", " torch"], "answer": 3},
    {"question": "The sum of two and two is", "choices": [" four", " five"], "answer": 0},
    {"question": "for item in", "choices": [" items:", " range(10):"], "answer": 1},
] * 2
DATA = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
CHOICE = """
task: local_choice
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
num_fewshot: 1
fewshot_split: test
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXTS = """
task: local_texts
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}} {{{{choices | join(' ')}}}} {{{{question * 12}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
GENERATED = """
task: local_generated
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["e"], max_gen_toks: 12}}
metric_list: [{{metric: !function numbers_of_texts.number, aggregation: mean, higher_is_better: true}}]
"""
NUMBER = '''
def number(references, predictions):
    """A number that another text has another of."""
    return sum(place * ord(letter) for place, letter in enumerate(predictions[0], start=1))
'''
NAMES = ("local_choice", "local_texts", "local_generated")
LENGTH = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in Hugging Face's format with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([json.dumps(question) for question in QUESTIONS], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(
        directory
    )
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        eos_token_id=0,
        bos_token_id=None,
        initializer_range=0.3,
    )
    transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    data = directory / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, text in zip(NAMES, (CHOICE, TEXTS, GENERATED), strict=True):
        (directory / f"{name}.yaml").write_text((text + DATA).format(data=data))
    (directory / "numbers_of_texts.py").write_text(NUMBER)
    return directory


def words_of(model: Path, tasks: Path, out: Path) -> list[str]:
    flags = ["--load-hf", str(model), "--include-path", str(tasks), "--tasks", *NAMES]
    return [*flags, "--json", str(out)]


def ours(model: Path, tasks: Path, out: Path, *words: str) -> dict[str, dict[str, Any]]:
    """The results of the command in this process."""
    assert evaluate_tasks.main([*words_of(model, tasks, out), *words]) == 0
    results: dict[str, dict[str, Any]] = json.loads(out.read_text())["results"]
    return results


def numbers(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    return {
        f"{task} {name}": value
        for task, found in results.items()
        for name, value in found.items()
        if isinstance(value, int | float) and "stderr" not in name
    }


def test_results_are_those_of_transformers(
    model: Path, tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    found = numbers(ours(model, tasks, tmp_path / "results.json", "--batch-size", "3"))
    assert "|local_choice" in capsys.readouterr().out
    theirs = HFLM(str(model), device="cpu", dtype="float32", batch_size=2, max_length=LENGTH)
    wanted = numbers(
        simple_evaluate(
            theirs,
            tasks=[*NAMES],
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            bootstrap_iters=0,
            random_seed=1234,
            numpy_random_seed=1234,
            torch_random_seed=1234,
            fewshot_random_seed=1234,
        )["results"]
    )
    assert len([key for key in wanted if "sample" not in key]) >= 5
    assert found == pytest.approx(wanted, rel=1e-5)
    assert 0 < found["local_choice acc,none"] < 1


@pytest.mark.slow(reason="every rank imports lm-eval, ten seconds of computing")
def test_two_ranks_have_the_results_of_one(model: Path, tasks: Path, tmp_path: Path) -> None:
    alone = ours(model, tasks, tmp_path / "one.json", "--limit", "3")
    out = tmp_path / "two.json"
    words = [*words_of(model, tasks, out), "--limit", "3"]
    outcome = fork_training(words, 2, evaluate_tasks.main).succeeded()
    assert outcome.stdout.count("|local_choice") == 1
    assert numbers(json.loads(out.read_text())["results"]) == pytest.approx(numbers(alone), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(
            ["--tasks", "local_choice", "no_such"],
            "--tasks no_such: lm-eval has no such task",
            marks=pytest.mark.slow(reason="lm-eval reads thousands of files of tasks"),
        ),
        ([], "--tasks is missing"),
        (["--tasks", "a", "--include-path", "no/directory"], "--include-path no/directory is not a directory"),
        (["--tasks", "a", "--load", "b"], "Exactly one of --load and --load-hf is needed, and both are given"),
        (["--tasks", "a", "--ckpt-step", "3"], "--ckpt-step needs --load"),
        (["--tasks", "a", "--limit", "0"], "--limit 0"),
        (["--tasks", "a", "--json", "s3://b/c"], "--json s3://b/c"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], sentence: str, model: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    include = [] if "--include-path" in words else ["--include-path", str(tasks)]
    assert evaluate_tasks.main(["--load-hf", str(model), *include, *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ERROR:")]
    assert sentence in line


def test_a_setting_that_generation_lacks_is_refused() -> None:
    config, until = sampling_of({"until": "stop", "max_new_tokens": 5, "do_sample": True, "temperature": 0.5})
    assert (config.max_new_tokens, config.temperature, config.top_p, until) == (5, 0.5, 1.0, ["stop"])
    assert sampling_of({})[0].temperature == 0.0
    with pytest.raises(ConfigError, match=r"^A task asks for num_beams=4, which generation does not have"):
        sampling_of({"num_beams": 4})


def test_generation_reads_the_directory(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The greedy text of transformers, which ends at any eos_token_id of generation_config.json."""
    prompt, new = "def add(a, b): return a", 9
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    wanted = theirs.generate(ids, do_sample=False, max_new_tokens=new, eos_token_id=None)[0].tolist()
    assert len(set(wanted[ids.shape[1] :])) > 3
    config = GenerateConfig(load_hf=str(model), prompt=prompt, max_new_tokens=new, temperature=0.0)
    assert "".join(generate_text.generate(config)) == tokenizer.decode(wanted) + "\n"
    (last,) = (wanted[ids.shape[1] + 4],)
    assert last not in wanted[ids.shape[1] : ids.shape[1] + 4]
    ends = json.loads((model / "generation_config.json").read_text()) | {"eos_token_id": [0, last]}
    (model / "generation_config.json").write_text(json.dumps(ends))
    assert "".join(generate_text.generate(config)) == tokenizer.decode(wanted[: ids.shape[1] + 4]) + "\n"

"""The help and the refusals of the planner's commands, each a sentence, and a schedule do not import torch, which takes
seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

RUN_ALL = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "matplotlib"):
            raise AssertionError(f"{name} is imported")

from megatron_llama.commands import VERBS, run

sys.meta_path.insert(0, NoTorch())  # after megatron, which looks whether torch is installed
ended = []
for name, words in json.load(sys.stdin):
    verb = next(verb for verb in VERBS if verb.name == name)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        try:
            if verb.name == "train":
                from megatron.commands.pretrain_llama import main
                code = main(words)
            else:
                code = run(verb, words)
        except SystemExit as end:
            code = end.code
    ended.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(ended))
"""
JOB = "--seq-length 8192 --global-batch-size 128"
LLAMA = f"--model llama3.1-70b {JOB}"
PLAN = f"{LLAMA} --bf16 --plan --num-gpus 64"
COMMANDS = [
    ("plan", "--help", 0, "--global-batch-size"),
    ("plan", f"{LLAMA} --num-gpus 64 --cluster h300", 2, "There is no cluster h300"),
    ("plan", f"--model llama9 {JOB} --num-gpus 64", 2, "--model 'llama9' is unknown"),
    ("plan", f"{LLAMA} --num-gpus 64 --no-such-flag", 2, "--no-such-flag is not a flag"),
    ("plan", f"{LLAMA} --num-gpus 0", 2, "--num-gpus 0 must be at least 1"),
    ("plan", f"{LLAMA} --num-gpus 4 --tokens 0", 2, "--tokens 0.0 must be positive"),
    ("plan", f"{LLAMA} --num-gpus 4 --price-per-gpu-hour -1", 2, "--price-per-gpu-hour -1.0 must be finite"),
    ("plan", f"{LLAMA} --num-gpus 3", 2, "--num-gpus 3 has no layout"),
    ("plan", f"{LLAMA} --num-gpus 17", 2, "use 16 or 20 GPUs"),
    ("plan", f"{LLAMA} --num-gpus 64 --micro-batch-size 3", 2, "128 is not divisible by --micro-batch-size 3"),
    ("plan", f"{LLAMA} --num-gpus 64 --tensor-model-parallel-size 3", 2, "satisfies the flags: remove one"),
    ("plan", f"{LLAMA} --num-gpus 64 --num-distributed-optimizer-instances 7", 2, "7 does not divide the"),
    ("plan", f"{LLAMA} --num-gpus 64 --measured none.jsonl", 2, "--measured none.jsonl cannot be read"),
    ("plan", f"{LLAMA} --num-gpus 64 --fp8-format hybrid --fp8-recipe blockwise", 2, "blockwise is not supported by"),
    ("plan", f"--model llama3.1-405b {JOB} --num-gpus 16381", 2, "--num-gpus 16381 has no layout"),
    ("train", "--help", 0, "--help GROUP"),
    ("train", f"{PLAN} --plan-cluster h300", 2, "There is no cluster h300"),
    ("train", f"--model llama9 {JOB} --bf16 --plan --num-gpus 64", 2, "--model 'llama9' is unknown"),
    ("train", f"{PLAN} --no-such-flag", 2, "--no-such-flag is not a flag"),
    ("train", f"{LLAMA} --bf16 --plan", 2, "--plan needs --num-gpus"),
    ("train", f"{LLAMA} --bf16 --plan --num-gpus 17", 2, "use 16 or 20 GPUs"),
    ("train", f"{PLAN} --micro-batch-size 3", 2, "--global-batch-size 128 is not divisible by --micro-batch-size 3"),
    ("schedule", "--schedule zb-v --stages 2 --microbatches 4", 0, "stage 0  F0"),
    ("schedule", "--schedule 1f1b --stages 2 --microbatches 4 --virtual 2", 2, "1f1b runs one chunk per stage"),
    ("schedule", "--schedule 1f1b --stages 2 --microbatches 2 --send-time 1e308", 2, "--send-time 1e+308 is too long"),
    ("explore", "--help", 0, "--clusters"),
    ("explore", "--out a --models llama9", 2, "--models has llama9, which does not exist: use one or more of tiny"),
    ("explore", "--out a --precisions fp4", 2, "--precisions has fp4, which does not exist: use one or more of bf16"),
    ("explore", "--out a --clusters h100 gb200", 2, "--clusters h100 gb200 differ in what their layers launch"),
    ("explore", "--out a --clusters h300", 2, "There is no cluster h300"),
    ("explore", f"--out a --clusters {'n' * 300}", 2, "cannot be used (File name too long): correct the path."),
    ("train-tokenizer", "--input a --model-prefix b --vocab-size 0", 2, "--vocab-size 0 must be at least 256"),
    ("train-tokenizer", "--input a --model-prefix b --vocab-size 300 --num-threads 0", 2, "--num-threads 0 must be"),
    ("preprocess", "--input a --output-prefix b --workers 70000", 2, "--workers and --partitions must be at most"),
    ("simulate-run", "--help", 0, "--correlated-share"),
    ("simulate-run", "--gpus 64", 2, "The run has no end, or two: give either --days or --steps."),
    ("simulate-run", "--gpus 12 --days 1", 2, "--gpus 12 is no multiple of --gpus-per-node 8"),
    ("simulate-run", "--days 1 --correlated-share 1.5", 2, "--correlated-share 1.5 must be from 0 to 1"),
    ("simulate-run", "--days 1 --save-s -1", 2, "--save-s -1.0 must be finite and not negative"),
    ("simulate-run", "--days 1 --seeds 0", 2, "--seeds 0 must be positive"),
    ("simulate-run", "--days 1 --gpus 64 --elastic-min-nodes 9", 2, "--gpus 64 are 8 nodes"),
    ("simulate-run", "--days 1 --causes none.toml", 2, "--causes none.toml is no table"),
    ("simulate-run", "--from none", 2, "none has no record of an attempt"),
    ("simulate-run", "--gpus 64 --days 1 --seeds 1", 0, "Worth most: "),
    ("estimate", "--help", 0, "compute"),
    ("estimate", "compute --help", 0, "--tflops"),
    ("estimate", "compute --parameters -1 --tokens 1 --gpus 1 --tflops 1", 2, "--parameters"),
    ("predict", "--help", 0, "--csv"),
    ("predict", "--csv http://a/b.csv --json c.json", 2, "name a local file"),
]


def test_help_and_refusals_do_not_import_torch() -> None:
    commands = [(verb, words.split()) for verb, words, *_ in COMMANDS]
    ended = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps(commands),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    for (verb, words, code, sentence), (exit_code, out, err) in zip(COMMANDS, json.loads(ended.stdout), strict=True):
        assert exit_code == code, (verb, words, out, err)
        assert sentence in (err if code else out), (verb, words, out, err)
        assert not code or err.startswith("ERROR: "), err
        assert not code or verb == "train" or err.count("\n") == 1, err  # training says all mistakes at once

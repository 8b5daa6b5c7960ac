"""``--explain-flags`` reads a script as bash does: its flags are those that the programs of the script receive.

Every script runs in bash, too, with stubs in place of ``torchrun``, ``python`` and ``srun``.
"""

import os
import shutil
from pathlib import Path

import pytest

from megatron.commands.explain_flags import recorded
from megatron.commands.pretrain_llama import main
from megatron.config.bash.syntax import parse
from megatron.config.recipes import Recipe, script_recipe
from megatron.errors import ConfigError

LAYERED = r"""#!/bin/bash
# A recipe of this form: constants, arrays, conditions, one command.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
SAVE=${1:-"runs/small model"}
SOURCE=${2:-"FAKE"} # a prefix, or FAKE
GPUS=4
NODES=2
WORLD=$(($GPUS*$NODES))
KIND="eight"
CACHE="${PWD}/cache"
LAUNCH=(
    --nproc_per_node $GPUS
    --nnodes $NODES
)
MODEL=(
    --num-layers 4  # a comment with --a-flag
    --hidden-size $((64 * 2))
    # --no-such-flag
    --seq-length 256
)
EIGHT=()
if [[ "$KIND" == "eight" ]]; then
    EIGHT+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 16"
    )
fi
REDUCE=(
    --overlap-grad-reduce
)
MODEL+=("${REDUCE[@]}")
if [[ "$SOURCE" == "FAKE" ]] || [[ -z "$SOURCE" ]]; then
    DATA=(
        "--mock-data"
        "--split '90,5,5'"
        "--data-cache-path ${CACHE}"
    )
else
    DATA=("--data-path $SOURCE" "--split '90,5,5'")
fi
if [ ! -d "$SAVE" ]; then
    echo "pretrain_small.py will make $SAVE"
fi
torchrun ${LAUNCH[@]} \
    pretrain_small.py \
    ${MODEL[@]} \
    ${EIGHT[@]} ${DATA[@]} \
    --save "$SAVE" --train-samples $((WORLD * 100))
"""

AFTER_TEXT = r"""
OPTIONS=" \
    --num-layers 4 \
    --bf16"
OPTIONS="${OPTIONS} --lr 1e-3"
[ -n "$LARGE" ] && OPTIONS+=" --hidden-size 8192" || OPTIONS+=" --hidden-size 64"
"""

SCRIPTS = {
    "layers of arrays": LAYERED,
    "one text": AFTER_TEXT + "python -u pretrain_small.py $OPTIONS 2>&1 | tee log.txt\n",
    "text in bash -c": AFTER_TEXT
    + 'RUN="cd /tmp; python pretrain_small.py ${OPTIONS}"\nsrun -l --output=%x.log bash -c "${RUN}"\n',
    "here-document": AFTER_TEXT
    + "sbatch <<EOF\n#!/bin/bash\nsrun bash -c 'torchrun pretrain_small.py ${OPTIONS}'\nEOF\n",
    "quoted array is not divided": 'A=("--lr 1e-3" --bf16)\ntorchrun pretrain_small.py "${A[@]}" "${A[*]}" ${A[*]}\n',
    "quotes in a value": "A=(--split \"'99,1,0'\")\ntorchrun pretrain_small.py ${A[@]} --wandb-exp-name 'two words'\n",
    "case and function": """
pick() {
  case "$1" in
    small|tiny) LAYERS=2 ;;
    [0-9]*) LAYERS=32;;
    *) LAYERS=1 ;;
  esac
  return
}
pick 8B
HEADS=${LAYERS%2}4
torchrun pretrain_small.py --num-layers ${LAYERS} --num-attention-heads $HEADS --save ${SAVE:-/a/b.c}/${NAME-x}
""",
    "loops": """
ARGS=()
for pair in "lr 1e-3" "bf16"; do ARGS+=("--$pair"); done
N=0
while (( N < 3 )); do N=$((N + 1)); done
while [[ $# -gt 0 ]]; do shift; done
until [ $N -ge 5 ]; do let N++; done
for X in a b c; do [ $X = b ] && break; LAST=$X; done
torchrun pretrain_small.py ${ARGS[@]} --num-layers $N --seed ${#ARGS[@]} --wandb-exp-name $LAST "$@"
""",
    "elif and arithmetic": """
SIZE=13
if [ $SIZE -lt 8 ]; then TP=1; elif [[ $SIZE -ge 8 && $SIZE < 2 && ! $SIZE =~ ^7 ]]; then TP=2
else TP=8; fi
declare -A LAYERS=([8]=32 [13]=40)
readonly BASE=/data/run-1.tar.gz
torchrun --nproc-per-node=$((TP * 2 % 5)) pretrain_small.py --tensor-model-parallel-size $TP \\
  --num-layers ${LAYERS[$SIZE]} --save ${BASE##*/} --load ${BASE%.*} --tensorboard-dir ${BASE/run/log}
""",
    "the status of a group": (
        "LAYERS=2\n{ [ a = b ]; } && LAYERS=3\n( [ a = b ] ) && LAYERS=4\n"
        "torchrun pretrain_small.py --num-layers $LAYERS\n"
    ),
    "a variable of the environment": "torchrun pretrain_small.py --num-layers $OUTSIDE --seed ${OUTSIDE:+1}\n",
    "the training among other programs": (
        "python tools/prepare.py --input a\nsrun nsys profile -o x python pretrain_small.py --lr 1\n"
    ),
    "empty": 'A=()\nB=("")\ntorchrun pretrain_small.py $@ "${A[@]}" --save "${B[@]}" --bf16\n',
}
ENVIRONMENT = {"PATH": os.environ["PATH"], "OUTSIDE": "7", "PWD": "/tmp"}


def as_read(text: str) -> Recipe:
    return script_recipe(text, ENVIRONMENT)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("bash") is None, reason="compares with bash")
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_flags_that_are_read_are_those_that_bash_gives_to_the_program(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.sh"
    script.write_text(SCRIPTS[name])
    environment = {**ENVIRONMENT, "PWD": str(tmp_path)}
    read, ran = script_recipe(SCRIPTS[name], environment), recorded(script, environment).by_name["train.sh"]
    assert (read.words, read.num_ranks) == (ran.words, ran.num_ranks)
    assert read.words


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        (
            "if [ -f corpus.bin ]; then A=(--data-path corpus); else A=(--mock-data); fi\n",
            "line 1: whether [ -f corpus.bin ] holds is not known without running the script: the commands after it "
            "are left out.",
        ),
        (
            'A=(--mock-data)\nif [ -n "$PROJECT" ]; then\n  A+=(--wandb-project x)\nfi\n',
            'line 2: [ -n "$PROJECT" ] is read with $PROJECT empty: the commands after it are left out.',
        ),
        (
            "A=(--mock-data)\ncase $(hostname) in a*) A+=(--bf16) ;; esac\n",
            "line 2: the value of $(hostname) is not known: no branch of case is read.",
        ),
        ("A=(--mock-data)\nsource ./cluster.sh\n", "line 2: ./cluster.sh is not read."),
        ("A=(--mock-data $EXTRA)\n", "$EXTRA: no value is known, so the text stands in the flags."),
    ],
)
def test_what_cannot_be_decided_is_said(text: str, remark: str) -> None:
    recipe = as_read(text + "torchrun pretrain_small.py ${A[@]}\n")
    assert recipe.remarks == (remark,)
    assert recipe.words == ["--mock-data"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # A test that changes nothing is not mentioned.
        (
            '[ -d "$1" ] || mkdir "$1"\nif [ ! -f x.py ]; then echo no; exit 1; fi\ntorchrun pretrain_small.py --bf16',
            "--bf16",
        ),
        # The program is read where only one branch starts it.
        ("if [ -f a ]; then torchrun pretrain_small.py --bf16; else exit 1; fi\n", "--bf16"),
        # The text of an unknown value stays where a flag needs it.
        (
            "torchrun pretrain_small.py --lr $LR $MORE --data-path 0.5 $A $MORE --bf16 $MORE\n",
            "--lr $LR --data-path 0.5 $A $MORE --bf16",
        ),
        # A script without a program gives the flags of its variables.
        ('MODEL="--num-layers 4"\nA=(--bf16)\nNAME=x\n', "--num-layers 4 --bf16"),
    ],
)
def test_flags_are_read_where_something_is_not_known(text: str, words: str) -> None:
    recipe = as_read(text)
    assert recipe.words == words.split()
    if "torchrun" not in text:
        assert recipe.remarks == ("The script starts no Python file: the flags of all its variables are read.",)
    elif "mkdir" in text:
        assert not recipe.remarks


@pytest.mark.parametrize("text", ["if true; then\n", "A=(1\n", "echo 'a\n", "case x in\n", "echo )\n", "[[ a\n"])
def test_text_that_is_no_script_is_named_with_its_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"line [12]"):
        parse(text)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("bash") is None, reason="runs a script")
def test_a_script_is_run_only_if_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        f"touch {tmp_path}/executed\nA=$(echo --bf16; python -c 'print(\"--seed 3\")')\ntorchrun pretrain_x.py $A\n"
    )
    assert main(["--explain-flags", str(script)]) == 2
    assert "$(echo --bf16" in capsys.readouterr().out
    assert not (tmp_path / "executed").exists()
    main(["--explain-flags", str(script), "--explain-run-script"])
    assert "--bf16\n  --seed 3\n" in capsys.readouterr().out
    assert (tmp_path / "executed").exists()


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("bash") is None, reason="runs a script")
def test_a_script_that_starts_nothing_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("echo no corpus >&2\nexit 3\n")
    with pytest.raises(ConfigError, match=r"ended with 3 and started no Python file by .*\(no corpus\)"):
        recorded(script, ENVIRONMENT)
    with pytest.raises(ConfigError, match="--explain-run-script runs a shell script"):
        recorded(tmp_path, ENVIRONMENT)


def test_a_flag_with_a_blank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.sh"
    script.write_text('A=("--lr 1e-3")\ntorchrun pretrain_x.py --model tiny "${A[@]}"\n')
    assert main(["--explain-flags", str(script)]) == 2
    assert "'--lr 1e-3' is one word with a blank: write two words, or take the quotes" in capsys.readouterr().out

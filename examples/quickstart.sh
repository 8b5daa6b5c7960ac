#!/usr/bin/env bash
# From a fresh clone to a trained tiny Llama: corpus, tokenizer, data, training on two processes, loss curve, sample.
# It can be interrupted and restarted: it skips finished steps, and training resumes.
#
#   bash examples/quickstart.sh            RUN=my_dir ITERATIONS=1000 bash examples/quickstart.sh
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh plots,tensorboard

RUN=${RUN:-runs/quickstart}        # everything is written here
ITERATIONS=${ITERATIONS:-240}
DATA=$RUN
source examples/quickstart_recipe.sh

# bf16 if the device multiplies it faster than fp32.
fastest_precision() {
    PYTHONPATH=. python - <<'PYTHON'
import time
import torch
from megatron.core.ops.matmul import linear

def seconds(dtype):
    matrix = torch.ones(512, 512, dtype=dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        linear(matrix, matrix)
        times.append(time.perf_counter() - start)
    return min(times)

torch.set_num_threads(1)
print("--bf16" if torch.cuda.is_available() or seconds(torch.bfloat16) < 0.7 * seconds(torch.float32) else "")
PYTHON
}

TRACKER=$RUN/checkpoints/latest_checkpointed_iteration.txt
if [ "$(cat "$TRACKER" 2>/dev/null)" != "$ITERATIONS" ]; then
    PROCESSES=$(count_processes)
    PRECISION=$(fastest_precision)
    status=0
    step "Training: $PROCESSES processes, tensor and sequence parallel ${PRECISION:-(fp32)}"
    mapfile -t RECIPE < <(recipe "$ITERATIONS")
    # shellcheck disable=SC2086  # PRECISION is one word or none
    python -m megatron.operation.launch --standalone --nproc-per-node "$PROCESSES" \
        pretrain_llama.py "${RECIPE[@]}" $PRECISION \
        --eval-interval $((ITERATIONS < 60 ? ITERATIONS : 60)) --eval-iters 8 \
        --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 60 --override-opt-param-scheduler \
        --log-interval 10 --log-format compact --metrics-jsonl "$RUN/metrics.jsonl" --tensorboard-dir "$RUN/tensorboard" || status=$?
    if [ "$status" != 0 ] && [ "$status" != 75 ]; then
        exit "$status"
    fi
    if [ "$(cat "$TRACKER" 2>/dev/null)" != "$ITERATIONS" ]; then
        echo "Training stopped before iteration $ITERATIONS; run this script again to go on."
        exit 0
    fi
fi

step "Loss curve"
python tools/plot_metrics.py --metrics "$RUN/metrics.jsonl" --output "$RUN/loss.png" --vocab-size "$VOCABULARY"
python - "$RUN/metrics.jsonl" "$VOCABULARY" <<'PYTHON'
import json
import math
import sys

losses = [json.loads(line) for line in open(sys.argv[1])]
final = [record["validation_loss"] for record in losses if "validation_loss" in record][-1]
unknowing = math.log(int(sys.argv[2]))
print(f"validation loss {final:.3f}, that is {unknowing - final:.2f} nats under ln(vocabulary) = {unknowing:.3f}")
PYTHON
echo "loss curve: $RUN/loss.png"

step "A sample"
python tools/generate_text.py --load "$RUN/checkpoints" --max-new-tokens 80 --prompt "import os

def read_file(path):
"

step "What next"
cat <<TEXT
In this environment (source .venv/bin/activate):
  report:  python tools/report_run.py $RUN/checkpoints --metrics $RUN/metrics.jsonl --html $RUN/report.html
  sample:  python tools/generate_text.py --load $RUN/checkpoints --prompt "class Queue:"
docs/tutorial.md goes the same way step by step, with your own text, to a model on Hugging Face.
TEXT

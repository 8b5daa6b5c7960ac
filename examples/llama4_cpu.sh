#!/usr/bin/env bash
# A tiny Llama 4 on two CPU processes: training on the quickstart's data, text from a prompt longer than a chunk of
# attention, and an export that transformers loads. Minutes on two cores. It can be interrupted and restarted: it skips
# finished steps, and training resumes.
#
#   bash examples/llama4_cpu.sh            RUN=my_dir ITERATIONS=1000 bash examples/llama4_cpu.sh
#
# Arguments are flags of the training, and override the flags here.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v torchrun > /dev/null; then  # no environment with torch is active
    source tools/environment.sh plots,tensorboard
fi

RUN=${RUN:-runs/llama4_cpu}        # checkpoints, metrics, export
ITERATIONS=${ITERATIONS:-240}
DATA=${DATA:-runs/quickstart}      # corpus, tokenizer and tokens, made if missing
source examples/quickstart_recipe.sh

FLAGS=(
    # Four layers. Three have rotary position embedding and chunks of 64 positions; the fourth has neither, and its
    # queries have a temperature. Llama 4 has chunks of 8,192 and a temperature from there on.
    --model tiny-llama4 --attention-temperature-floor 64 --seq-length 256
    --sequence-parallel --use-distributed-optimizer
    --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3
    --micro-batch-size 8 --global-batch-size 16 --train-iters "$ITERATIONS"
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters $((ITERATIONS / 12))
    --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0
    --data-path "$DATA/corpus_text_document" --split "95,5,0" --num-workers 1 "${TOKENIZER[@]}"
    --eval-interval $((ITERATIONS < 60 ? ITERATIONS : 60)) --eval-iters 8
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 60 --override-opt-param-scheduler
    --log-interval 10 --metrics-jsonl "$RUN/metrics.jsonl"
)

TRACKER=$RUN/checkpoints/latest_checkpointed_iteration.txt
if [ "$(cat "$TRACKER" 2>/dev/null)" != "$ITERATIONS" ]; then
    PROCESSES=$(count_processes)
    status=0
    step "Training: $PROCESSES processes, tensor parallel in attention, expert parallel in experts"
    python -m megatron.operation.launch --standalone --nproc-per-node "$PROCESSES" pretrain_llama.py "${FLAGS[@]}" \
        --tensor-model-parallel-size "$PROCESSES" --expert-model-parallel-size "$PROCESSES" "$@" || status=$?
    if [ "$status" != 0 ] && [ "$status" != 75 ]; then
        exit "$status"
    fi
    if [ "$(cat "$TRACKER" 2>/dev/null)" != "$ITERATIONS" ]; then
        echo "Training stopped before iteration $ITERATIONS; run this script again to go on."
        exit 0
    fi
fi

step "Loss"
python - "$RUN/metrics.jsonl" "$VOCABULARY" <<'PYTHON'
import json
import math
import sys

records = [json.loads(line) for line in open(sys.argv[1])]
losses = [record["lm_loss"] for record in records if "lm_loss" in record]
final = [record["validation_loss"] for record in records if "validation_loss" in record][-1]
print(f"training loss {losses[0]:.3f} to {losses[-1]:.3f}, validation loss {final:.3f}, ln(vocabulary) = ", end="")
print(f"{math.log(int(sys.argv[2])):.3f}")
PYTHON

step "Text: the prompt is longer than a chunk"
python tools/generate_text.py --load "$RUN/checkpoints" --max-new-tokens 60 \
    --prompt "$(head -n 24 examples/gather_python_source.py)
"

if [ ! -d "$RUN/hugging_face" ]; then
    step "Export: $RUN/hugging_face"
    python tools/convert_checkpoint.py to-hf --load "$RUN/checkpoints" --hf "$RUN/hugging_face"
fi

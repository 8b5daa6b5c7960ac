#!/usr/bin/env bash
# A training step of a 20 M-parameter Llama on two CPU cores in bf16, compared with its bounds and with transformers,
# eager and compiled (which needs a C++ compiler and some minutes). Additional flags: --repeats 30 --json step.json
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/environment.sh requirements-dev.txt

OMP_NUM_THREADS=2 exec python benchmarks/benchmark_step.py --device cpu --bf16 \
    --num-layers 4 --hidden-size 512 --ffn-hidden-size 1536 --num-attention-heads 8 --num-query-groups 2 \
    --with-head --vocab-size 8192 --micro-batch-size 4 --seq-length 512 \
    --compare transformers --compile "$@"

# Sourced by the recipes of this directory: where a run takes place, and how it is started.
#
# A recipe sources this file, sets FLAGS (the model and its training), and calls `launch "$@"`. Before, it may set other
# defaults of the knobs below, which are environment variables. Flags after the name of the recipe come last, so they
# override the recipe's flags.
#
#   DRY_RUN=1          only simulate the run: no GPU needed, any number of nodes
#   NODES              number of machines (in a SLURM job: all machines of the job)
#   GPUS_PER_NODE      processes per machine (8)
#   NODE_RANK          number of this machine, 0 to NODES - 1; start the recipe on every machine (under SLURM it is set)
#   MASTER_ADDR        host of machine 0
#   MASTER_PORT        a free port there (29500)
#   MIN_NODES          fewest machines on which the run may continue when others are lost (all; below that, restarts number
#                      the ranks in any order of the machines)
#   MAX_RESTARTS       restarts of the ranks on the same machines after a crash (3)
#   WARM_PROCESSES     1 keeps a process per rank ready for a restart (0)
#   PREFLIGHT          1 checks the machines before the run, which takes up to a minute (1 on several machines)
#   OUTPUT             directory for checkpoints and metrics, on storage that all machines share (runs/NAME)
#   TOKENIZER_MODEL    the tokenizer's file (tokenizer.model)
#   TOKENIZER_TYPE     its kind (TikTokenizer, which is Llama 3's)
#   DATA_PATH          tokenized corpora, as --data-path takes them: "0.7 data/web_text_document 0.3 data/code_text_document"
#   VOCAB_SIZE         vocabulary of a run without DATA_PATH (128256, which is Llama 3's)
#   DATA_CACHE_PATH    directory for the cached sample order, on shared storage (beside the first corpus)
#
# Without DATA_PATH the run trains on synthetic tokens, for measurements of a cluster.

# shellcheck shell=bash
# The recipe sets FLAGS.
# shellcheck disable=SC2154

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
if ! command -v torchrun > /dev/null; then  # no environment with torch is active
    source tools/environment.sh requirements.txt
fi
source examples/environment.sh

NODES=${NODES:-${SLURM_NNODES:-1}}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}
MIN_NODES=${MIN_NODES:-$NODES}
MAX_RESTARTS=${MAX_RESTARTS:-3}
WARM_PROCESSES=${WARM_PROCESSES:-0}
PREFLIGHT=${PREFLIGHT:-$((NODES > 1))}
OUTPUT=${OUTPUT:-runs/$(basename "$0" .sh)}
DATA_PATH=${DATA_PATH:-}
TOKENIZER_MODEL=${TOKENIZER_MODEL:-tokenizer.model}
TOKENIZER_TYPE=${TOKENIZER_TYPE:-TikTokenizer}
VOCAB_SIZE=${VOCAB_SIZE:-128256}

data_flags() {
    if [ -z "$DATA_PATH" ]; then
        echo "DATA_PATH is not set: training on synthetic tokens" >&2
        DATA=(--mock-data --vocab-size "$VOCAB_SIZE")
        return
    fi
    local corpora
    read -ra corpora <<< "$DATA_PATH"
    DATA=(--data-path "${corpora[@]}" --tokenizer-type "$TOKENIZER_TYPE" --tokenizer-model "$TOKENIZER_MODEL")
    if [ -n "${DATA_CACHE_PATH:-}" ]; then
        DATA+=(--data-cache-path "$DATA_CACHE_PATH")
    fi
}

# Replace the shell by the run: the flags of the recipe, data, output, then "$@".
launch() {
    data_flags
    local output=(
        --save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints"
        --metrics-jsonl "$OUTPUT/metrics.jsonl" --tensorboard-dir "$OUTPUT/tensorboard"
    )
    local run=(pretrain_llama.py "${FLAGS[@]}" "${DATA[@]}" "${output[@]}")
    if [ "${DRY_RUN:-0}" = 1 ]; then
        exec python "${run[@]}" --dry-run --num-gpus $((NODES * GPUS_PER_NODE)) "$@"
    fi
    # A static rendezvous numbers the ranks by NODE_RANK, c10d's does not: neighbours in the network should be neighbours
    # in the rank grid (arXiv 2407.21783, section 3.3.2).
    local place=(--nnodes "$NODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
    if [ "$NODES" = 1 ]; then
        place=(--standalone)
    elif [ "$MIN_NODES" != "$NODES" ]; then
        place=(
            --nnodes "$MIN_NODES:$NODES" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
            --rdzv-id "${SLURM_JOB_ID:-$(basename "$0" .sh)}"
        )
    fi
    if [ "$WARM_PROCESSES" = 1 ]; then
        place+=(--warm-processes)
    fi
    if [ "$PREFLIGHT" = 1 ]; then
        run+=(--preflight)
    fi
    # torchrun with an agent that obeys the exit codes of pretrain_llama.py (docs/operations.md).
    exec python -m megatron.operation.launch --max-restarts "$MAX_RESTARTS" \
        --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 \
        "${place[@]}" --nproc-per-node "$GPUS_PER_NODE" "${run[@]}" "$@"
}

# Sourced after tools/environment.sh by scripts that train the quickstart's model: makes corpus, tokenizer and data in
# DATA if they are missing, sets TOKENIZER, and defines count_processes, recipe and train.
# shellcheck shell=bash

VOCABULARY=${VOCABULARY:-4096}
export OMP_NUM_THREADS=1            # one thread for each of the two processes

step() { printf '\n== %s\n' "$1"; }

mkdir -p "$DATA"
if [ ! -f "$DATA/corpus.jsonl" ]; then
    step "Corpus: the source of Python's standard library"
    python examples/gather_python_source.py "$DATA/corpus.jsonl"
fi
if [ ! -f "$DATA/tokenizer.model" ]; then
    step "Tokenizer: SentencePiece, $VOCABULARY ids"
    python tools/train_tokenizer.py --input "$DATA/corpus.jsonl" --model-prefix "$DATA/tokenizer" \
        --vocab-size "$VOCABULARY"
fi
TOKENIZER=(--tokenizer-type SentencePieceTokenizer --tokenizer-model "$DATA/tokenizer.model")
if [ ! -f "$DATA/corpus_text_document.idx" ]; then
    step "Data: tokens"
    python tools/preprocess_data.py --input "$DATA/corpus.jsonl" --output-prefix "$DATA/corpus" \
        --append-eod --workers 2 "${TOKENIZER[@]}"
fi

# One process on a machine with one GPU, otherwise two: on two GPUs, or on the CPU with one thread each.
count_processes() {
    python -c 'import torch; print(1 if torch.cuda.device_count() == 1 else 2)'
}

# recipe ITERATIONS: layout, model, batch, learning rate and data for PROCESSES, one flag or value per line.
recipe() {
    printf '%s\n' \
        --tensor-model-parallel-size "$PROCESSES" --sequence-parallel --use-distributed-optimizer \
        --num-layers 4 --hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 8 --num-query-groups 4 \
        --seq-length 256 --micro-batch-size 8 --global-batch-size 16 \
        --train-iters "$1" --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters $(($1 / 12)) \
        --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
        --data-path "$DATA/corpus_text_document" --split 95,5,0 --num-workers 1 "${TOKENIZER[@]}"
}

# train NAME FLAGS: ITERATIONS iterations with FLAGS, one flag or value per line, and metrics in RUN/NAME.jsonl. A finished
# run with the same flags is kept.
train() {
    local name=$1 flags=$2 metrics=$RUN/$1.jsonl words
    if [ -f "$metrics" ] && [ "$(cat "$RUN/$name.flags")" = "$flags" ]; then
        step "$name: kept from $metrics (remove it to train again)"
        return
    fi
    step "$name: $ITERATIONS iterations"
    rm -f "$metrics" "$metrics.part"
    echo "$flags" > "$RUN/$name.flags"
    mapfile -t words <<< "$flags"
    python -m megatron.operation.launch --standalone --nproc-per-node "$PROCESSES" pretrain_llama.py "${words[@]}" \
        --log-interval 1 --metrics-jsonl "$metrics.part" \
        > "$RUN/$name.log" 2>&1 || { tail -n 20 "$RUN/$name.log"; exit 1; }
    mv "$metrics.part" "$metrics"
}

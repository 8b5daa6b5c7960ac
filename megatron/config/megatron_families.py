"""Flags of Megatron-LM beside those of Llama recipes: other models, other ways to train, and machinery of its own.

All are refused with a remedy. ``tests/config/recipes/megatron_lm_parser.txt`` has every flag of Megatron-LM's parser.
"""

from fnmatch import fnmatchcase

FAMILIES = {
    "it belongs to multi-latent attention (DeepSeek), which no model of the catalog has: remove it.": (
        "--multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim "
        "--mscale --mscale-all-dim --cache-mla-latents --mla-* --qk-clip*"
    ),
    "outside of multi-latent attention it is spelled --yarn-rotary-scaling-factor.": "--rotary-scaling-factor",
    "use --position-embedding-type rope or yarn instead.": "--rope-type",
    "it belongs to sparse attention with an indexer, which no model of the catalog has: remove it.": (
        "--dsa-* --no-dsa-* --disable-dsa-*"
    ),
    "it belongs to multi-token prediction, which no model of the catalog has: remove it.": "--mtp-*",
    "it belongs to hyper-connections, which no model of the catalog has: remove it.": "--enable-mhc-* --mhc-*",
    "it belongs to models with state-space layers (Mamba), which are not in the catalog: remove it.": (
        "--is-hybrid-model --mamba-* --disable-mamba-* --gdp-* --hybrid-layer-pattern --hybrid-override-pattern"
    ),
    "it belongs to Nemotron models with layers of different sizes: remove it.": "--heterogeneous-*",
    "it changes the architecture: remove it.": (
        "--softmax-type --apply-residual-connection-post-layernorm --glu-linear-offset --activation-func-clamp-value "
        "--openai-gelu --quick-geglu --window-attn-skip-freq --relative-attention-* --mrope-section --onnx-safe"
    ),
    "it belongs to models with an encoder, such as T5: use --num-layers instead.": (
        "--encoder-num-layers --decoder-num-layers"
    ),
    "it belongs to models with an encoder, such as T5: use --seq-length instead.": (
        "--encoder-seq-length --decoder-seq-length"
    ),
    "it belongs to BERT, T5 and retrieval models: remove it.": (
        "--bert-* --mask-prob --short-seq-prob --vocab-extra-ids --output-bert-embeddings --ict-* --biencoder-* "
        "--titles-data-path --query-in-block-prob --use-one-sent-docs --evidence-data-path --retriever-* "
        "--block-data-path --embedding-path --indexer-*"
    ),
    "it belongs to vision models: remove it.": (
        "--num-classes --img-h --img-w --num-channels --patch-dim --classes-fraction --data-per-class-fraction "
        "--no-data-sharding --head-lr-mult --vision-* --swin-* --mask-type --mask-factor --iter-per-epoch --dino-*"
    ),
    "it belongs to reinforcement learning, and this program pretrains: remove it.": (
        "--rl-* --no-rl-* --grpo-* --langrl-* --perform-rl-step --refit-method"
    ),
    "it belongs to fine-tuning on conversations, and this program pretrains: remove it.": (
        "--sft --sft-* --chat-template"
    ),
    "no model is trained from another one's outputs: remove it.": "--logits-*",
    "it belongs to inference: use tools/generate_text.py for text, and remove it.": (
        "--inference-* --no-inference-* --flash-decode --max-tokens-to-oom --use-legacy-static-engine "
        "--decode-only-cuda-graphs --enable-chunked-prefill --num-speculative-tokens --mlp-chunks-for-prefill "
        "--nccl-all-reduce-for-prefill --use-same-sampling-seed-across-dp-ranks --prompts --prompt-file "
        "--num-tokens-to-generate --return-log-probs --incoming-requests-* "
        "--moe-pad-experts-for-cuda-graph-inference"
    ),
    "ModelOpt's compression is a program of its own: export with tools/convert_checkpoint.py to-hf, and remove it.": (
        "--modelopt-* --export-*"
    ),
    "initial weights follow from --init-method-std: use it instead.": (
        "--embedding-init-method-std --init-method-xavier-uniform --no-initialization"
    ),
    "weight decay applies to no norm: remove it.": "--no-weight-decay-cond-type",
    "Lion is not implemented: use --optimizer adam instead.": "--lion-*",
    "the groups of parameters follow from their names: remove it.": "--dump-param-to-param-group-map",
    "use --freeze-parameters with patterns of names, or --skip-train to evaluate the model.": "--freeze-all-layers",
    "FP8 is configured by --fp8-format and --fp8-recipe alone: remove it.": (
        "--fp8-quantizer-factory --no-fp8-wgrad --disable-fp8-wgrad --fp8-output-proj --use-kitchen-attention "
        "--kitchen-attention-backend --te-precision-config-file --reuse-grad-buf-for-mxfp8-param-ag"
    ),
    "use fp32, --bf16, --fp8-format, --fp16 or --fp64 instead.": "--fp4-*",
    "the loss is computed in fp32 from the logits: remove it.": "--fp16-lm-cross-entropy --output-logit-dtype",
    "gradients are reduced in fp32 without --grad-reduce-in-bf16: remove both.": (
        "--ddp-reduce-scatter-with-fp32-accumulation --ddp-param-name-patterns-for-fp32-local-accumulation"
    ),
    "products are accumulated as PyTorch does by default: use --deterministic-mode for equal bits.": (
        "--disable-bf16-reduced-precision-matmul --batch-invariant-*"
    ),
    "operations are launched one by one: remove it.": (
        "--enable-cuda-graph --external-cuda-graph --optimizer-cuda-graph --cuda-graph-*"
    ),
    "activations are offloaded by whole layers: use --cpu-offloading-num-layers instead.": (
        "--offload-modules --min-offloaded-tensor-size --delay-offload-until-cuda-graph --delta-offload-bytes-* "
        "--activation-offload-fraction --fine-grained-offloading-* --cpu-offloading-retain-*"
    ),
    "use --recompute-granularity selective with --recompute-modules mlp instead.": "--mlp-chunks-for-training",
    "shard the weights with --data-parallel-sharding-strategy optim_grads_params instead.": (
        "--tensor-parallel-num-weight-shards --gtp-*"
    ),
    "ranks share by --num-distributed-optimizer-instances alone: lower it to shard over more ranks.": (
        "--outer-dp-sharding-strategy --enable-full-sharding-in-hsdp"
    ),
    "every sequence has --seq-length tokens, and documents share it with --reset-attention-mask: remove it.": (
        "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank"
    ),
    "use --tensor-model-parallel-size instead.": "--model-parallel-size",
    "use --distributed-timeout-minutes instead.": "--distributed-timeout-seconds-after-init",
    "set PyTorch's TORCH_FR_* and TORCH_NCCL_* in the environment instead, and remove it.": (
        "--flight-recorder-* --no-flight-recorder-* --disable-flight-recorder-*"
    ),
    "use --dry-run instead.": "--fake-process-group",
    "a run evaluates from its first --eval-interval on, with --micro-batch-size: remove it.": (
        "--start-eval-at-iter --eval-micro-batch-size"
    ),
    "a run continues with other data, batch or length by --new-data-stage: use it, and remove this flag.": (
        "--phase-transition-iterations"
    ),
    "every sample is read as it is in the corpus: remove it.": "--fim-* --sample-rate",
    "use --make-vocab-size-divisible-by instead, 1 for no padding.": "--no-pad-vocab-size --disable-pad-vocab-size",
    "the files of --tokenizer-model say everything about the tokenizer: remove it.": (
        "--tokenizer-metadata --tokenizer-special-tokens --tokenizer-sentencepiece-legacy "
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces"
    ),
    "NullTokenizer ends a document with the id --vocab-size: remove it.": "--null-tokenizer-eod-id",
    "no token is padding: remove it.": "--null-tokenizer-pad-id",
    "use --save-interval instead.": "--persistent-save-interval",
    "every checkpoint is written to --save, and in the background with --async-save: use --save-interval instead.": (
        "--non-persistent-*"
    ),
    "a copy of every checkpoint is written by --redundant-save: use it instead.": "--replication --replication-*",
    "the tensors of a step are not saved: remove it.": (
        "--save-params-interval --save-activations-interval --save-tokens-per-expert-interval --save-wgrads-interval "
        "--save-dgrads-interval"
    ),
    "what a checkpoint holds is not chosen by flags: remove it.": (
        "--no-save-tokenizer-assets --disable-save-tokenizer-assets --load-main-params-from-ckpt"
    ),
    "a checkpoint loads in every layout: set the sizes by their flags, and remove it.": (
        "--use-mp-args-from-checkpoint-args"
    ),
    "checkpoints have one format, and load in every layout: remove it.": "--ckpt-convert-*",
    "a run goes on at the iteration of its checkpoint: use --finetune to begin at 0 with its weights.": (
        "--override-ckpt-iteration"
    ),
    "use --inject-fault instead, which breaks a run on purpose.": "--fault-injector-*",
    "--inprocess-restart has no such settings: use --hang-limit-s for the time limit, and remove it.": "--inprocess-*",
    "the launcher restarts a failed run (docs/slurm.md): remove it.": "--adlr-autoresume*",
    "a GPU is tested by --preflight and --known-answer-interval-s: use them instead.": "--gpu-sniff-test-interval",
    "failures are recorded in --run-dir: remove it.": "--result-rejected-tracker-filename",
    "use --metrics-jsonl, --tensorboard-dir or --wandb-project instead.": "--otel-* --log-energy",
    "every writer receives all metrics: remove it.": (
        "--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard --log-world-size-to-tensorboard "
        "--log-max-attention-logit"
    ),
    "use --log-memory-to-tensorboard instead.": "--log-memory-interval --log-device-memory-used",
    "the log has one level: remove it.": "--logging-level",
    "use --moe-per-layer-logging instead.": "--moe-routing-trace-*",
    "the content of a profile is fixed: use --use-pytorch-profiler, and remove it.": (
        "--pytorch-profiler-collect-* --record-shapes --nvtx-ranges --run-workload-inspector-server"
    ),
    "the flags of a run are in the run.yaml of --run-dir: remove it.": "--config-logger-dir",
    "use --config instead.": "--yaml-cfg",
}
"""The patterns of flags by remedy."""


def remedy_of_family(flag: str) -> str | None:
    """What to do about a flag of a family; None for a flag of none."""
    return next(
        (remedy for remedy, patterns in FAMILIES.items() if any(fnmatchcase(flag, one) for one in patterns.split())),
        None,
    )

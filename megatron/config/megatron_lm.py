"""Flags of Megatron-LM that are no flags here: those without effect, which are accepted, and those that are refused.

A flag has no effect if the run is the same with and without it: the same numbers, order of data, checkpoints and log.
Other flags are refused with a remedy. Flags that state what this code always does are fields of
:class:`~megatron.config.compatibility.CompatibilityConfig`. ``tests/config/recipes/megatron_lm_parser.txt`` has every
flag of the parser of Megatron-LM.
"""

from fnmatch import fnmatchcase
from typing import NamedTuple

# What to do about a flag that is refused, by patterns of flags: the first one that a flag matches counts.
REFUSED = {
    "it changes the architecture: remove it.": (
        "--rotary-interleaved --rotary-seq-len-interpolation-factor --fp32-residual-connection "
        "--spec --moe-latent-size --squared-relu --attention-output-gate "
        "--experimental-attention-variant --linear-attention-freq --linear-conv-kernel-dim --linear-key-head-dim "
        "--linear-num-key-heads --linear-num-value-heads --linear-value-head-dim "
        "--apply-residual-connection-post-layernorm --glu-linear-offset --activation-func-clamp-value --openai-gelu "
        "--quick-geglu --relative-attention-* --mrope-section --onnx-safe"
    ),
    "it follows from --hidden-size and --mup-base-hidden-size: remove it.": "--mup-width-mult",
    "weight decay applies to no norm: remove it.": "--apply-wd-to-qk-layernorm --no-weight-decay-cond-type",
    "it is spelled --muon-nesterov.": "--muon-use-nesterov",
    "a loss or gradient that is not finite stops the run, and --clip-grad bounds large ones: remove it.": (
        "--check-for-large-grads"
    ),
    "all model replicas start from the same weights: remove it.": "--data-parallel-random-init",
    "use fp32, --bf16, --fp8-format, --fp16 or --fp64 instead.": "--fp4-*",
    "activations are offloaded by whole layers: use --cpu-offloading-num-layers instead.": (
        "--fine-grained-activation-offloading --offload-modules --min-offloaded-tensor-size "
        "--delay-offload-until-cuda-graph --delta-offload-bytes-* --activation-offload-fraction "
        "--fine-grained-offloading-* --cpu-offloading-retain-*"
    ),
    "use --no-torch-fsdp2-reshard-after-forward instead.": "--torch-fsdp2-no-reshard-after-forward",
    "no token is dropped, because dropping by rank would make the result depend on the layout: remove it.": (
        "--moe-expert-capacity-factor --moe-pad-expert-input-to-capacity --moe-token-drop-policy "
        "--moe-token-dropping --moe-expert-rank-capacity-factor"
    ),
    "noise of the router's input would differ between layouts: remove it.": "--moe-input-jitter-eps",
    "the shared expert has no gate, which only Qwen2-MoE has: remove it.": "--moe-shared-expert-gate",
    "use --recompute-granularity selective with --recompute-modules moe instead.": "--moe-layer-recompute",
    "use --recompute-granularity selective with --recompute-modules moe_act instead.": (
        "--moe-paged-stash --moe-paged-stash-page-size --moe-paged-stash-buffer-size-factor-cuda "
        "--moe-paged-stash-buffer-size-factor-cpu"
    ),
    "a run does not change the architecture of its checkpoint: use tools/convert_checkpoint.py upcycle instead.": (
        "--moe-use-upcycling --moe-upcycling-granularity"
    ),
    "tokens are exchanged in the dtype of the activations: remove it.": (
        "--moe-dispatch-fwd-dtype --moe-combine-bwd-dtype"
    ),
    "shard the experts with --expert-tensor-parallel-size instead.": (
        "--moe-extended-tp --expert-tensor-parallel-num-weight-shards"
    ),
    "every token is routed by its own logits: remove it.": "--moe-enable-routing-replay",
    "use --moe-router-force-load-balancing, which balances every layer exactly, instead.": "--moe-router-force-biased",
    "use --moe-router-load-balancing-type seq_aux_loss instead.": "--moe-router-quantile-balancing-ema",
    "the choice of experts would depend on the layout: use --moe-router-num-groups and --moe-router-group-topk"
    " instead.": "--moe-router-topk-limited-devices",
    "use --tokenizer-type and --tokenizer-model instead.": "--padded-vocab-size",
    "every sample is read as it is in the corpus: remove it.": "--sample-rate",
    "--fim-data divides whole documents, and adds no token at their ends: remove it.": (
        "--fim-split-sample --fim-fragment-rate --fim-no-prefix --fim-pad-token --fim-eod-token"
    ),
    "no model is trained from another one's outputs: remove it.": (
        "--export-kd-cfg --export-kd-teacher-load --export-kd-teacher-ckpt-format --logits-*"
    ),
    "it names the layers of a checkpoint for ModelOpt: export with tools/convert_checkpoint.py to-hf, and remove it.": (
        "--export-te-mcore-model"
    ),
    "checkpoints have one format, and load in every layout: remove it.": "--ckpt-convert-*",
    "every checkpoint is written to --save, and in the background with --async-save: use --save-interval instead.": (
        "--non-persistent-*"
    ),
    "use --metrics-jsonl, --tensorboard-dir or --wandb-project instead.": "--log-progress --otel-* --log-energy",
    "use --inject-fault instead, which breaks a run on purpose.": (
        "--error-injection-rate --error-injection-type --fault-injector-*"
    ),
    "it belongs to multi-latent attention (DeepSeek), which no model of the catalog has: remove it.": (
        "--multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim "
        "--mscale --mscale-all-dim --cache-mla-latents --mla-* --qk-clip*"
    ),
    "outside of multi-latent attention it is spelled --yarn-rotary-scaling-factor.": "--rotary-scaling-factor",
    "use --position-embedding-type rope or yarn instead.": "--rope-type",
    "it belongs to sparse attention with an indexer, which no model of the catalog has: remove it.": (
        "--dsa-* --no-dsa-* --disable-dsa-*"
    ),
    "multi-token prediction has --mtp-num-layers and --mtp-loss-scaling-factor alone: remove it.": "--mtp-*",
    "it belongs to hyper-connections, which no model of the catalog has: remove it.": "--enable-mhc-* --mhc-*",
    "it belongs to models with state-space layers (Mamba), which are not in the catalog: remove it.": (
        "--is-hybrid-model --mamba-* --disable-mamba-* --gdp-* --hybrid-layer-pattern --hybrid-override-pattern"
    ),
    "it belongs to Nemotron models with layers of different sizes: remove it.": "--heterogeneous-*",
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
    "Lion is not implemented: use --optimizer adam instead.": "--lion-*",
    "the groups of parameters follow from their names: remove it.": "--dump-param-to-param-group-map",
    "use --freeze-parameters with patterns of names, or --skip-train to evaluate the model.": "--freeze-all-layers",
    "FP8 is configured by --fp8-format and --fp8-recipe alone: remove it.": (
        "--fp8-quantizer-factory --no-fp8-wgrad --disable-fp8-wgrad --fp8-output-proj --use-kitchen-attention "
        "--kitchen-attention-backend --te-precision-config-file --reuse-grad-buf-for-mxfp8-param-ag"
    ),
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
    "use --make-vocab-size-divisible-by instead, 1 for no padding.": "--no-pad-vocab-size --disable-pad-vocab-size",
    "the files of --tokenizer-model say everything about the tokenizer: remove it.": (
        "--tokenizer-metadata --tokenizer-special-tokens --tokenizer-sentencepiece-legacy "
        "--no-tokenizer-sentencepiece-ignore-extra-whitespaces "
        "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces"
    ),
    "NullTokenizer ends a document with the id --vocab-size: remove it.": "--null-tokenizer-eod-id",
    "no token is padding: remove it.": "--null-tokenizer-pad-id",
    "use --save-interval instead.": "--persistent-save-interval",
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
    "a run goes on at the iteration of its checkpoint: use --finetune to begin at 0 with its weights.": (
        "--override-ckpt-iteration"
    ),
    "--inprocess-restart has no such settings: use --hang-limit-s for the time limit, and remove it.": "--inprocess-*",
    "the launcher restarts a failed run (docs/slurm.md): remove it.": "--adlr-autoresume*",
    "a GPU is tested by --preflight and --known-answer-interval-s: use them instead.": "--gpu-sniff-test-interval",
    "failures are recorded in --run-dir: remove it.": "--result-rejected-tracker-filename",
    "every writer receives all metrics: remove it.": (
        "--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard --log-world-size-to-tensorboard"
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

# Values of Megatron-LM that an accepted flag does not have, with the reason and the remedy.
NOT_SUPPORTED_VALUES = {
    "--moe-router-load-balancing-type": {
        "global_aux_loss": "its loss would depend on the number and the order of the microbatches: use seq_aux_loss.",
        "sinkhorn": "its choice of experts would depend on the layout: use seq_aux_loss.",
        "quantile_balancing": "its choice of experts would depend on the layout: use seq_aux_loss.",
    },
    "--moe-router-score-function": {"sqrtsoftplus": "no model of the catalog has it: use softmax or sigmoid."},
    "--moe-token-dispatcher-type": {
        "flex": "it needs the packages DeepEP, HybridEP or NCCL-EP: use alltoall.",
    },
}


_NO_EFFECT_BY_REASON = {
    "kernels are chosen and logged at the start": (
        "--cross-entropy-fusion-impl= --muon-use-syrk --moe-router-padding-for-quantization "
        "--moe-router-padding-for-fp8 --moe-single-grouped-weight --moe-single-grouped-bias --moe-use-grouped-tensor "
        "--moe-use-legacy-grouped-gemm --moe-mlp-glu-interleave-size= --moe-shared-expert-glu-interleave-size= "
        "--use-grouped-gemm-for-shared-expert --use-grouped-gemm-for-dense-mlp --no-bias-gelu-fusion "
        "--use-te-activation-func --fused-residual-rmsnorm --use-transformer-engine-op-fuser "
        "--use-fused-weighted-squared-relu --disable-jit-fuser --flash-attention-version="
    ),
    "the attention kernel computes its scores in fp32, where this scaling cancels": "--apply-query-key-layer-scaling",
    "FP8 scales are updated in every step": "--fp8-interval=",
    "the communication has no such settings, and the results do not depend on them": (
        "--ddp-average-in-collective --no-async-tensor-model-parallel-allreduce --tp-comm-overlap-cfg= "
        "--overlap-param-gather-with-optimizer-step --overlap-p2p-communication-warmup-flush --use-nccl-ub "
        "--no-align-param-gather --nccl-communicator-config-path= --high-priority-stream-groups=* "
        "--no-tp-comm-split-ag --no-tp-comm-split-rs --no-tp-comm-bulk-dgrad --no-tp-comm-bulk-wgrad "
        "--disable-tp-comm-split-ag --disable-tp-comm-split-rs --disable-tp-comm-bulk-dgrad "
        "--disable-tp-comm-bulk-wgrad --no-tp-comm-overlap-ag --no-tp-comm-overlap-rs "
        "--disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs "
        "--tp-comm-overlap-rs-dgrad --tp-comm-bootstrap-backend= --pipeline-model-parallel-comm-backend= "
        "--use-ring-exchange-p2p --high-priority-a2a-comm-stream --no-align-grad-reduce --disable-align-grad-reduce "
        "--use-sharp --sharp-enabled-group= --ddp-pad-buckets-for-high-nccl-busbw --disable-symmetric-registration "
        "--create-all-gather-group --no-gradient-reduce-div-fusion --no-use-layer-wise-param-layout "
        "--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding --symmetric-ar-type="
    ),
    "--pipeline-schedule zb-h1 and zb-v delay the weight gradients": (
        "--delay-wgrad-compute --defer-embedding-wgrad-compute --wgrad-deferral-limit="
    ),
    "--data-parallel-sharding-strategy optim_grads_params is PyTorch's FSDP2 on fp32 master weights": (
        "--megatron-fsdp-main-params-dtype=fp32|auto --megatron-fsdp-main-grads-dtype=fp32|auto "
        "--megatron-fsdp-grad-comm-dtype=fp32|auto --fsdp-double-buffer --fsdp-manual-registration "
        "--init-model-with-meta-device --suggested-communication-unit-size= --megatron-fsdp-version= "
        "--megatron-fsdp-enable-fine-grained-param-gather --megatron-fsdp-max-pool-double-buffer "
        "--fsdp-db-use-persist-buf-on-alloc-fail --keep-fp8-transpose-cache"
    ),
    "--optimizer-cpu-offload updates with PyTorch's optimizers, and pins the memory that is copied": (
        "--use-torch-optimizer-for-cpu-offload --no-pin-cpu-grads --no-pin-cpu-params"
    ),
    "the exchange of tokens overlaps with --moe-shared-expert-overlap alone": (
        "--overlap-moe-expert-parallel-comm --ep-overlap-early-attn-memory-release"
    ),
    "--moe-token-dispatcher-type allgather and alltoall have no such settings": (
        "--moe-enable-deepep --moe-flex-dispatcher-backend= --moe-flex-dispatcher-num-sms= --moe-deepep-num-sms= "
        "--moe-hybridep-num-sms= --moe-hybridep-pad-variable-tokens --moe-ncclep-zero-copy "
        "--moe-permute-fusion-into-hybridep --moe-hybridep-pad-uneven-dispatch-inputs "
        "--moe-hybridep-num-blocks-permute= --moe-hybridep-num-blocks-unpermute= --moe-hybridep-num-sms-preprocessing="
    ),
    "the cached sample order is always memory-mapped": (
        "--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap"
    ),
    "every index file states its sequences": "--per-dataset-sequences-path=",
    "a path may be a URL": "--enable-msc --disable-msc",
    "no token is padding": "--allow-ambiguous-pad-tokens",
    "tokenizer.json is read by one library, which adds no special ids to a text": (
        "--tokenizer-hf-no-use-fast --tokenizer-hf-no-include-special-tokens"
    ),
    "gigatoken is used where it is installed": "--use-gigatoken",
    "the launcher's variables name the rank": "--local-rank= --lazy-mpu-init",
    "the results do not depend on when the host waits for the GPU or collects garbage": (
        "--train-sync-interval= --no-manual-gc-eval --disable-manual-gc-eval --no-barrier-with-level-1-timing"
    ),
    "a graceful stop is always on, and ends the loaders": (
        "--exit-signal-handler-for-training --exit-signal-handler-for-dataloader"
    ),
    "experimental features are flags of their own": "--enable-experimental",
    "--use-checkpoint-args overrides no flag": (
        "--no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args"
    ),
    "TensorBoard's queue changes no value": "--tensorboard-queue-size=",
    "there is no one-logger": (
        "--no-one-logger --one-logger-project= --one-logger-run-name= --one-logger-async --app-tag-run-name= "
        "--app-tag-run-version="
    ),
    "checkpoints have one format, and load in every layout": (
        "--auto-detect-ckpt-format --ckpt-fully-parallel-load --ckpt-assume-constant-structure --dist-ckpt-strictness= "
        "--dist-ckpt-workers= --ckpt-fully-parallel-load-exchange-algo= "
        "--dist-ckpt-save-pre-mcore-014 --use-dist-ckpt --dist-ckpt-format= --ckpt-drop-redundant-extra-state "
        "--ckpt-fully-parallel-load-per-rank-objects --ckpt-fully-parallel-save-process-group= "
        "--ckpt-fully-parallel-load-process-group= --ckpt-pg-tensors-cache-path= --ckpt-pg-tensors-cache-create "
        "--no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity "
        "--no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load "
        "--distrib-optim-fully-reshardable-mem-efficient"
    ),
    "--async-save has one writer process per rank": (
        "--use-persistent-ckpt-worker --async-strategy= --async-ckpt-use-cpu-shm "
        "--async-ckpt-cpu-priority= --async-ckpt-io-priority="
    ),
    "--check-replicas-interval compares the bits of replicas, by default every 100 iterations": (
        "--check-weight-hash-across-dp-replicas-interval="
    ),
    "spikes are found and logged, see --spike-policy": "--check-for-spiky-loss",
    "slow ranks are found and logged, see --straggler-threshold": (
        "--log-straggler --straggler-minmax-count= --straggler-ctrlr-port= --disable-straggler-on-startup"
    ),
    "the launcher restarts a failed run (docs/slurm.md)": (
        "--enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters="
    ),
    "tests run apart from training": "--test-mode",
}


class NoEffect(NamedTuple):
    """A flag of Megatron-LM that changes nothing."""

    reason: str
    values: str | None
    """The values that it has: None for a switch, ``*`` for several, empty for any, else the choices between bars."""


# Flags of Megatron-LM that are accepted, and named in a line at the start of the run.
NO_EFFECT = {
    flag: NoEffect(reason, values if has_value else None)
    for reason, flags in _NO_EFFECT_BY_REASON.items()
    for flag, has_value, values in (entry.partition("=") for entry in flags.split())
}


def remedy_of(flag: str) -> str | None:
    """What to do about a flag of Megatron-LM that is refused; None for another one."""
    return next(
        (remedy for remedy, patterns in REFUSED.items() if any(fnmatchcase(flag, one) for one in patterns.split())),
        None,
    )

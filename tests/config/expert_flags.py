"""Flags of mixture of experts that are refused, and combinations that are accepted: rows of ``test_checks.py``."""

GOOD = "--model tiny --mock-data --vocab-size 1000 --seq-length 64 --micro-batch-size 2 --train-iters 10 --lr 1e-3"
EXPERTS = f"{GOOD} --num-experts 8"
SIGMOID = f"{EXPERTS} --moe-router-score-function sigmoid"
GROUPS = f"{SIGMOID} --moe-router-num-groups 4 --moe-router-group-topk"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
LOSS = "--moe-router-load-balancing-type"

REFUSED = [
    # Flags without experts.
    *(
        (f"{GOOD} {flag}", 2, f"{flag.split()[0]}, --num-experts")
        for flag in (
            "--expert-model-parallel-size 2",
            "--moe-router-topk 1",
            "--moe-ffn-hidden-size 64",
            "--moe-z-loss-coeff 1e-3",
            "--moe-shared-expert-intermediate-size 64",
            f"{LOSS} seq_aux_loss",
        )
    ),
    (f"{EXPERTS} --num-experts 0 --moe-layer-freq 2", 1, "--moe-layer-freq, --num-experts"),
    (f"{GOOD} --model tiny-moe --num-experts 0", 1, "--num-experts 0, --model tiny-moe"),
    (f"{GOOD} --dry-run --num-gpus 8 --dry-run-expert-load 2", 8, "--dry-run-expert-load, --num-experts"),
    (f"{EXPERTS} --dry-run-expert-load 2", 1, "--dry-run-expert-load, --dry-run"),
    (
        f"{EXPERTS} --dry-run --num-gpus 8 --dry-run-expert-load 0.5",
        8,
        "--dry-run-expert-load 0.5, --expert-model-parallel-size 1",
    ),
    (
        f"{EXPERTS} --expert-model-parallel-size 2 --dry-run --num-gpus 8 --dry-run-expert-load 2.5",
        8,
        "--dry-run-expert-load 2.5, 2, --expert-model-parallel-size 2",
    ),
    # One expert on a rank: half of the two choices of every token.
    (
        f"{EXPERTS} --expert-model-parallel-size 8 --dry-run --num-gpus 8 --dry-run-expert-load 4.5",
        8,
        "--dry-run-expert-load 4.5, 4, --expert-model-parallel-size 8",
    ),
    # The pattern of MoE layers.
    *(
        (f"{EXPERTS} --moe-layer-freq {pattern}", 1, f"--moe-layer-freq {pattern}, {named}, 0, 1")
        for pattern, named in (
            ("0", "1"),
            ("[1]*3", "3, 4, --num-layers"),
            ("[1]*99999", "10,000"),
            ("[0,1]*", "number"),
            ("[0,2]", "'2'"),
            ("[0,1]]", "']'"),
            ("(" * 21 + "[1]" + ")" * 21, "20"),
            ("__import__(os)", "'_'"),
        )
    ),
    (f"{EXPERTS} --moe-layer-freq [0]*4", 1, "--moe-layer-freq [0]*4, --num-experts 8"),
    # The router.
    (f"{EXPERTS} --moe-router-topk 9", 1, "--moe-router-topk 9, --num-experts 8"),
    (
        f"{EXPERTS} --moe-router-topk 1",
        1,
        "--moe-router-topk 1, --moe-router-pre-softmax, --moe-router-score-function sigmoid",
    ),
    (f"{SIGMOID} --moe-router-pre-softmax", 1, "--moe-router-pre-softmax, --moe-router-score-function sigmoid"),
    (f"{SIGMOID} --moe-apply-probs-on-input", 1, "--moe-apply-probs-on-input, --moe-router-topk 1, 2"),
    (
        f"{EXPERTS} --moe-router-enable-expert-bias",
        1,
        "--moe-router-enable-expert-bias, --moe-router-score-function sigmoid",
    ),
    (
        f"{EXPERTS} --moe-router-bias-update-rate 1e-2",
        1,
        "--moe-router-bias-update-rate, --moe-router-enable-expert-bias",
    ),
    (f"{EXPERTS} --moe-router-num-groups 4", 1, "--moe-router-num-groups, --moe-router-group-topk"),
    (f"{EXPERTS} --moe-router-group-topk 2", 1, "--moe-router-group-topk, --moe-router-num-groups"),
    (f"{GROUPS} 2 --moe-router-num-groups 3", 1, "--num-experts 8, --moe-router-num-groups 3"),
    (f"{GROUPS} 3", 1, "--moe-router-group-topk 3, --moe-router-num-groups 4, --moe-router-topk 2"),
    (f"{GROUPS} 1 --moe-router-topk 3", 1, "--moe-router-group-topk 1, 2, --moe-router-topk 3"),
    *((f"{EXPERTS} --moe-router-dtype {dtype}", 1, f"--moe-router-dtype {dtype}, --fp64") for dtype in ("fp64",)),
    (f"{EXPERTS} --fp64 --moe-router-dtype fp32", 1, "--moe-router-dtype fp32, --fp64"),
    # The balance of the load.
    (f"{EXPERTS} {LOSS} seq_aux_loss", 1, f"{LOSS} seq_aux_loss, --moe-aux-loss-coeff 0"),
    (f"{EXPERTS} {LOSS} seq_aux_loss aux_loss --moe-aux-loss-coeff 1e-2 0", 1, "--moe-aux-loss-coeff 0.01 0, none"),
    (f"{EXPERTS} {LOSS} none --moe-aux-loss-coeff 1e-2", 1, f"--moe-aux-loss-coeff 0.01, {LOSS} none"),
    (f"{EXPERTS} {LOSS} none aux_loss --moe-aux-loss-coeff 1e-2", 1, f"{LOSS} none aux_loss"),
    (f"{EXPERTS} {LOSS} aux_loss aux_loss --moe-aux-loss-coeff 1e-2 1e-2", 1, f"{LOSS} aux_loss aux_loss"),
    (f"{EXPERTS} --moe-aux-loss-coeff 1e-2 1e-2", 1, f"--moe-aux-loss-coeff 0.01 0.01, 2, 1, {LOSS} aux_loss"),
    (f"{EXPERTS} --moe-aux-loss-coeff nan", 1, "--moe-aux-loss-coeff nan"),
    (
        f"{EXPERTS} --moe-shared-expert-overlap",
        1,
        "--moe-shared-expert-overlap, --moe-shared-expert-intermediate-size",
    ),
    # The layout.
    (f"{EXPERTS} --expert-model-parallel-size 3", 3, "--num-experts 8, --expert-model-parallel-size 3"),
    (
        f"{EXPERTS} --moe-ffn-hidden-size 65 --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "--moe-ffn-hidden-size 65, --expert-tensor-parallel-size 2, --tensor-model-parallel-size",
    ),
    (
        f"{EXPERTS} --moe-ffn-hidden-size 64 --expert-tensor-parallel-size 3",
        3,
        "--moe-ffn-hidden-size 64, --expert-tensor-parallel-size 3",
    ),
    (
        f"{EXPERTS} --moe-shared-expert-intermediate-size 65 --tensor-model-parallel-size 2 --sequence-parallel",
        2,
        "--moe-shared-expert-intermediate-size 65, --tensor-model-parallel-size 2",
    ),
    (
        f"{EXPERTS} --tensor-model-parallel-size 2",
        2,
        "--num-experts, --tensor-model-parallel-size 2, --sequence-parallel",
    ),
    (
        f"{EXPERTS} --expert-model-parallel-size 4 --pipeline-model-parallel-size 2",
        4,
        "2, --expert-model-parallel-size 4, --expert-tensor-parallel-size 1",
    ),
    (
        f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2",
        2,
        "2, --expert-model-parallel-size 2, --expert-tensor-parallel-size 2, --tensor-model-parallel-size, 4",
    ),
    (
        f"{EXPERTS} --expert-model-parallel-size 4 --use-distributed-optimizer --num-distributed-optimizer-instances 2",
        4,
        "--num-distributed-optimizer-instances 2, 1, --expert-model-parallel-size",
    ),
    # Experts are sharded, dense weights are not.
    (
        f"{EXPERTS} --num-layers 4 --no-untie-embeddings-and-output-weights --tensor-model-parallel-size 2 "
        "--sequence-parallel --expert-tensor-parallel-size 1 --pipeline-model-parallel-size 2 "
        "--pipeline-schedule zb-v --use-torch-fsdp2",
        4,
        "--pipeline-schedule zb-v, --data-parallel-sharding-strategy, --untie-embeddings-and-output-weights",
    ),
    # Optimizer, precision and recompute.
    (f"{EXPERTS} --optimizer muon", 1, "--optimizer muon, --num-experts"),
    (f"{EXPERTS} --bf16 --fp8-format hybrid", 1, "--fp8-format hybrid, --num-experts"),
    *(
        (f"{EXPERTS} {SELECTIVE} {whole} {part}", 1, f"--recompute-modules {whole}, {part}")
        for whole, part in (("moe", "moe_act"), ("moe", "shared_experts"))
    ),
    *(
        (f"{arguments} {SELECTIVE} {module}", 1, f"--recompute-modules {module}, {instead}")
        for arguments, module, instead in (
            (GOOD, "moe", "mlp"),
            (GOOD, "moe_act", "mlp_act"),
            (EXPERTS, "mlp", "moe"),
            (EXPERTS, "mlp_act", "moe_act"),
            (EXPERTS, "shared_experts", "moe"),
        )
    ),
]

ACCEPTED = [
    (EXPERTS, 1),
    (f"{GOOD} --num-experts 0", 1),
    (f"{EXPERTS} --moe-layer-freq 2 {SELECTIVE} mlp moe", 1),
    (f"{EXPERTS} --moe-router-topk 8 --moe-layer-freq ([0]*1+[1]*1)*2 {SELECTIVE} mlp moe_act layernorm", 1),
    (f"{EXPERTS} --moe-router-topk 1 --moe-router-pre-softmax --moe-apply-probs-on-input", 1),
    (f"{SIGMOID} --moe-router-topk 1 --moe-apply-probs-on-input --moe-shared-expert-intermediate-size 64", 1),
    (f"{GROUPS} 2 --moe-router-topk 3 --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2", 1),
    (f"{EXPERTS} {LOSS} none", 1),
    (f"{EXPERTS} {LOSS} seq_aux_loss aux_loss --moe-aux-loss-coeff 1e-2 1e-3 --moe-z-loss-coeff 1e-3", 1),
    (f"{EXPERTS} --fp64 --moe-router-dtype fp64 --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion", 1),
    (f"{EXPERTS} --bf16 --moe-router-dtype fp32", 1),
    (f"{EXPERTS} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap {SELECTIVE} shared_experts", 1),
    (f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8", 16),
    (
        f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 8 "
        "--expert-tensor-parallel-size 1 --context-parallel-size 2",
        8,
    ),
    # All layers are MoE layers, so the width of dense layers divides nothing.
    (
        f"{EXPERTS} --ffn-hidden-size 65 --moe-ffn-hidden-size 64 --tensor-model-parallel-size 2 --sequence-parallel",
        2,
    ),
    (f"{EXPERTS} --transformer-impl transformer_engine", 1),
    (f"{EXPERTS} --expert-model-parallel-size 8 --dry-run --num-gpus 16 --dry-run-expert-load 1.5", 16),
]

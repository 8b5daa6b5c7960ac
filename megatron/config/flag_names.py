"""The names of all flags, and a suggestion for a name that is none."""

import difflib
from dataclasses import Field, fields
from functools import cache
from typing import Any

from megatron.config.run import RunConfig
from megatron.flags import flag_of

_SYNONYMS_BY_FLAG = {
    "--lr": "learning-rate max-lr peak-lr max-learning-rate",
    "--min-lr": "min-learning-rate",
    "--lr-warmup-iters": "warmup warmup-iters warmup-steps num-warmup-steps lr-warmup-steps",
    "--lr-decay-style": "lr-scheduler lr-scheduler-type scheduler",
    "--micro-batch-size or --global-batch-size": "batch-size bs",
    "--micro-batch-size": "mbs per-device-train-batch-size per-device-batch-size device-batch-size",
    "--global-batch-size": "gbs train-batch-size gradient-accumulation-steps grad-accum accumulate-grad-batches",
    "--train-iters": "max-steps steps num-steps train-steps max-iters iterations num-iterations",
    "--train-iters or --train-samples": "epochs num-epochs num-train-epochs max-epochs",
    "--seq-length": "sequence-length seq-len max-seq-len max-seq-length context-length block-size max-length ctx",
    "--num-layers": "layers n-layer n-layers num-hidden-layers",
    "--hidden-size": "d-model n-embd dim embedding-dim",
    "--num-attention-heads": "heads n-head n-heads num-heads",
    "--num-query-groups": "num-key-value-heads num-kv-heads n-kv-heads",
    "--ffn-hidden-size": "intermediate-size mlp-size d-ff",
    "--kv-channels": "head-dim head-size",
    "--rotary-base": "rope-theta rope-base",
    "--norm-epsilon": "rms-norm-eps layernorm-epsilon norm-eps",
    "--no-untie-embeddings-and-output-weights": "tie-embeddings tie-word-embeddings",
    "--num-experts": "experts num-local-experts n-experts",
    "--moe-router-topk": "num-experts-per-tok top-k topk",
    "--tensor-model-parallel-size": "tp tp-size tensor-parallel",
    "--pipeline-model-parallel-size": "pp pp-size pipeline-parallel",
    "--context-parallel-size": "cp cp-size context-parallel",
    "--expert-model-parallel-size": "ep ep-size expert-parallel expert-parallel-size",
    "--data-parallel-sharding-strategy": "fsdp zero zero-stage sharding-strategy",
    "--recompute-activations": "gradient-checkpointing activation-checkpointing checkpoint-activations",
    "--bf16": "precision dtype mixed-precision",
    "--fp8-format": "fp8",
    "--clip-grad": "max-grad-norm grad-clip gradient-clipping gradient-clip-val",
    "--weight-decay": "wd",
    "--adam-beta1": "beta1",
    "--adam-beta2": "beta2",
    "--adam-beta1 or --adam-beta2": "betas adam-betas",
    "--attention-backend": "flash-attention flash-attn attn-implementation",
    "--data-path": "dataset data train-data corpus data-dir",
    "--tokenizer-model": "tokenizer tokenizer-path tokenizer-name",
    "--load": "resume resume-from resume-from-checkpoint checkpoint ckpt checkpoint-path",
    "--load-hf": "pretrained model-name-or-path from-pretrained",
    "--save": "output-dir save-dir out-dir output checkpoint-dir",
    "--save-interval": "save-steps save-every checkpoint-interval",
    "--save-retain-last": "save-total-limit keep-last",
    "--eval-interval": "eval-steps eval-every",
    "--log-interval": "logging-steps log-every",
    "--seed": "random-seed",
    "--num-workers": "dataloader-num-workers workers",
    "--wandb-project": "wandb",
    "--tensorboard-dir": "tensorboard log-dir logging-dir",
}
SYNONYMS = {name: flag for flag, names in _SYNONYMS_BY_FLAG.items() for name in names.split()}
"""Names that other programs have for a flag, without hyphens in front."""


@cache
def fields_by_flag(run_config: type[RunConfig] = RunConfig) -> dict[str, Field[Any]]:
    """The dataclass field of every flag of ``run_config``, in the order of the groups."""
    return {
        flag_of(flag.name): flag
        for group in fields(run_config)
        for flag in fields(group.default_factory)  # type: ignore[arg-type]
    }


def flag_names() -> list[str]:
    """Every flag of the command line, in order, without its ``--no-`` form."""
    return list(fields_by_flag())


def is_switch(field: Field[Any]) -> bool:
    """Whether the flag has no value, and a ``--no-`` form."""
    return field.type in (bool, "bool")


@cache
def all_spellings() -> list[str]:
    """Every flag, and the ``--no-`` forms."""
    known = fields_by_flag()
    return [*known, *(f"--no-{flag[2:]}" for flag, field in known.items() if is_switch(field))]


def suggestion(flag: str) -> str:
    """What to write instead of the unknown ``flag``."""
    synonym = SYNONYMS.get(flag.lstrip("-"))
    nearest = [synonym] if synonym else difflib.get_close_matches(f"--{flag.lstrip('-')}", all_spellings(), 1, 0.7)
    return f"did you mean {nearest[0]}?" if nearest else "see --help."

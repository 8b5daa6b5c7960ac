"""How a flag of a run is read, with an answer to flags and values of Megatron-LM and to names of other programs."""

from collections.abc import Sequence
from typing import Any

from megatron.command_line.flag import Flag
from megatron.command_line.parser import Parser
from megatron.command_line.words import Given, one_of, surplus
from megatron.config.compatibility import DESCRIPTIVE
from megatron.config.megatron_lm import NO_EFFECT, NOT_SUPPORTED_VALUES, remedy_of
from megatron.config.run import RunConfig
from megatron.errors import ConfigError

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
# Names that other programs have for a flag, without hyphens in front.
SYNONYMS = {name: flag for flag, names in _SYNONYMS_BY_FLAG.items() for name in names.split()}


class RunParser(Parser[RunConfig]):
    """The parser of the flags of ``pretrain_llama.py``."""

    def unknown(self, given: Given) -> ConfigError:
        remedy = remedy_of(given.flag)
        if remedy is not None:
            return ConfigError(f"{given.flag} of Megatron-LM is not supported: {remedy}")
        return super().unknown(given)

    def value(self, flag: Flag, name: str, words: Sequence[str]) -> Any:
        # A value of Megatron-LM has a better message than an unknown word.
        for word in words:
            reason = NOT_SUPPORTED_VALUES.get(name, {}).get(word)
            if reason is not None:
                raise ConfigError(f"{name} {word} of Megatron-LM is not supported: {reason}")
        return super().value(flag, name, words)

    def has_no_effect(self, given: Given) -> bool:
        """Whether a flag is accepted for compatibility alone, and does not describe the model."""
        found = self.find(given.flag)
        if found is None:
            return given.flag in NO_EFFECT
        return found[0].has_no_effect and found[0].field.name not in DESCRIPTIVE


RUN_PARSER = RunParser(RunConfig, "pretrain_llama.py", SYNONYMS)


def check_without_effect(given: Given) -> None:
    """Raise :class:`ConfigError` unless a flag of ``NO_EFFECT`` is ``given`` with values that it can have."""
    known = NO_EFFECT[given.flag]
    most = 0 if known.values is None else 1
    if known.values != "*" and len(given.values) > most:
        raise ConfigError(surplus(given.values[most]))
    if known.values is not None and not given.values:
        raise ConfigError(f"{given.flag} has no value: add one after it, or remove {given.flag}.")
    choices = (known.values or "").split("|")
    if known.values not in (None, "", "*") and given.values[0] not in choices:
        raise ConfigError(
            f"{given.as_typed} of Megatron-LM is not supported, because {known.reason}: use {one_of(choices)}, or "
            "remove it."
        )

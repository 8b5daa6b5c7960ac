"""OLMo-core's Transformer and train module as a contender of benchmarks/peers.py.

In bf16 the weights stay in fp32, and the train module computes under autocast.
"""

from typing import Any

from olmo_core.config import DType
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.parallel.pipeline_parallel import PipelineScheduleType
from olmo_core.nn.attention.ring import UlyssesContextParallelStyle
from olmo_core.nn.feed_forward import FeedForwardConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, OptimGroupOverride
from olmo_core.train.train_module import (
    TransformerContextParallelConfig,
    TransformerDataParallelConfig,
    TransformerPipelineParallelConfig,
    TransformerTensorParallelConfig,
    TransformerTrainModuleConfig,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from benchmarks.lib.peers.job import BETAS, EPSILON, LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, Job, Step


class Metrics:
    """What a train module needs of OLMo-core's Trainer, whose loop, data loader and checkpoints are not timed."""

    def __init__(self, dp_process_group: ProcessGroup | None, global_batch_size: int) -> None:
        self.dp_process_group = dp_process_group
        self.global_batch_size = global_batch_size
        """In tokens."""
        self.loss = 0.0

    def record_ce_loss(self, value: Tensor, reduce_type: Any = None) -> None:
        """Keep the mean loss over the tokens of this rank."""
        self.loss = float(value)

    def record_metric(self, name: str, value: Any, **options: Any) -> None:
        """Drop another metric."""


def build(job: Job) -> Step:
    """A step of the train module, which splits the rank's batch into microbatches."""
    length = job.model["max_position_embeddings"]
    batch_size = next(job.read_batches()).shape[0]
    replicas = job.size("dp") * job.size("fsdp")
    config = TransformerTrainModuleConfig(
        rank_microbatch_size=min(job.micro_batch_size, batch_size // replicas) * length,
        max_sequence_length=length,
        optim=_adamw(),
        max_grad_norm=MAX_NORM,
        compile_model=job.is_compiled,
        autocast_precision=None if job.dtype == "fp32" else DType.from_pt(job.torch_dtype),
        **_parallelism(job),
    )
    module = config.build(_model_config(job).build(init_device="meta"), device=job.torch_device)
    metrics = Metrics(module.dp_process_group, batch_size * length)
    module._attach_trainer(metrics)
    module.pre_train()  # refuses a schedule of pipelines
    set_model_state_dict(module.model, _weights(job), options=StateDictOptions(full_state_dict=True))

    def step(batch: Tensor) -> float:
        mine = batch.chunk(replicas)[job.rank] if replicas > 1 else batch
        module.zero_grads()
        module.train_batch({"input_ids": mine[:, :-1], "labels": mine[:, 1:]})
        module.optim_step()
        # All ranks have equal numbers of tokens: under TP and CP they split the sequences.
        return metrics.loss / job.ranks

    return step


def _adamw() -> AdamWConfig:
    """torch's AdamW; norm weights have no weight decay."""
    norms = OptimGroupOverride(params=["*norm.weight"], opts={"weight_decay": 0.0})
    return AdamWConfig(
        lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True, group_overrides=[norms]
    )


def _model_config(job: Job) -> TransformerConfig:
    model = job.model
    return TransformerConfig.llama_like(
        d_model=model["hidden_size"],
        vocab_size=model["vocab_size"],
        n_layers=model["num_hidden_layers"],
        n_heads=model["num_attention_heads"],
        n_kv_heads=model["num_key_value_heads"],
        head_dim=model["head_dim"],
        layer_norm_eps=model["rms_norm_eps"],
        rope_theta=int(model["rope_theta"]),
        feed_forward=FeedForwardConfig(hidden_size=model["intermediate_size"], bias=False),
        dtype=DType.float32,
    )


def _parallelism(job: Job) -> dict[str, Any]:
    """The flags of the layout. TP, PP and CP need a data-parallel config, too: here of one replica.

    OLMo-core wraps the model in DDP over the ranks of CP. TP has FSDP, since TP with DDP has gradients of zero.
    """
    fsdp = TransformerDataParallelConfig(DataParallelType.fsdp)
    ddp = TransformerDataParallelConfig(DataParallelType.ddp)
    match job.layout:
        case "dp":
            return {"dp_config": ddp}
        case "fsdp":
            return {"dp_config": fsdp}
        case "tp":
            return {"dp_config": fsdp, "tp_config": TransformerTensorParallelConfig(job.ranks)}
        case "pp":
            # Raises an error: the train module has interleaved and V schedules alone, which need streams of CUDA.
            pipeline = TransformerPipelineParallelConfig(job.ranks, PipelineScheduleType.single_1F1B)
            return {"dp_config": ddp, "pp_config": pipeline}
        case "cp":
            # Ring attention needs flash attention, which needs CUDA.
            return {
                "dp_config": ddp,
                "cp_config": TransformerContextParallelConfig(job.ranks, uly=UlyssesContextParallelStyle()),
            }
    return {}


_MODULES = {
    "model.embed_tokens": "embeddings",
    "model.norm": "lm_head.norm",
    "lm_head": "lm_head.w_out",
    "self_attn.q_proj": "attention.w_q",
    "self_attn.k_proj": "attention.w_k",
    "self_attn.v_proj": "attention.w_v",
    "self_attn.o_proj": "attention.w_out",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "feed_forward_norm",
}
"""From Hugging Face's module names to OLMo-core's; modules of a layer are without ``model.layers.N``."""


def _weights(job: Job) -> dict[str, Any]:
    """The start weights by OLMo-core's names."""
    return {_name(name): weight for name, weight in job.read_weights().items()}


def _name(hugging_face: str) -> str:
    """OLMo-core's name of a weight."""
    module = hugging_face.removesuffix(".weight")
    if not module.startswith("model.layers."):
        return f"{_MODULES[module]}.weight"
    layer, module = module.removeprefix("model.layers.").split(".", 1)
    return f"blocks.{layer}.{_MODULES[module]}.weight"

"""torchtitan's Llama 3 as a contender of benchmarks/peers.py.

In bf16 the weights stay in fp32 and one rank computes under autocast, as with torchtitan's own trainer.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.distributed.utils import clip_grad_norm_, get_spmd_context, set_spmd_backend
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.trainer import Trainer

from benchmarks.lib.peers.job import BETAS, EPSILON, LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, Job, Step

DTENSOR = "partial_dtensor"
"""torchtitan's default, spmd_types, fails under FSDP with torch 2.13 on tensors that are no DTensors."""
_INIT: dict[str, Any] = {"weight": nn.init.ones_}
"""The start weights replace the values."""


def build(job: Job) -> Step:
    """A step of microbatches, or of a pipeline."""
    return _pipeline_step(job) if job.layout == "pp" else _microbatch_step(job)


class Setup:
    """torchtitan's configs, and the model with the start weights before it is parallelized."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.length: int = job.model["max_position_embeddings"]
        self.batch_size: int = next(job.read_batches()).shape[0]
        if job.device == "cpu":
            # torchtitan takes CUDA for the device of its meshes where there is no accelerator.
            parallel_dims.device_type = "cpu"
        self.dims = self._dims()
        self.dims.build_mesh()
        set_spmd_backend(DTENSOR)
        parallelism, training = self._parallelism(), self._training()
        self.config = _model_config(job)
        self.config.update_from_config(config=Trainer.Config(parallelism=parallelism, training=training))
        self.arguments: dict[str, Any] = {
            "parallel_dims": self.dims,
            "training": training,
            "parallelism": parallelism,
            "compile_config": CompileConfig(enable=job.is_compiled),
            "ac_config": None,
            "dump_folder": "",
        }
        """Arguments of the functions that parallelize a model."""
        loss = CrossEntropyLoss.Config(global_vocab_size=job.model["vocab_size"]).build()
        tokens = torch.tensor(self.batch_size * self.length, device=job.torch_device)
        self.loss = partial(loss, global_valid_tokens=tokens)

    def _dims(self) -> ParallelDims:
        size = self.job.size
        return ParallelDims(
            dp_replicate=size("dp"),
            dp_shard=size("fsdp"),
            cp=size("cp"),
            tp=size("tp"),
            pp=size("pp"),
            ep=1,
            world_size=self.job.ranks,
            spmd_backend=DTENSOR,
        )

    def _parallelism(self) -> ParallelismConfig:
        size = self.job.size
        return ParallelismConfig(
            data_parallel_replicate_degree=size("dp"),
            data_parallel_shard_degree=size("fsdp"),
            tensor_parallel_degree=size("tp"),
            pipeline_parallel_degree=size("pp"),
            context_parallel_degree=size("cp"),
            pipeline_parallel_microbatch_size=self.job.micro_batch_size,
            # Equal numbers of layers, as ours has.
            pipeline_parallel_first_stage_less_layers=0,
            pipeline_parallel_last_stage_less_layers=0,
            spmd_backend=DTENSOR,
        )

    def _training(self) -> TrainingConfig:
        replicas = self.job.size("dp") * self.job.size("fsdp")
        dtypes: dict[str, Any] = {"fp32": "float32", "bf16": "bfloat16"}
        return TrainingConfig(
            local_batch_size=self.batch_size // replicas,
            seq_len=self.length,
            mixed_precision_param=dtypes[self.job.dtype],
            disable_cuda_graphs=True,  # pipelines do not have them
        )

    def model(self) -> Llama3Model:
        """The model with the start weights, whose rows for the query and key the adapter permutes for torchtitan."""
        with self.job.torch_device:
            model = self.config.build()
        model.to(torch.float32)
        with torch.no_grad():
            model.init_states()
        # Loaded before FSDP: the fused weights for query, key and value cannot be loaded into DTensors.
        model.load_state_dict(Llama3StateDictAdapter(self.config, None).from_hf(self.job.read_weights()))
        return model


def _microbatch_step(job: Job) -> Step:
    setup = Setup(job)
    model = _parallelize(setup.model(), setup)
    optimizer = _optimizer(model)
    context = get_spmd_context(parallel_dims=setup.dims)
    # Every rank of TP has the loss of all tokens.
    share = 1 / job.size("tp")

    def step(batch: Tensor) -> float:
        optimizer.zero_grad()
        total = torch.zeros((), device=job.torch_device)
        for text in job.microbatches(batch):
            tokens, labels, positions = _inputs(setup, text)
            with context():
                with job.autocast:
                    loss, _ = setup.loss(model(tokens, positions), labels)
                loss.backward()
            total += loss.detach()
        clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return float(total) * share

    return step


def _parallelize(model: Llama3Model, setup: Setup) -> Llama3Model:
    """Call torchtitan's function, or where it would add FSDP over one rank, the functions that it calls."""
    if setup.job.layout in ("dp", "fsdp", "cp"):
        parallelize_llama(model, **setup.arguments)
        if setup.job.device == "cpu":
            _sum_gradients(model)
        return model
    if setup.job.layout == "tp":
        model.parallelize(setup.dims)
    if setup.job.is_compiled:
        apply_compile(model, compile_config=setup.arguments["compile_config"], parallel_dims=setup.dims)
    return model


def _sum_gradients(model: nn.Module) -> None:
    """gloo cannot multiply while it sums, which FSDP asks for to divide by torchtitan's divisor, 1."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _inputs(setup: Setup, text: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """This rank's tokens, labels and, under CP, positions."""
    tokens, labels = text[:, :-1], text[:, 1:]
    if setup.job.layout != "cp":
        return tokens, labels, None
    positions = torch.arange(setup.length, device=text.device).expand(tokens.shape)
    mesh = setup.dims.get_mesh("cp")
    tokens, labels, rest = prepare_context_parallel_input(tokens, labels, {"positions": positions}, mesh, text.device)
    return tokens, labels, rest["positions"]


def _pipeline_step(job: Job) -> Step:
    setup = Setup(job)
    schedule, (stage,), is_first, is_last = pipeline_llm(
        setup.model(),
        **setup.arguments,
        device=job.torch_device,
        model_config=setup.config,
        parallelize_fn=lambda stage, **arguments: _parallelize(stage, setup),
        loss_fn=setup.loss,
    )
    optimizer = _optimizer(stage)
    context = get_spmd_context(parallel_dims=setup.dims)
    pipeline = setup.dims.get_mesh("pp")

    def step(batch: Tensor) -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        tokens = (batch[:, :-1],) if is_first else ()
        with context():
            schedule.step(*tokens, target=batch[:, 1:] if is_last else None, losses=losses if is_last else None)
        clip_grad_norm_(stage.parameters(), MAX_NORM, pp_mesh=pipeline)
        optimizer.step()
        return sum(loss.item() for loss in losses)

    return step


def _optimizer(model: nn.Module) -> Any:
    """torchtitan's container of torch's AdamW; norm weights have no weight decay."""
    groups = [
        ParamGroupConfig(
            pattern=pattern,
            optimizer_name="AdamW",
            optimizer_kwargs={"lr": LEARNING_RATE, "betas": BETAS, "eps": EPSILON, "weight_decay": weight_decay},
        )
        for pattern, weight_decay in (("norm", 0.0), (".*", WEIGHT_DECAY))
    ]
    return OptimizersContainer.Config(param_groups=groups, implementation="fused").build(model_parts=[model])


def _model_config(job: Job) -> Llama3Model.Config:
    """The sizes of ``job.model``, with RoPE that is not scaled."""
    model = job.model
    hidden, vocab = model["hidden_size"], model["vocab_size"]
    norm = partial(RMSNorm.Config, normalized_shape=hidden, eps=model["rms_norm_eps"], param_init=_INIT)
    return Llama3Model.Config(
        dim=hidden,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=hidden, param_init=_INIT),
        norm=norm(),
        lm_head=Linear.Config(in_features=hidden, out_features=vocab, param_init=_INIT),
        layers=[
            Llama3TransformerBlock.Config(
                attention_norm=norm(),
                ffn_norm=norm(),
                attention=_attention_config(model),
                feed_forward=make_ffn_config(
                    dim=hidden, hidden_dim=model["intermediate_size"], w1_param_init=_INIT, w2w3_param_init=_INIT
                ),
            )
            for _ in range(model["num_hidden_layers"])
        ],
    )


def _attention_config(model: dict[str, Any]) -> Any:
    return make_gqa_config(
        dim=model["hidden_size"],
        n_heads=model["num_attention_heads"],
        n_kv_heads=model["num_key_value_heads"],
        head_dim=model["head_dim"],
        wqkv_param_init=_INIT,
        wo_param_init=_INIT,
        # torchtitan's default, flex attention, has no backward pass on CPUs.
        inner_attention=ScaledDotProductAttention.Config(),
        fuse_qkv=True,
        rope=ComplexRoPE.Config(
            dim=model["head_dim"], max_seq_len=model["max_position_embeddings"], theta=model["rope_theta"]
        ),
    )

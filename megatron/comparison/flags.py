"""The flags of two sides by their meaning, and what surrounds the runs: versions, environment."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from megatron.checkpoint.hugging_face.config import describe_directory
from megatron.checkpoint.megatron_lm.conversion import architecture_of
from megatron.comparison.finding import Comparison, Difference, Part
from megatron.comparison.side import Side
from megatron.config.command_line import CommandLine
from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig
from megatron.config.run_parser import RUN_PARSER
from megatron.config.training import TrainingConfig
from megatron.errors import UserError
from megatron.flags import flag_of, words_of

Effect = Literal["loss", "rounding", "nothing"]
"""What a flag can change: the loss, its rounding (each layout and kernel computes the same run), or neither."""

EFFECTS: Mapping[str, Effect] = {
    **dict.fromkeys(
        ("model", "moe", "training", "optimizer", "learning_rate", "precision", "data", "tokenizer"), "loss"
    ),
    **dict.fromkeys(("parallel", "pipeline", "activations", "kernels"), "rounding"),
    **dict.fromkeys(
        ("validation", "checkpoint", "operation", "logging", "dry_run", "plan", "flag_files", "compatibility"),
        "nothing",
    ),
}
"""By group of flags."""
EXCEPTIONS: Mapping[Effect, str] = {
    "loss": """
        load load_hf pretrained_checkpoint ckpt_step finetune load_optim inject_fault nan_policy spike_policy
        spike_window rollback_margin max_rollbacks hidden_dropout attention_dropout calculate_per_token_loss
        rotary_percent normalization swiglu position_embedding""",
    "rounding": """
        attention_backend transformer_impl moe_token_dispatcher_type moe_shared_expert_overlap
        overlap_dispatch_backward_with_experts_wgrad moe_grouped_gemm moe_permute_fusion moe_router_fusion
        micro_batch_size deterministic_mode optimizer_cpu_offload optimizer_offload_fraction
        overlap_cpu_optimizer_d2h_h2d muon_tp_mode make_vocab_size_divisible_by device""",
    "nothing": """
        model max_position_embeddings moe_per_layer_logging exit_interval exit_duration_in_mins
        exit_signal_handler exit_signal check_for_nan_in_loss_and_grad empty_unused_memory_level manual_gc
        manual_gc_interval ema_decay
        valid_data_path test_data_path data_cache_path object_storage_cache_path num_dataset_builder_threads
        valid_text_path num_workers dataloader_timeout mmap_bin_files data_verification_rate tiktoken_pattern
        trust_remote_code distributed_backend distributed_timeout_minutes""",
}
"""The fields that differ from their group."""


def _length(training: TrainingConfig) -> tuple[int | None, ...]:
    """The batch size and the samples of a run; its flags as they are where samples do not follow from them alone."""
    size, iterations, samples = training.global_batch_size, training.train_iters, training.train_samples
    if size is None or training.rampup_batch_size is not None or iterations is None:
        return size, iterations, samples
    return size, None, iterations * size


Meaning = Callable[[RunConfig], Any]
MEANINGS: Mapping[tuple[str, ...], Meaning] = {
    ("data_parallel_sharding_strategy", "use_distributed_optimizer", "use_torch_fsdp2", "use_megatron_fsdp"): (
        lambda run: run.parallel.sharding_strategy
    ),
    ("train_iters", "train_samples"): lambda run: _length(run.training),
    ("tokenizer_type",): lambda run: run.tokenizer.canonical_type,
    ("reset_attention_mask", "dataloader_inter_document_masking"): lambda run: run.data.masks_documents,
    ("lr_decay_iters", "lr_decay_samples"): lambda run: _decay(run),
    ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"): lambda run: _warmup(run),
    ("recompute_granularity", "recompute_activations", "recompute_modules"): lambda run: (
        run.activations.granularity,
        run.activations.modules,
    ),
}
"""Flags that say one thing together, and what they say; other flags are compared one by one."""


def _in_samples(run: RunConfig, iterations: int | None, samples: int | None) -> float | None:
    """A length in samples; with a batch size that is not constant, or unknown, in iterations."""
    training = run.training
    is_constant = training.rampup_batch_size is None and training.step_batch_size_schedule is None
    if samples is not None or iterations is None:
        return samples
    return iterations * training.global_batch_size if training.global_batch_size and is_constant else iterations


def _decay(run: RunConfig) -> float | None:
    rate, training = run.learning_rate, run.training
    given = _in_samples(run, rate.lr_decay_iters, rate.lr_decay_samples)
    return _in_samples(run, training.train_iters, training.train_samples) if given is None else given


def _warmup(run: RunConfig) -> float | None:
    rate = run.learning_rate
    if rate.lr_warmup_fraction is not None:
        return rate.lr_warmup_fraction * (_decay(run) or 0.0)
    return _in_samples(run, rate.lr_warmup_iters or None, rate.lr_warmup_samples or None)


def effect_of(group: str, name: str) -> Effect:
    """What the flag of a field can change."""
    return next((effect for effect, names in EXCEPTIONS.items() if name in names.split()), EFFECTS[group])


def changes_model(flag: str) -> bool:
    """Whether a flag changes what a model computes for given samples."""
    found = RUN_PARSER.find(flag)
    if found is None:
        return False
    name = found[0].field.name
    masks = (
        "eod_mask_loss",
        "reset_position_ids",
        *next(names for names in MEANINGS if "reset_attention_mask" in names),
    )
    return name in masks or (_group_of(name) in ("model", "moe") and effect_of(_group_of(name), name) == "loss")


def config_for(side: Side) -> RunConfig | None:
    """The flags of a side: its own, the equivalent of Megatron-LM's arguments, or of a model of Hugging Face those of
    the architecture; None if they are not known."""
    if side.config is not None or side.foreign is None:
        return side.config
    if side.kind == "hugging-face":
        return RunConfig(model=ModelConfig.of(describe_directory(side.path).architecture))
    return config_of_megatron(side.foreign)


def config_of_megatron(arguments: Mapping[str, Any]) -> RunConfig:
    """Megatron-LM's arguments, in which its defaults are filled in, as flags of this code; those that have no meaning
    here are left out."""
    given: list[str] = []
    for name, value in arguments.items():
        flag = flag_of(name)
        found = RUN_PARSER.find(flag)
        is_sequence = isinstance(value, list | tuple)
        if value is None or found is None or found[0].field.name != name or (is_sequence and not value):
            continue
        if effect_of(_group_of(name), name) == "nothing" or _group_of(name) == "compatibility":
            continue
        words = words_of(name, tuple(value) if is_sequence else value)
        if not CommandLine.of(words).parse().mistakes:
            given += words
    config = CommandLine.of(given).parse().config
    try:
        architecture = _megatron_architecture(arguments)
    except UserError:
        return config
    kernels = {name: getattr(config.model, name) for name in ("attention_backend", "transformer_impl")}
    return replace(config, model=replace(ModelConfig.of(architecture), **kernels))


def _group_of(name: str) -> str:
    return next(group.name for group in fields(RunConfig) if name in _names(group.name))


def compare_flags(a: Side, b: Side) -> Comparison:
    """The flags that differ in their meaning."""
    one, other = config_for(a), config_for(b)
    if one is None or other is None:
        missing = " and ".join(side.label for side, config in ((a, one), (b, other)) if config is None)
        return Comparison("flags", f"The flags of {missing} are not known.", is_complete=False)
    known = set.intersection(*(_known_groups(side) for side in (a, b)))
    names = {group.name for group in fields(RunConfig)}
    refused = [text for side in (a, b) if (text := refused_architecture(side))]
    if refused:
        known -= {"model", "moe"}
    only = "" if known == names else f" of the groups {', '.join(sorted(known))}"
    absent = set[str]()
    for side in (a, b):
        if side.kind == "megatron-lm" and side.config is None and side.foreign is not None:
            given = {name for name, value in side.foreign.items() if value is not None}
            absent |= {name for group in names - {"model", "moe"} for name in _names(group)} - given
    found = [one for one in _differences(one, other, known) if one.what[2:].replace("-", "_") not in absent]
    found += [one for side in (a, b) for one in _fixed_here(side)]
    compared = " ".join([f"All flags{only}, with defaults filled in.", *refused])
    if absent:
        compared += f" {len(absent)} of our flags are no arguments there, and are not compared."
    return Comparison("flags", compared, tuple(found), is_complete=known == names)


def _names(group: str) -> list[str]:
    return [field.name for field in fields(getattr(RunConfig(), group))]


def _fixed_here(side: Side) -> Iterator[Difference]:
    """Arguments of Megatron-LM with a value that this code has not."""
    if side.kind != "megatron-lm" or side.config is not None or side.foreign is None:
        return
    ours = RunConfig().compatibility
    for name in _names("compatibility"):
        value = side.foreign.get(name)
        if effect_of("compatibility", name) == "loss" and value is not None and value != getattr(ours, name):
            here, there = f"{_shown(getattr(ours, name))} in this code", _shown(value)
            sides = (there, here) if side.label == "A" else (here, there)
            yield Difference("flags", flag_of(name), *sides, "not tried: this code has no other value")


def refused_architecture(side: Side) -> str | None:
    """Why the architecture of Megatron-LM's arguments cannot be compared; None if it can."""
    if side.kind != "megatron-lm" or side.config is not None or side.foreign is None:
        return None
    try:
        _megatron_architecture(side.foreign)
    except UserError as error:
        return str(error)
    return None


def _megatron_architecture(arguments: Mapping[str, Any]) -> Any:
    return architecture_of(arguments, int(arguments.get("padded_vocab_size") or 1), "Megatron-LM's flags")


def _known_groups(side: Side) -> set[str]:
    if side.kind == "hugging-face":
        return {"model"}
    everything = {group.name for group in fields(RunConfig)}
    return (set(side.known_groups) or everything) if side.config is not None else everything


def _differences(a: RunConfig, b: RunConfig, known: set[str]) -> Iterator[Difference]:
    same = {name for names, meaning in MEANINGS.items() if meaning(a) == meaning(b) for name in names}
    architectures = [_architecture(config) for config in (a, b)]
    for group in fields(RunConfig):
        if group.name not in known:
            continue
        one, other = getattr(a, group.name), getattr(b, group.name)
        for field in fields(one):
            left, right = (_meaning(config, field.name, given) for config, given in zip(architectures, (one, other)))
            effect = effect_of(group.name, field.name)
            if left == right or field.name in same or effect == "nothing":
                continue
            if field.name == "global_batch_size" and None in (left, right):
                continue  # it follows from the number of ranks
            yield Difference(
                "flags", flag_of(field.name), _shown(left), _shown(right), "", changes_loss=effect == "loss"
            )


def _architecture(config: RunConfig) -> Any:
    try:
        return config.architecture
    except UserError:
        return None


def _meaning(architecture: Any, name: str, group: Any) -> Any:
    """The value of a flag; of the architecture what follows from it."""
    if isinstance(group, ModelConfig) and hasattr(architecture, name) and name != "max_position_embeddings":
        return getattr(architecture, name)
    return getattr(group, name)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# --- surroundings --------------------------------------------------------------------------------------------


def compare_surroundings(a: Side, b: Side) -> list[Comparison]:
    """Versions and environment, where both sides recorded them."""
    found: list[Comparison] = []
    sections: tuple[tuple[Part, Callable[[Side], Mapping[str, Any] | None]], ...] = (
        ("versions", lambda side: (side.environment or {}).get("versions")),
        ("environment", _environment),
    )
    for part, read in sections:
        one, other = read(a), read(b)
        if not one or not other:
            missing = " and ".join(side.label for side, values in ((a, one), (b, other)) if not values)
            found.append(Comparison(part, f"Not recorded for {missing}.", is_complete=False))
            continue
        # They may change rounding; experiments on this machine have one environment.
        differences = tuple(
            Difference(part, name, _shown(one.get(name)), _shown(other.get(name)), "", changes_loss=False)
            for name in sorted(one.keys() | other.keys())
            if one.get(name) != other.get(name)
        )
        found.append(Comparison(part, f"{len(one.keys() | other.keys())} entries.", differences))
    return found


def _environment(side: Side) -> dict[str, Any]:
    recorded = side.environment or {}
    code = recorded.get("git") or {}
    return {
        **recorded.get("variables", {}),
        **recorded.get("accelerator", {}),
        **{name: recorded.get(name) for name in ("world_size", "ranks_per_node") if name in recorded},
        **{f"code {name}": code[name] for name in ("commit", "is_changed") if name in code},
    }

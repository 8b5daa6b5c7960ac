"""Checks of required flags, data, the length of a run, profiles, evaluation, and the features beside the step."""

from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.flags import changed_flags


def check_required(run: RunConfig, world_size: int) -> None:
    required: dict[str, float | None] = {
        "--seq-length": run.data.seq_length,
        "--micro-batch-size": run.training.micro_batch_size,
    }
    if not run.validation.skip_train:
        required["--lr"] = run.learning_rate.lr
        required["--train-iters (or --train-samples)"] = run.training.train_iters or run.training.train_samples
    missing = [flag for flag, value in required.items() if value is None]
    if missing:
        raise ConfigError(*(f"{flag} is missing: set it." for flag in missing))


def check_data_source(run: RunConfig, world_size: int) -> None:
    if not run.data.sources:
        raise ConfigError("No corpus: set --data-path to a tokenized corpus, or add --mock-data.")
    has_training = run.data.train_data_path or run.data.loader or run.validation.skip_train
    if any(run.data.split_paths.values()) and not has_training:
        (first, *_) = run.data.sources
        raise ConfigError(f"{first} needs --train-data-path: add it with the corpora to train on.")
    if run.tokenizer.tokenizer_type is None and not run.data.mock_data and run.data.data_module is None:
        raise ConfigError("--tokenizer-type is missing: set it to the tokenizer of the corpus of --data-path.")
    if run.tokenizer.tokenizer_type is None and run.mock_vocab_size is None:
        raise ConfigError(
            f"{run.data.loader or '--mock-data'} without a tokenizer needs a vocabulary size: add --vocab-size, or a "
            "Llama 2 or 3 preset with --model."
        )


def check_loader_timeout(run: RunConfig, world_size: int) -> None:
    minutes = run.parallel.distributed_timeout_minutes
    if world_size > 1 and run.dataloader_timeout >= minutes * 60:
        raise ConfigError(
            f"--dataloader-timeout {run.dataloader_timeout:.0f} s must be shorter than --distributed-timeout-minutes "
            f"{minutes:g}, after which collectives of the other ranks fail: lower --dataloader-timeout, or raise "
            "--distributed-timeout-minutes."
        )


def check_length(run: RunConfig, world_size: int) -> None:
    unit, other = ("samples", "iters") if run.training.train_samples is not None else ("iters", "samples")
    names = [f"lr_{phase}_{other}" for phase in ("decay", "warmup", "wsd_decay")]
    for flag in changed_flags(run.learning_rate, *names):
        raise ConfigError(f"{flag} cannot be combined with --train-{unit}: use {flag.removesuffix(other)}{unit}.")


def check_profile(run: RunConfig, world_size: int) -> None:
    missing = [rank for rank in run.logging.profile_ranks if not 0 <= rank < world_size]
    if missing:
        raise ConfigError(f"--profile-ranks {missing[0]} is not a rank of this run: use 0 to {world_size - 1}.")
    if run.logging.use_pytorch_profiler and run.logging.tensorboard_dir is None and run.checkpoint.save is None:
        raise ConfigError("--use-pytorch-profiler needs a directory for its traces: add --tensorboard-dir or --save.")
    if run.logging.profile_pipeline is None:
        return
    if run.validation.skip_train:
        raise ConfigError("--profile-pipeline and --skip-train exclude each other: remove one of them.")
    iteration, length = run.logging.profile_pipeline_iteration, run.training.train_iters
    if length is not None and length < iteration:
        raise ConfigError(
            f"--profile-pipeline records iteration {iteration}, which is after --train-iters {length}: lower "
            "--profile-pipeline-iteration, or raise --train-iters."
        )


def check_data_stage(run: RunConfig, world_size: int) -> None:
    stage = run.data.new_data_stage
    if stage is not None and run.validation.skip_train:
        raise ConfigError(f"--new-data-stage {stage} and --skip-train exclude each other: remove one of them.")


def check_validation_sets(run: RunConfig, world_size: int) -> None:
    for flag in changed_flags(run.validation, "full_validation", "multiple_validation_sets"):
        if run.data.mock_data:
            raise ConfigError(f"{flag} needs corpora, and --mock-data has none: remove one of them.")
        if run.data.loader is not None and not run.data.valid_data_path:
            raise ConfigError(f"{flag} needs corpora, and {run.data.loader} has none: add --valid-data-path.")


def check_evaluation_of_average(run: RunConfig, world_size: int) -> None:
    if not run.validation.eval_ema:
        return
    if run.validation.skip_train and run.checkpoint.load is None:
        raise ConfigError("--eval-ema with --skip-train needs a checkpoint with a moving average: add --load.")
    if not run.validation.skip_train and run.optimizer.ema_decay is None:
        raise ConfigError("--eval-ema needs a moving average of the weights: add --ema-decay.")


def check_evaluation_batch(run: RunConfig, world_size: int) -> None:
    size, ranks = run.validation.eval_global_batch_size, run.parallel.data_parallel_size(world_size)
    unit = run.micro_batch_size * ranks
    if size is not None and size % unit:
        raise ConfigError(
            f"--eval-global-batch-size {size} is not divisible by --micro-batch-size {run.micro_batch_size} x "
            f"data-parallel size {ranks}: use a multiple of {unit}."
        )


def check_dry_run(run: RunConfig, world_size: int) -> None:
    if not run.dry_run.dry_run:
        return
    for flag, is_given, reason in (
        ("--use-checkpoint-args", run.checkpoint.use_checkpoint_args, "reads no checkpoint"),
        ("--skip-train", run.validation.skip_train, "simulates a training step"),
        ("--cpu-offloading-num-layers", run.activations.cpu_offloading_num_layers > 0, "cannot separate host memory"),
    ):
        if is_given:
            raise ConfigError(f"{flag} is not supported by --dry-run, which {reason}: remove one of them.")


def check_spikes(run: RunConfig, world_size: int) -> None:
    checkpoint = run.checkpoint
    run.operation.check_spikes_in_run(
        stops_at_nan=run.training.check_for_nan_in_loss_and_grad,
        has_saves=checkpoint.save is not None and checkpoint.save_interval is not None,
        saves_in_part=changed_flags(checkpoint, "save_optim", "save_rng"),
    )


def check_faults(run: RunConfig, world_size: int) -> None:
    checkpoint, operation = run.checkpoint, run.operation
    operation.check_faults_in_run(
        world_size, operation.run_dir, checkpoint.save, checkpoint.async_save, run.data.num_workers
    )

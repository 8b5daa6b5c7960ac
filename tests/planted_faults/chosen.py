"""Chosen faults: over every room, and every kind of mistake that changes of this code have made or may make."""

from tests.planted_faults.fault import Fault

LAYOUTS = "parallel/test_layouts.py"

COLLECTIVES = (
    Fault(
        "tensor parallelism without the all-reduce of outputs",
        "        return self.communicator.start_all_reduce(partial)",
        "        return Work((), lambda: partial)",
        (LAYOUTS,),
    ),
    Fault(
        "the loss without the logits of labels on other ranks",
        "return log_sum_exp - self.ranks.all_reduce(label_logits), log_sum_exp",
        "return log_sum_exp - label_logits, log_sum_exp",
        ("core/test_ops.py", LAYOUTS),
    ),
    Fault(
        "gradients are not summed over the replicas of HSDP",
        "            self._replicas.all_reduce(self.view.shard)",
        "            pass",
        ("core/test_bucket.py", LAYOUTS),
    ),
    Fault(
        "the gradient norm of this rank's shards alone",
        "return float(self._ranks.all_reduce(self._sum_of_squares(tensors)).sqrt())",
        "return float(self._sum_of_squares(tensors).sqrt())",
        ("core/test_optimizer.py", LAYOUTS),
    ),
    Fault(
        "routers count the tokens of this rank's part of a sequence alone",
        "pending = self._sequence_ranks.start_all_reduce(counts)",
        "pending = Work((), lambda: counts)",
        ("moe/test_balance.py", "parallel/test_expert_layouts.py"),
    ),
    Fault(
        "ring attention without the gradients that arrive",
        "                grad_key_value += grads_so_far",
        "                grad_key_value = grad_key_value",
        ("context_parallel", LAYOUTS),
    ),
    Fault(
        "an exchange sends the part of another rank",
        'messages.append(("send", sent[target], self.ranks[target]))',
        'messages.append(("send", sent[source], self.ranks[target]))',
        ("core/test_communication.py", LAYOUTS),
    ),
)

SCALES = (
    Fault(
        "the load balancing loss is divided by tokens and not by their square",
        "return products * (counts.shape[-1] / (topk * num_tokens**2))",
        "return products * (counts.shape[-1] / (topk * num_tokens))",
        ("moe/test_routing.py", "moe/test_balance.py"),
    ),
    Fault(
        "weights of one expert by sigmoid are normalized to 1",
        "weights = scores if rule.topk == 1 else _normalized(scores)",
        "weights = _normalized(scores)",
        ("moe/test_routing.py", "model/test_llama4.py"),
    ),
    Fault(
        "clipping without the small number in the denominator",
        "return limit / (grad_norm + 1e-6)",
        "return limit / grad_norm",
        ("core/test_optimizer.py", "parallel/test_layouts.py"),
    ),
    Fault(
        "gradients are divided by all tokens instead of the unmasked ones",
        "gradient_factor = expected_tokens / loss.num_tokens / scale",
        "gradient_factor = 1.0 / scale",
        (LAYOUTS, "training"),
    ),
    Fault(
        "the cosine decay without its half",
        '"cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),',
        '"cosine": 1.0 * (1.0 + math.cos(math.pi * progress)),',
        ("core/test_hyperparameters.py",),
    ),
    Fault(
        "Llama 3.1's scaling keeps frequencies that it should divide",
        "return frequencies * (keep + (1 - keep) / scaling_factor)",
        "return frequencies * (keep + (1 - keep) * scaling_factor)",
        ("model/test_rope_scaling.py", "model/test_transformers_parity.py"),
    ),
    Fault(
        "the gradient of a rotation is rotated forward",
        "ctx.rotate(gradients[0][..., : ctx.rotated_size], ctx.table.conj())",
        "ctx.rotate(gradients[0][..., : ctx.rotated_size], ctx.table)",
        ("core/test_ops.py", "model/test_transformers_parity.py"),
    ),
    Fault(
        "the z-loss without the multiplier",
        "total = cross_entropy + multiplier * squares",
        "total = cross_entropy + squares",
        ("pipeline/test_executor.py", LAYOUTS),
    ),
    Fault(
        "Adam's epsilon is not scaled under muP",
        "return self._flags.adam_eps / info.fan_in_mult",
        "return self._flags.adam_eps",
        ("model/test_mup.py", "update_rules/test_adam.py"),
    ),
)

BORDERS = (
    Fault(
        "the first id of the next rank belongs to this one, too",
        "is_outside = (rows < 0) | (rows >= weight.shape[0])  # ids on other ranks",
        "is_outside = (rows < 0) | (rows > weight.shape[0])  # ids on other ranks",
        (LAYOUTS,),
    ),
    Fault(
        "padding of the vocabulary gets probability",
        "        flat = logits[:, : self.width]\n",
        "        flat = logits\n",
        ("core/test_ops.py", LAYOUTS),
    ),
    Fault(
        "chunks of the loss leave out a token",
        "yield slice(start, start + self.chunk_size)",
        "yield slice(start, start + max(1, self.chunk_size - 1))",
        ("core/test_cross_entropy.py",),
    ),
    Fault(
        "the loss scale doubles a step late",
        "if self._good_steps >= self.window:",
        "if self._good_steps > self.window:",
        ("core/test_loss_scale.py",),
    ),
    Fault(
        "a sample ends a token early",
        "ranges[-1] = (documents[-1], 0, last_offset + 1)",
        "ranges[-1] = (documents[-1], 0, last_offset)",
        ("data/test_gpt_dataset.py", "data/test_megatron_core.py"),
    ),
    Fault(
        "documents begin at their last token",
        "starts[1:] = tokens[:-1] == document_end",
        "starts[1:] = tokens[1:] == document_end",
        ("data/test_gpt_dataset.py",),
    ),
    Fault(
        "the loss is masked before the end of a document",
        "be predicted.\n        loss_mask[tokens == masked_token] = 0.0",
        "be predicted.\n        loss_mask[text[1:] == masked_token] = 0.0",
        ("data/test_dataset_builder.py", "data/test_sample_order.py"),
    ),
    Fault(
        "an empty document takes the place of the next one",
        'positions = np.searchsorted(ends, targets, side="right")',
        'positions = np.searchsorted(ends, targets, side="left")',
        ("data/test_sample_order.py", "data/test_megatron_core.py"),
    ),
    Fault(
        "the epoch before the last one takes its samples",
        "apart = num_samples - before_last < int(_LAST_EPOCH_APART_BELOW * per_epoch)",
        "apart = num_samples - before_last <= int(_LAST_EPOCH_APART_BELOW * per_epoch)",
        ("data/test_sample_order.py",),
    ),
    Fault(
        "the nucleus of --top-p holds one token too many",
        "return likely.where(before < config.top_p, 0.0), ids",
        "return likely.where(before <= config.top_p, 0.0), ids",
        ("inference/test_generator.py",),
    ),
    Fault(
        "texts are a token longer than --max-new-tokens",
        "    if count < limit:\n        return None",
        "    if count <= limit:\n        return None",
        ("inference/test_generator.py",),
    ),
    Fault(
        "neighbouring boxes count as overlapping",
        "found = np.flatnonzero(((self.offsets < end) & (begin < self.offsets + self.shapes)).all(axis=1))",
        "found = np.flatnonzero(((self.offsets <= end) & (begin < self.offsets + self.shapes)).all(axis=1))",
        ("checkpoint/test_manifest.py", "checkpoint"),
    ),
    Fault(
        "a file of a forged manifest may be beyond the list",
        "if ((tensor.files < 0) | (tensor.files >= num_files)).any() or",
        "if ((tensor.files < 0) | (tensor.files > num_files)).any() or",
        ("checkpoint/test_manifest.py", "checkpoint"),
    ),
    Fault(
        "one failed attempt more than --max-failed-attempts",
        "    if failed >= limit:",
        "    if failed > limit:",
        ("operation/test_attempts.py",),
    ),
    Fault(
        "the pause before a restart doubles a failure late",
        "return min(_LONGEST_PAUSE, 2.0 ** (self.failures - 2))",
        "return min(_LONGEST_PAUSE, 2.0 ** (self.failures - 3))",
        ("operation/test_nodes.py",),
    ),
    Fault(
        "a ramp of batch sizes counts a batch that crosses a step twice",
        "iterations = -(-remaining // size)",
        "iterations = remaining // size + 1",
        ("training/test_batch_schedule.py",),
    ),
)

STALE = (
    Fault(
        "a recomputed layer never computes its output again",
        "        linear.skip_output = False",
        "        linear.skip_output = True",
        (LAYOUTS,),
    ),
    Fault(
        "gradients of the last step stay in the shard",
        "    def expect(self, num_microbatches: int) -> None:\n        self._is_filled = False\n",
        "    def expect(self, num_microbatches: int) -> None:\n",
        ("core/test_bucket.py", LAYOUTS),
    ),
    Fault(
        "the gradient of an unused parameter is that of the last step",
        '"""End the step: the gradient of an unused parameter is zero."""\n        if not self.is_filled:',
        '"""End the step: the gradient of an unused parameter is zero."""\n        if self.is_filled:',
        ("core/test_main_grad.py", LAYOUTS),
    ),
    Fault(
        "the counts of a step's experts are those of all steps",
        "        self.counts.zero_()\n",
        "",
        ("moe/test_balance.py",),
    ),
    Fault(
        "timers add the spans that were reported before",
        "            spans.clear()\n        return measured",
        "            pass\n        return measured",
        ("metrics/test_metrics.py",),
    ),
    Fault(
        "iterations before a restart in the process set the limit of a hang",
        "snapshot.section in (Section.START, Section.LOAD):\n            rank.spans.clear()",
        "snapshot.section in (Section.START, Section.LOAD):\n            pass",
        ("operation/test_watchdog.py",),
    ),
    Fault(
        "the weight gradient reads the transpose of rows that were quantised in blocks of rows",
        "            transposed = self._quantize_blocks(matrix, size, 1, dtype, True)",
        "            transposed = data.flatten(0, -2).t(), self._quantize_blocks(matrix, size, 1, dtype, True)[1]",
        ("core/test_fp8.py",),
    ),
    Fault(
        "a rank quantises its shard of a block by its own amax",
        'amax = ranks.all_reduce(amax, "max")\n        scales = power_of_two_scale',
        "scales = power_of_two_scale",
        ("core/test_fp8.py", LAYOUTS),
    ),
    Fault(
        "the scales of a transpose are in the order of the blocks before",
        "scale = operand.inverse_scale.t()  # of",
        "scale = operand.inverse_scale.reshape(operand.inverse_scale.t().shape)  # of",
        (LAYOUTS,),
    ),
)

DEFAULTS = (
    Fault(
        "the flags of a file override those of the command line",
        "return cls((*read_run_yaml(Path(path)), *(one for one in given if one is not files[0])))",
        "return cls((*(one for one in given if one is not files[0]), *read_run_yaml(Path(path))))",
        ("config/test_run_yaml.py",),
    ),
    Fault(
        "another default of --adam-beta1",
        "    adam_beta1: float = 0.9\n",
        "    adam_beta1: float = 0.95\n",
        ("docs",),
    ),
    Fault(
        "another default of the hang limit",
        "    step: float = 60.0\n",
        "    step: float = 600.0\n",
        ("operation/test_watchdog.py",),
    ),
    Fault(
        "another surplus of blended corpora",
        "mid_level_dataset_surplus: float = 0.005",
        "mid_level_dataset_surplus: float = 0.006",
        ("data/test_sample_order.py",),
    ),
    Fault(
        "uint16 for vocabularies to its end",
        "_FIRST_VOCAB_SIZE_TOO_LARGE_FOR_UINT16 = 65_500",
        "_FIRST_VOCAB_SIZE_TOO_LARGE_FOR_UINT16 = 65_536",
        ("data/test_indexed_dataset.py",),
    ),
)

LOST_ERRORS = (
    Fault(
        "all mistakes of a tool's command line but the first are lost",
        "            raise ConfigError.of([*values.mistakes, *missing])",
        "            raise (values.mistakes or missing)[0]",
        ("command_line/test_parser.py",),
    ),
    Fault(
        "a flag that is missing is not missed",
        "            if default is None and flag.is_required and",
        "            if default is not None and flag.is_required and",
        ("command_line/test_parser.py",),
    ),
    Fault(
        "a manifest whose digest does not match is read",
        'this code reads {known}")\n        if not is_sealed("manifest", text):',
        'this code reads {known}")\n        if not text:',
        ("checkpoint/test_manifest.py",),
    ),
    Fault(
        "the commit does not look at the lock",
        "        check_token(root, lock_token)\n",
        "        pass\n",
        ("checkpoint/test_lock.py",),
    ),
    Fault(
        "the failure of another rank is not raised",
        "            if failure is not None:\n                raise failure",
        "            if failure is not None and failure is error:\n                raise failure",
        ("core/test_control.py", "training", "end_to_end"),
    ),
    Fault(
        "a token outside of the vocabulary passes",
        "if lowest < 0 or highest >= vocab_size:",
        "if lowest < 0 or highest > vocab_size:",
        ("data/test_indexed_dataset.py",),
    ),
    Fault(
        "a truncated .bin file is read as it is",
        "        if self.stored_bytes < needed:",
        "        if self.stored_bytes + self.dtype.itemsize < needed:",
        ("data/test_indexed_dataset.py",),
    ),
    Fault(
        "a blend that takes more samples than a corpus has",
        "            if needed > available:",
        "            if needed > available + 1:",
        ("data/test_dataset_builder.py", "data/test_sample_order.py"),
    ),
    Fault(
        "a norm that is not finite is applied",
        "if not math.isfinite(grad_norm) or not accepts(grad_norm):",
        "if math.isnan(grad_norm) or not accepts(grad_norm):",
        ("core/test_optimizer.py", "core/test_loss_scale.py"),
    ),
    Fault(
        "heads that tensor parallelism does not divide",
        'divided = values_of(model, "num_attention_heads", "num_query_groups")',
        'divided = values_of(model, "num_attention_heads")',
        ("config/test_checks.py",),
    ),
    Fault(
        "a schedule whose messages cross is accepted",
        "        if sent[key] != received[key]:",
        "        if sorted(map(str, sent[key])) != sorted(map(str, received[key])):",
        ("pipeline/test_simulator.py",),
    ),
    Fault(
        "a prompt that fills the positions is accepted",
        "        if len(prompt) >= max_length:",
        "        if len(prompt) > max_length:",
        ("inference/test_generator.py",),
    ),
)

ORDER = (
    Fault(
        "gradients are reduced after the first microbatch",
        "        self._missing = self._uses * num_microbatches\n",
        "        self._missing = self._uses\n",
        ("core/test_bucket.py", LAYOUTS),
    ),
    Fault(
        "the chunks of a sequence stay in the order of the ranks",
        "[2 * rank + 1 for rank in reversed(range(self.size))]",
        "[2 * rank + 1 for rank in range(self.size)]",
        ("context_parallel",),
    ),
    Fault(
        "the second rename of a checkpoint before the first",
        "        with suppress(FileNotFoundError):\n            os.rename(final, replaced)\n"
        "        try:\n            os.rename(saving, final)",
        "        remove_checkpoint(final)\n        try:\n            os.rename(saving, final)",
        ("checkpoint/test_directory.py", "checkpoint/test_faults.py"),
    ),
    Fault(
        "what a checkpoint removes first is not its manifest",
        "        (directory / MANIFEST).unlink(missing_ok=True)\n    except OSError:\n        return\n",
        "    except OSError:\n        return\n",
        ("checkpoint/test_directory.py",),
    ),
    Fault(
        "samples of a step are counted before its size is read",
        "        self.skipped_samples += batches.skipped_samples(self.consumed_samples)\n"
        "        self.consumed_samples += batches.global_batch_size(self.consumed_samples)\n",
        "        self.consumed_samples += batches.global_batch_size(self.consumed_samples)\n"
        "        self.skipped_samples += batches.skipped_samples(self.consumed_samples)\n",
        ("training/test_batch_schedule.py",),
    ),
    Fault(
        "weight gradients are computed in the reverse order",
        "    deferred.reverse()\n    gathering",
        "    gathering",
        ("core/test_main_grad.py",),
    ),
    Fault(
        "the second evaluation split is consumed by a resumed run",
        "        return self.interval is not None and trainer.state.progress.iteration % self.interval == 0",
        "        return self.interval is not None and trainer.state.progress.iteration % self.interval == 1",
        ("end_to_end/test_training_run.py",),
    ),
)

HOST = (
    Fault(
        "an update on the host does not wait for the gradients",
        "            arriving.synchronize()",
        "            pass",
        ("core/test_optimizer.py", LAYOUTS),
    ),
    Fault(
        "all of the optimizer state is on the host, whatever the share",
        "wanted = config.offloaded_fraction * starts[-1]",
        "wanted = starts[-1] if config.offloaded_fraction else 0",
        ("core/test_optimizer.py", "planner/test_simulated_rank.py"),
    ),
    Fault(
        "moments and averages of shards on the host stay on the device",
        "            with topology.on_host() if number < first else nullcontext():",
        "            with nullcontext():",
        ("planner/test_stage_memory.py", "planner/test_simulated_rank.py"),
    ),
)

SENTENCES = (
    Fault(
        "the remedy of a large blend names the wrong flag",
        'f"{available}: lower its weight in --data-path."',
        'f"{available}: lower its weight in --split."',
        ("data/test_sample_order.py",),
    ),
    Fault(
        "Megatron-LM's line with a field in another order",
        '    "loss_scale": "loss scale: {:.1f}",\n    "grad_norm": "grad norm: {:.3f}",\n',
        '    "grad_norm": "grad norm: {:.3f}",\n    "loss_scale": "loss scale: {:.1f}",\n',
        ("metrics/test_writers.py",),
    ),
    Fault(
        "the slowest rank is shown as the fastest",
        'ends[name] = (slowest if option == "max" else min(times.values()), slowest)',
        'ends[name] = (slowest, slowest if option == "max" else min(times.values()))',
        ("metrics/test_metrics.py",),
    ),
    Fault(
        "the seconds left of a run are those that have passed",
        "        remaining = self.train_iters - record.iteration\n",
        "        remaining = record.iteration\n",
        ("metrics/test_writers.py",),
    ),
)

FIGURES = (
    Fault(
        "the bubble of ZB-H1 is that of 1F1B",
        'bubble = np.where(self._is["schedule", "zb-h1"], np.maximum(bubble - filled, 0.0), bubble)',
        "bubble = bubble + 0.0 * filled",
        ("planner/test_formulas.py", "planner"),
    ),
    Fault(
        "the optimizer updates the parameters of all ranks",
        "parameters = self.parameters / np.where(is_sharded, self.dp * self.cp, 1.0)",
        "parameters = self.parameters",
        ("planner/test_formulas.py",),
    ),
    Fault(
        "microbatches of any size share the record of a layer",
        "return *of_tensor_parallel, *of_context_parallel, self.config.micro_batch_size, in_bf16",
        "return *of_tensor_parallel, *of_context_parallel, in_bf16",
        ("planner/test_search.py", "planner/test_step_prices.py"),
    ),
    Fault(
        "the rehearsed context-parallel rank is the one with the fewest keys",
        'self._rank, self._device = grid.group(0, ("cp",))[-1], device',
        'self._rank, self._device = grid.group(0, ("cp",))[0], device',
        ("planner/test_unit_records.py",),
    ),
    Fault(
        "a search has no time for weight gradients that have passes of their own",
        "return tuple(found[first:second]), tuple(found[second:third]), tuple(found[third:])",
        "return tuple(found[first:second]), tuple(found[second:third]), ()",
        ("planner/test_unit_records.py",),
    ),
    Fault(
        "the output layer of a rehearsal writes its gradient instead of adding it",
        "main_grad.is_filled = True\n            attach_main_grad",
        "main_grad.is_filled = False\n            attach_main_grad",
        ("planner/test_unit_records.py",),
    ),
    Fault(
        "a plan counts activations of one microbatch less",
        "held=np.array([*(one.kept for one in chunks), *(one.deferred for one in chunks), shard]),",
        "held=np.array([*(0 for one in chunks), *(one.deferred for one in chunks), shard]),",
        ("planner/test_stage_memory.py",),
    ),
    Fault(
        "a dry run launches the operations of a compiled kernel one by one",
        "simulated_compiler=partial(partial, tracker.fused)",
        "simulated_compiler=lambda function: function",
        ("planner/test_launches.py",),
    ),
    Fault(
        "a dry run loads the package of a kernel that a flag requires",
        "            made = candidate.ready(operation, compiler)\n            return made",
        "            made = candidate.ready(operation)\n            return made",
        ("kernels/test_selection.py",),
    ),
    Fault(
        "lost iterations count as kept",
        '    seconds["step"], seconds["lost"] = attempt.second("step") - lost, attempt.second("lost") + lost\n',
        '    seconds["lost"] = attempt.second("lost") + lost\n',
        ("operation/test_attempts.py",),
    ),
    Fault(
        "gaps between attempts are no time of the run",
        '    seconds["idle"] += sum(gaps(settled))\n',
        "",
        ("operation/test_attempts.py",),
    ),
    Fault(
        "the rank grid's stages are neighbours of the wrong ranks",
        "        return (high * self.pp + stage) * self._stage_stride + low",
        "        return (high * self.pp + stage) + low * self._stage_stride",
        ("core/test_topology.py",),
    ),
    Fault(
        "FLOPs of attention over the full square",
        "return 6.0 * gemm_parameters + 6.0 * self.query_size * lengths",
        "return 6.0 * gemm_parameters + 12.0 * self.query_size * lengths",
        ("training/test_flops.py",),
    ),
    Fault(
        "tied embeddings count twice",
        "        tables = 2 if self.untie_embeddings_and_output_weights else 1\n",
        "        tables = 2\n",
        ("config/test_command_line.py", "model/test_transformers_parity.py"),
    ),
    Fault(
        "a curve that leaves its band for a while is within it",
        "return abs(self.mean) <= band and self.highest <= band",
        "return abs(self.mean) <= band",
        ("tools/test_compare_losses.py",),
    ),
    Fault(
        "99.97 % is written as 100 %",
        "digits = 2 if 0.9995 > share >= 0.9945 or 0.0 < share < 0.0005 else 1",
        "digits = 2 if 0.0 < share < 0.0005 else 1",
        ("reports",),
    ),
    Fault(
        "bars begin where the part before them begins",
        "        shapes += _part(part, start, scale)\n        start += part.size\n",
        "        shapes += _part(part, start, scale)\n        start = part.size\n",
        ("reports/test_charts.py", "tools/test_planning.py"),
    ),
    Fault(
        "DualPipe-V says that it holds fewer activations",
        "live_activations=lambda stage, shape: min(2 * shape.stages + 1, 2 * shape.microbatches),",
        "live_activations=lambda stage, shape: min(2 * shape.stages, 2 * shape.microbatches),",
        ("pipeline/test_schedules.py",),
    ),
    Fault(
        "interleaved backward passes begin with the first chunk",
        "for group in groups for chunk in reversed(chunks) for microbatch in group]",
        "for group in groups for chunk in chunks for microbatch in group]",
        ("pipeline/test_schedules.py",),
    ),
)

EXPERTS_AND_LAYOUTS = "parallel/test_expert_layouts.py"
FUTURE = "parallel/test_multi_token_prediction.py"
EXPERTS = (
    Fault(
        "every rank of a sequence adds the balancing loss of the whole sequence",
        "            total = total + coeff * loss\n",
        "            total = total + coeff * loss * self._sequence_ranks.size\n",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "the balancing loss is reported, and its gradient is lost",
        "result: Tensor = _WithLoss.apply(hidden, loss, self._scale)",
        "result: Tensor = hidden",
        ("moe/test_balance.py",),
    ),
    Fault(
        "the loss of multi-token prediction counts twice on a tied weight",
        "channel.start_receive(torch.empty_like(shard.gradient), other).wait())",
        "channel.start_receive(torch.empty_like(shard.gradient), other).wait(), alpha=2)",
        (FUTURE,),
    ),
    Fault(
        "the labels of multi-token prediction are those of the depth before",
        "losses = cross_entropy(hidden, labels[:, place + 1])",
        "losses = cross_entropy(hidden, labels[:, place])",
        (FUTURE,),
    ),
    Fault(
        "a depth of multi-token prediction is divided by the tokens of the output layer",
        "* counts[0] / counts[1:].clamp(min=1.0)",
        "* torch.ones_like(counts[1:])",
        (FUTURE,),
    ),
    Fault(
        "a depth predicts tokens of the next document",
        "mask[row, :-places] *= documents[places:] == documents[:-places]",
        "mask[row, :-places] *= documents[places:] >= documents[:-places]",
        (FUTURE,),
    ),
    Fault(
        "the losses of multi-token prediction have the weights of this rank's tokens",
        "counts = self.ranks.all_reduce(counts)",
        "counts = counts.clone()",
        (FUTURE,),
    ),
    Fault(
        "the gradient norm without the experts",
        "if info.is_copy:\n            return False",
        "if info.is_copy or info.is_expert:\n            return False",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "norms count replicated experts twice",
        "return not over_all_ranks or self.of_parameter(info).replicas.rank == 0",
        "return not over_all_ranks or info.is_expert or self.of_parameter(info).replicas.rank == 0",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "norms count the experts of the first tensor-parallel rank alone",
        "if not info.is_expert and not info.tensor_parallel_sharded and self.tensor_parallel.rank > 0:",
        "if (info.is_expert or not info.tensor_parallel_sharded) and self.tensor_parallel.rank > 0:",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "experts share buckets with dense weights",
        "groups.setdefault((info_of(parameter).is_expert, parameter.dtype), [])",
        "groups.setdefault((False, parameter.dtype), [])",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "the gradients of experts are reduced like those of dense weights",
        "experts = ReplicaGroups.of(config, topology, is_expert=True)",
        "experts = ReplicaGroups.of(config, topology)",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "router gradients of a rank's own tokens alone, under sequence parallelism",
        "            gradient_is_partial=is_partial,\n            fan_in_mult=config.width_mult,",
        "            gradient_is_partial=False,\n            fan_in_mult=config.width_mult,",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "the outputs of experts go to other tokens",
        "total = rows.index_select(0, order.rows[:, 0])",
        "total = rows.index_select(0, order.rows.flip(0)[:, 0])",
        ("moe/test_dispatch.py", EXPERTS_AND_LAYOUTS),
    ),
    Fault(
        "the row of every choice is that of another token",
        "return cls(choices, rows)",
        "return cls(choices, rows.flip(0))",
        ("moe/test_dispatch.py",),
    ),
    Fault(
        "the weights of experts are applied twice",
        "total = total * weights[:, :1]",
        "total = total * weights[:, :1] ** 2",
        ("moe/test_dispatch.py",),
    ),
    Fault(
        "rows of an all-to-all stay in the order of their sources",
        "by_expert = _order_by_expert(received, counts.total)",
        "by_expert = None",
        ("moe/test_dispatch.py",),
    ),
    Fault(
        "weights on the output instead of the input of experts",
        "        if not self.probs_on_input:\n",
        "        if self.probs_on_input is not None:\n",
        ("moe/test_experts.py", EXPERTS_AND_LAYOUTS),
    ),
    Fault(
        "the expert bias is part of the weights",
        "_exclude_groups(scores, rule), rule.topk)\n    return Routing(experts, _weights(logits, experts, rule))",
        "_exclude_groups(scores, rule), rule.topk)\n"
        "    biased = logits if expert_bias is None else logits + expert_bias\n"
        "    return Routing(experts, _weights(biased, experts, rule))",
        ("moe/test_routing.py", EXPERTS_AND_LAYOUTS),
    ),
    Fault(
        "gradients of rows that several expert-tensor-parallel ranks have are not summed",
        "return ranks.start_exchange_parts(parts, received).then(add_in_order)",
        "return Work((), lambda: own)",
        ("moe/test_dispatch.py", EXPERTS_AND_LAYOUTS),
    ),
    Fault(
        "the expert bias follows the counts of one rank",
        "        return self._world.start_all_reduce(total)\n",
        "        return Work((), lambda: total)\n",
        (EXPERTS_AND_LAYOUTS,),
    ),
)

LLAMA4 = (
    Fault(
        "chunks of attention begin a position late",
        "origin = span.start if restarts else span.start - span.start % size",
        "origin = span.start if restarts else span.start - (span.start - 1) % size",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "chunks do not restart with documents",
        "spans, restarts = documents.spans, documents.resets_positions",
        "spans, restarts = documents.spans, False",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "layers without a rotation attend inside chunks",
        "        return positions.spans\n\n\nclass SelfAttention",
        "        return positions.chunks\n\n\nclass SelfAttention",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "every layer has a rotation",
        "has_rope = config.rope_layers()[layer]",
        "has_rope = True",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "layers without a rotation are counted from 1",
        "has_rope = config.rope_layers()[layer]",
        "has_rope = config.rope_layers()[layer - 1]",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "a window one key too long at the border of a context-parallel chunk",
        "        window -= distance + len(queries) - len(keys)",
        "        window -= distance + len(queries) - len(keys) - 1",
        ("context_parallel/test_attention.py", LAYOUTS),
    ),
    Fault(
        "the gradient of attention without the slope of its cap",
        "            grad_scores *= 1.0 - (scores / cap).square()",
        "            pass",
        ("context_parallel/test_attention.py",),
    ),
    Fault(
        "an export to Hugging Face that forgets a feature of the architecture",
        "    mtp_num_layers use_mup\n",
        "    mtp_num_layers use_mup attn_logit_softcapping\n",
        ("model/test_architecture_features.py",),
    ),
    Fault(
        "the gradient of a sink with the wrong sign",
        "grad_sinks = (-probability * delta)",
        "grad_sinks = (probability * delta)",
        ("model/test_attention_masks.py",),
    ),
    Fault(
        "generation whose window is a key too short",
        "        mask &= slots >= queries - window",
        "        mask &= slots > queries - window",
        ("inference/test_cached_model.py",),
    ),
    Fault(
        "Llama 4 without its norm of queries and keys",
        "HeadL2Norm(shape, config, context) if config.qk_l2_norm else nn.Identity()",
        "nn.Identity()",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "the temperature of attention counts positions from 0",
        "torch.div(by_row + 1, floor",
        "torch.div(by_row, floor",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "the temperature of attention counts a rank's own positions",
        "                positions, config.attention_temperature_floor,",
        "                torch.arange(len(positions)), config.attention_temperature_floor,",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "chunks are those of a context-parallel rank's own part",
        "length = tables.rotary.shape[0] * self._context.context_parallel.split.size",
        "length = tables.rotary.shape[0]",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "keys are scaled by the temperature, too",
        "self.query_size = shape.query_heads * shape.head_size",
        "self.query_size = (shape.query_heads + shape.key_value_heads) * shape.head_size",
        (EXPERTS_AND_LAYOUTS,),
    ),
    Fault(
        "heads that are exchanged lose their chunks in the backward pass",
        "inner_inputs = AttentionInputs(query, key, value, attended.inputs.spans, attended.inputs.mask)",
        "inner_inputs = AttentionInputs(query, key, value, None, attended.inputs.mask)",
        ("context_parallel", EXPERTS_AND_LAYOUTS),
    ),
)

LAYER_METRICS = ("parallel/test_layer_metrics.py",)
FEATURES = (
    Fault(
        "the norms of layers count a replicated parameter on every rank",
        """            if shard.is_counted:
                total""",
        """            if True:
                total""",
        LAYER_METRICS,
    ),
    Fault(
        "the gradient norms of layers are those of the scaled loss",
        "{layer: norm * abs(gradient_factor) for layer, norm in norms.items()}",
        "{layer: norm for layer, norm in norms.items()}",
        LAYER_METRICS,
    ),
    Fault(
        "the attention logits of layers are those of this rank's heads and positions",
        'by_layer = topology.world.all_reduce(largest, "max").tolist()',
        "by_layer = largest.tolist()",
        LAYER_METRICS,
    ),
    Fault(
        "a record has the metrics, such as those of layers, of the last iteration alone",
        "for result in results:  # the latest value of each name",
        "for result in results[-1:]:",
        ("package/test_listener.py",),
    ),
    Fault(
        "an iteration counts before its features decide whether to stop",
        """        for listener in self.listeners:
            listener.after_step(self, outcome)
        self._count_iteration()
""",
        """        self._count_iteration()
        for listener in self.listeners:
            listener.after_step(self, outcome)
""",
        ("features/test_fault_injection.py", "end_to_end/test_bad_numbers.py"),
    ),
    Fault(
        "a signal hides the alarm of another rank",
        """            if has_failed:
                alarm.raise_on_all_ranks()""",
        """            if has_failed and not got_signal:
                alarm.raise_on_all_ranks()""",
        ("training/test_stop.py",),
    ),
    Fault(
        "the error of a rank that waits hides the one that it waits for",
        "causes = {rank: error for rank, error in errors.items() if error != _NO_ANSWER} or errors",
        "causes = errors",
        ("features/test_preflight.py",),
    ),
    Fault(
        "a rollback skips the samples of the loaded checkpoint's last iteration",
        "first = max(loaded.iteration + 1, request.first_iteration - margin)",
        "first = max(loaded.iteration, request.first_iteration - margin)",
        ("features/test_spikes.py",),
    ),
    Fault(
        "a known product is not tested when its interval is just over",
        "self._clock() - self._tested >= self._interval_s",
        "self._clock() - self._tested > self._interval_s",
        ("features/test_known_product.py",),
    ),
    Fault(
        "the exit code of an injected exit is 2 by default",
        'Number("exit code", 1, 255, default=1, is_whole=True)',
        'Number("exit code", 1, 255, default=2, is_whole=True)',
        ("features/test_fault_injection.py",),
    ),
    Fault(
        "a run that rolled back trains on the samples that it should skip",
        "        state.rollbacks = returned.rollbacks\n",
        "        pass\n",
        ("end_to_end/test_bad_numbers.py",),
    ),
    Fault(
        "a spike detector keeps the losses of the data stage before",
        "        self._detector = SpikeDetector(self._window)\n\n    def metrics",
        "        pass\n\n    def metrics",
        ("features/test_spikes.py",),
    ),
    Fault(
        "a rank that recovered is not named again",
        "        self._named.intersection_update(counts)\n",
        "        pass\n",
        ("features/test_stragglers.py",),
    ),
    Fault(
        "half of the ranks are a majority",
        "if 2 * count <= len(ranks):",
        "if 2 * count < len(ranks):",
        ("features/test_replicas.py",),
    ),
    Fault(
        "a replay suspects the neighbours of the wrong rank",
        'return Verdict("persistent", tuple(sorted(both or sources | targets)), is_finite)',
        'return Verdict("persistent", tuple(sorted(sources | targets)), is_finite)',
        ("features/test_replay.py",),
    ),
    Fault(
        "clocks are compared with that of rank 0",
        "middle = sorted(offsets, key=lambda rank: offsets[rank][0])[(len(offsets) - 1) // 2]",
        "middle = 0",
        ("features/test_preflight.py",),
    ),
)

LAUNCHER = (
    Fault(
        "limits are learned from attempts of another command",
        "        if attempt.get(_COMMAND) == key:",
        "        if attempt.get(_COMMAND):",
        ("operation/test_hang.py", "operation/test_watchdog.py"),
    ),
    Fault(
        "a launcher that ends its ranks is a lost node",
        "            elif text != _OVER and now - since[1] > LOST_SECONDS:",
        "            elif now - since[1] > LOST_SECONDS:",
        ("operation/test_hang.py",),
    ),
    Fault(
        "a launcher does not wait for the decision of the first",
        "is_late = attempt.exceeded_at is not None and self._now() - attempt.exceeded_at > _DECISION_SECONDS",
        "is_late = attempt.exceeded_at is not None",
        ("operation/test_hang.py",),
    ),
    Fault(
        "an attempt with a new checkpoint does not end the count of failures",
        "        if attempt.saves or attempt.counts_from not in (None, newest_iteration):",
        "        if attempt.counts_from not in (None, newest_iteration):",
        ("operation/test_attempts.py",),
    ),
    Fault(
        "pauses between attempts grow although they make progress",
        "        self.failures = 0 if made_progress else self.failures + 1",
        "        self.failures = self.failures + 1",
        ("operation/test_nodes.py",),
    ),
    Fault(
        "nodes that were named are the first, and not the spares",
        "key=lambda place: reports[place].host in suspects)",
        "key=lambda place: reports[place].host not in suspects)",
        ("operation/test_nodes.py",),
    ),
    Fault(
        "a job's last box shows any rank that failed",
        "order = [rank for rank in (cause, *failed, *result.failures) if rank in result.failures]",
        "order = [rank for rank in result.failures if rank in result.failures]",
        ("operation/test_launch.py", "operation/test_restart.py"),
    ),
)

EXPLORER = (
    Fault(
        "a page's record has collectives of context parallelism without their ranks",
        'ranks = group.ranks if group.axes == "cp" else ()',
        "ranks = ()",
        ("explorer",),
    ),
    Fault(
        "a page counts launches that run again among those that run first",
        "if one.is_recomputed == again]) for again in (False, True)]",
        "if not again]) for again in (False, True)]",
        ("explorer",),
    ),
    Fault(
        "a page's stage holds its own microbatch in a forward pass",
        "    if (kind === B) live[chunk] -= 1;\n",
        "    if (kind === F) live[chunk] += 1;\n    if (kind === B) live[chunk] -= 2;\n",
        ("explorer",),
        "megatron/explorer/schedules.js",
    ),
    Fault(
        "a page's bucket is not padded to whole shards",
        "const unit = shards * ALIGNMENT,",
        "const unit = 1,",
        ("explorer",),
        "megatron/explorer/composition.js",
    ),
    Fault(
        "a page's layers go on after the last stage without the embedding",
        "  counts[0] -= counted[0];\n",
        "",
        ("explorer",),
        "megatron/explorer/composition.js",
    ),
    Fault(
        "a page's ring adds the chunk that it has not yet received",
        "rank - number : rank + 1 - (number - (ranks - 1))",
        "rank + number : rank + 1 - (number - (ranks - 1))",
        ("explorer/test_collectives.py",),
        "megatron/explorer/collectives.js",
    ),
    Fault(
        "the arithmetic prints a formula with other numbers than it computes with",
        "with_numbers = _SYMBOL.sub(lambda symbol: written(numbers[symbol[0]]), formula)",
        "with_numbers = _SYMBOL.sub(lambda symbol: written(2 * numbers[symbol[0]]), formula)",
        ("planner/test_arithmetic.py",),
    ),
)

GPU_KERNELS = (
    Fault(
        "the first FP8 weight gradient of a step is written to memory of its own",
        "        else:\n            self.gemm(a, b, buffer.dtype, out=buffer)",
        "        else:\n            self.gemm(a, b, buffer.dtype)",
        ("core/test_fp8.py", "kernels/test_trials.py"),
    ),
    Fault(
        "an accumulating FP8 GEMM that overwrites",
        "        if not accumulate:\n            self.gemm(a, b, buffer.dtype, out=buffer)",
        "        if buffer.numel():\n            self.gemm(a, b, buffer.dtype, out=buffer)",
        ("kernels/test_trials.py",),
    ),
    Fault(
        "AdamW in bf16 without the last batch of shards",
        "    if batch:\n        yield batch",
        "    if size == SLICE:\n        yield batch",
        ("update_rules/test_adam.py",),
    ),
    Fault(
        "moments in bf16 are not written back",
        "            if updated is not moment:",
        "            if updated is moment:",
        ("update_rules/test_adam.py",),
    ),
    Fault(
        "weight gradients of experts from the rows of two of them",
        "start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)",
        "start = tl.load(ends_ptr + group - 2, mask=group > 1, other=0)",
        ("triton_kernels/test_triton_grouped.py",),
    ),
    Fault(
        "a launch for each expert where a GEMM is shorter than a launch",
        "experts.flops < LAUNCH_FLOPS",
        "experts.flops > LAUNCH_FLOPS",
        ("moe/test_grouped_gemm.py",),
    ),
    Fault(
        "empty documents begin at the end of the first sequence",
        "(0, missing), value=self.rows * self.length)",
        "(0, missing), value=self.length)",
        ("kernels/test_varlen_attention.py",),
    ),
    Fault(
        "cuDNN's log-sum-exp goes back without its last dim",
        "log_sum_exp = log_sum_exp.t().contiguous().unsqueeze(-1)",
        "log_sum_exp = log_sum_exp.t().contiguous()",
        ("kernels/test_varlen_attention.py",),
    ),
)

OWN_DATA = (
    Fault(
        "a loader's state of the wrong rank",
        'names = [f"{LOADER}{topology.data_parallel.rank}"]',
        'names = [f"{LOADER}0"]',
        ("end_to_end/test_own_data.py",),
    ),
    Fault(
        "the state of a loader without the samples of the last iteration",
        "        self.state.loader_state = self.data.train.loader_state",
        "        self.state.loader_state = self.state.loader_state",
        ("end_to_end/test_own_data.py",),
    ),
    Fault(
        "the state of a loader after a microbatch that was read ahead",
        "            self._next = next(self._microbatches)",
        "            self._next = next(self._microbatches)\n            self.loader_state = self._next[LOADER_STATE]",
        ("end_to_end/test_own_data.py",),
    ),
    Fault(
        "a rank skips documents of the batch after another rank's",
        "range(first if number == first_batch else 0,",
        "range(first,",
        ("data/test_text_stream.py",),
    ),
    Fault(
        "documents that other ranks have read are read again after a division",
        "return any(position < reached[",
        "return any(() > reached[",
        ("data/test_text_stream.py",),
    ),
    Fault(
        "a position in a stream without the state of its dataset",
        "dataset.load_state_dict(state)",
        "dataset.state_dict()",
        ("data/test_text_stream.py", "end_to_end/test_own_data.py"),
    ),
)

DIFF, CAUSES = "comparison/test_diff.py", "comparison/test_planted_causes.py"
COMPARISON = (
    Fault(
        "recorded gradients are those of the scaled loss",
        "self._step.finish_gradients(gradient_factor)",
        "self._step.finish_gradients(1.0)",
        ("comparison/test_transformers_recorder.py",),
    ),
    Fault(
        "every tensor-parallel rank adds its copy of an activation to a recording",
        "return is_divided or self.tensor_parallel[0] == 0",
        "return True",
        ("comparison/test_record_tensors.py",),
    ),
    Fault(
        "a layout with a fault is never the cause",
        "for candidates in ([one for one in self.flags if one.changes_loss], list(self.flags)):",
        "for candidates in ([one for one in self.flags if one.changes_loss],):",
        (CAUSES,),
    ),
    Fault(
        "flags that differ and explain nothing are called causes",
        "                    needed = fewer",
        "                    pass",
        (DIFF,),
    ),
    Fault(
        "the errors of a stale scale are taken for those of its precision",
        "min if len(set(precisions)) == 1 else max",
        "max",
        (CAUSES,),
    ),
)

SIMULATED, TABLES = "operation/test_simulated_run.py", "tools/test_simulate_run.py"
FAILURES = (
    Fault(
        "local copies survive the loss of all nodes that hold them",
        "has_local = run.local_interval_s > 0.0 and event.nodes < min(2, run.nodes * gpus // run.gpus)",
        "has_local = run.local_interval_s > 0.0",
        (SIMULATED,),
    ),
    Fault(
        "a simulated failure keeps a save that is not committed",
        "commits = max(0, math.floor((seconds - run.commit_s) / self.whole_s))",
        "commits = max(0, math.floor(seconds / self.whole_s))",
        (SIMULATED,),
    ),
    Fault(
        "a simulated run on fewer nodes trains as fast",
        "Cycle(self.run, self.run.gpus / gpus * (1.0 + self.run.data_share))",
        "Cycle(self.run, 1.0 + self.run.data_share)",
        (SIMULATED,),
    ),
    Fault(
        "the time between two attempts belongs to what ends the second",
        '(before, "between attempts"): gap,',
        '(cause, "between attempts"): gap,',
        (SIMULATED,),
    ),
    Fault(
        "a spare node is for nothing",
        "hours * config.gpus - spares))",
        "hours * config.gpus))",
        (TABLES,),
    ),
    Fault(
        "each changed run meets events of its own",
        "draws, counts = random.Random(seed),",
        'draws, counts = random.Random(f"{seed} {run}"),',
        (TABLES,),
    ),
    Fault(
        "a replay forgets the wait for the decision",
        '"decide_s": (gaps(attempts), ""),',
        '"decide_s": ([], ""),',
        (SIMULATED,),
    ),
    Fault(
        "a message of the course may be read before its wait",
        "            self._target.fill_(torch.nan)",
        "            self._target.copy_(self._target)",
        ("course/test_mistakes.py",),
    ),
    Fault(
        "a crash of the course keeps what was not synced",
        "(child.stable_content if crash.loses_contents else child.content, child.written)",
        "(child.content, child.written)",
        ("course/test_mistakes.py",),
    ),
)

CHOSEN: tuple[Fault, ...] = (
    *OWN_DATA,
    *COLLECTIVES,
    *SCALES,
    *BORDERS,
    *STALE,
    *DEFAULTS,
    *LOST_ERRORS,
    *ORDER,
    *HOST,
    *SENTENCES,
    *FIGURES,
    *EXPERTS,
    *LLAMA4,
    *FEATURES,
    *LAUNCHER,
    *GPU_KERNELS,
    *EXPLORER,
    *COMPARISON,
    *FAILURES,
)

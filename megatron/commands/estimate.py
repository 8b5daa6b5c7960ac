"""The arithmetic of large-scale training: each figure with its formula, the numbers in it, and its source.

python tools/estimate.py compute --model llama3.1-405b --tokens 15e12 --gpus 16384 --mfu 0.4
python tools/estimate.py memory --parameters 70e9 --gpus 8 --json

COMMAND --help has an example of each command. docs/checking_the_lessons.md checks published figures with them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Annotated

from megatron.architectures.catalog import PRESET_VOCABULARIES, PRESETS
from megatron.command_line.flag import flags_of
from megatron.commands.tool import run_tool, write_json
from megatron.config.checks import check_run
from megatron.config.command_line import CommandLine
from megatron.errors import ConfigError
from megatron.flags import Argument, require_fraction, require_positive, values_of, words_of
from megatron.operation import run_summary
from megatron.operation.attempts import account
from megatron.operation.simulated_run import of_costs, random_events, simulate
from megatron.planner.arithmetic import Figure, figure, written
from megatron.planner.search.layout import Job
from megatron.planner.step_time import prices
from megatron.planner.step_time.workload import Cluster, cluster_names, read_cluster
from megatron.schedules import simulator
from megatron.schedules.catalog import SCHEDULES, build_schedule
from megatron.schedules.schedule import ScheduleError
from megatron.urls import refuse_urls

DEFINITION = "by definition"
SCALING_LAWS = "Kaplan et al., arXiv 2001.08361, section 2.1: 2 forward and 4 backward per parameter, without attention"
ZERO = "Rajbhandari et al., arXiv 1910.02054, figure 1; 12 bytes of optimizer state, 8 without main weights"
GPT = "Korthikanti et al., arXiv 2205.05198, table 2: MLP of width 4 h with GELU, unfused attention, dropout"
RECORDED = "a layer of this code, rehearsed (docs/memory.md); k: bytes per token"
RING = "Patarasuk and Yuan 2009: each rank sends 2 (n - 1) / n of the bytes"
TREE = "double binary tree, Sanders et al. 2009: all bytes go up and down, in log2(n) steps each"
PIPELINE = "Narayanan et al., arXiv 2104.04473, section 2.2; interleaved: m a multiple of p"
MEGATRON = "Shoeybi et al., arXiv 1909.08053, section 3: two of a layer forward, two backward"
FSDP = "Zhao et al., arXiv 2304.11277, section 3.2: weights gathered twice, gradients reduced once, all in 2 bytes"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the commands share."""

    json: Annotated[str | None, Argument(alone="-")] = None
    """Print one JSON object instead of text, or write it to this file."""

    def check(self) -> None:
        """Raise :class:`ConfigError` for a number that is not positive, and for an unknown model or cluster."""
        given = {flag.name: getattr(self, flag.field.name) for flag in flags_of(type(self))}
        require_positive({name: value for name, value in given.items() if isinstance(value, int | float)})
        refuse_urls({name: given.get(name) for name in ("--json", "--cluster")}, "name a local file")
        if (cluster := given.get("--cluster")) is not None:
            read_cluster(cluster)
        if (model := given.get("--model")) is not None and model not in PRESETS:
            raise ConfigError(f"There is no model {model}: use one of {', '.join(PRESETS)}, or give its sizes.")

    def figures(self) -> Iterator[Figure]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OnCluster(Estimate):
    cluster: str = "h100"
    """Name of a cluster (a100-80gb, h100, h200, b200, gb200, ...), or the path of a TOML file."""

    @property
    def machine(self) -> Cluster:
        return read_cluster(self.cluster)

    def source(self, name: str) -> str:
        """The source of a value of the cluster file."""
        return f"{self.cluster}: {self.machine.sources.get(name, 'its file has no source')}"

    def ring(self, ranks: int, distance: int = 1) -> tuple[float, str]:
        """The planner's rate of a ring of ranks that are ``distance`` GPUs apart, and the source of its links."""
        machines, constants = prices.Machines([self.machine]), {**prices.load_fitted(), **self.machine.constants}
        in_node = max(1, min(ranks, self.machine.node_size // distance))
        share = prices.pod_share(machines, ranks, distance)
        (rate,) = prices.ring_rate(machines, constants, in_node, ranks <= in_node, share)
        return float(rate), self.source("link_bytes_per_s" if ranks <= in_node else "network_bytes_per_s")

    def seconds(self, name: str, sent: Figure, ranks: int, distance: int = 1) -> Figure:
        """The time in which each rank of a ring sends so much."""
        rate, source = self.ring(ranks, distance)
        return figure(name, "Q / B", "s", source, Q=sent.value, B=rate)


@dataclass(frozen=True, kw_only=True)
class Counted(OnCluster):
    model: str | None = None
    """Preset, such as llama3.1-405b; an unknown one is answered with their names."""
    parameters: float | None = None
    """Number of parameters (default: the parameters of --model)."""

    def count(self, active: bool = False) -> float:
        """Parameters; with ``active`` those that compute a token."""
        if self.parameters is not None:
            return self.parameters
        if self.model is None:
            raise ConfigError("--parameters is missing: set it, or choose a preset with --model.")
        sizes = OfLayer(model=self.model, seq_length=1).job().architecture
        return sizes.num_active_parameters() if active else sizes.num_parameters()


@dataclass(frozen=True, kw_only=True)
class OfLayer(OnCluster):
    """A microbatch on tensor-parallel ranks."""

    model: str | None = None
    """Preset, such as llama3.1-405b; an unknown one is answered with their names."""
    num_layers: int | None = None
    """Transformer layers (default of this and other sizes: that of --model)."""
    hidden_size: int | None = None
    """Width."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_query_groups: int | None = None
    """Key-value heads."""
    ffn_hidden_size: int | None = None
    """Width of the MLP."""
    tensor_model_parallel_size: int = 1
    """GPUs that divide each layer."""
    seq_length: int = 8192
    """Tokens of a sequence."""
    micro_batch_size: int = 1
    """Sequences of a microbatch."""

    def job(self, *more: str) -> Job:
        """The training of this model; raises :class:`ConfigError` for sizes that are missing or do not divide."""
        inherited = {flag.field.name for flag in flags_of(OnCluster)}
        sizes = {flag.field.name for flag in flags_of(OfLayer)} - inherited  # flags of training, too
        given = {name: value for name in sorted(sizes) if (value := getattr(self, name)) is not None}
        words = ["--bf16", "--global-batch-size", str(self.micro_batch_size), *more]
        if self.model not in PRESET_VOCABULARIES:
            words += ["--vocab-size", "128256"]  # layers do not depend on it
        words += [word for name, value in given.items() for word in words_of(name, value)]
        job = Job.of(CommandLine.of(words), self.machine, self.tensor_model_parallel_size)
        check_run(job.config, job.num_gpus)
        return job


@dataclass(frozen=True, kw_only=True)
class Compute(Counted):
    """FLOPs, days, GPU-hours and price of a training run, and the rate that a published duration implies.

    python tools/estimate.py compute --parameters 405e9 --tokens 15e12 --gpus 16384 --days 54
    """

    tokens: float
    """Tokens of the run."""
    gpus: int = 1
    """GPUs of the run."""
    mfu: float | None = None
    """Share of the dense bf16 peak, on average over the run (default: 0.4)."""
    tflops: float | None = None
    """Average TFLOP/s of a GPU, instead of --mfu."""
    days: float | None = None
    """Published duration, which implies the rate."""
    gpu_hours: float | None = None
    """Published GPU-hours, which imply the rate."""
    price_per_gpu_hour: float | None = None
    """Price of a GPU for an hour (default: the cluster's)."""

    def figures(self) -> Iterator[Figure]:
        require_fraction(values_of(self, "mfu"), with_one=True)
        given = [flag for flag, value in values_of(self, "mfu", "tflops", "days", "gpu_hours").items() if value]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} each determine the rate of a GPU: keep one.")
        peak, name, g = self.machine.bf16_flops, "average rate of a GPU", self.gpus
        yield (flops := figure("FLOPs of training", "6 N D", "FLOP", SCALING_LAWS, N=self.count(True), D=self.tokens))
        c = flops.value
        if self.days is not None:
            rate = figure(name, "C / (86400 d G)", "FLOP/s", "implied by --days", C=c, d=self.days, G=g)
        elif self.gpu_hours is not None:
            rate = figure(name, "C / (3600 H)", "FLOP/s", "implied by --gpu-hours", C=c, H=self.gpu_hours)
        elif self.tflops is not None:
            rate = figure(name, "1e12 f", "FLOP/s", "--tflops", f=self.tflops)
        else:
            rate = figure(name, "u P", "FLOP/s", self.source("bf16_flops"), u=self.mfu or 0.4, P=peak)
        f = rate.value
        yield rate
        yield figure("share of the dense peak (MFU)", "F / P", "share", self.source("bf16_flops"), F=f, P=peak)
        yield figure("duration", "C / (86400 F G)", "days", DEFINITION, C=c, F=f, G=g)
        yield figure("duration in years", "C / (31557600 F G)", "years", DEFINITION, C=c, F=f, G=g)
        yield (hours := figure("GPU-hours", "C / (3600 F)", "GPU-hours", DEFINITION, C=c, F=f))
        if (price := self.price_per_gpu_hour or self.machine.price_per_gpu_hour) is not None:
            source = "--price-per-gpu-hour" if self.price_per_gpu_hour else self.source("price_per_gpu_hour")
            yield figure("price", "p H", "dollars", source, p=price, H=hours.value)


@dataclass(frozen=True, kw_only=True)
class Memory(Counted):
    """Bytes of weights, gradients and optimizer state: 12, 16, 18 per parameter, ZeRO 0 to 3; the GPUs that hold them.

    python tools/estimate.py memory --model llama3.1-405b --gpus 8
    """

    gpus: int = 8
    """Data-parallel ranks, among which ZeRO divides the state."""
    memory_gb: float | None = None
    """Memory of a GPU in 1e9 bytes (default: the cluster's, which is in GiB)."""

    def figures(self) -> Iterator[Figure]:
        n, r, m = self.count(), self.gpus, self.memory_gb * 1e9 if self.memory_gb else self.machine.memory_gib * 2**30
        # Weight, gradient and optimizer state: without main weights, with them, and with gradients in fp32.
        kinds = {"12 bytes": (2, 2, 8), "16 bytes": (2, 2, 12), "18 bytes": (2, 4, 12)}
        stages = ("w + g + o", "w + g + o / r", "w + (g + o) / r", "(w + g + o) / r")
        rows = [
            (f"ZeRO-{stage}", figure(f"ZeRO-{stage}: each", text, "B", ZERO, kind, w=w, g=g, o=o, r=r))
            for stage, text in enumerate(stages)
            for kind, (w, g, o) in kinds.items()
        ]
        yield from (each for _, each in rows)
        for zero, each in rows:
            yield figure(f"{zero}: a GPU", "k N", "B", ZERO, each.column, k=each.value, N=n)
        source = f"state alone; {'--memory-gb' if self.memory_gb else self.source('memory_gib')}"
        for zero, each in rows:
            yield figure(f"{zero}: most parameters on {r} GPUs", "M / k", "", source, each.column, M=m, k=each.value)
        for _, each in rows[:3]:
            yield figure("ZeRO-3: GPUs needed", "ceil(k N / M)", "", source, each.column, k=each.value, N=n, M=m)


@dataclass(frozen=True, kw_only=True)
class Activations(OfLayer):
    """Activations of a microbatch: of a GPT layer with unfused attention, and of a layer as this code trains it.

    python tools/estimate.py activations --model llama3.1-70b --tensor-model-parallel-size 8
    """

    def figures(self) -> Iterator[Figure]:
        model, t = self.job().architecture, self.tensor_model_parallel_size
        count, outer = model.num_layers, {"s": self.seq_length, "b": self.micro_batch_size, "h": model.hidden_size}
        whole = {**outer, "a": model.num_attention_heads, "t": t}
        layers = [
            figure("GPT", "s b h (10 + 24 / t + 5 a s / (h t))", "B", GPT, **whole),
            figure("GPT, sequence parallel", "s b h (34 + 5 a s / h) / t", "B", GPT, **whole),
            figure("GPT, recompute of attention", "s b h (10 + 24 / t)", "B", GPT, **whole),
            figure("GPT, sequence parallel, recompute of attention", "34 s b h / t", "B", GPT, **whole),
            figure("GPT, full recompute", "2 s b h", "B", GPT, **whole),
        ]
        full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        modes = {"": "", ", recompute of attention": "--recompute-activations", ", full recompute": full}
        # Only now: torch is not needed to refuse sizes.
        from megatron.planner.rehearsal.price import attention_kind
        from megatron.planner.rehearsal.records import UnitRecords, UnitsOfRun
        from megatron.training.initialize import rank_grid

        for parallel in ("", "--sequence-parallel")[: 1 + (t > 1)]:
            for name, recompute in modes.items():
                job = self.job(*parallel.split(), *recompute.split())
                records = UnitRecords(job.vocabulary.size, attention_kind(job.config, job.cluster))
                units = UnitsOfRun(records, job.config, rank_grid(job.config.parallel, t))
                # From their forward to their backward pass, all layers.
                kept = sum(units.unit(unit).memory.kept for unit in units.division.units[0])
                k = kept / (count * outer["s"] * outer["b"])
                name = f"as trained{', sequence parallel' if parallel else ''}{name}"
                layers.append(figure(name, "k s b", "B", RECORDED, k=k, **outer))
        for layer in layers:
            yield replace(layer, column="a layer")
            yield figure(layer.name, "L A", "B", layer.source, f"{count} layers", L=count, A=layer.value)


@dataclass(frozen=True, kw_only=True)
class Communication(Counted):
    """Seconds of an all-reduce, by default of a model's gradients in bf16: ring, tree with latency, two levels.

    python tools/estimate.py communication --size-gb 140 --ranks 32 --gb-per-s 25
    """

    ranks: int
    """Ranks that reduce."""
    size_gb: float | None = None
    """Bytes to reduce, in 1e9 (default: 2 for each parameter)."""
    gb_per_s: float | None = None
    """Rate of a rank in one direction, in 1e9 bytes (default: of a ring over the cluster, as the planner prices it)."""
    latency_us: float = 10.0
    """Microseconds of a message without bytes: assumed."""

    def figures(self) -> Iterator[Figure]:
        n, k, a = self.ranks, self.machine.node_size, self.latency_us * 1e-6
        size = 2 * self.count() if self.size_gb is None else self.size_gb * 1e9
        rate, source = self.ring(n) if self.gb_per_s is None else (self.gb_per_s * 1e9, "--gb-per-s")
        given = {"n": n, "S": size, "B": rate}
        yield figure("ring", "2 (n - 1) / n S / B", "s", f"{RING}; {source}", **given)
        yield figure("ring with latency", "2 (n - 1) (S / (n B) + a)", "s", f"{RING}; {source}", a=a, **given)
        if n > 1:
            yield figure("tree with latency", "2 S / B + 2 ceil(log2(n)) a", "s", TREE, a=a, **given)
        if n > k and n % k == 0:
            given = {"k": k, "m": n // k, "S": size, "b": self.ring(k)[0], "B": self.ring(n // k, k)[0]}
            source = f"reduce-scatter in m nodes of {self.cluster}, all-reduce between them, all-gather in them"
            yield figure("two levels", "2 (k - 1) / k S / b + 2 (m - 1) / m S / (k B)", "s", source, **given)


@dataclass(frozen=True, kw_only=True)
class Bubble(Estimate):
    """Idle time of every pipeline schedule, over the total time and over the work, simulated and in closed form.

    python tools/estimate.py bubble --stages 4 --microbatches 8
    """

    stages: int
    """Pipeline ranks."""
    microbatches: int
    """Microbatches of a step."""
    virtual: int = 2
    """Chunks per stage of interleaved."""

    def figures(self) -> Iterator[Figure]:
        p, m, total, work = self.stages, self.microbatches, "idle over total", "idle over work"
        source = "simulated with passes of equal time (others: tools/pipeline_schedule.py); T: step, W: work of a stage"
        for name, spec in SCHEDULES.items():
            schedule = build_schedule(name, p, m, self.virtual if spec.chunks == "several chunks" else None)
            timeline = simulator.simulate(schedule, simulator.Durations.uniform(schedule.placement, 1.0, 1.0, 1.0))
            times, idle = {"T": timeline.makespan, "W": 3 * m}, timeline.bubble_fraction
            yield figure(name, "(T - W) / T", "share", source, total, idle, **times)
            yield figure(name, "(T - W) / W", "share", source, work, **times)
        for name, v in (("1f1b, closed form", 1), ("interleaved, closed form", self.virtual)):
            yield figure(name, "(p - 1) / (v m + p - 1)", "share", PIPELINE, total, p=p, v=v, m=m)
            yield figure(name, "(p - 1) / (v m)", "share", PIPELINE, work, p=p, v=v, m=m)


@dataclass(frozen=True, kw_only=True)
class TensorParallel(OfLayer):
    """All-reduces of tensor parallelism: bytes that a GPU sends in a layer, a microbatch and a step, and their seconds.

    python tools/estimate.py tensor-parallel --model llama3.1-405b --microbatches 512
    """

    tensor_model_parallel_size: int = 8
    """GPUs that divide each layer."""
    microbatches: int = 1
    """Microbatches of a step: of a replica, or of all for the sum over replicas."""

    def figures(self) -> Iterator[Figure]:
        model, t, m = self.job().architecture, self.tensor_model_parallel_size, self.microbatches
        outer = {"s": self.seq_length, "b": self.micro_batch_size, "h": model.hidden_size}
        yield (one := figure("tensor of a microbatch", "2 s b h", "B", "[s, b, h] in bf16", **outer))
        yield figure("the same of all microbatches", "m S", "B", "[s, b, h] in bf16", m=m, S=one.value)
        yield figure("all-reduces of the layers", "4 L", "a microbatch", MEGATRON, L=model.num_layers)
        ends = f"{MEGATRON}; and of the embedding forward, of the output layer backward"
        yield (count := figure("all-reduces with the ends", "4 L + 2", "a microbatch", ends, L=model.num_layers))
        source = f"{RING}; sequence parallelism sends as much, and 2 more all-gathers of a layer backward"
        yield figure("sent in a layer", "8 (t - 1) / t S", "B", source, t=t, S=one.value)
        sent = {"c": count.value, "t": t, "S": one.value}
        yield (micro := figure("sent in a microbatch", "2 c (t - 1) / t S", "B", source, **sent))
        yield (step := figure("sent in a step", "m Q", "B", source, m=m, Q=micro.value))
        for link, distance in (("neighbouring GPUs", 1), ("each GPU in another node", self.machine.node_size)):
            yield self.seconds(f"a microbatch, {link}", micro, t, distance)
            yield self.seconds(f"a step, {link}", step, t, distance)


@dataclass(frozen=True, kw_only=True)
class Roofline(OfLayer):
    """The ridge of each GPU, and the arithmetic intensity (FLOPs per byte) of each product of a layer.

    python tools/estimate.py roofline --model llama3-8b --cluster h100
    """

    def figures(self) -> Iterator[Figure]:
        found = map(read_cluster, [*reversed(cluster_names()), self.cluster])
        for (peak, rate), machine in {(one.bf16_flops, one.hbm_bytes_per_s): one for one in found}.items():
            source = f"roofline model, Williams et al. 2009; {machine.sources.get('bf16_flops', '')}"
            yield figure(f"ridge of {machine.name}", "P / B", "FLOP/B", source, P=peak, B=rate)
        model, t = self.job().architecture, self.tensor_model_parallel_size
        rows, s, h, d = self.seq_length * self.micro_batch_size, self.seq_length, model.hidden_size, model.kv_channels
        width, chosen = model.ffn_hidden_size // t, rows
        if model.num_experts and model.moe_ffn_hidden_size:
            width, chosen = model.moe_ffn_hidden_size, max(1, rows * model.moe_router_topk // model.num_experts)
        products = {
            "queries, keys, values": (rows, model.qkv_size // t, h),
            "scores of a head, unfused": (s, s, d),
            "values of a head, unfused": (s, d, s),
            "output projection": (rows, h, model.query_size // t),
            "gate and up of the MLP, or of an expert": (chosen, 2 * width, h),
            "down of the MLP, or of an expert": (chosen, h, width),
        }
        ridge = self.machine.bf16_flops / self.machine.hbm_bytes_per_s
        for name, (m, n, k) in products.items():
            value = 2 * m * n * k / float(prices.product_traffic(m, n, k, False))
            side = f"{'above' if value >= ridge else 'below'} the ridge of {self.cluster}, {written(ridge)}"
            yield figure(name, "2 m n k / (2 (m k + k n + m n))", "FLOP/B", side, "", value, m=m, n=n, k=k)
        yield figure("ReLU in bf16", "1 / (2 + 2)", "FLOP/B", "a comparison for 2 bytes read and 2 written")


@dataclass(frozen=True, kw_only=True)
class Hybrid(Counted):
    """FSDP over all GPUs beside groups with a copy of the state each (HSDP): state of a GPU, traffic, seconds.

    python tools/estimate.py hybrid --parameters 405e9 --gpus 16384 --group 8
    """

    gpus: int
    """GPUs of the run."""
    group: int = 8
    """GPUs that shard a copy of the state."""

    def figures(self) -> Iterator[Figure]:
        if self.gpus % self.group:
            raise ConfigError(f"--gpus {self.gpus} is not divisible by --group {self.group}: change one of them.")
        n, m, k, r = self.count(), self.machine.memory_gib * 2**30, self.machine.node_size, self.gpus // self.group
        memory = self.source("memory_gib")
        for kind, g in (("FSDP", self.gpus), ("HSDP", self.group)):
            yield (state := figure(f"{kind}: state of a GPU", "16 N / g", "B", ZERO, N=n, g=g))
            yield figure(f"{kind}: share of its memory", "K / M", "share", memory, K=state.value, M=m)
            yield (sent := figure(f"{kind}: sent by a GPU", "3 (2 N) (g - 1) / g", "B", FSDP, N=n, g=g))
            if g > k:
                source = "a ring enters and leaves each of its nodes of k GPUs once"
                yield figure(f"{kind}: of it across nodes", "Q / k", "B", source, Q=sent.value, k=k)
            yield self.seconds(f"{kind}: seconds", sent, g)
        yield figure("HSDP: GPUs of the smallest group that fits", "ceil(16 N / M)", "", memory, N=n, M=m)
        yield (sent := figure("HSDP: sent to replicas", "2 (r - 1) / r (2 N) / g", "B", RING, r=r, N=n, g=self.group))
        yield self.seconds("HSDP: seconds to replicas", sent, r, self.group)


@dataclass(frozen=True, kw_only=True)
class Failures(OnCluster):
    """Interruptions of a run, its best save interval, and its effective time by Daly's formula and simulated.

    python tools/estimate.py failures --gpus 16384 --days 54 --save-s 5 --restart-s 300
    """

    gpus: int
    """GPUs of the run."""
    days: float
    """Duration."""
    interruptions: int | None = None
    """Published number of interruptions, which implies the rate (default: the cluster's rate)."""
    save_s: float = 5.0
    """Seconds for which a save blocks training."""
    restart_s: float = 300.0
    """Seconds from a failure to the first new step."""

    def figures(self) -> Iterator[Figure]:
        run, name = {"G": self.gpus, "d": self.days}, "between interruptions of a GPU"
        hours = self.machine.gpu_hours_per_failure or run_summary.GPU_HOURS_PER_FAILURE
        rate = figure(name, "H", "GPU-hours", self.source("gpu_hours_per_failure"), H=hours)
        if self.interruptions is not None:
            rate = figure(name, "24 G d / i", "GPU-hours", "implied by --interruptions", i=self.interruptions, **run)
        yield rate
        yield figure("interruptions", "24 G d / H", "", "any GPU stops the job", H=rate.value, **run)
        yield figure("between interruptions of the job", "H / G", "hours", "any GPU stops the job", H=rate.value, **run)
        costs = run_summary.Costs(run_summary.job_mtbf_s(self.gpus, rate.value), self.restart_s, self.save_s)
        young, best = run_summary.young_interval_s(costs), run_summary.daly_interval_s(costs)
        cost = {"C": costs.save_s, "M": costs.mtbf_s}
        yield figure("save interval, first order", "sqrt(2 C M)", "s", "Young 1974", "", young, **cost)
        source = "Daly 2006: the root T of (1 - T / M) exp((T + C) / M) = 1"
        yield Figure("save interval", best, "s", "", "", source)
        formula, source = "T / (M exp(R / M) (exp((T + C) / M) - 1))", "Daly 2006; R: failure to first new step"
        share = run_summary.effective_time(best, costs)
        yield figure("effective time", formula, "share", source, "", share, T=best, R=costs.restart_s, **cost)
        yield figure("lost GPU-hours", "24 G d (1 - e)", "GPU-hours", DEFINITION, e=share, **run)
        model, table = of_costs(costs, best, min(self.days, 10_000 * costs.mtbf_s / 86400))
        runs = [simulate(model, random_events(model, table, seed)) for seed in range(20)]
        shares = [account(one.attempts).effective_time or 0.0 for one in runs]
        source = "20 simulated runs, through the accounting of a real run (docs/effective_time.md)"
        for name, value in (("mean", sum(shares) / len(shares)), ("least", min(shares)), ("most", max(shares))):
            yield Figure(f"effective time, simulated, {name}", value, "share", "", "", source)


COMMANDS: dict[str, type[Estimate]] = {
    "compute": Compute, "memory": Memory, "activations": Activations, "communication": Communication,
    "bubble": Bubble, "tensor-parallel": TensorParallel, "roofline": Roofline, "hybrid": Hybrid, "failures": Failures,
}  # fmt: skip


def estimate(config: Estimate) -> None:
    """Print the figures, or write them as JSON."""
    config.check()
    try:
        figures = list(config.figures())
    except (ArithmeticError, ScheduleError) as error:
        raise ConfigError(f"These numbers have no result ({error}): change them.") from error
    if config.json is None:
        print(as_text(figures))
        return
    found = [asdict(one) | {"name": one.name, "formula": one.formula} for one in figures]
    write_json(config.json, {"flags": vars(config), "figures": found})


def as_text(figures: Sequence[Figure]) -> str:
    """A line for each figure; figures of one name stand side by side. A source stands below its last figure."""
    rows = [list(row) for _, row in groupby(figures, key=lambda one: one.name)]
    labels = [row[0].name + (f": {row[0].symbols}" if row[0].column else "") for row in rows]
    left = max(map(len, labels)) + 2
    cells = [[f"{one.numbers} = {one.shown}" if one.column else one.formula for one in row] for row in rows]
    width = max((len(cell) for row in cells if len(row) > 1 for cell in row), default=0) + 2
    lines, columns = list[str](), list[str]()
    for label, row, texts, following in zip(labels, rows, cells, [*rows[1:], None]):
        if (found := [one.column for one in row]) != columns and row[0].column:
            lines.append(" " * left + "".join(f"{column:{width}}" for column in found).rstrip())
        columns = found
        lines.append(f"{label:{left}}" + "".join(f"{text:{width}}" for text in texts).rstrip())
        if following is None or following[0].source != row[0].source:
            lines.append(f"  [{row[0].source}]")
    return "\n".join(lines)


main = partial(run_tool, COMMANDS, estimate, __doc__)

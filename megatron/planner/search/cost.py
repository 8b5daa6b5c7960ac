"""Days, GPU-hours and price of a run over the tokens of a job, with the time that failures and saves cost."""

from megatron.operation.effective_time import Costs, daly_interval_s, effective_time, job_mtbf_s
from megatron.planner.arithmetic import DAY
from megatron.planner.search.job import Job
from megatron.planner.search.layout import Layout
from megatron.planner.search.result import ScalePoint


def scale_point(job: Job, layout: Layout, step_time_s: float) -> ScalePoint:
    """A run of ``layout`` over the tokens of the job, saved at the interval that leaves most time for training."""
    costs = Costs(job_mtbf_s(job.num_gpus, job.gpu_hours_per_failure), job.operation.restart_s, job.operation.save_s)
    interval = daly_interval_s(costs)
    goodput = effective_time(interval, costs)
    seconds = job.tokens / job.tokens_per_step * step_time_s / goodput
    gpu_hours = seconds * job.num_gpus / 3600.0
    price = job.price_per_gpu_hour
    return ScalePoint(
        num_gpus=job.num_gpus,
        layout=layout,
        step_time_s=step_time_s,
        tokens_per_s_per_gpu=job.tokens_per_step / step_time_s / job.num_gpus,
        goodput=goodput,
        save_interval_s=interval,
        days=seconds / DAY,
        gpu_hours=gpu_hours,
        price=None if price is None else gpu_hours * price,
    )

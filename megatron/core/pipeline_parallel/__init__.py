"""Pipeline parallelism: the executor of any schedule of ``megatron.schedules``, and the messages between stages."""

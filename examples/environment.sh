# Sourced by launch.sh: the environment of every process. Variables that are already set are not changed.
# shellcheck shell=bash

# The allocator extends its segments, so tensors of varying sizes (documents, batch-size ramp-up) cause less
# fragmentation. Before torch 2.9 the variable was PYTORCH_CUDA_ALLOC_CONF.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

# CPU threads of a process; it does little more than launch kernels. torchrun also sets 1, with a warning.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# torch records the last collectives of every process (flight recorder, on by default) and writes them to files when one
# times out; the files show which rank was missing. Llama 3 was debugged with it (arXiv 2407.21783, section 3.3.4).
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
# Prefix of these files; the rank is appended. The default, ~/.cache/torch/comm_lib_trace_rank_, is the same for all jobs
# of a user:
# export TORCH_FR_DUMP_TEMP_FILE=/shared/flight_recorder/rank_

# These depend on your cluster. NCCL finds network interfaces itself, but may choose a wrong one if a machine has several:
# set those that reach the other machines (`ip link`, `ibdev2netdev`).
# export NCCL_SOCKET_IFNAME=eth0    # interface over which NCCL's ranks connect
# export GLOO_SOCKET_IFNAME=eth0    # the same for gloo, which sends objects between all ranks
# export NCCL_IB_HCA=mlx5           # InfiniBand or RoCE adapters
# export NCCL_DEBUG=WARN            # INFO logs the adapters and algorithms that NCCL chose

# Set by pretrain_llama.py from the flags, unless you set them: CUDA_DEVICE_MAX_CONNECTIONS (docs/operations.md) and
# TORCHINDUCTOR_COMPILE_THREADS (cores per process of the machine).

# Deliberately not set: NCCL_ALGO, NCCL_PROTO, NCCL_MIN_NCHANNELS and similar variables, because NCCL chooses by message
# size and topology; and TORCH_NCCL_AVOID_RECORD_STREAMS (arXiv 2407.21783, section 3.3.2), which is now torch's default.

# Sourced by launch.sh: the environment of every process. Whatever is set already stays.
# shellcheck shell=bash

# Kernels start in the order in which they were launched. The backward pass of a tensor-parallel linear layer launches
# its collective before its weight gradient; on several hardware queues the product may take all multiprocessors first,
# and the collective, on which the next layer waits, starts when it is over. FSDP gathers weights on a stream of its
# own behind the computation, which wants several: set CUDA's own default, 8, with --use-torch-fsdp2.
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}

# The allocator's segments grow where they are, so that tensors of changing sizes (documents, batch-size ramps) leave no
# holes that only fit the sizes of before. torch before 2.9 knew it as PYTORCH_CUDA_ALLOC_CONF.
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

# Threads of a process on the host, which launches kernels and little else. torchrun sets 1 as well, with a warning.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# torch remembers the last collectives of every process (the flight recorder, on by default) and writes them to files
# when one times out: they tell which rank was missing. Llama 3 was debugged with it (arXiv 2407.21783, section 3.3.4).
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
# Where these files go, the rank's number appended. The default, ~/.cache/torch/comm_lib_trace_rank_, is the same for
# all jobs of a user:
# export TORCH_FR_DUMP_TEMP_FILE=/shared/flight_recorder/rank_

# What only you can know of your cluster. NCCL finds interfaces by itself and picks a wrong one where a machine has
# several: name those that reach the other machines (`ip link`, `ibdev2netdev`).
# export NCCL_SOCKET_IFNAME=eth0    # the connection over which NCCL's ranks meet
# export GLOO_SOCKET_IFNAME=eth0    # the same for gloo, which runs on CPUs use
# export NCCL_IB_HCA=mlx5           # InfiniBand or RoCE adapters
# export NCCL_DEBUG=WARN            # INFO tells which adapters and algorithms NCCL chose

# Not set on purpose: NCCL_ALGO, NCCL_PROTO, NCCL_MIN_NCHANNELS and the like, which NCCL chooses by the size of each
# message and the topology; and TORCH_NCCL_AVOID_RECORD_STREAMS (arXiv 2407.21783, section 3.3.2), torch's default now.

# Megatron-Llama on an image with torch 2.11 or later.
#
#   docker build -t megatron-llama .
#   docker build -t megatron-llama --build-arg BASE=IMAGE --build-arg EXTRAS=data,wandb,fp8 .
#
# The torch of the image is kept. Name a version of the image for runs that are to be repeated.
ARG BASE=pytorch/pytorch:latest
FROM ${BASE}

ARG EXTRAS=data,wandb,tensorboard
# Images of Debian and Ubuntu refuse pip outside of a virtual environment without it.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1
WORKDIR /opt/megatron-llama
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY megatron megatron
COPY megatron_llama megatron_llama
RUN python -m pip install ".[${EXTRAS}]"
# The package is imported from where pip has installed it.
WORKDIR /workspace
RUN megatron-llama --version

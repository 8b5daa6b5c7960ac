#!/usr/bin/env bash
# Installs what tests/operation/test_real_slurm.py needs: Debian's SLURM and munge, without starting them. Run it as root.
set -euo pipefail
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2 util-linux

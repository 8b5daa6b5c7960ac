# Sourced by other scripts: makes .venv beside the repository's files, installs packages and this one into it once (again
# when their versions change), and activates it.
#
#   source tools/environment.sh tensorboard,plots        # these extras of pyproject.toml, in the tested versions
#   source tools/environment.sh requirements-dev.txt     # a requirements file
#
# PYTHON: which Python (3.11 or later). TORCH_INDEX: the package index of torch, as a URL; empty: that of pip. Without it,
# a machine without nvidia-smi gets the CPU build (0.8 GB on the disk, not 4.6), if PyTorch's index answers.
# shellcheck shell=bash

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
environment=$repository/.venv
stamp=$environment/.installed-$1
wanted=$(cat "$repository"/requirements*.txt "$repository/pyproject.toml" | cksum)

# Prints the first Python that is new enough.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "ERROR: Python 3.11 or later is needed, and ${PYTHON:-python3} is none: install it, or name it with" \
        "PYTHON=/path/to/python3." >&2
    return 2
}

# Installs only torch, from the index of TORCH_INDEX, if it answers within seconds and has a build for this Python.
install_torch() {
    local index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu} torch
    torch=$(grep '^torch==' "$repository/requirements.txt")
    if [ -z "${TORCH_INDEX+set}" ] && command -v nvidia-smi > /dev/null; then
        echo "$torch is the build that pip finds, because nvidia-smi is there (TORCH_INDEX chooses another)."
    elif [ -z "$index" ]; then
        echo "$torch is the build that pip finds, because TORCH_INDEX is empty."
    elif python - "$index" <<'PYTHON' && python -m pip install --quiet --no-deps --index-url "$index" "$torch"
import sys
from urllib.request import urlopen

try:
    urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=5).close()
except OSError:
    sys.exit(1)
PYTHON
    then
        echo "$torch is the build of $index (TORCH_INDEX chooses another)."
    else
        echo "$torch is the build that pip finds, because $index does not answer, or has none for this machine."
    fi
}

if ! "$environment/bin/python" -m pip --version > /dev/null 2>&1; then
    found=$(find_python) || exit
    echo "Making a virtual environment in $environment ..."
    "$found" -m venv --clear "$environment"
fi
# shellcheck disable=SC1091
source "$environment/bin/activate"
if [ "$(cat "$stamp" 2> /dev/null)" != "$wanted" ]; then
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    python -c 'import torch' 2> /dev/null || install_torch
    echo "Installing $1 (once; a few minutes) ..."
    case $1 in
        *.txt) python -m pip install --quiet -r "$repository/$1" -e "$repository" ;;
        *) python -m pip install --quiet -c "$repository/requirements.txt" -e "${repository}[$1]" ;;
    esac
    echo "$wanted" > "$stamp"
fi

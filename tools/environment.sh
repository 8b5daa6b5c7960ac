# Sourced by other scripts: makes .venv beside the repository's files, installs a requirements file into it once
# (again when the file changes), and activates it.
#
#   source tools/environment.sh requirements.txt
# shellcheck shell=bash

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
requirements=$repository/$1
environment=$repository/.venv
stamp=$environment/.installed-$1
wanted=$(cat "$repository"/requirements*.txt | cksum)

if ! "$environment/bin/python" -m pip --version > /dev/null 2>&1; then
    echo "Making a virtual environment in $environment ..."
    "${PYTHON:-python3}" -m venv --clear "$environment"
fi
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing $1 (once; a few minutes) ..."
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check -r "$requirements"
    echo "$wanted" > "$stamp"
fi
# shellcheck disable=SC1091
source "$environment/bin/activate"

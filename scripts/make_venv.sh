#!/usr/bin/env bash
# Make the virtual environment $2 with the Python $1 and install the requirements file $3 into it.
set -euo pipefail
python=$1 venv=$2 requirements=$3

stop() { echo "error: $*" >&2; exit 1; }

if ! command -v "$python" > /dev/null; then
    stop "there is no $python here. Install Python 3.10 or newer, or name one: make PYTHON=..."
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    stop "$("$python" --version) is too old: Python 3.10 or newer is needed. If another one is" \
         "installed, name it: make PYTHON=python3.12 ..."
fi
# Debian and Ubuntu ship Python without these two.
if ! "$python" -c 'import ensurepip, venv' 2> /dev/null; then
    stop "$python lacks the venv module. On Debian and Ubuntu: sudo apt-get install python3-venv"
fi
# Also after an attempt that was interrupted: venv completes what is there.
if ! "$venv/bin/python" -m pip --version > /dev/null 2>&1; then
    echo "Making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
fi
echo "Installing $requirements into $venv (the first time that takes minutes)"
"$venv/bin/python" -m pip install --disable-pip-version-check -r "$requirements"

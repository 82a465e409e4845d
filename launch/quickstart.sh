#!/usr/bin/env bash
# The quickstart on this machine: makes an environment, installs, trains, evaluates, writes the report.
#
#   ./launch/quickstart.sh [ARG] [WORKDIR]
#   ./launch/quickstart.sh mode=sync,seed=3 runs/a
#
# ARG is the argument of configs/quickstart.py, words with commas between: smoke (two steps), mode=sync|periodic|async,
# seed=N; "" for none. WORKDIR is the run's directory, by default runs/quickstart-TIME; a relative one is in the
# repository. JAXRL_VENV names the environment (.venv), PYTHON the Python that makes it (python3).
set -euo pipefail

usage() { sed -En '2,/^[^#]/s/^#( |$)//p' "$0"; } # the comment at the head
case ${1:-} in -h | --help) usage && exit ;; esac
[ $# -le 2 ] || { echo "unexpected word '$3': quickstart.sh [ARG] [WORKDIR]" >&2; exit 2; }
word='(smoke(=(true|false))?|mode=(sync|periodic|async)|seed=[0-9]+)?'
[[ ${1:-} =~ ^$word(,$word)*$ ]] || {
    echo "unknown ARG '$1': give smoke, mode=sync|periodic|async, seed=N, with commas between; WORKDIR comes second" >&2
    exit 2
}
cd "$(dirname "$0")/.."
arg=${1:-}
workdir=${2:-runs/quickstart-$(date +%Y%m%d-%H%M%S)}
python=$(bash launch/environment.bash .)
"$python" -m jaxrl_async train --config="configs/quickstart.py:$arg" --workdir="$workdir"
"$python" -m jaxrl_async evaluate --workdir="$workdir"
"$python" -m jaxrl_async report --workdir="$workdir"

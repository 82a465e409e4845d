#!/usr/bin/env bash
# A pretrained language model learns sums in words on this machine: environment, checkpoint, training, scores, report.
#
#   ./launch/smollm2.sh [ARG] [WORKDIR]
#   ./launch/smollm2.sh mode=sync,seed=3 runs/a
#
# ARG is the argument of configs/smollm2.py, with commas between: lora, mode=sync|periodic|async, seed=N; "" for none.
# WORKDIR is the run's directory, by default runs/smollm2-TIME; a relative one is in the repository.
# The checkpoint, 93 MB of a package registry, becomes 0.5 GB in checkpoints/, once. JAXRL_VENV names the environment
# (.venv), PYTHON the Python that makes it (python3).
set -euo pipefail

usage() { sed -En '2,/^[^#]/s/^#( |$)//p' "$0"; } # the comment at the head
case ${1:-} in -h | --help) usage && exit ;; esac
[ $# -le 2 ] || { echo "unexpected word '$3': smollm2.sh [ARG] [WORKDIR]" >&2; exit 2; }
word='(lora|mode=(sync|periodic|async)|seed=[0-9]+)?'
[[ ${1:-} =~ ^$word(,$word)*$ ]] || {
    echo "unknown ARG '$1': give lora, mode=sync|periodic|async, seed=N, with commas between; WORKDIR comes second" >&2
    exit 2
}
cd "$(dirname "$0")/.."
arg=${1:-}
workdir=${2:-runs/smollm2-$(date +%Y%m%d-%H%M%S)}
python=$(bash launch/environment.bash '.[smollm2]')
"$python" launch/smollm2_checkpoint.py checkpoints/SmolLM2-135M-Instruct
"$python" -m jaxrl_async train --config="configs/smollm2.py:$arg" --workdir="$workdir"
"$python" -m jaxrl_async evaluate --workdir="$workdir"
"$python" -m jaxrl_async report --workdir="$workdir"

#!/usr/bin/env bash
# Trains a config on a TPU slice: its last hosts sample, the others learn. It calls the verb `pod` by gcloud's ssh.
#
#   PROJECT=… ZONE=… launch/tpu_pod.sh [--dry-run] SLICE SERVERS CONFIG WORKDIR [FLAG …]
#   PROJECT=p ZONE=us-west4-a launch/tpu_pod.sh slice 2 configs/gsm8k_qwen2_5_1p5b.py runs/a \
#       --config.learner.fsdp=8 --setup='pip install -q jax[tpu] …'
#
# SLICE is one TPU VM, or several with commas between; SERVERS are hosts. FLAGs are those of `pod` and of the config.
# DESCRIPTION names gcloud's JSON where it is there already. --dry-run prints the plan and the commands on all hosts.
#
# Never run: no TPU was available.
set -euo pipefail

usage() { sed -En '2,/^[^#]/s/^#( |$)//p' "$0"; } # the comment at the head
case ${1:-} in -h | --help) usage && exit ;; esac
dry=()
[ "${1:-}" = --dry-run ] && { dry=(--dry-run) && shift; }
[ $# -ge 4 ] || { usage >&2; exit 2; }
slice=$1 servers=$2 config=$3 workdir=$4
shift 4
hosts=${DESCRIPTION:-}
if [ ! "$hosts" ]; then
    hosts=$(mktemp --suffix=.json)
    trap 'rm -f "$hosts"' EXIT
    gcloud compute tpus tpu-vm list --project="${PROJECT:?}" --zone="${ZONE:?}" --format=json \
        --filter="name:(${slice//,/ })" >"$hosts"
fi
"${JAXRL_PYTHON:-python}" -m jaxrl_async pod "${dry[@]}" --hosts="$hosts" --ssh=gcloud --servers="$servers" \
    --config="$config" --workdir="$workdir" "$@"

#!/usr/bin/env bash
# Trains a config on this machine: queue, servers, rollout workers and learner as processes of one command.
#
#   launch/local.sh [--dry-run] CONFIG WORKDIR [FLAG …]
#   launch/local.sh configs/quickstart.py:mode=sync,seed=3 runs/a --config.learner.num_steps=50
#
# The same command resumes a run that was ended by Ctrl-C (exit code 1), by SIGTERM (75, with a checkpoint of the last
# step) or by a crash. JAXRL_PYTHON names the Python that has jaxrl_async: by default .venv/bin/python of this
# repository, which launch/quickstart.sh makes, or else `python`. --dry-run prints the command.
set -euo pipefail

usage() { sed -En '2,/^[^#]/s/^#( |$)//p' "$0"; } # the comment at the head
case ${1:-} in -h | --help) usage && exit ;; esac
dry=
[ "${1:-}" = --dry-run ] && { dry=1 && shift; }
[ $# -ge 2 ] || { usage >&2; exit 2; }
config=$1 workdir=$2
shift 2
own=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin/python
[ -x "$own" ] || own=python
exec ${dry:+echo} "${JAXRL_PYTHON:-$own}" -m jaxrl_async train --role=auto --config="$config" --workdir="$workdir" "$@"

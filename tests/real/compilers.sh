#!/usr/bin/env bash
# JAX's compilers for TPUs and NVIDIA GPUs, on a machine without either.
#   tests/real/compilers.sh install DIR        puts those of $PYTHON's JAX into a directory, once
#
# Not into the tests' own environment: with libtpu beside it, every JAX process would look for a TPU.
set -euo pipefail
[ "${1-}" = install ] && [ $# = 2 ] || { sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
directory=$2 python=${PYTHON:-python3}
pins=$("$python" -c '
import importlib.metadata
version = importlib.metadata.version("jax")
(libtpu,) = (r for r in importlib.metadata.requires("jax") if r.startswith("libtpu"))
print(libtpu.partition(";")[0].strip(), *(f"jax-cuda13-{p}=={version}" for p in ("pjrt", "plugin")), "nvidia-cuda-nvcc==13.0.*")
')
[ "$(cat "$directory/stamp" 2>/dev/null)" = "$pins" ] && exit 0
rm -rf "$directory"
# shellcheck disable=SC2086 # one word a pin
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$directory" $pins
echo "$pins" >"$directory/stamp"

#!/usr/bin/env bash
# A real SGLang-JAX on a machine without a TPU, with our weight updates.
#   tests/real/sglang_jax.sh install VENV        makes its environment, once
#   tests/real/sglang_jax.sh serve VENV FLAGS…   becomes the server; FLAGS go to jaxrl_async.extras.sglang_jax.server
set -euo pipefail
pins='sglang-jax[cpu]==0.1.0rc0 jax==0.10.2 jaxlib==0.10.2 flax==0.12.4'
[ $# -ge 2 ] || { sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
verb=$1 venv=$2
shift 2
case $verb in
install)
    [ "$(cat "$venv/stamp" 2>/dev/null)" = "$pins" ] && exit 0
    python=
    for candidate in "${PYTHON312:-python3.12}" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python python3; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null &&
            python=$candidate && break
    done
    [ "$python" ] || { echo "SGLang-JAX needs Python 3.12: none here (set PYTHON312)" >&2; exit 3; }
    "$python" -m venv "$venv"
    # shellcheck disable=SC2086 # one word a pin
    "$venv/bin/pip" install --quiet --disable-pip-version-check $pins
    echo "$pins" >"$venv/stamp"
    ;;
serve)
    # Two threads of XLA that wait for each other are slower than one.
    export JAX_PLATFORMS=cpu HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
    export XLA_FLAGS=--xla_cpu_multi_thread_eigen=false
    PYTHONPATH=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
    export PYTHONPATH
    # One padding of each kind: each more is one more program to compile at the start.
    exec "$venv/bin/python" -m jaxrl_async.extras.sglang_jax.server --device cpu \
        --attention-backend native --dtype float32 --page-size 1 --tp-size 1 \
        --mem-fraction-static 0.05 --max-running-requests 32 --max-total-tokens 20000 \
        --context-length 256 --chunked-prefill-size 256 --max-prefill-tokens 256 \
        --precompile-token-paddings 256 --precompile-bs-paddings 32 --skip-tokenizer-init "$@"
    ;;
*)
    echo "unknown verb $verb: install or serve" >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# A real SGLang on a machine without CUDA.
#   tests/real/sglang.sh install VENV        makes its environment, once
#   tests/real/sglang.sh serve VENV FLAGS…   becomes the server; FLAGS go to sglang.launch_server
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -ge 2 ] || { sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
verb=$1 venv=$2
shift 2
case $verb in
install)
    stamp=$(cat "$here/sglang_pins.txt" "${BASH_SOURCE[0]}" | sha256sum)
    [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ] && exit 0
    python=
    for candidate in "${PYTHON311:-python3.11}" python3; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null &&
            python=$candidate && break
    done
    [ "$python" ] || { echo "SGLang's pins need Python 3.11: none here (set PYTHON311)" >&2; exit 3; }
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$here/sglang_pins.txt"
    # Its metadata asks for CUDA packages.
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps sglang==0.5.23 torchvision==0.28.0
    echo "$stamp" >"$venv/stamp"
    ;;
serve)
    # One thread is several times faster here than two that wait for each other.
    export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
    export SGLANG_CPU_OMP_THREADS_BIND=${SGLANG_CPU_OMP_THREADS_BIND:-0-$(($(nproc) - 1))}
    export PYTHONPATH=$here
    exec "$venv/bin/python" "$here/launch_sglang.py" --device cpu --dtype float32 \
        --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule \
        --mem-fraction-static 0.5 --skip-server-warmup --skip-tokenizer-init "$@"
    ;;
*)
    echo "unknown verb $verb: install or serve" >&2
    exit 2
    ;;
esac

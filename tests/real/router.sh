#!/usr/bin/env bash
# The real SGLang router.
#   tests/real/router.sh install VENV        makes its environment, once
#   tests/real/router.sh serve VENV FLAGS…   becomes the router; FLAGS go to sglang_router.launch_router
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }
verb=$1 venv=$2
shift 2
case $verb in
install)
    stamp=$(sha256sum <"${BASH_SOURCE[0]}")
    [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ] && exit 0
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check sglang-router==0.3.2
    echo "$stamp" >"$venv/stamp"
    ;;
serve)
    # A dead worker is out within seconds; /health would sample a token, and an open breaker shuts out the living.
    exec "$venv/bin/python" -m sglang_router.launch_router --disable-circuit-breaker \
        --health-check-interval-secs 5 --health-failure-threshold 1 --health-check-endpoint /model_info "$@"
    ;;
*)
    echo "unknown verb $verb: install or serve" >&2
    exit 2
    ;;
esac

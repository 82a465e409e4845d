#!/usr/bin/env bash
# Passes the tests: makes its environments, installs, runs. `--long` adds what takes minutes, `--part=i/n` runs a part of n.
#
# Real SGLang and SGLang-JAX servers, the SGLang router and, with --long, vLLM get environments of their own under
# $JAXRL_SERVERS (.venv-servers). Where one cannot be made, its tests are skipped and say so; with JAXRL_REQUIRE_SERVERS=1, as under CI, that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
version=${PYTHON:+-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)}
venv=${JAXRL_TEST_VENV:-.venv-test$version} # one for each Python that is named
export JAXRL_SERVERS=${JAXRL_SERVERS:-$PWD/.venv-servers}
unset PYTHONDONTWRITEBYTECODE # Hundreds of processes import the package.
if ! "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then # none, or broken
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
        echo "needs Python >= 3.11, and PYTHON=$python is $("$python" --version 2>&1): name another by PYTHON" >&2
        exit 2
    }
    clear=
    [ ! -f "$venv/pyvenv.cfg" ] || clear=--clear # What is no environment is not emptied.
    "$python" -m venv $clear "$venv"
fi
mkdir -p "$JAXRL_SERVERS"
# An environment of a server is made while the tests run, in the time that they leave; those that need it wait for the process in NAME.pid.
installs=()
stop_installs() {
    local pid
    for pid in "${installs[@]}"; do kill -- "-$pid" 2>/dev/null || true; done
}
trap stop_installs EXIT
install() { # NAME COMMAND…
    set -m # In a group of its own, which the trap ends whole.
    (
        nice "${@:2}" >"$JAXRL_SERVERS/$1.log" 2>&1 ||
            echo "no environment of $1 (see $JAXRL_SERVERS/$1.log): its tests will be skipped" >&2
    ) &
    set +m
    installs+=($!)
    echo $! >"$JAXRL_SERVERS/$1.pid"
}
servers="router sglang sglang_jax"
case " $* " in *" --long "*) servers="$servers vllm" ;; esac
for server in $servers; do
    install "$server" "tests/real/$server.sh" install "$JAXRL_SERVERS/$server"
done
stamp=$(cat setup.cfg pyproject.toml | sha256sum)
if [ "$(cat "$venv/stamp" 2>/dev/null)" != "$stamp" ]; then
    "$venv/bin/pip" install --quiet --disable-pip-version-check --editable '.[test]'
    echo "$stamp" >"$venv/stamp"
fi
# Not in the background: JAX looks for compilers once in a process, and pytest's have them from their start.
PYTHON="$venv/bin/python" tests/real/compilers.sh install "$venv/compilers" ||
    echo "no compilers of TPUs and GPUs (see above): their tests will be skipped" >&2
"$venv/bin/ruff" check --quiet .
"$venv/bin/ruff" format --check --quiet .
# Files of tests side by side, one more than two cores carry: many tests wait. tests/conftest.py has their order.
processes=${JAXRL_TEST_PROCESSES:-3}
paths=()
for word; do [ ! -e "${word%%::*}" ] || paths+=("${word%%::*}"); done
[ "${#paths[@]}" != 1 ] || [ ! -f "${paths[0]}" ] || processes=0
options=(--numprocesses="$processes" --dist=loadfile --no-loadscope-reorder)
options+=(--max-worker-restart=0) # xdist would give a test that ended its process to the next one, again and again.
case " $* " in *" --long "*) options+=(-o faulthandler_timeout=3600) ;; esac
"$venv/bin/python" -m pytest "${options[@]}" "$@"

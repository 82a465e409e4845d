#!/usr/bin/env bash
# Passes the tests: makes its environments, installs, runs. `--long` adds what takes minutes.
#
# Real SGLang and SGLang-JAX servers and the SGLang router get environments of their own under $JAXRL_SERVERS (.venv-servers). Where one
# cannot be made, its tests are skipped and say so; with JAXRL_REQUIRE_SERVERS=1, as under CI, that is a failure.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${JAXRL_TEST_VENV:-.venv-test}
python=${PYTHON:-python3}
export JAXRL_SERVERS=${JAXRL_SERVERS:-$PWD/.venv-servers}
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
# Side by side with our own: an installation waits for the network as much as it computes.
servers=(router sglang sglang_jax) installs=()
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for server in "${servers[@]}"; do
    "tests/real/$server.sh" install "$JAXRL_SERVERS/$server" >"$JAXRL_SERVERS/$server.log" 2>&1 &
    installs+=($!)
done
"$venv/bin/pip" install --quiet --disable-pip-version-check --editable '.[test]'
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
PYTHON="$venv/bin/python" tests/real/compilers.sh install "$JAXRL_SERVERS/compilers" ||
    echo "no compilers of TPUs and GPUs (see above): their tests will be skipped" >&2
for i in "${!servers[@]}"; do
    server=${servers[$i]}
    echo "environment of $server: $JAXRL_SERVERS/$server"
    wait "${installs[$i]}" || {
        cat "$JAXRL_SERVERS/$server.log" >&2
        echo "no environment of $server (see above): its tests will be skipped" >&2
    }
done
trap - EXIT
# Two files of tests at a time: most of the time of a test is a process that starts. In their order: by default the files of
# few tests, which are the longest here, would come last, where one process may wait for the other.
exec "$venv/bin/python" -m pytest --numprocesses="${JAXRL_TEST_PROCESSES:-2}" --dist=loadfile --no-loadscope-reorder "$@"

#!/usr/bin/env bash
# Passes the tests: makes its own environment, installs, runs. `--long` adds what takes minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${JAXRL_TEST_VENV:-.venv-test}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check --editable '.[test]'
"$venv/bin/ruff" check .
"$venv/bin/ruff" format --check .
exec "$venv/bin/python" -m pytest "$@"

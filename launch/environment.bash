# Makes the project's environment, installs the project, and prints the environment's Python: bash environment.bash '.[EXTRA]'
#
# In the repository's root. JAXRL_VENV names the environment (.venv), PYTHON the Python that makes it (python3).
set -euo pipefail

venv=${JAXRL_VENV:-.venv}
python=${PYTHON:-python3}
if ! "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then # none, or broken
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
        echo "needs Python >= 3.11, and PYTHON=$python is $("$python" --version 2>&1): name another by PYTHON" >&2
        exit 2
    }
    clear=
    [ ! -f "$venv/pyvenv.cfg" ] || clear=--clear # What is no environment is not emptied.
    "$python" -m venv $clear "$venv" >&2
fi
"$venv/bin/python" -Ic 'import jaxrl_async' 2>/dev/null || # -I: not that of this directory
    echo "installing into $venv: a minute or two" >&2
"$venv/bin/pip" install --quiet --disable-pip-version-check --editable "$1" >&2
echo "$venv/bin/python"

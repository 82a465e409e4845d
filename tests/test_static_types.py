"""Pyright on the rooms of pyrightconfig.json, which names those that are not checked yet."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def test_the_checked_rooms_have_no_type_errors():
    pytest.importorskip("pyright")
    protos = [path.relative_to(ROOT) for path in ROOT.glob("jaxrl_async/*/*.proto")]
    stubs = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--pyi_out=.", *map(str, protos)]
    subprocess.run(stubs, cwd=ROOT, check=True)
    # Else it asks the network for a newer one.
    environment = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    command = [sys.executable, "-m", "pyright", "-p", "tests", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

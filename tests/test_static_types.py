"""Pyright and whole signatures, in the rooms that pyrightconfig.json does not leave out."""

import ast
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def checked() -> list[pathlib.Path]:
    """The files of the rooms that are checked."""
    listed = re.findall(r'"\.\./(jaxrl_async/.+)"', (ROOT / "tests/pyrightconfig.json").read_text())
    left_out = {ROOT / name for name in listed}
    assert listed and all(path.exists() for path in left_out)
    files = ROOT.glob("jaxrl_async/**/*.py")
    return [path for path in files if not left_out & {path, *path.parents}]


def signatures(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """The public functions of a module, and the public methods of its public classes."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from signatures(node.body)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
            yield node


def test_public_functions_have_whole_signatures():
    found = []
    for path in checked():
        for function in signatures(ast.parse(path.read_text()).body):
            of = function.args
            args = [*of.posonlyargs, *of.args, *of.kwonlyargs]
            typed = all(arg.annotation or arg.arg in ("self", "cls") for arg in args)
            if not typed or not function.returns:
                found.append(f"{path}:{function.lineno} {function.name}")
    assert found == []


def test_the_checked_rooms_have_no_type_errors():
    pytest.importorskip("pyright")
    protos = [str(path.relative_to(ROOT)) for path in ROOT.glob("jaxrl_async/*/*.proto")]
    stubs = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--pyi_out=.", *protos]
    subprocess.run(stubs, cwd=ROOT, check=True)
    # Else it asks the network for a newer one.
    environment = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    command = [sys.executable, "-m", "pyright", "-p", "tests", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

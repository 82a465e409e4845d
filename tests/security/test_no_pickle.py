"""No module unpickles or evaluates its input."""

import ast
import re

import pytest
from fixtures.security import ROOT

# No pickle.

FORBIDDEN_MODULES = {"pickle", "marshal", "dill", "cloudpickle", "shelve", "joblib", "cPickle"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "yaml.load", "yaml.unsafe_load", "torch.load"}
BOXED = "extras/programs/inside.py"  # runs programs, behind its walls alone
SENDS = "servers/kinds/sglang.py"  # SGLang's tensor route takes nothing else.


def unsafe(tree):
    """What in a module could run what it is given to read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            loads = [k for k in node.keywords if k.arg in ("allow_pickle", "weights_only")]
            yield from (f"{called}({ast.unparse(k.value)}: {k.arg})" for k in loads)
            if called in FORBIDDEN_CALLS or called.split(".")[0] in FORBIDDEN_MODULES:
                yield called
            continue
        else:
            continue
        yield from (f"import {name}" for name in sorted(names & FORBIDDEN_MODULES))


def test_nothing_unpickles_or_evaluates():
    found = {}
    files = sorted((ROOT / "jaxrl_async").glob("**/*.py"))
    assert len(files) > 50
    for path in files:
        what = set(unsafe(ast.parse(path.read_text("utf-8"))))
        if what:
            found[str(path.relative_to(ROOT / "jaxrl_async"))] = what
    assert found == {SENDS: {"import pickle", "pickle.dumps"}, BOXED: {"exec", "eval"}}


def test_what_runs_programs_runs_them_in_the_sandbox_alone():
    tree = ast.parse((ROOT / "jaxrl_async" / BOXED).read_text("utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    runners = {name for name, node in functions.items() if set(unsafe(node))}
    assert runners == {"_run"}
    # Called once, in `main`, in the process that has given up its rights in `_keep`.
    before, _, after = ast.unparse(functions["main"]).partition("_run(request)")
    assert re.search(r"_keep\(channel, request\)\s+return $", before) and "_run" not in after
    others = [node for name, node in functions.items() if name != "main"]
    assert not any("_run(" in ast.unparse(node.body) for node in others)
    paths = (ROOT / "jaxrl_async").glob("**/*.py")
    assert not any("inside._run" in path.read_text("utf-8") for path in paths)


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from cloudpickle import loads", "import dill as d", "import shelve"),
        *("eval(x)", "exec(x)", "torch.load(f)", "np.load(f, allow_pickle=True)", "yaml.load(x)"),
        *("pickle.loads(x)", "import a, marshal", "__import__(x)"),
    ],
)
def test_what_unpickles_or_evaluates_is_found(source):
    assert set(unsafe(ast.parse(source)))

"""The import rule: the learner and the rollout side meet in types, queue and servers only."""

import ast
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent / "jaxrl_async"

# Room → rooms it may import.
MAY_IMPORT = {
    "types": set(),
    "names": set(),
    "records": set(),
    "sealed": set(),
    "samples": {"sealed", "types"},
    "tracker": set(),
    "listener": set(),
    "active_clock": set(),
    "security": set(),
    "rpc": {"security"},
    "metrics": {"sealed"},
    "config": {"names", "queue", "records", "security"},
    "tasks": {"sealed", "types", "environments", "names", "rewards"},
    "environments": {"types", "names", "rewards"},
    "rewards": {"types", "names", "rpc", "security"},
    "queue": {"types", "records", "rpc", "security"},
    "servers": {"names", "records", "security", "types", "versions"},
    "versions": {"records", "sealed", "security"},
    "intake": {"records", "security", "versions"},
    "publishing": {
        "active_clock",
        "config",
        "names",
        "records",
        "servers",
        "versions",
    },
    "evaluation": {"types", "config", "rewards", "sealed", "security", "servers", "rollout"},
    "objectives": {"config"},
    "models": set(),
    "inference": {"types", "listener", "models", "security", "servers", "intake", "versions"},
    "rollout": {
        "types",
        "listener",
        "names",
        "records",
        "active_clock",
        "environments",
        "tasks",
        "rewards",
        "queue",
        "security",
        "servers",
    },
    "report": {"types", "records", "metrics", "samples", "sealed", "tasks", "queue", "security"},
    "sweeps": {"metrics", "report", "runtime", "sealed"},
    "learner": {
        "types",
        "records",
        "active_clock",
        "config",
        "objectives",
        "models",
        "queue",
        "publishing",
        "versions",
        "metrics",
        "sealed",
    },
    "runtime": {
        "config",
        "environments",
        "metrics",
        "names",
        "queue",
        "records",
        "rewards",
        "sealed",
        "security",
        "tasks",
    },
}
# Parts are made of the settings, the preflight looks at them, and roles wire them together. Tools, the command line and
# the API stand above.
MAY_IMPORT["parts"] = {
    "active_clock",
    "config",
    "environments",
    "evaluation",
    "inference",
    "learner",
    "models",
    "names",
    "rewards",
    "rollout",
    "sealed",
    "servers",
    "tasks",
    "tracker",
    "types",
    "versions",
}
MAY_IMPORT["preflight"] = {
    "active_clock",
    "config",
    "learner",
    "models",
    "parts",
    "publishing",
    "rewards",
    "rollout",
    "security",
    "servers",
    "tasks",
    "tracker",
    "types",
}
MAY_IMPORT["roles"] = {
    "active_clock",
    "config",
    "evaluation",
    "inference",
    "learner",
    "metrics",
    "models",
    "parts",
    "preflight",
    "publishing",
    "queue",
    "records",
    "rewards",
    "rollout",
    "runtime",
    "samples",
    "servers",
    "tasks",
    "types",
    "versions",
}
MAY_IMPORT["fit"] = {"config", "inference", "learner", "models", "parts", "runtime"}
MAY_IMPORT["pods"] = {"config", "queue", "runtime", "sealed", "security"}
MAY_IMPORT["tools"] = {
    "config",
    "evaluation",
    "inference",
    "learner",
    "metrics",
    "models",
    "parts",
    "queue",
    "rollout",
    "runtime",
    "servers",
    "tasks",
    "versions",
}
MAY_IMPORT["cli"] = {
    "config",
    "evaluation",
    "fit",
    "inference",
    "learner",
    "metrics",
    "models",
    "names",
    "parts",
    "pods",
    "preflight",
    "publishing",
    "queue",
    "records",
    "report",
    "rewards",
    "roles",
    "rollout",
    "runtime",
    "sealed",
    "security",
    "sweeps",
    "tasks",
    "tools",
}
MAY_IMPORT["api"] = {"cli", "metrics", "preflight", "report", "roles", "sealed"}
# Nobody imports these: they stand behind tables of names.
MAY_IMPORT["extras"] = set(MAY_IMPORT)
MAY_IMPORT["sglang_jax"] = set()  # An older name of extras.sglang_jax.
WITHOUT_JAX = (
    "types",
    "names",
    "samples",
    "sealed",
    "tracker",
    "active_clock",
    "security",
    "rpc",
    "config",
    "metrics",
    "report",
    "sweeps",
    "tasks",
    "environments",
    "rewards",
    "queue",
    "servers",
    "records",
    "versions",
    "intake",
    "publishing",
    "evaluation",
    "rollout",
    "runtime",
    "pods",
    "api",
    "cli",
)
JAX = {"jax", "flax", "optax", "orbax", "chex"}


def imports_of(path: pathlib.Path) -> set[str]:
    """Dotted names that a file imports, `from a import b` as a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room_files(room: str) -> list[pathlib.Path]:
    files = [ROOT / f"{room}.py"] if (ROOT / f"{room}.py").exists() else []
    return files + sorted((ROOT / room).glob("**/*.py"))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_the_rule_allows(room):
    files, found = room_files(room), set()
    assert files
    for path in files:
        ours = {n.split(".")[1] for n in imports_of(path) if n.startswith("jaxrl_async.")}
        assert ours - {room} <= MAY_IMPORT[room], f"{path.relative_to(ROOT)}"
        found |= ours - {room}
    assert room == "extras" or found == MAY_IMPORT[room], "the rule allows more than is there"


@pytest.mark.parametrize("room", WITHOUT_JAX)
def test_a_room_without_jax_never_imports_it(room):
    for path in room_files(room):
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert not roots & JAX, f"{path.relative_to(ROOT)}"


def test_every_name_of_the_package_in_a_table_is_there():
    found = []
    for path in sorted(ROOT.glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if match := re.fullmatch(r"jaxrl_async\.([\w.]+):(\w+)", node.value):
                    found.append(match.groups())
    assert len(found) >= 8  # verbs, tasks, agents and a reward
    for module, attribute in found:
        # Read and not imported, for its library may be missing here.
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text("utf-8"))
        assert attribute in {getattr(node, "name", "") for node in tree.body}, (module, attribute)


def test_every_room_is_under_the_rule():
    rooms = {p.stem for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert rooms - {"__init__", "__main__"} == set(MAY_IMPORT)


def test_the_rule_allows_no_circle():
    order = list(graphlib.TopologicalSorter(MAY_IMPORT).static_order())  # Raises at a circle.
    assert order[-1] == "extras"


def test_nobody_imports_extras():
    assert not [room for room, allowed in MAY_IMPORT.items() if "extras" in allowed]


def test_an_older_python_is_told_which_one_is_needed():
    code = "import sys; sys.version_info = (3, 10, 1); import runpy; runpy._run_module_as_main('jaxrl_async')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "jaxrl_async needs Python >= 3.11, this is" in line

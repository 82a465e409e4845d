#!/usr/bin/env python3
"""Writes docs/api.md, the reference of what users import, from signatures and docstrings.

python launch/api.py >docs/api.md
"""

import dataclasses
import importlib
import inspect
import re
import sys

_HEAD = """# Python API

What a program, a config, or a task, reward, environment or rollout function of yours imports. This page is written from
the signatures and docstrings by `python launch/api.py`. Settings are in [settings.md](settings.md), the verbs in
[command_line.md](command_line.md).
"""
# Section → module and names, in the order of the page.
SECTIONS = {
    "Runs": ("jaxrl_async", ("load_config", "run", "Run")),
    "Configs": ("jaxrl_async.config", ("base_config", "parse_arg", "set_mode")),
    "Tasks": ("jaxrl_async", ("Example", "register_task")),
    "Tasks of files": ("jaxrl_async.tasks.table", ("Table", "Dataset")),
    "The members of a task": ("jaxrl_async.tasks.task", ("Task",)),
    "Rewards": ("jaxrl_async", ("register_reward",)),
    "Environments": ("jaxrl_async", ("Observation", "register_environment", "register_tool")),
    "Rollout functions": ("jaxrl_async.rollout.context", ("Context", "TrajectoryBuilder")),
    "What they pass on": ("jaxrl_async.types", ("Prompt", "Trajectory", "Sample")),
    "Sweeps": ("jaxrl_async.sweeps.points", ("Point", "Sweep")),
}
# The module of a type, and the mark of a type variable.
_QUALIFIED = re.compile(
    r"(jaxrl_async|ml_collections|collections|typing|pathlib|os)\.([a-z_]+\.)*|~"
)
_FIELD = re.compile(r"^    (\w+): (.*?)(?:  # (.*))?$")


def page() -> str:
    """The page, in Markdown."""
    parts = [_HEAD]
    for title, (module, names) in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [_entry(module, name) for name in names]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def _entry(module: str, name: str) -> str:
    found = getattr(importlib.import_module(module), name)
    text = f"### {name}\n\n`{module}.{name}{_signature(found)}`\n\n{_documented(found)}"
    if not inspect.isclass(found):
        return text
    return (
        text
        + "".join(
            f"- `{key}{_signature(member) if callable(member) else ''}`: {_first_line(member)}\n"
            for key, member in vars(found).items()
            if not key.startswith("_") and _first_line(member)
        )
        + "\n"
    )


def _signature(found: object) -> str:
    if dataclasses.is_dataclass(found) or getattr(found, "_is_protocol", False):
        return ""  # Its fields are listed with their comments.
    text = _QUALIFIED.sub("", str(inspect.signature(found)))
    return re.sub(r"(-> |\[|: )'(\w+)'", r"\1\2", text).replace("self, ", "").replace("self", "")


def _documented(found: object) -> str:
    """The docstring as a block, and the fields of a dataclass with their comments."""
    fields = ""
    if dataclasses.is_dataclass(found):
        named = {field.name for field in dataclasses.fields(found)}
        lines = inspect.getsource(found).splitlines()
        kept = [
            line[4:]
            for line in lines
            if line.startswith("    # ") or ((match := _FIELD.match(line)) and match[1] in named)
        ]
        fields = "\n".join(["```python", *kept, "```", "", ""])
    return f"```text\n{inspect.getdoc(found)}\n```\n\n{fields}"


def _first_line(member: object) -> str:
    text = getattr(member, "__doc__", None) or ""
    is_own = inspect.isfunction(member) or isinstance(member, property | classmethod)
    return text.splitlines()[0] if is_own and text else ""


if __name__ == "__main__":
    sys.stdout.write(page())

#!/usr/bin/env python3
"""The page docs/settings.md, written from the fields of the settings: each with its values, default, age and sentence.

python launch/settings_page.py >docs/settings.md
"""

import dataclasses
import sys
import typing
from collections.abc import Mapping
from typing import Any

from jaxrl_async.config.fields import bound, unit
from jaxrl_async.config.settings import Settings

_HEAD = """# Settings

Every setting of a run, in the order of the loop. A config file changes some of them, and so does a command line:
`--config.BLOCK.SETTING=value`. `python -m jaxrl_async config --config=FILE` prints those of a config, and marks the
ones that differ from their defaults.

A workdir keeps its settings in config.json. `since` is the version that introduced a setting: a workdir without it is
read with its default, or with the value in parentheses. Settings without a `since` are in every workdir.

This page is written from `jaxrl_async/config/settings.py` and `loss.py` by `python launch/settings_page.py`.
"""


def page() -> str:
    """The page, in Markdown."""
    return "\n".join([_HEAD, *_sections("The run", "", Settings)])


def _sections(title: str, prefix: str, block: Any) -> list[str]:
    """The table of a block, and then those of its own blocks."""
    rows, inner = [], []
    for field in dataclasses.fields(block):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(field.type):
            inner += _sections(name, f"{name}.", field.type)
            continue
        known, since = field.metadata, field.metadata.get("since", "")
        if known["before"] != known["default"]:
            since += f" (`{known['before']!r}`)"
        cells = (f"`{name}`", _values(field), f"`{known['default']!r}`", since, known["about"])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    head = ["| setting | values | default | since | meaning |", "|---|---|---|---|---|"]
    about = " ".join(block.__doc__.split("\n\n")[0].split())
    return [f"## {title}", "", about, "", *head, *rows, "", *inner]


def _values(field: dataclasses.Field[Any]) -> str:
    """Type, bounds and unit of a setting, or its choices."""
    known, origin = field.metadata, typing.get_origin(field.type)
    kinds = [getattr(kind, "__name__", "") for kind in typing.get_args(field.type)]
    if origin is tuple:
        kinds = [f"tuple of {kinds[0]}"]
    elif origin is Mapping:
        kinds = ["dict"]
    if "choices" in known:
        choices = ", ".join(f"`{choice or repr(choice)}`" for choice in known["choices"])
        return f"tuple of {choices}" if origin is tuple else choices
    kind = " or ".join(name for name in kinds if name not in ("", "NoneType"))
    kind = kind or getattr(field.type, "__name__", "")
    return ", ".join(filter(None, (f"{kind} {bound(field)}".strip(), unit(field))))


if __name__ == "__main__":
    sys.stdout.write(page())

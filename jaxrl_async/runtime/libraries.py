"""The versions of the libraries under a run: a record in its workdir, and what differs at a later start.

Other versions may compute other last bits. A run goes on with them, with a warning; a replay may differ by them.
Imports none of the libraries.
"""

import importlib.metadata
import pathlib
import platform
from typing import Any

from jaxrl_async import sealed

FILE = "libraries.json"
NAMES = ("jaxrl_async", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grpcio")


def installed() -> dict[str, str]:
    """Name → version of Python and of those of NAMES that are installed."""
    found = {"python": platform.python_version()}
    for name in NAMES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def changes(workdir: pathlib.Path) -> str:
    """A sentence with old and new versions where the last start of a run had others, or its record is damaged; else "".

    Also "" in a workdir of before there was a record.
    """
    try:
        starts = _read(workdir)
    except sealed.DamagedError as error:
        return str(error)
    new = installed()
    old = starts[-1]["versions"] if starts else new
    differ = [
        f"{name} {old.get(name, 'none')} → {new.get(name, 'none')}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    ]
    if not differ:
        return ""
    said = "other libraries than at the run's last start, which may compute other last bits: "
    return said + ", ".join(differ)


def record(workdir: pathlib.Path, step: int) -> None:
    """Notes the versions of a start after `step`, unless they are those of the start before. Earlier notes stay."""
    try:
        starts = _read(workdir)
    except sealed.DamagedError:
        starts = []
    new = installed()
    if starts and starts[-1]["versions"] == new:
        return
    starts = [*starts, {"step": step, "versions": new}]
    sealed.write(workdir / FILE, {"starts": starts})


def _read(workdir: pathlib.Path) -> list[dict[str, Any]]:
    path = workdir / FILE
    if not path.exists():
        return []
    return sealed.read(path, remedy=_REMEDY, keys=("starts",))["starts"]


_REMEDY = "the next start of the run writes it anew"

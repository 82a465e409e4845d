"""The one writer of results. A file of benchmarks/results says under "proof" where its numbers come from.

A part that is measured alone has a proof under its own name; "all" is of whatever no other name covers. A result from
before this module has, in the place of the fields, the reason why they are missing ("unproven") and the commit that
brought its numbers. `python -m benchmarks.verify` reads both.
"""

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import jaxrl_async

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIELDS = ("date", "commit", "clean", "processor", "cores", "load", "versions", "command", "seeds", "raw")  # fmt: skip
UNPROVEN = ("unproven", "committed", "committed_at")
RAW = ("raw", "runs", "rows")


def write(
    path: pathlib.Path | str,
    result: Mapping[str, Any],
    *,
    seeds: Sequence[int],
    raw: Sequence[str] = RAW,
    part: str = "all",
) -> dict[str, Any]:
    """Writes a result as JSON, its proof first, and returns what it wrote.

    Args:
      path: of the file; its directory is made.
      result: the figures; proofs of other parts, as an earlier call wrote them, stay.
      seeds: of all that is random; empty where nothing is.
      raw: names of the keys, at any depth, that hold the raw values; those that do not occur are left out.
      part: what is measured, where other parts of the file are measured alone.

    Raises:
      ValueError: no raw values.
    """
    others = {} if part == "all" else result.get("proof", {})
    kept = [name for name in raw if any(_values(result, name))]
    proof = _START | {"command": _command(), "seeds": list(seeds), "raw": kept}
    result = {"proof": others | {part: proof}} | {k: v for k, v in result.items() if k != "proof"}
    if said := faults(result):
        raise ValueError(f"{path}: {said[0]}")
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return result


def read(path: pathlib.Path | str) -> dict[str, Any]:
    """A result that stands there, to which a part is added; empty where none does."""
    path = pathlib.Path(path)
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def faults(result: Any) -> list[str]:
    """A sentence for each thing that a result's proof lacks."""
    proofs = result.get("proof") if isinstance(result, dict) else None
    if not proofs:
        return ["no proof"]
    found = []
    for part, proof in proofs.items():
        fields = UNPROVEN if "unproven" in proof else FIELDS
        found += [f"{part}: no {name}" for name in fields if proof.get(name) in (None, "")]
        if "unproven" not in proof and not any(
            value for name in proof.get("raw") or () for value in _values(result, name)
        ):
            found.append(f"{part}: no raw values")
    return found


def quartiles(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """The median, the quartiles as "low" and "high", and the raw values."""
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75))
    found = {"median": float(median), "low": float(low), "high": float(high)}
    return found | {"raw": [float(value) for value in values]}


def _values(result: Any, name: str) -> Iterator[Any]:
    """What stands under a key, at any depth."""
    if isinstance(result, Mapping):
        if name in result:
            yield result[name]
        result = [value for key, value in result.items() if key != "proof"]
    if isinstance(result, (list, tuple)):
        for value in result:
            yield from _values(value, name)


def _command() -> str:
    words = [os.path.relpath(sys.argv[0], ROOT) if sys.argv[0] else "python", *sys.argv[1:]]
    tunables = os.environ.get("GLIBC_TUNABLES")
    return " ".join([f"GLIBC_TUNABLES={tunables}"] * bool(tunables) + words)


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip()


def _start() -> dict[str, Any]:
    """JAXRL_COMMIT names the commit of a copy, whose git may have another, with a "+" where the copy was changed."""
    said = os.environ.get("JAXRL_COMMIT")
    commit = said or _git("rev-parse", "--short", "HEAD") or "unknown"
    changed = not said and _git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results")
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    versions["jaxrl_async"] = jaxrl_async.__version__
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.removesuffix("+"),
        "clean": not changed and not commit.endswith("+"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "versions": versions,
    }  # fmt: skip


def _processor() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


# As the benchmark begins: it ends on another load, and somebody may have committed meanwhile.
_START = _start()

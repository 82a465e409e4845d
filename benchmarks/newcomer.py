"""From a wheel to a report, as a newcomer goes: the commands of docs/data.md in an empty directory, and their seconds.

    python benchmarks/newcomer.py [--out=benchmarks/results/newcomer.json]

Builds the wheel of this tree, installs it into a new environment, which needs the network, and runs the page's own
commands there, as they stand in it. Nothing else of the tree is seen. Runs are added to the results; `load` is the load
average over the minute before.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

import record
from record import ROOT

PAGE = ROOT / "docs" / "data.md"
_LOADED = ("PYTHONPATH", "VIRTUAL_ENV", "JAX_COMPILATION_CACHE_DIR")  # of this process alone


def commands() -> list[str]:
    """The page's command that makes a file, and those that train, evaluate and report it."""
    blocks = re.findall(r"```text\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    (made,) = (block.strip() for block in blocks if block.startswith("awk "))
    (run,) = (block.strip() for block in blocks if "--config=quickstart" in block)
    return [made, *run.split("\n")]


def measure(directory: pathlib.Path) -> dict[str, Any]:
    """Seconds of each command, by its first words, and the scores."""
    environment = {k: v for k, v in os.environ.items() if k not in _LOADED}
    place = directory / "empty"
    place.mkdir()
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", "..", ROOT]
    subprocess.run(wheel, cwd=place, env=environment, check=True)
    (built,) = directory.glob("*.whl")
    install = f"{sys.executable} -m venv .venv && .venv/bin/pip install -q {built}"
    environment["PATH"] = f"{place}/.venv/bin:{environment['PATH']}"
    seconds = {}
    for command in (install, *commands()):
        name = "pip install" if command is install else " ".join(command.split()[:2])[:20]
        start = time.monotonic()
        subprocess.run(["bash", "-ec", command], cwd=place, env=environment, check=True)
        seconds[name] = round(time.monotonic() - start, 1)
        print(f"{name}: {seconds[name]} s", flush=True)
    scores = json.loads((place / "runs" / "sums" / "evaluation.json").read_text("utf-8"))
    found = {f"greedy at step {row['step']}": row["greedy"] for row in scores}
    return {"seconds": seconds} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default=str(ROOT / "benchmarks/results/newcomer.json"))
    out = pathlib.Path(parser.parse_args().out)
    result = {"runs": []} | record.read(out)
    with tempfile.TemporaryDirectory(prefix="jaxrl-newcomer-") as directory:
        result["runs"].append(measure(pathlib.Path(directory)))
    record.write(out, result, seeds=[0], part=f"run {len(result['runs'])}")


if __name__ == "__main__":
    main()

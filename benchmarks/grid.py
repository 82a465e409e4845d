"""Many small runs of one benchmark: split over processes, kept in a file as they end, and not run twice.

A run is known by the digest of its settings: changed settings are another run. What stands in
the results already is not run again either. It knows nothing of what is measured.
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
import scipy.special
from in_process import Laboratory, Outcome

from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.settings import Settings
from jaxrl_async.learner.learner import NonFiniteError

ROOT = pathlib.Path(__file__).parent.parent

Labels = dict[str, Any]  # such as {"method": "dg", "seed": 0}
Summary = Callable[[Outcome], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a benchmark."""

    labels: Labels
    settings: Settings

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.settings).encode()).hexdigest()[:16]


def arguments(description: str, *, name: str) -> argparse.ArgumentParser:
    """What every grid takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--jobs", type=int, default=1, help="processes, one core each")
    parser.add_argument("--only", default="", help="labels to run: 'method=dg|ppo,seed=0'")
    parser.set_defaults(name=name)
    cache = pathlib.Path(f"/tmp/jaxrl-{name}")
    parser.add_argument("--cache", type=pathlib.Path, default=cache, help="finished runs")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    return parser


def settings_with(
    overrides: Mapping[str, Any], *, arg: str = "mode=sync", name: str = "quickstart"
) -> Settings:
    """configs/{name}.py:arg with some of its keys changed: {"block.field": value}.

    Raises:
      KeyError: no such key.
    """
    path = f"configs/{name}.py"
    config = load_config(f"{ROOT}/{path}:{arg}").unlock()
    for key, value in overrides.items():
        block, _, field = key.rpartition(".")
        node = config
        for part in filter(None, block.split(".")):
            node = node[part]
        if field not in node:
            raise KeyError(f"{path} has no {key}")
        with node.ignore_type():
            node[field] = value
    return settings_of(ml_collections.ConfigDict(config))


def finish(runs: Sequence[Run], summary: Summary, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs what `args.only` leaves and no earlier call has run; returns the rows of all that have ended.

    Args:
      runs: of the benchmark, in the order in which they are to be run.
      summary: what is kept of a run; a function that other processes can import.
      args: of `arguments`.

    Returns:
      For each run that has ended, its labels, its digest and its summary in one.
    """
    args.cache.mkdir(parents=True, exist_ok=True)
    path = args.cache / "runs.jsonl"
    chosen = [run for run in runs if _chosen(run.labels, args.only)]
    known = _recorded(args.results / f"{args.name}.json") | _read(path)
    waiting = [run for run in chosen if run.digest not in known]
    print(f"{len(runs)} runs, {len(chosen)} chosen, {len(waiting)} to do", flush=True)
    start = time.monotonic()
    for number, (run, result) in enumerate(_results(waiting, summary, args), 1):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"digest": run.digest, **run.labels, **result}) + "\n")
        minutes = (time.monotonic() - start) / 60
        print(f"{minutes:6.1f} min {number}/{len(waiting)} {run.labels}", flush=True)
    ended = known | _read(path)
    return [
        run.labels | {"digest": run.digest} | ended[run.digest]
        for run in runs
        if run.digest in ended
    ]


def mean_and_interval(values: Iterable[float]) -> dict[str, float | int]:
    """Mean of n ≥ 1 seeds, and half the width of its 95 % interval (Student's t); 0 for a single one."""
    values = np.asarray(list(values), float)
    n, half = len(values), 0.0
    if n > 1:
        half = scipy.special.stdtrit(n - 1, 0.975) * values.std(ddof=1) / np.sqrt(n)
    return {"mean": float(values.mean()), "half_width": float(half), "seeds": n}


def _results(runs: Sequence[Run], summary: Summary, args: argparse.Namespace):
    """(run, summary) as they end; in this process where one job is enough."""
    if args.jobs == 1:
        with Laboratory(args.cache) as laboratory:
            for run in runs:
                yield run, _outcome(laboratory, run.settings, summary)
        return
    context = multiprocessing.get_context("spawn")
    cores, own = context.Queue(), sorted(os.sched_getaffinity(0))
    for job in range(args.jobs):
        cores.put(own[job % len(own)])
    with concurrent.futures.ProcessPoolExecutor(
        args.jobs, context, initializer=_start, initargs=(cores, args.cache)
    ) as pool:
        futures = {pool.submit(_run, run.settings, summary): run for run in runs}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()


def _start(cores: Any, cache: pathlib.Path) -> None:
    """Of a process: one core, before JAX counts them; and one laboratory."""
    global _laboratory
    os.sched_setaffinity(0, {cores.get()})
    _laboratory = Laboratory(cache)


def _run(settings: Settings, summary: Summary) -> dict[str, Any]:
    return _outcome(_laboratory, settings, summary)


def _outcome(laboratory: Laboratory, settings: Settings, summary: Summary) -> dict[str, Any]:
    log = logging.getLogger("jaxrl_async.learner")
    level = log.level
    # Of an actor's bug the learner says that engine and learner differ: they do, on purpose.
    log.setLevel(logging.ERROR)
    try:
        return summary(laboratory.run(settings))
    except NonFiniteError as error:  # A method that ends so has an answer: it fails.
        return {"stopped": str(error)}
    finally:
        log.setLevel(level)


def _read(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Finished runs by their digests."""
    if not path.exists():
        return {}
    rows = (json.loads(line) for line in path.read_text("utf-8").splitlines())
    return {row.pop("digest"): row for row in rows}


def _recorded(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Runs of an earlier result, by their digests."""
    if not path.exists():
        return {}
    return {row.pop("digest"): row for row in json.loads(path.read_text("utf-8"))["runs"]}


def _chosen(labels: Labels, only: str) -> bool:
    for condition in filter(None, only.split(",")):
        name, _, values = condition.partition("=")
        if str(labels[name]) not in values.split("|"):
            return False
    return True

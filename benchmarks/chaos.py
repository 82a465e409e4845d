"""Chaos: kills, freezes, loses and doubles the roles of real runs with the settings that ship, and audits the runs.

    python benchmarks/chaos.py --trials=200 --jobs=8
    python benchmarks/chaos.py --processes=one --trials=50 --jobs=2 --out=benchmarks/results/chaos_one.json

A round is 25 trials. 16 of them strike supervised runs, four a run: each role killed (SIGKILL), and frozen (SIGSTOP,
SIGCONT) for 5, 40 and 120 s. The other nine have a run each, whose roles were started one by one as on a pod: hosts
lost for good, a slow server, a dead server at a resume, a second learner, a second run on the same servers, servers
and workers that join and leave. The runs are small (`attacked.py`); no time-out, interval or budget is changed.

A trial is survived when steps go on after it and the run ends as it should. When a run is over, its journal is
audited: groups lost, trained twice, with tokens over the staleness bound or of no version of the run. Faults and
moments follow from --seed and the number of the run. A finished run is a line of --log, which a later call continues;
--only=N,M does these runs alone. With --processes=one the runs are in one process, with two engines and two workers,
which is killed four times a run.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import attacked
import record
from attacked import PACED, ROLES, SIZES, Attacked, ChaosError, Pod, Run, Strike

from jaxrl_async.cli.train import SUPERSEDED
from jaxrl_async.queue.journal import JournalReader

RESULTS = attacked.ROOT / "benchmarks" / "results"
FREEZES = (5.0, 40.0, 120.0)  # seconds
STRIKES = (
    *(Strike("kill", (role,)) for role in ROLES),
    *(Strike("freeze", (role,), secs) for secs in FREEZES for role in ROLES),
)
STRIKES_PER_RUN = 4  # supervisor.max_restarts is 4, too
START_SECS = 300.0  # until the first step, on a machine that has more to do
RECOVERY_SECS = 600.0  # until the steps after a fault
END_SECS = 600.0  # until the end, from the last recovery
EVERY_STEP_SECS = 3.2  # of a paced step
GROUPS_PER_STEP = 8  # of the quickstart's smoke
WRONG = ("lost", "doubled", "gap", "stray", "stale", "foreign")


@dataclasses.dataclass
class Trial:
    """One fault that a run was hit by."""

    fault: str  # "freeze 40 s queue"
    step: int  # the last one done when it struck
    longest_secs: float  # without a step, from the fault to its recovery
    # From the fault's end to the end of the second step from there: one that was under way may still end.
    recovery_secs: float


class Victim:
    """A run and what it was hit by."""

    def __init__(self, run: Attacked, rng: random.Random):
        self.run, self.rng, self.trials = run, rng, []

    def wait(self, low: int = 2, high: int = 6) -> None:
        """Until a random moment, some steps on."""
        self.run.wait_for(self.run.step + self.rng.randint(low, high), RECOVERY_SECS, "between")
        time.sleep(self.rng.random() * EVERY_STEP_SECS)

    @contextlib.contextmanager
    def fault(self, name: str, *, steps: int = 2) -> Iterator[None]:
        """The block is the fault; afterwards, waits for `steps` more steps at full speed."""
        step, self.run.longest_secs = self.run.step, 0.0
        yield
        end, during = time.monotonic(), self.run.step
        self.run.hurry()
        if not self.run.wait_for(during + steps, RECOVERY_SECS, name):
            raise ChaosError(f"{name}: the run was over before step {during + steps}")
        recovery_secs = time.monotonic() - end
        self.trials.append(Trial(name, step, self.run.longest_secs, recovery_secs))
        self.run.dawdle()


def supervised(
    directory: pathlib.Path,
    rng: random.Random,
    strikes: Sequence[Strike],
    settings: Sequence[str] = (),
) -> "Outcome":
    """A run with 2 servers and 2 workers whose roles are killed and frozen, one after the other."""
    num_steps = 20 + sum(12 + int(strike.secs / EVERY_STEP_SECS) for strike in strikes)
    with Run(directory / "run", num_steps=num_steps, settings=[*SIZES, PACED, *settings]) as run:
        victim = started(run, rng)
        for strike in strikes:
            victim.wait()
            with victim.fault(str(strike)):
                if not run.strike(strike, rng):
                    raise ChaosError(f"{strike}: a role is not there:\n{run.printed()}")
        return finished(victim, num_steps)


def one_process(
    directory: pathlib.Path, rng: random.Random, strikes: Sequence[Strike]
) -> "Outcome":
    """The same in one process."""
    return supervised(directory, rng, strikes, ["--config.supervisor.processes=one"])


def lost_worker(directory: pathlib.Path, rng: random.Random, mode: str = "async") -> "Outcome":
    """One of two rollout hosts is gone for good; its permits come back."""
    config = f"{attacked.CONFIG},mode={mode}"
    with pod(directory, num_steps=40, num_workers=2, config=config) as run:
        victim = started(run, rng)
        victim.wait()
        # All groups that it had are trained within four steps.
        with victim.fault("lost worker" if mode == "async" else f"lost worker, {mode}", steps=4):
            run.lose(f"rollout-{rng.randrange(2)}")
        return finished(victim, 40, max_staleness=0 if mode == "sync" else attacked.MAX_STALENESS)


def lost_worker_sync(directory: pathlib.Path, rng: random.Random) -> "Outcome":
    """The same in mode sync, where the next step needs each of its groups."""
    return lost_worker(directory, rng, mode="sync")


def lost_server(directory: pathlib.Path, rng: random.Random) -> "Outcome":
    """One of two servers is gone for good."""
    with pod(directory, num_steps=40, num_servers=2) as run:
        victim = started(run, rng)
        victim.wait()
        with victim.fault("lost server", steps=4):
            run.lose(f"server-{rng.randrange(2)}")
        return finished(victim, 40)


def slow_server(directory: pathlib.Path, rng: random.Random) -> "Outcome":
    """One of two servers runs for .3 s of every 2.3 s, for 30 s, while versions go on; weights.keep is 2."""
    with pod(directory, num_steps=150, num_servers=2) as run:
        victim = started(run, rng)
        victim.wait()
        name = f"server-{rng.randrange(2)}"
        with victim.fault("slow server"):
            run.hurry()
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and run.step < 120:
                run.send(name, signal.SIGSTOP)
                run.hold(2.0, "slow server")
                run.send(name, signal.SIGCONT)
                run.hold(0.3, "slow server")
        return finished(victim, 150)


def dead_server_at_a_resume(directory: pathlib.Path, rng: random.Random) -> "Outcome":
    """One of three servers is gone, then the learner; the learner comes back without that server."""
    with pod(directory, num_steps=40, num_servers=3) as run:
        victim = started(run, rng)
        victim.wait()
        run.lose(f"server-{rng.randrange(3)}")
        victim.wait()
        with victim.fault("dead server at a resume"):
            run.lose("learner")
            run.start("learner")
        return finished(victim, 40)


def second_learner(directory: pathlib.Path, rng: random.Random) -> "Outcome":
    """A frozen learner is succeeded, and wakes while its successor trains: it ends, and changes nothing."""
    with pod(directory, num_steps=40) as run:
        victim = started(run, rng)
        victim.wait()
        elder = run.processes["learner"]
        with victim.fault("second learner"):
            run.send("learner", signal.SIGSTOP)
            before = run.step
            run.start("learner", log="learner-2")
            run.wait_for(before + 2, RECOVERY_SECS, "the second learner")
            os.killpg(elder.pid, signal.SIGCONT)
        try:
            code = elder.wait(RECOVERY_SECS)
        except Exception:
            os.killpg(elder.pid, signal.SIGKILL)
            raise ChaosError(f"the elder learner did not end:\n{run.printed()}") from None
        if code != SUPERSEDED:
            raise ChaosError(
                f"the elder learner ended with {code}, not {SUPERSEDED}:\n{run.printed()}"
            )
        return finished(victim, 40)


def second_run(directory: pathlib.Path, rng: random.Random) -> "Outcome":
    """Another run pushes its own weights to the same servers, until it is over."""
    with pod(directory, num_steps=60, num_servers=2) as run:
        victim = started(run, rng)
        victim.wait()
        settings = ["--config.weights.transport=stream"]
        with victim.fault("second run"):
            other = Pod(
                directory / "other", num_steps=5, addresses=run.addresses, settings=settings
            )
            with other:
                other.hurry()
                with contextlib.suppress(ChaosError):  # It need not survive; ours must.
                    other.finish(120.0)
        return finished(victim, 60)


def servers_join_and_leave(directory: pathlib.Path, rng: random.Random) -> "Outcome":
    """A second server joins by `server.discover`, and the first one leaves."""
    addresses = directory / "servers"
    with pod(directory, num_steps=60, num_servers=2, discover=addresses) as run:
        victim = started(run, rng)
        victim.wait()
        with victim.fault("servers join and leave", steps=4):
            run.start("server-1")
            addresses.write_text("\n".join(run.addresses) + "\n")
            victim.wait(4, 6)
            addresses.write_text(run.addresses[1] + "\n")
            run.lose("server-0")
        return finished(victim, 60)


def workers_join_and_leave(directory: pathlib.Path, rng: random.Random) -> "Outcome":
    """A second worker joins, and the first one leaves (SIGTERM)."""
    with pod(directory, num_steps=60) as run:
        victim = started(run, rng)
        victim.wait()
        with victim.fault("workers join and leave", steps=4):
            run.start("rollout-1")
            victim.wait(2, 3)
            run.leave("rollout-0")
        return finished(victim, 60)


SCENARIOS: tuple[Callable[..., "Outcome"], ...] = (
    lost_worker,
    lost_worker_sync,
    lost_server,
    slow_server,
    dead_server_at_a_resume,
    second_learner,
    second_run,
    servers_join_and_leave,
    workers_join_and_leave,
)


@dataclasses.dataclass
class Outcome:
    """A run that is over."""

    trials: list[Trial]
    groups: int  # trained on
    wrong: dict[str, list[int]]  # `attacked.audit`


def pod(directory: pathlib.Path, **arguments) -> Pod:
    """A paced run whose roles were started one by one."""
    return Pod(directory / "run", settings=[PACED], **arguments)


def started(run: Attacked, rng: random.Random) -> Victim:
    """Waits for the first step."""
    run.hurry()
    run.wait_for(1, START_SECS, "start")
    run.dawdle()
    return Victim(run, rng)


def finished(victim: Victim, num_steps: int, max_staleness=attacked.MAX_STALENESS) -> Outcome:
    """Waits for the end, and audits the run.

    Raises:
      ChaosError: the journal lacks a group.
    """
    run = victim.run
    wrong = run.finish(END_SECS, max_staleness)
    reader = JournalReader(run.workdir / "journal.sqlite")
    try:
        if len(reader) != num_steps * GROUPS_PER_STEP or run.step != num_steps:
            raise ChaosError(f"{len(reader)} groups in {run.step} steps of {num_steps}")
        return Outcome(victim.trials, len(reader), wrong)
    finally:
        reader.close()


def plan(
    num_trials: int, seed: int, processes: str = "many"
) -> list[tuple[str, Callable[..., Outcome], tuple]]:
    """The runs of so many trials, or a few more: (name, its function, strikes of a supervised run)."""
    if processes == "one":
        strikes = [Strike("kill", ("one",))] * STRIKES_PER_RUN
        return [("one_process", one_process, (strikes,))] * -(-num_trials // STRIKES_PER_RUN)
    rng, runs, count = random.Random(seed), [], 0
    while count < num_trials:
        strikes = list(STRIKES)
        rng.shuffle(strikes)
        parts = [strikes[i : i + STRIKES_PER_RUN] for i in range(0, len(strikes), STRIKES_PER_RUN)]
        runs += [("supervised", supervised, (part,)) for part in parts]
        runs += [(scenario.__name__, scenario, ()) for scenario in SCENARIOS]
        count += len(strikes) + len(SCENARIOS)
    return runs


def attack(index: int, name: str, function: Callable[..., Outcome], arguments: tuple, seed: int):
    """One run, as a line of the log."""
    row = {"run": index, "name": name, "strikes": [], "seed": seed, "error": ""}
    row["strikes"] = [str(strike) for part in arguments for strike in part]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as directory:
        try:
            rng = random.Random(f"{seed}/{index}")
            outcome = function(pathlib.Path(directory), rng, *arguments)
            row |= {
                "trials": [dataclasses.asdict(trial) for trial in outcome.trials],
                "groups": outcome.groups,
                "wrong": {name: len(found) for name, found in outcome.wrong.items()},
            }
        except Exception as error:  # It counts as a run that did not survive.
            row["error"] = f"{type(error).__name__}: {error}"
    return row | {"secs": time.monotonic() - start}


def summary(rows: Sequence[dict]) -> dict:
    """The figures of the runs of a log."""
    trials = [trial for row in rows for trial in row.get("trials", ())]
    done = [row for row in rows if not row["error"]]
    return {
        "runs": len(rows),
        "runs_failed": [row["run"] for row in rows if row["error"]],
        "trials": len(trials),
        "groups_trained": sum(row["groups"] for row in done),
        "wrong": {name: sum(row["wrong"][name] for row in done) for name in WRONG},
        "faults": {name: _figures(trials, name) for name in sorted({t["fault"] for t in trials})},
    }


def _figures(trials: Sequence[dict], fault: str) -> dict[str, float]:
    mine = [trial for trial in trials if trial["fault"] == fault]
    figures: dict[str, float] = {"trials": len(mine)}
    for name in ("longest_secs", "recovery_secs"):
        values = [trial[name] for trial in mine]
        figures |= {f"{name}_median": statistics.median(values), f"{name}_max": max(values)}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", choices=("many", "one"), default="many")
    parser.add_argument("--only", default="", help="numbers or names of runs, with commas")
    parser.add_argument("--log", default="chaos.jsonl")
    parser.add_argument("--out", default=str(RESULTS / "chaos.json"))
    args = parser.parse_args()
    log = pathlib.Path(args.log)
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known, only = {row["run"] for row in rows}, set(filter(None, args.only.split(",")))
    todo = [
        (index, *run)
        for index, run in enumerate(plan(args.trials, args.seed, args.processes))
        if index not in known and (not only or {str(index), run[0]} & only)
    ]
    lock = threading.Lock()

    def work(run) -> None:
        row = attack(*run, args.seed)
        with lock, open(log, "a") as file:
            rows.append(row)
            print(json.dumps(row), file=file)
            print(_line(row), flush=True)

    with tempfile.TemporaryDirectory(prefix="chaos-cache-") as cache:
        # Runs compile the same programs.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(work, todo))
    rows.sort(key=lambda row: row["run"])
    result = summary(rows)
    record.write(args.out, result | {"rows": rows}, seeds=[args.seed])
    print(f"\n{result['runs']} runs, failed: {result['runs_failed']}; {result['trials']} trials")
    print(f"{result['groups_trained']} groups trained on; {result['wrong']}")
    for name, row in result["faults"].items():
        print(
            f"{name:28} {row['trials']:4}"
            f"  recovery {row['recovery_secs_median']:6.1f} s, at most {row['recovery_secs_max']:6.1f}"
            f"  without a step {row['longest_secs_median']:6.1f} s, at most {row['longest_secs_max']:6.1f}"
        )


def _line(row: dict) -> str:
    faults = ", ".join(f"{t['fault']}: {t['recovery_secs']:.1f} s" for t in row.get("trials", ()))
    wrong = {name: count for name, count in row.get("wrong", {}).items() if count}
    return f"{row['run']:4} {row['name']:24} {row['secs']:6.0f} s  {row['error'] or faults} {wrong or ''}"


if __name__ == "__main__":
    main()

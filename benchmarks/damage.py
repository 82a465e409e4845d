"""Damages to the files of a finished workdir, and what resume, evaluate, replay and report make of them.

    python benchmarks/damage.py [--damages=1000] [--workdir=DIR] [--seed=0] [--steps=1] [--workers=1] [--minutes=0]
        [--commands=0] [--place=DIR] [--megabytes=512] [--out=DIR] [--part=NAME] [--smoke]

**damages.** Of a file drawn at random a bit is flipped, or it is truncated, deleted, or swapped with another one. Then
the four verbs run, each in a copy of the damaged workdir, by the function that the command calls, in processes that
stay warm. `resume` trains --steps steps more, with all roles in its process. With --steps=0 nothing is trained or
sampled: the verbs end when they have read all they need, and a checkpoint of the same bytes is read once. Their
findings are compared with those in the whole workdir, bit for bit: the states and positions that were restored, the
prompts and the completions, the scores, the groups of the journal, the states after the steps, the config, the page.
An outcome is

    same       as if nothing were damaged
    said       other findings, with a warning (in the log, or on the page) that names a file
    refused    an error that names a file of the workdir and a remedy, and leaves config.json as it was
    wrong      other findings, and not a word
    unnamed    another error, or one without file or remedy, or the end of the process
    hung       no end within 120 s

After a refusal of `resume` the remedy of its words is followed: stuck where the third one does not help either.
The damage with a number is the same whatever the number of workers; one that equals an earlier one has its outcomes.
Every --commands-th damage is done again by commands, each in a process of its own, with a run's own roles and figures;
their output and the files that they write are compared. --minutes ends the benchmark early, after the damages that are
done by then; with --place the next call goes on after them. --part adds the damages, under this name, to the result
that stands there.

**digests.** Seconds and CPU seconds from a checkpoint's save until it is on disk, with digests and without, in turns,
of the digests alone, and of the call that the learner waits for; of a state of --megabytes.

The workdir is that of `configs/quickstart.py:smoke` with four checkpoints, trained here, evaluated and reported, unless
--workdir names one. Results are printed and written to benchmarks/results/damage.json; --smoke is quick.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import record
from record import ROOT

from jaxrl_async import parts
from jaxrl_async.cli import main as command
from jaxrl_async.cli import train as train_verb
from jaxrl_async.inference import programs
from jaxrl_async.learner import checkpoint as checkpoint_lib
from jaxrl_async.learner import learner as learners
from jaxrl_async.learner.checkpoint import Checkpoints
from jaxrl_async.learner.train_step import mesh_of
from jaxrl_async.learner.versions import MemoryVersions, Versions
from jaxrl_async.report import plots
from jaxrl_async.roles import learner as learner_role
from jaxrl_async.roles import one
from jaxrl_async.runtime import supervisor
from jaxrl_async.runtime import workdir as workdirs
from jaxrl_async.tools import evaluate as evaluation
from jaxrl_async.tools import replay as replays
from jaxrl_async.versions.store import WeightStore

CONFIG = f"{ROOT}/configs/quickstart.py:smoke,mode=async"
WORDS = (
    "--config.checkpoint.every_steps=1",
    "--config.checkpoint.keep=3",
    "--config.learner.num_steps=4",
    "--config.learner.groups_per_step=4",  # Few rows: a verb's time is that of its reads.
    "--config.learner.microbatch_rows=8",
    "--config.rollout.group_size=4",
    "--config.evaluate.every_steps=2",
    "--config.evaluate.num_validation=8",
    "--config.evaluate.num_prompts=8",
    "--config.task.args.num_digits=1",  # Of 100 questions: each verb reads them all.
    "--config.task.args.num_test=16",
    "--config.warm_start.num_steps=200",  # Else no answer is right, whatever the weights.
)
KINDS = ("flip", "truncate", "delete", "swap")
VERBS = ("evaluate", "replay", "report", "resume")
BAD = ("wrong", "unnamed", "hung")
REMEDY = re.compile(
    r"--fallback|delete|deleted|move|restore|Restore|copy|--config|is intact|another --workdir|--until|resume the run"
)
MAX_REMEDIES = 3
VERB_SECS = 120.0
WORKER_DAMAGES = 200  # Then a new process goes on: what has ended stays in memory.
COMPILED = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--workdir", type=pathlib.Path, help="of a finished run; it is not changed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1, help="that a resumed run trains")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--minutes", type=float, default=0.0, help="bound; 0 for none")
    parser.add_argument("--commands", type=int, default=0, help="1 in so many, again; 0 for none")
    parser.add_argument("--place", type=pathlib.Path, help="of the outcomes, to go on from")
    parser.add_argument("--megabytes", type=float, default=512.0, help="of the state with digests")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--part", help="of the result that stands there, to which it is added")
    parser.add_argument("--smoke", action="store_true", help="6 damages, no steps, 4 MB")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)  # its lines
    parser.add_argument("--numbers", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        with tempfile.TemporaryDirectory() as directory:
            damages(args.workdir, pathlib.Path(directory), args.numbers, args, args.worker)
        return
    if args.smoke:
        args.damages, args.megabytes, args.steps = 6, 4.0, 0
    with tempfile.TemporaryDirectory() as directory:
        place = (args.place or pathlib.Path(directory)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        args.workdir = args.workdir or trained(place / "trained")
        began = time.monotonic()
        if args.smoke:
            damages(args.workdir, place, range(args.damages), args, place / "0.jsonl")
        else:
            spread(args, place)
        rows = rows_of(place)
        of = {"seed": args.seed, "steps": args.steps, "workers": args.workers}
        of |= {"wanted": args.damages, "files": len(files_of(args.workdir))}
        of |= {"secs": round(time.monotonic() - began, 1)}
        again = [row for row in rows if row["by"] == "command"]
        result = of | summary([row for row in rows if row["by"] == "function"])
        result["again_by_commands"] = summary(again)
        result["digests"] = digests(place / "checkpoints", args.megabytes)
    print(json.dumps(result, indent=2))
    path, raw = args.out / "damage.json", ["secs_of_each", "raw"]
    if args.part:
        result = record.read(path) | {args.part: result}
    record.write(path, result, seeds=[args.seed], raw=raw, part=args.part or "all")


def trained(workdir: pathlib.Path) -> pathlib.Path:
    """A finished run, evaluated and reported."""
    verb = [sys.executable, "-m", "jaxrl_async"]
    for words in (
        ["train", f"--config={CONFIG}", *WORDS],
        ["evaluate"],
        ["report"],
    ):
        argv = [*verb, *words, f"--workdir={workdir}"]
        subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, timeout=900)
    return workdir


def files_of(whole: pathlib.Path) -> list[str]:
    return sorted(str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file())


def rows_of(place: pathlib.Path) -> list[dict[str, Any]]:
    """The outcomes so far."""
    paths = sorted(place.glob("*.jsonl"))
    lines = [line for path in paths for line in path.read_text("utf-8").splitlines()]
    return [json.loads(line) for line in lines]


def spread(args: argparse.Namespace, place: pathlib.Path) -> None:
    """Runs the damages in processes, each of which appends its outcomes to a file; one that ends goes on after them."""
    words = [f"--{name}={getattr(args, name)}" for name in ("workdir", "seed", "steps")]
    deadline = time.monotonic() + (args.minutes * 60 or float("inf"))
    environment = {**COMPILED, "JAX_COMPILATION_CACHE_DIR": str(place / "compiled")} | os.environ
    of: dict[str, range] = {
        str(first): range(first, args.damages, args.workers) for first in range(args.workers)
    }
    if args.commands:
        of["commands"] = range(0, args.damages, args.commands)
    running: dict[str, subprocess.Popen] = {}

    def left(worker: str) -> list[int]:
        by = "command" if worker == "commands" else "function"
        done = {row["number"] for row in rows_of(place) if row["by"] == by}
        return [number for number in of[worker] if number not in done]

    def go_on(worker: str) -> bool:
        lines, code = place / f"{worker}.jsonl", 0
        if worker in running:
            code = running.pop(worker).returncode
        numbers = left(worker)
        if code > 0:
            raise RuntimeError((place / f"{worker}.log").read_text("utf-8")[-2000:])
        if code < 0 and numbers:  # It died of the first of these.
            row = {"number": numbers.pop(0), "damage": "?", "outcomes": {"?": "unnamed"}}
            row |= {"by": "function", "bad": [f"the process died of signal {-code}"]}
            with open(lines, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if numbers:
            argv = [sys.executable, __file__, *words, f"--worker={lines}"]
            with open(place / f"{worker}.log", "ab") as log:
                running[worker] = subprocess.Popen(
                    [*argv, f"--numbers={numbers[:WORKER_DAMAGES]}"],
                    cwd=ROOT,
                    stdout=log,
                    stderr=log,
                    env=environment,
                )
        return bool(numbers)

    try:
        going = [worker for worker in of if go_on(worker)]
        while going and time.monotonic() < deadline:
            going = [worker for worker in going if running[worker].poll() is None or go_on(worker)]
            time.sleep(0.2)
    finally:
        for process in running.values():
            process.terminate()
            process.wait()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of the outcomes, by verb and by kind of damage, and every outcome that is none of the first three."""
    by_verb = {verb: collections.Counter() for verb in VERBS}
    by_kind = {kind: collections.Counter() for kind in KINDS}
    for row in rows:
        for verb, outcome in row["outcomes"].items():
            by_verb.setdefault(verb, collections.Counter())[outcome] += 1
            kind = row["damage"].split(" ")[0]
            by_kind.setdefault(kind, collections.Counter())[outcome] += 1
    total = sum(by_verb.values(), collections.Counter())
    return {
        "damages": len(rows),
        "equal_to_an_earlier_one": sum("as" in row for row in rows),
        "outcomes": {verb: dict(found) for verb, found in by_verb.items()},
        "by_kind": {kind: dict(found) for kind, found in by_kind.items()},
        "silently_wrong": total["wrong"],
        "hung": total["hung"],
        "refusals_without_file_or_remedy": total["unnamed"],
        "stuck": sum(row.get("stuck", False) for row in rows),
        "secs_of_each": [round(row["secs"], 2) for row in rows if "secs" in row],
        "bad": [row for row in rows if row["bad"]],
    }


def damages(
    whole: pathlib.Path,
    place: pathlib.Path,
    numbers: Iterable[int],
    args: argparse.Namespace,
    lines: pathlib.Path,
) -> None:
    """Appends the outcomes of damages to a file, a line each."""
    by = "command" if lines.stem == "commands" else "function"
    verbs = (Commands if by == "command" else Verbs)(whole, place, args.steps)
    files, known = files_of(whole), {}
    for row in rows_of(lines.parent):
        if row["by"] == by and "sha" in row and "as" not in row:
            known[row["sha"]] = row
    with verbs.patched(), open(lines, "a", encoding="utf-8") as file:
        sound = {verb: verbs.run(verb) for verb in VERBS}
        sound |= {verb: verbs.run(verb) for verb in VERBS}  # The first runs compile.
        with verbs.damaged("evaluation.json", None):
            unscored = verbs.run("report")  # Nothing says that there was one.
        for ended in (*sound.values(), unscored):
            assert ended.code in (0, train_verb.PREEMPTED), f"{ended.words}\n{ended.error}"
        for number in numbers:
            began = time.monotonic()
            told, content = drawn(whole, files, random.Random(f"{args.seed} {number}"))
            sha = _sha(told.encode(), *(value or b"" for value in content.values()))
            row = {"number": number, "damage": told, "by": by, "sha": sha[:16]}
            if row["sha"] in known:
                earlier = known[row["sha"]]
                row |= {
                    name: earlier[name] for name in ("outcomes", "bad", "stuck") if name in earlier
                }
                row["as"] = earlier["number"]
            else:
                row |= one_damage(verbs, told, content, sound, unscored)
                known[row["sha"]] = row | {"secs": time.monotonic() - began}
                row = known[row["sha"]]
            file.write(json.dumps(row) + "\n")
            file.flush()


def one_damage(verbs: "Verbs", told: str, content: dict, sound: dict, unscored: "Ended") -> dict:
    row: dict[str, Any] = {"outcomes": {}, "bad": []}
    with contextlib.ExitStack() as stack:
        for name, changed in content.items():
            stack.enter_context(verbs.damaged(name, changed))
        for verb in VERBS:
            expected = [sound[verb]]
            if verb == "report" and told == "delete evaluation.json":
                expected.append(unscored)
            ended = verbs.run(verb)
            outcome = judge(ended, expected, list(content), verbs.workdir)
            row["outcomes"][verb] = outcome
            if outcome in BAD:
                row["bad"].append({"verb": verb, "outcome": outcome, "words": ended.words[-800:]})
            if verb == "resume" and outcome in ("refused", *BAD[1:]):
                row["stuck"] = not verbs.follow(ended.words)
                if row["stuck"]:
                    row["bad"].append({"verb": verb, "outcome": "stuck", "words": ended.words})
    return row


def drawn(whole: pathlib.Path, files: list[str], rng: random.Random) -> tuple[str, dict]:
    """A damage in words, and file → its content, None for none."""
    kind, name = rng.choice(KINDS), rng.choice(files)
    content = (whole / name).read_bytes()
    if kind == "delete":
        return f"delete {name}", {name: None}
    if kind == "truncate":
        return f"truncate {name}", {name: content[: rng.randrange(max(1, len(content)))]}
    if kind == "flip":
        changed = bytearray(content)
        if content:
            changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        return f"flip {name}", {name: bytes(changed)}
    other = rng.choice(files)
    return f"swap {name} {other}", {name: (whole / other).read_bytes(), other: content}


@dataclasses.dataclass
class Ended:
    """The end of a verb."""

    code: int | None  # None where it hung
    findings: Any
    words: str  # logged, printed, and among the page's warnings
    error: str  # its last words, of a refusal; a traceback of another error
    changes_config: bool


def judge(ended: Ended, sound: list[Ended], hit: list[str], workdir: pathlib.Path) -> str:
    """The outcome of a verb on a damaged workdir."""
    if ended.code is None:
        return "hung"
    if ended.code != sound[0].code:
        named = str(workdir) in ended.error and REMEDY.search(ended.error)
        foreign = "Traceback" in ended.error or ended.changes_config
        return "refused" if named and not foreign else "unnamed"
    if ended.findings in [one.findings for one in sound]:
        return "same"
    return "said" if any(_is_named(name, ended.words) for name in hit) else "wrong"


def _is_named(name: str, words: str) -> bool:
    """Whether warnings name a file, its directory's number, or (of the journal) what it is."""
    parts_of = pathlib.PurePath(name).parts
    names = {parts_of[-1], "/".join(parts_of[:2])} | ({"journal"} if "journal" in name else set())
    return any(part in words for part in names)


class Verbs:
    """The verbs in this process, in copies of a workdir. What they restore, ask and push is taken down."""

    def __init__(self, whole: pathlib.Path, place: pathlib.Path, steps: int):
        # All copies have one path: findings have it in their words.
        self.workdir, self._steps, self._whole = place / "run", steps, whole
        self._damaged = place / "damaged"
        shutil.copytree(whole, self._damaged)
        self._last = max(workdirs.checkpoint_steps(whole))
        self._num_steps = json.loads((whole / "config.json").read_text())["learner"]["num_steps"]
        self._seen: list[str] = []
        self._programs: dict[str, Any] = {}

    @contextlib.contextmanager
    def damaged(self, name: str, content: bytes | None) -> Iterator[None]:
        """Another content of a file meanwhile, or None."""
        path, whole = self._damaged / name, self._whole / name
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(content)
        try:
            yield
        finally:
            if whole.exists():
                shutil.copy2(whole, path)

    def run(self, verb: str, *argv: str, anew: bool = True) -> Ended:
        """Runs a verb in a new copy of the damaged workdir, or in the last one."""
        if anew:
            shutil.rmtree(self.workdir, ignore_errors=True)
            shutil.copytree(self._damaged, self.workdir)
        self._seen.clear()
        config = _digest_of(self.workdir / "config.json")
        words = [verb, f"--workdir={self.workdir}", *argv]
        if verb == "resume":
            num_steps = f"--config.learner.num_steps={self._num_steps + max(1, self._steps)}"
            words = ["train", "--resume", num_steps, *words[1:]]
        code, printed, said, error = self._call(words)
        if not error:
            error = printed.rpartition(f"\n{words[0]}: ")[2] if code else ""
        return Ended(
            code=code,
            findings=None
            if code not in (0, train_verb.PREEMPTED)
            else self._findings(verb, printed),
            words="\n".join([*said, printed, self._warnings() if verb == "report" else ""]),
            error=error,
            changes_config=code != 0 and config != _digest_of(self.workdir / "config.json"),
        )

    def _call(self, words: list[str]) -> tuple[int | None, str, list[str], str]:
        """The code of a verb, None where it hung, its output, its warnings, and the traceback of an error."""
        output, error = io.StringIO(), ""
        with quiet(output) as said:
            try:
                code = command.main(words)
            except _HungError:
                code = None
            except Exception as found:
                code, error = -1, "".join(traceback.format_exception(found))
        return code, output.getvalue(), said, error

    def _findings(self, verb: str, printed: str) -> list[Any]:
        found: list[Any] = sorted(self._seen)
        match verb:
            case "evaluate":
                found.append((self.workdir / "evaluation.json").read_text("utf-8"))
            case "replay":
                found += [line for line in printed.splitlines() if line.startswith("step ")]
                found += self._tables(self.workdir / "replay")
            case "report":
                found.append((self.workdir / "report.html").read_text("utf-8"))
            case "resume":
                found += [self._tables(self.workdir), (self.workdir / "config.json").read_text()]
        return found

    def _tables(self, workdir: pathlib.Path) -> list[str]:
        """The digests of the last checkpoint's tensors. Its position depends on who was under way as it was saved."""
        steps = workdirs.checkpoint_steps(workdir)
        paths = (
            sorted((workdir / "checkpoints" / str(max(steps))).glob("digests/p*")) if steps else []
        )
        return [json.dumps(json.loads(path.read_text("utf-8"))["tensors"]) for path in paths]

    def _warnings(self) -> str:
        path = self.workdir / "report.html"
        page = path.read_text("utf-8", errors="replace") if path.exists() else ""
        found = re.findall(r'<div class="warnings".*?</div>|<p class="soft">.*?</p>', page, re.S)
        return "\n".join(found)

    def follow(self, words: str) -> bool:
        """Whether the remedies in the words of refusals lead to a resume."""
        argv: list[str] = []
        shutil.rmtree(self.workdir)
        shutil.copytree(self._damaged, self.workdir)
        for _ in range(MAX_REMEDIES):
            words = words.rpartition("\ntrain: ")[2]
            where = re.escape(str(self.workdir))
            if "--fallback" in words:
                argv.append("--fallback")
            elif "with a --config" in words:
                (self.workdir / "config.json").unlink(missing_ok=True)
                argv.append(f"--config={self._whole / 'config.json'}")
            elif "journal" in words:
                for path in self.workdir.glob("journal.sqlite*"):
                    path.unlink()
            elif found := re.search(rf"(?:delete|;) ({where}/[\w./]+)", words):
                path = pathlib.Path(found[1])
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            elif found := re.search(rf"({where}/[\w./]+) is damaged", words):
                pathlib.Path(found[1]).unlink(missing_ok=True)
            ended = self.run("resume", *dict.fromkeys(argv), anew=False)
            if ended.code in (0, train_verb.PREEMPTED):
                return True
            words = ended.words
        return False

    # What is other than in a process of one's own.

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Verbs whose programs are kept, whose figures are not drawn, and whose roles are all in this process."""
        seen, read, states = self._seen, Checkpoints._read, {}
        generate, push = evaluation.EngineClient.generate, MemoryVersions._push

        def see_read(checkpoints: Checkpoints, step: int, like: Any) -> Any:
            directory = checkpoints._directory / str(step)
            paths = sorted(path for path in pathlib.Path(directory).rglob("*") if path.is_file())
            kinds = [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(like)]
            key = (
                f"{step} {kinds} {[(str(p.relative_to(directory)), _digest_of(p)) for p in paths]}"
            )
            if self._steps or key not in states:
                states[key] = read(checkpoints, step, like)
            state, position = states[key]
            leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
            seen.append(f"checkpoint {step} {_sha(*leaves)} {json.dumps(position)}")
            return state, position

        async def see_generate(client: Any, sampling: Any, tokens: Any, **overrides: Any) -> Any:
            done = await generate(client, sampling, tokens, **overrides)
            seen.append(f"{list(tokens)} {sampling} {list(done.output_ids)}")
            return done

        def see_push(versions: Any, version: int, write: Any, point: Any) -> None:
            seen.append(f"push {version} of epoch {versions._run_epoch}")
            push(versions, version, write, point)

        patches = [
            (Checkpoints, "_read", see_read),
            (evaluation.EngineClient, "generate", see_generate),
            (MemoryVersions, "_push", see_push),
            (
                MemoryVersions,
                "resume",
                self._resume_of(MemoryVersions.resume),
            ),
            (plots, "figure", calls_of),
            (parts, "train_step_of", functools.partial(self._train_step_of, parts.train_step_of)),
            (programs, "Programs", functools.partial(self._programs_of, programs.Programs)),
            (supervisor, "run", self._in_this_process),
            (learner_role, "mesh_of", _mesh_of),
            (replays, "mesh_of", _mesh_of),
        ]
        if not self._steps:
            patches += [
                (evaluation, "evaluate", self._restore_alone),
                (learners, "train", self._read_alone),
                (replays, "_compare", lambda step, *_: replays.Comparison(step, 0.0, "")),
                (one.rollout, "work", _wait_alone),
            ]
        with contextlib.ExitStack() as stack:
            for where, name, patch in patches:
                stack.enter_context(unittest.mock.patch.object(where, name, patch))
            yield

    def _train_step_of(self, make: Callable, settings: Any, config: Any, mesh: Any, **sharing: Any):
        """Programs compile once for the same settings."""
        of = (settings.learner, settings.loss, settings.rollout.temperature, config, mesh.shape)
        key = f"{of} {sorted(sharing.items())}"
        if key not in self._programs:
            self._programs[key] = make(settings, config, mesh, **sharing)
        return self._programs[key]

    def _programs_of(self, make: Callable, shapes: programs.Shapes) -> programs.Programs:
        key = str(vars(shapes))
        if key not in self._programs:
            self._programs[key] = make(shapes)
        return self._programs[key]

    def _in_this_process(self, settings: Any, *, workdir: pathlib.Path, **how: Any) -> bool:
        """In the place of `supervisor.run`. The words of a role's error are those of its log."""
        address = f"127.0.0.1:{supervisor.free_port()}"
        queue = dataclasses.replace(settings.queue, address=address)
        for name in ("on_step", "record_bytes"):
            how.pop(name, None)
        try:
            return one.run(dataclasses.replace(settings, queue=queue), workdir, **how)
        except Exception as error:
            if train_verb._is_explained(error):
                raise supervisor.RoleDiedError(str(error)) from error
            raise

    def _resume_of(self, resume: Callable) -> Callable:
        """The versions on disk are resumed first, as in a run of several processes, without servers."""
        names = ("config", "dtype", "base", "timeout_secs", "delay")

        def resume_both(memory: MemoryVersions, *args: Any, **how: Any) -> None:
            values = {name: getattr(memory, name) for name in names}
            store = WeightStore(self.workdir / "weights", keep=2)
            Versions(_Published(self._seen), store, **values).resume(*args, **how)
            resume(memory, *args, **how)

        return resume_both

    def _restore_alone(self, settings: Any, workdir: pathlib.Path, steps: Any, sets: Any) -> list:
        """In the place of `evaluate`: the weights are restored, the prompts made, and none is answered."""
        for asked in sets:
            self._seen.append(_sha(str(asked.prompts).encode()))
        rows = []
        for step in steps:
            step, _ = parts.checkpoint_params(settings, workdir, step)
            rows.append({"step": step, "greedy": 0.0})
        return rows

    def _read_alone(
        self, state: Any, *, first_step: int, settings: Any, queue: Any, save: Callable, **_: Any
    ) -> Any:
        """In the place of `train`: a replay's groups are read; a run that goes on trains nothing."""
        for step in range(first_step, settings.learner.num_steps + 1):
            if not isinstance(queue, replays.ReplayQueue):
                found = queue.status()
                names = ("v_pub", "committed_step", "frontier", "returned", "retired", "run_epoch")
                self._seen.append(str([getattr(found, name) for name in names]))
                break
            for chunk in queue.lease(step, 0.0, lambda: False):
                for group in chunk.groups:
                    rows = [
                        (r.reward, *map(bytes, (r.tokens, r.logprobs, r.versions, r.mask)))
                        for r in group.trajectories
                    ]
                    self._seen.append(f"{step} {group.prompt_index} {_sha(str(rows).encode())}")
            save(step, state, None)  # A checkpoint of the run is compared with it.
        return state


class Commands(Verbs):
    """The verbs as commands, each in a process of its own."""

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        yield

    def _call(self, words: list[str]) -> tuple[int | None, str, list[str], str]:
        argv = [sys.executable, "-m", "jaxrl_async", *words]
        with open(self._damaged.parent / "output", "w+b") as file:
            process = subprocess.Popen(argv, cwd=ROOT, stdout=file, stderr=file)
            try:
                code = process.wait(VERB_SECS)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                code = None
            file.seek(0)
            printed = file.read().decode("utf-8", "replace")
        return code, printed, [], printed if "Traceback" in printed else ""


class _Published:
    """A publisher without servers, which takes down what is pushed."""

    def __init__(self, seen: list[str]):
        self._seen = seen

    def publish(self, version: int, write: Callable, *, run_epoch: int, **_: Any) -> None:
        files = write()
        files.verify()
        self._seen.append(f"version {version} {files.digest} of epoch {run_epoch}")


class _HungError(BaseException):
    """A verb has not ended."""


@contextlib.contextmanager
def quiet(output: io.StringIO) -> Iterator[list[str]]:
    """Takes the output of a verb, yields its warnings, ends it after VERB_SECS, and mends its signals."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]

    def hang(*_: object) -> None:
        raise _HungError

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGALRM)
    signals = {number: signal.getsignal(number) for number in numbers}
    package, root = logging.getLogger("jaxrl_async"), logging.getLogger()
    handlers, level, interval = root.handlers[:], root.level, sys.getswitchinterval()
    signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, VERB_SECS)
    package.addHandler(handler)
    try:
        with (
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(output),
            unittest.mock.patch.object(package, "propagate", False),
        ):
            yield said
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        for number, found in signals.items():
            signal.signal(number, found)
        package.removeHandler(handler)
        root.handlers[:] = handlers
        root.setLevel(level)
        sys.setswitchinterval(interval)


def _mesh_of(learner: Any, devices: Any = None) -> Any:
    return mesh_of(learner, jax.devices()[: learner.num_devices])


async def _wait_alone(*_: Any, **__: Any) -> None:
    """In the place of a rollout worker."""
    await asyncio.Event().wait()


def calls_of(title: str, draw: Callable, **_: Any) -> plots.Figure:
    """A figure's drawing as the calls that draw it, with their values: to draw it takes a second."""
    axes = unittest.mock.MagicMock()
    draw(axes)
    calls = [f"{name}{args}{sorted(values)}" for name, args, values in axes.mock_calls]
    return plots.Figure(title, "\n".join(calls), ())


def _sha(*contents: bytes) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def _digest_of(path: pathlib.Path) -> str:
    return _sha(path.read_bytes()) if path.exists() else ""


def digests(directory: pathlib.Path, megabytes: float) -> dict[str, Any]:
    """Seconds of a checkpoint with digests and without, and of the digests alone; every value."""
    tensor = np.random.default_rng(0).standard_normal((1 << 18,), np.float32)  # 1 MB
    state = {f"tensor_{i}": jax.device_put(tensor + i) for i in range(round(megabytes))}
    jax.block_until_ready(state)
    compute, found = checkpoint_lib.digests_of, collections.defaultdict(list)
    shards = checkpoint_lib.shards_on_host(state)
    for _ in range(3):
        with timed(found, "digests"):
            compute(shards)
        with timed(found, "copies"):
            checkpoint_lib.shards_on_host(state)
    for number in range(3):
        for name, table in (("with", compute), ("without", lambda shards: {})):
            with (
                unittest.mock.patch.object(checkpoint_lib, "digests_of", table),
                contextlib.closing(Checkpoints(directory / name / str(number), keep=1)) as saves,
                timed(found, f"on_disk_{name}"),
            ):
                with timed(found, f"call_{name}"):
                    saves.save(1, state, {})
                saves.written(wait=True)
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    raw = {name: [round(value, 3) for value in values] for name, values in found.items()}
    return {"megabytes": megabytes, "load_average": os.getloadavg()[0]} | medians | {"raw": raw}


@contextlib.contextmanager
def timed(found: dict[str, list[float]], name: str) -> Iterator[None]:
    """Adds the seconds that pass, and those of this process's CPU."""
    began, used = time.monotonic(), time.process_time()
    yield
    found[f"{name}_secs"].append(time.monotonic() - began)
    found[f"{name}_cpu_secs"].append(time.process_time() - used)


if __name__ == "__main__":
    main()

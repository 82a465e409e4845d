"""Damages to the files of a finished workdir, and what resume, evaluate, replay and report make of them.

    python benchmarks/damage.py [--damages=1000] [--workdir=DIR] [--seed=0] [--megabytes=512] [--out=DIR] [--smoke]

**damages.** Each is made in a copy of the workdir: of a file drawn at random a bit is flipped, or it is truncated,
deleted, or swapped with another file. Then, in this process, the reading part of the four verbs runs: all that they
read before they train or sample, with the product's own functions. Their findings (settings, token ids, digests of the
restored states, groups of the journal, the page) are compared with those of the whole workdir. An outcome is

    same       as if nothing were damaged
    said       other findings, with a warning (in the log, or on the page) that names a file
    refused    an error that names a file of the workdir and a remedy
    wrong      other findings, and not a word
    unnamed    another error, or one without file or remedy

After a refusal of `resume` the remedy of its words is followed: stuck where the third one does not help either.

**digests.** Seconds from a checkpoint's save until it is on disk with digests and without, in turns, and the seconds of
the digests alone and of the call that the learner waits for; of a state of --megabytes.

The workdir is that of `configs/quickstart.py:smoke` with four checkpoints, trained here, evaluated and reported, unless
--workdir names one. Results are printed and written to benchmarks/results/damage.json; --smoke is quick.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import logging
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from origin import ROOT, origin

from jaxrl_async import parts, sealed
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.evaluation.evaluator import best_version, say_lost_best
from jaxrl_async.learner import checkpoint as checkpoint_lib
from jaxrl_async.learner.checkpoint import Checkpoints
from jaxrl_async.learner.train_step import mesh_of
from jaxrl_async.queue.journal import Journal, JournalError, JournalReader
from jaxrl_async.report import plots, write_report
from jaxrl_async.roles import start
from jaxrl_async.runtime import workdir as workdirs
from jaxrl_async.tools import replay as replays
from jaxrl_async.versions.store import WeightStore

CONFIG = f"{ROOT}/configs/quickstart.py:smoke,mode=async"
WORDS = (
    "--config.checkpoint.every_steps=1",
    "--config.checkpoint.keep=3",
    "--config.learner.num_steps=4",
    "--config.evaluate.every_steps=2",
    "--config.evaluate.num_validation=16",
    "--config.evaluate.num_prompts=8",
)
KINDS = ("flip", "truncate", "delete", "swap")
REMEDY = re.compile(
    r"--fallback|delete|deleted|move|restore|Restore|copy|--config|is intact|another --workdir|--until|resume the run"
)
MAX_REMEDIES = 3


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--damages", type=int, default=1000)
    parser.add_argument("--workdir", type=pathlib.Path, help="of a finished run; it is not changed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--megabytes", type=float, default=512.0, help="of the state with digests")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--smoke", action="store_true", help="6 damages, 4 MB")
    args = parser.parse_args(argv)
    if args.smoke:
        args.damages, args.megabytes = 6, 4.0
    with (
        tempfile.TemporaryDirectory() as directory,
        unittest.mock.patch.object(plots, "figure", calls_of),
        # Each warning is counted, and none printed.
        unittest.mock.patch.object(logging.getLogger("jaxrl_async"), "propagate", False),
    ):
        place = pathlib.Path(directory)
        whole = args.workdir or train(place / "trained")
        result = origin() | {"seed": args.seed} | damages(whole, place, args.damages, args.seed)
        result["digests"] = digests(place / "checkpoints", args.megabytes)
    print(json.dumps(result, indent=2))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "damage.json").write_text(json.dumps(result, indent=2) + "\n", "utf-8")


def train(workdir: pathlib.Path) -> pathlib.Path:
    """A finished run, evaluated and reported."""
    verb = [sys.executable, "-m", "jaxrl_async"]
    for words in (
        ["train", f"--config={CONFIG}", *WORDS],
        ["evaluate"],
        ["report"],
    ):
        command = [*verb, *words, f"--workdir={workdir}"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    return workdir


def damages(whole: pathlib.Path, place: pathlib.Path, number: int, seed: int) -> dict[str, Any]:
    """Counts of the outcomes, by verb and by kind of damage, and every outcome that is none of the first three."""
    rng, began = random.Random(seed), time.monotonic()
    # All copies have one path: findings have it in their words.
    workdir = place / "run"
    readers = Readers()
    with copied(whole, workdir):
        sound = {verb: read(workdir).findings for verb, read in readers.verbs.items()}
    with copied(whole, workdir):
        (workdir / "evaluation.json").unlink(missing_ok=True)
        unscored = readers.report(workdir)  # Nothing says that there was one.
    files = sorted(str(p.relative_to(whole)) for p in whole.rglob("*") if p.is_file())
    counts = {verb: collections.Counter() for verb in sound}
    by_kind = {kind: collections.Counter() for kind in KINDS}
    bad, stuck = [], []
    for _ in range(number):
        kind, name = rng.choice(KINDS), rng.choice(files)
        with copied(whole, workdir):
            told = damage(workdir, kind, name, files, rng)
            hit = told.split(" ")[1:]
            for verb, read in readers.verbs.items():
                expected = [sound[verb]]
                if verb == "report" and told == "delete evaluation.json":
                    expected.append(unscored)
                outcome, words = judge(read, workdir, expected, hit)
                counts[verb][outcome] += 1
                by_kind[kind][outcome] += 1
                if outcome in ("wrong", "unnamed"):
                    bad.append({"damage": told, "verb": verb, "outcome": outcome, "words": words})
                if verb == "resume" and outcome in ("refused", "unnamed"):
                    stuck += [told] if not follow(readers, workdir, words) else []
    return {
        "damages": number,
        "files": len(files),
        "secs": round(time.monotonic() - began, 1),
        "outcomes": {verb: dict(found) for verb, found in counts.items()},
        "by_kind": {kind: dict(found) for kind, found in by_kind.items()},
        "silently_wrong": sum(found["wrong"] for found in counts.values()),
        "refusals_without_file_or_remedy": sum(found["unnamed"] for found in counts.values()),
        "stuck": len(stuck),
        "bad": bad,
        "stuck_after": stuck,
    }


@contextlib.contextmanager
def copied(whole: pathlib.Path, workdir: pathlib.Path) -> Iterator[None]:
    shutil.copytree(whole, workdir)
    try:
        yield
    finally:
        shutil.rmtree(workdir)


def damage(workdir: pathlib.Path, kind: str, name: str, files: list[str], rng) -> str:
    """Damages a file; the kind and the files, in words."""
    path = workdir / name
    content = path.read_bytes()
    if kind == "delete":
        path.unlink()
    elif kind == "truncate":
        path.write_bytes(content[: rng.randrange(max(1, len(content)))])
    elif kind == "flip" and content:
        at = rng.randrange(len(content))
        flipped = bytes([content[at] ^ (1 << rng.randrange(8))])
        path.write_bytes(content[:at] + flipped + content[at + 1 :])
    elif kind == "swap":
        other = rng.choice(files)
        path.write_bytes((workdir / other).read_bytes())
        (workdir / other).write_bytes(content)
        return f"swap {name} {other}"
    return f"{kind} {name}"


def judge(read: Callable, workdir: pathlib.Path, sound: list[Any], hit: list[str]) -> tuple:
    """(outcome, its words) of a verb on a damaged workdir."""
    try:
        found = read(workdir)
    except Exception as error:
        words = str(error)
        known = isinstance(error, sealed.DamagedError | ValueError | JournalError)
        foreign = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        if known and not foreign and str(workdir) in words and REMEDY.search(words):
            return "refused", words
        return "unnamed", "".join(traceback.format_exception(error)[-3:])[-600:]
    if found.findings in sound:
        return "same", ""
    said = [sentence for sentence in found.said if any(_is_named(n, sentence) for n in hit)]
    return ("said" if said else "wrong"), "; ".join(found.said)[-600:]


def _is_named(name: str, sentence: str) -> bool:
    """Whether a sentence names a file, its directory's number, or (of the journal) what it is."""
    parts_of = pathlib.PurePath(name).parts
    names = {parts_of[-1], "/".join(parts_of[:2])} | ({"journal"} if "journal" in name else set())
    return any(part in sentence for part in names)


def follow(readers: "Readers", workdir: pathlib.Path, words: str) -> bool:
    """Whether the remedies in the words of refusals lead to a resume."""
    fallback, config = False, None
    for _ in range(MAX_REMEDIES):
        if "--fallback" in words:
            fallback = True
        elif "resume with a --config" in words or "with a --config writes it" in words:
            (workdir / "config.json").unlink(missing_ok=True)
            config = CONFIG
        elif "journal" in words:
            for path in workdir.glob("journal.sqlite*"):
                path.unlink()
        elif found := re.search(rf"(?:delete|;) ({re.escape(str(workdir))}/[\w./]+)", words):
            path = pathlib.Path(found[1])
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        elif found := re.search(rf"({re.escape(str(workdir))}/[\w./]+) is damaged", words):
            pathlib.Path(found[1]).unlink(missing_ok=True)
        try:
            readers.resume(workdir, fallback=fallback, config=config)
        except Exception as error:
            words = str(error)
        else:
            return True
    return False


class Found:
    """The findings of a verb, and what it said."""

    def __init__(self, findings: Any, said: list[str]):
        self.findings, self.said = findings, said


class Readers:
    """The reading parts of the verbs. A checkpoint with the same bytes is restored once."""

    def __init__(self):
        self._states: dict[str, str] = {}
        self.verbs = {
            "evaluate": self.evaluate,
            "replay": self.replay,
            "report": self.reported,
            "resume": self.resume,  # At last: its remedies change the workdir.
        }
        self._templates: dict[str, Any] = {}

    def resume(self, workdir: pathlib.Path, *, fallback: bool = False, config: str | None = None):
        with listening() as said:
            loaded = load_config(config or str(workdir / "config.json"))
            if config:
                for word in WORDS:
                    key, _, value = word.removeprefix("--config.").partition("=")
                    block, name = key.split(".")
                    loaded[block][name] = int(value)
            with loaded.unlocked():
                loaded.learner.num_steps = 6
            changed = start.check_workdir(loaded, workdir, resume=True)
            settings = settings_of(loaded)
            tokens = self._tokens(settings, workdir)
            self._check_task(settings, workdir)
            journal = Journal(
                workdir / "journal.sqlite", batch_groups=settings.learner.groups_per_step
            )
            try:
                recovered = journal.recover()
            finally:
                journal.close()
            say_lost_best(workdir)
            best = best_version(workdir)
            step, state = self._restored(settings, workdir, None, fallback)
            if recovered is None:
                logging.getLogger("jaxrl_async").warning("no journal")  # As the learner says.
            elif recovered.state.resume_point.step < step:
                raise sealed.DamagedError(
                    f"{workdir}: the journal ends before the checkpoint; move the journal away"
                )
            store = WeightStore(workdir / "weights", keep=2)
            for version in store.versions():  # What is damaged there is published anew.
                with contextlib.suppress(sealed.DamagedError):
                    store.manifest(version)
            trained = recovered and (
                recovered.state.resume_point.step,
                sorted(recovered.state.chunks.items()),
            )
        return Found((sorted(changed), tokens, best, step, state, trained), said)

    def evaluate(self, workdir: pathlib.Path) -> Found:
        with listening() as said:
            say_lost_best(workdir)
            best, known = best_version(workdir), workdirs.checkpoint_steps(workdir)
            settings = settings_of(load_config(str(workdir / "config.json")))
            tokens = self._tokens(settings, workdir)
            self._check_task(settings, workdir)
            steps = [0, *([best] if best in known else []), None]
            found = [self._restored(settings, workdir, step) for step in steps]
        return Found((str(settings), tokens, best, found), said)

    def replay(self, workdir: pathlib.Path) -> Found:
        with listening() as said:
            settings = settings_of(load_config(str(workdir / "config.json")))
            tokens = self._tokens(settings, workdir)
            self._check_task(settings, workdir)
            journal = workdir / "journal.sqlite"
            reader = JournalReader(journal)
            try:
                known = workdirs.checkpoint_steps(workdir)
                last = replays.steps_of(reader, journal, 0, None, known)
                epochs = reader.run_epochs()
                groups = hashlib.sha256()
                for step in range(1, last + 1):
                    for chunk in range(reader.num_chunks(step)):
                        for group in reader.chunk(step, chunk)[0]:
                            groups.update(f"{step} {group.prompt_index} {group.attempt}".encode())
                            for row in group.trajectories:
                                groups.update(f"{row.reward}".encode())
                                for array in (row.tokens, row.logprobs, row.versions, row.mask):
                                    groups.update(array.tobytes())
            finally:
                reader.close()
            found = [self._restored(settings, workdir, step) for step in known]
        return Found((str(settings), tokens, epochs, groups.hexdigest(), found), said)

    def reported(self, workdir: pathlib.Path) -> Found:
        with listening() as said:
            page = write_report(workdir).read_text("utf-8")
        warnings = re.search(r'<div class="warnings".*?</div>', page, re.DOTALL)
        soft = re.findall(r'<p class="soft">.*?</p>', page, re.DOTALL)
        return Found(page, [*said, *([warnings[0]] if warnings else []), *soft])

    def report(self, workdir: pathlib.Path) -> str:
        return self.reported(workdir).findings

    def _tokens(self, settings: Any, workdir: pathlib.Path) -> list[int]:
        return parts.tokenizer_of(settings, workdir).encode("12+34=46")

    def _check_task(self, settings: Any, workdir: pathlib.Path) -> None:
        task = parts.task_of(settings)
        parts.check_task(settings, workdir, task, parts.splits_of(settings, task), keep=False)

    def _restored(
        self, settings: Any, workdir: pathlib.Path, step: int | None, fallback: bool = False
    ) -> tuple[int, str]:
        """(step, digest of state and position) of a checkpoint, the last one for None."""
        known = workdirs.checkpoint_steps(workdir)
        wanted = known[-1] if step is None else step
        key = f"{settings.model} {settings.learner} {_digest_of(workdir / 'checkpoints' / str(wanted))}"
        if not fallback and key in self._states:
            return wanted, self._states[key]
        shape = f"{settings.model} {settings.learner}"
        if shape not in self._templates:
            model = parts.model_config_of(settings, parts.tokenizer_of(settings, workdir))
            step_of = parts.train_step_of(
                settings, model, mesh_of(settings.learner, jax.devices()[:1])
            )
            self._templates[shape] = step_of.abstract_state()
        with contextlib.closing(Checkpoints(workdir / "checkpoints", keep=3)) as checkpoints:
            like = self._templates[shape]
            if step is None:
                found, state, position, _ = checkpoints.restore_last(like, fallback=fallback)
            else:
                found, (state, position) = step, checkpoints.restore(step, like)
        digest = hashlib.sha256(json.dumps(position, sort_keys=True).encode())
        for leaf in jax.tree.leaves(state):
            digest.update(np.asarray(leaf).tobytes())
        if not fallback:
            self._states[key] = digest.hexdigest()
        return found, digest.hexdigest()


def calls_of(title: str, draw: Callable, **_: Any) -> plots.Figure:
    """A figure's drawing as the calls that draw it, with their values: to draw it takes a second."""
    axes = unittest.mock.MagicMock()
    draw(axes)
    calls = [f"{name}{args}{sorted(values)}" for name, args, values in axes.mock_calls]
    return plots.Figure(title, "\n".join(calls), ())


def _digest_of(directory: pathlib.Path) -> str:
    """Of the names and bytes of all files."""
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(directory)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """The warnings that the package logs meanwhile."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("jaxrl_async")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def digests(directory: pathlib.Path, megabytes: float) -> dict[str, Any]:
    """Seconds of a checkpoint with digests and without, and of the digests alone."""
    tensor = np.random.default_rng(0).standard_normal((1 << 18,), np.float32)  # 1 MB
    state = {f"tensor_{i}": jax.device_put(tensor + i) for i in range(round(megabytes))}
    jax.block_until_ready(state)
    shards = checkpoint_lib.shards_on_host(state)
    began = time.monotonic()
    checkpoint_lib.digests_of(shards)
    alone = time.monotonic() - began
    compute = checkpoint_lib.digests_of
    secs, calls = collections.defaultdict(list), collections.defaultdict(list)
    for number in range(3):
        for name, table in (("with", compute), ("without", lambda shards: {})):
            checkpoint_lib.digests_of = table
            with contextlib.closing(Checkpoints(directory / name / str(number), keep=1)) as saves:
                began = time.monotonic()
                saves.save(1, state, {})
                calls[name].append(time.monotonic() - began)
                secs[name].append(saves.written(wait=True).secs)
    checkpoint_lib.digests_of = compute
    return {
        "megabytes": megabytes,
        "digests_secs": round(alone, 3),
        "on_disk_secs": {name: round(float(np.median(v)), 3) for name, v in secs.items()},
        "call_secs": {name: round(float(np.median(v)), 3) for name, v in calls.items()},
    }


if __name__ == "__main__":
    main()

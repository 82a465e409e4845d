"""Metrics: the table of their names, the writer, the reader, and timers."""

import contextlib
import json
import logging
import math
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async import sealed

Rows = Sequence[Mapping[str, float | None]]  # of metrics.jsonl; None where a value was not finite
# Name, or "prefix/" of an open family → unit and meaning.
METRICS: dict[str, str] = {
    "reward/mean": "mean reward of the step's samples",
    "reward/std": "standard deviation of the step's rewards",
    "component/": "mean of a named component of the reward, over the step's samples that have it",
    "loss/policy": "loss of the step, with its penalty, mean over its minibatches",
    "policy/entropy": "nats per token, at the sampling temperature",
    "policy/ratio": "mean of π_θ/π_prox",
    "policy/clip_fraction": "share of tokens whose ratio was clipped, by the dual clip too",
    "policy/kl_behavior": "nats per token, k3 estimate of KL(behavior ‖ policy)",
    "policy/kl_behavior_k1": "nats per token, k1 estimate of KL(behavior ‖ policy)",
    "policy/ess": "effective sample size of the behavior weights, share of tokens",
    "policy/max_ratio": "largest π_θ/π_b of the step",
    "policy/max_anchor_ratio": "largest π_θ/π_prox of the step",
    "policy/dropped_by_cap": "share of tokens whose behavior weight is 0",
    "policy/kl_penalty": "nats per token, the penalty's estimate before its coefficient",
    "policy/kl_teacher": "nats per token, k1 estimate of KL(policy ‖ loss.teacher)",
    "policy/kl_coefficient": "coefficient of the penalty, where it changes (loss.kl_final_coefficient)",
    "policy/grad_norm": "global gradient norm before clipping, of the trained block, mean over minibatches",
    "experts/routes_differ": "of (token, layer) with recorded experts, the share whose own are others",
    "experts/routes_known": "share of tokens whose experts are recorded; replayed unless learner.replay_routes is off",
    "experts/entropy": "nats, of the routers' probabilities, mean over tokens and layers",
    "experts/load": "tokens of the busiest expert over their mean, of a microbatch, mean over layers",
    "experts/balance": "1 where a sequence uses all experts alike, mean over tokens and layers (loss.router_balance)",
    "staleness/mean": "steps, mean over trained tokens",
    "staleness/max": "steps",
    "mismatch/mean_abs": "nats, mean |learner's − engine's log-prob| at the same weights, over tokens of staleness 0",
    "mismatch/max_abs": "nats, the largest of these differences",
    "mismatch/kl": "nats per token, k3 estimate of KL(engine ‖ learner) at the same weights",
    "mismatch/tokens": "tokens compared: staleness 0, the step's first minibatch",
    "tokens/completion_mean": "tokens, mean length of a sample's completion, of all its rows together",
    "tokens/truncated_share": "share of samples that a bound cut off: on their tokens, turns or calls",
    "queue/depth_groups": "groups held and not leased",
    "queue/running_groups": "groups being generated",
    "queue/capacity": "groups that may be admitted now; at queue.max_bytes those alone that the next step lacks",
    "weights/version": "version on the servers, after the last push",
    "weights/delay": "steps by which that version is older than the published one, with rollout.delay_steps",
    "weights/push_secs": "seconds of the last push, with its write",
    "weights/bytes": "bytes of a version",
    "weights/paused_secs": "server-seconds that generation stood still for pushes, since the push before",
    "time/step_secs": "seconds since the previous row, as for all times of a row",
    "time/wait_data_secs": "seconds the learner waited for chunks",
    "time/wait_push_secs": "seconds the learner waited for a push",
    "time/pack_secs": "seconds of packing",
    "time/accumulate_secs": "seconds of score and accumulate",
    "time/update_secs": "seconds of the optimizer and of reading its flags",
    "time/publish_secs": "seconds the learner spent on handing weights to the publisher",
    "time/checkpoint_secs": "seconds of saving a checkpoint",
    "time/device_wait_secs": "seconds the learner waited for its turn at the device, in one process on one accelerator",
    "rollout/device_wait_secs": "seconds the engines waited for theirs",
    "rollout/tokens_per_sec": "completion tokens submitted per second since the last step",
    "rollout/generating": "samples in their rollout function, mean over the workers' last report interval",
    "rollout/scoring": "samples waiting for a reward, mean over the workers' last report interval",
    "rollout/idle": "rollout workers without a permit, mean over their last report interval",
    "rollout/kept_mean": "tokens among which one was drawn, mean over trained tokens, where rollout cuts any off",
    "rollout/kept_bound_share": "share of trained tokens drawn from as many as rollout.max_kept, its bound",
    "learner/learning_rate": "learning rate of the step's last update",
    "learner/rate_scale": "factor on it (learner.rate_by_ess), mean over minibatches",
    "learner/tokens_per_sec": "trained tokens per second of the step",
    "eval/": "scores of version eval/version: eval/{greedy,pass@K} with _low and _high, on eval/num_prompts of the "
    "eval/num_fit prompts that fit, of eval/num_questions; eval/num_failed, answers that failed and count as not "
    "right; eval/SET/… of each of evaluate.sets; eval/secs; eval/validation",
    "returned/": "groups returned since the run began, by reason",
    "retired/": "prompt indexes retired since the run began, by reason",
    "fairness/": "mean length since the queue started, tokens: fairness/{prompt,completion}/{admitted,trained,dropped}",
    "lag/": "statistics of the tokens of one staleness: lag/BUCKET/{tokens,ratio,clip_fraction,kl,ess,advantage_sign}",
    "proximal/": "error of a cheap anchor against the recomputed one: proximal/ANCHOR/{abs,relative,ratio,weight}",
    "compile/count": "programs compiled by the learner since it started",
    "pack/padding_share": "share of padding in the step's microbatches, in the rows of learner process 0",
    "pack/microbatches": "microbatches of the step",
}


# The learner and the report warn beyond these bounds.
# Of mismatch/mean_abs, in nats. Float32 on both sides gave less than 1e-6; the bound leaves room for an engine in
# bfloat16, which was not measured. Beyond it engine and learner do not compute the same policy.
MAX_MISMATCH = 0.02
MAX_DRIFT = 1.5  # of the ratio of the mean lengths of dropped groups and of trained ones

_TAIL_BYTES = 1 << 16  # longer than a row

log = logging.getLogger(__name__)


class MetricsWriter:
    """Appends one object per step to metrics.jsonl and the same names to TensorBoard, and to a tracker."""

    def __init__(self, workdir: str | pathlib.Path, tracker: Any = None):
        """`tracker`: a `tracker.Tracker` that is closed with the writer; None for none."""
        with _without_torch():
            from tensorboardX import FileWriter  # Imports slowly; only the learner writes.

        workdir = pathlib.Path(workdir)
        self._file = sealed.open_lines(workdir / "metrics.jsonl")
        self._board = FileWriter(str(workdir / "tensorboard"))
        self._tracker = tracker
        self._began = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the metrics of a step. Raises KeyError: a name that is not in METRICS."""
        for name in values:
            if name not in METRICS and f"{name.split('/')[0]}/" not in METRICS:
                raise KeyError(f"metric {name!r} is not in the table jaxrl_async.metrics.METRICS")
        row = {"step": step, "unix_time": time.time()} | {n: float(v) for n, v in values.items()}
        self._file.write(json.dumps(sealed.sealed(finite(row))) + "\n")
        self._file.flush()
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        if not self._began:  # TensorBoard then hides these steps of a process before.
            self._began = True
            self._board.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)
        scalars = (Summary.Value(tag=name, simple_value=float(v)) for name, v in values.items())
        # One event for the whole row: each event passes a queue between processes.
        self._board.add_summary(Summary(value=scalars), step)
        if self._tracker is not None:
            self._tracker.write(step, values)

    def show(self, step: int, name: str, text: str) -> None:
        """Shows a text, of markdown, in TensorBoard alone."""
        from tensorboardX import summary

        self._board.add_summary(summary.text(name, text), step)

    def close(self) -> None:
        self._file.close()
        self._board.close()
        if self._tracker is not None:
            self._tracker.close()


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """tensorboardX imports torch where it is installed: seconds, for tensors that are not written here."""
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            sys.modules.pop("torch", None)


def read_metrics(
    workdir: str | pathlib.Path, say: Callable[[str], None] = log.warning
) -> list[dict[str, float]]:
    """The rows of metrics.jsonl, one per step; for a step run twice (after a resume), the later. Omits an incomplete
    last line, and damaged ones, each with a sentence to `say`."""
    rows = {}
    for row in sealed.lines(path := pathlib.Path(workdir) / "metrics.jsonl", say):
        if _is_row(row):
            rows[row["step"]] = row
        else:
            say(f"{path}: a line that is no row of a step is left out")
    return [rows[step] for step in sorted(rows)]


def last_metrics(workdir: str | pathlib.Path) -> dict[str, float] | None:
    """The last row of metrics.jsonl that is complete and sound, None while there is none. Reads the file's end only."""
    path = pathlib.Path(workdir) / "metrics.jsonl"
    if not path.exists():
        return None
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().split(b"\n")[:-1]
    return next(_sound(reversed(lines)), None)


def _sound(lines: Iterable[bytes]) -> Iterator[dict[str, float]]:
    """The rows of those lines that are sound."""
    for line in lines:
        with contextlib.suppress(ValueError):
            if _is_row(row := sealed.unsealed(json.loads(line))):
                yield row


def _is_row(row: Any) -> bool:
    step = row.get("step") if isinstance(row, dict) else None
    return type(step) is not bool and isinstance(step, int | float) and float(step).is_integer()


class NewSteps:
    """The steps of the rows that a run's metrics.jsonl gets from now on, in the order of the rows."""

    def __init__(self, workdir: str | pathlib.Path):
        self._path = pathlib.Path(workdir) / "metrics.jsonl"
        self._read = self._path.stat().st_size if self._path.exists() else 0  # bytes

    def __call__(self) -> list[int]:
        """Those since the last call."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._read)
            complete = file.read().rpartition(b"\n")[0]
        self._read += len(complete) + 1 if complete else 0
        return [int(row["step"]) for row in _sound(complete.splitlines())]


def column(rows: Rows, name: str) -> np.ndarray:
    """One metric over rows: float64 [rows], NaN where a row has no finite value of it."""
    return np.array([np.nan if row.get(name) is None else row[name] for row in rows], float)


def score_names(names: Iterable[str]) -> dict[str, list[str]]:
    """The scores among the names of an evaluation's values, without those of their intervals, by evaluation set.

    The key is the names' prefix: "" of the run's own split, "SET/" of one of evaluate.sets.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        if match := re.fullmatch(r"(.*[/ ])?(?:greedy|pass@\d+)", name):
            found.setdefault(match[1] or "", []).append(name)
    return found


def score_text(row: Mapping[str, float | None], name: str) -> str:
    """A score with its interval, "0.500 (0.215–0.785)"; "–" where the row has none."""
    if row.get(name) is None:
        return "–"
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    interval = "" if low is None or high is None else f" ({low:.3f}–{high:.3f})"
    return f"{row[name]:.3f}{interval}"


def coverage_of(row: Mapping[str, float | None], prefix: str = "") -> str:
    """The prompts that the scores of a row are of, "8 of 40 prompts, 32 do not fit …"; "" where it does not say."""
    names = ("num_prompts", "num_fit", "num_questions")
    num, fit, total = (row.get(f"{prefix}{name}") or 0 for name in names)
    left_out = f", {total - fit:.0f} do not fit rollout.max_prompt_tokens" if fit < total else ""
    return f"{num:.0f} of {total:.0f} prompts{left_out}" if total else ""


def failed_of(row: Mapping[str, float | None], prefix: str = "") -> str:
    """The answers of a row's scores whose rollout or reward failed, "3 answers failed"; "" without one."""
    num = row.get(f"{prefix}num_failed")
    return f"{num:.0f} answer{'s' * (num != 1)} failed" if num else ""


class Timers:
    """Sums the seconds under each name, excluding those under names nested in it; `pop` returns and resets them."""

    def __init__(self, clock=time.monotonic):
        self._clock, self._since = clock, clock()
        self._names: list[str] = []  # open, the innermost last
        self._secs: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._charge()
        self._names.append(name)
        try:
            yield
        finally:
            self._charge()
            self._names.pop()

    def current(self) -> tuple[str, float] | None:
        """(innermost name, seconds since it became the innermost), read from another thread; None outside all."""
        names, since = tuple(self._names), self._since
        return (names[-1], self._clock() - since) if names else None

    def pop(self) -> dict[str, float]:
        """{"time/NAME_secs": seconds} since the last pop."""
        self._charge()
        secs = {f"time/{name}_secs": value for name, value in self._secs.items()}
        self._secs = {}
        return secs

    def _charge(self) -> None:
        now = self._clock()
        for name in self._names[-1:]:
            self._secs[name] = self._secs.get(name, 0.0) + now - self._since
        self._since = now


def finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become null."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

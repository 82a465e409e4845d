"""The learner: one loop for the synchronous, the periodic and the asynchronous mode.

    lease → pack → (score) → accumulate → update → commit → publish → checkpoint

Groups come from the queue and weights go to the publisher; the loop handles no prompt, reward or server. The modes
differ in the number of chunks per lease and in whether a step waits for the push before it.

The loop does not wait for the device while there is work to dispatch. It finalizes a step (flag, commit, publication,
metrics) after it has dispatched the next step's gradient, or when there is nothing to dispatch.
"""

import collections
import contextlib
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl_async.config.settings import Queue, Settings
from jaxrl_async.learner import packing
from jaxrl_async.learner.optimizer import learning_rate
from jaxrl_async.learner.train_step import TrainState, TrainStep
from jaxrl_async.metrics import MAX_DRIFT, MAX_MISMATCH, MetricsWriter, Timers
from jaxrl_async.objectives.advantages import ADVANTAGES
from jaxrl_async.queue.source import GroupSource
from jaxrl_async.records import (
    BLAMELESS,
    FAILURES,
    SILENT_SECS,
    UP,
    QueueStatus,
    ResumePoint,
    RoleStatus,
    RunFailedError,
)
from jaxrl_async.types import Batch, Chunk, Group

WARNING_STEPS = 20  # least number of steps between two warnings of one kind
STATUS_SECS = 5.0  # between two looks at the budgets during a wait

log = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """A loss or gradient that is NaN or infinite; the message names the step and the groups."""


class TooManyFailuresError(RunFailedError):
    """Failures of servers, workers or the user's code beyond the run's budget; the message counts them by reason."""


class MismatchError(RuntimeError):
    """Engine and learner differ by more than learner.max_mismatch; the message names the step and both numbers."""


class RecompileError(RuntimeError):
    """A program compiled again after the first step; the message names the step and the counts."""


class Publish(Protocol):
    """Publishes versions of the weights, as `versions.Versions` does."""

    def snapshot(self, state: TrainState) -> Any: ...
    def publish(self, version: int, snapshot: Any) -> None: ...
    def wait(self, should_stop: Callable[[], bool]) -> None: ...
    def check(self) -> None: ...
    def metrics(self) -> dict[str, float]: ...


def train(
    state: TrainState,
    *,
    first_step: int,
    settings: Settings,
    train_step: TrainStep,
    pack: packing.Packer,
    queue: GroupSource,
    publisher: Publish,
    save: Callable[[int, TrainState, ResumePoint], None],
    metrics: MetricsWriter,
    timers: Timers,
    reference: Any = None,
    should_stop: Callable[[int, bool], bool] = lambda step, chunk_arrived: False,
    own_samples: bool = True,
    keep_samples: Callable[[int, Sequence[Group]], None] = lambda step, groups: None,
) -> TrainState:
    """Trains from first_step to learner.num_steps. Step s turns version s − 1 into version s.

    Args:
      state: holds version first_step − 1, as the servers do.
      first_step: ≥ 1.
      settings: of the run. The loop reads mode, loss.advantage and, in learner, weights, checkpoint and queue, the
        schedule and the budgets.
      pack: groups and advantages [N, G] → microbatches of one static shape.
      save: (step, state, resume_point) → checkpoint.
      reference: parameters of the policy that the KL penalty pulls to; None without a penalty.
      should_stop: (step, whether its first chunk has arrived) → whether to stop before that step. Called once with
        True, and repeatedly with False during a wait for that chunk or for a push. The version before is then saved
        and not published: a resumed run publishes it. All processes of the learner get the same answer.
      own_samples: whether the versions in the groups are those of this training. In a replay with other settings they
        are the run's, so there is no mismatch to measure.
      keep_samples: takes the groups of each step that has ended.

    Returns:
      The state of the last version.

    Raises:
      NonFiniteError: a loss or gradient is not finite; nothing of the step was committed, saved or published.
      MismatchError: engine and learner differ by more than learner.max_mismatch; as before.
      TooManyFailuresError: failures exceed their budget.
      RecompileError: a program compiled after the first step, with learner.fail_on_recompile.
    """
    advantages_of, shift = ADVANTAGES[settings.loss.advantage], settings.loss.baseline_shift
    rewards = _turn_rewards if settings.loss.advantage == "turns" else _rewards
    state, accumulator = train_step.warm_up(state, pack.padding(), reference)
    wait_for_push = settings.mode != "async"  # A step then starts after the push before it.
    finalizer = _StepFinalizer(
        settings, train_step, queue, publisher, save, metrics, timers, own_samples, keep_samples
    )
    for step in range(first_step, settings.learner.num_steps + 1):
        accumulator = train_step.zero_accumulator(step - 1, accumulator)
        groups: list[Group] = []
        batches: list[Batch] = []
        outcomes = []  # (metrics on the device, groups) of every minibatch

        def stop_waiting(step: int = step) -> bool:
            finalizer.finalize()  # There is nothing to dispatch.
            finalizer.check_status()
            publisher.check()
            return should_stop(step, False)

        if wait_for_push:
            with timers("wait_push"):
                publisher.wait(stop_waiting)
        publisher.check()
        chunks = _timed(
            queue.lease(step, settings.learner.lease_timeout_secs, stop_waiting), timers
        )
        first = next(chunks, None)
        if first is None or should_stop(step, True):
            finalizer.stop()
            break
        for chunk in itertools.chain([first], chunks):
            num = settings.learner.num_minibatches
            minibatches = packing.split_minibatches(chunk.groups, num)
            with timers("pack"):
                advantages = np.split(advantages_of(rewards(chunk.groups)) - shift, num)
                packed = [
                    pack(m, of, last=chunk.last)
                    for m, of in zip(minibatches, advantages, strict=True)
                ]
            with timers("accumulate"):
                placed = [[train_step.place(batch) for batch in m] for m in packed]
                # Before any update: anchors are scored at the weights that the step starts from.
                anchors = [[train_step.anchor(state.params, b) for b in m] for m in placed]
            for minibatch, rows, there, anchor in zip(
                minibatches, packed, placed, anchors, strict=True
            ):
                with timers("accumulate"):
                    for batch, proximal in zip(there, anchor, strict=True):
                        accumulator = train_step.accumulate(
                            state.params, accumulator, batch, proximal, step - 1, reference
                        )
                groups += minibatch
                batches += rows
                if chunk.last:
                    finalizer.finalize()  # The step before, whose state is consumed here.
                    state, accumulator, outcome = train_step.update(state, accumulator)
                    outcomes.append((outcome, minibatch))

        snapshot = publisher.snapshot(state) if _pushes(settings, step) else None
        finalizer.add(_DispatchedStep(step, state, snapshot, outcomes, groups, batches))
        if wait_for_push or _saves(settings, step) or not train_step.runs_ahead:
            finalizer.finalize()
    return state


@dataclasses.dataclass(frozen=True)
class _DispatchedStep:
    """A step that was dispatched to the device, and the inputs of its finalizer."""

    step: int
    state: TrainState
    snapshot: Any  # for the publisher; None where the version is not pushed
    outcomes: Sequence[tuple[Any, Sequence[Group]]]
    groups: Sequence[Group]
    batches: Sequence[Batch]


def _pushes(settings: Settings, step: int) -> bool:
    """Whether the servers get this version during the run."""
    return step % settings.weights.push_every_steps == 0 and step < settings.learner.num_steps


def _saves(settings: Settings, step: int) -> bool:
    """Whether this version is checkpointed."""
    return step % settings.checkpoint.every_steps == 0 or step == settings.learner.num_steps


@dataclasses.dataclass(eq=False, repr=False)
class _StepFinalizer:
    """Finalizes each dispatched step once: reads its flag, then commits, publishes, saves and logs it.

    The times of a row are those since the row before; of the first row, since construction.
    """

    settings: Settings
    train_step: TrainStep
    queue: GroupSource
    publisher: Publish
    save: Callable[[int, TrainState, ResumePoint], None]
    metrics: MetricsWriter
    timers: Timers
    own_samples: bool
    keep_samples: Callable[[int, Sequence[Group]], None]

    def __post_init__(self):
        settings = self.settings
        self.timers.pop()  # Time before the first step belongs to no row.
        self._since = time.monotonic()
        status = self.queue.status()
        self._rates = _Rates(status)
        self._check_failures = _FailureBudgets(settings.queue, status)
        self._mismatch, self._fairness = _Watch(_mismatch_warnings), _Watch(_fairness_warnings)
        self._compiled = self.train_step.num_compilations()
        last = np.arange(1, settings.learner.num_steps + 1) * settings.learner.num_minibatches - 1
        rates = learning_rate(settings.learner)(last)
        self._learning_rates = np.broadcast_to(rates, last.shape)  # of each step's last update
        self._status_due = 0.0  # monotonic seconds
        self._dispatched: _DispatchedStep | None = None
        self._last: tuple[int, TrainState, ResumePoint] | None = None  # the last finalized step

    def add(self, step: _DispatchedStep) -> None:
        """Takes the step that was dispatched last."""
        self._dispatched = step

    def stop(self) -> None:
        """Finalizes the dispatched step without a push, and saves the last step if it was not saved."""
        self.finalize(pushes=False)
        if self._last is not None and not _saves(self.settings, self._last[0]):
            with self.timers("checkpoint"):
                self.save(*self._last)
        log.info("stopped early after step %s", self._last[0] if self._last else "none")

    def check_status(self) -> None:
        """Looks at the budgets, every STATUS_SECS: where everything fails, no step ends that would."""
        if time.monotonic() < self._status_due:
            return
        self._status_due = time.monotonic() + STATUS_SECS
        # A lost queue is the lease's error.
        with contextlib.suppress(ConnectionError, TimeoutError):
            self._check_failures(self.queue.status())

    def finalize(self, *, pushes: bool = True) -> None:
        """Waits for the device and finalizes the dispatched step, if there is one."""
        if self._dispatched is None:
            return
        ended, self._dispatched = self._dispatched, None
        with self.timers("update"):  # Waits for the device; raises on bad numbers.
            rows = [
                _checked(ended.step, i, *outcome) for i, outcome in enumerate(ended.outcomes, 1)
            ]
        if self.own_samples:
            _check_mismatch(ended.step, rows[0], self.settings.learner.max_mismatch)
        resume_point = self.queue.commit(ended.step)
        self._last = (ended.step, ended.state, resume_point)
        if ended.snapshot is not None and pushes:
            with self.timers("publish"):
                self.publisher.publish(ended.step, ended.snapshot)
        if _saves(self.settings, ended.step):
            with self.timers("checkpoint"):
                self.save(ended.step, ended.state, resume_point)
        self._write_metrics(ended, rows)

    def _write_metrics(
        self, ended: _DispatchedStep, minibatches: Sequence[Mapping[str, float]]
    ) -> None:
        status = self.queue.status()
        row = _step_metrics(minibatches, ended.groups, ended.batches)
        if self.own_samples:
            self._mismatch(ended.step, row)
        else:
            row = {k: v for k, v in row.items() if not k.startswith("mismatch/")}
        self._fairness(ended.step, status.lengths)
        row |= self.publisher.metrics() | self._rates.metrics(status) | self.timers.pop()
        now = time.monotonic()
        row["time/step_secs"], self._since = now - self._since, now
        row["learner/learning_rate"] = self._learning_rates[ended.step - 1]
        loss, num_steps = self.settings.loss, self.settings.learner.num_steps
        if loss.kl_final_coefficient is not None:
            row["policy/kl_coefficient"] = loss.kl_coefficient_of(ended.step, num_steps)
        row["compile/count"] = self.train_step.num_compilations()
        row["learner/tokens_per_sec"] = row.pop("tokens") / row["time/step_secs"]
        self.metrics.write(ended.step, row)
        self.keep_samples(ended.step, ended.groups)
        self._check_failures(status)
        if self.settings.learner.fail_on_recompile and row["compile/count"] > self._compiled:
            raise RecompileError(
                f"step {ended.step}: {row['compile/count']} programs were compiled, {self._compiled} before the first "
                "step: a microbatch of another shape, dtype or layout reached the device"
            )


def _timed(lease: Iterator[Chunk], timers: Timers) -> Iterator[Chunk]:
    """The chunks of a lease; the wait for each is timed as "wait_data"."""
    while True:
        with timers("wait_data"):
            chunk = next(lease, None)
        if chunk is None:
            return
        yield chunk


def _rewards(groups: Sequence[Group]) -> np.ndarray:
    """float64 [N, G]"""
    return np.stack([group.exact_rewards for group in groups])


def _turn_rewards(groups: Sequence[Group]) -> np.ndarray:
    """float64 [N, G, K], K turns at most, NaN where a sample has fewer; one without such rewards has one turn."""
    rows = [
        [[turn.reward for turn in first.turns] or [first.reward] for first, *_ in group.samples]
        for group in groups
    ]
    num_turns = max(len(row) for group in rows for row in group)
    return np.array([[row + [math.nan] * (num_turns - len(row)) for row in g] for g in rows])


def _checked(step: int, minibatch: int, outcome: Any, groups: Sequence[Group]) -> dict[str, float]:
    """A minibatch's metrics on the host; raises if its update was refused."""
    values = {name: float(value) for name, value in jax.device_get(outcome).items()}
    if not values.pop("finite"):
        indexes = ", ".join(str(group.prompt_index) for group in groups)
        raise NonFiniteError(
            f"step {step}, minibatch {minibatch}: loss {values['loss/policy']} and gradient norm "
            f"{values['policy/grad_norm']} of the groups with prompt_index {indexes}; the step was not "
            "committed, saved or published"
        )
    return values


def _check_mismatch(step: int, first: Mapping[str, float], bound: float) -> None:
    """Raises where the step's first minibatch was sampled from another policy than the learner's."""
    found = _mismatch(first).get("mismatch/mean_abs", 0.0)
    if bound and not found <= bound:
        raise MismatchError(
            f"step {step}: engine and learner differ at the same weights: mismatch/mean_abs {found:.3g} nats exceeds "
            f"learner.max_mismatch = {bound:g}; the step was not committed, saved or published. `python -m "
            "jaxrl_async parity` names the likely cause"
        )


def _step_metrics(
    minibatches: Sequence[Mapping[str, float]], groups: Sequence[Group], batches: Sequence[Batch]
) -> dict[str, float]:
    rewards = _rewards(groups)
    samples = [rows for group in groups for rows in group.samples]
    cut = [any(t.finish_reason == "length" for t in rows) for rows in samples]
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "tokens/completion_mean": np.mean([sum(len(t.completion) for t in s) for s in samples]),
        "tokens/truncated_share": np.mean(cut),
        "pack/padding_share": packing.padding_share(batches),
        "pack/microbatches": len(batches),
        **packing.kept_metrics(batches),
        # Of all learner processes; `batches` are only those of this one.
        "tokens": sum(minibatch["tokens"] for minibatch in minibatches),
    }
    components = [rows[0].components for rows in samples]
    metrics |= {
        f"component/{name}": np.mean([of[name] for of in components if name in of])
        for name in sorted({name for of in components for name in of})
    }
    shared = [n for n in minibatches[0] if n != "tokens" and not n.startswith("mismatch/")]
    metrics |= {name: _over_minibatches(name, minibatches) for name in shared}
    return metrics | _mismatch(minibatches[0])


def _mismatch(first: Mapping[str, float]) -> dict[str, float]:
    """The mismatch of a step's first minibatch: later ones have moved weights. Without tokens, only the count."""
    found = {name: value for name, value in first.items() if name.startswith("mismatch/")}
    tokens = found["mismatch/tokens"]
    return found if tokens else {"mismatch/tokens": tokens}


def _over_minibatches(name: str, minibatches: Sequence[Mapping[str, float]]) -> float:
    """Sums of tokens, maxima of maxima, means of lag/ weighted by its tokens; the mean of the rest."""
    values = [row[name] for row in minibatches]
    if name.endswith("/tokens"):
        return sum(values)
    if "max" in name:
        return max(values)
    if not name.startswith("lag/"):
        return np.mean(values)
    tokens = [row[f"{name.rpartition('/')[0]}/tokens"] for row in minibatches]
    return np.average(values, weights=tokens) if sum(tokens) else 0.0


class _Watch:
    """Logs the warnings about a step; after one, none for WARNING_STEPS steps."""

    def __init__(self, warnings_of: Callable[[Mapping[str, float]], Iterator[str]]):
        self._warnings_of, self._next_step = warnings_of, 0

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        if step < self._next_step:
            return
        for warning in self._warnings_of(values):
            self._next_step = step + WARNING_STEPS
            log.warning("step %d: %s", step, warning)


def _mismatch_warnings(row: Mapping[str, float]) -> Iterator[str]:
    """Of an engine and a learner that give the same tokens different log-probs at the same weights."""
    mean_abs = row.get("mismatch/mean_abs", 0.0)
    if not mean_abs <= MAX_MISMATCH:
        yield (
            f"engine and learner differ at the same weights: mismatch/mean_abs {mean_abs:.3g} nats exceeds "
            f"{MAX_MISMATCH:g} (max_abs {row['mismatch/max_abs']:.3g}, kl {row['mismatch/kl']:.3g}, "
            f"{row['mismatch/tokens']:.0f} tokens). `python -m jaxrl_async parity` names the likely cause"
        )


def _fairness_warnings(lengths: Mapping[str, float]) -> Iterator[str]:
    """Of dropped groups that are much longer or shorter than trained ones: training is then biased by length."""
    for part in ("prompt", "completion"):
        dropped, trained = (lengths.get(f"{part}/{fate}") for fate in ("dropped", "trained"))
        if dropped and trained and max(dropped / trained, trained / dropped) >= MAX_DRIFT:
            yield (
                f"{part}s of dropped groups have {dropped:.1f} tokens on average, those of trained groups "
                f"{trained:.1f}; fairness/ and returned/ show why"
            )


class _Rates:
    """Metrics of the queue since the last step."""

    def __init__(self, status: QueueStatus):
        self._tokens, self._time = status.completion_tokens, time.monotonic()
        # Role → stage → seconds, as last reported, and mean number of samples or workers.
        self._secs: dict[str, dict[str, float]] = {}
        self._means: dict[str, dict[str, float]] = {}

    def metrics(self, status: QueueStatus) -> dict[str, float]:
        now = time.monotonic()
        rate = (status.completion_tokens - self._tokens) / (now - self._time)
        self._tokens, self._time = status.completion_tokens, now
        return {
            "rollout/tokens_per_sec": rate,
            "queue/depth_groups": status.depth_groups,
            "queue/running_groups": status.running_groups,
            "queue/capacity": status.capacity,
            **self._at_work(status.roles),
            **{f"returned/{reason}": count for reason, count in status.returned.items()},
            **{f"retired/{reason}": count for reason, count in status.retired.items()},
            **{f"fairness/{name}": length for name, length in status.lengths.items()},
        }

    def _at_work(self, roles: Sequence[RoleStatus]) -> dict[str, float]:
        """Mean number of samples and workers per stage since the last report."""
        sums = collections.Counter()
        for role in roles:
            now, last = role.secs, self._secs.get(role.role, {})
            # The role was restarted, perhaps longer ago than the last process ran.
            if any(now.get(stage, 0.0) < secs for stage, secs in last.items()):
                last = {}
            if (elapsed := now.get(UP, 0.0) - last.get(UP, 0.0)) > 0:
                spent = {stage: now[stage] - last.get(stage, 0.0) for stage in now if stage != UP}
                self._means[role.role] = {stage: secs / elapsed for stage, secs in spent.items()}
                self._secs[role.role] = now
            if role.silent_secs < SILENT_SECS:  # A silent role counts as doing nothing.
                sums.update(self._means.get(role.role, {}))
        return {
            f"rollout/{stage}": sums[stage] for stage in ("generating", "scoring", "idle") if sums
        }


class _FailureBudgets:
    """Raises when more groups failed within queue.failure_window_secs than a budget allows.

    What a run had returned before this learner was started does not count, unless no step is done.
    """

    def __init__(
        self, queue: Queue, start: QueueStatus, clock: Callable[[], float] = time.monotonic
    ):
        self._queue, self._clock = queue, clock
        # Of each of BLAMELESS: the groups at the last look, and the looks at which there were more.
        self._lost = collections.Counter(start.returned if start.committed_step else {})
        self._losses: collections.Counter[str] = collections.Counter()
        before = self._counts(start) if start.committed_step else collections.Counter()
        self._looks = collections.deque([(clock(), before)])  # since the start of the window

    def __call__(self, status: QueueStatus) -> None:
        """Takes a status of the queue, whether steps end or not.

        Raises:
          TooManyFailuresError: a budget is exceeded; the message counts all groups that were not trained on.
          RunFailedError: a worker reported that the run cannot go on.
        """
        if status.failure:
            raise RunFailedError(status.failure)
        now, counts, queue = self._clock(), self._counts(status), self._queue
        self._looks.append((now, counts))
        while self._looks[1][0] < now - queue.failure_window_secs:
            self._looks.popleft()
        counts = counts - self._looks[0][1]
        within = f"within {queue.failure_window_secs:g} s (queue.failure_window_secs)"
        report = f"returned: {status.returned}, retired: {status.retired}"
        failures = sum(counts[reason] for reason in FAILURES)
        if failures > queue.max_failures:
            raise TooManyFailuresError(
                f"{failures} groups were returned for failures {within}, the budget queue.max_failures is "
                f"{queue.max_failures}{_last_of(counts, status)}; {report}"
            )
        for reason, budget in queue.budgets.items():
            if counts[reason] > budget:
                raise TooManyFailuresError(
                    f"{counts[reason]} groups were returned or retired as {reason} {within}, the budget "
                    f"queue.budgets.{reason} is {budget}{_last_of({reason: 1}, status)}; {report}"
                )

    def _counts(self, status: QueueStatus) -> collections.Counter[str]:
        """Reason → groups so far; those that came together of a lost worker or a server's fault count as one."""
        reasons = status.returned.keys() | status.retired.keys()
        counts = collections.Counter(
            {r: max(status.returned.get(r, 0), status.retired.get(r, 0)) for r in reasons}
        )
        for reason in BLAMELESS & reasons:
            self._losses[reason] += counts[reason] > self._lost[reason]
            self._lost[reason], counts[reason] = counts[reason], self._losses[reason]
        return counts


def _last_of(counts: Mapping[str, int], status: QueueStatus) -> str:
    """The detail of the last return for the most frequent failure: the machine's fault or the user's code's."""
    found = {reason: counts[reason] for reason in counts if reason in status.details}
    reason = max(found, key=found.__getitem__, default=None)
    return "" if reason is None else f"; the last {reason}: {status.details[reason]}"

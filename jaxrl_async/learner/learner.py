"""The learner: one loop for the synchronous, the periodic and the asynchronous mode.

    lease → pack → (score) → accumulate → update → commit → checkpoint → publish

It knows nothing of prompts, rewards or servers: groups come from the queue, weights go to the publisher. What
differs between the modes is how many chunks a lease has, and whether a push is waited for.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from jaxrl_async.channels.admission import REISSUE_REASONS, Position
from jaxrl_async.channels.queue_client import LearnerQueue
from jaxrl_async.channels.wire import QueueStatus
from jaxrl_async.learner import packing
from jaxrl_async.learner.train_step import TrainState, TrainStep
from jaxrl_async.metrics import MetricsWriter, Timers
from jaxrl_async.types import Batch, Chunk, Group

# nats, of mismatch/mean_abs. float32 on both sides gave below 1e-6; the bound leaves room for an engine in bfloat16,
# which was not measured. Beyond it engine and learner do not compute the same policy.
MAX_MISMATCH = 0.02
MISMATCH_WARNING_STEPS = 20  # At most one warning in so many steps.

_log = logging.getLogger(__name__)


class NonFiniteError(RuntimeError):
    """A loss or gradient that is NaN or infinite; the message names the step and the groups."""


class TooManyFailuresError(RuntimeError):
    """Infrastructure failures beyond the run's budget; the message counts them by reason."""


class Publish(Protocol):
    """Hands the weights of a version to the servers; what the learner needs of the publisher."""

    def publish(self, version: int, state: TrainState) -> None: ...
    def wait(self) -> None: ...
    def check(self) -> None: ...
    def metrics(self) -> dict[str, float]: ...


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When things happen, in steps."""

    num_steps: int
    push_every_steps: int
    wait_for_push: bool  # sync and periodic: a step starts when the servers hold the step before
    checkpoint_every_steps: int
    num_minibatches: int
    lease_timeout_secs: float
    max_failures: int  # groups returned for infrastructure failures before the run is stopped


def train(
    state: TrainState,
    *,
    first_step: int,
    schedule: Schedule,
    train_step: TrainStep,
    pack: Callable[[Sequence[Group], np.ndarray], list[Batch]],
    advantages: Callable[[np.ndarray], np.ndarray],
    queue: LearnerQueue,
    publisher: Publish,
    save: Callable[[int, TrainState, Position], None],
    metrics: MetricsWriter,
    reference: Any = None,
) -> TrainState:
    """Trains from first_step to schedule.num_steps. Step s turns version s − 1 into version s.

    Args:
      state: holds version first_step − 1, which the servers hold too.
      first_step: ≥ 1.
      schedule: when to push, save and stop.
      train_step: the three jitted programs.
      pack: groups and advantages [N, G] → microbatches of one static shape.
      advantages: rewards [N, G] → advantages [N, G].
      queue: leases and commits.
      publisher: takes new versions.
      save: (step, state, position) → checkpoint.
      metrics: one row per step.
      reference: parameters that a KL penalty is taken to; None where the loss has none.

    Returns:
      The state of the last version.

    Raises:
      NonFiniteError: before anything of the step was committed, saved or published.
      TooManyFailuresError: more groups came back for infrastructure failures than the budget allows.
    """
    timers, rates, watch = Timers(), _Rates(queue.status()), _MismatchWatch()
    accumulator = train_step.zero_accumulator()
    for step in range(first_step, schedule.num_steps + 1):
        groups: list[Group] = []
        batches: list[Batch] = []
        outcomes = []  # (metrics on the device, groups) of every minibatch
        with timers("step"):
            if schedule.wait_for_push:
                with timers("wait_push"):
                    publisher.wait()
            publisher.check()

            for chunk in _timed(queue.lease(step, schedule.lease_timeout_secs), timers):
                minibatches = packing.split_minibatches(chunk.groups, schedule.num_minibatches)
                with timers("pack"):
                    packed = [pack(m, advantages(_rewards(m))) for m in minibatches]
                with timers("accumulate"):
                    # Before any update, which moves the weights that anchors are taken at.
                    anchors = [[train_step.anchor(state.params, b) for b in m] for m in packed]
                for minibatch, rows, anchor in zip(minibatches, packed, anchors, strict=True):
                    with timers("accumulate"):
                        for batch, proximal in zip(rows, anchor, strict=True):
                            accumulator = train_step.accumulate(
                                state.params,
                                accumulator,
                                batch,
                                proximal,
                                policy_version=step - 1,
                                reference_logprobs=_scored(train_step, reference, batch),
                            )
                    groups += minibatch
                    batches += rows
                    if chunk.last:
                        state, accumulator, outcome = train_step.update(state, accumulator)
                        outcomes.append((outcome, minibatch))

            with timers("update"):  # Waits for the device; bad numbers go nowhere beyond this.
                rows = [_checked(step, i, *outcome) for i, outcome in enumerate(outcomes, 1)]
            position = queue.commit(step)
            if step % schedule.push_every_steps == 0 and step < schedule.num_steps:
                with timers("publish"):
                    publisher.publish(step, state)
            if step % schedule.checkpoint_every_steps == 0 or step == schedule.num_steps:
                with timers("checkpoint"):
                    save(step, state, position)

        status = queue.status()
        row = _step_metrics(rows, groups, batches)
        watch(step, row)
        row |= timers.pop() | publisher.metrics() | rates.metrics(status)
        row["compile/count"] = train_step.num_compilations()
        row["learner/tokens_per_sec"] = row.pop("tokens") / row["time/step_secs"]
        metrics.write(step, row)
        _check_failures(status, schedule.max_failures)
    return state


def _scored(train_step: TrainStep, params: Any, batch: Batch) -> jax.Array | None:
    """Log-probs of a reference's weights; None without one."""
    return None if params is None else train_step.score(params, batch)


def _timed(lease: Iterator[Chunk], timers: Timers) -> Iterator[Chunk]:
    """The chunks of a lease; the time until each came is "wait_data"."""
    while True:
        with timers("wait_data"):
            chunk = next(lease, None)
        if chunk is None:
            return
        yield chunk


def _rewards(groups: Sequence[Group]) -> np.ndarray:
    """float32 [N, G]"""
    return np.stack([group.rewards for group in groups])


def _checked(step: int, minibatch: int, outcome: Any, groups: Sequence[Group]) -> dict[str, float]:
    """A minibatch's metrics on the host; raises where its update was refused."""
    values = {name: float(value) for name, value in jax.device_get(outcome).items()}
    values.pop("tokens")
    if not values.pop("finite"):
        indexes = ", ".join(str(group.prompt_index) for group in groups)
        raise NonFiniteError(
            f"step {step}, minibatch {minibatch}: loss {values['loss/policy']} and gradient norm "
            f"{values['policy/grad_norm']}, of the groups with prompt_index {indexes}; nothing of this "
            "step was committed, saved or published"
        )
    return values


def _step_metrics(
    minibatches: Sequence[Mapping[str, float]], groups: Sequence[Group], batches: Sequence[Batch]
) -> dict[str, float]:
    rewards = _rewards(groups)
    trajectories = [t for group in groups for t in group.trajectories]
    metrics = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "tokens/completion_mean": np.mean([len(t.completion) for t in trajectories]),
        "tokens/truncated_share": np.mean([t.finish_reason == "length" for t in trajectories]),
        "pack/padding_share": packing.padding_share(batches),
        "pack/microbatches": len(batches),
        "tokens": sum(batch.mask.sum() for batch in batches),
    }
    shared = [name for name in minibatches[0] if not name.startswith("mismatch/")]
    metrics |= {name: _over_minibatches(name, minibatches) for name in shared}
    return metrics | _mismatch(minibatches[0])


def _mismatch(first: Mapping[str, float]) -> dict[str, float]:
    """Of a step's first minibatch, as the next ones have moved weights; without a token, the count alone."""
    found = {name: value for name, value in first.items() if name.startswith("mismatch/")}
    tokens = found["mismatch/tokens"]
    return found if tokens else {"mismatch/tokens": tokens}


def _over_minibatches(name: str, minibatches: Sequence[Mapping[str, float]]) -> float:
    """Tokens add up, maxima stay maxima, and what is about a staleness counts by its tokens; the rest is a mean."""
    values = [row[name] for row in minibatches]
    if name.endswith("/tokens"):
        return sum(values)
    if "max" in name:
        return max(values)
    if not name.startswith("lag/"):
        return np.mean(values)
    tokens = [row[f"{name.rpartition('/')[0]}/tokens"] for row in minibatches]
    return np.average(values, weights=tokens) if sum(tokens) else 0.0


class _MismatchWatch:
    """Warns when engine and learner give the same tokens other log-probs at the same weights."""

    def __init__(self):
        self._next_step = 0

    def __call__(self, step: int, row: Mapping[str, float]) -> None:
        if step < self._next_step or row.get("mismatch/mean_abs", 0.0) <= MAX_MISMATCH:
            return
        self._next_step = step + MISMATCH_WARNING_STEPS
        _log.warning(
            "step %d: engine and learner differ at the same weights: mismatch/mean_abs %.3g nats exceeds "
            "%g (max_abs %.3g, kl %.3g, %d tokens). `python -m jaxrl_async parity` names the likely cause",
            step,
            row["mismatch/mean_abs"],
            MAX_MISMATCH,
            row["mismatch/max_abs"],
            row["mismatch/kl"],
            row["mismatch/tokens"],
        )


class _Rates:
    """What the queue did since the last step."""

    def __init__(self, status: QueueStatus):
        self._tokens, self._time = status.completion_tokens, time.monotonic()

    def metrics(self, status: QueueStatus) -> dict[str, float]:
        now = time.monotonic()
        rate = (status.completion_tokens - self._tokens) / (now - self._time)
        self._tokens, self._time = status.completion_tokens, now
        return {
            "rollout/tokens_per_sec": rate,
            "queue/depth_groups": status.depth_groups,
            "queue/running_groups": status.running_groups,
            "queue/capacity": status.capacity,
        } | {f"returned/{reason}": count for reason, count in status.returned.items()}


def _check_failures(status: QueueStatus, max_failures: int) -> None:
    failures = {r: n for r, n in status.returned.items() if r in REISSUE_REASONS}
    if sum(failures.values()) > max_failures:
        raise TooManyFailuresError(
            f"{sum(failures.values())} groups came back for infrastructure failures, the budget "
            f"queue.max_failures is {max_failures}: {failures}"
        )

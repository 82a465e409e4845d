"""A rollout worker: permits from the queue become rewarded groups, or go back with a reason.

A group has all its G samples or is returned: a failure of a server, a rollout function or a reward is never a sample.
Where the first groups all fail with the same error of the user's code, the worker ends the run. Any other failure is a
bug and stops the worker. Independent of weights, losses and the learner.

A sample passes, in order: rollout function, actor bug, check, reward, price of its length, frictions of its reward.
"""

import asyncio
import collections
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_async import security
from jaxrl_async.active_clock import STOP_SECS, ActiveClock
from jaxrl_async.queue.client import QueueClient
from jaxrl_async.records import OVERTAKEN, REFUSALS, UP, Permit, Wait
from jaxrl_async.rewards.pool import (
    Judgement,
    PoolError,
    RewardError,
    RewardPool,
    RewardTimeoutError,
)
from jaxrl_async.rollout.context import Generate, RolloutError, rng_of
from jaxrl_async.rollout.failures import (
    CodeError,
    FirstFailures,
    UserCodeError,
    code_error,
    flattened,
)
from jaxrl_async.rollout.frictions import Frictions
from jaxrl_async.rollout.runner import Runner
from jaxrl_async.rollout.sampler import Sampler
from jaxrl_async.rollout.teachers import Teachers
from jaxrl_async.servers.fleet import Fleet
from jaxrl_async.types import Group, InvalidTrajectoryError, Prompt, Sample, Trajectory, Turn

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Worker:
    """Runs up to max_running_groups permits at once; `run` starts it."""

    name: str  # in the queue; a worker that restarts under its name is given its permits again
    queue: QueueClient  # gives permits and takes groups
    sampler: Sampler  # makes `generate`
    fleet: Fleet  # the sampler's servers, kept up to date here
    rewards: RewardPool  # scores an answer's text against the gold answer
    prompts: Sequence[Prompt]  # prompts[prompt_index] is the permit's prompt
    runner: Runner  # runs the rollout function, and judges its samples
    group_size: int  # G, samples per permit
    max_running_groups: int  # permits at once
    # A group whose recorded rewards are all equal retires its prompt_index instead (DAPO's dynamic sampling, arXiv
    # 2503.14476): it would have no advantage.
    drop_equal_rewards: bool
    overlong: Callable[[int], float]  # number of sampled tokens → price, added to the reward
    frictions: Frictions | None  # errors to record on purpose; None for none
    run_seed: int  # with prompt_index, attempt and sample it seeds a sample's random generators
    # A prompt whose group had this mean reward or more is not sampled again ("No-Positive-Resampling" of ScaleRL, arXiv
    # 2510.13786). This worker's memory alone: others do not know, and a restart forgets.
    max_pass_rate: float | None = None
    teachers: Teachers | None = None  # of a policy that is distilled from servers
    clock: ActiveClock = dataclasses.field(default_factory=ActiveClock)  # the sampler's, read here

    def __post_init__(self):
        self._running: dict[Permit, list[int]] = {}  # lengths of the samples that have ended
        # (permit, sample) → its stage, and since when.
        self._stages: dict[tuple[Permit, int], tuple[str, float]] = {}
        self._secs: dict[str, float] = collections.defaultdict(float)  # of stages that have ended
        self._start = self._idle_since = time.monotonic()
        self._first_failures = FirstFailures()
        self._solved: set[bytes] = set()  # tokens of prompts beyond max_pass_rate
        self._left_out = 0  # prompts since one was sampled
        self._finished = asyncio.Event()  # a permit has ended since `_work` waited
        self.statistics = Statistics()

    async def run(self) -> None:
        """Works until it is cancelled, and then aborts its requests on the servers and leaves its permits to others.

        Raises:
          UserCodeError: the first groups failed with the same error of the user's code; the queue has the message.
          Exception: the first failure that is neither a server's nor the user's code's.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_fleet(), name="rollout fleet")
                tasks.create_task(self._log_progress(), name="rollout progress")
                tasks.create_task(self._report_waits(), name="rollout status")
                tasks.create_task(self._read_clock(), name="rollout clock")
                await self._work(tasks)
        except BaseExceptionGroup as group:
            raise _worst(group) from None
        finally:
            await self.queue.leave(self.name)
            await self.runner.close()  # An agent that blocks takes the time that a stop leaves.

    def waits_for(self) -> str:
        """In words: what the worker waits for."""
        if not self._running:
            return "permits from the queue"
        scoring = sum(stage == SCORING for stage, _ in self._stages.values())
        return (
            f"{len(self._running)} groups: {self.sampler.num_running} requests run on servers, "
            f"{self.sampler.num_unrouted} wait for a HEALTHY one, {scoring} answers wait for their "
            f"reward ({self.fleet.describe()})"
        )

    def waits(self) -> list[Wait]:
        """One wait per group, the longest first, MAX_WAITS at most."""
        now = time.monotonic()
        if not self._running:
            return [Wait(self.name, "permits from the queue", now - self._idle_since)]
        oldest: dict[Permit, tuple[float, str, int]] = {}
        for (permit, sample), (stage, since) in self._stages.items():
            oldest[permit] = min(oldest.get(permit, (now, "", 0)), (since, stage, sample))
        waits = [
            Wait(f"group {p.prompt_index}.{p.attempt}", self._place(p, sample, stage), now - since)
            for p, (since, stage, sample) in oldest.items()
        ]
        return sorted(waits, key=lambda wait: -wait.secs)[:MAX_WAITS]

    def secs(self) -> dict[str, float]:
        """Since the start: sample-seconds by stage, seconds without a permit ("idle"), and all seconds (UP)."""
        now, secs = time.monotonic(), self._secs.copy()
        for stage, since in self._stages.values():
            secs[stage] += now - since
        if not self._running:
            secs["idle"] += now - self._idle_since
        return secs | {UP: now - self._start}

    def _enter(self, permit: Permit, sample: int, stage: str | None) -> None:
        """Moves a sample to a stage; None ends it."""
        now = time.monotonic()
        last, since = self._stages.pop((permit, sample), (None, now))
        if last is not None:
            self._secs[last] += now - since
        if stage is not None:
            self._stages[permit, sample] = (stage, now)

    def _place(self, permit: Permit, sample: int, stage: str) -> str:
        if stage == SCORING:
            return self.rewards.waits_for()
        if stage == TEACHING and self.teachers:
            return self.teachers.waits_for()
        return self.sampler.place_of(permit, sample) or self.runner.waits_for()

    async def _report_waits(self) -> None:
        while True:
            loads = self.fleet.take_report()
            await self.queue.report(self.name, self.waits(), self.secs(), loads)
            await asyncio.sleep(STATUS_SECS)

    async def _read_clock(self) -> None:
        while True:
            self.clock.now()
            await asyncio.sleep(CLOCK_SECS)

    async def _watch_fleet(self) -> None:
        async for records in self.queue.watch_fleet():
            self.sampler.take_run(self.queue.run_id)
            self.fleet.update(records, self.queue.table_v_pub)
            self.sampler.cancel_dead()

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            while (free := self.max_running_groups - len(self._running)) == 0:
                self._finished.clear()
                await self._finished.wait()
            permits = await self.queue.admit(
                free, ADMIT_WAIT_SECS, worker=self.name, working_on=self._running
            )
            self.fleet.expect(self.queue.v_pub)
            if permits and self.fleet.is_out_of_date:  # Once, instead of each sample by itself.
                await self.fleet.wait_for_change(TABLE_WAIT_SECS)
            if permits and not self._running:
                self._secs["idle"] += time.monotonic() - self._idle_since
            for permit in permits:
                self._running[permit] = []
                name = f"permit {permit.prompt_index}.{permit.attempt}"
                tasks.create_task(self._run_permit(permit), name=name)

    async def _run_permit(self, permit: Permit) -> None:
        """Submits the permit's group, or returns the permit."""
        try:
            self._leave_out_solved(permit)
            group = await self._make_group(permit)
            if self.max_pass_rate is not None and np.mean(group.rewards) >= self.max_pass_rate:
                self._solved.add(self.prompts[permit.prompt_index].tokens.tobytes())
            if self.drop_equal_rewards and group.has_equal_rewards:
                raise RolloutError("equal_rewards", f"all rewards are {group.rewards[0]:g}")
            if self.teachers is not None:
                self._enter(permit, 0, TEACHING)
                group = await self.teachers.teach(group, self.prompts[permit.prompt_index])
            outcome = await self.queue.submit(group)
            if outcome == OVERTAKEN:
                log.info("%s came too late for the steps that its tokens may be trained in", permit)
            if outcome in REFUSALS:
                log.warning("%s was refused as %s", permit, outcome)
                self.sampler.distrust(permit, outcome)
        except RolloutError as error:
            await self._return(permit, error.reason, error.detail)
            await self._end_with_first_failures(permit, error.cause)
        except InvalidTrajectoryError as error:
            await self._return(permit, "invalid", str(error))
        else:
            self.statistics.count(group, outcome)
        finally:
            del self._running[permit]
            self._enter(permit, 0, None)
            self.sampler.release(permit)
            self._idle_since = time.monotonic()
            self._finished.set()

    def _leave_out_solved(self, permit: Permit) -> None:
        """Raises for a solved prompt, but for one after MAX_LEFT_OUT in a row: a run whose prompts all are goes on."""
        if not self._solved:
            return
        is_solved = self.prompts[permit.prompt_index].tokens.tobytes() in self._solved
        self._left_out = self._left_out + 1 if is_solved and self._left_out < MAX_LEFT_OUT else 0
        if self._left_out:
            raise RolloutError(
                "solved", f"its last group had a mean reward of {self.max_pass_rate:g} or more"
            )

    async def _end_with_first_failures(self, permit: Permit, cause: CodeError | None) -> None:
        """Ends the run where the user's code has failed in the same way from its start."""
        prompt = self.prompts[permit.prompt_index]
        message = None if cause is None else self._first_failures.failed(cause, prompt)
        if message is not None:
            await self.queue.fail(self.name, message)
            raise UserCodeError(message)

    async def _return(self, permit: Permit, reason: str, detail: str) -> None:
        normal = reason in ("equal_rewards", "solved")  # With the settings of that name, many are.
        level = logging.DEBUG if normal else logging.WARNING
        log.log(level, "%s returned as %s: %s", permit, reason, security.escaped(detail))
        await self.queue.return_permit(
            permit,
            reason,
            detail,
            prompt_tokens=len(self.prompts[permit.prompt_index].tokens),
            completion_tokens=self._running[permit],
        )
        self.statistics.returned[reason] += 1

    async def _make_group(self, permit: Permit) -> Group:
        prompt = self.prompts[permit.prompt_index]
        try:
            async with asyncio.TaskGroup() as tasks:
                samples = [
                    tasks.create_task(self._sample(permit, prompt, sample))
                    for sample in range(self.group_size)
                ]
        except BaseExceptionGroup as failures:
            raise _worst(failures) from None
        finally:  # Of a whole group, those that its rollout function gave up.
            await self.sampler.abort(permit)
        rows = [sample.result() for sample in samples]
        firsts = self.runner.with_one_prompt([first for first, *_ in rows])
        with_firsts = [(first, *rest) for first, (_, *rest) in zip(firsts, rows, strict=True)]
        return Group.of_samples(permit.prompt_index, permit.attempt, with_firsts)

    async def _sample(self, permit: Permit, prompt: Prompt, sample: int) -> tuple[Trajectory, ...]:
        self._enter(permit, sample, GENERATING)
        try:
            return await self._run_sample(permit, prompt, sample)
        finally:
            self._enter(permit, sample, None)

    async def _run_sample(
        self, permit: Permit, prompt: Prompt, sample: int
    ) -> tuple[Trajectory, ...]:
        """The rows of a sample."""
        key = (self.run_seed, permit.prompt_index, sample, permit.attempt)
        generate = self.sampler.bind(permit, sample)
        make_rng = functools.partial(rng_of, "rollout", *key)
        found = await self._run_function(prompt, generate, make_rng)
        self._running[permit].append(sum(len(row.completion) for row in found.trajectories))
        recorded: Callable[[float], float] = float
        if self.frictions is not None:
            rng = rng_of("frictions", *key)
            rows = self.frictions.of_rows(found.trajectories, rng)
            found = dataclasses.replace(found, trajectories=rows)
            recorded = functools.partial(self.frictions.of_reward, rng=rng)
        try:
            self.runner.check(found)
        except InvalidTrajectoryError as error:
            cause = CodeError("a trajectory that is invalid", f"InvalidTrajectoryError: {error}")
            raise RolloutError("invalid", str(error), cause) from error
        self._enter(permit, sample, SCORING)
        judgement = await self._judge(found, prompt)
        self._first_failures.judged()
        num_sampled = sum(row.num_sampled for row in found.trajectories)
        reward = recorded(judgement.reward + self.overlong(num_sampled))
        judged = {"reward": reward, "components": judgement.components}
        return tuple(
            dataclasses.replace(row, turns=_summing_to(reward, row.turns), **judged)
            for row in found.trajectories
        )

    async def _run_function(
        self, prompt: Prompt, generate: Generate, make_rng: Callable[[], np.random.Generator]
    ) -> Sample:
        """Runs the rollout function; what it raises costs the group, as rollout_error."""
        try:
            found = await self.runner.run(prompt, generate, make_rng)
        except Exception as error:
            flat = flattened(error)
            own = next((e for e in flat if not isinstance(e, RolloutError)), None)
            if own is None:
                raise flat[0] from error
            detail = f"the rollout function raised {type(own).__name__}: {own}"
            raise RolloutError("rollout_error", detail, code_error(own)) from error
        rows = found.trajectories if isinstance(found, Sample) else (found,)
        if not isinstance(rows, tuple | list) or not all(isinstance(r, Trajectory) for r in rows):
            text = f"the rollout function returned {found!r:.200}, not a Trajectory or a Sample of a tuple of them"
            cause = CodeError("a rollout function that returns no Trajectory", text)
            raise RolloutError("rollout_error", text, cause)
        return Sample.of(found)

    async def _judge(self, rows: Sample, prompt: Prompt) -> Judgement:
        try:
            return await self.runner.judge(rows, prompt, self.rewards)
        except RewardTimeoutError as error:
            raise RolloutError("reward_timeout", str(error)) from error
        except RewardError as error:
            if isinstance(error, PoolError) and isinstance(self.rewards, RewardPool):
                raise  # It takes no calls any more: the worker is to be started again.
            text = error.traceback or str(error)
            cause = CodeError(error.place, text) if error.place else None
            raise RolloutError("reward_error", str(error), cause) from error

    async def _log_progress(self) -> None:
        """Every LOG_SECS one line: the statistics, or what the worker waits for if no group ended."""
        while True:
            before = self.statistics.num_done
            await asyncio.sleep(LOG_SECS)
            if self.statistics.num_done == before:
                log.warning("no group for %g s; waiting for %s", LOG_SECS, self.waits_for())
            else:
                log.info("%s", self.statistics)


@dataclasses.dataclass
class Statistics:
    """Counts of a worker since its start."""

    num_groups: int = 0  # held by the queue
    num_refused: int = 0  # refused as too late: their permit had timed out
    num_completions: int = 0
    completion_tokens: int = 0
    longest_completion: int = 0  # tokens
    returned: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def count(self, group: Group, outcome: str) -> None:
        """Counts a submitted group; outcome as of `QueueClient.submit`."""
        if outcome != "held":
            self.num_refused += 1
            return
        lengths = [sum(len(row.completion) for row in rows) for rows in group.samples]
        self.num_groups += 1
        self.num_completions += len(lengths)
        self.completion_tokens += sum(lengths)
        self.longest_completion = max(self.longest_completion, *lengths)

    @property
    def num_done(self) -> int:
        """Permits that have ended."""
        return self.num_groups + self.num_refused + self.returned.total()

    def __str__(self) -> str:
        mean = self.completion_tokens / max(self.num_completions, 1)
        returned = ", ".join(f"{count} {reason}" for reason, count in self.returned.items())
        return (
            f"{self.num_groups} groups, {self.num_completions} completions of {mean:.1f} tokens on "
            f"average and {self.longest_completion} at most; returned: {returned or 'none'}"
        )


def _summing_to(reward: float, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """Turns whose rewards sum to that of the trajectory: an addition to it is the last turn's."""
    if not turns:
        return turns
    *before, last = turns
    rest = reward - math.fsum(turn.reward for turn in before)
    return (*before, dataclasses.replace(last, reward=rest))


def _worst(failures: BaseExceptionGroup) -> BaseException:
    """One failure to name: a bug before anything that only costs the group, and the user's code before servers."""
    flat = flattened(failures)
    costs_the_group = (RolloutError, InvalidTrajectoryError)
    bugs = [e for e in flat if not isinstance(e, costs_the_group)]
    users = [e for e in flat if getattr(e, "cause", None) is not None]
    return (bugs + users + flat)[0]


# Stages of a sample, and of a group whose teacher is asked, and names of their seconds.
GENERATING, SCORING, TEACHING = "generating", "scoring", "teaching"
CLOCK_SECS = STOP_SECS / 4  # between readings of the clock
STATUS_SECS = 2.0  # between reports to the queue
MAX_WAITS = 16  # groups in a report
MAX_LEFT_OUT = 100  # solved prompts in a row
ADMIT_WAIT_SECS = 10.0  # deadline of a long poll for permits
# For the table of the version that the permits are for; then each sample waits by itself.
TABLE_WAIT_SECS = 0.1
LOG_SECS = 30.0

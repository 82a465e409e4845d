"""Teachers that are servers: a complete group gets their log-probs of its tokens, which go with it to the queue.

What is recorded is what is trained on, so that a replay asks nobody. A teacher that gives no answer is asked again, and
its group is returned in the end. Independent of the queue and of rewards.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Mapping

import numpy as np

from jaxrl_async.active_clock import ActiveClock
from jaxrl_async.rollout.context import RolloutError
from jaxrl_async.rollout.failures import CodeError, flattened
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import ServerError, Teacher
from jaxrl_async.types import Group, Prompt, Trajectory

RETRY_SECS = 1.0

log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False, repr=False, kw_only=True)
class Teachers:
    """The teachers of a run, for one event loop."""

    client: InferenceClient  # of these servers alone
    addresses: Mapping[str, str]  # task → URL; of "" for the tasks that have none
    task: str  # of a prompt whose metadata has no "task"
    timeout_secs: float  # bound on a call
    outage_secs: float  # bound on the time from a call's first attempt to the last one's start
    clock: ActiveClock  # its owner reads it often

    def __post_init__(self):
        self._kinds: dict[str, Teacher] = {}
        self._silent: dict[str, str] = {}  # address → reason

    async def teach(self, group: Group, prompt: Prompt) -> Group:
        """The group with `Choices.teacher` in every row.

        Raises:
          RolloutError: "teacher_error": no teacher of the prompt's task, no answer, or a refusal.
        """
        task = str(prompt.metadata.get("task", self.task))
        address = self.addresses.get(task) or self.addresses.get("")
        if address is None:
            text = f"loss.teacher has none of task {task!r}, but of {', '.join(self.addresses)}"
            raise RolloutError("teacher_error", text, CodeError("loss.teacher", text))
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(self._taught(address, r)) for r in group.trajectories]
        except BaseExceptionGroup as failures:
            raise flattened(failures)[0] from None
        return dataclasses.replace(group, trajectories=tuple(task.result() for task in asked))

    def waits_for(self) -> str:
        """The wait of a group, in words, and the teachers that gave no answer when they were asked last."""
        silent = "; ".join(self._silent.values())
        return "its teacher's log-probs" + (f" (no answer: {silent})" if silent else "")

    async def _taught(self, address: str, row: Trajectory) -> Trajectory:
        teacher = np.zeros(len(row), np.float32)
        if row.mask.any():
            first = int(np.argmax(row.mask))  # ≥ 1: a prompt has a token.
            scores = await self._score(address, row.tokens.tolist(), first)
            teacher[first:] = np.where(row.mask[first:], scores, 0)
        choices = dataclasses.replace(row.choices, teacher=teacher)
        return dataclasses.replace(row, choices=choices)

    async def _score(self, address: str, tokens: list[int], first: int) -> np.ndarray:
        deadline, timeout = self.clock.now() + self.outage_secs, {"timeout_secs": self.timeout_secs}
        while True:
            try:
                if (kind := self._kinds.get(address)) is None:
                    kind = self._kinds[address] = await self.client.recognise(address, **timeout)
                scores = await kind.score(tokens, first, **timeout)
                self._silent.pop(address, None)
                return scores
            except ServerError as error:
                self._kinds.pop(address, None)
                if not error.retryable or self.clock.now() > deadline:
                    raise RolloutError("teacher_error", f"loss.teacher: {error}") from error
                if address not in self._silent:
                    log.warning("loss.teacher: %s", error)
                self._silent[address] = str(error)
            await asyncio.sleep(RETRY_SECS)

"""The one path from a prompt to a judged trajectory, in training and in every evaluation."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async.names import find
from jaxrl_async.rewards.pool import Judgement, RewardError, RewardPool
from jaxrl_async.rollout.context import Context, Generate, Rollout, RolloutError
from jaxrl_async.rollout.failures import CodeError
from jaxrl_async.rollout.single_turn import single_turn
from jaxrl_async.tasks.task import RIGHT
from jaxrl_async.tasks.tokenizer import completion_text
from jaxrl_async.types import (
    MAX_ROWS,
    NEVER_BIAS,
    NO_RECORD,
    InvalidTrajectoryError,
    Prompt,
    Record,
    Sample,
    Trajectory,
    check_trajectory,
    component_problem,
)

ROLLOUTS: dict[str, Rollout] = {"single_turn": single_turn}


def rollout_function(name: str) -> Rollout:
    """A rollout function by its name in ROLLOUTS, or by "module:function".

    Raises:
      ValueError: neither, or it cannot be imported.
    """
    return find("rollout function", name, ROLLOUTS)


@dataclasses.dataclass(frozen=True)
class Runner:
    """A rollout function with the tokenizer and the bounds of its run."""

    function: Rollout
    encode: Callable[[str], list[int]]  # text → token ids, nothing added
    decode: Callable[[Sequence[int]], str]  # token ids → text, without special tokens
    stop_token_ids: tuple[int, ...]
    vocab_size: int  # ids outside [0, vocab_size) are never sent: one kills an SGLang server
    max_new_tokens: int  # budget of the tokens that `Context.generate` samples, of each row
    max_request_tokens: int  # tokens that a server takes and samples in one request
    max_tokens: int  # bound on a trajectory's length
    never_token_ids: tuple[int, ...] = ()  # that no server may sample: padding
    # token ids → text, with the names of special tokens; None for `decode`
    decode_raw: Callable[[Sequence[int]], str] | None = None
    # (messages after an answer, its stop token) → token ids; None without a chat template
    encode_reply: Callable[..., list[int]] | None = None
    # (messages, tools) → token ids up to the answer; None without a chat template
    encode_chat: Callable[..., list[int]] | None = None
    right: float = RIGHT  # the least reward of a right answer, in evaluations
    deciding: tuple[str, ...] = ()  # components that say so in the reward's place
    temperature: float = 1.0  # of the run
    truncation: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # `Rollout.truncation`
    record: Record = NO_RECORD  # of trained samples
    # Of all rows of an agent's session, so that its group fits in a message.
    max_sample_tokens: float = math.inf

    @property
    def bias(self) -> dict[str, Any]:
        """The sampling parameter, by SGLang's name, that rules never_token_ids out; {} without any."""
        ruled_out = {str(token): NEVER_BIAS for token in self.never_token_ids}
        return {"logit_bias": ruled_out} if ruled_out else {}

    async def run(
        self,
        prompt: Prompt,
        generate: Generate,
        make_rng: Callable[[], np.random.Generator],
        *,
        is_trained: bool = True,
    ) -> Trajectory | Sample:
        """One sample, not checked yet.

        Args:
          prompt: the question.
          generate: samples for it; without `max_new_tokens` it uses the run's.
          make_rng: makes the generator of this sample alone.
          is_trained: whether every token must be sampled as the run does.
        """
        context = Context(
            generate,
            encode=self.encode,
            decode=self.decode,
            vocab_size=self.vocab_size,
            max_new_tokens=self.max_new_tokens,
            max_row_tokens=min(self.max_tokens, self.max_request_tokens),
            make_rng=make_rng,
            encode_reply=self.encode_reply,
            encode_chat=self.encode_chat,
            temperature=self.temperature,
            truncation=self.truncation,
            is_trained=is_trained,
            max_sample_tokens=self.max_sample_tokens,
        )
        return await self.function(prompt, context)

    def waits_for(self) -> str:
        """In words: the place of a sample that waits for no server."""
        waits_for = getattr(self.function, "waits_for", None)
        return waits_for() if waits_for else "its rollout function"

    async def close(self) -> None:
        """Ends what the rollout function holds, such as processes; the next `run` starts it again."""
        if close := getattr(self.function, "close", None):
            await close()

    def with_one_prompt(self, rows: Sequence[Trajectory]) -> tuple[Trajectory, ...]:
        """The first rows of a group's samples, with the common beginning as prompt where the function writes its own.

        Tokens of a prompt beyond the common beginning become tokens that were read.

        Raises:
          RolloutError: "agent_error" where not even the first tokens are equal.
        """
        if not getattr(self.function, "own_prompts", False):
            return tuple(rows)
        length = min(row.prompt_length for row in rows)
        prompts = np.stack([row.tokens[:length] for row in rows])
        differ = (prompts != prompts[0]).any(axis=0)
        length = int(np.argmax(differ)) if differ.any() else length
        if not length:
            text = "the prompts of a group's sessions begin with different tokens"
            raise RolloutError("agent_error", text, CodeError("prompts of sessions", text))
        return tuple(dataclasses.replace(row, prompt_length=length) for row in rows)

    def check(self, sample: Trajectory | Sample, *, is_trained: bool = True) -> None:
        """Checks what a rollout function made, before it is judged; of one that is trained, its record too.

        Raises:
          InvalidTrajectoryError: names the field, the value and the bound.
        """
        sample = Sample.of(sample)
        rows = sample.trajectories
        if not 1 <= len(rows) <= MAX_ROWS:
            raise InvalidTrajectoryError(f"a sample has 1 to {MAX_ROWS} rows, got {len(rows)}")
        if not 0 <= sample.judged < len(rows):
            text = f"judged must be in [0, {len(rows)}), got {sample.judged}"
            raise InvalidTrajectoryError(f"of a sample of {len(rows)} rows, {text}")
        if len(rows) > 1 and any(row.turns for row in rows):
            text = "must have no turns with rewards of their own"
            raise InvalidTrajectoryError(f"a sample of several rows {text}, got {len(rows)} rows")
        for row in rows:
            self._check_row(row, self.record if is_trained else None)

    def _check_row(self, trajectory: Trajectory, record: Record | None) -> None:
        bounds = {"vocab_size": self.vocab_size, "max_tokens": self.max_tokens, "record": record}
        check_trajectory(trajectory, judged=False, **bounds)
        sampled = set(trajectory.tokens[trajectory.mask].tolist())
        for token in sampled.intersection(self.never_token_ids):
            raise InvalidTrajectoryError(
                f"token id {token}, padding, is sampled, which its logit_bias of {NEVER_BIAS:g} rules out: the server "
                "ignores it, or the rollout function replaced it; rollout.sample_padding=True allows the token"
            )

    def is_right(self, judgement: Judgement) -> bool:
        """Whether an answer is right, in evaluations."""
        found = [judgement.components.get(name, judgement.reward) for name in self.deciding]
        return min(found, default=judgement.reward) >= self.right

    async def judge(
        self, sample: Trajectory | Sample, prompt: Prompt, pool: RewardPool
    ) -> Judgement:
        """The reward that the rollout function set, or else the pool's, of the text of the sampled tokens.

        Of several rows it is that of the one to be judged.

        The components of a rollout function stand beside the pool's.

        Raises:
          RewardError: as of `RewardPool.judge`.
        """
        rows = Sample.of(sample)
        trajectory = rows.trajectories[rows.judged]
        if trajectory.reward is not None:
            return Judgement(float(trajectory.reward), trajectory.components)
        text = completion_text(trajectory, decode=self.decode, stop_token_ids=self.stop_token_ids)
        sampled = trajectory.tokens[trajectory.mask].tolist()
        seen = {
            "prompt": prompt.text,
            "finish_reason": trajectory.finish_reason,
            "metadata": prompt.metadata,
            "raw_completion": (self.decode_raw or self.decode)(sampled),
        }
        judgement = await pool.judge(text, prompt.answer, seen)
        components = {**trajectory.components, **judgement.components}
        if problem := component_problem(components):
            raise RewardError(problem, place="the components of a reward and of a rollout function")
        return dataclasses.replace(judgement, components=components)

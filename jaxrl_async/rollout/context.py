"""The interface of a rollout function: `async def rollout(prompt, context) -> Trajectory`, or a `Sample` of several.

A context belongs to one sample. It hides who answers `generate`: the servers of a run, the one server of an evaluation,
or an engine in this process.
"""

import copy
import functools
import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxrl_async.rollout.failures import CodeError
from jaxrl_async.rollout.parameters import checked
from jaxrl_async.rollout.rows import Rows
from jaxrl_async.servers.port import Completion, ServerError
from jaxrl_async.types import (
    NOT_SAMPLED,
    Choices,
    Prompt,
    Sample,
    Trajectory,
    Turn,
    padded_routes,
    spread_kept,
)

# generate(tokens, **sampling) continues token ids [T]; `sampling` replaces single sampling parameters of the run.
Generate = Callable[..., Awaitable[Completion]]
Rollout = Callable[[Prompt, "Context"], Awaitable[Trajectory | Sample]]


class RolloutError(Exception):
    """A rollout that gave no sample: `reason` is one of the queue's return reasons.

    `cause` is the error of the user's code that it comes from; None for a failure of the infrastructure.
    """

    def __init__(self, reason: str, detail: str, cause: CodeError | None = None):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.cause = cause


class Context:
    """The policy, the tokenizer, the budget of tokens and the random generator of one sample.

    A context may be called in place of a bare `generate`, which is how older rollout functions use it:
    `await context(tokens, **sampling)`. Each such call has the run's max_new_tokens, whatever was sampled before.
    """

    def __init__(
        self,
        generate: Generate,
        *,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
        vocab_size: int,
        max_new_tokens: int,
        max_row_tokens: int,
        make_rng: Callable[[], np.random.Generator],
        encode_reply: Callable[[Sequence[Mapping[str, Any]], int | None], list[int]] | None = None,
        encode_chat: Callable[..., list[int]] | None = None,
        temperature: float = 1.0,
        is_trained: bool = True,
        max_sample_tokens: float = math.inf,
        truncation: Mapping[str, Any] = MappingProxyType({}),
    ):
        """Samples nothing yet.

        Args:
          generate: samples for this context; without `max_new_tokens` it uses the run's.
          max_row_tokens: bound on prompt + sampled tokens + what stands between.
          make_rng: makes the generator of this sample, and of nothing else.
          is_trained: whether the sample is trained: no call may sample it otherwise than the run does.
          truncation: what the run cuts off, `settings.Rollout.truncation`.
          others: as of `runner.Runner`.
        """
        self._make_rng = make_rng
        self.shaping = {"temperature": temperature, **truncation}
        self.temperature, self.is_trained = temperature, is_trained
        self.max_sample_tokens = max_sample_tokens
        self._encode_chat = encode_chat
        self._encode_reply = encode_reply
        self._generate = generate
        self._encode = encode
        self._decode = decode
        self._vocab_size = vocab_size
        self._max_new_tokens = max_new_tokens
        self._max_row_tokens = max_row_tokens
        self._rows = Rows(make_rng)

    @functools.cached_property
    def rng(self) -> np.random.Generator:
        """Of this sample, and of nothing else. Most rollout functions draw nothing, and it takes time to make."""
        return self._make_rng()

    async def generate(self, tokens: Sequence[int] | np.ndarray, **sampling: Any) -> Completion:
        """Continues a row of token ids [T] by `tokens_left(tokens)` tokens at most.

        Args:
          tokens: the row so far.
          **sampling: replaces sampling parameters of the run (SGLang's names) in this call. max_new_tokens is a
            further bound on it; a sampling_seed of None is the sample's. One that changes the distribution of a token
            is for samples that are not trained.

        Returns:
          N ≥ 1 tokens with finish_reason "stop" or "length".

        Raises:
          RolloutError: "overlong" where no token is left; server_error, timeout or aborted.
          ValueError: not [T ≥ 1] ids of the vocabulary; a parameter that is unknown, that the servers refuse, or that
            would sample otherwise than the run does.
        """
        left = self.tokens_left(tokens)
        if left < 1:
            text = f"generate was called with no tokens left: {self.budget(tokens)}; see context.tokens_left"
            raise RolloutError("overlong", text)
        wanted = sampling.get("max_new_tokens")
        left = left if wanted is None else min(left, wanted)
        return await self(tokens, **sampling | {"max_new_tokens": left})

    def tokens_left(self, tokens: Sequence[int] | np.ndarray = ()) -> int:
        """Tokens ≥ 0 that `generate` may sample after these: within the row's budget and its bound.

        What was sampled in other rows alone does not count. Without tokens it is the budget of the last call's row.
        """
        budget = self._max_new_tokens - self._rows.num_sampled(tokens)
        return max(0, min(budget, self._max_row_tokens - len(tokens)))

    def budget(self, tokens: Sequence[int] | np.ndarray) -> str:
        """In words: the bounds on the tokens that may follow a row, and how much of each is used."""
        return (
            f"{self._rows.num_sampled(tokens)} of rollout.max_new_tokens = {self._max_new_tokens} are sampled, and the "
            f"row has {len(tokens)} of {self._max_row_tokens} (the lesser of learner.row_tokens and "
            "server.max_total_tokens)"
        )

    async def __call__(self, tokens: Sequence[int] | np.ndarray, **sampling: Any) -> Completion:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not len(ids) or ids.min() < 0 or ids.max() >= self._vocab_size:
            raise ValueError(
                f"tokens to continue must be [T ≥ 1] ids in [0, {self._vocab_size}), got {ids}"
            )
        sampling = checked(sampling, run=self.shaping, is_trained=self.is_trained)
        taken = None if "sampling_seed" in sampling else self._rows.take(ids)
        seed = taken.seed if taken else sampling.pop("sampling_seed")
        if seed is not None:
            sampling["sampling_seed"] = seed
        try:
            completion = await self._generate(ids.tolist(), **sampling)
        except BaseException as error:
            if taken:
                taken.is_open = True  # The call that is made again has its seed.
            cause = error.__cause__ if isinstance(error, RolloutError) else None
            refused = isinstance(cause, ServerError) and not cause.retryable
            if refused and sampling.keys() - {"max_new_tokens", "sampling_seed"}:
                raise ValueError(f"a server refuses {sampling}: {cause}") from error
            raise
        self._rows.add(ids, completion, taken)
        return completion

    def encode(self, text: str) -> list[int]:
        """The ids of a text, nothing added. Raises ValueError: the tokenizer has no tokens for it."""
        return list(self._encode(text))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The ids of a conversation up to where an answer begins, as the chat template writes it.

        Raises:
          ValueError: there is no chat template, or it refuses.
        """
        if self._encode_chat is None:
            raise ValueError("messages need a tokenizer with a chat template")
        return list(self._encode_chat(messages, tools=tools))

    def encode_reply(self, messages: Sequence[Mapping[str, Any]], stop: int | None) -> list[int]:
        """The ids that stand between an answer of the policy and its next one, as the chat template writes them.

        Args:
          messages: what is said in between, each with its `role` and `content`.
          stop: the stop token that ended the answer and is in the row; None where none did.

        Raises:
          ValueError: there is no chat template, or it refuses.
        """
        if self._encode_reply is None:
            raise ValueError(
                "messages need a tokenizer with a chat template; give the text instead"
            )
        return list(self._encode_reply(messages, stop))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids; special tokens, such as the end of sequence, have none."""
        return self._decode(np.asarray(ids, np.int64).tolist())


class TrajectoryBuilder:
    """A trajectory in the making: the prompt, then completions, and tokens that nobody sampled between them."""

    def __init__(self, prompt: Prompt):
        self._prompt_length = len(prompt.tokens)
        self._tokens: list[int] = prompt.tokens.tolist()
        self._logprobs = [0.0] * self._prompt_length
        self._versions = [NOT_SAMPLED] * self._prompt_length
        self._finish_reason = "stop"
        self._kept: list[tuple[int, np.ndarray | None]] = []
        self._routes: np.ndarray | None = None

    @property
    def tokens(self) -> list[int]:
        """The ids so far [T]: what `generate` continues."""
        return list(self._tokens)

    def copy(self) -> "TrajectoryBuilder":
        """A row that goes on by itself."""
        other = copy.copy(self)
        for name in ("_tokens", "_logprobs", "_versions", "_kept"):
            setattr(other, name, list(getattr(self, name)))
        return other

    def fork(self) -> "TrajectoryBuilder":
        """A row that begins with this one's tokens as its prompt: none of them is sampled in it."""
        return TrajectoryBuilder(Prompt(0, np.array(self._tokens, np.int32), "", ""))

    def extend(self, completion: Completion) -> None:
        """Adds sampled tokens; their finish_reason becomes the row's.

        Their request computed the row before them anew: its routes take the place of earlier ones.
        """
        self._kept.append((len(self._tokens), completion.kept))
        self._tokens += completion.tokens.tolist()
        self._logprobs += completion.logprobs.tolist()
        self._versions += completion.versions.tolist()
        self._finish_reason = completion.finish_reason
        routes = completion.routes  # Of another row, where the function sampled after other tokens.
        is_own = routes is not None and len(routes) == len(self._tokens)
        self._routes = routes if is_own else None

    def append(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Adds tokens that were not sampled, such as a tool's output. They are read by the policy and never trained."""
        ids = np.asarray(tokens, np.int32).tolist()
        self._tokens += ids
        self._logprobs += [0.0] * len(ids)
        self._versions += [NOT_SAMPLED] * len(ids)

    def trajectory(
        self,
        *,
        reward: float | None = None,
        components: Mapping[str, float] = MappingProxyType({}),
        turns: Sequence[Turn] = (),
        finish_reason: str = "",
    ) -> Trajectory:
        """The row as a trajectory.

        Args:
          reward: kept as it is; None leaves it to the task's reward, and its components.
          components: of that reward, name → value.
          turns: those that have rewards of their own, whose sum is the reward.
          finish_reason: "stop" or "length"; "" for that of the last completion.
        """
        versions, routes = np.array(self._versions, np.int32), self._routes
        return Trajectory(
            tokens=np.array(self._tokens, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            versions=versions,
            mask=versions != NOT_SAMPLED,
            prompt_length=self._prompt_length,
            reward=reward,
            finish_reason=finish_reason or self._finish_reason,
            components=dict(components),
            turns=tuple(turns),
            choices=Choices(
                routes=None if routes is None else padded_routes(routes, len(versions)),
                kept=spread_kept(len(versions), self._kept),
            ),
        )


Row = TrajectoryBuilder  # the name that rollout functions of version 0.1 import


def rng_of(
    stream: str, run_seed: int, prompt_index: int, sample: int, attempt: int
) -> np.random.Generator:
    """A random generator of one sample, equal in every run of a seed. Streams of different names are independent."""
    key = f"{stream}/{run_seed}/{prompt_index}/{sample}/{attempt}"
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))

"""The vocabulary of the project, and the alignment law, in NumPy.

Alignment law. Entry t of every per-token array is about the token at t:

    logprobs[t] = log π(tokens[t] | tokens[:t]),    versions[t] = the weights that sampled tokens[t].

Nothing is shifted here, on the wire or in the queue. The one shift by one is the gather index
`Batch.predictor_index`, made in packing and used where log-probs are computed.

Imports no JAX, no protobuf, no tokenizers.
"""

import dataclasses
import itertools
import math
import numbers
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

MAX_STOP_TOKENS = 8  # of a request: the embedded engine has a static shape for them
NEVER_BIAS = -100.0  # Logit bias of a token that a server never samples.
MAX_COMPONENTS = 16  # of a reward
MAX_REWARD = 2.0**53  # Beyond it, float64 has no neighbouring whole numbers.
MAX_ROWS = 256  # of a sample
ROUTE_DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16))  # of up to 255 experts, of more
KEPT_COUNT_DTYPE = np.dtype("<u2")  # of the number of a token's kept ids, in messages
FINISH_REASONS = ("stop", "length")  # a stop token, or the token budget
_COMPONENT = re.compile("[a-z][a-z0-9_]{0,39}")
NOT_SAMPLED = -1  # The version of a token that no policy sampled: prompt, tool output, padding.


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One question as tokens, and the answer that its reward compares with."""

    index: int  # prompt_index: the position in the endless, seeded stream of prompts
    tokens: np.ndarray  # int32 [P], P ≥ 1
    text: str
    answer: str  # gold answer
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of its example
    messages: Sequence[Mapping[str, Any]] = ()  # of its example, where it has several


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of the policy, and what it was worth by itself."""

    end: int  # tokens of the row, its last one included
    reward: float


@dataclasses.dataclass(frozen=True)
class Choices:
    """The discrete choices of an engine, of each token of a trajectory, and a teacher's log-probs of them.

    A field is None where it was not recorded.
    """

    # uint8, from 256 experts on uint16 [T, L, K]: the experts that computed the token at t as an input; the dtype's
    # maximum where they are not known, as of the last token.
    routes: np.ndarray | None = None
    # int32 [T, M]: the ids, ascending and padded with −1, among which the token at t was drawn; −1 alone where none
    # was cut off, or nothing was drawn.
    kept: np.ndarray | None = None
    # float32 [T], of loss.teacher, ≤ 0, and 0 on tokens that were not sampled
    teacher: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Record:
    """The choices that a run records of each token, by their sizes; 0 where it records none."""

    num_layers: int = 0  # L
    experts_per_token: int = 0  # K
    num_experts: int = 0  # routes lie in [0, num_experts), where they are known
    max_kept: int = 0  # the largest M; every sampled token has kept ids
    has_teacher: bool = False  # whether every row has a teacher's log-probs

    @property
    def route_dtype(self) -> np.dtype:
        """Of routes: of the fewest bytes in which its maximum is no expert."""
        return ROUTE_DTYPES[self.num_experts >= 256]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's record in a message, at most."""
        routes = self.num_layers * self.experts_per_token * self.route_dtype.itemsize
        kept = KEPT_COUNT_DTYPE.itemsize + 4 * self.max_kept if self.max_kept else 0
        return routes + kept + 4 * self.has_teacher

    def problem(self, choices: Choices, mask: np.ndarray) -> str:
        """The fault in the sizes of sound choices of a row, in words; "" for none. Routes may be absent."""
        routes, kept, sizes = (
            choices.routes,
            choices.kept,
            (self.num_layers, self.experts_per_token),
        )
        if routes is not None and not self.num_layers:
            return "routes are given, and the run records none"
        if routes is not None and (routes.shape[1:], routes.dtype) != (sizes, self.route_dtype):
            wanted = f"{self.route_dtype} of {sizes[0]} layers and {sizes[1]} experts a token"
            return f"routes must be {wanted}, got {routes.dtype} {list(routes.shape)}"
        # + 1 makes 0 of an expert that is not known.
        if routes is not None and (routes + routes.dtype.type(1)).max() > self.num_experts:
            bad = routes[(routes >= self.num_experts) & (routes < np.iinfo(routes.dtype).max)]
            return f"expert {bad[0]} in routes is outside [0, {self.num_experts})"
        if (choices.teacher is not None) != self.has_teacher:
            asks = "needs them" if self.has_teacher else "has no such teacher"
            return f"a teacher's log-probs {'are missing' if self.has_teacher else 'are given'}, and the run {asks}"
        if not self.max_kept:
            return "kept ids are given, and the run cuts no token off" if kept is not None else ""
        if kept is not None and kept.shape[1] > self.max_kept:
            return f"kept has {kept.shape[1]} ids of a token, the run's bound is {self.max_kept}"
        lacks = mask if kept is None else mask & (kept[:, 0] < 0)
        if lacks.any():
            return f"token {int(np.argmax(lacks))} was sampled, and has no kept ids"
        return ""


NO_RECORD = Record()


def spread_kept(
    num_tokens: int, parts: Iterable[tuple[int, np.ndarray | None]]
) -> np.ndarray | None:
    """`Choices.kept` of a row, int32 [T, M], from that of its sampled parts, each with its first token's place.

    None where no part has any.
    """
    found = [(start, kept) for start, kept in parts if kept is not None]
    if not found:
        return None
    whole = np.full((num_tokens, max(kept.shape[1] for _, kept in found)), -1, np.int32)
    for start, kept in found:
        whole[start : start + len(kept), : kept.shape[1]] = kept
    return whole


def padded_routes(routes: np.ndarray, num_tokens: int) -> np.ndarray:
    """`Choices.routes` of a row whose first tokens have these; of the others they are not known."""
    if len(routes) == num_tokens:
        return routes
    whole = np.full((num_tokens, *routes.shape[1:]), np.iinfo(routes.dtype).max, routes.dtype)
    whole[: len(routes)] = routes
    return whole


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One token row: the prompt, then sampled tokens, with tool output between turns.

    Tokens that were not sampled have mask False, version −1 and log-prob 0.
    """

    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T], behavior log-probs at the sampling temperature, ≤ 0
    versions: np.ndarray  # int32 [T], ≥ 0 on sampled tokens, −1 elsewhere
    mask: np.ndarray  # bool [T], True on sampled tokens
    prompt_length: int  # P, 1 ≤ P ≤ T; tokens[:P] is the prompt
    reward: float | None = None  # None until it is judged; a rollout function may set it
    finish_reason: str = "stop"  # one of FINISH_REASONS
    # of its reward, which is not their sum: name → value, each a metric of its own
    components: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # where turns have rewards of their own, whose sum is `reward`; a token belongs to the first turn that ends after it
    turns: tuple[Turn, ...] = ()
    choices: Choices = Choices()

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def completion(self) -> np.ndarray:
        """int32 [T − P]: everything after the prompt, tool output included."""
        return self.tokens[self.prompt_length :]

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return int(np.count_nonzero(self.mask))


@dataclasses.dataclass(frozen=True)
class Sample:
    """One answer to a prompt, to be rewarded: one trajectory, or the several rows of an agent's session."""

    trajectories: tuple[Trajectory, ...]  # ≥ 1, in the order in which they began
    judged: int = 0  # index of the one that the task's reward reads

    @classmethod
    def of(cls, found: "Trajectory | Sample") -> "Sample":
        """The sample that a rollout function returned: a trajectory alone is one."""
        return found if isinstance(found, Sample) else cls((found,))


Rows = Sample  # the name that rollout functions of version 0.1 import


@dataclasses.dataclass(frozen=True)
class Group:
    """The G samples of one permit: one prompt, sampled G times. A sample has one trajectory or several, its rows."""

    prompt_index: int
    attempt: int  # 0 for the first issue of the prompt_index, + 1 for each reissue
    trajectories: tuple[Trajectory, ...]  # sample by sample
    num_rows: tuple[int, ...] = ()  # [G], ≥ 1, of each sample; () where each has one

    @classmethod
    def of_samples(
        cls, prompt_index: int, attempt: int, samples: Sequence[Sequence[Trajectory]]
    ) -> "Group":
        """A group of the rows of each sample."""
        nums = tuple(map(len, samples))
        several = any(num > 1 for num in nums)
        rows = tuple(itertools.chain(*samples))
        return cls(prompt_index, attempt, rows, nums if several else ())

    @property
    def samples(self) -> tuple[tuple[Trajectory, ...], ...]:
        """The rows of each sample [G]; those of one share its reward, and all first ones the prompt."""
        rows = iter(self.trajectories)
        nums = self.num_rows or (1,) * len(self.trajectories)
        return tuple(tuple(itertools.islice(rows, num)) for num in nums)

    @property
    def num_tokens(self) -> int:
        return sum(len(t) for t in self.trajectories)

    @property
    def rewards(self) -> np.ndarray:
        """float32 [G], of judged samples."""
        return np.asarray([rows[0].reward for rows in self.samples], np.float32)

    @property
    def exact_rewards(self) -> np.ndarray:
        """float64 [G], of judged samples."""
        return np.asarray([rows[0].reward for rows in self.samples], np.float64)

    @property
    def has_equal_rewards(self) -> bool:
        """Whether no sample has an advantage: the rewards are equal in float32, and not for want of its digits."""
        return np.ptp(self.rewards) == 0 and np.ptp(self.exact_rewards) < 1e-6


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Part of a step's lease: groups fixed once by the queue, by count and never by time."""

    step: int  # ≥ 1
    index: int  # position within the step's lease, from 0
    groups: tuple[Group, ...]
    last: bool  # True on the step's last chunk


@dataclasses.dataclass(frozen=True)
class Batch:
    """One microbatch of packed rows. Several segments share a row of T tokens.

    A segment is a whole trajectory or, where rows share prompts, a prompt or a completion that
    continues it.
    Padding has segment 0, mask False, version −1, and 0 elsewhere.
    """

    tokens: np.ndarray  # int32 [B, T]
    positions: np.ndarray  # int32 [B, T], from 0 within each trajectory
    segment_ids: np.ndarray  # int32 [B, T], from 1 within each row; 0 is padding
    prefix_ids: np.ndarray  # int32 [B, T], segment that the token's one continues, or 0
    predictor_index: np.ndarray  # int32 [B, T], column whose hidden state predicts the token at t
    mask: np.ndarray  # bool [B, T], True where a sampled token counts
    behavior_logprobs: np.ndarray  # float32 [B, T]
    token_versions: np.ndarray  # int32 [B, T]
    advantages: np.ndarray  # float32 [B, T], the sample's advantage on each of its tokens
    # float32 [B, T], the row's share of its sample's sampled tokens, or of its group's
    sample_share: np.ndarray
    # Of `Choices`, for a learner that replays them; padding has the dtype's maximum, −1, and 0.
    routes: np.ndarray | None = None  # uint8 or uint16 [B, T, L, K]
    kept: np.ndarray | None = None  # int32 [B, T, M]
    teacher: np.ndarray | None = None  # float32 [B, T]

    def rows(self, chosen: slice | np.ndarray) -> "Batch":
        """Some of its rows."""
        arrays = {name: array for name, array in vars(self).items() if array is not None}
        return Batch(**{name: array[chosen] for name, array in arrays.items()})


class InvalidTrajectoryError(ValueError):
    """A trajectory breaks the alignment law or a bound; the message names field and value."""


def check_trajectory(
    trajectory: Trajectory,
    *,
    vocab_size: int,
    max_tokens: int,
    judged: bool = True,
    record: Record | None = None,
) -> None:
    """Checks a trajectory where it enters: from a rollout function, and from the wire.

    Args:
      trajectory: the row to check.
      vocab_size: token ids must lie in [0, vocab_size).
      max_tokens: bound on the row's length T.
      judged: it must have a reward; False where one may still be None.
      record: its choices must be of these sizes; None for any.

    Raises:
      InvalidTrajectoryError: names the field, the value and the bound.
    """
    t, length = trajectory, len(trajectory.tokens)
    for name, dtype in _DTYPES.items():
        array = getattr(t, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != (length,):
            found = f"{getattr(array, 'dtype', type(array))} {list(np.shape(array))}"
            _refuse(f"{name} must be {dtype} [{length}], got {found}")
    if not 0 < length <= max_tokens:
        _refuse(f"length {length} is outside [1, {max_tokens}]")
    if not 1 <= t.prompt_length <= length:
        _refuse(f"prompt_length {t.prompt_length} is outside [1, {length}]")
    if t.tokens.min() < 0 or t.tokens.max() >= vocab_size:
        bad = t.tokens[(t.tokens < 0) | (t.tokens >= vocab_size)][0]
        _refuse(f"token id {bad} is outside [0, {vocab_size})")
    if t.mask[: t.prompt_length].any():
        _refuse("mask is True on a prompt token")
    if not np.isfinite(t.logprobs).all() or (t.logprobs > 0).any():
        bad = t.logprobs[~np.isfinite(t.logprobs) | (t.logprobs > 0)][0]
        _refuse(f"logprobs must be finite and ≤ 0, got {bad}")
    if (t.versions[t.mask] < 0).any():
        _refuse(f"version of a sampled token is {t.versions[t.mask].min()}, must be ≥ 0")
    if (t.versions[~t.mask] != NOT_SAMPLED).any() or (t.logprobs[~t.mask] != 0).any():
        _refuse("a token that was not sampled must have version −1 and log-prob 0")
    if not (_is_finite(t.reward) or (t.reward is None and not judged)):
        _refuse(f"reward must be finite, got {t.reward!r:.80}")
    if t.reward is not None and abs(t.reward) > MAX_REWARD:
        _refuse(f"reward must be in ±{MAX_REWARD:g}, got {t.reward!r:.80}: scale it down")
    if t.finish_reason not in FINISH_REASONS:
        _refuse(f"finish_reason must be 'stop' or 'length', got {t.finish_reason!r:.80}")
    if problem := component_problem(t.components):
        _refuse(problem)
    problem = choices_problem(t.choices, t.tokens, t.mask, vocab_size)
    if not problem and record is not None:
        problem = record.problem(t.choices, t.mask)
    if problem:
        _refuse(problem)
    if t.turns and (problem := turns_problem(t.turns, t.prompt_length, t.mask, t.reward)):
        _refuse(problem)


def component_problem(components: Mapping[str, float]) -> str:
    """The fault in the named components of a reward, in words; "" for none."""
    if len(components) > MAX_COMPONENTS:
        return f"a reward has at most {MAX_COMPONENTS} components, got {len(components)}"
    for name, value in components.items():
        if not isinstance(name, str) or not _COMPONENT.fullmatch(name):
            return f"the name of a reward's component must match {_COMPONENT.pattern}, got {name!r:.80}"
        if not _is_finite(value):
            return f"component {name!r} of a reward must be finite, got {value!r:.80}"
    return ""


def choices_problem(choices: Choices, tokens: np.ndarray, mask: np.ndarray, vocab_size: int) -> str:
    """The fault in the recorded choices of a trajectory, in words; "" for none.

    Args:
      choices: of one trajectory.
      tokens: int32 [T].
      mask: bool [T], True on sampled tokens.
      vocab_size: kept ids must lie in [0, vocab_size).
    """
    routes, kept, teacher = choices.routes, choices.kept, choices.teacher
    if teacher is not None:
        if getattr(teacher, "dtype", None) != np.float32 or teacher.shape != tokens.shape:
            found = f"{getattr(teacher, 'dtype', type(teacher))} {list(np.shape(teacher))}"
            return f"teacher must be float32 [{len(tokens)}], got {found}"
        if not (np.isfinite(teacher) & (teacher <= 0)).all() or teacher[~mask].any():
            return "teacher must be finite, ≤ 0, and 0 where no token was sampled"
    if routes is not None:
        is_sound = isinstance(routes, np.ndarray) and routes.dtype in ROUTE_DTYPES
        if not is_sound or routes.ndim != 3 or len(routes) != len(tokens) or 0 in routes.shape:
            found = f"{getattr(routes, 'dtype', type(routes))} {list(np.shape(routes))}"
            return f"routes must be uint8 or uint16 [{len(tokens)}, L, K], got {found}"
    if kept is None:
        return ""
    is_sound = isinstance(kept, np.ndarray) and kept.dtype == np.int32
    if not is_sound or kept.ndim != 2 or len(kept) != len(tokens) or not kept.shape[1]:
        found = f"{getattr(kept, 'dtype', type(kept))} {list(np.shape(kept))}"
        return f"kept must be int32 [{len(tokens)}, M], got {found}"
    if kept.min() < -1 or kept.max() >= vocab_size:
        bad = kept[(kept < -1) | (kept >= vocab_size)][0]
        return f"kept id {bad} is outside [−1, {vocab_size})"
    cuts, before, after = kept[:, 0] >= 0, kept[:, :-1], kept[:, 1:]
    if (cuts & ~mask).any():
        return f"kept has ids at token {np.argmax(cuts & ~mask)}, which was not sampled"
    rising = (after > before) | (after == -1)
    if not rising.all() or ((before == -1) & (after >= 0)).any():
        return "kept ids of a token must ascend, with −1 behind them alone"
    lacks = cuts & ~(kept == tokens[:, None]).any(axis=1)
    if lacks.any():
        at = int(np.argmax(lacks))
        return f"token {tokens[at]} at {at} is none of the {(kept[at] >= 0).sum()} kept ids"
    return ""


def turns_problem(
    turns: Sequence[Turn], prompt_length: int, mask: np.ndarray, reward: float | None
) -> str:
    """The fault in the turns of a trajectory, in words; "" for none.

    Args:
      turns: of one trajectory, at least one.
      prompt_length: P.
      mask: bool [T], True on sampled tokens.
      reward: of the whole trajectory; None where it is not judged.
    """
    ends = [prompt_length, *(turn.end for turn in turns)]
    if any(a >= b for a, b in itertools.pairwise(ends)) or ends[-1] > len(mask):
        return f"turns must end one after another in ({prompt_length}, {len(mask)}], got {ends[1:]}"
    if mask[ends[-1] :].any():
        return f"the last turn ends at {ends[-1]}, and a token after it was sampled"
    total = math.fsum(turn.reward for turn in turns)  # NaN or infinite where one is.
    if reward is None or not math.isclose(total, reward, rel_tol=1e-6, abs_tol=1e-6):
        return f"the rewards of turns must sum to the reward {reward!r:.80}, got {total}"
    return ""


_DTYPES = {
    "tokens": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "mask": np.dtype(np.bool_),
}


def _is_finite(number: float | None) -> bool:
    return isinstance(number, numbers.Real) and math.isfinite(number)


def _refuse(message: str) -> NoReturn:
    raise InvalidTrajectoryError(message)

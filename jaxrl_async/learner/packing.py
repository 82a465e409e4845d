"""Packing: groups and their advantages become microbatches of one static shape. NumPy, on the host.

The layout is a pure function of the lengths, so hosts that know only the lengths agree on it. Imports no JAX.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxrl_async.config.settings import Learner
from jaxrl_async.records import Share
from jaxrl_async.types import NO_RECORD, NOT_SAMPLED, Batch, Group, Record, Trajectory


class Packer:
    """One process's rows of a step's microbatches, made while its chunks arrive.

    Trajectories lie in rows, several to a row. Those that fill no microbatch wait for the next groups, so small chunks
    cost no padding. With the policy "in_order" one process makes the same microbatches for any cut into chunks.

    All processes make the same number of microbatches per call. Each computes that number from the lengths of all
    groups, and fills up with padding at the end.
    """

    def __init__(
        self,
        learner: Learner,
        *,
        process: int = 0,
        record: Record = NO_RECORD,
        by_prompt: bool = False,
    ):
        """Starts with no waiting trajectory.

        Args:
          learner: microbatch_rows (over all processes), row_tokens, packing, shared_prompts and num_processes are read.
          process: index of this process, in [0, num_processes).
          record: the choices that batches have.
          by_prompt: all samples of a group count as one, as of reduction "prompt_mean".
        """
        self._record, self._by_prompt = record, by_prompt
        self._process, self._num_processes = process, learner.num_processes
        self._own_rows = learner.microbatch_rows // learner.num_processes
        self._layout = {
            "row_tokens": learner.row_tokens,
            "policy": learner.packing,
            "shared_prompts": learner.shared_prompts,
        }
        # Waiting trajectories of each process.
        self._waiting: list[list[_Piece]] = [[] for _ in range(learner.num_processes)]

    def __call__(
        self, groups: Sequence[Group], advantages: np.ndarray, *, last: bool
    ) -> list[Batch]:
        """Makes the microbatches that are full.

        Args:
          groups: in lease order; those of other processes need no tokens.
          advantages: float32 [N, G], one per sample of each group, or [N, G, K], one per turn; all rows of a sample
            have its advantage.
          last: whether these groups complete the minibatch; then no trajectory waits.

        Returns:
          Batches of shape [microbatch_rows / num_processes, T]; empty rows fill up the last one.

        Raises:
          ValueError: a trajectory longer than row_tokens, advantages that do not match the groups or their samples,
            or, with shared prompts, a group with several prompts.
        """
        _check_advantages(advantages, len(groups), "groups")
        layouts = []
        for i, waiting in enumerate(self._waiting):
            share = Share(i, self._num_processes).of_minibatch(len(groups))
            pieces = [
                piece
                for j in share
                for piece in _pieces(groups[j], advantages[j], by_prompt=self._by_prompt)
            ]
            if i == self._process and self._layout["shared_prompts"]:
                _check_prompts(pieces)
            waiting += pieces
            lengths = [[len(t) for t in piece.trajectories] for piece in waiting]
            prompt_lengths = [piece.trajectories[0].prompt_length for piece in waiting]
            layouts.append(lay_out(lengths, prompt_lengths, **self._layout))
        rows = [int(segments.row.max(initial=-1)) + 1 for segments in layouts]
        if last:
            count = max(-(-r // self._own_rows) for r in rows)
        else:
            still_open = self._layout["policy"] == "in_order"  # The last row may grow.
            count = min(max(0, r - still_open) // self._own_rows for r in rows)
        own, row_tokens = self._waiting[self._process], self._layout["row_tokens"]
        batches = []
        if own and count:
            layout = layouts[self._process]
            whole = _fill(own, layout, self._own_rows, row_tokens, self._record)
            batches = whole[:count]
        batches += [self.padding()] * (count - len(batches))
        for i, segments in enumerate(layouts):
            self._waiting[i] = _from_row(count * self._own_rows, self._waiting[i], segments)
        return batches

    def padding(self) -> Batch:
        """A microbatch of this process without a token."""
        return empty_batch(self._own_rows, self._layout["row_tokens"], self._record)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Trajectories of a group that have one prompt."""

    prompt_index: int
    trajectories: Sequence[Trajectory]
    advantages: np.ndarray  # float32 [n, K], by trajectory and turn
    sample_share: np.ndarray  # float32 [n], see `Batch`

    def of(self, kept: Sequence[int]) -> "_Piece":
        """Some of its trajectories, by their places."""
        trajectories = [self.trajectories[i] for i in kept]
        arrays = (self.advantages[kept], self.sample_share[kept])
        return _Piece(self.prompt_index, trajectories, *arrays)


def _pieces(group, advantages, *, by_prompt):
    """The first rows of all samples, which have the group's prompt; then every further row by itself.

    Depends on the numbers of rows alone, but for the shares, which need the masks.
    """
    samples = group.samples
    _check_advantages(advantages, len(samples), "samples")
    nums = [len(rows) for rows in samples]
    shares = [_shares(rows) for rows in ([group.trajectories] if by_prompt else samples)]
    advantages = np.repeat(advantages.reshape(len(samples), -1), nums, axis=0)
    whole = _Piece(group.prompt_index, group.trajectories, advantages, np.concatenate(shares))
    firsts = np.cumsum(nums) - nums
    further = np.setdiff1d(np.arange(len(group.trajectories)), firsts)
    return [whole.of(firsts), *(whole.of([row]) for row in further)]


def _shares(rows):
    """float32 [n]: of a sample's sampled tokens, those in each of its rows."""
    if len(rows) == 1:
        return np.ones(1, np.float32)
    sampled = np.array([row.num_sampled for row in rows], np.float32)
    return sampled / max(sampled.sum(), 1)


def _fill(pieces, segments, microbatch_rows, row_tokens, record):
    """Microbatches of the pieces' trajectories with a layout."""
    trajectories = [t for piece in pieces for t in piece.trajectories]
    advantages = _joined([piece.advantages for piece in pieces])
    shares = np.concatenate([piece.sample_share for piece in pieces])
    num_microbatches = -(-(segments.row.max() + 1) // microbatch_rows)
    whole = empty_batch(num_microbatches * microbatch_rows, row_tokens, record)

    row, start, length, prefix = segments.row, segments.column, segments.length, segments.prefix
    ids = _ordinals_in_row(row, start)
    # A completion's first token is predicted from the prompt's last column. The first token of a segment
    # that continues none has no predictor: its own column stands in and never counts.
    first_predictor = np.where(prefix >= 0, start[prefix] + length[prefix] - 1, start)

    segment = np.repeat(np.arange(len(length)), length)  # of each placed token
    nth = np.arange(len(segment)) - (np.cumsum(length) - length)[segment]  # in its segment, from 0
    position = segments.begin[segment] + nth
    column = start[segment] + nth
    lengths = np.array([len(t) for t in trajectories])
    source = (np.cumsum(lengths) - lengths)[segments.trajectory][segment] + position
    turn = 0
    if advantages.shape[1] > 1:
        turn = np.concatenate([_turn_of_each_token(t) for t in trajectories])[source]
    place = row[segment] * row_tokens + column
    for name in ("routes", "kept"):
        if (array := getattr(whole, name)) is not None:
            choices = [getattr(t.choices, name) for t in trajectories]
            _fill_choices(array, choices, segments, place)
    if whole.teacher is not None:
        taught = [t.choices.teacher for t in trajectories]
        if any(one is None for one in taught):
            raise ValueError(
                "a trajectory has no log-probs of loss.teacher, which was no server when it was sampled"
            )
        whole.teacher.reshape(-1)[place] = np.concatenate(taught)[source]
    for array, values in (
        (whole.tokens, np.concatenate([t.tokens for t in trajectories])[source]),
        (whole.positions, position),
        (whole.segment_ids, ids[segment]),
        (whole.prefix_ids, np.where(prefix >= 0, ids[prefix], 0)[segment]),
        (whole.predictor_index, np.where(nth > 0, column - 1, first_predictor[segment])),
        (whole.mask, np.concatenate([t.mask for t in trajectories])[source]),
        (whole.behavior_logprobs, np.concatenate([t.logprobs for t in trajectories])[source]),
        (whole.token_versions, np.concatenate([t.versions for t in trajectories])[source]),
        (whole.advantages, advantages[segments.trajectory[segment], turn]),
        (whole.sample_share, shares[segments.trajectory][segment]),
    ):
        array.reshape(-1)[place] = values
    return [
        whole.rows(slice(i, i + microbatch_rows))
        for i in range(0, len(whole.tokens), microbatch_rows)
    ]


def _fill_choices(array, choices, segments, place):
    """Writes the choices of each trajectory; where one has none, the array keeps its padding.

    A shared prompt has those of the trajectory that its segment is of, its group's first.
    """
    flat, first = array.reshape(-1, *array.shape[2:]), 0
    columns = (segments.trajectory, segments.begin, segments.length)
    for trajectory, begin, length in zip(*(x.tolist() for x in columns), strict=True):
        if (found := choices[trajectory]) is not None:
            values = found[begin : begin + length]
            flat[place[first : first + length], : values.shape[1]] = values
        first += length


@dataclasses.dataclass(frozen=True)
class Segments:
    """Slices of trajectories and their places; each slice lies in one row."""

    trajectory: np.ndarray  # int [n], from 0 over all groups; for a shared prompt, one of its group
    begin: np.ndarray  # int [n], first token of the slice within its trajectory
    length: np.ndarray  # int [n], ≥ 1
    row: np.ndarray  # int [n], from 0 without gaps
    column: np.ndarray  # int [n], of the slice's first token
    prefix: np.ndarray  # int [n], index of the segment that it continues, in its row; −1 for none


def lay_out(
    lengths: Sequence[Sequence[int]],
    prompt_lengths: Sequence[int],
    *,
    row_tokens: int,
    policy: str,
    shared_prompts: bool,
) -> Segments:
    """Cuts trajectories into segments and places them in rows.

    With shared prompts a row holds [prompt | completion | completion …]: the prompt once, as its own segment, before
    all completions of its group. A group too long for a row is divided into parts, each with as many completions in
    order as fit and a copy of the prompt. The policy places whole parts. Without shared prompts a segment is a
    trajectory.

    Args:
      lengths: tokens of each trajectory of each group, or of a part of one with one prompt; prompt included.
      prompt_lengths: tokens of the prompt of each.
      row_tokens, policy: as in `assign_rows`, which raises for them.
    """
    if shared_prompts:
        slices = _shared_slices(lengths, prompt_lengths, row_tokens)
    else:
        slices = [(i, 0, length, i) for i, length in enumerate(itertools.chain(*lengths))]
    trajectory, begin, length, part = np.array(slices, np.int64).reshape(-1, 4).T
    rows, starts = assign_rows(
        np.bincount(part, length).astype(int), row_tokens=row_tokens, policy=policy
    )
    head = np.searchsorted(part, part)  # Of the part's segments, the first.
    end = np.cumsum(length)
    return Segments(
        trajectory=trajectory,
        begin=begin,
        length=length,
        row=rows[part],
        column=starts[part] + (end - length) - (end - length)[head],
        prefix=np.where(begin > 0, head, -1),
    )


def assign_rows(
    lengths: np.ndarray, *, row_tokens: int, policy: str
) -> tuple[np.ndarray, np.ndarray]:
    """Assigns a row and a first column to each sequence.

        "in_order"   next-fit: each sequence after the one before it, else in a new row
        "first_fit"  first-fit decreasing: longest first, each into the first row with room
        "fewest"     longest first, each into the row with room that holds the fewest sequences, among
                     equals the emptiest; a new row only if none has room

    "fewest" is the dynamic batching of "AReaL", Fu et al., arXiv 2505.24298, Algorithm 1, at k_min = 1.
    More rows than needed do not help here: a microbatch has a static number of rows.

    Args:
      lengths: int [n], in [1, row_tokens].
      row_tokens: capacity of a row.
      policy: one of the three.

    Returns:
      int rows [n], from 0 without gaps, and int columns [n].

    Raises:
      ValueError: a length beyond row_tokens, or an unknown policy.
    """
    assign = {"in_order": _next_fit, "first_fit": _first_fit_decreasing, "fewest": _fewest_first}
    if policy not in assign:
        raise ValueError(f"packing must be one of {', '.join(assign)}; got {policy!r}")
    if np.max(lengths, initial=0) > row_tokens:
        raise ValueError(
            f"a trajectory of {np.max(lengths)} tokens exceeds row_tokens {row_tokens}"
        )
    return assign[policy](lengths, row_tokens)


def empty_batch(microbatch_rows: int, row_tokens: int, record: Record = NO_RECORD) -> Batch:
    """A microbatch of padding, for a process with fewer rows than the others; with the choices of a record."""
    shape = (microbatch_rows, row_tokens)
    routes = (*shape, record.num_layers, record.experts_per_token)
    unknown = np.iinfo(record.route_dtype).max
    return Batch(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        prefix_ids=np.zeros(shape, np.int32),
        predictor_index=np.zeros(shape, np.int32),
        mask=np.zeros(shape, np.bool_),
        behavior_logprobs=np.zeros(shape, np.float32),
        token_versions=np.full(shape, NOT_SAMPLED, np.int32),
        advantages=np.zeros(shape, np.float32),
        sample_share=np.zeros(shape, np.float32),
        routes=np.full(routes, unknown, record.route_dtype) if record.num_layers else None,
        kept=np.full((*shape, record.max_kept), -1, np.int32) if record.max_kept else None,
        teacher=np.zeros(shape, np.float32) if record.has_teacher else None,
    )


def split_minibatches(groups: Sequence[Group], num_minibatches: int) -> list[Sequence[Group]]:
    """Consecutive slices of equal size, in lease order.

    Raises:
      ValueError: num_minibatches does not divide the number of groups.
    """
    size, rest = divmod(len(groups), num_minibatches)
    if rest:
        raise ValueError(f"num_minibatches {num_minibatches} does not divide {len(groups)} groups")
    return [groups[i : i + size] for i in range(0, len(groups), size)]


def kept_metrics(batches: Sequence[Batch]) -> dict[str, float]:
    """The metrics of the kept ids of sampled tokens; {} where nothing is cut off."""
    sizes = [(b.kept[b.mask] >= 0).sum(axis=1) for b in batches if b.kept is not None]
    if not sum(map(len, sizes)):
        return {}
    found, bound = np.concatenate(sizes), batches[0].kept.shape[-1]
    return {"rollout/kept_mean": found.mean(), "rollout/kept_bound_share": (found == bound).mean()}


def padding_share(batches: Sequence[Batch]) -> float:
    """Share of padding in the columns of the batches, in [0, 1]; 0 for no batches."""
    total = sum(batch.segment_ids.size for batch in batches)
    used = sum(np.count_nonzero(batch.segment_ids) for batch in batches)
    return 1 - used / total if total else 0.0


def _from_row(first, pieces, segments):
    """The pieces, cut to the trajectories whose segments lie in a row ≥ first."""
    continued = np.isin(np.arange(len(segments.row)), segments.prefix)
    # A shared prompt belongs to each of its completions.
    rest = set(segments.trajectory[(segments.row >= first) & ~continued].tolist())
    found, index = [], 0
    for piece in pieces:
        kept = [i for i in range(len(piece.trajectories)) if index + i in rest]
        index += len(piece.trajectories)
        if kept:
            found.append(piece.of(kept))
    return found


def _turn_of_each_token(trajectory):
    """int [T]: from 0; that of the last turn after it."""
    ends = [turn.end for turn in trajectory.turns[:-1]]
    return np.searchsorted(ends, np.arange(len(trajectory)), side="right")


def _joined(advantages):
    """[n, K] of several pieces as one array [n, K] of the largest K; no trajectory has the turns that are added."""
    num_turns = max(a.shape[1] for a in advantages)
    return np.concatenate([np.pad(a, ((0, 0), (0, num_turns - a.shape[1]))) for a in advantages])


def _check_advantages(advantages, count, of):
    if len(advantages) != count:
        raise ValueError(f"{len(advantages)} advantages for {count} {of}")


def _check_prompts(pieces):
    for piece in pieces:
        first = piece.trajectories[0]
        for t in piece.trajectories:
            if not np.array_equal(t.tokens[: t.prompt_length], first.tokens[: first.prompt_length]):
                raise ValueError(
                    f"shared_prompts: the group with prompt_index {piece.prompt_index} has different prompts, "
                    f"of {first.prompt_length} and {t.prompt_length} tokens"
                )


def _shared_slices(lengths, prompt_lengths, row_tokens):
    """(trajectory, begin, length, part) of each segment; a part is a prompt and the completions after it."""
    slices, first, part = [], 0, 0
    for of_group, prompt in zip(lengths, prompt_lengths, strict=True):
        completions = np.array(of_group) - prompt
        room, _ = _next_fit(completions, row_tokens - prompt)
        for one in np.unique(room):
            slices.append((first, 0, prompt, part))
            # A trajectory without a completion is only its prompt.
            fit = np.flatnonzero((room == one) & (completions > 0))
            slices += [(first + i, prompt, completions[i], part) for i in fit]
            part += 1
        first += len(of_group)
    return slices


def _next_fit(lengths, row_tokens):
    rows, starts = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    row, used = 0, 0
    for i, length in enumerate(lengths.tolist()):
        if used + length > row_tokens:
            row, used = row + 1, 0
        rows[i], starts[i] = row, used
        used += length
    return rows, starts


def _first_fit_decreasing(lengths, row_tokens):
    rows, starts = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    free = np.full(len(lengths), row_tokens)  # One row each is always enough.
    # Within a run of equal lengths, rows before `first` have no room: each run searches the rows once.
    order = np.argsort(-lengths, kind="stable")
    for length, run in itertools.groupby(order.tolist(), key=lengths.__getitem__):
        first = 0
        for i in run:
            first += int(np.argmax(free[first:] >= length))
            rows[i], starts[i] = first, row_tokens - free[first]
            free[first] -= length
    return rows, starts


def _fewest_first(lengths, row_tokens):
    rows, starts = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    used, rank = np.zeros((2, len(lengths)), np.int64)  # One row each is always enough.
    num_rows = 0
    order = np.argsort(-lengths, kind="stable")
    for i, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        with_room = np.flatnonzero(used[:num_rows] <= row_tokens - length)
        row = with_room[np.argmin(rank[with_room])] if len(with_room) else num_rows
        num_rows = max(num_rows, row + 1)
        rows[i], starts[i] = row, used[row]
        used[row] += length
        rank[row] += row_tokens + 1 + length  # By number of sequences, then by tokens.
    return rows, starts


def _ordinals_in_row(rows, starts):
    """Segment ids: from 1 in each row, by column."""
    order = np.lexsort((starts, rows))
    sorted_rows = rows[order]
    first_of_row = np.searchsorted(sorted_rows, sorted_rows)
    ordinals = np.empty(len(rows), np.int64)
    ordinals[order] = np.arange(len(rows)) - first_of_row + 1
    return ordinals

"""Conversion of groups and of the queue's records to and from protobuf, and checks of received messages.

A group's arrays are raw little-endian bytes, its trajectories end to end, and are read without a copy. Independent of
sockets and of the use of a group.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence, Sized
from typing import Any, cast

import numpy as np

from jaxrl_async import types
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.records import (
    SERVER_STATES,
    Permit,
    QueueStatus,
    ResumePoint,
    RoleStatus,
    ServerRecord,
    Wait,
)
from jaxrl_async.types import (
    KEPT_COUNT_DTYPE,
    NO_RECORD,
    NOT_SAMPLED,
    Choices,
    Group,
    InvalidTrajectoryError,
    Record,
    Trajectory,
    Turn,
)

# Bounds on the messages of a peer, besides queue.max_message_bytes.
MAX_NAME_CHARS = 256  # of a role, a worker, a reason, an address
MAX_TEXT_CHARS = 2000  # of a detail, and of either end of a wait, which is cut before it is sent
MAX_WAITS = 64  # of one report
MAX_ENTRIES = 65_536  # permits, or lengths, in one message
MAX_SERVERS = 4096
MAX_LOAD = 1 << 40  # tokens of one worker on one server
MAX_REASONS = 64  # of a resume point, and stages of a role's time
MAX_VERSION = 2**31 - 1  # of weights, an int32 per token; also of steps
MAX_COUNT = 2**53


def encode_group(group: Group) -> pb.Group:
    """Encodes a group."""
    rows, firsts = group.trajectories, [sample[0] for sample in group.samples]
    names = sorted({name for t in firsts for name in t.components})
    turns = [turn for t in rows for turn in t.turns]
    return pb.Group(
        permit=encode_permit(Permit(group.prompt_index, group.attempt)),
        lengths=[len(t) for t in rows],
        prompt_lengths=[t.prompt_length for t in rows],
        rewards=[cast(float, t.reward) for t in firsts],
        finish_reasons=[t.finish_reason for t in rows],
        component_names=names,
        components=[t.components.get(name, math.nan) for t in firsts for name in names],
        num_turns=[len(t.turns) for t in rows] if turns else (),
        turn_ends=[turn.end for turn in turns],
        turn_rewards=[turn.reward for turn in turns],
        num_rows=group.num_rows,
        **_encode_choices(rows),
        **{name: _to_bytes([getattr(t, name) for t in rows], dtype) for name, dtype in _ARRAYS},
    )


def decode_group(message: pb.Group) -> Group:
    """Decodes a group; its arrays are read-only views of the message's bytes.

    Raises:
      InvalidTrajectoryError: a size contradicts the lengths, or a mask byte is not 0 or 1.
    """
    lengths = list(message.lengths)
    fields = _fields(message)
    arrays = {name: _from_bytes(message, name, dtype, lengths) for name, dtype in _ARRAYS}
    choices = _decode_choices(message, lengths)
    trajectories, start = [], 0
    for length, of_row, own in zip(lengths, fields, choices, strict=True):
        row = {name: array[start : start + length] for name, array in arrays.items()}
        start += length
        trajectories.append(Trajectory(**row, **of_row, choices=own))
    return _group(message, trajectories)


def encode_outline(message: pb.Group) -> pb.Group:
    """Drops the arrays of a group's message, for a learner process that does not train on it."""
    arrays = {name for name, _ in _ARRAYS} | {*_CHOICES}
    return pb.Group(**{f.name: value for f, value in message.ListFields() if f.name not in arrays})


def decode_outline(message: pb.Group) -> Group:
    """Decodes a message without arrays: lengths, rewards and finish reasons are true, no token is sampled.

    The arrays are broadcast, and take no memory.
    """
    rows = []
    for length, of_row in zip(message.lengths, _fields(message), strict=True):
        row = {name: np.broadcast_to(np.zeros((), dtype), length) for name, dtype in _ARRAYS}
        row["mask"] = row["mask"].view(np.bool_)
        row["versions"] = np.broadcast_to(np.int32(NOT_SAMPLED), length)
        rows.append(Trajectory(**row, **of_row))
    return _group(message, rows)


def check_group(
    group: Group, *, group_size: int, vocab_size: int, max_tokens: int, record: Record = NO_RECORD
) -> None:
    """Checks the tokens, log-probs, versions, masks and rewards of a group that enters the queue.

    Args:
      group: decoded, so that its sizes agree.
      group_size: G, samples per group.
      vocab_size: token ids must lie in [0, vocab_size).
      max_tokens: bound on a trajectory's length.
      record: the choices that the run records.

    Raises:
      InvalidTrajectoryError: names the group, the trajectory, the field, the value and the bound.
    """
    samples, where = group.samples, f"prompt_index {group.prompt_index}"
    if len(samples) != group_size:
        _refuse(f"{where}: a group has {group_size} samples, got {len(samples)}")
    for number, row in enumerate(group.trajectories):
        try:
            bounds = {"vocab_size": vocab_size, "max_tokens": max_tokens, "record": record}
            types.check_trajectory(row, **bounds)
        except InvalidTrajectoryError as error:
            raise InvalidTrajectoryError(f"{where}, trajectory {number}: {error}") from error
    for number, rows in enumerate(samples):
        if not np.array_equal(_prompt(rows[0]), _prompt(samples[0][0])):
            _refuse(f"{where}: sample {number} has another prompt than sample 0")
        if len(rows) > 1 and any(row.turns for row in rows):
            _refuse(f"{where}: sample {number} has {len(rows)} rows, and turns of its own rewards")


def check_message(
    message: pb.Group,
    *,
    group_size: int,
    vocab_size: int,
    max_tokens: int,
    record: Record = NO_RECORD,
) -> None:
    """Checks a group's message like `check_group`: all trajectories at once, one by one only to name an error.

    Raises:
      InvalidTrajectoryError: as `check_outline`, `decode_group` and `check_group`.
    """
    check_outline(message, group_size=group_size, max_tokens=max_tokens)
    raw = message.kept_counts
    counts = np.frombuffer(raw[: len(raw) // 2 * 2], KEPT_COUNT_DTYPE)
    if (most := int(counts.max(initial=0))) > record.max_kept:  # Before memory is taken for them.
        where = f"prompt_index {message.permit.prompt_index}"
        _refuse(f"{where}: a token has {most} kept ids, the run's bound is {record.max_kept}")
    if not _is_sound(message, vocab_size, record):
        bounds = {"group_size": group_size, "vocab_size": vocab_size, "max_tokens": max_tokens}
        check_group(decode_group(message), **bounds, record=record)


def check_outline(message: pb.Group, *, group_size: int, max_tokens: int) -> None:
    """Checks the numbers of samples, rows and tokens that a group's message states, before it is decoded.

    Raises:
      InvalidTrajectoryError: names the group, the value and the bound; see `check_group`.
    """
    where = f"prompt_index {message.permit.prompt_index}"
    nums = message.num_rows
    if (found := len(nums or message.lengths)) != group_size:
        _refuse(f"{where}: a group has {group_size} samples, got {found}")
    for number, num in enumerate(nums):
        if not 1 <= num <= types.MAX_ROWS:
            _refuse(f"{where}, sample {number}: {num} rows are outside [1, {types.MAX_ROWS}]")
    _num_rows(message)
    for number, length in enumerate(message.lengths):
        if not 0 < length <= max_tokens:
            _refuse(f"{where}, trajectory {number}: length {length} is outside [1, {max_tokens}]")
    for reason in message.finish_reasons:
        _check_text("finish_reason", reason, MAX_NAME_CHARS)
    names, values = message.component_names, message.components
    problem = types.component_problem(dict.fromkeys(names, 0.0))
    if len(set(names)) < len(names):
        problem = f"component_names {list(names)} has a name twice"
    if any(map(math.isinf, values)):
        problem = "a component of a reward is infinite"
    if problem:
        _refuse(f"{where}: {problem}")
    _components(message)
    _turns(message)


def versions_of(message: pb.Group) -> tuple[int, int]:
    """The oldest and the newest version that sampled a token of a checked group."""
    versions = np.frombuffer(message.versions, "<i4")
    sampled = versions[versions > NOT_SAMPLED]
    if not sampled.size:
        return MAX_VERSION, 0
    return int(sampled.min()), int(sampled.max())


def completion_lengths(message: pb.Group) -> list[int]:
    """Tokens after the prompt [G], of each sample of a checked group: of all its rows together."""
    pairs = zip(message.lengths, message.prompt_lengths, strict=True)
    lengths = iter([length - prompt for length, prompt in pairs])
    return [sum(itertools.islice(lengths, num)) for num in _num_rows(message)]


# Checks of requests. Each raises ValueError with the field, the value and the bound.


def check_admit(message: pb.AdmitRequest) -> None:
    """Checks the sizes of a request for permits."""
    _check(message, worker=MAX_NAME_CHARS, instance=MAX_NAME_CHARS, working_on=MAX_ENTRIES)


def check_return(message: pb.ReturnRequest) -> None:
    """Checks the sizes of a return."""
    bounds = {"detail": MAX_TEXT_CHARS, "completion_tokens": MAX_ENTRIES}
    _check(message, reason=MAX_NAME_CHARS, **bounds)


def check_begin(message: pb.BeginRequest) -> None:
    """Checks the size of a learner's nonce."""
    if not message.nonce:
        raise ValueError("nonce is empty: a learner gives one of its own")
    _check(message, nonce=MAX_NAME_CHARS)


def check_publish(message: pb.PublishRequest) -> None:
    """Checks the sizes of a publication: of its table of servers and its resume point."""
    _check_number("version", message.version, MAX_VERSION)
    _check_size("servers", message.servers, MAX_SERVERS)
    position = message.position
    _check_number("position.step", position.step, MAX_VERSION)
    _check_number("position.frontier", position.frontier, MAX_COUNT)
    _check_size("position.outstanding", position.outstanding, MAX_ENTRIES)
    for permit in position.outstanding:
        _check_number("position.outstanding", permit.prompt_index, MAX_COUNT)
    for name in ("retired", "returned"):
        counts = getattr(position, name)
        _check_size(f"position.{name}", counts, MAX_REASONS)
        for reason, count in counts.items():
            _check_text(f"a reason of position.{name}", reason, MAX_NAME_CHARS)
            _check_number(f"position.{name}", count, MAX_COUNT)


def check_report(message: pb.RoleReport) -> None:
    """Checks the sizes of a role's report."""
    _check(message, role=MAX_NAME_CHARS, waits=MAX_WAITS, secs=MAX_REASONS)
    for wait in message.waits:
        _check_text("waits.what", wait.what, MAX_TEXT_CHARS)
        _check_text("waits.on", wait.on, MAX_TEXT_CHARS)
        _check_secs("a wait", wait.secs)
    for what, secs in message.secs.items():
        _check_text("a key of secs", what, MAX_NAME_CHARS)
        _check_secs(repr(what), secs)
    _check(message, failure=MAX_TEXT_CHARS, leaving=MAX_NAME_CHARS, loads=MAX_SERVERS)
    for address, load in message.loads.items():
        _check_text("an address of loads", address, MAX_NAME_CHARS)
        if load > MAX_LOAD:
            raise ValueError(f"the load of {address!r:.80} must be ≤ {MAX_LOAD} tokens, got {load}")


# Records and messages have the same fields. A field that is None is absent.


def encode_permit(permit: Permit) -> pb.Permit:
    return pb.Permit(prompt_index=permit.prompt_index, attempt=permit.attempt)


def decode_permit(message: pb.Permit) -> Permit:
    return Permit(message.prompt_index, message.attempt)


def encode_resume_point(resume_point: ResumePoint) -> pb.Position:
    fields: dict[str, Any] = dict(vars(resume_point))
    fields["outstanding"] = [encode_permit(p) for p in resume_point.outstanding]
    return pb.Position(**fields)


def decode_resume_point(message: pb.Position) -> ResumePoint:
    outstanding = tuple(decode_permit(p) for p in message.outstanding)
    counts = dict(message.retired), dict(message.returned)
    return ResumePoint(message.step, message.frontier, outstanding, *counts)


def encode_servers(servers: Sequence[ServerRecord]) -> list[pb.ServerRecord]:
    return [pb.ServerRecord(**vars(record)) for record in servers]


def decode_servers(messages: Sequence[pb.ServerRecord]) -> tuple[ServerRecord, ...]:
    """Decodes a table of servers.

    Raises:
      ValueError: a state is not one of SERVER_STATES, or a speed is not finite and > 0.
    """
    for message in messages:
        _check_text("the address of a server", message.address, MAX_NAME_CHARS)
        where = f"server {message.address}"
        if message.state not in SERVER_STATES:
            known = ", ".join(SERVER_STATES)
            raise ValueError(f"{where}: state {message.state!r:.80} is none of {known}")
        if not 0 <= message.speed < math.inf:
            raise ValueError(f"{where}: speed must be finite and > 0, got {message.speed}")
    return tuple(
        ServerRecord(m.address, m.state, _optional(m, "version"), m.speed or 1.0, m.load)
        for m in messages
    )


def encode_status(status: QueueStatus) -> pb.StatusReply:
    roles: list[dict[str, Any]] = [
        vars(role) | {"waits": encode_waits(role.waits)} for role in status.roles
    ]
    fields: dict[str, Any] = vars(status) | {
        "roles": [pb.RoleStatus(**role) for role in roles],
        "servers": encode_servers(status.servers),
    }
    return pb.StatusReply(**fields)


def encode_waits(waits: Sequence[Wait]) -> list[pb.Wait]:
    return [
        pb.Wait(what=w.what[:MAX_TEXT_CHARS], on=w.on[:MAX_TEXT_CHARS], secs=w.secs) for w in waits
    ]


def decode_waits(messages: Sequence[pb.Wait]) -> tuple[Wait, ...]:
    return tuple(Wait(m.what, m.on, m.secs) for m in messages)


def decode_status(message: pb.StatusReply) -> QueueStatus:
    fields = dataclasses.fields(QueueStatus)
    values: dict[str, Any] = {field.name: getattr(message, field.name) for field in fields}
    values |= {name: _optional(message, name) for name in ("v_pub", "last_push_age_secs")}
    values |= {name: dict(values[name]) for name in ("returned", "retired", "lengths", "details")}
    roles = tuple(
        RoleStatus(r.role, r.silent_secs, decode_waits(r.waits), dict(r.secs))
        for r in message.roles
    )
    servers, waits = decode_servers(message.servers), tuple(message.waits)
    return QueueStatus(**values | {"roles": roles, "servers": servers, "waits": waits})


_CHOICES = ("routes", "route_sizes", "kept_counts", "kept", "teacher")
_ARRAYS = (("tokens", "<i4"), ("logprobs", "<f4"), ("versions", "<i4"), ("mask", "|u1"))


def _to_bytes(rows: list[np.ndarray], dtype: str) -> bytes:
    return np.concatenate(rows).astype(dtype, copy=False).tobytes() if rows else b""


def _from_bytes(message: pb.Group, name: str, dtype: str, lengths: list[int]) -> np.ndarray:
    raw, total = getattr(message, name), sum(lengths)
    size = np.dtype(dtype).itemsize
    if len(raw) != size * total:
        _refuse(f"{name} has {len(raw)} bytes, {total} tokens of {size} bytes need {size * total}")
    array = np.frombuffer(raw, dtype)
    if name == "mask":
        if total and array.max() > 1:
            _refuse(f"mask holds {array.max()}, its bytes must be 0 or 1")
        return array.view(np.bool_)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _encode_choices(rows: Sequence[Trajectory]) -> dict[str, Any]:
    """The fields of the choices of all trajectories; {} without any."""
    fields: dict[str, Any] = {}
    if sizes := {
        (*r.shape[1:], r.dtype.itemsize) for row in rows if (r := row.choices.routes) is not None
    }:
        if len(sizes) > 1:
            _refuse(f"the routes of a group have several sizes, {sorted(sizes)}")
        ((num_layers, num_experts, size),) = sizes
        none = np.empty((0, num_layers, num_experts), f"<u{size}")
        found = [row.choices.routes if row.choices.routes is not None else none for row in rows]
        routes = [types.padded_routes(r, len(row)) for r, row in zip(found, rows, strict=True)]
        fields = {"routes": _to_bytes(cast(Any, routes), f"<u{size}")}
        fields["route_sizes"] = (num_layers, num_experts, size)
    starts = itertools.accumulate(map(len, rows), initial=0)
    parts = zip(starts, (row.choices.kept for row in rows), strict=False)
    if (kept := types.spread_kept(sum(map(len, rows)), parts)) is not None:
        is_id = kept >= 0
        fields["kept_counts"] = is_id.sum(axis=1).astype(KEPT_COUNT_DTYPE).tobytes()
        fields["kept"] = kept[is_id].astype("<i4", copy=False).tobytes()
    taught = [row.choices.teacher for row in rows if row.choices.teacher is not None]
    if taught:
        fields["teacher"] = _to_bytes(taught, "<f4")
    return fields


def _decode_choices(message: pb.Group, lengths: list[int]) -> list[Choices]:
    """The choices of each trajectory."""
    total, ends = sum(lengths), list(itertools.accumulate(lengths))
    found: dict[str, list[np.ndarray]] = {}
    if raw := message.routes:  # A copy, each time.
        sizes = list(message.route_sizes)
        if len(sizes) != 3 or sizes[2] not in (1, 2) or math.prod(sizes) * total != len(raw):
            has = f"routes has {len(raw)} bytes, and route_sizes is {sizes[:4]}"
            _refuse(f"{has}: {total} tokens have layers · experts · 1 or 2 bytes each")
        routes = np.frombuffer(raw, f"<u{sizes[2]}").reshape(total, *sizes[:2])
        found["routes"] = np.split(
            routes.astype(routes.dtype.newbyteorder("="), copy=False), ends[:-1]
        )
    if message.kept_counts:
        if len(message.kept_counts) != total * KEPT_COUNT_DTYPE.itemsize:
            _refuse(f"kept_counts has {len(message.kept_counts)} bytes, {total} tokens need 2 each")
        counts = np.frombuffer(message.kept_counts, KEPT_COUNT_DTYPE).astype(int)
        if (needed := 4 * counts.sum()) != len(message.kept):
            _refuse(f"kept has {len(message.kept)} bytes, its counts need {needed}")
        kept = np.full((total, max(1, counts.max())), -1, np.int32)
        kept[np.arange(kept.shape[1]) < counts[:, None]] = np.frombuffer(message.kept, "<i4")
        found["kept"] = np.split(kept, ends[:-1])
    elif message.kept:
        _refuse(f"kept has {len(message.kept)} bytes, and there are no kept_counts")
    if message.teacher:
        found["teacher"] = np.split(_from_bytes(message, "teacher", "<f4", lengths), ends[:-1])
    return [Choices(**{name: rows[i] for name, rows in found.items()}) for i in range(len(lengths))]


def _is_sound(message: pb.Group, vocab_size: int, record: Record) -> bool:
    """Whether every row of a message passes `types.check_trajectory`; its lengths were checked before."""
    lengths, prompts, nums = list(message.lengths), message.prompt_lengths, _num_rows(message)
    rewards, reasons = message.rewards, message.finish_reasons
    if not (len(lengths) == len(prompts) == len(reasons) and len(rewards) == len(nums)):
        return False
    if not set(reasons) <= set(types.FINISH_REASONS):
        return False
    arrays = [_from_bytes(message, name, dtype, lengths) for name, dtype in _ARRAYS]
    tokens, logprobs, versions, mask = arrays
    (choices,) = _decode_choices(message, [len(tokens)])
    return bool(
        all(abs(reward) <= types.MAX_REWARD for reward in rewards)  # False with a NaN
        and 0 <= tokens.min() <= tokens.max() < vocab_size
        and -np.inf < logprobs.min() <= logprobs.max() <= 0  # False with a NaN
        and versions.min() >= NOT_SAMPLED
        and np.array_equal(versions > NOT_SAMPLED, mask)
        and not logprobs[~mask].any()
        and _prompts_agree(tokens, mask, lengths, prompts, nums)
        and _turns_are_sound(message, mask)
        and not types.choices_problem(choices, tokens, mask, vocab_size)
        and not record.problem(choices, mask)
    )


def _turns_are_sound(message: pb.Group, mask: np.ndarray) -> bool:
    """Whether the turns of every row pass `types.check_trajectory`; samples of several rows have none."""
    if not message.num_turns:
        return True
    if message.num_rows:  # One by one.
        return False
    parts = np.split(mask, np.cumsum(message.lengths)[:-1])
    fields = zip(_turns(message), message.prompt_lengths, parts, message.rewards, strict=True)
    return not any(
        t and types.turns_problem(t, length, m, reward) for t, length, m, reward in fields
    )


def _num_rows(message: pb.Group) -> Sequence[int]:
    """The number of rows of each sample."""
    nums, num = message.num_rows or [1] * len(message.lengths), len(message.lengths)
    if sum(nums) != num or 0 in nums:
        _refuse(f"num_rows {list(nums)[:8]} does not agree with {num} lengths")
    return nums


def _fields(message: pb.Group) -> list[dict[str, Any]]:
    """The fields of each trajectory, but for its arrays; the rows of a sample share its reward and components."""
    nums, num = _num_rows(message), len(message.lengths)
    for name, needed in (("prompt_lengths", num), ("rewards", len(nums)), ("finish_reasons", num)):
        if (found := len(getattr(message, name))) != needed:
            _refuse(f"{name} has {found} entries, lengths has {num} of {len(nums)} samples")
    components, turns = _components(message), _turns(message)
    sample_of = np.repeat(np.arange(len(nums)), nums).tolist()
    return [
        {
            "prompt_length": message.prompt_lengths[row],
            "reward": message.rewards[sample],
            "finish_reason": message.finish_reasons[row],
            "components": components[sample],
            "turns": turns[row],
        }
        for row, sample in enumerate(sample_of)
    ]


def _group(message: pb.Group, rows: Sequence[Trajectory]) -> Group:
    permit = message.permit
    return Group(permit.prompt_index, permit.attempt, tuple(rows), tuple(message.num_rows))


def _turns(message: pb.Group) -> list[tuple[Turn, ...]]:
    """The turns of each trajectory that have rewards of their own."""
    nums = message.num_turns or [0] * len(message.lengths)
    ends, rewards = message.turn_ends, message.turn_rewards
    if len(nums) != len(message.lengths) or not sum(nums) == len(ends) == len(rewards):
        _refuse(
            f"num_turns {list(nums)[:8]} of {len(message.lengths)} trajectories, {len(ends)} turn_ends and "
            f"{len(rewards)} turn_rewards do not agree"
        )
    turns = itertools.starmap(Turn, zip(ends, rewards, strict=True))
    return [tuple(itertools.islice(turns, num)) for num in nums]


def _components(message: pb.Group) -> list[dict[str, float]]:
    """The components of each sample's reward."""
    names, values, num = message.component_names, message.components, len(_num_rows(message))
    if len(values) != len(names) * num:
        _refuse(
            f"components has {len(values)} entries, {len(names)} names of {num} samples need {len(names) * num}"
        )
    if not names:
        return [{} for _ in range(num)]
    rows = (values[i : i + len(names)] for i in range(0, len(values), len(names)))
    return [
        {name: value for name, value in zip(names, row, strict=True) if not math.isnan(value)}
        for row in rows
    ]


def _prompts_agree(
    tokens: np.ndarray,
    mask: np.ndarray,
    lengths: Sequence[int],
    prompts: Sequence[int],
    nums: Sequence[int],
) -> bool:
    """Whether every prompt is part of its row, none of it was sampled, and the first rows of all samples have one."""
    starts = itertools.accumulate(lengths[:-1], initial=0)
    parts = [slice(start, start + prompt) for start, prompt in zip(starts, prompts, strict=True)]
    firsts = itertools.accumulate(nums[:-1], initial=0)
    return (
        all(1 <= p <= length for p, length in zip(prompts, lengths, strict=True))
        and not any(mask[part].any() for part in parts)
        and len({tokens[parts[first]].tobytes() for first in firsts}) == 1
    )


def _prompt(row: Trajectory) -> np.ndarray:
    return row.tokens[: row.prompt_length]


def _optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


def _check(message: Any, **bounds: int) -> None:
    """The lengths of texts and lists of a message."""
    for name, bound in bounds.items():
        value = getattr(message, name)
        (_check_text if isinstance(value, str) else _check_size)(name, value, bound)


def _check_text(name: str, text: str, bound: int) -> None:
    if len(text) > bound:
        raise ValueError(f"{name} has at most {bound} characters, got {len(text)}: {text[:40]!r}…")


def _check_size(name: str, items: Sized, bound: int) -> None:
    if len(items) > bound:
        raise ValueError(f"{name} has at most {bound} entries, got {len(items)}")


def _check_secs(what: str, secs: float) -> None:
    if not 0 <= secs < math.inf:
        raise ValueError(f"secs of {what} must be finite and ≥ 0, got {secs}")


def _check_number(name: str, value: int, bound: int) -> None:
    if not 0 <= value <= bound:
        raise ValueError(f"{name} must be in [0, {bound}], got {value}")


def _refuse(message: str):
    raise InvalidTrajectoryError(message)

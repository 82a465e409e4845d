"""Messages: a record is decoded as it was encoded, and a malformed message is named."""

import dataclasses
import importlib
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async import parts
from jaxrl_async.config.settings import Settings
from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.records import (
    Permit,
    QueueStatus,
    ResumePoint,
    RoleStatus,
    ServerRecord,
    Wait,
)
from jaxrl_async.types import (
    Choices,
    Group,
    InvalidTrajectoryError,
    Record,
    Trajectory,
    Turn,
)

BOUNDS = dict(group_size=2, vocab_size=100, max_tokens=16)


def trajectory(prompt=(1, 2), completion=(3, 4, 5), reward=0.1, finish_reason="stop") -> Trajectory:
    prompt_length, length = len(prompt), len(prompt) + len(completion)
    mask = np.arange(length) >= prompt_length
    return Trajectory(
        tokens=np.array([*prompt, *completion], np.int32),
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, 7, -1).astype(np.int32),
        mask=mask,
        prompt_length=prompt_length,
        reward=reward,
        finish_reason=finish_reason,
    )


def group() -> Group:
    return Group(
        5, 1, (trajectory(), trajectory(completion=(6,), reward=-1.5, finish_reason="length"))
    )


def assert_same(left: Group, right: Group) -> None:
    assert (left.prompt_index, left.attempt) == (right.prompt_index, right.attempt)
    for a, b in zip(left.trajectories, right.trajectories, strict=True):
        for field in dataclasses.fields(Trajectory):
            x, y = getattr(a, field.name), getattr(b, field.name)
            np.testing.assert_array_equal(x, y)
            assert getattr(x, "dtype", None) == getattr(y, "dtype", None)


def check(message: pb.Group) -> Group:
    decoded = wire.decode_group(message)
    wire.check_group(decoded, **BOUNDS)
    return decoded


def test_a_group_is_decoded_as_it_was_encoded():
    sent = wire.encode_group(group()).SerializeToString()
    assert_same(check(pb.Group.FromString(sent)), group())


def test_components_of_rewards_are_decoded_as_they_were_encoded_also_in_an_outline():
    parts = ({"short": 1.0, "words": 2.0}, {"words": 3.0})
    rows = [dataclasses.replace(trajectory(), components=part) for part in parts]
    message = wire.encode_group(Group(5, 0, tuple(rows)))
    decoded = (check(message), wire.decode_outline(wire.encode_outline(message)))
    for found in decoded:
        assert tuple(t.components for t in found.trajectories) == parts


def test_turns_are_decoded_as_they_were_encoded_also_in_an_outline():
    turns = ((Turn(3, 0.25), Turn(5, -0.15)), ())
    rows = [dataclasses.replace(trajectory(), turns=part) for part in turns]
    message = wire.encode_group(Group(5, 0, tuple(rows)))
    decoded = (check(message), wire.decode_outline(wire.encode_outline(message)))
    for found in decoded:
        assert tuple(t.turns for t in found.trajectories) == turns


RECORD = Record(num_layers=3, experts_per_token=2, num_experts=8, max_kept=2)


def with_choices(changes=(), record=RECORD) -> Group:
    """Both rows have kept ids, the first routes."""
    first, second = trajectory(), trajectory(completion=(6,))
    routes = np.arange(5 * 3 * 2).reshape(5, 3, 2).astype(record.route_dtype) % 8
    routes[-1] = np.iinfo(routes.dtype).max
    kept = np.array([[-1, -1], [-1, -1], [3, 9], [4, -1], [0, 5]], np.int32)
    rows = [
        dataclasses.replace(
            first, choices=Choices(**{"routes": routes, "kept": kept} | dict(changes))
        ),
        dataclasses.replace(second, choices=Choices(kept=np.array([[-1], [-1], [6]], np.int32))),
    ]
    return Group(5, 0, tuple(rows))


@pytest.mark.parametrize("record", [RECORD, dataclasses.replace(RECORD, num_experts=300)])
def test_choices_are_decoded_as_they_were_encoded_and_an_outline_has_none(record):
    sent = with_choices(record=record)
    message = pb.Group.FromString(wire.encode_group(sent).SerializeToString())
    wire.check_message(message, **BOUNDS, record=record)
    found, expected = wire.decode_group(message), sent.trajectories
    for row, was in zip(found.trajectories, expected, strict=True):
        width = was.choices.kept.shape[1]
        np.testing.assert_array_equal(row.choices.kept[:, :width], was.choices.kept)
        assert (row.choices.kept[:, width:] == -1).all() and row.choices.kept.dtype == np.int32
    routes = [row.choices.routes for row in found.trajectories]
    np.testing.assert_array_equal(routes[0], expected[0].choices.routes)
    assert routes[0].dtype == record.route_dtype
    assert (routes[1] == np.iinfo(record.route_dtype).max).all(), "not known"
    outline = wire.encode_outline(message)
    assert not (outline.routes or outline.kept_counts or outline.kept or outline.route_sizes)
    assert all(row.choices == Choices() for row in wire.decode_outline(outline).trajectories)
    most = record.token_bytes + parts.TOKEN_BYTES
    assert len(message.SerializeToString()) < most * 8 + 64


def test_a_group_without_choices_has_no_byte_for_them():
    assert not {f.number for f, _ in wire.encode_group(group()).ListFields()} & {16, 17, 18, 19}


@pytest.mark.parametrize(
    ("changes", "record", "words"),
    [
        ({}, Record(), "has 2 kept ids, the run's bound is 0"),
        ({"kept": None}, Record(max_kept=2), "routes are given, and the run records none"),
        ({}, dataclasses.replace(RECORD, max_kept=1), "a token has 2 kept ids, the run's bound is 1"),
        ({"kept": None}, RECORD, "trajectory 0: token 2 was sampled, and has no kept ids"),
        ({}, dataclasses.replace(RECORD, num_layers=4), "routes must be uint8 of 4 layers and 2 experts"),
        ({}, dataclasses.replace(RECORD, experts_per_token=1), "of 3 layers and 1 experts a token, got"),
        ({}, dataclasses.replace(RECORD, num_experts=300), "routes must be uint16 .* got uint8"),
        ({}, dataclasses.replace(RECORD, num_experts=7), r"expert 7 in routes is outside \[0, 7\)"),
    ],
)  # fmt: skip
def test_choices_of_another_run_are_refused_by_name(changes, record, words):
    message = wire.encode_group(with_choices(changes))
    with pytest.raises(InvalidTrajectoryError, match=words):
        wire.check_message(message, **BOUNDS, record=record)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"routes": b"123"}, "routes has 3 bytes, and route_sizes is .* 8 tokens"),
        ({"route_sizes": [3, 2, 4]}, r"route_sizes is \[3, 2, 4\]"),
        ({"route_sizes": [3]}, r"route_sizes is \[3\]"),
        ({"kept_counts": b"\0" * 5}, "kept_counts has 5 bytes, 8 tokens need 2 each"),
        ({"kept": b"1234"}, "kept has 4 bytes, its counts need 24"),
        ({"kept_counts": b""}, "kept has 24 bytes, and there are no kept_counts"),
        ({"kept_counts": b"\xff" * 16}, "a token has 65535 kept ids, the run's bound is 2"),
    ],
)
def test_choices_of_another_size_are_refused(fields, words):
    message = wire.encode_group(with_choices())
    for name, value in fields.items():
        message.ClearField(name)
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    with pytest.raises(InvalidTrajectoryError, match=words):
        wire.check_message(message, **BOUNDS, record=RECORD)


def several_rows() -> Group:
    """The first sample has two rows, the second of which has a prompt of its own."""
    parts = {"turns": 3.0}
    own = [trajectory(), trajectory(prompt=(9, 9, 8), completion=(4,), finish_reason="length")]
    rows = [dataclasses.replace(row, components=parts) for row in own]
    return Group.of_samples(5, 1, [rows, [trajectory(completion=(6,), reward=-1.5)]])


def test_rows_of_a_sample_share_its_reward_and_components_also_in_an_outline():
    message = wire.encode_group(several_rows())
    assert (list(message.num_rows), list(message.rewards)) == ([2, 1], [0.1, -1.5])
    wire.check_message(message, **BOUNDS)
    decoded = check(pb.Group.FromString(message.SerializeToString()))
    assert_same(decoded, several_rows())
    outline = wire.decode_outline(wire.encode_outline(message))
    for found in (decoded, outline):
        assert [len(rows) for rows in found.samples] == [2, 1]
        assert found.rewards.tolist() == np.float32([0.1, -1.5]).tolist()
        assert [t.prompt_length for t in found.trajectories] == [2, 3, 2]
        assert [t.components for t in found.trajectories] == [{"turns": 3.0}] * 2 + [{}]
    assert wire.completion_lengths(message) == [3 + 1, 1]


def test_a_message_from_before_there_were_rows_has_one_for_each_sample():
    samples = [[row] for row in group().trajectories]
    message = wire.encode_group(Group.of_samples(5, 1, samples))
    assert not message.num_rows  # The bytes are those of before.
    assert [len(rows) for rows in check(message).samples] == [1, 1]


def with_rows(**fields) -> pb.Group:
    message = wire.encode_group(several_rows())
    for name, values in fields.items():
        message.ClearField(name)
        getattr(message, name).extend(values)
    return message


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"num_rows": [2, 1, 1]}, "a group has 2 samples, got 3"),
        ({"num_rows": [3, 0]}, r"sample 1: 0 rows are outside \[1, 256\]"),
        ({"num_rows": [257, 1]}, r"sample 0: 257 rows are outside \[1, 256\]"),
        ({"num_rows": [2, 2]}, r"num_rows \[2, 2\] does not agree with 3 lengths"),
        ({"num_rows": []}, "a group has 2 samples, got 3"),
        ({"num_rows": [1, 2]}, "sample 1 has another prompt than sample 0"),
        ({"rewards": [1.0] * 3}, "rewards has 3 entries, lengths has 3 of 2 samples"),
        ({"prompt_lengths": [2, 4, 2]}, "trajectory 1: mask is True on a prompt token"),
        ({"prompt_lengths": [2, 5, 2]}, "trajectory 1: prompt_length 5 is outside"),
        ({"components": [1.0] * 3}, "1 names of 2 samples need 2"),
        (
            {"num_turns": [1, 0, 0], "turn_ends": [5], "turn_rewards": [0.1]},
            "sample 0 has 2 rows, and turns of its own rewards",
        ),
    ],
)
def test_rows_that_do_not_agree_are_named(fields, text):
    with pytest.raises(InvalidTrajectoryError, match=text):
        wire.check_message(with_rows(**fields), **BOUNDS)


def test_arrays_are_views_of_the_message():
    decoded = wire.decode_group(wire.encode_group(group()))
    for row in decoded.trajectories:
        for array in (row.tokens, row.logprobs, row.versions, row.mask):
            assert array.base is not None and not array.flags.writeable


def test_the_bytes_are_little_endian_and_end_to_end():
    message = wire.encode_group(group())
    assert message.tokens[:8] == b"\x01\x00\x00\x00\x02\x00\x00\x00"
    assert message.mask == bytes([0, 0, 1, 1, 1, 0, 0, 1])
    assert list(message.lengths) == [5, 3]


def test_an_empty_group_is_refused():
    with pytest.raises(InvalidTrajectoryError, match="2 samples, got 0"):
        check(wire.encode_group(Group(5, 0, ())))


def changed(**fields) -> pb.Group:
    message = wire.encode_group(group())
    for name, value in fields.items():
        message.ClearField(name)
        if isinstance(value, list):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return message


FLOATS = np.array([0, 0, -1, np.nan, -1, 0, 0, -1], "<f4").tobytes()


@pytest.mark.parametrize(
    "message, said",
    [
        (changed(tokens=b"\0" * 31), "tokens has 31 bytes.* 32"),
        (changed(logprobs=b""), "logprobs has 0 bytes.* 32"),
        (changed(mask=b"\0" * 9), "mask has 9 bytes.* 8$"),
        (changed(mask=bytes([0, 0, 1, 1, 1, 0, 0, 2])), "mask .*2.* 1"),
        (changed(lengths=[5, 2**32 - 1]), "tokens has 32 bytes.*4294967300"),
        (changed(rewards=[1.0]), "rewards has 1 .*lengths has 2"),
        (changed(component_names=["a"], components=[1.0]), "components has 1 .* need 2"),
        (changed(component_names=["A b"], components=[1.0, 2.0]), "component must match .*'A b'"),
        (changed(component_names=["a"], components=[1.0, float("inf")]), "component 'a' .*inf"),
        (
            changed(num_turns=[1]),
            r"num_turns \[1\] of 2 trajectories, 0 turn_ends and 0 turn_rewards",
        ),
        (changed(num_turns=[1, 0], turn_ends=[5]), "1 turn_ends and 0 turn_rewards do not agree"),
        (changed(turn_ends=[5], turn_rewards=[0.1]), r"num_turns \[0, 0\] .*1 turn_ends"),
        (
            changed(num_turns=[1, 0], turn_ends=[6], turn_rewards=[0.1]),
            r"trajectory 0: turns must end .*\[6\]",
        ),
        (
            changed(num_turns=[1, 0], turn_ends=[5], turn_rewards=[0.2]),
            "trajectory 0: the rewards of turns .*0.2",
        ),
        (changed(prompt_lengths=[2]), "prompt_lengths has 1 .*lengths has 2"),
        (changed(finish_reasons=[]), "finish_reasons has 0 .*lengths has 2"),
        (changed(finish_reasons=["stop", "dunno"]), "trajectory 1.*finish_reason.*'dunno'"),
        (changed(rewards=[0.0, float("inf")]), "trajectory 1.*reward .*inf"),
        (changed(rewards=[0.0, -1e300]), r"trajectory 1.*reward must be in ±.*got -1e\+300"),
        (changed(prompt_lengths=[2, 4]), r"trajectory 1.*prompt_length 4 .*\[1, 3\]"),
        (changed(lengths=[8, 0]), r"trajectory [01].*length"),
        (changed(logprobs=FLOATS), "trajectory 0.*logprobs .*0, got nan"),
        (changed(versions=b"\xff" * 32), "trajectory 0.*version .*-1"),
        (
            changed(tokens=np.array([1, 2, 100, 0, 0, 1, 2, 0], "<i4").tobytes()),
            r"prompt_index 5, trajectory 0.* 100 .*\[0, 100\)",
        ),
        (
            changed(tokens=np.array([1, 2, 3, 4, 5, 1, 9, 0], "<i4").tobytes()),
            "sample 1 .*prompt.*sample 0",
        ),
    ],
)
def test_a_malformed_message_is_named(message, said):
    with pytest.raises(InvalidTrajectoryError, match=said):
        check(message)
    with pytest.raises(InvalidTrajectoryError):  # as the queue checks it, all rows at once
        wire.check_message(message, **BOUNDS)


def test_a_row_beyond_max_tokens_is_refused():
    long = trajectory(completion=range(15))
    message = wire.encode_group(Group(5, 0, (long, long)))
    with pytest.raises(InvalidTrajectoryError, match=r"length 17 .*\[1, 16\]"):
        check(message)


@settings(max_examples=300, deadline=None)
@given(junk=st.binary(max_size=200), position=st.integers(0, 400), cut=st.integers(0, 8))
def test_damaged_messages_decode_to_a_valid_group_or_a_named_error(junk, position, cut):
    raw = wire.encode_group(group()).SerializeToString()
    position %= len(raw)
    try:
        message = pb.Group.FromString(raw[:position] + junk + raw[position + cut :])
    except Exception as error:
        assert type(error).__name__ == "DecodeError"
        return
    try:
        decoded = check(message)
    except InvalidTrajectoryError as error:
        assert str(error)
    else:
        assert len(decoded.trajectories) == 2


def test_a_resume_point_servers_and_a_status_are_decoded_as_they_were_encoded():
    resume_point = ResumePoint(3, 17, (Permit(4, 1), Permit(16, 0)), {"invalid": 2}, {"timeout": 5})
    assert wire.decode_resume_point(wire.encode_resume_point(resume_point)) == resume_point
    servers = (
        ServerRecord("http://a:1", "HEALTHY", 0),
        ServerRecord("http://b:1", "DEAD", None),
    )
    assert wire.decode_servers(wire.encode_servers(servers)) == servers
    for absent in (None, 0):
        numbers = dict.fromkeys((f.name for f in dataclasses.fields(QueueStatus)), 3)
        status = QueueStatus(
            **numbers
            | {
                "v_pub": absent,
                "last_push_age_secs": absent,
                "returned": {"timeout": 1},
                "retired": {},
                "waits": ("lease of step 3",),
                "roles": (RoleStatus("rollout-0", 1.5, (Wait("a", "b", 2.5),), {"up": 3.5}),),
                "servers": servers,
                "lengths": {"prompt/trained": 2.5},
                "run_id": "a" * 12,
                "failure": "ValueError: bad",
                "details": {"reward_error": "prompt 3: no number"},
            }
        )
        assert wire.decode_status(wire.encode_status(status)) == status


def test_an_unknown_server_state_is_refused():
    record = pb.ServerRecord(address="http://a:1", state="TIRED")
    with pytest.raises(ValueError, match="http://a:1.*'TIRED'.*HEALTHY"):
        wire.decode_servers([record])


@pytest.mark.parametrize("module", ["queue.trajectory_queue", "rewards.rewards"])
def test_the_generated_code_is_of_the_committed_proto(tmp_path, module):
    pytest.importorskip("grpc_tools")
    root = pathlib.Path(wire.__file__).parents[2]
    out = tmp_path / "descriptors"
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{root}",
        f"--descriptor_set_out={out}",
    ]
    proto = root / f"jaxrl_async/{module.replace('.', '/')}.proto"
    subprocess.run([*command, str(proto)], check=True)
    (described,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    code = importlib.import_module(f"jaxrl_async.{module}_pb2")
    generated = descriptor_pb2.FileDescriptorProto.FromString(code.DESCRIPTOR.serialized_pb)
    described.ClearField("options")
    generated.ClearField("options")
    # json_name is filled in by protoc only.
    for message in [*described.message_type]:
        for field in [*message.field, *(f for n in message.nested_type for f in n.field)]:
            field.ClearField("json_name")
    assert described == generated


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (("queue.client", "queue.service", "versions.store"), {"jax", "flax", "orbax"}),
        (
            (
                "queue.source",
                "queue.admission",
                "servers.fleet",
                "publishing.publisher",
                "runtime.status",
            ),
            {"grpc", "google.protobuf"},
        ),
    ],
)
def test_modules_import_without_the_libraries_that_they_do_not_use(modules, absent):
    imports = ", ".join(f"jaxrl_async.{module}" for module in modules)
    code = f"import sys, {imports}; print(sorted({absent} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("max_message_bytes", "row_tokens"), [(1, 64), (400_000, 64)])
def test_a_group_of_as_many_tokens_as_its_samples_may_have_fits_in_a_message(
    max_message_bytes, row_tokens
):
    """Of whole rows always; of sessions of many rows as far as they may grow."""
    changes = {"queue": {"max_message_bytes": max_message_bytes}}
    changes |= {"learner": {"row_tokens": row_tokens}, "rollout": {"group_size": 4}}
    values = {
        name: dataclasses.replace(getattr(Settings(), name), **new) for name, new in changes.items()
    }
    bounded = dataclasses.replace(Settings(), **values)
    most = parts.message_bytes_of(bounded)
    num_rows = most // (parts.TOKEN_BYTES * 4) // row_tokens
    assert num_rows == (1 if max_message_bytes == 1 else 97)
    row = trajectory(completion=range(3, 3 + row_tokens - 2))
    sample = dataclasses.replace(row, components={"rows": 1.0})
    whole = Group.of_samples(2**31, 9, [[sample, *[row] * (num_rows - 1)]] * 4)
    assert len(wire.encode_group(whole).SerializeToString()) <= most

"""The benchmark of the queue runs in small; its figures are in benchmarks/results."""

import json
import pathlib
import sys

import pytest

from jaxrl_async.queue import trajectory_queue_pb2 as pb
from jaxrl_async.queue import wire
from jaxrl_async.queue.records import Permit

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "benchmarks"))

import trajectory_queue as benchmark


def test_the_queue_is_measured_beside_a_bare_server_and_bare_inserts(tmp_path):
    directory = tmp_path / "journals"
    directory.mkdir()
    benchmark.main(["--smoke", f"--out={tmp_path}", f"--dir={directory}"])
    result = json.loads((tmp_path / "queue.json").read_text())
    assert result["bars"] == {"off/echo": 0.60, "on/insert": 0.70}
    for size in result["tokens"].values():
        assert list(size["push"]) == ["1", "4"]
        for push in size["push"].values():
            assert set(push) == {*benchmark.KINDS, "ratios"}
            assert all(push[kind]["p50_ms"] <= push[kind]["p99_ms"] for kind in benchmark.KINDS)
        assert set(size["lease"]) == {"off", "on"}
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("num_tokens", [16, 512])
def test_a_message_is_a_sound_group_of_13_bytes_a_token(num_tokens):
    raw = benchmark.message(7, benchmark.make_body(num_tokens))
    group = pb.Group.FromString(raw)
    wire.check_message(group, group_size=8, vocab_size=benchmark.VOCAB_SIZE, max_tokens=num_tokens)
    assert wire.decode_permit(group.permit) == Permit(7, 0)
    assert 0 <= len(raw) - 13 * 8 * num_tokens < 300


def test_a_ratio_is_that_of_the_rates_of_the_same_round():
    secs = {"off": [2.0, 3.0, 10.0], "echo": [1.0, 3.0, 8.0]}  # Ratios .5, 1 and .8.
    assert benchmark.ratio(secs, "off/echo") == {"median": 0.8, "low": 0.65, "high": 0.9}

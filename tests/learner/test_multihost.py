"""Several learner processes do what one does: the same losses, versions and checkpoints; and they end together."""

import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import psutil
import pytest
import safetensors.numpy
from fixtures.learner_process import MODEL, NUM_STEPS, make_group, make_train_step, outline
from fixtures.learner_process import run as run_here
from fixtures.models import tiny
from fixtures.small_learner import flat
from fixtures.tensors import read_tensors
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_async.config.settings import PACKINGS, Learner
from jaxrl_async.learner import packing, processes
from jaxrl_async.learner.checkpoint import Checkpoints
from jaxrl_async.learner.follower import FollowerPublisher
from jaxrl_async.metrics import read_metrics
from jaxrl_async.models import hf, sharding
from jaxrl_async.objectives import advantages
from jaxrl_async.queue.journal import JournalReader
from jaxrl_async.records import Share
from jaxrl_async.runtime import supervisor
from jaxrl_async.versions.store import StoredVersion, WeightStore, WeightStoreError

ROOT = pathlib.Path(__file__).parents[2]
RUN_TIMEOUT_SECS = 400
TIMES = {
    "time/",
    "learner/",
    "rollout/",
    "pack/",
    "compile/",
    "weights/",
}  # Differ, or are of one process.


@pytest.fixture(scope="module")
def start():
    """Starts Python processes on a number of CPU devices; none outlives the tests."""
    started = []

    def start(command, *, devices=1):
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}",
            "JAX_NUM_CPU_DEVICES": str(devices),
        }
        words = [sys.executable, *map(str, command)]
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def learner(start):
    """Starts n processes of fixtures.learner_process."""

    def learner(directory, num_processes, mesh, *, first_step=1):
        coordinator = f"127.0.0.1:{supervisor.free_port()}"
        devices = int(np.prod(mesh)) // num_processes
        mesh = ",".join(map(str, mesh))
        return [
            start(
                [
                    "-m", "fixtures.learner_process", directory, i, num_processes, coordinator, mesh,
                    first_step,
                ],
                devices=devices,
            )
            for i in range(num_processes)
        ]  # fmt: skip

    return learner


def outputs_of(started):
    """The output of processes that have all ended with 0."""
    outputs = [process.communicate(timeout=RUN_TIMEOUT_SECS)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(outputs)
    return outputs


def wait_for(condition, process):
    deadline = time.monotonic() + RUN_TIMEOUT_SECS
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def rows_of(directory):
    return json.loads((directory / "rows.json").read_text())


@pytest.fixture(scope="module")
def two(learner, tmp_path_factory):
    """The directory of six steps by two processes, whose parameters are divided between them."""
    directory = tmp_path_factory.mktemp("two")
    outputs_of(learner(directory, 2, (1, 2, 1)))
    return directory


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """(directory, rows) of the same six steps by this process on one device."""
    directory = tmp_path_factory.mktemp("one")
    return directory, run_here(directory)


def assert_same_rows(found, expected):
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for rows in zip(found, expected, strict=True):
        a, b = (
            {name: x for name, x in row.items() if f"{name.split('/')[0]}/" not in TIMES}
            for row in rows
        )
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=1e-5, abs=1e-7), (a["step"], name)


def test_two_processes_lose_what_one_does(one, two):
    rows = rows_of(two)
    assert len(rows) == NUM_STEPS and len({row["loss/policy"] for row in rows}) == NUM_STEPS
    assert rows[0]["pack/microbatches"] > 2
    assert_same_rows(rows, one[1])


@pytest.fixture
def resumed(learner, two, tmp_path):
    """The rows of steps 4 to 6, trained from the third checkpoint of the two processes."""
    shutil.copytree(two / "checkpoints", tmp_path / "checkpoints")
    shutil.rmtree(tmp_path / "checkpoints" / "6")

    def resumed(num_processes, mesh):
        if num_processes == 1:
            return run_here(tmp_path, first_step=4)
        outputs_of(learner(tmp_path, num_processes, mesh, first_step=4))
        return rows_of(tmp_path)

    return resumed


def test_a_checkpoint_of_two_processes_resumes_on_one(resumed, two):
    assert_same_rows(resumed(1, (1, 1, 1)), rows_of(two)[3:])


@pytest.mark.long
def test_a_checkpoint_of_two_processes_resumes_on_four(resumed, two):
    assert_same_rows(resumed(4, (2, 2, 2)), rows_of(two)[3:])


@pytest.mark.long
@pytest.mark.parametrize("mesh", [(2, 2, 1), (1, 2, 1, 2)], ids=["one slice", "slices"])
def test_four_processes_lose_what_one_does(mesh, learner, one, tmp_path):
    outputs_of(learner(tmp_path, 4, mesh))
    assert_same_rows(rows_of(tmp_path), one[1])


def params_of(directory, step):
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    checkpoints = Checkpoints(directory / "checkpoints", keep=10)
    state, _ = checkpoints.restore(step, make_train_step(mesh).abstract_state())
    return flat(state.params)


def assert_same_params(found, expected):
    first, expected, found = params_of(expected, 0), params_of(expected, 6), params_of(found, 6)
    assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
    assert np.linalg.norm(expected - first) > 1e-3 * np.linalg.norm(expected)


def test_a_run_that_loses_a_slice_and_gets_it_back_ends_as_one_without(one, tmp_path):
    shutil.copytree(one[0] / "checkpoints" / "0", tmp_path / "checkpoints" / "0")
    for first, mesh in ((1, (1, 1, 1, 2)), (3, (1, 1, 1)), (5, (1, 1, 1, 2))):
        rows = run_here(tmp_path, mesh_shape=mesh, first_step=first, num_steps=first + 1)
        assert_same_rows(rows, one[1][first - 1 : first + 1])
    assert_same_params(tmp_path, one[0])


@pytest.mark.long
def test_processes_that_are_slices_lose_one_and_get_it_back(learner, one, tmp_path):
    outputs_of(learner(tmp_path, 2, (1, 2, 1, 2)))
    assert_same_rows(rows_of(tmp_path), one[1])
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    outputs_of(learner(tmp_path, 1, (1, 2, 1), first_step=4))
    assert_same_rows(rows_of(tmp_path), one[1][3:])
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    outputs_of(learner(tmp_path, 2, (1, 2, 1, 2), first_step=4))
    assert_same_params(tmp_path, one[0])


def test_a_version_of_two_processes_is_that_of_one_with_the_same_weights(two, tmp_path):
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    like = make_train_step(mesh).abstract_state()
    state, _ = Checkpoints(two / "checkpoints", keep=10).restore(3, like)
    alone = WeightStore(tmp_path, keep=1)
    alone.write(3, hf.to_tensors(state.params, MODEL, "float32"), {})
    together = WeightStore(two / "weights", keep=10)
    assert together.versions() == list(range(1, NUM_STEPS))
    assert together.manifest(3)["digest"] == alone.manifest(3)["digest"]
    StoredVersion(together.path(3)).verify()
    table = together.manifest(3)["tensors"]
    layers = [{e["file"] for n, e in table.items() if f".layers.{i}." in n} for i in range(2)]
    assert [len(files) for files in layers] == [1, 1] and layers[0] != layers[1]
    assert sorted(file.name for file in together.path(3).iterdir()) == [
        "config.json",
        "manifest.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


FAILS = """
import sys
import threading
from jaxrl_async.learner import processes

coordinator, process = sys.argv[1], int(sys.argv[2])
with processes.joined(coordinator=coordinator, process=process, num_processes=2):
    if process == 0:
        raise OSError("disk full")
    processes.barrier("never", timeout_secs=300.0)
"""


def test_an_error_of_process_0_is_logged_and_ends_the_other(start):
    coordinator = f"127.0.0.1:{supervisor.free_port()}"
    first, second = (start(["-c", FAILS, coordinator, process]) for process in range(2))
    output, _ = first.communicate(timeout=RUN_TIMEOUT_SECS)
    ended_at = time.monotonic()
    assert first.returncode == 1
    assert "learner process 0 of 2 failed" in output and "disk full" in output
    second.communicate(timeout=30)
    assert second.returncode != 0
    assert time.monotonic() - ended_at < 10


@pytest.mark.long
def test_the_death_of_another_process_ends_process_0_and_is_named(learner, tmp_path):
    first, second = learner(tmp_path, 2, (2, 1, 1))
    wait_for(lambda: (tmp_path / "checkpoints" / "0").exists(), first)
    second.kill()
    second.communicate(timeout=10)
    output, _ = first.communicate(timeout=processes.HEARTBEAT_TIMEOUT_SECS + 30)
    assert first.returncode != 0
    assert re.search(r"Task 1 heartbeat timeout|tasks are unhealthy[^:]*:\s*1\b", output), output


def test_no_coordinator_is_an_error_that_names_its_address(monkeypatch):
    monkeypatch.setattr(processes, "JOIN_TIMEOUT_SECS", 0.3)
    address = f"127.0.0.1:{supervisor.free_port()}"
    message = rf"process 1 .*coordinator .*{address}.* 0\.3 s"
    with (
        pytest.raises(ConnectionError, match=message),
        processes.joined(coordinator=address, process=1, num_processes=2),
    ):
        pass


# The whole path.

SMOKE = (
    "--config=configs/quickstart.py:smoke,mode=sync",
    "--config.learner.num_processes=2",
    "--config.learner.data=2",
)


def test_train_runs_two_learner_processes_on_the_real_queue(start, tmp_path):
    workdir = tmp_path / "run"
    words = ["-m", "jaxrl_async", "train", f"--workdir={workdir}", *SMOKE]
    outputs_of([start([*words, "--config.warm_start.num_steps=0"])])
    rows = read_metrics(workdir)
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["compile/count"] == rows[0]["compile/count"]
    assert all(row["staleness/max"] == 0 for row in rows)
    assert rows[0]["mismatch/tokens"] > 0 and rows[0]["mismatch/mean_abs"] < 1e-4
    store = WeightStore(workdir / "weights", keep=2)
    assert store.versions() == [0, 1]
    StoredVersion(store.path(1)).verify()
    assert len({entry["file"] for entry in store.manifest(1)["tensors"].values()}) == 2


@pytest.mark.long
@pytest.mark.parametrize("axis", ["fsdp", "expert"])
def test_two_processes_replay_the_routes_of_a_mixture(axis, start, tmp_path):
    workdir = tmp_path / "run"
    changes = {
        **{"model.family": "qwen3_moe", "model.num_experts": 4, "model.experts_per_token": 2},
        **{"model.expert_mlp_dim": 64, "learner.num_minibatches": 1, "warm_start.num_steps": 0},
        **{"learner.replay_routes": "on", "learner.data": 1, f"learner.{axis}": 2},
    }
    words = ["-m", "jaxrl_async", "train", f"--workdir={workdir}", *SMOKE]
    outputs_of([start([*words, *(f"--config.{key}={value}" for key, value in changes.items())])])
    rows = read_metrics(workdir)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["mismatch/tokens"] > 0 and row["mismatch/max_abs"] <= 1e-5
        assert row["experts/routes_differ"] == 0 and row["experts/routes_known"] > 0.5


@pytest.mark.long
@pytest.mark.parametrize("axis", ["data", "slices"])
def test_a_run_of_two_processes_goes_on_with_one_and_then_with_two(axis, start, tmp_path):
    workdir = tmp_path / "run"
    for num_steps, num_processes in ((2, 2), (3, 2), (4, 1), (5, 2)):
        size = num_processes if axis == "slices" else 2
        process = start(
            [
                "-m", "jaxrl_async", "train", f"--workdir={workdir}", *SMOKE,
                "--config.learner.data=1", f"--config.learner.{axis}={size}",
                f"--config.learner.num_processes={num_processes}",
                f"--config.learner.num_steps={num_steps}",
                f"--resume={num_steps > 2}",
            ]
        )  # fmt: skip
        outputs_of([process])
    assert [row["step"] for row in read_metrics(workdir)] == [1, 2, 3, 4, 5]
    position = json.loads((workdir / "checkpoints" / "5" / "position" / "metadata").read_text())
    assert position["step"] == 5


def test_a_learner_process_that_dies_is_named_and_ends_the_run(start, tmp_path):
    workdir = tmp_path / "run"
    process = start(
        [
            "-m",
            "jaxrl_async",
            "train",
            f"--workdir={workdir}",
            *SMOKE,
            "--config.learner.num_steps=100000",
            "--config.supervisor.max_restarts=0",
        ]
    )
    log = workdir / "logs" / "learner-1.log"
    wait_for(lambda: "waits for the others" in supervisor.last_lines(log, 1), process)
    roles = psutil.Process(process.pid).children()
    (second,) = [r for r in roles if {"--role=learner", "--index=1"} <= set(r.cmdline())]
    second.kill()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert re.search(
        r"role 'learner-1' ended by signal SIGKILL; the end of .*learner-1.log", output
    )
    assert psutil.wait_procs(roles, timeout=1)[1] == []


@pytest.mark.long
def test_all_processes_of_a_learner_are_started_again_when_one_is_killed(start, tmp_path):
    workdir = tmp_path / "run"
    words = ["-m", "jaxrl_async", "train", f"--workdir={workdir}", *SMOKE]
    process = start([*words, "--config.learner.num_steps=30", "--config.checkpoint.every_steps=3"])
    wait_for(lambda: len(read_metrics(workdir)) >= 5, process)
    roles = psutil.Process(process.pid).children()
    (second,) = [r for r in roles if {"--role=learner", "--index=1"} <= set(r.cmdline())]
    second.kill()
    (output,) = outputs_of([process])
    assert "role 'learner-1' ended by signal SIGKILL; restart 1 of" in output
    assert [row["step"] for row in read_metrics(workdir)] == list(range(1, 31))
    nothing = {"lost": [], "doubled": [], "gap": [], "stray": []}
    assert JournalReader(workdir / "journal.sqlite").audit() == nothing


# Packing, on which the processes agree without communicating.


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4))
def test_shares_divide_every_minibatch_into_consecutive_parts(size, num_processes, num_minibatches):
    shares = [Share(i, num_processes, num_minibatches) for i in range(num_processes)]
    parts = [share.of_chunk(size * num_minibatches) for share in shares]
    positions = [position for part in parts for position in part]
    assert sorted(positions) == list(range(size * num_minibatches))
    ranges = [share.of_minibatch(size) for share in shares]
    assert [position for part in ranges for position in part] == list(range(size))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    for part, own in zip(parts, ranges, strict=True):
        starts = range(0, size * num_minibatches, size)
        assert part == [start + position for start in starts for position in own]


@pytest.mark.parametrize("values", [(2, 2), (-1, 2), (0, 1, 0)])
def test_a_share_that_is_none_is_refused(values):
    with pytest.raises(ValueError, match=r"(num_processes = 2|≥ 1).* got"):
        Share(*values)


@pytest.mark.parametrize("shared_prompts", [False, True])
@pytest.mark.parametrize("policy", PACKINGS)
@pytest.mark.parametrize("chunks", [(3, 1, 8), (7,) * 4, (12,)])
def test_processes_make_equally_many_microbatches_of_every_chunk_and_lose_no_token(
    chunks, policy, shared_prompts
):
    settings = Learner(
        num_processes=4,
        microbatch_rows=8,
        row_tokens=16,
        packing=policy,
        shared_prompts=shared_prompts,
    )
    packers = [packing.Packer(settings, process=i) for i in range(4)]
    groups, start, found = [make_group(i, 0) for i in range(sum(chunks))], 0, []
    for size in chunks:
        chunk = groups[start : start + size]
        advantage = np.array([[100 * g.prompt_index + k for k in range(4)] for g in chunk])
        parts = []
        for process, packer in enumerate(packers):
            own = Share(process, 4).of_minibatch(size)
            known = [group if i in own else outline(group) for i, group in enumerate(chunk)]
            last = start + size == len(groups)
            parts.append(packer(known, advantage.astype(np.float32), last=last))
        assert len({len(part) for part in parts}) == 1
        batches = [batch for part in parts for batch in part]
        assert last or all(batch.segment_ids[:, 0].all() for batch in batches), "an empty row"
        found += batches
        start += size
    # Each token that is trained on, with its trajectory's advantage: all of them, once.
    seen = np.concatenate([np.stack([b.advantages, b.tokens], -1)[b.mask] for b in found])
    expected = [
        (100 * group.prompt_index + k, token)
        for group in groups
        for k, t in enumerate(group.trajectories)
        for token in t.tokens[t.mask]
    ]
    assert sorted(map(tuple, seen.tolist())) == sorted(expected)


@pytest.mark.parametrize("shared_prompts", [False, True])
@pytest.mark.parametrize("policy", PACKINGS)
@pytest.mark.parametrize(("num_groups", "num_processes"), [(1, 4), (5, 4), (12, 4), (5, 1)])
def test_every_process_packs_its_groups_into_as_many_microbatches(
    num_groups, num_processes, policy, shared_prompts
):
    layout = {"row_tokens": 16, "packing": policy, "shared_prompts": shared_prompts}
    settings = Learner(num_processes=num_processes, microbatch_rows=4, **layout)
    groups = [make_group(i, 0) for i in range(num_groups)]
    advantage = advantages.grpo(np.stack([group.rewards for group in groups]))
    parts = []
    for process in range(num_processes):
        own = Share(process, num_processes).of_minibatch(num_groups)
        known = [group if i in own else outline(group) for i, group in enumerate(groups)]
        packer = packing.Packer(settings, process=process)
        parts.append(packer(known, advantage, last=True))
        alone = packing.Packer(Learner(microbatch_rows=4 // num_processes, **layout))
        own_part = slice(own.start, own.stop)
        own_batches = alone(groups[own_part], advantage[own_part], last=True)
        for batch, expected in zip(parts[-1], own_batches, strict=False):
            for name, array in vars(batch).items():
                np.testing.assert_array_equal(array, getattr(expected, name), err_msg=name)
        for batch in parts[-1][len(own_batches) :]:
            assert batch.tokens.shape == (4 // num_processes, 16) and not batch.segment_ids.any()
    assert len({len(part) for part in parts}) == 1
    tokens = sum(batch.mask.sum() for part in parts for batch in part)
    assert tokens == sum(t.mask.sum() for group in groups for t in group.trajectories)


# Followers.


def versions(*values):
    """A watch that says these versions, and no other."""
    return lambda: iter(values)


def test_a_follower_waits_until_the_queue_says_that_a_version_is_published():
    said = queue.SimpleQueue()
    publisher = FollowerPublisher(lambda: iter(said.get, None))
    for version in (0, 1):
        said.put(version)
    publisher.wait(1, timeout_secs=30.0)
    with pytest.raises(TimeoutError, match=r"version 2 .*0\.1 s.* version 1\b"):
        publisher.wait(2, timeout_secs=0.1)
    publisher.wait(2, timeout_secs=30.0, should_stop=lambda: True)
    threading.Timer(0.05, said.put, [3]).start()
    publisher.wait(2, timeout_secs=30.0)
    said.put(None)


def test_a_follower_whose_watch_fails_says_so():
    def watch():
        yield 0
        raise PermissionError("the queue asks for a token")

    publisher = FollowerPublisher(watch)
    with pytest.raises(PermissionError, match="token"):
        publisher.wait(1, timeout_secs=30.0)


def test_a_follower_that_cannot_write_says_so():
    def write():
        raise OSError("disk full")

    publisher = FollowerPublisher(versions())
    publisher.publish(0, write, timeout_secs=1.0)
    with pytest.raises(OSError, match="disk full"):
        publisher.wait(0, timeout_secs=30.0)
    with pytest.raises(OSError, match="disk full"):
        publisher.check()
    publisher.close()


def test_a_follower_starts_no_version_before_the_last_is_published():
    publisher, written = FollowerPublisher(versions(0)), []
    publisher.publish(1, lambda: written.append(1), timeout_secs=0.1)
    with pytest.raises(TimeoutError, match="published version 1 "):
        publisher.publish(2, lambda: written.append(2), timeout_secs=0.1)
    publisher.close()
    assert written == [1]


# Versions in parts.


def tensors():
    rng = np.random.default_rng(0)
    return {f"layer.{i}": rng.normal(size=(i + 1, 3)).astype(np.float32) for i in range(5)}


def test_a_version_in_parts_is_the_version_as_a_whole(tmp_path):
    whole, parts = WeightStore(tmp_path / "a", keep=2), WeightStore(tmp_path / "b", keep=2)
    whole.write(7, tensors().items(), {"x": 1})
    parts.begin(7)
    for part in (2, 0, 1):  # The last has none.
        own = [item for i, item in enumerate(tensors().items()) if part < 2 and i % 2 == part]
        parts.write_part(7, part, own)
    assert parts.versions() == []
    parts.finish(7, 3, {"x": 1})
    assert parts.manifest(7)["digest"] == whole.manifest(7)["digest"]
    assert read_tensors(parts.path(7)).keys() == tensors().keys()
    StoredVersion(parts.path(7)).verify()
    names = {file.name for file in parts.path(7).iterdir()}
    assert names == {
        "config.json", "manifest.json", "model.safetensors.index.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip


def test_a_part_that_is_missing_or_doubled_makes_no_version(tmp_path):
    store = WeightStore(tmp_path, keep=2)
    store.begin(1)
    store.write_part(1, 0, tensors().items())
    with pytest.raises(WeightStoreError, match=r"part-1\.json"):
        store.finish(1, 2, {})
    store.begin(1)
    for part in range(2):
        store.write_part(1, part, tensors().items())
    with pytest.raises(ValueError, match=r"layer\.0 .*twice"):
        store.finish(1, 2, {})
    assert store.versions() == []


@pytest.mark.long
def test_four_processes_each_load_their_shards_and_no_more(start, tmp_path):
    for name, num_layers in (("small", 2), ("large", 60)):
        config = tiny(
            num_layers=num_layers, model_dim=256, head_dim=64, mlp_dim=1024, vocab_size=512
        )
        mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
        params = sharding.init_sharded(config, mesh, seed=0)
        (tmp_path / name).mkdir()
        safetensors.numpy.save_file(
            dict(hf.to_tensors(params, config, "float32")), tmp_path / name / "model.safetensors"
        )
        (tmp_path / name / "config.json").write_text(json.dumps(hf.write_config(config)))
    del params
    coordinator = f"127.0.0.1:{supervisor.free_port()}"
    command = ["-m", "fixtures.loading_process", tmp_path]
    outputs = outputs_of([start([*command, i, 4, coordinator]) for i in range(4)])
    whole = (tmp_path / "large" / "model.safetensors").stat().st_size
    two_tensors = 2 * 256 * 1024 * 4
    others = (
        32 << 20
    )  # compiling, whatever the size: 23 MB were seen, of 59 and of 118 MB of shards
    for found in (json.loads(output.splitlines()[-1]) for output in outputs):
        assert found["shard_bytes"] < 0.26 * whole
        assert found["peak_bytes"] <= found["shard_bytes"] + two_tensors + others

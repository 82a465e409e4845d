"""Checkpoints: saved states come back, 0 is kept, and a misfit is named."""

import gc
import itertools
import json
import logging
import shutil
import signal
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.checkpointers import async_checkpointer
from orbax.checkpoint._src.futures import future as futures

from jaxrl_async import sealed
from jaxrl_async.learner import checkpoint
from jaxrl_async.learner.checkpoint import CheckpointError, Checkpoints
from jaxrl_async.records import ResumePoint
from jaxrl_async.roles.learner import Saves
from jaxrl_async.runtime import workdir
from jaxrl_async.sealed import DamagedError

WAIT_SECS = 60.0


def state(value=1.0, shape=(4, 2)):
    return {"params": {"w": jnp.full(shape, value)}, "updates": jnp.int32(3)}


def open_checkpoints(directory, keep=2):
    return Checkpoints(directory, keep=keep)


def test_what_is_saved_is_restored(tmp_path):
    position = {"step": 7, "frontier": 70, "outstanding": [[64, 0], [66, 1]]}
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(7, state(2.5), position)
    checkpoints.close()
    restored, found = open_checkpoints(tmp_path).restore(7, state())
    np.testing.assert_array_equal(restored["params"]["w"], np.full((4, 2), 2.5))
    assert int(restored["updates"]) == 3
    assert found == position


def test_the_newest_are_kept_and_zero_always(tmp_path):
    checkpoints = open_checkpoints(tmp_path, keep=2)
    for step in range(5):
        checkpoints.save(step, state(step), {})
    checkpoints.written(wait=True)
    assert checkpoints.steps() == [0, 3, 4]


def test_an_early_best_step_is_kept_and_keeps_no_groups(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2, best=lambda: 1)
    assert checkpoints.oldest() == 0
    for step in range(5):
        checkpoints.save(step, state(step), {})
    checkpoints.written(wait=True)
    assert checkpoints.steps() == [0, 1, 3, 4] and checkpoints.oldest() == 3


def test_a_step_that_is_not_there_is_named_with_those_that_are(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(2, state(), {})
    checkpoints.written(wait=True)
    with pytest.raises(CheckpointError, match=r"checkpoint 3 .*\[2\]"):
        checkpoints.restore(3, state())


def test_a_checkpoint_of_another_shape_names_the_tensor_and_both_shapes(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, state(), {})
    with pytest.raises(CheckpointError, match=r"params\.w .*\(4, 2\).*\(4, 3\)"):
        checkpoints.restore(1, state(shape=(4, 3)))


def test_a_tensor_that_is_missing_is_named(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, state(), {})
    wanted = state()
    wanted["params"]["bias"] = jnp.zeros(2)
    with pytest.raises(CheckpointError, match=r"params\.bias .*nothing.*\(2,\)"):
        checkpoints.restore(1, wanted)


def test_a_checkpoint_is_restored_into_another_sharding(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, state(3.0), {})
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    wanted = state()
    wanted["params"]["w"] = jax.device_put(wanted["params"]["w"], sharding)
    restored, _ = checkpoints.restore(1, wanted)
    assert restored["params"]["w"].sharding == sharding
    np.testing.assert_array_equal(restored["params"]["w"], np.full((4, 2), 3.0))


# Damage.


def fill(directory, *steps, keep=3):
    """Checkpoints whose tensors differ from one another."""
    checkpoints = open_checkpoints(directory, keep=keep)
    for step in steps:
        checkpoints.save(step, state(step + 0.5), {"step": step, "frontier": 10 * step})
    checkpoints.close()
    return open_checkpoints(directory, keep=keep)


def flip(path, bit=0x01, at=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * at)] ^= bit
    path.write_bytes(bytes(content))


def alter(directory, step):
    """Writes a checkpoint's bytes as another step's, which TensorStore reads as they are."""
    other, wanted = directory / "1" / "state", directory / str(step) / "state"
    shutil.rmtree(wanted)
    shutil.copytree(other, wanted)


def test_a_tensor_that_differs_from_its_digest_is_named_with_the_intact_checkpoint_before_it(
    tmp_path,
):
    fill(tmp_path, 1, 2, 3)
    alter(tmp_path, 3)
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint 3, .*/3, is damaged: .*/3/state: tensor params\.w has digest .*"
        r"; checkpoint 2 is intact: `train --resume --fallback`",
    ) as raised:
        open_checkpoints(tmp_path).restore(3, state())
    assert isinstance(raised.value, DamagedError)
    alter(tmp_path, 2)
    with pytest.raises(CheckpointError, match=r"checkpoint 3, .*checkpoint 1 is intact"):
        open_checkpoints(tmp_path).restore_last(state())


def test_the_tensors_of_a_damaged_checkpoint_are_freed_before_another_is_read(tmp_path):
    fill(tmp_path, 1, 2)
    alter(tmp_path, 2)
    checkpoints, like = open_checkpoints(tmp_path), state()
    gc.collect()
    before = len(jax.live_arrays())
    with pytest.raises(CheckpointError, match="params") as raised:
        checkpoints.restore(2, like)
    assert len(jax.live_arrays()) == before, raised


def test_a_fallback_takes_the_last_intact_checkpoint_and_puts_the_damaged_ones_aside(tmp_path):
    fill(tmp_path / "checkpoints", 1, 2, 3)
    flip(tmp_path / "checkpoints" / "3" / "position" / "metadata", 0x08)
    checkpoints = open_checkpoints(tmp_path / "checkpoints", keep=3)
    step, restored, position, said = checkpoints.restore_last(state(), fallback=True)
    assert step == 2 and float(restored["params"]["w"][0, 0]) == 2.5 and position["frontier"] == 20
    assert len(said) == 1 and "checkpoint 3" in said[0]
    assert (tmp_path / "damaged-checkpoint-3").is_dir() and checkpoints.steps() == [1, 2]
    checkpoints.save(3, state(3), {})  # Its number is free.
    checkpoints.close()
    checkpoints = open_checkpoints(tmp_path / "checkpoints", keep=3)
    assert checkpoints.restore_last(state(), fallback=True)[::3] == (3, [])


def test_without_an_intact_checkpoint_there_is_no_fallback(tmp_path):
    fill(tmp_path, 1)
    for path in (tmp_path / "1" / "state" / "d").iterdir():
        path.unlink()
    for fallback in (False, True):
        with pytest.raises(CheckpointError, match=r"checkpoint 1, .* start in another --workdir"):
            open_checkpoints(tmp_path).restore_last(state(), fallback=fallback)


@pytest.mark.parametrize(
    "name",
    ["position/metadata", "digests/process_0.json", "state/manifest.ocdbt"],
)
@pytest.mark.parametrize(
    "damage",
    [flip, lambda path: path.write_bytes(path.read_bytes()[:9]), lambda path: path.unlink()],
)
def test_every_file_of_a_checkpoint_is_damaged_in_the_words_of_a_checkpoint(tmp_path, name, damage):
    fill(tmp_path, 1, 2)
    damage(tmp_path / "2" / name)
    said = (
        rf"checkpoint 2, .* is damaged: .*/2/{name.removesuffix('manifest.ocdbt')}.*checkpoint 1 is"
    )
    with pytest.raises(CheckpointError, match=said):
        open_checkpoints(tmp_path).restore(2, state())


def test_metadata_with_the_content_of_another_file_are_named_and_can_be_deleted(tmp_path):
    fill(tmp_path, 1, 2)
    path = tmp_path / "1" / "_CHECKPOINT_METADATA"
    path.write_text('[{"step": 1}]')
    with pytest.raises(sealed.DamagedError, match=f"{path} is damaged: .*; delete {path}"):
        open_checkpoints(tmp_path)
    path.unlink()
    open_checkpoints(tmp_path).restore(2, state())


def test_no_tensor_of_a_damaged_checkpoint_is_still_read_after_the_error(tmp_path, caplog):
    tensors = {f"tensor_{i}": jnp.arange(3000.0) + i for i in range(40)}
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, tensors, {})
    checkpoints.close()
    for path in (tmp_path / "1" / "state").glob("**/d/*"):  # The smallest hold the index alone.
        if path.stat().st_size < 10_000:
            flip(path)
    for _ in range(3):
        with pytest.raises(
            CheckpointError, match="checkpoint 1, .* is damaged: .*tensor_"
        ) as raised:
            open_checkpoints(tmp_path).restore(1, tensors)
        assert "tensorstore_spec" not in str(raised.value)
        gc.collect()  # Of a task nobody waited for; one that a closed loop is told of is an unraisable error.
    assert "never retrieved" not in caplog.text and "pending" not in caplog.text


def test_a_tensor_that_cannot_be_read_is_named_without_the_specification_of_its_reader(tmp_path):
    fill(tmp_path, 1)
    for path in (tmp_path / "1" / "state").glob("**/d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"params\.w|updates") as raised:
        open_checkpoints(tmp_path).restore(1, state())
    assert len(str(raised.value)) < 1000, raised.value


@pytest.mark.parametrize("name", ["position/metadata", "digests/process_0.json"])
def test_files_of_another_checkpoint_are_not_taken_for_its_own(tmp_path, name):
    fill(tmp_path, 1, 2)
    shutil.copy(tmp_path / "1" / name, tmp_path / "2" / name)
    with pytest.raises(CheckpointError, match=r"checkpoint 2, .* is damaged"):
        open_checkpoints(tmp_path).restore(2, state())


def test_a_checkpoint_of_before_digests_is_restored_and_said_to_be_unchecked(tmp_path, caplog):
    fill(tmp_path, 2)
    shutil.rmtree(tmp_path / "2" / "digests")
    restored, position = open_checkpoints(tmp_path).restore(2, state())
    assert float(restored["params"]["w"][0, 0]) == 2.5 and position["step"] == 2
    assert [r.message for r in caplog.records if "without digests" in r.message]


def test_digests_hold_in_another_sharding_and_another_dtype(tmp_path):
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    saved = state(3.0)
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    saved["params"]["w"] = jax.device_put(np.arange(8, dtype=np.float32).reshape(4, 2), spec)
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, saved, {})
    checkpoints.close()
    table = json.loads((tmp_path / "1" / "digests" / "process_0.json").read_text())["tensors"]
    assert list(table["params.w"]["shards"]) == ["0:1,0:2", "1:2,0:2", "2:3,0:2", "3:4,0:2"]
    wanted = state()
    wanted["params"]["w"] = wanted["params"]["w"].astype(jnp.bfloat16)
    restored, _ = open_checkpoints(tmp_path).restore(1, wanted)
    assert restored["params"]["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(restored["params"]["w"], np.arange(8.0).reshape(4, 2))


# In the background.


@pytest.fixture
def disk(monkeypatch):
    """Every write ends when it is set."""
    go, write = threading.Event(), async_checkpointer._background_wait_for_commit_futures

    def slow(*args, **kwargs):
        assert go.wait(WAIT_SECS)
        write(*args, **kwargs)

    monkeypatch.setattr(async_checkpointer, "_background_wait_for_commit_futures", slow)
    yield go
    go.set()


def test_saving_returns_before_the_checkpoint_is_on_disk(tmp_path, disk):
    checkpoints = open_checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, state(), {})
    assert checkpoints.written() is None and checkpoints.steps() == []
    assert workdir.checkpoint_steps(tmp_path) == []
    disk.set()
    written = checkpoints.written(wait=True)
    assert (written.step, written.num_bytes) == (1, 4 * 2 * 4 + 4) and written.secs > 0
    assert checkpoints.written(wait=True) is None
    assert checkpoints.steps() == workdir.checkpoint_steps(tmp_path) == [1]


def test_a_checkpoint_holds_the_state_at_its_save_whatever_becomes_of_its_buffers(tmp_path, disk):
    checkpoints = open_checkpoints(tmp_path)
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    values = np.arange(1 << 16, dtype=np.float32)
    saved = {"w": jax.device_put(values, sharding)}
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), saved)
    checkpoints.save(1, saved, {})
    later = jax.block_until_ready(overwrite(saved))
    assert float(later["w"].max()) == -1
    disk.set()
    restored, _ = checkpoints.restore(1, like)
    np.testing.assert_array_equal(restored["w"], values)


def test_a_write_that_fails_names_its_step_and_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    checkpoints = open_checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state(), {})
    checkpoints.written(wait=True)

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(async_checkpointer, "_background_wait_for_commit_futures", fail)
    checkpoints.save(2, state(), {})
    with pytest.raises(CheckpointError, match=r"checkpoint 2 was not written .*No space left"):
        checkpoints.save(3, state(), {})
    checkpoints.close()
    assert open_checkpoints(tmp_path).steps() == [1]


def test_a_wall_clock_that_steps_by_hours_meanwhile_fails_no_write(tmp_path, monkeypatch):
    hours = itertools.count(0.0, 3600.0)

    def now():
        callers = {sys._getframe(1).f_code.co_name, sys._getframe(2).f_code.co_name}
        return next(hours) if "result" in callers else 0.0  # Of the wait for all of it alone.

    monkeypatch.setattr(futures, "time", types.SimpleNamespace(time=now))
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(1, state(), {})
    checkpoints.close()
    assert next(hours) > 2 * 3600  # It was read.
    assert open_checkpoints(tmp_path).steps() == [1]


def test_a_write_that_does_not_end_names_its_step_and_its_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "WRITE_TIMEOUT_SECS", 0.1)
    checkpoints, released = open_checkpoints(tmp_path), threading.Event()
    finished = checkpoints._manager.wait_until_finished

    def wait():  # The manager calls it, too.
        if threading.current_thread().name == "checkpoint":
            released.wait(20.0)
        finished()

    monkeypatch.setattr(checkpoints._manager, "wait_until_finished", wait)
    checkpoints.save(1, state(), {})
    with pytest.raises(
        CheckpointError, match="checkpoint 1 was .*TimeoutError: no end within 0.1 s"
    ):
        checkpoints.written(wait=True)
    released.set()
    checkpoints._manager.close()


KILLED = """
import os, pathlib, signal, sys, time
import jax.numpy as jnp
from orbax.checkpoint._src.checkpointers import async_checkpointer
from jaxrl_async.learner.checkpoint import Checkpoints

checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, {"w": jnp.ones(4)}, {})
checkpoints.written(wait=True)

def kill(*args, **kwargs):
    deadline = time.monotonic() + 20
    while not [*pathlib.Path(sys.argv[1]).glob("2*")] and time.monotonic() < deadline:
        time.sleep(0.01)  # Its directory is made beside this thread.
    os.kill(os.getpid(), signal.SIGKILL)

async_checkpointer._background_wait_for_commit_futures = kill
checkpoints.save(2, {"w": 2 * jnp.ones(4)}, {})
checkpoints.written(wait=True)
"""


def test_a_process_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path):
    directory = tmp_path / "checkpoints"
    ended = subprocess.run([sys.executable, "-c", KILLED, directory], timeout=WAIT_SECS)
    assert ended.returncode == -signal.SIGKILL
    assert [path.name for path in directory.glob("2*")] not in ([], ["2"])  # the unfinished one
    assert workdir.checkpoint_steps(tmp_path) == [1]
    successor = Checkpoints(directory, keep=1, remove_unfinished=True)
    assert [path.name for path in directory.iterdir()] == ["1"]
    restored, _ = successor.restore(successor.latest(), {"w": jnp.zeros(4)})
    np.testing.assert_array_equal(restored["w"], np.ones(4))
    successor.save(2, restored, {})
    successor.written(wait=True)
    assert [path.name for path in directory.glob("[0-9]*")] == ["2"]


def test_the_queue_hears_of_a_checkpoint_when_it_is_on_disk_and_the_plan_is_said_once(
    tmp_path, disk, caplog
):
    caplog.set_level(logging.INFO, logger="jaxrl_async.roles.learner")
    heard = []
    saves = Saves(
        open_checkpoints(tmp_path, keep=1), heard.append, 60.0, in_background=True, says=True
    )
    point = ResumePoint(4, 40, (), {}, {})
    saves.save(4, state(), point)
    saves.check()
    assert heard == [] and not [r for r in caplog.records if r.name.startswith("jaxrl_async")]
    disk.set()
    saves.save(8, state(), point)  # Waits for the one before.
    assert heard == [4] and caplog.text.count("of checkpoint.grace_secs = 60") == 1
    saves.check(wait=True)
    assert heard == [4, 8] and caplog.text.count("checkpoint.grace_secs") == 1


def test_a_checkpoint_that_is_not_written_in_the_background_is_on_disk_when_save_returns(
    tmp_path, disk
):
    heard = []
    checkpoints = open_checkpoints(tmp_path, keep=1)
    saves = Saves(checkpoints, heard.append, 60.0, in_background=False, says=False)
    threading.Timer(0.2, disk.set).start()
    saves.save(4, state(), ResumePoint(4, 40, (), {}, {}))
    assert disk.is_set() and heard == [4] and checkpoints.steps() == [4]

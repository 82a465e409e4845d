"""Checkpoints: saved states come back, 0 is kept, and a misfit is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.learner.checkpoint import CheckpointError, Checkpoints


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
    assert checkpoints.steps() == [0, 3, 4]


def test_a_step_that_is_not_there_is_named_with_those_that_are(tmp_path):
    checkpoints = open_checkpoints(tmp_path)
    checkpoints.save(2, state(), {})
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

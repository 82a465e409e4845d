"""Several slices compute what one device does: each sums its own gradients, and an update sums those of all."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from fixtures.small_learner import assert_same, flat, params_on
from fixtures.train_steps import RECOMPUTE, accumulated, groups_of, make, pack

from jaxrl_async.fit import hlo
from jaxrl_async.models import sharding


def summed(accumulator):
    sums = jax.tree.map(lambda x: x.sum(0), accumulator)
    return dataclasses.replace(sums, maxima=accumulator.maxima.max(0))


@pytest.mark.long
@pytest.mark.parametrize(
    "divided",
    [
        dict(slices=2, mesh_shape=(1, 2, 1)),
        dict(slices=4, mesh_shape=(2, 1, 1)),
        dict(slices=2, mesh_shape=(1, 2, 2), head_chunk_tokens=7),
        dict(slices=2, mesh_shape=(1, 2, 1), context=2),
        dict(slices=2, mesh_shape=(1, 2, 2), attention_kernel="splash", shared_prompts=False),
    ],
    ids=str,
)
def test_slices_sum_what_one_device_does(divided):
    names = ("slices", "mesh_shape", "context")
    same = {name: value for name, value in divided.items() if name not in names}
    tokens = 256 if "attention_kernel" in same else 32
    batches = pack(groups_of(2 * tokens // 3), row_tokens=tokens)
    several, alone = (make(RECOMPUTE, **changes) for changes in (divided, same))
    found = accumulated(batches, several)
    by_slice = found.sums[:, :, 0].sum(axis=1)
    assert len(by_slice) == divided["slices"] and (by_slice > 0).all()  # Each has tokens.
    expected = accumulated(batches, alone)
    assert_same(summed(found), expected)

    states, metrics = [], []
    for (mesh, train_step), accumulator in ((several, found), (alone, expected)):
        state, spent, row = train_step.update(train_step.init(params_on(mesh)), accumulator)
        assert not flat(spent).any()
        states, metrics = [*states, flat(state.params)], [*metrics, row]
    np.testing.assert_allclose(*states, atol=1e-5)
    for name, value in metrics[1].items():
        np.testing.assert_allclose(metrics[0][name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_only_an_update_joins_slices():
    _, train_step = make(RECOMPUTE, (1, 2, 1), slices=2)
    (batch,) = pack(groups_of(8))
    joined = {}
    for name, traced in train_step.trace(batch).items():
        schedule = hlo.schedule_of(traced.lower().compile().as_text())
        transfers = [step for step, _ in hlo._flat(schedule) if isinstance(step, hlo.Transfer)]
        groups = [group for transfer in transfers for group in transfer.groups]
        joined[name] = any({i // 2 for i in group} == {0, 1} for group in groups)
    assert joined == {"score": False, "accumulate": False, "update": True}


# Meshes.


def tpus(*slices):
    return [types.SimpleNamespace(platform="tpu", slice_index=s) for s in slices]


@pytest.mark.parametrize("slices", [2, 4])
def test_a_mesh_takes_slices_of_tpus_as_they_are(slices):
    parts = sharding._by_slice(tpus(1, 0, 1, 0), slices)
    assert [[device.slice_index for device in part] for part in parts] == [[0, 0], [1, 1]]


@pytest.mark.parametrize(
    ("devices", "slices", "message"),
    [
        (tpus(0, 0, 0, 1), 2, r"2 TPU slices, with 3, 1: they must be of one size"),
        (tpus(0, 0, 1, 1), 1, r"2 TPU slices, with 2, 2: .*learner\.slices = 1 a multiple of 2"),
        (tpus(0, 1, 2, 3), 2, r"4 TPU slices, with 1, 1, 1, 1: .*= 2 a multiple of 4"),
    ],
)
def test_slices_that_are_not_the_networks_are_refused(devices, slices, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(1, 4 // slices, 1, devices, slices=slices)


@pytest.mark.parametrize(
    ("num", "remedy"), [(4, r": learner\.slices=2 takes them all$"), (3, "there are 3$")]
)
def test_slices_that_do_not_divide_the_devices_are_refused(num, remedy):
    with pytest.raises(ValueError, match=rf"slices 3 × data 1 × fsdp 2 .* = 6 devices, .*{remedy}"):
        sharding.make_mesh(1, 2, 1, jax.devices()[:num], slices=3)

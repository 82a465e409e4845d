"""Gradients summed by rings of permutes are those that the compiler sums."""

import jax
import numpy as np
import pytest
from fixtures.models import tiny
from fixtures.small_learner import assert_same, params_on
from fixtures.train_steps import RECOMPUTE, TINY, VERSION, groups_of, make, pack
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_async.models import axes, lora, sharding

BATCHES = pack(groups_of(20), row_tokens=32)
MESHES = {
    "two": dict(mesh_shape=(1, 2, 1)),
    "four": dict(mesh_shape=(1, 4, 1), head_chunk_tokens=7),
    "eight": dict(mesh_shape=(1, 8, 1), head_chunk_tokens=7),
    "data and tensor": dict(mesh_shape=(2, 2, 2), head_chunk_tokens=7),
    "context": dict(mesh_shape=(1, 2, 1), context=4),
    "slices": dict(mesh_shape=(1, 2, 1), slices=2),
    "blocks": dict(mesh_shape=(1, 4, 1), blocks=2),
    "remat": dict(mesh_shape=(1, 4, 1), config=tiny(remat=True, tied_embeddings=False)),
    "lora": dict(
        mesh_shape=(1, 4, 1), config=tiny(lora=lora.LoRA(2, 4.0, ("q_proj", "down_proj")))
    ),
}


@pytest.mark.parametrize("columns_first", [False, True])
def test_each_device_gets_its_part_of_the_sum(columns_first):
    mesh = sharding.make_mesh(1, 8, 1)  # rings of two and of four
    parts = np.random.default_rng(0).normal(size=(8, 3, 16)).astype(np.float32)
    axes_of_sum = (None, axes.SHARDS)

    @jax.jit
    def total(parts):
        parts = axes.constrain(parts, (*axes.ROWS, axes.COLUMNS))
        own = jax.typeof(parts).sharding.mesh
        return axes.ring_sum(parts, axes_of_sum, own, columns_first)

    found = total(jax.device_put(parts, NamedSharding(mesh, PartitionSpec(axes.SHARDS))))
    assert found.sharding.shard_shape(found.shape) == (3, 2)
    np.testing.assert_allclose(found, parts.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", MESHES)
def test_a_ring_sums_what_the_compiler_sums(name):
    config = MESHES[name].get("config", TINY)

    def summed(by):
        mesh, train_step = make(RECOMPUTE, gradient_sums=by, **MESHES[name])
        params = params_on(mesh, config)
        if config.lora:  # The compiler sums adapters.
            params, base = lora.split(params)
            train_step.freeze(base)
        program = str(train_step.trace(BATCHES[0])["accumulate"].jaxpr)
        assert ("ppermute" in program) == (by == "ring" and not config.lora)
        accumulator = train_step.zero_accumulator(VERSION)
        for batch in BATCHES:
            proximal = train_step.anchor(params, batch)
            accumulator = train_step.accumulate(params, accumulator, batch, proximal, VERSION)
        return accumulator

    assert_same(summed("ring"), summed("compiler"), tolerance=1e-6)

"""Rows whose tokens are divided over devices: the losses and gradients of whole rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.models import tiny
from fixtures.small_learner import assert_same, params_on
from fixtures.train_steps import (
    GSPO,
    LOSSES,
    RECOMPUTE,
    VERSION,
    accumulated,
    group_of,
    make,
    pack,
)

from jaxrl_async.models import axes, sharding

ROW_TOKENS = 288  # three blocks of attention, and a multiple of 8
# Prompts before and after the cut of a row into parts, sequences over several parts, and padding.
GROUPS = [
    group_of(40, 70, 130, 9, 20, index=0),
    group_of(3, 8, 1, 5, 9, index=1),
    group_of(90, 30, 60, 100, 7, index=2),
    group_of(1, 2, 3, 2, 1, index=3),
]
MESHES = [((1, 1, 1), 2), ((1, 1, 1), 4), ((1, 1, 1), 8), ((2, 1, 2), 2), ((1, 2, 1), 4)]


def layout(shared_prompts):
    return pack(GROUPS, microbatch_rows=4, row_tokens=ROW_TOKENS, shared_prompts=shared_prompts)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh_shape", "context", "shared_prompts"),
    [(*mesh, shared) for mesh in MESHES for shared in (False, True)],
)
def test_loss_and_gradient_are_those_of_whole_rows(mesh_shape, context, shared_prompts):
    batches = layout(shared_prompts)
    divided = make(RECOMPUTE, mesh_shape, context=context, head_chunk_tokens=100)
    whole = accumulated(batches, make(RECOMPUTE, head_chunk_tokens=100))
    assert_same(accumulated(batches, divided), whole, tolerance=1e-5)


@pytest.mark.parametrize(
    "loss",
    [pytest.param(GSPO, id="gspo")]
    + [pytest.param(loss, id=name, marks=pytest.mark.long) for name, loss in LOSSES.items()],
)
def test_every_objective_sees_whole_sequences(loss):
    batches = layout(True)
    divided = make(loss, (1, 1, 1), context=4)
    assert_same(accumulated(batches, divided), accumulated(batches, make(loss)), tolerance=1e-5)


def test_untied_and_rematerialised_models_are_divided_too():
    config, batches = tiny(tied_embeddings=False, remat=True), layout(True)

    def run(**mesh):
        mesh, train_step = make(RECOMPUTE, config=config, head_chunk_tokens=100, **mesh)
        params = params_on(mesh, config)
        accumulator = train_step.zero_accumulator()
        for batch in batches:
            proximal = train_step.anchor(params, batch)
            accumulator = train_step.accumulate(params, accumulator, batch, proximal, VERSION)
        return accumulator

    assert_same(run(mesh_shape=(1, 2, 1), context=2), run(), tolerance=1e-5)


def test_a_device_holds_its_part_of_a_row_and_of_the_parameters():
    mesh, train_step = make(RECOMPUTE, (1, 2, 1), context=4, head_chunk_tokens=100)
    assert sharding.batch_sharding(mesh).shard_shape((4, ROW_TOKENS)) == (2, ROW_TOKENS // 4)
    kernel = params_on(mesh)["blocks"]["gate"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (2, 16 // 8, 32)
    batch = layout(False)[0]
    program = train_step.trace(batch)["accumulate"].lower().compile().as_text()
    # Activations between the layers, [2, 72, 16] and on one axis [144, 32]; never a whole row of the MLP.
    assert re.search(r"f32\[144,32\]", program)
    assert not re.search(r"f32\[(2,288|4,288|576|1152),32\]", program)


def test_tokens_on_one_axis_return_to_their_rows():
    mesh = sharding.make_mesh(1, 2, 1, context=4)
    x = np.arange(4 * 8 * 3).reshape(4, 8, 3)

    @jax.jit
    def there_and_back(x):
        flat = axes.on_one_axis(x)
        return flat, axes.in_rows(flat, 4, 8)

    flat, back = there_and_back(jax.device_put(jnp.asarray(x), sharding.batch_sharding(mesh)))
    np.testing.assert_array_equal(back, x)
    # The first device has the first two tokens of the first two rows.
    np.testing.assert_array_equal(flat[:4], x[:2, :2].reshape(4, 3))

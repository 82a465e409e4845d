"""Blocks: each step trains its own alone, as an optimizer of its own would, and no bit of the others changes."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from fixtures.models import tiny
from fixtures.small_learner import flat, make_train_step, params_on
from fixtures.train_steps import A3PO, VERSION, groups_of, pack

from jaxrl_async.config.settings import Learner
from jaxrl_async.learner.optimizer import make_optimizer
from jaxrl_async.learner.train_step import TrainState
from jaxrl_async.models import hf, lora, sharding

CONFIG = tiny(num_layers=3, tied_embeddings=False)
BATCH = pack(groups_of())[0]
ADAM = Learner(learning_rate=1e-2, warmup_updates=5, weight_decay=0.1, max_grad_norm=0.1)


@functools.cache
def make(num_blocks=2, config=CONFIG, mesh_shape=(1, 1, 1), **changes):
    """A mesh and a train step of two minibatches, with AdamW, a warm-up and a small bound of the norm."""
    learner = dataclasses.replace(ADAM, blocks=num_blocks, **changes)
    mesh = sharding.make_mesh(*mesh_shape, jax.devices()[: np.prod(mesh_shape)])
    settings = {field.name: getattr(learner, field.name) for field in dataclasses.fields(learner)}
    optimizer = make_optimizer(learner)
    return mesh, make_train_step(config, mesh, A3PO, optimizer=optimizer, **settings)


@dataclasses.dataclass(frozen=True)
class Update:
    """An update, all on the host."""

    before: TrainState
    grads: nnx.State  # of the loss per token
    after: TrainState
    grad_norm: float


def updates(made, number, config=CONFIG):
    """The first updates, two to a step."""
    mesh, train_step = made
    state = train_step.init(params_on(mesh, config))
    for _ in range(number):
        before, zeros = jax.device_get(state), train_step.zero_accumulator()
        accumulator = train_step.accumulate(state.params, zeros, BATCH, None, VERSION)
        grads = jax.tree.map(lambda g: g / BATCH.mask.sum(), jax.device_get(accumulator.grads))
        state, _, metrics = train_step.update(state, accumulator)
        assert metrics["finite"] == 1
        yield Update(before, grads, jax.device_get(state), float(metrics["policy/grad_norm"]))


def of_block(tree, block, num_blocks=2):
    """path → the part of an array that is in a block of three layers; the rule, written out."""
    own = {(2, 0): [0, 1], (2, 1): [2], (3, 0): [0], (3, 1): [1], (3, 2): [2]}[num_blocks, block]
    found = {}
    for path, leaf in nnx.to_flat_state(tree):
        value = np.asarray(leaf.get_value(), np.float32)
        if path[0] == "blocks":
            found[path] = value[own]
        elif block == {"embedding": 0, "final_norm": num_blocks - 1, "head": num_blocks - 1}[path[0]]:
            found[path] = value
    return found


def norm_of(grads):
    return np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grads.values()))


@pytest.mark.parametrize("num_blocks", [2, 3])
@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (1, 2, 2)])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_a_step_changes_its_block_and_no_bit_of_the_others(num_blocks, mesh_shape, param_dtype):
    made = make(num_blocks, mesh_shape=mesh_shape, param_dtype=param_dtype)
    for i, update in enumerate(updates(made, 2 * num_blocks + 1)):
        (before, *_), (after, *_) = update.before.opt_state, update.after.opt_state
        for block in range(num_blocks):
            for old, new in (
                (update.before.params, update.after.params),
                (before.mu, after.mu),
                (before.nu, after.nu),
            ):
                old, new = (of_block(tree, block, num_blocks) for tree in (old, new))
                changed = {path for path in old if (old[path] != new[path]).any()}
                assert changed == (old.keys() if block == i // 2 % num_blocks else set())


def test_each_block_moves_as_by_an_optimizer_of_its_own():
    states = {}
    for i, update in enumerate(updates(make(), 9)):
        block = i // 2 % 2
        params, grads = of_block(update.before.params, block), of_block(update.grads, block)
        assert norm_of(grads) > 0.1, "the bound of the norm is felt"
        grads = {path: np.float32(g * 0.1 / norm_of(grads)) for path, g in grads.items()}
        # The rate follows all updates, Adam's count those of the block.
        rate = 1e-2 * min(1, (i + 1) / 5)
        adam = optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
        state = states.get(block, adam.init(params))
        expected, states[block] = adam.update(grads, state, params)
        found = of_block(update.after.params, block)
        for path in params:
            np.testing.assert_allclose(
                found[path], params[path] + expected[path], rtol=1e-6, atol=1e-7, err_msg=f"{i} {path}"
            )
        for moment in ("mu", "nu"):
            ours = of_block(getattr(update.after.opt_state[0], moment), block)
            for path, value in getattr(states[block][0], moment).items():
                np.testing.assert_allclose(ours[path], value, rtol=1e-4, atol=1e-9)
    assert {block: state[0].count for block, state in states.items()} == {0: 5, 1: 4}


def test_the_gradient_norm_is_that_of_the_block():
    for i, update in enumerate(updates(make(), 4)):
        own, other = (norm_of(of_block(update.grads, block)) for block in (i // 2, 1 - i // 2))
        np.testing.assert_allclose(update.grad_norm, own, rtol=1e-5)
        assert abs(own - other) > 0.01 * own


def test_a_gradient_of_another_block_that_is_not_finite_reaches_nothing():
    mesh, train_step = make()
    state = train_step.init(params_on(mesh, CONFIG))
    zeros = train_step.zero_accumulator()
    accumulator = train_step.accumulate(state.params, zeros, BATCH, None, VERSION)
    bad = accumulator.grads
    bad["head"]["kernel"] = bad["head"]["kernel"].replace(bad["head"]["kernel"].get_value() * np.nan)
    state, _, metrics = train_step.update(state, dataclasses.replace(accumulator, grads=bad))
    assert metrics["finite"] == 1 and np.isfinite(flat(state)).all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_version_differs_from_the_one_before_in_the_tensors_of_its_block(tied):
    config = tiny(num_layers=3, tied_embeddings=tied)
    for i, update in enumerate(updates(make(config=config), 4, config)):
        old, new = (
            dict(hf.to_tensors(state.params, config, "float32"))
            for state in (update.before, update.after)
        )
        changed = {name for name in old if (old[name] != new[name]).any()}
        first = {name for name in old if ".layers.0." in name or ".layers.1." in name}
        first.add("model.embed_tokens.weight")
        assert changed == (first if i < 2 else old.keys() - first)


def test_adapters_are_of_their_layers_block():
    config = tiny(num_layers=3, lora=lora.LoRA(2, 4.0, ("q_proj", "down_proj")))
    mesh, train_step = make(config=config)
    adapters, base = lora.split(params_on(mesh, config))
    train_step.freeze(base)
    state = train_step.init(adapters)
    for i in range(6):
        before, zeros = jax.device_get(state.params), train_step.zero_accumulator()
        accumulator = train_step.accumulate(state.params, zeros, BATCH, None, VERSION)
        state = train_step.update(state, accumulator)[0]
        for block in (0, 1):
            old, new = (of_block(tree, block) for tree in (before, jax.device_get(state.params)))
            # A moves when B is no longer zero.
            moved = [(old[path] != new[path]).any() for path in old if i > 3 or path[-1] == "lora_b"]
            assert len(moved) >= 2 and all(moved) == any(moved) == (block == i // 2 % 2)


def test_one_program_serves_all_blocks():
    jax.clear_caches()
    made = make.__wrapped__(3)
    assert len(list(updates(made, 7))) == 7
    assert made[1].num_compilations() == 4  # init, zeros, accumulate, update


@pytest.mark.parametrize("number", [0, 4])
def test_blocks_without_a_layer_are_refused(number):
    with pytest.raises(ValueError, match=rf"learner.blocks .* \[1, 3\].* got {number}"):
        make(number)

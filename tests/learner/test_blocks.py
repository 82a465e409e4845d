"""Blocks: a step has the gradient of its own alone, trains it as an optimizer of its own, and no bit of the others."""

import contextlib
import dataclasses
import functools
import itertools
import json
import zlib

import jax
import numpy as np
import optax
import pytest
from fixtures.models import tiny
from fixtures.recorded_run import Recorder
from fixtures.small_learner import flat, make_packer, make_train_step, params_on, train
from fixtures.train_steps import A3PO, VERSION, groups_of, pack
from flax import nnx

from jaxrl_async.config.settings import Learner
from jaxrl_async.learner.checkpoint import Checkpoints
from jaxrl_async.learner.optimizer import make_optimizer
from jaxrl_async.learner.train_step import TrainState
from jaxrl_async.models import hf, lora, sharding
from jaxrl_async.versions import difference
from jaxrl_async.versions.store import WeightStore

CONFIG = tiny(num_layers=3, tied_embeddings=False)
BATCH = pack(groups_of())[0]
ADAM = Learner(learning_rate=1e-2, warmup_updates=5, weight_decay=0.1, max_grad_norm=0.1)

SHAPES = {  # number of blocks → of a train step
    2: dict(num_blocks=2, config=CONFIG),
    # At this rate every parameter moves beyond its rounding.
    3: dict(
        num_blocks=3,
        config=tiny(num_layers=3),
        mesh_shape=(1, 2, 2),
        param_dtype="bfloat16",
        learning_rate=0.1,
    ),
}
NUM_BLOCKS = [2, pytest.param(3, marks=pytest.mark.long)]


@functools.cache
def make(num_blocks=2, config=CONFIG, mesh_shape=(1, 1, 1), **changes):
    """A mesh and a train step of two minibatches, with AdamW, a warm-up and a small bound of the norm."""
    learner = dataclasses.replace(ADAM, blocks=num_blocks, **changes)
    mesh = sharding.make_mesh(*mesh_shape, jax.devices()[: np.prod(mesh_shape)])
    settings = {field.name: getattr(learner, field.name) for field in dataclasses.fields(learner)}
    settings["optimizer"] = make_optimizer(learner)
    return mesh, make_train_step(config, mesh, A3PO, **settings)


@dataclasses.dataclass(frozen=True)
class Update:
    """An update, all on the host."""

    before: TrainState
    grads: nnx.State  # of the loss per token, by all parameters
    own_grads: nnx.State  # the same, as the step has them
    after: TrainState
    grad_norm: float


@functools.cache
def updates(num_blocks):
    """The first seven, two to a step, of one of SHAPES."""
    mesh, train_step = make(**SHAPES[num_blocks])
    _, of_all = make(**SHAPES[num_blocks] | {"num_blocks": 1})
    params = params_on(mesh, SHAPES[num_blocks]["config"])
    state, found = train_step.init(params), []
    for i in range(7):
        before, accumulator = jax.device_get(state), accumulated(train_step, state, i // 2)
        grads, own_grads = (
            jax.tree.map(lambda g: g / BATCH.mask.sum(), jax.device_get(a.grads))
            for a in (accumulated(of_all, state, i // 2), accumulator)
        )
        state, _, metrics = train_step.update(state, accumulator)
        assert metrics["finite"] == 1
        grad_norm = float(metrics["policy/grad_norm"])
        found.append(Update(before, grads, own_grads, jax.device_get(state), grad_norm))
    return found


def accumulated(train_step, state, version):
    """Of a step from this version; the samples are of the same age in all."""
    zeros = train_step.zero_accumulator(version)
    return train_step.accumulate(state.params, zeros, BATCH, None, VERSION)


def of_block(tree, block, num_blocks=2):
    """path → the part of an array that is in a block of three layers; the rule, written out."""
    own = {(2, 0): [0, 1], (2, 1): [2], (3, 0): [0], (3, 1): [1], (3, 2): [2]}[num_blocks, block]
    last = num_blocks - 1
    found = {}
    for path, leaf in nnx.to_flat_state(tree):
        value = np.asarray(leaf.get_value(), np.float32)
        if path[0] == "blocks":
            found[path] = value[own]
        elif block == {"embedding": 0, "final_norm": last, "head": last}[path[0]]:
            found[path] = value
    return found


def own_parts(tree):
    """path → a block's part of an array, of which the step has that alone."""
    parts = {path: np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(tree)}
    return {path: part for path, part in parts.items() if part.size}


def num_changed(file):
    """The tensors that a difference changes; the others have no bytes in it."""
    data = file.read_bytes()
    tensors = json.loads(zlib.decompress(data[16 : 16 + int.from_bytes(data[8:16], "little")]))[
        "tensors"
    ]
    assert all(bool(tensor["packed"]) == bool(tensor["changed"]) for tensor in tensors)
    return sum(tensor["changed"] > 0 for tensor in tensors)


def norm_of(grads):
    return np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grads.values()))


def changed_of(old, new):
    return {name for name in old if (old[name] != new[name]).any()}


def test_each_block_has_its_programs_and_all_are_compiled_at_the_start():
    mesh, train_step = make(**SHAPES[2])
    padding = jax.tree.map(np.zeros_like, BATCH)
    state, accumulator = train_step.warm_up(train_step.init(params_on(mesh, CONFIG)), padding)
    assert train_step.num_compilations() == 1 + 2 * 3  # init; zeros, accumulate, update
    for version in range(3):
        accumulator = train_step.zero_accumulator(version, accumulator)
        accumulator = train_step.accumulate(state.params, accumulator, BATCH, None, VERSION)
        state, accumulator, _ = train_step.update(state, accumulator)
    assert train_step.num_compilations() == 7


def test_a_spent_accumulator_serves_a_step_of_its_block():
    _, train_step = make(**SHAPES[2])
    spent = train_step.zero_accumulator(0)
    assert train_step.zero_accumulator(2, spent) is spent
    assert train_step.zero_accumulator(3, spent).block == 1


def test_a_backward_pass_keeps_nothing_of_the_layers_below_its_block():
    config = tiny(num_layers=6, tied_embeddings=False)

    def temporary_bytes(num_blocks, block):
        train_step = make(num_blocks, config)[1]
        params = train_step.abstract_state().params
        zeros = jax.eval_shape(lambda: train_step.zero_accumulator(block))
        arguments = (params, None, None, zeros, BATCH, None, np.int32(VERSION))
        program = train_step._accumulate[block].lower(*arguments).compile()
        return program.memory_analysis().temp_size_in_bytes

    first, middle, last = (temporary_bytes(3, block) for block in range(3))
    assert last < middle < first and last < 0.7 * temporary_bytes(1, 0)


def test_what_a_plan_compiles_is_the_first_block():
    _, train_step = make(**SHAPES[2])
    accumulator = train_step.abstract_accumulator()
    parts = [leaf.shape[0] for _, leaf in nnx.to_flat_state(accumulator.grads["blocks"])]
    assert set(parts) == {2} and accumulator.grads["head"]["kernel"].shape[0] == 0
    accumulate = train_step.trace(BATCH)["accumulate"]
    num_grads = len(jax.tree.leaves(accumulator.grads))
    assert [leaf.shape for leaf in jax.tree.leaves(accumulate.out_info)[:num_grads]] == [
        leaf.shape for leaf in jax.tree.leaves(accumulator.grads)
    ]


@pytest.mark.parametrize("num_blocks", NUM_BLOCKS)
def test_the_gradient_is_the_blocks_part_of_the_whole_one(num_blocks):
    for i, update in enumerate(updates(num_blocks)):
        expected = of_block(update.grads, i // 2 % num_blocks, num_blocks)
        found = own_parts(update.own_grads)
        assert found.keys() == expected.keys()
        for path, value in expected.items():
            tolerance = 1e-5 * np.linalg.norm(value) + 1e-9
            assert np.linalg.norm(found[path] - value) < tolerance, path


@pytest.mark.parametrize("num_blocks", NUM_BLOCKS)
def test_a_step_changes_its_block_and_no_bit_of_the_others(num_blocks):
    for i, update in enumerate(updates(num_blocks)):
        (before, *_), (after, *_) = update.before.opt_state, update.after.opt_state
        for block in range(num_blocks):
            for trees in (
                (update.before.params, update.after.params),
                (before.mu, after.mu),
                (before.nu, after.nu),
            ):
                old, new = (of_block(tree, block, num_blocks) for tree in trees)
                own = block == i // 2 % num_blocks
                assert changed_of(old, new) == (old.keys() if own else set())


@pytest.mark.parametrize("num_blocks", NUM_BLOCKS)
def test_a_difference_is_of_the_tensors_of_its_block_alone(num_blocks, tmp_path):
    config, store = SHAPES[num_blocks]["config"], WeightStore(tmp_path, keep=2)
    for i, update in enumerate(updates(num_blocks)):
        old, new = (
            dict(hf.to_tensors(state.params, config, "float32"))
            for state in (update.before, update.after)
        )
        block, last = i // 2 % num_blocks, num_blocks - 1
        layers = {2: {0: (0, 1), 1: (2,)}, 3: {0: (0,), 1: (1,), 2: (2,)}}[num_blocks][block]
        own = {name for name in old if any(f".layers.{layer}." in name for layer in layers)}
        own |= {"model.embed_tokens.weight"} if block == 0 else set()
        own |= {"model.norm.weight", "lm_head.weight"} & old.keys() if block == last else set()
        assert changed_of(old, new) == own
        if i % 2 == 0:
            paths = [
                store.write(2 * i + j, tensors.items(), hf.write_config(config))
                for j, tensors in enumerate((old, new))
            ]
            assert num_changed(difference.write(*paths)) == len(own)


def test_each_block_moves_as_by_an_optimizer_of_its_own():
    adam = optax.adamw(1.0, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    next_of, states = jax.jit(adam.update), {}
    for i, update in enumerate(updates(2)):
        block = i // 2 % 2
        params, grads = of_block(update.before.params, block), own_parts(update.own_grads)
        assert norm_of(grads) > 0.1, "the bound of the norm is felt"
        grads = {path: np.float32(g * 0.1 / norm_of(grads)) for path, g in grads.items()}
        # The rate follows all updates, Adam's count those of the block.
        rate = 1e-2 * min(1, (i + 1) / 5)
        state = states.get(block, adam.init(params))
        moved, states[block] = next_of(grads, state, params)
        found = of_block(update.after.params, block)
        for path, value in params.items():
            np.testing.assert_allclose(
                found[path], value + rate * moved[path], rtol=1e-6, atol=1e-7
            )
        for moment in ("mu", "nu"):
            found = of_block(getattr(update.after.opt_state[0], moment), block)
            for path, value in getattr(states[block][0], moment).items():
                np.testing.assert_allclose(found[path], value, rtol=1e-4, atol=1e-9)
    assert {block: int(state[0].count) for block, state in states.items()} == {0: 4, 1: 3}


@pytest.mark.parametrize("num_blocks", NUM_BLOCKS)
def test_offloaded_moments_lie_with_the_host_and_every_update_is_the_same_bit_for_bit(num_blocks):
    mesh, train_step = make(**SHAPES[num_blocks])
    _, offloading = make(**SHAPES[num_blocks], offload_moments=True)
    state = offloading.init(params_on(mesh, SHAPES[num_blocks]["config"]))
    for i, update in enumerate(updates(num_blocks)):
        for moment in ("mu", "nu"):
            assert kinds_of(getattr(state.opt_state[0], moment)) == {"pinned_host"}
        assert kinds_of(state.params) == {"device"}
        before = state
        state, _, _ = offloading.update(state, accumulated(train_step, state, i // 2))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), update.after)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.opt_state))


def kinds_of(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def test_the_gradient_norm_is_that_of_the_block():
    for i, update in enumerate(updates(2)):
        own, other = (norm_of(of_block(update.grads, (i // 2 + j) % 2)) for j in (0, 1))
        np.testing.assert_allclose(update.grad_norm, own, rtol=1e-5)
        assert abs(own - other) > 0.01 * own


def test_the_loop_trains_the_blocks_in_turn():
    mesh, train_step = make(**SHAPES[2])

    def params_after(num_steps):
        state = train_step.init(params_on(mesh, CONFIG))
        settings = {"num_minibatches": 2, "blocks": 2, "num_steps": num_steps}
        state = train(Recorder(), state, train_step, pack=make_packer(8, 32), **settings)
        return jax.device_get(state.params)

    after = [jax.device_get(params_on(mesh, CONFIG)), *map(params_after, (1, 2, 3))]
    for version, trees in enumerate(itertools.pairwise(after)):
        for block in (0, 1):
            old, new = (of_block(tree, block) for tree in trees)
            assert bool(changed_of(old, new)) == (block == version % 2)


def test_a_run_resumed_within_a_cycle_is_the_uninterrupted_one_bit_for_bit(tmp_path):
    mesh, train_step = make(**SHAPES[2])
    _, offloading = make(**SHAPES[2], offload_moments=True)

    def run(state, first, last, train_step=train_step):
        settings = {"num_minibatches": 2, "blocks": 2, "num_steps": last}
        pack = make_packer(8, 32)
        return train(Recorder(), state, train_step, first_step=first, pack=pack, **settings)

    with contextlib.closing(Checkpoints(tmp_path, keep=1)) as checkpoints:
        # Step 4 is the second of its cycle, and so is the count of Adam.
        checkpoints.save(3, run(train_step.init(params_on(mesh, CONFIG)), 1, 3), {})
        whole = run(train_step.init(params_on(mesh, CONFIG)), 1, 6)
        for step in (train_step, offloading, train_step):
            restored, _ = checkpoints.restore(3, step.abstract_state())
            resumed = run(restored, 4, 6, step)
            np.testing.assert_array_equal(flat(resumed), flat(whole))
    assert int(whole.updates) == 12


def test_adapters_are_in_their_layers_block():
    config = tiny(num_layers=3, lora=lora.LoRA(2, 4.0, ("q_proj", "down_proj")))
    mesh, train_step = make(2, config)
    adapters, base = lora.split(params_on(mesh, config))
    train_step.freeze(base)
    state = train_step.init(adapters)
    for i in range(6):
        before, accumulator = jax.device_get(state.params), accumulated(train_step, state, i // 2)
        state = train_step.update(state, accumulator)[0]
        for block in (0, 1):
            old, new = (of_block(tree, block) for tree in (before, jax.device_get(state.params)))
            assert changed_of(old, new) == (old.keys() if block == i // 2 % 2 else set())


@pytest.mark.parametrize("number", [0, 4])
def test_blocks_without_a_layer_are_refused(number):
    with pytest.raises(ValueError, match=rf"learner.blocks .* \[1, 3\].* got {number}"):
        make(number)

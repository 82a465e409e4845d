"""The learner computes a batch with the engine's experts, and with the weights of its own router."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from fixtures.models import tiny
from fixtures.small_learner import assert_same, flat, params_on
from fixtures.train_steps import (
    A3PO,
    PENALISED,
    RECOMPUTE,
    VERSION,
    accumulated,
    group_of,
    make,
    pack,
)
from flax import nnx

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.learner.statistics import Statistics
from jaxrl_async.models import experts, transformer
from jaxrl_async.models.state import mapped

CONFIG = tiny(family="qwen3_moe", num_experts=8, experts_per_token=2, expert_mlp_dim=12)
UNKNOWN = 255


@functools.cache
def _batch():
    """Eight packed rows with shared prompts."""
    groups = [group_of(3, 5, 4, index=i) for i in range(16)]
    [batch] = pack(groups, row_tokens=32, shared_prompts=True)
    assert (batch.prefix_ids > 0).any() and batch.segment_ids.max() > 3
    return batch


def _with(batch, routes):
    return dataclasses.replace(batch, routes=routes)


def _own_routes(batch):
    """[B, T, L, K] of the parameters of the tests."""
    mesh, _ = make(config=CONFIG)
    model = nnx.merge(transformer.graphdef(CONFIG), params_on(mesh, CONFIG))
    ids = batch.segment_ids, batch.prefix_ids
    given = experts.Given(batch.segment_ids > 0, batch.segment_ids)
    routed = jax.jit(functools.partial(transformer.Transformer.routed, given=given))
    _, routing = routed(model, batch.tokens, batch.positions, ids)
    return np.moveaxis(np.asarray(routing.routes), 0, 2)


def _other_routes(batch):
    routes = np.random.default_rng(0).permuted(
        np.tile(np.arange(8, dtype=np.uint8), (*batch.tokens.shape, 2, 1)), axis=-1
    )[..., :2]
    routes[batch.segment_ids == 0] = UNKNOWN
    return routes


def _rates(grads):
    """At which the largest gradient moves its parameter by 0.02."""
    rate = 0.02 / np.abs(flat(grads)).max()
    return jax.tree.map(lambda _: rate, grads)


def _metrics(accumulator, loss=A3PO):
    found = Statistics(loss, has_experts=True).metrics(accumulator.sums, accumulator.maxima)
    return {name: float(value) for name, value in found.items()}


def _but_known(accumulator):
    """Without the count of recorded tokens."""
    column = Statistics(A3PO, has_experts=True)._sums.index("known")
    return dataclasses.replace(accumulator, sums=accumulator.sums.at[:, column].set(0))


def test_the_own_routes_replayed_change_nothing_and_others_change_the_policy():
    batch, made = _batch(), make(config=CONFIG)
    plain = accumulated([batch], made, config=CONFIG)
    own = _own_routes(batch)
    assert (own[batch.segment_ids > 0] < 8).all()
    assert_same(_but_known(accumulated([_with(batch, own)], made, config=CONFIG)), plain)
    unknown = np.full_like(own, UNKNOWN)
    assert_same(accumulated([_with(batch, unknown)], made, config=CONFIG), plain)
    assert _metrics(plain)["experts/routes_differ"] == 0
    others = accumulated([_with(batch, _other_routes(batch))], made, config=CONFIG)
    metrics = _metrics(others)
    assert metrics["experts/routes_differ"] > 0.5 and 1 < metrics["experts/load"] < 8
    assert np.abs(flat(others.grads) - flat(plain.grads)).max() > 1e-3
    router = others.grads["blocks"]["experts"]["router_kernel"][...]
    assert np.abs(np.asarray(router)).max() > 1e-4  # the weights are the live router's


def test_without_replay_the_router_decides_and_is_compared_with_the_record():
    batch, made = _batch(), make(config=CONFIG, replay_routes="off")
    others = _other_routes(batch)
    found = accumulated([_with(batch, others)], made, config=CONFIG)
    live = accumulated([_with(batch, np.full_like(others, UNKNOWN))], made, config=CONFIG)
    np.testing.assert_array_equal(flat(found.grads), flat(live.grads))
    others[::2] = UNKNOWN
    half = _metrics(accumulated([_with(batch, others)], made, config=CONFIG))
    found, live = _metrics(found), _metrics(live)
    assert found["experts/load"] == live["experts/load"]
    assert (found["experts/routes_known"], live["experts/routes_known"]) == (1, 0)
    assert found["experts/routes_differ"] > 0.5 and live["experts/routes_differ"] == 0
    # Those that are not known count nowhere.
    assert half["experts/routes_known"] < 0.6 and half["experts/routes_differ"] > 0.5


def test_anchor_and_reference_replay_the_routes_too():
    batch = _batch()
    batch = _with(batch, _other_routes(batch))
    mesh, step = make(PENALISED, config=CONFIG)
    params = params_on(mesh, CONFIG)
    accumulator = step.accumulate(
        params, step.zero_accumulator(), batch, None, VERSION, reference=params
    )
    total = _metrics(accumulator, PENALISED)
    assert abs(total["policy/kl_penalty"]) < 1e-9  # The reference is the policy.
    mesh, step = make(RECOMPUTE, config=CONFIG)
    anchor = step.anchor(params, batch)
    accumulator = step.accumulate(params, step.zero_accumulator(), batch, anchor, VERSION)
    assert abs(_metrics(accumulator, RECOMPUTE)["policy/ratio"] - 1) < 1e-6


def test_a_teachers_own_router_chooses_its_experts():
    batch = _batch()
    batch = _with(batch, _own_routes(batch))
    loss = LossConfig(preset="ppo", advantage="none", teacher="a")
    mesh, step = make(loss, config=CONFIG)
    params = params_on(mesh, CONFIG)

    def shuffled(path, param):  # the same function, by experts of other numbers
        if "experts" not in path:
            return param
        axis = -1 if path[-1] == "router_kernel" else 1
        return param.replace(np.roll(param.get_value(), 3, axis))

    teacher = jax.device_put(mapped(shuffled, params), jax.tree.map(lambda x: x.sharding, params))
    accumulator = step.accumulate(
        params, step.zero_accumulator(), batch, None, VERSION, reference=teacher
    )
    assert abs(_metrics(accumulator, loss)["policy/kl_teacher"]) < 1e-6


@pytest.mark.long
def test_recomputation_and_the_cut_into_microbatches_keep_the_gradient():
    loss = dataclasses.replace(A3PO, router_balance=0.5)
    batch = _batch()
    routes = _other_routes(batch)
    expected = accumulated([_with(batch, routes)], make(loss, config=CONFIG), config=CONFIG)
    remat = dataclasses.replace(CONFIG, remat=True)
    found = accumulated([_with(batch, routes)], make(loss, config=remat), config=remat)
    assert_same(found, expected)
    halves = [_with(batch, routes).rows(slice(i, i + 4)) for i in (0, 4)]
    cut = accumulated(halves, make(loss, config=CONFIG), config=CONFIG)
    a, b = flat(cut.grads), flat(expected.grads)
    assert np.linalg.norm(a - b) < 2e-6 * np.linalg.norm(b)


@pytest.mark.long
def test_the_balance_moves_the_router_towards_even_use():
    batch = _batch()
    batch = dataclasses.replace(batch, advantages=np.zeros_like(batch.advantages))
    loss = dataclasses.replace(A3PO, router_balance=1.0)
    made = make(loss, config=CONFIG)
    mesh, step = made
    params, balances = params_on(mesh, CONFIG), []
    for _ in range(2):
        accumulator = step.accumulate(
            params, step.zero_accumulator(), batch, step.anchor(params, batch), VERSION
        )
        balances.append(_metrics(accumulator)["experts/balance"])
        grads = accumulator.grads
        params = jax.tree.map(lambda p, g, rate: p - rate * g, params, grads, _rates(grads))
    assert 1 < balances[1] < balances[0]
    plain = accumulated([batch], make(config=CONFIG), config=CONFIG)
    assert np.abs(flat(plain.grads)).max() == 0  # No other part of the loss moves anything here.


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(dict(expert=8), marks=pytest.mark.long),
        pytest.param(dict(expert=2), marks=pytest.mark.long),
        pytest.param(dict(expert=4), marks=pytest.mark.long),
        pytest.param(dict(expert=2, mesh_shape=(1, 2, 2)), marks=pytest.mark.long),
        pytest.param(dict(expert=2, context=2, mesh_shape=(2, 1, 1)), marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("dense_layers", [(), (0,)], ids=["", "mixed"])
def test_devices_with_experts_of_their_own_compute_what_one_computes(shape, dense_layers):
    config = dataclasses.replace(CONFIG, dense_layers=dense_layers, remat=bool(dense_layers))
    loss = dataclasses.replace(A3PO, router_balance=0.5)
    batch = _batch()
    routes = _other_routes(batch)
    routes[:, ::2] = UNKNOWN
    batch = _with(batch, routes)
    expected = accumulated([batch], make(loss, config=config), config=config)
    found = accumulated([batch], make(loss, config=config, **shape), config=config)
    assert_same(found, expected, 1e-5)
    for layer in dense_layers:
        grads = found.grads["blocks"]["experts"]["up_kernel"][...][layer]
        assert not np.asarray(grads).any()


def test_a_balance_of_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="router_balance needs a model with experts, got 0.5"):
        make(LossConfig(router_balance=0.5))

"""The learner's three programs: invariances of the gradient, refused updates, compilations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fixtures import policy_loss
from fixtures.models import TINY, tiny
from fixtures.small_learner import assert_same, flat, make_train_step, params_on
from fixtures.train_steps import (
    CURRENT,
    RECOMPUTE,
    UNCLIPPED,
    VERSION,
    accumulated,
    advantages_of,
    groups_of,
    make,
    pack,
    updated,
)

from jaxrl_async.learner import packing
from jaxrl_async.learner.train_step import TrainStep
from jaxrl_async.objectives import anchors, kl
from jaxrl_async.types import NOT_SAMPLED, Group, Trajectory

SEQUENCE = dataclasses.replace(RECOMPUTE, ratio="sequence", reduction="sequence_mean")


def test_one_microbatch_equals_four():
    groups = groups_of(num_groups=13)
    one, four = pack(groups, microbatch_rows=8), pack(groups, microbatch_rows=2)
    assert (len(one), len(four)) == (1, 4)
    assert_same(accumulated(four), accumulated(one))


def test_one_device_equals_eight():
    batches = pack(groups_of())
    eight = accumulated(batches, make(RECOMPUTE, (2, 2, 2)))
    assert_same(eight, accumulated(batches, make(RECOMPUTE)))


def test_packed_equals_unpacked():
    groups = groups_of()
    alone = [
        batch
        for group, row in zip(groups, advantages_of(groups), strict=True)
        for t, advantage in zip(group.trajectories, row, strict=True)
        for batch in pack([Group(0, 0, (t,))], microbatch_rows=2, advantages=advantage[None, None])
    ]
    assert len(alone) == 8
    assert_same(accumulated(alone), accumulated(pack(groups)))


def test_a_masked_trajectory_is_as_if_removed():
    groups = groups_of(num_groups=3)
    advantages = advantages_of(groups)
    silent = tuple(
        dataclasses.replace(t, mask=np.zeros_like(t.mask)) for t in groups[-1].trajectories
    )
    masked = [*groups[:-1], dataclasses.replace(groups[-1], trajectories=silent)]
    assert_same(
        accumulated(pack(masked, advantages=advantages)),
        accumulated(pack(groups[:-1], advantages=advantages[:-1])),
    )


def test_a_kl_coefficient_that_falls_is_that_of_the_step():
    # Step 7 of 13: half of the way from 0.2 to 0.
    constant = dataclasses.replace(CURRENT, kl="k2", kl_to="behavior", kl_coefficient=0.1)
    falling = dataclasses.replace(constant, kl_coefficient=0.2, kl_final_coefficient=0.0)
    batches = pack(groups_of())
    expected = accumulated(batches, make(constant))
    assert_same(accumulated(batches, make(falling, num_steps=VERSION * 2 + 1)), expected)


def test_empty_microbatches_add_nothing():
    batches = pack(groups_of())
    assert_same(accumulated([*batches, packing.empty_batch(8, 32)]), accumulated(batches))


def test_padding_never_reaches_the_gradient():
    (batch,) = pack(groups_of())
    bad = dataclasses.replace(
        batch,
        behavior_logprobs=np.where(batch.mask, batch.behavior_logprobs, np.nan),
        advantages=np.where(batch.mask, batch.advantages, np.inf),
        token_versions=np.where(batch.mask, batch.token_versions, -1000),
    )
    assert_same(accumulated([bad]), accumulated([batch]), tolerance=0)


def test_unclipped_a3po_gradients_do_not_depend_on_staleness():
    # −w·A·∇log π_θ whatever d is; were the anchor not detached, it would be 1/d of that.
    batches, made = pack(groups_of()), make(UNCLIPPED)
    fresh = accumulated(batches, made, version=VERSION + 1)
    for version in (VERSION + 2, VERSION + 8):
        stale = accumulated(batches, made, version=version)
        np.testing.assert_allclose(flat(stale.grads), flat(fresh.grads), rtol=1e-3, atol=1e-5)


def test_staleness_is_that_of_the_token():
    # Versions [3, 3, 5, 5] at v_θ = 6: d = [3, 3, 1, 1], mean 2, largest 3.
    t = Trajectory(
        tokens=np.arange(5, dtype=np.int32),
        logprobs=np.array([0, -2, -3, -2, -3], np.float32),
        versions=np.array([NOT_SAMPLED, 3, 3, 5, 5], np.int32),
        mask=np.array([False, True, True, True, True]),
        prompt_length=1,
    )
    _, train_step = make()
    batches = pack([Group(0, 0, (t,))], advantages=np.ones((1, 1)))
    (_, _, metrics), params = updated(train_step, batches)
    (batch,) = batches
    logprobs = train_step.score(params, batch)
    staleness = np.zeros((8, 32))
    staleness[0, :5] = [0, 3, 3, 1, 1]
    anchor = anchors.a3po(logprobs, batch.behavior_logprobs, staleness, batch.mask)
    ratio = np.exp(logprobs - anchor)[batch.mask]
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (2, 3)
    np.testing.assert_allclose(metrics["policy/ratio"], ratio.mean(), rtol=1e-5)


def test_metrics_and_denominator_are_over_the_original_mask():
    _, train_step = make()
    batches = pack(groups_of(), microbatch_rows=2)
    (_, _, metrics), params = updated(train_step, batches)
    tokens = sum(batch.mask.sum() for batch in batches)
    expected = dict.fromkeys(("loss/policy", "policy/dropped_by_cap", "policy/kl_behavior"), 0.0)
    for batch in batches:
        logprobs, behavior = train_step.score(params, batch), batch.behavior_logprobs
        staleness = VERSION - batch.token_versions
        anchor = anchors.a3po(logprobs, behavior, staleness, batch.mask)
        loss = policy_loss.policy_loss(
            logprobs,
            behavior,
            anchor,
            batch.advantages,
            batch.mask,
            clip_low=0.2,
            clip_high=0.28,
            behavior_cap=1.5,
            behavior_cap_mode="mask",
            dual_clip=None,
        )
        expected["loss/policy"] += float(loss.sum())
        expected["policy/dropped_by_cap"] += np.sum((np.exp(anchor - behavior) > 1.5)[batch.mask])
        expected["policy/kl_behavior"] += float(kl.k3(behavior, logprobs, batch.mask).sum())
    assert metrics["tokens"] == tokens
    assert 0 < expected["policy/dropped_by_cap"] < tokens
    for name, total in expected.items():
        np.testing.assert_allclose(metrics[name], total / tokens, rtol=1e-4, err_msg=name)


def test_lag_buckets_divide_the_tokens_by_their_staleness():
    # Versions 2 to 6 at v_θ = 6: staleness 0 to 4, so the buckets from 5 on are empty and read 0.
    _, train_step = make()
    batches = pack(groups_of())
    (_, _, metrics), params = updated(train_step, batches)
    (batch,) = batches
    logprobs, behavior = train_step.score(params, batch), batch.behavior_logprobs
    staleness = np.where(batch.mask, VERSION - batch.token_versions, -1)
    anchor = anchors.a3po(logprobs, behavior, staleness, batch.mask)
    weight = np.exp(anchor - behavior) * (np.exp(anchor - behavior) <= 1.5)
    for name, lags in {"0": [0], "1": [1], "2": [2], "3-4": [3, 4], "5-8": [], "9+": []}.items():
        w, divergence, size = (
            x[np.isin(staleness, lags)]
            for x in (weight, kl.k3(behavior, logprobs, batch.mask), np.ones((8, 32)))
        )
        n = max(size.sum(), 1)
        ess = w.sum() ** 2 / max(n * (w**2).sum(), 1e-30)
        np.testing.assert_allclose(metrics[f"lag/{name}/kl"], divergence.sum() / n, rtol=1e-4)
        np.testing.assert_allclose(metrics[f"lag/{name}/ess"], ess, rtol=1e-4)


def test_the_mismatch_is_over_the_tokens_of_staleness_0_alone():
    _, train_step = make()
    batches = pack(groups_of(), microbatch_rows=2)
    (_, _, metrics), params = updated(train_step, batches)
    differences = []
    for batch in batches:
        fresh = batch.mask & (batch.token_versions == VERSION)
        learner = np.asarray(train_step.score(params, batch))
        differences.extend((learner - batch.behavior_logprobs)[fresh])
    d = np.array(differences, np.float64)
    assert 0 < len(d) < sum(batch.mask.sum() for batch in batches)
    assert metrics["mismatch/tokens"] == len(d)
    np.testing.assert_allclose(metrics["mismatch/mean_abs"], np.abs(d).mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["mismatch/max_abs"], np.abs(d).max(), rtol=1e-4)
    np.testing.assert_allclose(metrics["mismatch/kl"], np.mean(np.expm1(d) - d), rtol=1e-4)


def test_an_engine_that_agrees_has_no_mismatch_however_stale_the_rest():
    _, train_step = make()
    (batch,) = pack(groups_of())
    exact = train_step.score(params_on(make()[0]), batch)
    fresh = batch.token_versions == VERSION
    behavior = np.where(fresh, exact, batch.behavior_logprobs)
    (_, _, metrics), _ = updated(
        train_step, [dataclasses.replace(batch, behavior_logprobs=behavior)]
    )
    assert metrics["policy/kl_behavior"] > 0.01
    assert metrics["mismatch/max_abs"] < 1e-5 and metrics["mismatch/kl"] < 1e-6


def test_an_update_is_the_gradient_over_the_token_count():
    _, train_step = make()
    batches = pack(groups_of(), microbatch_rows=2)
    grads, tokens = flat(accumulated(batches).grads), sum(batch.mask.sum() for batch in batches)
    (state, accumulator, metrics), params = updated(train_step, batches)
    moved = flat(params) - flat(state.params)
    np.testing.assert_allclose(moved, grads / tokens, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(metrics["policy/grad_norm"], np.linalg.norm(grads / tokens), 1e-4)
    assert not flat(accumulator).any(), "the accumulator comes back at zero"
    assert (state.updates, metrics["finite"]) == (1, 1)


def test_the_global_norm_is_clipped():
    mesh, train_step = make(max_grad_norm=0.01)
    before, accumulator = params_on(mesh), accumulated(pack(groups_of()))
    state, _, metrics = train_step.update(train_step.init(params_on(mesh)), accumulator)
    assert metrics["policy/grad_norm"] > 0.01
    np.testing.assert_allclose(np.linalg.norm(flat(before) - flat(state.params)), 0.01, rtol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_bad_numbers_keep_the_state_and_are_gone_afterwards(bad):
    _, train_step = make()
    (batch,) = pack(groups_of())
    (state, accumulator, _), _ = updated(train_step, [batch])
    kept = flat(state)
    poisoned = np.where(batch.mask, bad, 0).astype(np.float32)
    accumulator = train_step.accumulate(
        state.params, accumulator, dataclasses.replace(batch, advantages=poisoned), None, VERSION
    )
    state, accumulator, metrics = train_step.update(state, accumulator)
    assert metrics["finite"] == 0
    np.testing.assert_array_equal(flat(state), kept)
    accumulator = train_step.accumulate(state.params, accumulator, batch, None, VERSION)
    state, _, metrics = train_step.update(state, accumulator)
    assert (state.updates, metrics["finite"]) == (2, 1)


def test_a_minibatch_without_tokens_is_refused():
    _, train_step = make()
    (state, _, metrics), params = updated(train_step, [packing.empty_batch(8, 32)])
    assert metrics["finite"] == 0
    np.testing.assert_array_equal(flat(state.params), flat(params))


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(RECOMPUTE, id="token", marks=pytest.mark.long),
        pytest.param(SEQUENCE, id="sequence"),
    ],
)
def test_an_anchor_at_the_weights_of_the_policy_has_ratio_one_and_equals_current(loss):
    batches = pack(groups_of(num_groups=13), microbatch_rows=2)
    (recomputed, _, metrics), _ = updated(make(loss)[1], batches)
    (current, _, _), _ = updated(make(dataclasses.replace(loss, anchor="current"))[1], batches)
    assert metrics["policy/clip_fraction"] == 0
    np.testing.assert_allclose(metrics["policy/ratio"], 1, rtol=1e-6)
    np.testing.assert_allclose(flat(recomputed.params), flat(current.params), rtol=1e-5, atol=1e-6)


def test_minibatches_share_the_anchor_of_the_steps_first_weights():
    mesh, train_step = make(RECOMPUTE)
    slices = [pack(m) for m in packing.split_minibatches(groups_of(num_groups=8), 2)]
    state = train_step.init(params_on(mesh))
    proximal = [[train_step.anchor(state.params, b) for b in batches] for batches in slices]
    accumulator, ratios = train_step.zero_accumulator(), []
    for batches, anchors_of in zip(slices, proximal, strict=True):
        for batch, anchor in zip(batches, anchors_of, strict=True):
            accumulator = train_step.accumulate(state.params, accumulator, batch, anchor, VERSION)
        state, accumulator, metrics = train_step.update(state, accumulator)
        ratios.append(float(metrics["policy/ratio"]))
    assert ratios[0] == pytest.approx(1, abs=1e-6)
    assert ratios[1] != pytest.approx(1, abs=1e-3), "the second minibatch's policy has moved"


@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (2, 2, 2)])
def test_steps_after_the_first_compile_nothing(mesh_shape):
    # JAX keeps no more programs where a process has made many thousands, as these tests have, and counts none then.
    jax.clear_caches()
    mesh, train_step = make.__wrapped__(RECOMPUTE, mesh_shape)
    (batch,) = pack(groups_of())
    state = train_step.init(params_on(mesh))
    accumulator, compiled = train_step.zero_accumulator(), []
    for version in range(3):
        for _ in range(2):
            anchor = train_step.anchor(state.params, batch)
            accumulator = train_step.accumulate(
                state.params, accumulator, batch, anchor, VERSION + version
            )
        state, accumulator, metrics = train_step.update(state, accumulator)
        assert metrics["finite"] == 1
        compiled.append(train_step.num_compilations())
    assert compiled == [5, 5, 5]  # init, zeros, score, accumulate, update


def test_state_and_accumulator_are_consumed():
    mesh, train_step = make()
    (batch,) = pack(groups_of())
    state = train_step.init(params_on(mesh))
    first = train_step.zero_accumulator()
    second = train_step.accumulate(state.params, first, batch, None, VERSION)
    train_step.update(state, second)
    for tree in (first.grads, second.grads, state.params, state.opt_state):
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_the_abstract_state_is_that_of_the_state(param_dtype):
    mesh, train_step = make(mesh_shape=(2, 2, 2), param_dtype=param_dtype)
    state = train_step.init(params_on(mesh))
    abstract = train_step.abstract_state()
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (like.shape, like.dtype, like.sharding)


def test_score_is_at_the_samplers_temperature():
    # Halving the temperature twice as sharply peaks the distribution: log-probs are of logits / T.
    mesh, sharp = make()
    _, flat_step = make(temperature=1e6)
    params = params_on(mesh)
    (batch,) = pack(groups_of())
    uniform = -np.log(TINY.vocab_size)
    np.testing.assert_allclose(flat_step.score(params, batch)[batch.mask], uniform, rtol=1e-4)
    assert np.std(sharp.score(params, batch)[batch.mask]) > 0.1


def test_the_current_anchor_is_refused_with_several_minibatches():
    with pytest.raises(ValueError, match="num_minibatches = 2"):
        make(CURRENT, num_minibatches=2)


def test_bfloat16_compute_keeps_float32_sums():
    config = tiny(dtype="bfloat16")
    made = make(config=config, temperature=1.0, num_minibatches=1, head_chunk_tokens=8)
    accumulator = accumulated(pack(groups_of()), made)
    assert {leaf.dtype for leaf in jax.tree.leaves(accumulator)} == {jnp.dtype("float32")}
    assert np.isfinite(flat(accumulator)).all()


def test_bfloat16_parameters_have_float32_gradients_and_move_as_float32_ones_in_the_mean():
    (mesh, rounded), (_, exact) = (
        make(max_grad_norm=1e-5, param_dtype=dtype) for dtype in ("bfloat16", "float32")
    )
    batch = pack(groups_of())[0]

    def accumulate(train_step, params):
        zeros = train_step.zero_accumulator()
        return train_step.accumulate(params, zeros, batch, None, VERSION)

    def float32(params):
        return jax.tree.map(lambda x: x.astype(jnp.float32), params)

    state = rounded.init(params_on(mesh))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    values = float32(state.params)
    assert_same(accumulate(rounded, state.params), accumulate(exact, values))

    first, moved = flat(values), []
    for train_step, params in ((rounded, state.params), (exact, values)):
        state = train_step.init(params)
        for _ in range(50):
            state, _, metrics = train_step.update(state, accumulate(train_step, state.params))
            assert metrics["finite"] == 1
        moved.append(flat(float32(state.params)) - first)
    # Rounded to the nearest, a seventh of the way would be left.
    slope = moved[0] @ moved[1] / (moved[1] @ moved[1])
    np.testing.assert_allclose(slope, 1, atol=0.1)


@pytest.mark.parametrize(("optimizer", "power"), [("adamw", 0.5), ("sgd", 1.0)])
def test_a_rate_by_effective_sample_size_scales_the_whole_update(optimizer, power):
    (batch,) = batches = pack(groups_of(), microbatch_rows=8)
    mesh, plain = make(RECOMPUTE)
    log_ratio = np.asarray(plain.score(params_on(mesh), batch)) - batch.behavior_logprobs
    sequences = {
        (row, i): np.exp(log_ratio[row][batch.mask[row] & (batch.segment_ids[row] == i)].sum())
        for row in range(8)
        for i in set(batch.segment_ids[row][batch.mask[row]])
    }
    w = np.array([*sequences.values()])
    expected = (w.sum() ** 2 / (len(w) * (w**2).sum())) ** power

    def named(*args, learner, **others):
        learner = dataclasses.replace(learner, rate_by_ess=True, optimizer=optimizer)
        return TrainStep(*args, learner=learner, **others)

    settings = {"max_grad_norm": 1e9, "num_minibatches": 2, "temperature": 0.7}
    sgd = optax.sgd(1.0, momentum=0.9)
    by_ess = make_train_step(TINY, mesh, RECOMPUTE, of=named, optimizer=sgd, **settings)
    (moved, _, _), before = updated(plain, batches)
    (scaled, _, metrics), _ = updated(by_ess, batches)
    assert len(w) == 8 and expected < 0.97
    np.testing.assert_allclose(metrics["learner/rate_scale"], expected, rtol=1e-4)
    np.testing.assert_allclose(
        flat(scaled.params) - flat(before),
        expected * (flat(moved.params) - flat(before)),
        rtol=1e-3,
        atol=1e-6,
    )

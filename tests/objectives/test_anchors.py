"""Anchors of the clip, and A-3PO against its table and its closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import policy_loss
from fixtures.losses import gradient, reduced, row

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.objectives import anchors
from jaxrl_async.objectives.objective import objective

A3PO = LossConfig()
TRUE = np.ones((1, 1), bool)


@pytest.mark.parametrize(
    ("logprob", "behavior", "advantage", "staleness", "loss", "slope"),
    [
        (-1.0, -1.3, +1, 0, -1.200000, 0),
        (-1.0, -1.3, +1, 2, -1.349859, -1.349859),
        (-1.0, -2.0, +1, 2, -1.978466, 0),
        (-1.0, -2.0, +1, 8, -2.718282, -2.718282),
        (-1.3, -1.0, -1, 1, 0.800000, 0),
        (-1.3, -1.0, -1, 2, 0.740818, 0.740818),
        (-2.5, -1.0, -1, 4, 0.259722, 0),
        (-1.0, -4.0, -1, 4, 0, 0),  # u = exp(3 · 3/4) = 9.49 > 5: dropped
    ],
)
def test_the_default_loss_is_a3po_by_its_table(
    logprob, behavior, advantage, staleness, loss, slope
):
    t = row(logprob, behavior_logprobs=behavior, advantages=advantage, staleness=staleness)
    np.testing.assert_allclose(reduced(t, A3PO), loss, atol=2e-6)
    np.testing.assert_allclose(gradient(t, A3PO), [[slope]], atol=2e-6)
    anchor = anchors.a3po(t.logprobs, t.behavior_logprobs, t.staleness, t.mask)
    numbers = dict(clip_low=0.2, clip_high=0.2, behavior_cap=5.0, dual_clip=None)
    by_parts = policy_loss.policy_loss(
        t.logprobs,
        t.behavior_logprobs,
        anchor,
        t.advantages,
        t.mask,
        behavior_cap_mode="mask",
        **numbers,
    )
    np.testing.assert_allclose(by_parts, [[loss]], atol=2e-6)


@pytest.mark.parametrize("staleness", [1, 2, 4, 8])
def test_a3po_has_its_closed_form(staleness):
    # With log π_p = α log π_b + (1 − α) sg(log π_θ), α = 1/d, and w = π_θ/π_b: r = w^(1/d), u = w^(1 − 1/d), so
    # u·r = w, and an unclipped token's gradient is −w·A, whatever d is.
    advantages = np.array([[1.7, -0.6, 0.4, -1.1]])
    behavior = np.array([[-1.1, -1.0, -0.9, -1.02]])
    tokens = row(
        np.full((1, 4), -1.0),
        behavior_logprobs=behavior,
        advantages=advantages,
        staleness=staleness,
    )
    w = np.exp(-1.0 - behavior)
    parts = objective(tokens, A3PO)
    np.testing.assert_allclose(parts.ratio, w ** (1 / staleness), rtol=1e-5)
    np.testing.assert_allclose(parts.weight, w ** (1 - 1 / staleness), rtol=1e-5)
    np.testing.assert_allclose(parts.loss, -w * advantages, rtol=1e-5)
    np.testing.assert_allclose(gradient(tokens, A3PO), -w * advantages / 4, rtol=1e-5)


@pytest.mark.parametrize("staleness", [1, 2, 4, 8])
@pytest.mark.parametrize(("advantage", "edge"), [(1.0, 1.2), (-1.0, 0.8)])
def test_the_clip_band_on_the_whole_ratio_is_a_power(staleness, advantage, edge):
    config = LossConfig(behavior_weight="uncapped", behavior_cap=None)
    bound = staleness * np.log(edge)  # log w at which r = w^(1/d) reaches the clip
    slopes = [
        gradient(
            row(
                bound * by - 9.0, behavior_logprobs=-9.0, advantages=advantage, staleness=staleness
            ),
            config,
        ).item()
        for by in (0.99, 1.01)
    ]
    assert slopes[0] != 0 and slopes[1] == 0


@pytest.mark.parametrize("staleness", [2, 4, 8])
def test_the_cap_on_the_weight_is_a_power_of_the_whole_ratio(staleness):
    bound = staleness / (staleness - 1) * np.log(5.0)  # u = w^(1 − 1/d) = C
    tokens = row(
        np.array([[bound * 0.99, bound * 1.01]]) - 9.0,
        behavior_logprobs=-9.0,
        advantages=-1.0,
        staleness=staleness,
    )
    parts = objective(tokens, A3PO)
    np.testing.assert_array_equal(parts.weight[0] == 0, [False, True])
    np.testing.assert_array_equal(parts.loss[0] == 0, [False, True])


def test_each_token_is_anchored_by_its_own_staleness():
    # Policy version 6 and token versions [3, 3, 5, 5] make d = [3, 3, 1, 1], without a shift: α = 1/d,
    # so with log π_b = −3 and log π_θ = 0 the anchor is −3/d.
    staleness = 6 - np.array([[3, 3, 5, 5]])
    anchor = anchors.a3po(np.zeros((1, 4)), np.full((1, 4), -3.0), staleness, np.ones((1, 4), bool))
    np.testing.assert_allclose(anchor, [[-1.0, -1.0, -3.0, -3.0]], rtol=1e-6)


def test_fresh_tokens_are_anchored_at_behavior_or_at_the_policy_which_never_clips():
    logprobs, behavior = np.array([[-1.0, -1.0]]), np.array([[-3.0, -3.0]])
    staleness, mask = np.array([[0, 1]]), np.ones((1, 2), bool)
    for fresh, expected in (("behavior", [[-3.0, -3.0]]), ("current", [[-1.0, -3.0]])):
        anchor = anchors.a3po(logprobs, behavior, staleness, mask, fresh=fresh)
        np.testing.assert_array_equal(anchor, expected)
    tokens = row(logprobs, behavior_logprobs=behavior, advantages=1.0, staleness=staleness)
    for name in ("a3po", "linear"):
        at_behavior = objective(tokens, LossConfig(anchor=name))
        at_policy = objective(tokens, LossConfig(anchor=name, a3po_fresh="current"))
        np.testing.assert_array_equal(at_behavior.clipped, [[True, True]])
        np.testing.assert_array_equal(at_policy.clipped, [[False, True]])
        np.testing.assert_allclose(at_policy.ratio[0, 0], 1.0)


def test_a3po_at_staleness_one_is_the_behavior_anchor_bit_for_bit():
    logprobs, behavior = -np.random.default_rng(0).exponential(size=(2, 3, 5)).astype(np.float32)
    mask = np.ones((3, 5), bool)
    anchor = anchors.a3po(logprobs, behavior, np.ones((3, 5), np.int32), mask)
    np.testing.assert_array_equal(anchor, anchors.behavior(behavior, mask))


def test_the_linear_anchor_mixes_probabilities():
    tokens = row(np.log(0.5), behavior_logprobs=np.log(0.1), advantages=1.0, staleness=4)
    anchor = objective(tokens, LossConfig(anchor="linear")).anchor
    np.testing.assert_allclose(np.exp(anchor), [[0.1 / 4 + 0.5 * 3 / 4]], rtol=1e-5)


@pytest.mark.parametrize(
    "anchor",
    [
        anchors.recompute,
        anchors.current,
        anchors.behavior,
        lambda x, mask: anchors.a3po(x, x, np.full(mask.shape, 4), mask),
        lambda x, mask: anchors.a3po(x, x, np.zeros(mask.shape), mask, fresh="current"),
        lambda x, mask: anchors.linear(x, 2 * x, np.ones(mask.shape), mask) / 2,
    ],
)
def test_anchors_are_detached_and_finite_over_bad_padding(anchor):
    mask = np.array([[True, False, False, False]])
    x = jnp.array([[-1.0, np.nan, np.inf, -np.inf]])
    value, slope = jax.value_and_grad(lambda x: anchor(x, mask).sum())(x)
    assert value == -1.0
    np.testing.assert_array_equal(slope, np.zeros((1, 4)))


def test_an_unknown_anchor_of_fresh_tokens_is_refused():
    with pytest.raises(ValueError, match="fresh .*'proximal'"):
        anchors.a3po(np.zeros((1, 1)), np.zeros((1, 1)), TRUE * 0, TRUE, fresh="proximal")

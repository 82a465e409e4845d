"""Anchors of the clip, and A-3PO against its table and its closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.objectives import anchors, policy_loss

SETTINGS = {
    "clip_low": 0.2,
    "clip_high": 0.2,
    "behavior_cap": 5.0,
    "behavior_cap_mode": "mask",
    "dual_clip": None,
}
TRUE = np.ones((1, 1), bool)


def a3po_loss(logprob, behavior_logprob, advantage, staleness, **settings):
    """The loss of one token."""
    row = [jnp.full((1, 1), x, jnp.float32) for x in (logprob, behavior_logprob, advantage)]
    anchor = anchors.a3po(row[0], row[1], np.full((1, 1), staleness), TRUE)
    return policy_loss.policy_loss(
        row[0], row[1], anchor, row[2], TRUE, **(SETTINGS | settings)
    ).sum()


@pytest.mark.parametrize(
    ("logprob", "behavior", "advantage", "staleness", "loss", "gradient"),
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
def test_a3po_gives_the_losses_and_gradients_of_its_table(
    logprob, behavior, advantage, staleness, loss, gradient
):
    found = jax.value_and_grad(a3po_loss)(logprob, behavior, advantage, staleness)
    np.testing.assert_allclose(found, (loss, gradient), atol=2e-6)


@pytest.mark.parametrize("staleness", [1, 2, 4, 8])
def test_an_unclipped_gradient_does_not_depend_on_staleness(staleness):
    # With log π_p = α log π_b + (1 − α) sg(log π_θ), α = 1/d, and w = π_θ/π_b:
    #   r = w^(1/d), u = w^(1 − 1/d), so u·r = w, and d(−u r A)/dlogπ_θ = −w A.
    logprob, behavior, advantage = -1.0, -1.1, 1.7
    w = np.exp(logprob - behavior)
    loss, gradient = jax.value_and_grad(a3po_loss)(logprob, behavior, advantage, staleness)
    np.testing.assert_allclose([loss, gradient], [-w * advantage] * 2, rtol=1e-5)


@pytest.mark.parametrize("staleness", [1, 2, 4, 8])
def test_the_anchor_is_the_staleness_root_of_the_ratio(staleness):
    logprobs, behavior = np.array([[-1.0, -0.2]]), np.array([[-1.9, -2.3]])
    anchor = anchors.a3po(logprobs, behavior, np.full((1, 2), staleness), np.ones((1, 2), bool))
    w = np.exp(logprobs - behavior)
    np.testing.assert_allclose(np.exp(logprobs - anchor), w ** (1 / staleness), rtol=1e-5)
    np.testing.assert_allclose(np.exp(anchor - behavior), w ** (1 - 1 / staleness), rtol=1e-5)


@pytest.mark.parametrize("staleness", [1, 2, 4, 8])
@pytest.mark.parametrize(("advantage", "edge"), [(1.0, 1.2), (-1.0, 0.8)])
def test_the_clip_band_on_the_whole_ratio_widens_with_staleness(staleness, advantage, edge):
    bound = staleness * np.log(edge)  # log w at which r = w^(1/d) reaches the clip

    def gradient(log_w):
        loss = jax.grad(a3po_loss)
        return loss(log_w - 9.0, -9.0, advantage, staleness, behavior_cap=None)

    assert gradient(bound * 0.99) != 0
    assert gradient(bound * 1.01) == 0


@pytest.mark.parametrize("staleness", [2, 4, 8])
def test_the_cap_drops_tokens_beyond_its_power_of_the_whole_ratio(staleness):
    bound = staleness / (staleness - 1) * np.log(5.0)  # u = w^(1 − 1/d) = C
    assert a3po_loss(bound * 0.99 - 9.0, -9.0, -1.0, staleness) != 0
    assert a3po_loss(bound * 1.01 - 9.0, -9.0, -1.0, staleness) == 0


def test_each_token_is_anchored_by_its_own_staleness():
    # Policy version 6 and token versions [3, 3, 5, 5] make d = [3, 3, 1, 1], without a shift: α = 1/d,
    # so with log π_b = −3 and log π_θ = 0 the anchor is −3/d.
    staleness = 6 - np.array([[3, 3, 5, 5]])
    anchor = anchors.a3po(np.zeros((1, 4)), np.full((1, 4), -3.0), staleness, np.ones((1, 4), bool))
    np.testing.assert_allclose(anchor, [[-1.0, -1.0, -3.0, -3.0]], rtol=1e-6)


def test_fresh_tokens_are_anchored_at_behavior_or_at_the_policy():
    logprobs, behavior = np.array([[-1.0, -1.0]]), np.array([[-2.0, -2.0]])
    staleness, mask = np.array([[0, 1]]), np.ones((1, 2), bool)
    for fresh, expected in (("behavior", [[-2.0, -2.0]]), ("current", [[-1.0, -2.0]])):
        anchor = anchors.a3po(logprobs, behavior, staleness, mask, fresh=fresh)
        np.testing.assert_array_equal(anchor, expected)


def test_a3po_at_staleness_one_is_the_behavior_anchor_bit_for_bit():
    logprobs, behavior = -np.random.default_rng(0).exponential(size=(2, 3, 5)).astype(np.float32)
    mask = np.ones((3, 5), bool)
    anchor = anchors.a3po(logprobs, behavior, np.ones((3, 5), np.int32), mask)
    np.testing.assert_array_equal(anchor, anchors.behavior(behavior, mask))


@pytest.mark.parametrize(
    "anchor",
    [
        lambda x, mask: anchors.recompute(x, mask),
        lambda x, mask: anchors.current(x, mask),
        lambda x, mask: anchors.behavior(x, mask),
        lambda x, mask: anchors.a3po(x, x, np.full(mask.shape, 4), mask),
        lambda x, mask: anchors.a3po(x, x, np.zeros(mask.shape), mask, fresh="current"),
    ],
)
def test_anchors_are_detached_and_finite_over_bad_padding(anchor):
    mask = np.array([[True, False, False, False]])
    x = jnp.array([[-1.0, np.nan, np.inf, -np.inf]])
    value, gradient = jax.value_and_grad(lambda x: anchor(x, mask).sum())(x)
    assert value == -1.0
    np.testing.assert_array_equal(gradient, np.zeros((1, 4)))


def test_an_unknown_anchor_of_fresh_tokens_is_refused():
    with pytest.raises(ValueError, match="'proximal'"):
        anchors.a3po(np.zeros((1, 1)), np.zeros((1, 1)), TRUE * 0, TRUE, fresh="proximal")

"""The policy loss in its limits, and its parts by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import policy_loss

from jaxrl_async.objectives import kl, masked, ratios, surrogates, weights

CAPPED = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "behavior_cap": 1.1,
    "behavior_cap_mode": "mask",
    "dual_clip": None,
}


def batch(seed=0, shape=(4, 16)):
    """Random arguments of policy_loss, in float64: every branch of it is taken somewhere."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(size=shape)
    behavior = np.minimum(logprobs + rng.normal(scale=0.5, size=shape), 0)
    proximal = np.minimum(logprobs + rng.normal(scale=0.3, size=shape), 0)
    return logprobs, behavior, proximal, rng.normal(size=shape), rng.random(shape) < 0.7


def test_decoupled_is_ppo_when_behavior_is_proximal():
    logprobs, behavior, _, advantages, mask = batch()
    decoupled = policy_loss.policy_loss(logprobs, behavior, behavior, advantages, mask, **CAPPED)
    ratio = ratios.token(logprobs, behavior, mask, None)
    ppo = surrogates.clipped(ratio, advantages, clip_low=0.2, clip_high=0.28)
    np.testing.assert_array_equal(decoupled, np.where(mask, ppo, 0))


def test_on_policy_gradient_is_reinforce():
    # r = u = 1, so d(−r A)/dlogπ_θ = −A on every masked token.
    logprobs, _, _, advantages, mask = batch()
    gradient = jax.grad(
        lambda x: policy_loss.policy_loss(x, logprobs, logprobs, advantages, mask, **CAPPED).sum()
    )(jnp.asarray(logprobs))
    np.testing.assert_allclose(gradient, np.where(mask, -advantages, 0), rtol=1e-6)


@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_is_clipped_is_where_the_gradient_vanishes(dual_clip):
    logprobs, _, proximal, advantages, mask = batch(seed=4)
    ratio = ratios.token(logprobs, proximal, mask, None)
    bounds = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": dual_clip}
    gradient = jax.grad(lambda r: surrogates.clipped(r, advantages, **bounds).sum())(ratio)
    clipped = surrogates.is_clipped(ratio, advantages, **bounds)
    assert 0 < clipped.sum() < clipped.size
    np.testing.assert_array_equal(clipped, gradient == 0)


def test_each_weight_mode_is_itself():
    log_u, u = np.log([[0.5, 2.0, 8.0]]), np.array([[0.5, 2.0, 8.0]])
    found = {
        mode: weights.capped(log_u, cap=cap, mode=mode)
        for mode, cap in (("none", None), ("uncapped", None), ("mask", 5.0), ("clamp", 5.0))
    }
    np.testing.assert_array_equal(found["none"], np.ones((1, 3)))
    np.testing.assert_allclose(found["uncapped"], u, rtol=1e-6)
    np.testing.assert_allclose(found["mask"], [[0.5, 2.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(found["clamp"], [[0.5, 2.0, 5.0]], rtol=1e-6)


@pytest.mark.parametrize("mode", ["none", "uncapped"])
def test_a_cap_that_would_not_be_applied_is_refused(mode):
    with pytest.raises(ValueError, match=rf"'{mode}' .*cap = 5\.0"):
        weights.capped(np.zeros((1, 1)), cap=5.0, mode=mode)


def test_an_unknown_weight_mode_is_refused():
    with pytest.raises(ValueError, match=r"none, uncapped, mask, clamp.*'truncate'"):
        weights.capped(np.zeros((1, 1)), cap=5.0, mode="truncate")


def test_a_sequence_ratio_is_the_mean_over_its_segment():
    # Segment 1 has masked log-ratios ln 2 and ln 8: exp of their mean is 4. Segment 2 has ln 9 alone.
    log_ratio = np.log([[5.0, 2.0, 8.0, 9.0, 7.0]])
    mask = np.array([[False, True, True, True, False]])
    segment_ids = np.array([[1, 1, 1, 2, 0]])
    ratio = ratios.sequence(log_ratio, np.zeros((1, 5)), mask, segment_ids)
    np.testing.assert_allclose(ratio, [[1.0, 4.0, 4.0, 9.0, 1.0]], rtol=1e-6)


@pytest.mark.parametrize("ratio", [ratios.token, ratios.sequence])
def test_the_anchor_of_a_ratio_is_detached(ratio):
    logprobs, _, proximal, _, mask = batch()
    segment_ids = np.tile(np.repeat([1, 2], 8), (4, 1))
    gradient = jax.grad(lambda x: ratio(logprobs, x, mask, segment_ids).sum())(
        jnp.asarray(proximal)
    )
    np.testing.assert_array_equal(gradient, np.zeros(mask.shape))


def test_kl_estimates_by_hand():
    # p = 1/2, q = 1/4: x = log(q/p) = −ln 2.
    p, q, mask = np.log([[0.5, 0.5]]), np.array([[np.log(0.25), np.nan]]), np.array([[True, False]])
    x = -np.log(2)
    np.testing.assert_allclose(kl.k1(p, q, mask), [[-x, 0]], rtol=1e-6)
    np.testing.assert_allclose(kl.k2(p, q, mask), [[x * x / 2, 0]], rtol=1e-6)
    np.testing.assert_allclose(kl.k3(p, q, mask), [[0.5 - 1 - x, 0]], rtol=1e-5)


def test_kl_estimates_average_to_the_divergence():
    # E_p[k1] = E_p[k3] = Σ p log(p/q) exactly, weighting each outcome by its probability.
    p, q = np.array([[0.5, 0.3, 0.2]]), np.array([[0.2, 0.2, 0.6]])
    exact = np.sum(p * np.log(p / q))
    for estimate in (kl.k1, kl.k3):
        found = np.sum(p * estimate(np.log(p), np.log(q), np.ones((1, 3), bool)))
        np.testing.assert_allclose(found, exact, rtol=1e-5)


def test_masked_reductions_leave_padding_out():
    x, mask = np.array([[1.0, -3.0, np.nan, np.inf]]), np.array([[True, True, False, False]])
    assert masked.total(x, mask) == -2.0
    assert masked.largest(x, mask) == 1.0
    assert masked.largest(-np.abs(x), mask) == 0.0

"""The policy loss and its parts: by hand, against a reference, in their limits, by their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxrl_async.objectives import kl, masked, policy_loss, ratios, surrogates, weights

PLAIN = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "behavior_cap": None,
    "behavior_cap_mode": "uncapped",
    "dual_clip": None,
}
CAPPED = PLAIN | {"behavior_cap": 1.1, "behavior_cap_mode": "mask"}
ARGUMENTS = ("logprobs", "behavior_logprobs", "proximal_logprobs", "advantages")


def batch(seed=0, shape=(4, 16)):
    """Random arguments of policy_loss, in float64: every branch of it is taken somewhere."""
    rng = np.random.default_rng(seed)
    logprobs = -rng.exponential(size=shape)
    behavior = np.minimum(logprobs + rng.normal(scale=0.5, size=shape), 0)
    proximal = np.minimum(logprobs + rng.normal(scale=0.3, size=shape), 0)
    return logprobs, behavior, proximal, rng.normal(size=shape), rng.random(shape) < 0.7


def reference(logprobs, behavior, proximal, advantages, mask, settings):
    """Token by token in float64, from the text of the definition."""
    loss = np.zeros(mask.shape)
    for index in zip(*np.nonzero(mask), strict=True):
        r = np.exp(logprobs[index] - proximal[index])
        u = np.exp(proximal[index] - behavior[index])
        advantage, cap = advantages[index], settings["behavior_cap"]
        inside = min(max(r, 1 - settings["clip_low"]), 1 + settings["clip_high"])
        value = -min(r * advantage, inside * advantage)
        if settings["dual_clip"] is not None and advantage < 0:
            value = min(value, settings["dual_clip"] * -advantage)
        if settings["behavior_cap_mode"] == "none":
            u = 1.0
        elif settings["behavior_cap_mode"] == "mask":
            u = u if u <= cap else 0.0
        elif settings["behavior_cap_mode"] == "clamp":
            u = min(u, cap)
        loss[index] = u * value
    return loss


@pytest.mark.parametrize("cap", [("none", None), ("uncapped", None), ("mask", 1.1), ("clamp", 1.1)])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_policy_loss_agrees_with_a_float64_reference(cap, dual_clip):
    settings = PLAIN | {
        "behavior_cap_mode": cap[0],
        "behavior_cap": cap[1],
        "dual_clip": dual_clip,
    }
    arguments = batch()
    found = policy_loss.policy_loss(*arguments, **settings)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, reference(*arguments, settings), rtol=1e-5, atol=1e-5)


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


def test_dual_clip_bounds_the_loss_of_negative_advantages_only():
    # r = 10: A = −2 gives 20, at most 3·2 = 6; A = +2 is clipped at 1.2·2 by the first clip alone.
    ratio, advantages = jnp.full((1, 2), 10.0), np.array([[-2.0, 2.0]])
    loss = surrogates.clipped(ratio, advantages, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    np.testing.assert_allclose(loss, [[6.0, -2.4]], rtol=1e-6)


def test_is_clipped_is_where_the_gradient_vanishes():
    logprobs, _, proximal, advantages, mask = batch(seed=4)
    ratio = ratios.token(logprobs, proximal, mask, None)
    bounds = {"clip_low": 0.2, "clip_high": 0.28}
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


def test_a_sequence_of_one_token_has_the_tokens_ratio():
    logprobs, _, proximal, _, mask = batch(shape=(3, 6))
    segment_ids = np.tile(np.arange(1, 7), (3, 1))
    np.testing.assert_allclose(
        ratios.sequence(logprobs, proximal, mask, segment_ids),
        ratios.token(logprobs, proximal, mask, segment_ids),
        rtol=1e-6,
    )


@pytest.mark.parametrize("ratio", [ratios.token, ratios.sequence])
def test_the_anchor_of_a_ratio_is_detached(ratio):
    logprobs, _, proximal, _, mask = batch()
    segment_ids = np.tile(np.repeat([1, 2], 8), (4, 1))
    gradient = jax.grad(lambda x: ratio(logprobs, x, mask, segment_ids).sum())(
        jnp.asarray(proximal)
    )
    np.testing.assert_array_equal(gradient, np.zeros(mask.shape))


def test_advantages_and_weights_are_detached():
    log_u = jnp.zeros((1, 1))
    for mode, cap in (("uncapped", None), ("mask", 2.0), ("clamp", 2.0)):
        weight = jax.grad(lambda x, c=cap, m=mode: weights.capped(x, cap=c, mode=m).sum())
        assert weight(log_u) == 0
    loss = jax.grad(
        lambda a: surrogates.clipped(jnp.ones((1, 1)), a, clip_low=0.2, clip_high=0.2).sum()
    )
    assert loss(jnp.ones((1, 1))) == 0


@pytest.mark.parametrize("number", range(1, 4))
def test_only_logprobs_carries_a_gradient(number):
    *arguments, mask = (jnp.asarray(x) for x in batch())
    gradients = jax.grad(
        lambda *a: policy_loss.policy_loss(*a, mask, **PLAIN).sum(), argnums=(0, number)
    )(*arguments)
    assert np.any(gradients[0]), ARGUMENTS[0]
    assert not np.any(gradients[1]), ARGUMENTS[number]


def test_the_gradient_is_that_of_finite_differences():
    # Away from the kinks: log-ratios of at most 0.1 stay inside the clip.
    rng = np.random.default_rng(5)
    logprobs = -1 - rng.random((2, 6)).astype(np.float32)
    proximal = logprobs + rng.uniform(-0.1, 0.1, (2, 6)).astype(np.float32)
    mask = rng.random((2, 6)) < 0.7
    advantages = rng.normal(size=(2, 6)).astype(np.float32)

    def loss(x):
        return policy_loss.policy_loss(x, proximal - 0.2, proximal, advantages, mask, **PLAIN)

    check_grads(loss, (logprobs,), order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1e38])
def test_padding_never_reaches_the_loss_or_the_gradient(bad):
    *arguments, mask = batch()

    def loss_and_gradient(fill):
        filled = [jnp.asarray(np.where(mask, x, fill)) for x in arguments]
        return jax.value_and_grad(
            lambda x: policy_loss.policy_loss(x, *filled[1:], mask, **CAPPED).sum()
        )(filled[0])

    for found, expected in zip(loss_and_gradient(bad), loss_and_gradient(0.0), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("ratio", [ratios.token, ratios.sequence])
def test_padding_never_reaches_a_ratio(ratio):
    logprobs, _, proximal, _, mask = batch()
    segment_ids = np.tile(np.repeat([1, 2], 8), (4, 1))
    value, gradient = jax.value_and_grad(
        lambda x: ratio(x, np.where(mask, proximal, -np.inf), mask, segment_ids).sum()
    )(jnp.asarray(np.where(mask, logprobs, np.nan)))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert not gradient[~mask].any()


def test_masked_tokens_are_as_if_removed():
    *arguments, mask = batch()
    whole = policy_loss.policy_loss(*arguments, mask, **CAPPED)
    removed = policy_loss.policy_loss(*(x[mask] for x in arguments), mask[mask], **CAPPED)
    np.testing.assert_array_equal(whole[mask], removed)
    np.testing.assert_array_equal(whole[~mask], np.zeros((~mask).sum()))


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

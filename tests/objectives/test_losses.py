"""Losses by name: the published vectors, the closed form, the limits in which one loss is another, the gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import policy_loss
from fixtures.loss_reference import FLOATS, random_tokens, tokens_of
from fixtures.losses import gradient, reduced, row
from jax.test_util import check_grads

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.objectives import anchors, kl, surrogates, weights
from jaxrl_async.objectives.objective import objective

A3PO = LossConfig()
RECOMPUTE = LossConfig(anchor="recompute")
PLAIN = {"behavior_weight": "none", "behavior_cap": None}
UNCAPPED = {"behavior_weight": "uncapped", "behavior_cap": None}
REINFORCE = LossConfig(surrogate="reinforce", anchor="behavior", **PLAIN)
DG = dataclasses.replace(REINFORCE, surrogate="dg", advantage="dr_grpo")
GSPO = LossConfig(
    anchor="behavior",
    ratio="sequence",
    clip_low=3e-4,
    clip_high=4e-4,
    reduction="sequence_mean",
    **PLAIN,
)
DR_GRPO = LossConfig(advantage="dr_grpo", reduction="fixed_length", fixed_length=32.0)


def named(c):
    return "-".join((c.anchor, c.ratio, c.surrogate, c.behavior_weight, c.kl, c.reduction))


@pytest.mark.parametrize(
    ("logprob", "advantage", "gate"),
    [(-0.1, 1, 0.524979), (-4, 1, 0.982014), (-1, -1, 0.268941), (-4, -1, 0.017986)],
)
def test_the_delightful_gate_by_its_table(logprob, advantage, gate):
    # Detached: the gradient of −g·U·log π_θ is −g·U, without a term of the gate's own slope.
    tokens = row(logprob, advantages=advantage)
    np.testing.assert_allclose(gradient(tokens, DG), [[-gate * advantage]], atol=1e-6)
    np.testing.assert_allclose(reduced(tokens, DG), -gate * advantage * logprob, atol=4e-6)


def test_a_cold_delightful_gate_is_the_indicator_of_delight_above_the_threshold():
    # χ = −U·log π = [.5, 1.5, −1.5] against λ = 1.
    tokens = row([[-0.5, -1.5, -1.5]], advantages=[[1.0, 1.0, -1.0]])
    config = dataclasses.replace(DG, dg_temperature=1e-3, dg_threshold=1.0)
    np.testing.assert_allclose(objective(tokens, config).loss, [[0.0, 1.5, 0.0]], atol=1e-6)


def test_a_hot_delightful_gate_is_half_of_reinforce():
    tokens = tokens_of(random_tokens(3))
    hot = dataclasses.replace(DG, dg_temperature=1e9)
    expected = objective(tokens, REINFORCE).loss / 2
    np.testing.assert_allclose(objective(tokens, hot).loss, expected, rtol=1e-5)


@pytest.mark.parametrize("anchor", ["behavior", "current"])
@pytest.mark.parametrize("change", ["noise", "zeros", "nan"])
def test_delight_does_not_look_at_behavior(anchor, change):
    x, config = random_tokens(4), dataclasses.replace(DG, anchor=anchor)
    shape = x["mask"].shape
    changed = {
        "noise": np.random.default_rng(0).normal(-3, 2, shape),
        "zeros": np.zeros(shape),
        "nan": np.full(shape, np.nan),
    }[change].astype(np.float32)
    tokens, other = tokens_of(x), tokens_of(x, behavior_logprobs=changed)
    np.testing.assert_array_equal(objective(other, config).loss, objective(tokens, config).loss)
    np.testing.assert_array_equal(gradient(other, config), gradient(tokens, config))
    assert np.any(gradient(tokens, config))


@pytest.mark.parametrize(
    ("advantage", "loss", "slope"),
    [
        # r = e^.3, τ(r − 1) = .349859 and .367352: σ = .586583 and .590819.
        (1.0, -2.346333, -1.309381),  # −4σ, −4σ(1 − σ)r
        (-1.0, 2.250739, 1.305324),  # (4/1.05)σ
    ],
)
def test_sapo_by_hand(advantage, loss, slope):
    sapo = dataclasses.replace(REINFORCE, surrogate="sapo")
    tokens = row(-1.0, behavior_logprobs=-1.3, advantages=advantage)
    np.testing.assert_allclose(reduced(tokens, sapo), loss, rtol=1e-5)
    np.testing.assert_allclose(gradient(tokens, sapo), [[slope]], rtol=1e-5)


def test_sapo_and_topr_on_policy_have_the_gradient_of_reinforce():
    x = random_tokens(5)
    tokens = tokens_of(x | {"behavior_logprobs": x["logprobs"]})
    for surrogate in ("sapo", "topr"):
        found = gradient(tokens, dataclasses.replace(REINFORCE, surrogate=surrogate))
        np.testing.assert_allclose(found, gradient(tokens, REINFORCE), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("advantage", "moved", "weight"),
    [
        (-1.0, (-0.5, 0.2), 0.740818),  # e^(−.3), on both tokens
        (-1.0, (0.5, 0.2), 1.0),
        (1.0, (-0.5, 0.2), 1.0),
        (1.0, (0.5, 0.2), 1.0),
    ],
)
def test_topr_tapers_whole_answers_that_are_worse_than_the_baseline(advantage, moved, weight):
    topr = dataclasses.replace(REINFORCE, surrogate="topr", advantage="dr_grpo")
    tokens = row(
        [[-1.0, -2.0]], behavior_logprobs=[np.subtract([-1, -2], moved)], advantages=advantage
    )
    expected = -weight * advantage * np.array([[-1.0, -2.0]])
    np.testing.assert_allclose(objective(tokens, topr).loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient(tokens, topr) * 2, [[-weight * advantage] * 2], rtol=1e-5)


@pytest.mark.parametrize(
    ("weight", "cap", "expected"),
    [
        # Two answers, Σ log u = .5 + .3 and −.4: u = 2.225541 and .670320.
        ("sequence_tis", 3.0, (2.225541, 2.225541, 0.670320)),
        ("sequence_tis", 2.0, (2.0, 2.0, 0.670320)),
        ("sequence_mis", 3.0, (2.225541, 2.225541, 0.670320)),
        ("sequence_mis", 2.0, (0.0, 0.0, 0.670320)),
    ],
)
def test_a_sequences_weight_is_of_the_product_of_its_ratios(weight, cap, expected):
    config = dataclasses.replace(RECOMPUTE, behavior_weight=weight, behavior_cap=cap)
    tokens = row(
        [[-1.0, -1.0, -1.0]],
        behavior_logprobs=[[-1.5, -1.3, -0.6]],
        proximal_logprobs=[[-1.0, -1.0, -1.0]],
        segment_ids=[[1, 1, 2]],
    )
    found = objective(tokens, config)
    np.testing.assert_allclose(found.weight, [expected], rtol=1e-5)
    np.testing.assert_allclose(found.share.sum(), 3)  # What is dropped stays in the denominator.


def test_a_sequences_weight_of_answers_of_one_token_is_the_tokens():
    x = random_tokens(6)
    ones = np.broadcast_to(np.arange(1, 21), x["mask"].shape).astype(np.int32)
    tokens = tokens_of(x | {"segment_ids": ones})
    for sequence, token in (("sequence_tis", "tis"), ("sequence_mis", "mask")):
        of = [
            objective(
                tokens, dataclasses.replace(RECOMPUTE, behavior_weight=name, behavior_cap=1.4)
            )
            for name in (sequence, token)
        ]
        np.testing.assert_allclose(of[0].loss, of[1].loss, rtol=1e-6)


@pytest.mark.parametrize(
    ("weight", "numbers", "expected"),
    [
        # Two answers: means of log u .4 and −.4, so 1.491825 and .670320; the third token is masked.
        ("geometric_tis", {"behavior_cap": 1.2}, (1.2, 1.2, 0, 0.670320)),
        ("geometric_mask", {"behavior_cap": 1.5, "behavior_floor": 0.7}, (1, 1, 0, 0)),
        ("geometric_mask", {"behavior_cap": 1.4, "behavior_floor": 0.6}, (0, 0, 0, 1)),
    ],
)
def test_a_geometric_weight_is_of_the_mean_log_ratio(weight, numbers, expected):
    config = dataclasses.replace(RECOMPUTE, behavior_weight=weight, **numbers)
    tokens = row(
        [[-1.0, -1.0, -1.0, -1.0]],
        behavior_logprobs=[[-1.5, -1.3, -9.0, -0.6]],
        proximal_logprobs=[[-1.0, -1.0, -1.0, -1.0]],
        segment_ids=[[1, 1, 1, 2]],
        mask=[[True, True, False, True]],
    )
    found = objective(tokens, config)
    np.testing.assert_allclose(found.weight, [expected], rtol=1e-5)
    np.testing.assert_allclose(found.share.sum(), 3)


@pytest.mark.parametrize(
    ("advantage", "delta", "kept"),
    [(-1.0, 0.19, 0), (-1.0, 0.21, 1), (1.0, 0.19, 1), (-1.0, 0.5, 1)],
)
def test_bad_answers_far_from_the_policy_that_sampled_are_dropped(advantage, delta, kept):
    # mean(log π_b − log π_θ) = (.6 − .2 + .2)/3 = .2, beside one that the policy has come nearer to.
    moved = np.array([[-0.6, 0.2, -0.2, 0.7]])
    tokens = row(
        -1 + moved, behavior_logprobs=-1.0, advantages=advantage, segment_ids=[[1, 1, 1, 2]]
    )
    plain = LossConfig(anchor="behavior", clip_low=1.0, clip_high=9.0, **PLAIN)
    config = dataclasses.replace(plain, off_policy_delta=delta)
    np.testing.assert_array_equal(objective(tokens, config).weight, [[kept, kept, kept, 1]])
    expected = gradient(tokens, plain) * [[kept, kept, kept, 1]]
    np.testing.assert_array_equal(gradient(tokens, config), expected)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_a_weighted_penalty_is_the_kl_and_has_its_gradient_in_expectation(name):
    # Exact: all tokens of a vocabulary of 5, each with π_b(a) of the draws. ∂KL/∂z by autodiff of the closed form.
    rng = np.random.default_rng(3)
    z, behavior, other = (jax.nn.log_softmax(jnp.asarray(rng.normal(size=5))) for _ in range(3))
    config = dataclasses.replace(REINFORCE, kl=name, kl_weighted=True, kl_coefficient=1.0)

    def estimated(z):
        tokens = row(np.zeros(5), behavior_logprobs=behavior[None], reference_logprobs=other[None])
        tokens = dataclasses.replace(tokens, logprobs=jax.nn.log_softmax(z)[None])
        return jnp.sum(jnp.exp(behavior) * objective(tokens, config).loss[0])

    def exact(z):
        p = jax.nn.log_softmax(z)
        return jnp.sum(jnp.exp(p) * (p - other))

    np.testing.assert_allclose(estimated(z), exact(z), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(estimated)(z), jax.grad(exact)(z), atol=1e-6)
    config = dataclasses.replace(config, kl_weighted=False)  # Without the ratio it is not.
    assert np.abs(jax.grad(estimated)(z) - jax.grad(exact)(z)).max() > 0.01


@pytest.mark.parametrize("reward", [0.0, 0.7])
def test_distillation_has_the_gradient_of_the_reverse_kl_beside_that_of_rewards(reward):
    # Exact: all tokens of a vocabulary of 5, each π_θ(a) times; the first has a reward.
    rng = np.random.default_rng(4)
    z, teacher = (jnp.asarray(rng.normal(size=5)) for _ in range(2))
    log_t = jax.nn.log_softmax(teacher)
    config = dataclasses.replace(
        REINFORCE, advantage="dr_grpo", teacher="a", teacher_coefficient=0.5
    )

    def estimated(z):
        log_p = jax.nn.log_softmax(z)
        rewards = [[reward, 0, 0, 0, 0]]
        tokens = row(np.zeros(5), reference_logprobs=log_t[None], advantages=rewards)
        tokens = dataclasses.replace(tokens, logprobs=log_p[None])
        draws = jax.lax.stop_gradient(jnp.exp(log_p))
        return jnp.sum(draws * objective(tokens, config).loss[0])

    def exact(z):
        log_p = jax.nn.log_softmax(z)
        return 0.5 * jnp.sum(jnp.exp(log_p) * (log_p - log_t)) - reward * jnp.exp(log_p[0])

    np.testing.assert_allclose(jax.grad(estimated)(z), jax.grad(exact)(z), atol=1e-6)


def test_a_teacher_that_is_the_policy_adds_nothing():
    x = random_tokens(7)
    tokens = tokens_of(x | {"reference_logprobs": x["logprobs"]})
    taught = dataclasses.replace(A3PO, teacher="a")
    np.testing.assert_array_equal(gradient(tokens, taught), gradient(tokens, A3PO))


def test_gspo_is_its_papers_objective():
    # J = 1/G Σ_i min(s_i·A_i, clip(s_i)·A_i), s_i = (π_θ(y_i)/π_b(y_i))^(1/|y_i|), and inside the clip
    # dJ/dlog π_t = 1/G·s_i·A_i/|y_i|.
    rng = np.random.default_rng(5)
    lengths, of_sequence = [3, 7, 1, 5], [1.2, -0.4, 0.9, -1.5]
    ids = np.repeat(np.arange(1, 5), lengths)[None]
    behavior = -rng.exponential(size=(1, 16))
    drift = rng.normal(scale=2e-4, size=(1, 16))
    drift[ids == 4] -= 0.1  # Below the clip, with a negative advantage.
    drift[ids == 1] += 0.1  # Above the clip, with a positive one.
    tokens = row(
        behavior + drift,
        behavior_logprobs=behavior,
        advantages=np.array(of_sequence)[ids - 1],
        segment_ids=ids,
    )
    logprobs = np.asarray(tokens.logprobs, np.float64)
    behavior = np.asarray(tokens.behavior_logprobs, np.float64)
    expected, slopes, clipped = [], np.zeros((1, 16)), []
    for i, (length, advantage) in enumerate(zip(lengths, of_sequence, strict=True), start=1):
        s = np.exp(np.sum((logprobs - behavior)[ids == i]) / length)
        bounded = np.clip(s, 1 - 3e-4, 1 + 4e-4)
        expected.append(min(s * advantage, bounded * advantage))
        clipped.append(s * advantage > bounded * advantage)
        slopes[ids == i] = 0 if clipped[-1] else -s * advantage / length / 4
    assert clipped == [True, False, False, True]
    np.testing.assert_allclose(reduced(tokens, GSPO), -np.mean(expected), rtol=1e-5)
    np.testing.assert_allclose(gradient(tokens, GSPO), slopes, rtol=1e-5)


def test_dr_grpo_divides_by_a_constant_length():
    # Two answers of 1 and of 3 tokens at r = u = 1: L = −(1·2 + 3·(−1)) / (2 · 32).
    tokens = row(
        np.full((1, 4), -1.0),
        behavior_logprobs=-1.0,
        advantages=[[2.0, -1.0, -1.0, -1.0]],
        segment_ids=[[1, 2, 2, 2]],
        staleness=1,
    )
    np.testing.assert_allclose(reduced(tokens, DR_GRPO), 1 / 64, rtol=1e-6)
    np.testing.assert_allclose(gradient(tokens, DR_GRPO) * 64, [[-2.0, 1.0, 1.0, 1.0]], rtol=1e-6)


def test_the_reductions_of_one_minibatch_by_hand():
    # Losses 1 | 2, 4, 6 of two answers: 13/4, (1 + 4)/2 and 13/(2·8); a masked token is nowhere.
    tokens = row(
        np.full((1, 5), -1.0),
        advantages=[[1.0, 2.0, 4.0, 6.0, 9.0]],
        segment_ids=[[1, 2, 2, 2, 2]],
        mask=[[True, True, True, True, False]],
    )
    for reduction, length, expected in (
        ("token_mean", None, 13 / 4),
        ("sequence_mean", None, 5 / 2),
        ("fixed_length", 8.0, 13 / 16),
    ):
        config = dataclasses.replace(REINFORCE, reduction=reduction, fixed_length=length)
        np.testing.assert_allclose(reduced(tokens, config), expected, rtol=1e-6)


def test_dropped_tokens_stay_in_the_denominator():
    # u = 9.49 > 5 drops one of two tokens, and the other's gradient is halved by both.
    tokens = row([[-1.0, -1.0]], behavior_logprobs=[[-4.0, -1.0]], advantages=-1.0, staleness=4)
    np.testing.assert_allclose(gradient(tokens, A3PO), [[0.0, 0.5]], rtol=1e-6)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_recompute_at_the_steps_weights_is_current(reduction):
    x = random_tokens(6)
    tokens = tokens_of(x, proximal_logprobs=x["logprobs"])
    recompute = dataclasses.replace(RECOMPUTE, reduction=reduction)
    current = dataclasses.replace(recompute, anchor="current")
    parts = objective(tokens, recompute)
    np.testing.assert_array_equal(parts.ratio, np.ones(x["mask"].shape))
    assert not parts.clipped.any()
    assert np.any(gradient(tokens, recompute))
    np.testing.assert_array_equal(gradient(tokens, recompute), gradient(tokens, current))


def test_recompute_away_from_the_steps_weights_clips():
    parts = objective(tokens_of(random_tokens(6)), RECOMPUTE)
    assert parts.clipped.any() and np.any(parts.ratio != 1)


@pytest.mark.parametrize(
    ("mode", "cap"), [("mask", 1.3), ("clamp", 1.3), ("none", None), ("uncapped", None)]
)
@pytest.mark.parametrize("dual_clip", [None, 2.0])
def test_the_named_loss_is_policy_loss(mode, cap, dual_clip):
    """Bit for bit, with the gradient, over padding that holds NaN and infinities; only logprobs carries one."""
    t = tokens_of(random_tokens(7))
    numbers = dict(clip_low=0.2, clip_high=0.28, behavior_cap=cap, dual_clip=dual_clip)

    def by_parts(*arguments):
        loss = policy_loss.policy_loss(*arguments, t.mask, behavior_cap_mode=mode, **numbers)
        return loss.sum(), loss

    def by_name(logprobs):
        tokens = dataclasses.replace(t, logprobs=logprobs)
        loss = objective(tokens, LossConfig(behavior_weight=mode, **numbers)).loss
        return loss.sum(), loss

    anchor = anchors.a3po(t.logprobs, t.behavior_logprobs, t.staleness, t.mask)
    (slope, *others), found = jax.grad(by_parts, (0, 1, 2, 3), has_aux=True)(
        t.logprobs, t.behavior_logprobs, anchor, t.advantages
    )
    expected_slope, expected = jax.grad(by_name, has_aux=True)(t.logprobs)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(slope, expected_slope)
    assert np.any(found) and np.any(slope) and not np.any(others)


def test_cispo_keeps_the_gradient_of_what_it_clips():
    # w = 1.1, 20 and 0.1 with ε_high = 4: −min(w, 5)·A, nothing from below.
    w, advantages = np.array([[1.1, 20.0, 0.1]]), np.array([[1.0, 2.0, -1.0]])
    config = LossConfig(surrogate="cispo", anchor="behavior", clip_low=1.0, clip_high=4.0, **PLAIN)
    tokens = row(np.log(w) - 5.0, behavior_logprobs=-5.0, advantages=advantages)
    expected = -np.array([[1.1, 5.0, 0.1]]) * advantages
    np.testing.assert_allclose(gradient(tokens, config) * 3, expected, rtol=1e-5)
    np.testing.assert_array_equal(objective(tokens, config).clipped, [[False, True, False]])


def test_truncated_importance_sampling_bounds_engine_mismatch():
    config = LossConfig(anchor="recompute", behavior_weight="tis", behavior_cap=2.0)
    tokens = row(
        [[-1.0, -1.0]],
        proximal_logprobs=[[-1.0, -1.0]],
        behavior_logprobs=[[-1.5, -2.5]],
        advantages=1.0,
    )
    np.testing.assert_allclose(objective(tokens, config).weight, [[np.exp(0.5), 2.0]], rtol=1e-6)


def test_icepop_keeps_the_band_with_its_edges():
    weight = weights.banded(np.log([[0.4, 0.6, 4.9, 5.1]]), low=0.5, high=5.0)
    np.testing.assert_allclose(weight, [[0.0, 0.6, 4.9, 0.0]], rtol=1e-6)
    np.testing.assert_array_equal(
        weights.banded(np.zeros((1, 1)), low=1.0, high=1.0), np.ones((1, 1))
    )


@pytest.mark.parametrize(
    ("policy", "engine", "advantage", "kept"),
    [
        (0.8, 0.5, +1, 0),
        (0.8, 0.5, -1, 1),
        (0.2, 0.5, -1, 0),
        (0.2, 0.5, +1, 1),
        (0.6, 0.5, +1, 1),
        (0.01, 1e-5, +1, 1),  # a ratio of 1000 that moved the distribution by little
        (0.8, 0.5, 0, 1),
    ],
)
def test_dppo_drops_what_moved_too_far_the_way_the_advantage_pulls(policy, engine, advantage, kept):
    config = LossConfig(
        surrogate="unclipped",
        anchor="behavior",
        behavior_weight="dppo_mask",
        behavior_cap=None,
        dppo_delta=0.2,
    )
    tokens = row(np.log(policy), behavior_logprobs=np.log(engine), advantages=advantage)
    assert objective(tokens, config).weight == kept
    np.testing.assert_allclose(
        gradient(tokens, config), [[-kept * advantage * policy / engine]], rtol=1e-4
    )


@pytest.mark.parametrize(("name", "slope"), [("k1", 1.0), ("k2", -np.log(2)), ("k3", 1 - 2.0)])
@pytest.mark.parametrize("to", ["reference", "behavior"])
def test_a_penalty_pulls_to_its_policy(name, slope, to):
    # x = log(q/p) = ln 2: dk1/dlog p = 1, dk2 = −x, dk3 = 1 − eˣ. Nothing else has a gradient at A = 0.
    config = dataclasses.replace(REINFORCE, kl=name, kl_to=to, kl_coefficient=0.5)
    tokens = row(np.log(0.25), **{f"{to}_logprobs": np.log(0.5)})
    np.testing.assert_allclose(gradient(tokens, config), [[0.5 * slope]], rtol=1e-5)


@pytest.mark.parametrize("name", ["k2", "k3"])
def test_a_penalty_has_no_gradient_at_its_reference(name):
    x = random_tokens(8)
    tokens = tokens_of(x, reference_logprobs=x["logprobs"], advantages=np.zeros_like(x["logprobs"]))
    config = dataclasses.replace(REINFORCE, kl=name, kl_coefficient=0.5)
    np.testing.assert_array_equal(gradient(tokens, config), np.zeros(x["mask"].shape))
    assert np.any(
        gradient(dataclasses.replace(tokens, reference_logprobs=-1 - tokens.mask), config)
    )


def test_a_penalty_is_not_weighted_by_the_behavior_weight():
    # u = 9.49 > 5 drops the surrogate of the token, not its penalty.
    config = LossConfig(kl="k1", kl_coefficient=0.1)
    tokens = row(
        -1.0, behavior_logprobs=-4.0, reference_logprobs=-1.5, advantages=-1.0, staleness=4
    )
    np.testing.assert_allclose(reduced(tokens, config), 0.1 * 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(anchor="behavior", **PLAIN),
        RECOMPUTE,
        LossConfig(anchor="recompute", behavior_weight="clamp", behavior_cap=1.05),
        LossConfig(anchor="recompute", surrogate="unclipped", **UNCAPPED),
        LossConfig(anchor="recompute", ratio="sequence", reduction="sequence_mean", **UNCAPPED),
        LossConfig(anchor="behavior", surrogate="unclipped", ratio="sequence", **PLAIN),
        LossConfig(anchor="behavior", kl="k3", kl_coefficient=0.5, kl_to="behavior", **PLAIN),
        dataclasses.replace(REINFORCE, kl="k1", kl_coefficient=0.5),
        dataclasses.replace(REINFORCE, kl="k2", kl_coefficient=0.5),
        dataclasses.replace(REINFORCE, kl="k3", kl_coefficient=0.5, reduction="sequence_mean"),
    ],
    ids=named,
)
def test_the_gradient_is_that_of_finite_differences(config):
    # Inside the clip: log-ratios of at most 0.1.
    rng = np.random.default_rng(9)
    logprobs = -1 - rng.random((1, 8))
    tokens = row(
        logprobs,
        behavior_logprobs=logprobs + rng.uniform(-0.1, 0.1, (1, 8)),
        proximal_logprobs=logprobs + rng.uniform(-0.1, 0.1, (1, 8)),
        reference_logprobs=logprobs + rng.uniform(-0.5, 0.5, (1, 8)),
        advantages=rng.normal(size=(1, 8)),
        segment_ids=[[1, 1, 1, 2, 2, 2, 2, 0]],
        mask=[[False, True, True, True, False, True, True, False]],
    )

    def loss(x):
        return reduced(dataclasses.replace(tokens, logprobs=x), config)

    check_grads(loss, (tokens.logprobs,), order=1, atol=2e-2, rtol=2e-2, eps=1e-2)


@pytest.mark.parametrize(
    "config",
    [A3PO, GSPO, DG, DR_GRPO, dataclasses.replace(A3PO, kl="k3", kl_coefficient=0.1)],
    ids=named,
)
def test_masked_tokens_are_as_if_removed(config):
    x = random_tokens(10)
    (kept,) = np.nonzero(x["mask"][0])
    alone = {name: value[:1, kept] for name, value in x.items()}
    whole = {name: value[:1] for name, value in x.items()}
    np.testing.assert_allclose(
        objective(tokens_of(whole), config).loss[:, kept],
        objective(tokens_of(alone), config).loss,
        rtol=1e-6,
    )


@pytest.mark.parametrize("config", [A3PO, GSPO, DG], ids=named)
def test_a_row_of_padding_changes_nothing(config):
    x = random_tokens(11)
    with_padding = reduced(tokens_of(x), config)
    np.testing.assert_allclose(with_padding, reduced(tokens_of(x, slice(0, 5)), config), rtol=1e-6)


def test_the_parts_of_masked_tokens_are_0_and_their_ratio_1():
    x = random_tokens(12)
    config = LossConfig(anchor="recompute", kl="k3", kl_coefficient=0.1)
    for name, value in vars(objective(tokens_of(x), config)).items():
        np.testing.assert_array_equal(value[~x["mask"]], float(name == "ratio"), err_msg=name)


def test_the_dual_clip_bounds_the_loss_of_negative_advantages_only():
    # r = 10 at staleness 1: A = −2 gives 20, at most 3·2; A = +2 is clipped at 1.2·2 as before.
    tokens = row([[-1.0, -1.0]], behavior_logprobs=-1 - np.log(10), advantages=[[-2.0, 2.0]])
    config = LossConfig(anchor="behavior", dual_clip=3.0, **PLAIN)
    np.testing.assert_allclose(objective(tokens, config).loss, [[6.0, -2.4]], rtol=1e-5)
    np.testing.assert_array_equal(gradient(tokens, config), [[0.0, 0.0]])


def test_as_many_trajectories_as_columns_are_told_apart():
    # Each of one token, numbered 1 to T: the ratio of a sequence is the token's, and a mean of means a mean.
    tokens = row(
        [[-1.0, -2.0, -3.0]], behavior_logprobs=-2.5, advantages=1.0, segment_ids=[[1, 2, 3]]
    )
    config = LossConfig(anchor="behavior", ratio="sequence", reduction="sequence_mean", **PLAIN)
    parts = objective(tokens, config)
    np.testing.assert_allclose(parts.ratio, np.exp([[1.5, 0.5, -0.5]]), rtol=1e-6)
    np.testing.assert_array_equal(parts.share, np.ones((1, 3)))


def test_kept_tokens_are_0_where_they_are_masked():
    x = random_tokens(14)
    kept = tokens_of(x).kept()
    for name in FLOATS:
        np.testing.assert_array_equal(getattr(kept, name), np.where(x["mask"], x[name], 0))


def test_every_part_that_is_handed_an_undetached_number_detaches_it():
    # By themselves, outside of `objective`, which detaches before it calls them.
    one = jnp.full((1, 1), -0.5)
    for part in (
        lambda x: weights.banded(x, low=0.1, high=5.0),
        lambda x: weights.capped(x, cap=5.0, mode="mask"),
        lambda x: weights.capped(x, cap=5.0, mode="clamp"),
        lambda x: weights.capped(x, cap=None, mode="uncapped"),
        lambda x: weights.dppo_mask(x, 2 * x, x, delta=0.5),
        lambda x: surrogates.clipped(jnp.ones((1, 1)), x, clip_low=0.2, clip_high=0.2),
        lambda x: surrogates.reinforce(jnp.ones((1, 1)), x),
        lambda x: surrogates.unclipped(jnp.ones((1, 1)), x),
        lambda x: surrogates.cispo(jnp.ones((1, 1)), x, x, clip_high=0.2),
        lambda x: surrogates.dg(jnp.ones((1, 1)), x, temperature=1.0, threshold=0.0),
    ):
        assert jax.grad(lambda x, part=part: part(x).sum())(one) == 0


@pytest.mark.parametrize("estimate", kl.KLS.values())
def test_a_kl_estimate_of_a_policy_to_itself_is_0(estimate):
    x = -np.random.default_rng(13).exponential(size=(2, 3))
    np.testing.assert_array_equal(estimate(x, x, np.ones((2, 3), bool)), np.zeros((2, 3)))

"""Statistics of a loss: sums that do not mind how they were cut, and metrics against NumPy, staleness by staleness."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.loss_reference import anchor_of, random_tokens, reference, tokens_of, trajectories

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.learner.statistics import LAG_BUCKETS, Statistics
from jaxrl_async.metrics import METRICS
from jaxrl_async.objectives.anchors import APPROXIMATIONS
from jaxrl_async.objectives.objective import objective

EDGES = [0, 1, 2, 3, 4, 5, 8, 9, 30]
MEMBERS = {"0": [0], "1": [1], "2": [2], "3-4": [3, 4], "5-8": [5, 8], "9+": [9, 30]}
CAPPED = LossConfig(anchor="recompute", behavior_cap=1.3)
PENALISED = dataclasses.replace(CAPPED, kl="k3", kl_coefficient=0.1, reduction="sequence_mean")
COMPARED = LossConfig(proximal_metrics=True, a3po_fresh="current")
CISPO = LossConfig(
    surrogate="cispo",
    anchor="behavior",
    clip_low=1.0,
    clip_high=0.3,
    behavior_weight="none",
    behavior_cap=None,
)
GSPO = LossConfig(anchor="recompute", ratio="sequence", behavior_cap=1.3)
ALL = [CAPPED, PENALISED, COMPARED, CISPO, GSPO]


def named(c):
    return "-".join((c.anchor, c.ratio, c.surrogate, c.kl))


def stale_tokens(seed=0, staleness=EDGES):
    """Random tokens with these staleness only, and entropies that are NaN where they are masked."""
    x = random_tokens(seed)
    rng = np.random.default_rng(seed)
    drawn = rng.choice(staleness, x["mask"].shape)
    entropy = np.where(x["mask"], rng.random(x["mask"].shape), np.nan).astype(np.float32)
    return x | {"staleness": np.where(x["mask"], drawn, -1000).astype(np.int32)}, entropy


def measured(x, entropy, config, rows=slice(None)):
    tokens = tokens_of(x, rows)
    parts = objective(tokens, config)
    return Statistics(config).measure(tokens, jnp.asarray(entropy[rows]), parts)


def metrics_of(x, entropy, config):
    found = Statistics(config).metrics(*measured(x, entropy, config))
    return {name: float(value) for name, value in found.items()}


def close(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


def share_of_effect(weights):
    """Kish: (Σ w)² / (n Σ w²)."""
    squares = (weights**2).sum()
    return weights.sum() ** 2 / (len(weights) * squares) if squares else 0.0


@pytest.mark.parametrize("cut", [(0, 6), (0, 2, 6)])
def test_the_effective_share_of_sequences_is_kishs_of_the_products_of_their_ratios(cut):
    x, entropy = stale_tokens(4)
    statistics = Statistics(CAPPED, by_sequence=True)
    sums = statistics.zeros()[0]
    for rows in itertools.starmap(slice, itertools.pairwise(cut)):
        tokens = tokens_of(x, rows)
        sums += statistics.measure(tokens, entropy[rows], objective(tokens, CAPPED))[0]
    products = [
        np.exp(sum(token.logprob - token.behavior for token in tokens))
        for tokens in trajectories(x)
    ]
    assert len(products) > 9 and max(products) / min(products) > 10
    expected = share_of_effect(np.array(products))
    np.testing.assert_allclose(statistics.sequence_ess(sums), expected, rtol=2e-5)


def test_the_effective_share_of_sequences_far_from_the_sampler_is_at_least_one_sequence():
    x, entropy = stale_tokens(4)
    statistics = Statistics(CAPPED, by_sequence=True)
    tokens = tokens_of(x, slice(0, 6))
    away = dataclasses.replace(tokens, logprobs=tokens.logprobs - 60)
    sums, _ = statistics.measure(away, entropy, objective(away, CAPPED))
    num = len(list(trajectories(x)))
    np.testing.assert_allclose(statistics.sequence_ess(sums), 1 / num, rtol=1e-5)


def k3(x, mask):
    """KL(behavior ‖ policy), nats per token."""
    log_w = (x["logprobs"][mask] - x["behavior_logprobs"][mask]).astype(np.float64)
    return np.exp(log_w) - 1 - log_w


@pytest.mark.parametrize("config", ALL, ids=named)
@pytest.mark.parametrize("cut", [(0, 1, 2, 3, 4, 5, 6), (0, 2, 6)])
def test_sums_and_maxima_over_microbatches_are_those_of_the_whole(config, cut):
    x, entropy = stale_tokens(1)
    sums, maxima = Statistics(config).zeros()
    for start, stop in itertools.pairwise(cut):
        more, largest = measured(x, entropy, config, slice(start, stop))
        assert (more.shape, largest.shape) == (sums.shape, maxima.shape)
        sums, maxima = sums + more, jnp.maximum(maxima, largest)
    whole = measured(x, entropy, config)
    np.testing.assert_allclose(sums, whole[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(maxima, whole[1])
    assert sums.dtype == maxima.dtype == jnp.float32


@pytest.mark.parametrize("config", ALL, ids=named)
@pytest.mark.parametrize("seed", [2, 3])
def test_the_metrics_of_a_staleness_are_those_of_its_tokens(config, seed):
    x, entropy = stale_tokens(seed)
    found = metrics_of(x, entropy, config)
    _, _, parts = reference(x, config)
    assert tuple(MEMBERS) == tuple(LAG_BUCKETS)
    for name, staleness in MEMBERS.items():
        of = x["mask"] & np.isin(x["staleness"], staleness)
        assert of.sum() > 1
        expected = {
            "tokens": of.sum(),
            "ratio": parts["ratio"][of].mean(),
            "clip_fraction": parts["clipped"][of].mean(),
            "kl": k3(x, of).mean(),
            "ess": share_of_effect(parts["weight"][of]),
            "advantage_sign": np.sign(x["advantages"][of]).mean(),
        }
        close(found, {f"lag/{name}/{key}": value for key, value in expected.items()})
    assert sum(found[f"lag/{name}/tokens"] for name in MEMBERS) == x["mask"].sum()


@pytest.mark.parametrize("edge", EDGES)
def test_a_staleness_falls_into_its_bucket_and_the_others_read_0(edge):
    x, entropy = stale_tokens(4, [edge])
    found = metrics_of(x, entropy, CAPPED)
    (bucket,) = (name for name, members in MEMBERS.items() if edge in members)
    assert found["staleness/mean"] == found["staleness/max"] == edge
    for name in MEMBERS:
        tokens = x["mask"].sum() if name == bucket else 0
        assert found[f"lag/{name}/tokens"] == tokens
        for key in ("ratio", "clip_fraction", "kl", "ess"):
            value = found[f"lag/{name}/{key}"]
            assert value > 0 if name == bucket else value == 0, (name, key)


@pytest.mark.parametrize("config", ALL, ids=named)
def test_the_metrics_of_the_whole_are_those_of_all_its_tokens(config):
    x, entropy = stale_tokens(5)
    mask, found = x["mask"], metrics_of(x, entropy, config)
    loss, _, parts = reference(x, config)
    log_w = x["logprobs"][mask].astype(np.float64) - x["behavior_logprobs"][mask]
    expected = {
        "loss/policy": loss,
        "policy/ratio": parts["ratio"][mask].mean(),
        "policy/clip_fraction": parts["clipped"][mask].mean(),
        "policy/dropped_by_cap": (parts["weight"][mask] == 0).mean(),
        "policy/kl_behavior": k3(x, mask).mean(),
        "policy/kl_behavior_k1": -log_w.mean(),
        "policy/entropy": entropy[mask].mean(),
        "policy/ess": share_of_effect(parts["weight"][mask]),
        "policy/max_ratio": np.exp(log_w.max()),
        "policy/max_anchor_ratio": parts["ratio"][mask].max(),
        "staleness/mean": x["staleness"][mask].mean(),
        "staleness/max": 30,
        "tokens": mask.sum(),
    }
    fresh = mask & (x["staleness"] == 0)
    differences = np.abs(x["logprobs"][fresh].astype(np.float64) - x["behavior_logprobs"][fresh])
    expected |= {
        "mismatch/mean_abs": differences.mean(),
        "mismatch/max_abs": differences.max(),
        "mismatch/kl": k3(x, fresh).mean(),
        "mismatch/tokens": fresh.sum(),
    }
    close(found, expected)
    assert 0 < expected["policy/dropped_by_cap"] < 1 or config in (COMPARED, CISPO)
    assert differences.max() < np.abs(log_w).max()


def test_a_penalty_is_a_metric_where_there_is_one():
    x, entropy = stale_tokens(6)
    _, _, parts = reference(x, PENALISED)
    found = metrics_of(x, entropy, PENALISED)
    close(found, {"policy/kl_penalty": parts["kl"][x["mask"]].mean()})
    for config in (CAPPED, COMPARED, GSPO):
        assert "policy/kl_penalty" not in metrics_of(x, entropy, config)


@pytest.mark.parametrize("fresh", ["behavior", "current"])
def test_the_errors_of_the_cheap_anchors_are_against_the_recomputed_one(fresh):
    x, entropy = stale_tokens(7)
    found = metrics_of(x, entropy, dataclasses.replace(COMPARED, a3po_fresh=fresh))
    sampled = [token for tokens in trajectories(x) for token in tokens]
    exact = np.array([token.proximal for token in sampled])
    policy = np.array([token.logprob for token in sampled])
    behavior = np.array([token.behavior for token in sampled])
    assert set(APPROXIMATIONS) == {"a3po", "linear", "current", "behavior"}
    for name in APPROXIMATIONS:
        config = LossConfig(anchor=name, a3po_fresh=fresh)
        anchor = np.array([anchor_of(token, config) for token in sampled])
        expected = {
            "abs": np.abs(anchor - exact).mean(),
            "relative": np.abs(anchor - exact).sum() / np.abs(exact).sum(),
            "ratio": np.abs(np.exp(policy - anchor) - np.exp(policy - exact)).mean(),
            "weight": np.abs(np.exp(anchor - behavior) - np.exp(exact - behavior)).mean(),
        }
        assert min(expected.values()) > 0
        close(found, {f"proximal/{name}/{key}": value for key, value in expected.items()})


def test_an_anchor_that_is_exact_has_no_error():
    x, entropy = stale_tokens(8)
    found = metrics_of(x | {"proximal_logprobs": x["logprobs"]}, entropy, COMPARED)
    assert {found[f"proximal/current/{key}"] for key in ("abs", "relative", "ratio", "weight")} == {
        0
    }
    assert found["proximal/behavior/abs"] > 0


def test_no_error_of_an_anchor_is_measured_unless_it_is_asked_for():
    x, entropy = stale_tokens(9)
    for config in (CAPPED, PENALISED, CISPO, GSPO):
        assert not [name for name in metrics_of(x, entropy, config) if "proximal" in name]


@pytest.mark.parametrize("config", ALL, ids=named)
def test_every_metric_has_a_name_that_is_known(config):
    for name in metrics_of(*stale_tokens(10), config):
        assert name == "tokens" or any(name.startswith(known) for known in METRICS), name


def test_the_denominator_and_the_summed_loss_are_those_of_the_loss():
    x, entropy = stale_tokens(11)
    for config in ALL:
        statistics = Statistics(config)
        sums, _ = measured(x, entropy, config)
        loss, _, _ = reference(x, config)
        found = statistics.summed_loss(sums) / statistics.denominator(sums)
        np.testing.assert_allclose(found, loss, rtol=1e-5, atol=1e-6)


def test_a_microbatch_without_tokens_adds_nothing():
    x, entropy = stale_tokens(12)
    sums, maxima = measured(x | {"mask": np.zeros_like(x["mask"])}, entropy, PENALISED)
    np.testing.assert_array_equal(sums, np.zeros(sums.shape))
    assert Statistics(PENALISED).denominator(sums) == 0
    np.testing.assert_array_equal(maxima, np.zeros(maxima.shape))

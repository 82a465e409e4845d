"""Every loss that a config can name, against a float64 reference that walks the tokens one by one.

The reference is written from the formulas, in scalars: it knows trajectories, not rows, scales or shares.
"""

import collections
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import loss as loss_config
from jaxrl_async.config.loss import LossConfig
from jaxrl_async.objectives.advantages import ADVANTAGES
from jaxrl_async.objectives.objective import objective
from jaxrl_async.objectives.tokens import Tokens

FLOATS = (
    "logprobs",
    "behavior_logprobs",
    "proximal_logprobs",
    "reference_logprobs",
    "advantages",
)
BAD = (np.nan, np.inf, -np.inf, 1e38)  # what masked entries hold


def random_tokens(seed, rows=6, length=20):
    """Tokens as NumPy arrays by name: up to five trajectories a row, two of them without a sampled token, padding."""
    rng = np.random.default_rng(seed)
    segment_ids, mask = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    for row in range(rows - 1):  # The last row is padding.
        start, last = 0, length - row % 3
        for segment in range(1, 6):
            stop = min(start + int(rng.integers(1, 9)), last)
            segment_ids[row, start:stop] = segment
            mask[row, start:stop] = rng.random(stop - start) < 0.75
            start = stop
    mask[segment_ids == 0] = False
    for row in (0, 1):
        mask[row, segment_ids[row] == 2] = False
    behavior = -rng.exponential(1.5, mask.shape)
    far = rng.normal(scale=0.5, size=mask.shape) + rng.choice([0, 0, 0, -2.5, 2.5], mask.shape)
    values = {
        "logprobs": behavior + far,
        "behavior_logprobs": behavior,
        "proximal_logprobs": behavior + rng.normal(scale=0.6, size=mask.shape),
        "reference_logprobs": behavior + far + rng.normal(scale=0.7, size=mask.shape),
        "advantages": rng.normal(size=mask.shape) * rng.choice([0, 1, 1, 1, 1], mask.shape),
    }
    for name in FLOATS[:-1]:
        values[name] = np.minimum(values[name], -0.01)
    staleness = rng.integers(0, 10, mask.shape)
    bad = rng.choice(BAD, (len(FLOATS), *mask.shape))
    arrays = {
        name: np.where(mask, values[name], filler).astype(np.float32)
        for name, filler in zip(FLOATS, bad, strict=True)
    }
    garbage = rng.choice([-1000, 10**6], mask.shape)
    staleness = np.where(mask, staleness, garbage).astype(np.int32)
    return arrays | {"staleness": staleness, "segment_ids": segment_ids, "mask": mask}


# --- The reference.


@dataclasses.dataclass(frozen=True)
class Sampled:
    """One sampled token."""

    place: tuple[int, int]
    logprob: float
    behavior: float
    proximal: float
    reference: float
    advantage: float
    staleness: int


@dataclasses.dataclass(frozen=True)
class Held:
    """What is detached: held fixed while log π_θ moves."""

    anchor: float
    weight: float
    factor: float  # of log π_θ, in the surrogates that have one


def trajectories(x):
    """The sampled tokens of each trajectory that has any."""
    found = []
    for row in range(x["mask"].shape[0]):
        by_segment = collections.defaultdict(list)
        for column in range(x["mask"].shape[1]):
            if x["mask"][row, column]:
                place = (row, column)
                numbers = [float(x[name][place]) for name in FLOATS]
                by_segment[int(x["segment_ids"][place])].append(
                    Sampled(place, *numbers, int(x["staleness"][place]))
                )
        found.extend(by_segment.values())
    return found


def anchor_of(token, c):
    """log π_p"""
    if c.anchor == "recompute":
        return token.proximal
    if c.anchor == "current":
        return token.logprob
    if c.anchor == "behavior":
        return token.behavior
    fresh = {"behavior": 1.0, "current": 0.0}[c.a3po_fresh]
    alpha = 1 / token.staleness if token.staleness >= 1 else fresh
    if c.anchor == "a3po":
        return alpha * token.behavior + (1 - alpha) * token.logprob
    assert c.anchor == "linear"
    return math.log(alpha * math.exp(token.behavior) + (1 - alpha) * math.exp(token.logprob))


def weight_of(token, anchor, c):
    """What the surrogate of a token is multiplied by."""
    u = math.exp(anchor) / math.exp(token.behavior)
    if c.behavior_weight == "none":
        return 1.0
    if c.behavior_weight == "uncapped":
        return u
    if c.behavior_weight == "mask":
        return 0.0 if u > c.behavior_cap else u
    if c.behavior_weight in ("clamp", "tis"):
        return min(u, c.behavior_cap)
    if c.behavior_weight == "icepop":
        return u if c.behavior_floor <= u <= c.behavior_cap else 0.0
    assert c.behavior_weight == "dppo_mask"
    moved = math.exp(token.logprob) - math.exp(token.behavior)
    if token.advantage > 0 and moved > c.dppo_delta:
        return 0.0
    if token.advantage < 0 and moved < -c.dppo_delta:
        return 0.0
    return 1.0


def log_ratios(logprobs, anchors, c):
    """log r of each token of a trajectory."""
    own = [logprob - anchor for logprob, anchor in zip(logprobs, anchors, strict=True)]
    return [sum(own) / len(own)] * len(own) if c.ratio == "sequence" else own


def hold(tokens, c):
    """What is detached, at the log-probs of the tokens."""
    anchors = [anchor_of(token, c) for token in tokens]
    held = []
    for token, anchor, log_r in zip(
        tokens, anchors, log_ratios([t.logprob for t in tokens], anchors, c), strict=True
    ):
        factor = 1.0
        if c.surrogate == "cispo":
            factor = min(math.exp(log_r), 1 + c.clip_high)
        elif c.surrogate == "dg":
            chi = token.advantage * -token.logprob
            factor = 1 / (1 + math.exp(-(chi - c.dg_threshold) / c.dg_temperature))
        held.append(Held(anchor, weight_of(token, anchor, c), factor))
    return held


def surrogate(r, logprob, advantage, factor, c):
    """Loss before weight, and its slopes in log r and in log π_θ."""
    if c.surrogate == "unclipped":
        return -r * advantage, -r * advantage, 0.0
    if c.surrogate == "clipped":
        inside = min(max(r, 1 - c.clip_low), 1 + c.clip_high)
        loss, slope = -r * advantage, -r * advantage
        if inside * advantage < r * advantage:
            loss, slope = -inside * advantage, 0.0
        if c.dual_clip is not None and advantage < 0 and loss > -c.dual_clip * advantage:
            loss, slope = -c.dual_clip * advantage, 0.0
        return loss, slope, 0.0
    return -factor * advantage * logprob, 0.0, -factor * advantage


def penalty(token, logprob, c):
    """KL estimate and its slope in log π_θ."""
    if c.kl == "none":
        return 0.0, 0.0
    x = (token.reference if c.kl_to == "reference" else token.behavior) - logprob
    return {
        "k1": (-x, 1.0),
        "k2": (x * x / 2, -x),
        "k3": (math.exp(x) - 1 - x, 1 - math.exp(x)),
    }[c.kl]


def walk(tokens, logprobs, held, c):
    """Of each token of a trajectory: (loss, dΣloss/dlog π_θ)."""
    losses, slopes_of_ratio, slopes = [], [], []
    log_rs = log_ratios(logprobs, [h.anchor for h in held], c)
    for token, logprob, h, log_r in zip(tokens, logprobs, held, log_rs, strict=True):
        loss, through_ratio, direct = surrogate(
            math.exp(log_r), logprob, token.advantage, h.factor, c
        )
        kl, kl_slope = penalty(token, logprob, c)
        losses.append(h.weight * loss + c.kl_coefficient * kl)
        slopes_of_ratio.append(h.weight * through_ratio)
        slopes.append(h.weight * direct + c.kl_coefficient * kl_slope)
    if c.ratio == "sequence":  # log r is the mean over the n tokens of the trajectory.
        slopes_of_ratio = [sum(slopes_of_ratio) / len(tokens)] * len(tokens)
    return losses, [a + b for a, b in zip(slopes_of_ratio, slopes, strict=True)]


def reduce(of_trajectories, c):
    """One number of a list of lists."""
    num_tokens = sum(len(values) for values in of_trajectories)
    total = sum(sum(values) for values in of_trajectories)
    if c.reduction == "token_mean":
        return total / num_tokens
    if c.reduction == "sequence_mean":
        means = [sum(values) / len(values) for values in of_trajectories]
        return sum(means) / len(means)
    assert c.reduction == "fixed_length"
    return total / (len(of_trajectories) * c.fixed_length)


def reference(x, c):
    """The reduced loss, its gradient [B, T], and the parts [B, T] by name."""
    found = trajectories(x)
    parts = {name: np.zeros(x["mask"].shape) for name in ("anchor", "weight", "clipped", "kl")}
    parts["ratio"] = np.ones(x["mask"].shape)
    gradient = np.zeros(x["mask"].shape)
    losses = []
    for tokens in found:
        held = hold(tokens, c)
        logprobs = [token.logprob for token in tokens]
        of_tokens, slopes = walk(tokens, logprobs, held, c)
        losses.append(of_tokens)
        log_rs = log_ratios(logprobs, [h.anchor for h in held], c)
        for token, h, slope, log_r in zip(tokens, held, slopes, log_rs, strict=True):
            share = {
                "token_mean": 1 / sum(map(len, found)),
                "sequence_mean": 1 / (len(tokens) * len(found)),
                "fixed_length": 1 / (len(found) * (c.fixed_length or 1)),
            }[c.reduction]
            gradient[token.place] = slope * share
            parts["anchor"][token.place], parts["weight"][token.place] = h.anchor, h.weight
            parts["ratio"][token.place] = r = math.exp(log_r)
            parts["kl"][token.place] = penalty(token, token.logprob, c)[0]
            above, below = r > 1 + c.clip_high, r < 1 - c.clip_low
            parts["clipped"][token.place] = {
                "clipped": (above and token.advantage > 0) or (below and token.advantage < 0),
                "cispo": above,
            }.get(c.surrogate, False)
    return reduce(losses, c), gradient, parts


# --- What is compared with it.


def tokens_of(x, rows=slice(None), **changes):
    return Tokens(**{name: jnp.asarray(value[rows]) for name, value in (x | changes).items()})


def measured(x, c, cut):
    """As `reference`, by `objective` on each microbatch: rows [start, stop) between the numbers of the cut."""
    total, denominator, gradients, parts = 0.0, 0.0, [], []
    for start, stop in itertools.pairwise(cut):
        tokens = tokens_of(x, slice(start, stop))

        def summed(logprobs, tokens=tokens):
            parts = objective(dataclasses.replace(tokens, logprobs=logprobs), c)
            return parts.loss.sum(), vars(parts)

        (loss, found), gradient = jax.value_and_grad(summed, has_aux=True)(tokens.logprobs)
        total, denominator = total + float(loss), denominator + float(found["share"].sum())
        gradients.append(np.asarray(gradient, np.float64))
        parts.append(found)
    whole = {
        name: np.concatenate([part[name] for part in parts])
        for name in parts[0]
        if parts[0][name] is not None
    }
    return total / denominator, np.concatenate(gradients) / denominator, whole


def check(x, c, cut):
    """`objective` agrees with the reference: loss, gradient and parts."""
    loss, gradient, parts = reference(x, c)
    found_loss, found_gradient, found_parts = measured(x, c, cut)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5, atol=1e-6, err_msg=str(c))
    np.testing.assert_allclose(found_gradient, gradient, rtol=1e-5, atol=1e-6, err_msg=str(c))
    assert ("kl" in found_parts) == (c.kl != "none")
    for name in found_parts.keys() & parts.keys():
        np.testing.assert_allclose(
            found_parts[name], parts[name], rtol=1e-5, atol=2e-6, err_msg=f"{name} of {c}"
        )


# --- Which configs.

SURROGATES = (*loss_config.SURROGATES, "dual_clip")
NUMBERS = {  # by weight, then by what else has a number
    "mask": ({"behavior_cap": 1.5}, {"behavior_cap": 0.8}),
    "clamp": ({"behavior_cap": 1.5}, {"behavior_cap": 0.8}),
    "tis": ({"behavior_cap": 2.0}, {"behavior_cap": 1.1}),
    "icepop": (
        {"behavior_cap": 1.4, "behavior_floor": 0.7},
        {"behavior_cap": 5.0, "behavior_floor": 0.5},
    ),
    "dppo_mask": ({"dppo_delta": 0.2}, {"dppo_delta": 0.05}),
    "clipped": ({}, {"clip_low": 0.1, "clip_high": 0.5}),
    "dual_clip": (
        {"surrogate": "clipped", "dual_clip": 1.5},
        {"surrogate": "clipped", "dual_clip": 3.0, "clip_high": 0.28},
    ),
    "cispo": ({"clip_low": 1.0, "clip_high": 0.3}, {"clip_low": 1.0, "clip_high": 4.0}),
    "dg": ({}, {"dg_temperature": 0.4, "dg_threshold": 0.3}),
    "k1": ({"kl_coefficient": 0.1},),
    "k2": ({"kl_coefficient": 0.3},),
    "k3": ({"kl_coefficient": 0.2},),
    "fixed_length": ({"fixed_length": 16.0}, {"fixed_length": 7.5}),
}


def permitted():
    """Every combination of names that LossConfig takes, with numbers in turn, by (surrogate, weight)."""
    found = collections.defaultdict(list)
    kls = [("none", "reference"), *itertools.product(("k1", "k2", "k3"), ("reference", "behavior"))]
    for number, (advantage, anchor, fresh, ratio, of, weight, kl, reduction) in enumerate(
        itertools.product(
            loss_config.ADVANTAGES,
            loss_config.ANCHORS,
            ("behavior", "current"),
            loss_config.RATIOS,
            SURROGATES,
            loss_config.WEIGHTS,
            kls,
            loss_config.REDUCTIONS,
        )
    ):
        if fresh == "current" and anchor not in ("a3po", "linear"):
            continue
        settings = {
            "advantage": advantage,
            "anchor": anchor,
            "a3po_fresh": fresh,
            "ratio": ratio,
            "surrogate": of,
            "behavior_weight": weight,
            "behavior_cap": None,
            "kl": kl[0],
            "kl_to": kl[1],
            "reduction": reduction,
        }
        for name in (of, weight, kl[0], reduction):
            choices = NUMBERS.get(name, ({},))
            settings |= choices[number % len(choices)]
        try:
            config = LossConfig(**settings)
        except ValueError:
            continue
        found[of, weight].append(config)
    return found


def drawn(per_pair=8, seed=7):
    """A few of each pair of surrogate and weight."""
    rng = np.random.default_rng(seed)
    return {
        pair: [configs[i] for i in rng.permutation(len(configs))[:per_pair]]
        for pair, configs in permitted().items()
    }


DRAWN = drawn()


def test_the_drawn_losses_hold_every_name_of_every_table():
    configs = [c for few in DRAWN.values() for c in few]
    assert len(set(configs)) > 250
    for field, names in (
        ("advantage", loss_config.ADVANTAGES),
        ("anchor", loss_config.ANCHORS),
        ("a3po_fresh", ("behavior", "current")),
        ("ratio", loss_config.RATIOS),
        ("surrogate", loss_config.SURROGATES),
        ("behavior_weight", loss_config.WEIGHTS),
        ("kl", loss_config.KLS),
        ("kl_to", ("reference", "behavior")),
        ("reduction", loss_config.REDUCTIONS),
    ):
        counts = collections.Counter(getattr(c, field) for c in configs)
        assert {name: counts[name] >= 5 for name in names} == dict.fromkeys(names, True), field
    assert sum(c.dual_clip is not None for c in configs) >= 5


def test_the_random_tokens_reach_every_branch():
    x = random_tokens(0)
    mask, segments = x["mask"], x["segment_ids"]
    assert set(x["staleness"][mask]) == set(range(10))
    assert {-1.0, 0.0, 1.0} == set(np.sign(x["advantages"][mask]))
    log_w = x["logprobs"][mask] - x["behavior_logprobs"][mask]
    assert log_w.max() > 2 and log_w.min() < -2 and np.sum(np.abs(log_w) < 0.2) > 5
    assert segments.max() >= 4 and (segments == 0).any() and not mask[-1].any()
    assert any(not mask[row, segments[row] == 2].any() for row in (0, 1))
    for name in FLOATS:
        assert np.isnan(x[name][~mask]).any() and np.isposinf(x[name][~mask]).any()
    assert len({len(tokens) for tokens in trajectories(x)}) > 3


@pytest.mark.parametrize("pair", sorted(DRAWN), ids="-".join)
def test_a_loss_its_gradient_and_its_parts_agree_with_the_reference(pair):
    cuts = itertools.cycle([(0, 6), (0, 6), (0, 3, 6)])
    for number, (c, cut) in enumerate(zip(DRAWN[pair], cuts, strict=False)):
        check(random_tokens(number % 3), c, cut)


@pytest.mark.parametrize("reduction", loss_config.REDUCTIONS)
def test_the_references_own_gradient_is_that_of_central_differences(reduction):
    # With what is detached held fixed. In float64, 1e-6 apart, away from kinks: 1e-8 of truncation and rounding.
    x, step = random_tokens(1), 1e-6
    found = trajectories(x)
    of_reduction = [
        c for few in DRAWN.values() for c in few if c.reduction == reduction and c.kl != "none"
    ]
    for c in of_reduction[::5]:
        held = [hold(tokens, c) for tokens in found]
        _, gradient, _ = reference(x, c)
        for chosen in (0, 3, 5):

            def loss(moved, by, c=c, held=held, chosen=chosen):
                logprobs = [[token.logprob for token in tokens] for tokens in found]
                logprobs[chosen][moved] += by
                walked = [walk(*args, c)[0] for args in zip(found, logprobs, held, strict=True)]
                return reduce(walked, c)

            for number, token in enumerate(found[chosen]):
                slope = (loss(number, step) - loss(number, -step)) / (2 * step)
                np.testing.assert_allclose(gradient[token.place], slope, atol=1e-7, err_msg=str(c))


def test_only_logprobs_carries_a_gradient_in_any_loss():
    x = random_tokens(2)
    others = FLOATS[1:]
    for few in DRAWN.values():
        c = few[0]

        def summed(arrays, c=c):
            return objective(tokens_of(x, **arrays), c).loss.sum()

        gradients = jax.grad(summed)({name: jnp.asarray(x[name]) for name in others})
        for name in others:
            assert not np.any(gradients[name]), (name, c)


@pytest.mark.parametrize("name", loss_config.ADVANTAGES)
@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_advantages_agree_with_the_reference(name, group_size):
    rewards = np.random.default_rng(group_size).normal(size=(4, group_size))
    rewards[0] = 0.3
    expected = np.zeros(rewards.shape)
    for group, row in enumerate(rewards.tolist()):
        mean = sum(row) / group_size
        spread = math.sqrt(sum((r - mean) ** 2 for r in row) / (group_size - 1))
        for i, r in enumerate(row):
            others = [other for j, other in enumerate(row) if j != i]
            expected[group, i] = {
                "grpo": (r - mean) / (spread + 1e-6),
                "dr_grpo": r - mean,
                "rloo": r - sum(others) / len(others),
            }[name]
    found = ADVANTAGES[name](rewards)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found[0], np.zeros(group_size))

"""Every loss that a config can name, against a float64 reference that walks the tokens one by one.

The reference is written from the formulas, in scalars: trajectories instead of rows, scales and shares.
"""

import collections
import contextlib
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures.loss_reference import (
    FLOATS,
    hold,
    random_tokens,
    reduce,
    reference,
    taught,
    tokens_of,
    trajectories,
    walk,
)

from jaxrl_async.config import loss as loss_config
from jaxrl_async.config.loss import LossConfig
from jaxrl_async.objectives.advantages import ADVANTAGES
from jaxrl_async.objectives.objective import objective


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
NUMBERS = {  # by weight, then by the other parts with a number
    "mask": ({"behavior_cap": 1.5}, {"behavior_cap": 0.8}),
    "clamp": ({"behavior_cap": 1.5}, {"behavior_cap": 0.8}),
    "tis": ({"behavior_cap": 2.0}, {"behavior_cap": 1.1}),
    "icepop": (
        {"behavior_cap": 1.4, "behavior_floor": 0.7},
        {"behavior_cap": 5.0, "behavior_floor": 0.5},
    ),
    "dppo_mask": ({"dppo_delta": 0.2}, {"dppo_delta": 0.05}),
    "sequence_tis": ({"behavior_cap": 1.5}, {"behavior_cap": 0.3}),
    "sequence_mis": ({"behavior_cap": 3.0}, {"behavior_cap": 0.9}),
    "geometric_tis": ({"behavior_cap": 1.2}, {"behavior_cap": 0.7}),
    "geometric_mask": (
        {"behavior_cap": 1.1, "behavior_floor": 0.5},
        {"behavior_cap": 2.0, "behavior_floor": 0.9, "off_policy_delta": 0.1},
    ),
    "clipped": ({}, {"clip_low": 0.1, "clip_high": 0.5, "off_policy_delta": 0.2}),
    "dual_clip": (
        {"surrogate": "clipped", "dual_clip": 1.5},
        {"surrogate": "clipped", "dual_clip": 3.0, "clip_high": 0.28},
    ),
    "cispo": ({"clip_low": 1.0, "clip_high": 0.3}, {"clip_low": 1.0, "clip_high": 4.0}),
    "dg": ({}, {"dg_temperature": 0.4, "dg_threshold": 0.3}),
    "k1": ({"kl_coefficient": 0.1},),
    "k2": ({"kl_coefficient": 0.3},),
    "k3": ({"kl_coefficient": 0.2}, {"kl_coefficient": 0.2, "kl_weighted": True}),
    "fixed_length": ({"fixed_length": 16.0}, {"fixed_length": 7.5}),
}


def combinations():
    """Settings of every combination of names, permitted or not, by (surrogate, weight), with numbers in turn."""
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
        settings = {
            "advantage": advantage,
            "teacher": "a" if advantage == "none" else "",
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
        if fresh == "behavior" or anchor in ("a3po", "linear"):
            found[of, weight].append(settings)
    return found


def drawn(per_pair=8, seed=7):
    """A few that LossConfig takes of each pair of surrogate and weight."""
    rng, found = np.random.default_rng(seed), {}
    for pair, settings in combinations().items():
        configs = taken(settings[i] for i in rng.permutation(len(settings)))
        # They differ from their neighbours in one factor.
        num = 2 if pair[0] == "sapo" or pair[1].startswith(("sequence", "geometric")) else per_pair
        if few := list(itertools.islice(configs, num)):
            found[pair] = few
    return found


def taken(settings):
    for each in settings:
        with contextlib.suppress(ValueError):
            yield LossConfig(**each)


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
    assert sum(c.kl_weighted for c in configs) >= 5
    assert sum(c.off_policy_delta is not None for c in configs) >= 5


@pytest.mark.parametrize("pair", DRAWN, ids="-".join)
def test_policies_that_are_200_nats_apart_have_finite_losses_and_gradients(pair):
    """float32's exp overflows at 89, and 0 · inf is NaN: also for a token that a clip or a cap drops."""
    x = random_tokens(0)
    far = np.random.default_rng(1).choice([-200.0, 0.0, 200.0], x["mask"].shape)
    for name, sign in (("logprobs", 1), ("behavior_logprobs", -1), ("reference_logprobs", -1)):
        x[name] = np.where(x["mask"], np.minimum(sign * far, 0.0), x[name]).astype(np.float32)
    cut = (0, len(x["mask"]))
    for c in DRAWN[pair]:
        loss, gradient, parts = measured(x, c, cut)
        assert np.isfinite(loss) and np.isfinite(gradient).all(), c
        assert all(np.isfinite(part).all() for part in parts.values()), c


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
    # With detached values held fixed. In float64, 1e-6 apart, away from kinks: 1e-8 of truncation and rounding.
    x, step = random_tokens(1), 1e-6
    plain = trajectories(x)
    of_reduction = [
        c for few in DRAWN.values() for c in few if c.reduction == reduction and c.kl != "none"
    ]
    for c in of_reduction[::5]:
        found = [taught(tokens, c) for tokens in plain]
        held = [hold(tokens, c) for tokens in found]
        _, gradient, _ = reference(x, c)
        for chosen in (0, 3, 5):

            def loss(moved, by, c=c, held=held, chosen=chosen, found=found):
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


@pytest.mark.parametrize(
    "name", [a for a in loss_config.ADVANTAGES if a not in ("turns", "batch", "none")]
)
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

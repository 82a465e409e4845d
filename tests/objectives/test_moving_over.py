"""The numbers of docs/losses.md, "If you come from another trainer": ours by our functions, theirs by their formula."""

import math
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config.loss import PRESETS, LossConfig
from jaxrl_async.objectives import advantages, anchors, kl, ratios, surrogates
from jaxrl_async.objectives.objective import objective
from jaxrl_async.objectives.tokens import Tokens

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "losses.md").read_text("utf-8")
TABLE = PAGE.partition("## If you come from another trainer")[2].partition("\n## ")[0]
ROWS = dict(line.strip("| ").split(" | ", 1) for line in TABLE.splitlines() if line.startswith("| "))  # fmt: skip


def says(row, ours, theirs, digits=3):
    """The row's second cell has our number, the third one theirs."""
    here, there, _ = ROWS[row].replace("−", "-").split(" | ")
    for number, cell in ((ours, here), (theirs, there)):
        shown = re.escape(f"{number:.{digits}f}".rstrip("0").rstrip("."))
        assert re.search(rf"(?<![\d.]){shown}(?!\.?\d)", cell), f"{number}: {cell}"


def of(logprobs, behavior, weights=None, **config):
    """(loss, share) sums of one row of tokens, advantages 1 unless given."""
    logprobs, behavior = jnp.asarray([logprobs]), jnp.asarray([behavior])
    ones = jnp.ones_like(logprobs)
    tokens = Tokens(
        logprobs=logprobs,
        behavior_logprobs=behavior,
        proximal_logprobs=logprobs if weights is None else jnp.asarray([weights]),
        reference_logprobs=None,
        advantages=ones * config.pop("advantage_value", 1.0),
        staleness=ones.astype(int),
        segment_ids=jnp.asarray([config.pop("segments", (1,) * logprobs.shape[1])]),
        mask=ones > 0,
    )
    found = objective(tokens, LossConfig(**config))
    return float(found.loss.sum()), float(found.share.sum())


def test_the_spread_of_a_group():
    rewards = np.array([[0, 0, 0, 0.001]])
    ours = advantages.grpo(rewards)[0, 3]
    centred = rewards - rewards.mean()
    says("spread of a group", ours, (centred / (rewards.std(ddof=1) + 1e-4))[0, 3])


def test_equal_rewards():
    rewards = np.full((1, 6), 0.6, np.float32)
    assert not advantages.grpo(rewards).any()
    centred = rewards - rewards.mean(dtype=np.float32)
    spread = np.sqrt((centred**2).sum() / 5)
    says("equal rewards", 0, float((centred / (spread + np.float32(1e-6)))[0, 0]))


def test_the_dual_clip():
    clip = dict(clip_low=0.2, clip_high=0.2)
    five, bad = jnp.array([5.0]), jnp.array([-1.0])
    ours = float(surrogates.clipped(five, bad, **clip)[0])
    says("dual clip", ours, float(surrogates.clipped(five, bad, **clip, dual_clip=3.0)[0]))
    assert LossConfig().dual_clip is None


def test_k3():
    ours = float(kl.k3(jnp.array([-4.0]), jnp.array([-1.0]), jnp.array([True]))[0])
    assert ours == pytest.approx(math.exp(3) - 1 - 3, rel=1e-5)
    says("`k3`", ours, min(ours, 10))
    far = float(kl.k3(jnp.array([-40.0]), jnp.array([-1.0]), jnp.array([True]))[0])
    assert far == pytest.approx(math.exp(20) - 1 - 20, rel=1e-5)


def test_the_divisor_of_fixed_length():
    config = PRESETS["dr_grpo"] | {"fixed_length": 8.0, "advantage_value": -1.0}
    loss, share = of([-1.0] * 4, [-1.0] * 4, segments=(1, 1, 1, 2), **config)
    assert (loss, share) == (4, 16)  # 2 answers · 8
    says("`fixed_length`", loss / share, loss / 8)


def test_the_bound_of_cispo():
    shifted = math.log(6)
    loss, _ = of([-1.0], [-1.0 - shifted], **PRESETS["cispo"])  # −w · A · log π_θ, log π_θ = −1
    assert PRESETS["cispo"]["clip_high"] == 4 and loss == pytest.approx(5)
    says("CISPO's bound", loss, 4)


def test_tokens_that_a_cap_drops():
    # u = 1 and 6, cap 5: one token of two is left, with loss −1.
    config = dict(anchor="recompute", behavior_weight="mask", behavior_cap=5.0)
    behavior = [-1.0, -1.0 - math.log(6)]
    loss, share = of([-1.0, -1.0], behavior, weights=[-1.0, -1.0], **config)
    assert (loss, share) == (-1, 2)
    says("tokens that a cap drops", loss / share, loss / 1, digits=1)


def test_the_sequence_ratio_beside_a_mask():
    log_ratio = jnp.array([[0.1, 3.0]])
    mask, ids = jnp.ones((1, 2), bool), jnp.ones((1, 2), int)
    ours = float(ratios.sequence(log_ratio, jnp.zeros((1, 2)), mask, ids)[0, 0])
    theirs = float(ratios.sequence(log_ratio, jnp.zeros((1, 2)), mask.at[0, 1].set(False), ids)[0, 0])  # fmt: skip
    says("sequence ratio with a mask", ours, theirs)


def test_the_linear_anchor_of_rare_tokens():
    rare = jnp.array([-30.0])
    ours = float(anchors.linear(rare, rare, jnp.array([2]), jnp.array([True]))[0])
    assert ours == pytest.approx(-30, abs=1e-5)
    says("`linear` of a rare token", 30, -math.log(math.exp(-30) + 1e-10), digits=2)


def test_one_division_a_minibatch():
    # Microbatches of one token with loss −1 and of three with loss 0.
    ppo = PRESETS["ppo"]
    pieces = [of([-1.0], [-1.0], **ppo), of([-1.0] * 3, [-1.0] * 3, advantage_value=0.0, **ppo)]
    ours = sum(loss for loss, _ in pieces) / sum(share for _, share in pieces)
    says("division", ours, np.mean([loss / share for loss, share in pieces]), digits=2)

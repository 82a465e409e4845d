"""Advantages of a group, by hand and by their invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.objectives import advantages

ALL = pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])


def test_grpo_by_hand():
    # Mean 1/4; squared deviations 3·1/16 + 9/16 = 3/4, over G − 1 = 3 makes 1/4: std = 1/2.
    found = advantages.grpo(np.array([[1.0, 0.0, 0.0, 0.0]]))
    np.testing.assert_allclose(found, [[1.5, -0.5, -0.5, -0.5]], rtol=1e-5)


def test_dr_grpo_by_hand():
    found = advantages.dr_grpo(np.array([[1.0, 0.0, 0.0, 0.0], [2.0, 4.0, 6.0, 8.0]]))
    np.testing.assert_allclose(found, [[0.75, -0.25, -0.25, -0.25], [-3, -1, 1, 3]], rtol=1e-6)


def test_a_batch_has_one_spread_and_each_group_its_mean():
    # Deviations ∓1 and ∓3: squares 2 + 18 = 20, over NG − 1 = 3. Rewards of the groups differ by 100, which is gone.
    found = advantages.batch(np.array([[0.0, 2.0], [103.0, 97.0]]))
    np.testing.assert_allclose(found, np.array([[-1, 1], [3, -3]]) / np.sqrt(20 / 3), rtol=1e-5)
    assert not advantages.batch(np.full((3, 4), 0.6)).any()


def test_a_batch_of_one_group_is_grpo():
    rewards = np.random.default_rng(2).normal(size=(1, 8))
    np.testing.assert_allclose(advantages.batch(rewards), advantages.grpo(rewards), rtol=1e-6)


def test_rloo_by_hand():
    # 1 − mean(0, 2) = 0;  0 − mean(1, 2) = −3/2;  2 − mean(1, 0) = 3/2.
    found = advantages.rloo(np.array([[1.0, 0.0, 2.0]]))
    np.testing.assert_allclose(found, [[0.0, -1.5, 1.5]], atol=1e-6)


def test_turns_by_hand():
    nan = np.nan
    rewards = np.array([[[0.5, 1.0, nan], [0.0, nan, nan], [0.0, 0.0, 3.0]]])
    # Ĝ: (1.5, 1), (0), (3, 3, 3); means 1.5, 2 and 3.
    found = advantages.turns(rewards)
    np.testing.assert_allclose(found, [[[0, -1, 0], [-1.5, 0, 0], [1.5, 1, 0]]], atol=1e-6)
    assert found.dtype == np.float32


@pytest.mark.parametrize("base", [1e8, -1e8, 1e15])
def test_rewards_that_float32_cannot_tell_apart_have_their_advantages(base):
    rewards = base + np.array([[1.0, 0.0, 0.0, 0.0]])
    assert len(np.unique(rewards.astype(np.float32))) == 1
    for name in ("grpo", "dr_grpo", "rloo"):
        near, far = (advantages.ADVANTAGES[name](r) for r in (rewards - base, rewards))
        np.testing.assert_array_equal(far, near)
        assert far.dtype == np.float32
    far = advantages.turns(np.stack([rewards, np.ones_like(rewards)], axis=-1))
    np.testing.assert_array_equal(far, [[[0.75, 0]] + [[-0.25, 0]] * 3])


@ALL
def test_rewards_that_float32_has_keep_the_bits_of_float32(name):
    rewards = np.random.default_rng(5).choice([0.1, 5 / 6, 0.3, 0.1 + 0.2, 1e6 / 7], size=(64, 5))
    of_both = (advantages.ADVANTAGES[name](r) for r in (rewards, rewards.astype(np.float32)))
    np.testing.assert_array_equal(*of_both)


def test_one_turn_each_is_dr_grpo():
    rewards = np.random.default_rng(4).normal(size=(5, 4))
    np.testing.assert_array_equal(
        advantages.turns(rewards[..., None])[..., 0], advantages.dr_grpo(rewards)
    )


def test_equal_turns_give_exactly_zero_and_rewards_without_turns_are_refused():
    np.testing.assert_array_equal(advantages.turns(np.full((2, 7, 3), 0.1)), np.zeros((2, 7, 3)))
    with pytest.raises(ValueError, match=r"\[N, G, K\], got shape \[2, 7\]"):
        advantages.turns(np.zeros((2, 7)))


@ALL
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -1 / 3, 1e6 / 7])
@pytest.mark.parametrize("group_size", [2, 3, 7])
def test_equal_rewards_give_exactly_zero(name, reward, group_size):
    found = advantages.ADVANTAGES[name](np.full((2, group_size), reward))
    np.testing.assert_array_equal(found, np.zeros((2, group_size)))


@ALL
def test_a_group_does_not_see_its_neighbours(name):
    rewards = np.random.default_rng(1).normal(size=(5, 4))
    whole = advantages.ADVANTAGES[name](rewards)
    alone = [advantages.ADVANTAGES[name](row[None]) for row in rewards]
    np.testing.assert_array_equal(whole, np.concatenate(alone))


@ALL
def test_advantages_of_a_group_sum_to_zero_and_ignore_a_shift(name):
    rewards = np.random.default_rng(2).normal(size=(5, 4))
    found = advantages.ADVANTAGES[name](rewards)
    np.testing.assert_allclose(found.sum(1), np.zeros(5), atol=1e-5)
    np.testing.assert_allclose(advantages.ADVANTAGES[name](rewards + 3.0), found, atol=1e-4)


@ALL
def test_numpy_stays_numpy_and_jax_stays_jax(name):
    function = advantages.ADVANTAGES[name]
    rewards = np.random.default_rng(3).integers(0, 2, size=(6, 4))
    on_host, on_device = function(rewards), jax.jit(function)(jnp.asarray(rewards))
    assert type(on_host) is np.ndarray and on_host.dtype == np.float32
    assert isinstance(on_device, jax.Array) and on_device.dtype == jnp.float32
    np.testing.assert_allclose(on_host, on_device, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_group_of_one_is_refused_where_it_has_no_spread(name):
    with pytest.raises(ValueError, match=r"G ≥ 2.*\[3, 1\]"):
        advantages.ADVANTAGES[name](np.zeros((3, 1)))


def test_a_group_of_one_has_no_dr_grpo_advantage():
    np.testing.assert_array_equal(advantages.dr_grpo(np.ones((3, 1))), np.zeros((3, 1)))


@ALL
def test_rewards_without_groups_are_refused(name):
    with pytest.raises(ValueError, match=r"\[N, G\]"):
        advantages.ADVANTAGES[name](np.zeros(4))

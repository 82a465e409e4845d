"""Frictions: what each changes, whom it strikes, and that none shifts another."""

import pathlib

import numpy as np
import pytest

from jaxrl_async import parts
from jaxrl_async.cli import config as config_lib
from jaxrl_async.config.settings import SettingsError
from jaxrl_async.preflight import machine
from jaxrl_async.rollout import frictions
from jaxrl_async.rollout.context import rng_of
from jaxrl_async.rollout.frictions import Frictions
from jaxrl_async.tasks.tokenizer import CharTokenizer
from jaxrl_async.types import Trajectory, check_trajectory

QUICKSTART = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.py"
ZERO = 2

# Two prompt tokens, one sampled, one of a tool, two sampled.
ROW = Trajectory(
    tokens=np.array([5, 6, 7, 8, 9, 1], np.int32),
    logprobs=np.array([0, 0, -1.5, 0, -0.5, -2], np.float32),
    versions=np.array([-1, -1, 3, -1, 4, 4], np.int32),
    mask=np.array([False, False, True, False, True, True]),
    prompt_length=2,
    reward=0.5,
)


def rngs(num=10_000):
    return [rng_of("frictions", 0, index, 0, 0) for index in range(num)]


def test_a_bugged_actor_is_sure_of_zeros_and_changes_nothing_else():
    rows = frictions.actor_bug(
        [ROW, ROW], rng_of("frictions", 0, 0, 0, 0), probability=1.0, zero_id=ZERO
    )
    assert len(rows) == 2  # All rows of a sample.
    for bugged in rows:
        check_trajectory(bugged, vocab_size=10, max_tokens=6)
        assert bugged.tokens.tolist() == [5, 6, ZERO, 8, ZERO, ZERO]
        assert bugged.logprobs.tolist() == [0] * 6
        for same in ("versions", "mask", "prompt_length", "reward", "finish_reason"):
            assert getattr(bugged, same) is getattr(ROW, same)
    assert ROW.tokens.tolist() == [5, 6, 7, 8, 9, 1]


@pytest.mark.parametrize(
    ("reward", "recorded"),
    [(1.0, 1.0), (1.5, 1.5), (0.99, 0.0), (0.5, 0.0), (0.0, 0.0), (-1.0, 0.0)],
)
def test_only_a_perfect_answer_is_discovered(reward, recorded):
    rng = rng_of("frictions", 0, 0, 0, 0)
    assert frictions.rare_discovery(reward, rng, probability=1.0) == recorded
    assert frictions.rare_discovery(reward, rng, probability=0.0) == reward


def test_a_corrupted_reward_is_0_or_1_as_often_whatever_it_was():
    for reward in (0.0, 0.4, 1.0):
        noise = [frictions.reward_corruption(reward, rng, probability=1.0) for rng in rngs()]
        assert set(noise) == {0.0, 1.0}
        assert abs(np.mean(noise) - 0.5) < 0.02  # four standard deviations of 10,000 draws
        kept = [frictions.reward_corruption(reward, rng, probability=0.0) for rng in rngs(100)]
        assert kept == [reward] * 100


def test_each_friction_strikes_as_often_as_it_is_asked_to():
    bugged = [
        frictions.actor_bug([ROW], rng, probability=0.3, zero_id=ZERO)[0] is not ROW
        for rng in rngs()
    ]
    unseen = [frictions.rare_discovery(0.5, rng, probability=0.3) == 0 for rng in rngs()]
    corrupted = [frictions.reward_corruption(0.5, rng, probability=0.3) != 0.5 for rng in rngs()]
    for struck in (bugged, unseen, corrupted):
        assert abs(np.mean(struck) - 0.3) < 0.02


def recorded(reward, **probabilities):
    """(whether bugged, reward) of each of a thousand samples."""
    chosen = {"actor_bug": 0.0, "reward_corruption": 0.0, "rare_discovery": 0.0} | probabilities
    all_of_them, results = Frictions(**chosen, zero_id=ZERO), []
    for rng in rngs(1000):
        (row,) = all_of_them.of_rows([ROW], rng)
        results.append((row.tokens[2] == ZERO, all_of_them.of_reward(reward, rng)))
    return results


def test_no_friction_changes_nothing():
    assert recorded(0.5) == [(False, 0.5)] * 1000


def test_no_friction_shifts_the_draws_of_another():
    bugged = [bug for bug, _ in recorded(0.5, actor_bug=0.5)]
    unseen = [reward for _, reward in recorded(0.5, rare_discovery=0.5)]
    corrupted = [reward for _, reward in recorded(2.0, reward_corruption=0.5)]
    for column in (bugged, unseen, [reward < 2 for reward in corrupted]):
        assert 400 < np.count_nonzero(column) < 600
    everything = recorded(2.0, actor_bug=0.5, reward_corruption=0.5, rare_discovery=0.9)
    assert everything == list(zip(bugged, corrupted, strict=True))
    both = recorded(0.5, actor_bug=0.9, rare_discovery=0.5)
    assert [reward for _, reward in both] == unseen
    # Nor does one strike where another does.
    struck = np.array([bugged, [r == 0 for r in unseen], [r < 2 for r in corrupted]])
    assert np.abs(np.corrcoef(struck) - np.eye(3)).max() < 0.1


def test_a_corrupted_reward_needs_no_discovery():
    struck = [reward for _, reward in recorded(0.5, reward_corruption=1.0, rare_discovery=1.0)]
    assert struck == [reward for _, reward in recorded(0.5, reward_corruption=1.0)]


def test_randomness_is_stable_across_processes_and_differs_by_every_part():
    # blake2b("frictions/1/7/0/2", 16 bytes), little-endian, seeds NumPy's generator.
    assert rng_of("frictions", 1, 7, 0, 2).integers(2**31) == 355522245
    firsts = [
        rng_of("frictions", run_seed, index, sample, attempt).random()
        for run_seed in range(4)
        for index in range(4)
        for sample in range(4)
        for attempt in range(4)
    ]
    firsts.append(rng_of("rollout", 0, 0, 0, 0).random())
    assert len(set(firsts)) == 257


def settings_of(*overrides):
    flags = config_lib.parse_flags(
        "usage",
        [f"--config={QUICKSTART}", *(f"--config.rollout.{o}" for o in overrides)],
        config=True,
        workdir=("", "directory"),
    )
    return config_lib.settings_of(flags.config)


@pytest.mark.parametrize("name", ["actor_bug", "reward_corruption", "rare_discovery"])
@pytest.mark.parametrize("value", [2, -0.1, "nan"])
def test_what_is_no_probability_is_refused(name, value):
    message = rf"rollout\.frictions\.{name} .*\[0, 1\].*{value}"
    with pytest.raises(SettingsError, match=message):
        settings_of(f"frictions.{name}={value}")


def test_a_run_without_frictions_needs_no_token_for_zero():
    assert parts.frictions_of(settings_of(), tokenizer=None) is None


def test_a_run_whose_rewards_alone_go_wrong_needs_no_token_for_zero():
    settings = settings_of("frictions.reward_corruption=0.1", "frictions.rare_discovery=1")
    wanted = parts.frictions_of(settings, tokenizer=None)
    assert (wanted.actor_bug, wanted.reward_corruption, wanted.rare_discovery) == (0.0, 0.1, 1.0)


def test_a_bugged_actor_writes_the_tokenizers_zero():
    settings = settings_of("frictions.actor_bug=0.25")
    wanted = parts.frictions_of(settings, CharTokenizer("=+10"))
    assert wanted == Frictions(0.25, 0.0, 0.0, zero_id=5)  # padding, end, "=", "+", "1", "0"


class Wordy:
    def encode(self, text):
        return [3, 4]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (
            CharTokenizer("ab"),
            "'0' .*alphabet 'ab'",
        ),
        (Wordy(), r"'0'.*\[3, 4\]"),
    ],
)
def test_a_tokenizer_without_one_token_for_zero_is_refused(tokenizer, message):
    with pytest.raises(ValueError, match=rf"rollout\.frictions\.actor_bug .*{message}"):
        parts.frictions_of(settings_of("frictions.actor_bug=1"), tokenizer)


def test_a_missing_zero_is_found_before_any_role_starts(tmp_path):
    CharTokenizer("123456789+=").save(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match=r"rollout\.frictions\.actor_bug .*'0'"):
        machine.prepare(settings_of("frictions.actor_bug=1"), tmp_path, resume=True)

"""Tokens are drawn from the right distribution, row by row, and the settings are bounded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.inference import sampling

PARAMS = sampling.SamplingParams(
    max_new_tokens=4, temperature=1.0, top_p=1.0, top_k=-1, stop_token_ids=(), seed=0
)
# Probabilities 0.5, 0.25, 0.125, 0.125: in halves, so that top_p's borders are exact.
LOGITS = jnp.log(jnp.array([0.125, 0.5, 0.25, 0.125]))


def draw(num, *, temperature=1.0, top_p=1.0, top_k=-1, seeds=None, never=()):
    """Settings of `num` slots, seeded 0, 1, 2, …"""
    seeds = range(num) if seeds is None else seeds
    return sampling.Draw(
        key=jnp.array([sampling.seed_words(seed) for seed in seeds]),
        temperature=jnp.full(num, temperature),
        top_p=jnp.full(num, top_p),
        top_k=jnp.full(num, top_k),
        never=jnp.tile(jnp.array((*never, -1, -1, -1, -1)[:4]), (num, 1)),
    )


def sample(logits, *, position=0, **settings):
    num = len(logits)
    positions = jnp.broadcast_to(jnp.asarray(position, jnp.int32), num)
    tokens, logprobs = jax.jit(sampling.sample)(logits, positions, draw(num, **settings))
    return np.asarray(tokens), np.asarray(logprobs)


def rows(num):
    return jnp.tile(LOGITS[None], (num, 1))


def chi_square(tokens, probs):
    expected = len(tokens) * np.asarray(probs)
    counts = np.bincount(tokens, minlength=len(probs))
    return (((counts - expected) ** 2) / expected).sum()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_frequencies_are_the_softmax_at_the_temperature(temperature):
    tokens, _ = sample(rows(8192), temperature=temperature)
    # The 99.9 % quantile of chi-square with 3 degrees of freedom is 16.3.
    assert chi_square(tokens, jax.nn.softmax(LOGITS / temperature)) < 16.3


def test_the_tokens_of_one_seed_are_independent_from_position_to_position():
    tokens, _ = sample(rows(8192), position=np.arange(8192), seeds=[7] * 8192)
    assert chi_square(tokens, jax.nn.softmax(LOGITS)) < 16.3
    pairs = 4 * tokens[:-1] + tokens[1:]
    probs = np.asarray(jax.nn.softmax(LOGITS))
    # 15 degrees of freedom: 37.7.
    assert chi_square(pairs, np.outer(probs, probs).ravel()) < 37.7


def test_seed_and_position_fix_the_token_whatever_the_row():
    one, _ = sample(rows(1), position=5, seeds=[2**40 + 3])
    many, _ = sample(rows(9), position=5, seeds=[*range(8), 2**40 + 3])
    assert many[8] == one[0]


def test_both_halves_of_a_seed_count():
    low, _ = sample(rows(256), seeds=range(256))
    high, _ = sample(rows(256), seeds=[seed + 2**32 for seed in range(256)])
    assert (low != high).any()


def test_logprobs_are_of_the_tempered_distribution_before_truncation():
    for settings in ({}, {"top_k": 2}, {"top_p": 0.3}):
        tokens, logprobs = sample(rows(64), temperature=0.5, **settings)
        expected = np.asarray(jax.nn.log_softmax(LOGITS / 0.5))[tokens]
        np.testing.assert_allclose(logprobs, expected, atol=1e-6)


def test_temperature_zero_takes_the_mode_with_logprobs_at_temperature_one():
    tokens, logprobs = sample(rows(64), temperature=0.0)
    assert (tokens == 1).all()
    np.testing.assert_allclose(logprobs, np.log(0.5), atol=1e-6)


def test_top_k_of_one_is_greedy():
    logits = jax.random.normal(jax.random.key(0), (64, 17))
    chosen, _ = sample(logits, top_k=1)
    greedy, _ = sample(logits, temperature=0.0)
    np.testing.assert_array_equal(chosen, greedy)


@pytest.mark.parametrize(
    ("settings", "survivors"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 3}, {0, 1, 2}),  # of the equal 0 and 3 the lower id survives
        ({"top_k": 4}, {0, 1, 2, 3}),
        # A token survives while those more probable than it hold no more than top_p.
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.6}, {1, 2}),
        ({"top_p": 0.8}, {0, 1, 2}),
        ({"top_p": 0.9}, {0, 1, 2, 3}),
        ({"top_p": 0.9, "top_k": 2}, {1, 2}),
    ],
)
def test_truncation_leaves_exactly_the_most_probable(settings, survivors):
    tokens, _ = sample(rows(2048), **settings)
    assert set(tokens.tolist()) == survivors
    probs = np.asarray(jax.nn.softmax(LOGITS)) * [i in survivors for i in range(4)]
    kept = [i for i in range(4) if i in survivors]
    if len(kept) > 1:
        counts = np.searchsorted(kept, tokens)
        assert chi_square(counts, probs[kept] / probs.sum()) < 16.3


@pytest.mark.parametrize(
    ("settings", "survivors"),
    [
        ({}, {0, 2, 3}),
        ({"temperature": 0.0}, {2}),  # and not 1, the mode
        ({"top_k": 1}, {2}),  # the one that is left is one of those that may be drawn
        ({"top_k": 2}, {0, 2}),
        ({"top_p": 0.3}, {0, 2}),  # token 2 alone holds 0.25
    ],
)
def test_a_token_that_is_ruled_out_is_never_drawn_and_changes_no_logprob(settings, survivors):
    tokens, logprobs = sample(rows(2048), never=[1], **settings)
    assert set(tokens.tolist()) == survivors
    np.testing.assert_allclose(logprobs, np.asarray(LOGITS)[tokens], atol=1e-6)


def test_where_it_would_not_have_been_drawn_ruling_it_out_changes_nothing():
    before, logprobs_before = sample(rows(2048))
    after, logprobs = sample(rows(2048), never=[1])
    others = before != 1
    assert 0 < others.sum() < 2048
    np.testing.assert_array_equal(before[others], after[others])
    np.testing.assert_array_equal(logprobs_before[others], logprobs[others])


def test_a_neighbour_that_truncates_changes_nothing():
    logits = jax.random.normal(jax.random.key(1), (128, 33))
    settings = draw(128)
    positions = jnp.zeros(128, jnp.int32)
    draw_all = jax.jit(sampling.sample)
    alone = draw_all(logits, positions, settings)
    neighbours = settings._replace(top_k=settings.top_k.at[::2].set(3))
    beside = draw_all(logits, positions, neighbours)
    np.testing.assert_array_equal(alone[0][1::2], beside[0][1::2])
    np.testing.assert_array_equal(alone[1][1::2], beside[1][1::2])


def sample_kept(logits, *, most, min_p=0.0, **settings):
    num = len(logits)
    keep = sampling.Keep(jnp.broadcast_to(jnp.asarray(most), num), jnp.full(num, min_p))
    settings = draw(num, **settings)._replace(keep=keep)
    draw_all = jax.jit(sampling.sample_kept, static_argnums=3)
    return map(np.asarray, draw_all(logits, jnp.zeros(num, jnp.int32), settings, 3))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"top_k": 2}, [1, 2, -1]),
        ({"top_p": 0.4}, [1, -1, -1]),
        ({"top_p": 0.6, "temperature": 0.9}, [1, 2, -1]),
        ({"top_p": 0.9}, [0, 1, 2]),  # 3 would be left too, beyond the bound
        ({"min_p": 0.5}, [1, 2, -1]),
        ({"min_p": 0.6}, [1, -1, -1]),
        ({"top_k": 2, "never": [1]}, [0, 2, -1]),
    ],
)
def test_kept_tokens_are_drawn_as_their_renormalised_probabilities_say(settings, kept):
    tokens, logprobs, found = sample_kept(rows(4096), most=3, **settings)
    np.testing.assert_array_equal(found, np.tile(kept, (4096, 1)))
    ids = [i for i in kept if i >= 0]
    expected = jax.nn.log_softmax(LOGITS[jnp.array(ids)] / settings.get("temperature", 1.0))
    places = np.searchsorted(ids, tokens)
    np.testing.assert_allclose(logprobs, np.asarray(expected)[places], atol=1e-6)
    assert set(tokens.tolist()) == set(ids)
    if len(ids) > 1:
        assert chi_square(places, np.exp(expected)) < 16.3


def test_a_slot_that_asks_for_no_kept_ids_has_its_token_and_logprob_of_the_whole_distribution():
    logits = jax.random.normal(jax.random.key(1), (128, 33))
    most = jnp.tile(jnp.array([0, 2]), 64)
    tokens, logprobs, kept = sample_kept(logits, most=most, top_p=0.7)
    plain_tokens, plain_logprobs = sample(logits, top_p=0.7)
    np.testing.assert_array_equal(tokens[::2], plain_tokens[::2])
    np.testing.assert_array_equal(logprobs[::2], plain_logprobs[::2])
    assert (kept[::2] == -1).all() and (kept[1::2, 0] >= 0).all() and (kept[:, 2] == -1).all()


def test_rounding_never_costs_a_row_that_does_not_truncate_its_tail():
    logprobs = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (4, 100_000)))
    probs = jnp.exp(-jnp.sort(-logprobs, axis=1))
    assert (jnp.cumsum(probs, axis=1) - probs > 1).any(), "the sum does exceed 1 here"
    assert sampling._kept(logprobs, draw(4)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": -1}, r"max_new_tokens must be an integer in \[0, ∞\), got -1"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer .* got 2.5"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer .* got True"),
        ({"temperature": -0.1}, r"temperature must be in \[0, ∞\), got -0.1"),
        ({"temperature": float("nan")}, "temperature must be .* got nan"),
        ({"temperature": float("inf")}, "temperature must be .* got inf"),
        ({"temperature": "hot"}, "temperature must be .* got 'hot'"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"top_k": 0}, "top_k must be an integer .* or −1 for all, got 0"),
        ({"seed": -1}, "sampling_seed must be an integer .* got -1"),
        ({"seed": 2**63}, f"sampling_seed must be an integer .* got {2**63}"),
        ({"stop_token_ids": (10,)}, r"stop_token_ids must be an integer in \[0, 9\], got 10"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids must be an integer .* got 'a'"),
        ({"stop_token_ids": (1,) * 9}, "9 stop_token_ids exceed the 8 allowed"),
        ({"never_token_ids": (10,)}, r"never_token_ids must be an integer in \[0, 9\], got 10"),
        ({"max_kept": -1}, r"max_kept must be an integer in \[0, ∞\), got -1"),
        ({"max_kept": True}, "max_kept must be an integer .* got True"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\], got 1.5"),
        ({"never_token_ids": (1,) * 5}, "5 never_token_ids exceed the 4 allowed"),
    ],
)
def test_a_setting_out_of_bounds_is_named_with_its_bound(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PARAMS, **change).check(vocab_size=10)


def test_settings_at_their_bounds_are_taken():
    edge = {"temperature": 0, "top_p": 1, "top_k": 10**12, "seed": 2**63 - 1}
    dataclasses.replace(PARAMS, **edge, stop_token_ids=(0, 9)).check(vocab_size=10)

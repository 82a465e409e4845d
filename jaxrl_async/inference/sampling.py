"""Sampling of one token per slot, and the sampling parameters of a request.

A row's token depends on that row's logits, seed and settings alone.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_async.types import MAX_STOP_TOKENS

MAX_NEVER_TOKENS = 4  # A static shape on the device, as MAX_STOP_TOKENS.
MAX_SEED = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """The parameters of one request. Temperature 0 is greedy; top_p 1 and top_k −1 truncate nothing."""

    max_new_tokens: int  # ≥ 0
    temperature: float  # ≥ 0
    top_p: float  # in (0, 1]
    top_k: int  # ≥ 1, or −1 for all
    stop_token_ids: tuple[int, ...]  # each ends the completion, and is its last token
    seed: int  # in [0, 2⁶³)
    never_token_ids: tuple[int, ...] = ()  # are not drawn, as if top-p had cut them off
    # ≥ 1: a token is drawn from this many tokens at most, which are returned, and its log-prob is of the distribution
    # over them; 0: log-probs are of the whole distribution.
    max_kept: int = 0
    min_p: float = 0.0  # with max_kept alone: cuts off what is less probable than this share of the most probable

    def check(self, *, vocab_size: int) -> None:
        """Raises ValueError with the field, its value and its bound."""
        _check_int("max_new_tokens", self.max_new_tokens, 0, None)
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be in [0, ∞), got {self.temperature!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")
        if self.top_k != -1:
            _check_int("top_k", self.top_k, 1, None, also="or −1 for all")
        _check_int("sampling_seed", self.seed, 0, MAX_SEED)
        _check_int("max_kept", self.max_kept, 0, None)
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p!r}")
        for name, tokens, most in (
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS),
            ("never_token_ids", self.never_token_ids, MAX_NEVER_TOKENS),
        ):
            if len(tokens) > most:
                raise ValueError(f"{len(tokens)} {name} exceed the {most} allowed")
            for token in tokens:
                _check_int(name, token, 0, vocab_size - 1)
        if len(set(self.never_token_ids)) == vocab_size:
            raise ValueError(f"never_token_ids are all {vocab_size} tokens of the vocabulary")


class Keep(NamedTuple):
    """The settings of each slot that `sample_kept` reads beside those of `sample`."""

    most: jax.Array  # int32 [S], max_kept; 0 where no kept ids are asked for
    min_p: jax.Array  # float32 [S]


class Draw(NamedTuple):
    """The settings of each slot, for `sample`."""

    key: jax.Array  # uint32 [S, 2]: the request's seed, as `seed_words`
    temperature: jax.Array  # float32 [S], 0 is greedy
    top_p: jax.Array  # float32 [S]
    top_k: jax.Array  # int32 [S], ≤ 0 for all
    never: jax.Array  # int32 [S, MAX_NEVER_TOKENS], padded with −1
    keep: Keep | None = None  # of an engine that returns kept ids


def seed_words(seed: int) -> np.ndarray:
    """uint32 [2]: the threefry key of a seed, both halves of it."""
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def sample(logits, position, draw: Draw):
    """Draws a token for each slot, with its log-prob.

        token   = argmax(log_softmax(logits / T) + Gumbel noise), over the tokens left by never, top-p and top-k
        logprob = log_softmax(logits / T)[token], before they truncate

    What is left out changes no log-prob, so the learner, which recomputes them from logits alone, gets the same ones.
    The noise is keyed by fold_in(seed, position), so a completion that is resumed elsewhere, with
    its tokens as prompt, continues the same stream. Temperature 0 takes the
    argmax, with log-probs at temperature 1.

    Args:
      logits: float32 [S, V].
      position: int32 [S], the absolute position in its sequence of the token to be drawn.
      draw: the slots' settings.

    Returns:
      tokens int32 [S] and logprobs float32 [S].
    """

    def drawn(truncates):
        # All within the branch: what it shared with the other would lie in memory, [S, V].
        logprobs, noise, never = _prepared(logits, position, draw)
        keep = ~never
        if truncates:
            keep &= _kept(jnp.where(never, -jnp.inf, logprobs), draw)
        tokens = jnp.argmax(jnp.where(keep, logprobs + noise, -jnp.inf), axis=1).astype(jnp.int32)
        return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=1)[:, 0]

    truncates = (draw.top_p < 1) | (draw.top_k > 0)
    branches = (functools.partial(drawn, truncates) for truncates in (True, False))
    return jax.lax.cond(truncates.any(), *branches)


def sample_kept(logits, position, draw: Draw, max_kept: int):
    """`sample`, which also returns the ids that each token was drawn from, in slots that ask for them.

        logprob = log_softmax(logits / T over the kept ids)[token]

    Kept are the tokens left by never, top-p, top-k and min-p, or the `most` most probable ones of these.

    Args:
      logits, position: as of `sample`.
      draw: the slots' settings, with `keep`.
      max_kept: M, in [1, V], the largest `most`.

    Returns:
      tokens int32 [S], logprobs float32 [S] and kept int32 [S, M], ascending and padded with −1; −1 alone in slots
      that do not ask.
    """
    asks = draw.keep.most > 0
    plain = draw._replace(
        top_p=jnp.where(asks, 1, draw.top_p), top_k=jnp.where(asks, -1, draw.top_k)
    )
    tokens, plain_logprobs = sample(logits, position, plain)
    logprobs, noise, never = _prepared(logits, position, draw)
    best, ids = jax.lax.top_k(jnp.where(never, -jnp.inf, logprobs), max_kept)
    probs = jnp.exp(best)
    keep = _left(probs, draw) & (best > -jnp.inf)
    keep &= probs >= draw.keep.min_p[:, None] * probs[:, :1]
    keep &= jnp.arange(max_kept)[None] < draw.keep.most[:, None]
    score = jnp.where(keep, best + jnp.take_along_axis(noise, ids, axis=1), -jnp.inf)
    chosen = jnp.argmax(score, axis=1)[:, None]
    total = jax.nn.logsumexp(jnp.where(keep, best, -jnp.inf), axis=1)
    token, logprob = (jnp.take_along_axis(x, chosen, axis=1)[:, 0] for x in (ids, best))
    num_ids = logits.shape[1]
    kept = jnp.sort(jnp.where(keep, ids, num_ids), axis=1)
    return (
        jnp.where(asks, token, tokens),
        jnp.where(asks, logprob - total, plain_logprobs),
        jnp.where(kept == num_ids, -1, kept),
    )


def _prepared(logits, position, draw):
    """Log-probs at the temperature, the noise to add to them, and whether a token is ruled out; [S, V] each."""
    greedy = (draw.temperature == 0)[:, None]
    logprobs = jax.nn.log_softmax(logits / jnp.where(greedy, 1, draw.temperature[:, None]))
    noise = jax.vmap(_gumbel, in_axes=(0, 0, None))(draw.key, position, logits.shape[1])
    # One comparison per column, which fuses; a scatter is a loop over slots on a TPU.
    token_ids = jnp.arange(logits.shape[1])[None]
    never = functools.reduce(jnp.logical_or, (token_ids == ids[:, None] for ids in draw.never.T))
    return logprobs, jnp.where(greedy, 0, noise), never


def _gumbel(key, position, num):
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, position), (num,))


def _kept(logprobs, draw):
    """True on the top_k most probable tokens whose predecessors together hold ≤ top_p."""
    order = jnp.argsort(-logprobs, axis=1)  # stable: of equals the lower id comes first
    keep = _left(jnp.exp(jnp.take_along_axis(logprobs, order, axis=1)), draw)
    return jnp.take_along_axis(keep, jnp.argsort(order, axis=1), axis=1)


def _left(sorted_probs, draw):
    """True on those of the most probable tokens, in their order, that top-p and top-k leave."""
    before = jnp.cumsum(sorted_probs, axis=1) - sorted_probs
    keep = (before <= draw.top_p[:, None]) | (draw.top_p == 1)[:, None]
    rank = jnp.arange(sorted_probs.shape[1])[None]
    return keep & ((rank < draw.top_k[:, None]) | (draw.top_k <= 0)[:, None])


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_int(name, value, low, high, *, also=""):
    bad = not isinstance(value, int) or isinstance(value, bool)
    if bad or value < low or (high is not None and value > high):
        bound = f"[{low}, {high}]" if high is not None else f"[{low}, ∞)"
        raise ValueError(
            f"{name} must be an integer in {bound} {also}".rstrip() + f", got {value!r}"
        )

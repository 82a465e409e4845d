"""Parity by layer: the hidden states of two computations on one checkpoint, and the first layer where they part.

The learner's forward, on packed rows, is compared with another: the engine's prefill and decode, the learner's in
another dtype or on another checkpoint, or transformers'. Both get the same tokens. Servers, runs and log-probs of
samples play no part: see `parity`.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_async.extras.parity.parity import ParityError, read_checkpoint, read_params
from jaxrl_async.inference import programs
from jaxrl_async.models import transformer
from jaxrl_async.models.state import mapped

AGAINST = ("engine", "transformers", "float32", "bfloat16")  # or a directory

_LOWEST_NORM = 1e-20  # of a hidden state; below, a difference is not divided by it


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The tokens of both computations."""

    num_sequences: int  # B ≥ 1
    prompt_tokens: int  # P ≥ 1: the engine prefills these
    completion_tokens: int  # R ≥ 1: and decodes these, one at a time
    seed: int  # of the tokens, which are drawn evenly from the vocabulary


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of one place in the model, between the learner's hidden states and the other computation's."""

    name: str  # "embedding", "layer 0" …, "final norm", "logits"
    max_abs: float  # largest |a − b| of a number; NaN where one side is not finite
    relative: float  # largest ‖a − b‖ / ‖b‖ of a token
    prompt: float  # relative, of the prompts' tokens alone
    completion: float  # relative, of the completions' tokens alone

    def exceeds(self, bound: float) -> bool:
        """Whether `relative` is beyond a bound; NaN is."""
        return not self.relative <= bound


def compare(
    directory: str | pathlib.Path, sequences: Sequences, *, dtype: str, against: str
) -> list[Difference]:
    """The differences of the hidden states after each layer, in the order of the forward pass.

    Args:
      directory: in Hugging Face layout.
      dtype: of the learner's forward, and of the engine's, "float32" | "bfloat16".
      against: a name in AGAINST, or the directory of another checkpoint of this shape. transformers computes in
        float32, on the CPU.

    Raises:
      ParityError: no checkpoint, one of another shape, transformers is not installed, or `against` is the learner's own
        dtype.
    """
    if against == dtype:
        raise ParityError(
            f"--layers={against} is the learner's own dtype: give --dtype the other one"
        )
    config, _ = read_checkpoint(directory, dtype)
    params = read_params(directory, config)
    P, rng = sequences.prompt_tokens, np.random.default_rng(sequences.seed)
    shape = (sequences.num_sequences, P + sequences.completion_tokens)
    tokens = rng.integers(0, config.vocab_size, shape).astype(np.int32)  # [B, T]
    ours = _states(config, _learner_forward, params, tokens, P)
    if against == "engine":  # It holds the weights in dtypes of its own.
        like = programs.weights_like(config)
        held = jax.tree.map(lambda x, like: x.astype(like.dtype), params, like)
        theirs = _states(config, _engine_forward, held, tokens, P)
    elif against == "transformers":
        theirs = _transformers_states(directory, tokens)
    elif against in AGAINST:
        other = dataclasses.replace(config, dtype=against)
        theirs = _states(other, _learner_forward, params, tokens, P)
    else:
        other, _ = read_checkpoint(against, dtype)
        if other != config:
            raise ParityError(f"{against} is of another shape than {directory}: {other}, {config}")
        theirs = _states(config, _learner_forward, read_params(against, config), tokens, P)
    pairs = zip(_names(config), ours, theirs, strict=True)
    return [_difference(name, a, b, P) for name, a, b in pairs]


def first_beyond(differences: Sequence[Difference], bound: float) -> Difference | None:
    """The first place whose relative difference is beyond the bound; None where there is none."""
    return next((d for d in differences if d.exceeds(bound)), None)


def table(differences: Sequence[Difference], bound: float) -> str:
    """A line for each place, the first beyond the bound marked."""
    first = first_beyond(differences, bound)
    lines = [f"{'after':12} {'max |d|':>10} {'|d| / |x|':>10} {'prompts':>10} {'completions':>12}"]
    for d in differences:
        mark = f"  <- the first beyond {bound:g}" if d is first else ""
        lines.append(
            f"{d.name:12} {d.max_abs:10.3g} {d.relative:10.3g} {d.prompt:10.3g} {d.completion:12.3g}{mark}"
        )
    return "\n".join(lines)


def _names(config) -> list[str]:
    return ["embedding", *(f"layer {i}" for i in range(config.num_layers)), "final norm", "logits"]


def _difference(name, ours, theirs, prompt_tokens) -> Difference:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    apart = np.linalg.norm(ours - theirs, axis=-1)
    relative = apart / np.maximum(np.linalg.norm(theirs, axis=-1), _LOWEST_NORM)
    return Difference(
        name=name,
        max_abs=float(np.abs(ours - theirs).max()),
        relative=float(relative.max()),
        prompt=float(relative[:, :prompt_tokens].max()),
        completion=float(relative[:, prompt_tokens:].max()),
    )


# The states of this project's decoder. The weights of the layers behind are zero: such a layer adds zero to what it
# gets. So the states are those of the programs themselves, whose scan over the layers nothing taps.


def _states(config, forward, params, tokens, prompt_tokens):
    """[L + 3] arrays of [B, T, ·]: the states of `_names`."""
    counts = range(config.num_layers + 1)
    states = [_after(config, forward, prompt_tokens, params, tokens, np.int32(n)) for n in counts]
    model = nnx.merge(transformer.graphdef(config), params)
    hidden = model.final_norm(states[-1])
    return [np.asarray(x, np.float32) for x in (*states, hidden, model.logits(hidden))]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _after(config, forward, prompt_tokens, params, tokens, num_layers):
    """[B, T, D]: the hidden states after the first layers, before the final norm."""
    kept = jnp.arange(config.num_layers) < num_layers

    def cut(path, param):
        if path[0] != "blocks":
            return param
        layers = kept.reshape(-1, *[1] * (param.ndim - 1))
        return param.replace(jnp.where(layers, param[...], 0))

    model = nnx.merge(transformer.graphdef(config), mapped(cut, params))
    model.final_norm = lambda hidden: hidden
    return forward(model, tokens, prompt_tokens)


def _learner_forward(model, tokens, _):
    """Whole rows that two sequences share, with a column of padding behind them, as packing makes them."""
    B, T = tokens.shape
    rows = jnp.pad(tokens, ((0, B % 2), (0, 0))).reshape(-1, 2 * T)
    rows = jnp.pad(rows, ((0, 0), (0, 1)))
    positions = np.append(np.tile(np.arange(T), 2), 0).astype(np.int32)
    segments = np.append(np.repeat([1, 2], T), 0).astype(np.int32)
    positions, segments = (np.broadcast_to(ids, rows.shape) for ids in (positions, segments))
    hidden = model(rows, positions, (segments,))
    return hidden[:, :-1].reshape(-1, T, hidden.shape[-1])[:B]


def _engine_forward(model, tokens, prompt_tokens):
    """Each prompt alone, padded to its bucket, then one token at a time of all sequences against the cache."""
    (B, T), P = tokens.shape, prompt_tokens
    shapes = programs.Shapes(model.config, num_slots=B, max_total_tokens=T, decode_chunk=1)
    bucket = next(bucket for bucket in shapes.buckets if bucket >= P)
    positions = np.arange(bucket, dtype=np.int32)[None]
    segments = (positions < P).astype(np.int32)

    def prefill(row):
        hidden, new = model.prefill(row[None], positions, (segments,))
        return hidden[0, :P], jax.tree.map(lambda x: x[:, 0], new)

    def in_slots(keys):  # [B, L, N, bucket, C] → [L, B, N, T, C]
        B, L, N, _, C = keys.shape
        empty = jnp.zeros((L, B, N, T, C), keys.dtype)
        return jax.lax.dynamic_update_slice(empty, keys.swapaxes(0, 1), (0,) * 5)

    def decode(cache, step):
        column, at = step
        hidden, cache = model.decode(column, jnp.full(B, at), cache)
        return cache, hidden

    prompts, new = jax.lax.map(prefill, jnp.pad(tokens[:, :P], ((0, 0), (0, bucket - P))))
    steps = (tokens[:, P:].T, np.arange(P, T, dtype=np.int32))
    _, decoded = jax.lax.scan(decode, jax.tree.map(in_slots, new), steps)
    return jnp.concatenate([prompts, decoded.swapaxes(0, 1)], axis=1)


def _transformers_states(directory, tokens):
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ParityError(
            f"--layers=transformers needs the packages torch and transformers: {error}"
        ) from error
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    behind_last = []  # hidden_states has the last layer's output behind the final norm alone
    model.model.layers[-1].register_forward_hook(
        lambda _, __, output: behind_last.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        found = model(torch.from_numpy(tokens.astype(np.int64)), output_hidden_states=True)
    *states, normed = found.hidden_states
    return [state.numpy() for state in (*states, *behind_last, normed, found.logits)]

"""The engine's programs on the device, all but `score` compiled before the first request.

Such a program is compiled ahead of time from shapes alone, so a call of another shape is an error and never a
compilation. `Shapes` says which programs there are, `Programs` compiles them for this process. They see arrays, not
requests or versions.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_async.inference import sampling
from jaxrl_async.models import attention, experts, gpu_decode, transformer

_MIN_BUCKET = 16
MAX_TOP = 20  # of the most probable tokens
_SCORED_TOGETHER = 32  # tokens whose logits are in memory at a time
_MAX_PREFILL_TOKENS = 8192  # of one dispatch, padding included: the longest wait of a pause


class Slots(NamedTuple):
    """The state of each of the S slots, for `Programs.decode`."""

    tokens: jax.Array  # int32 [S], the last token so far: the next one to decode
    positions: jax.Array  # int32 [S], its absolute position
    limits: jax.Array  # int32 [S], sequence length (prompt + completion) at which to end
    active: jax.Array  # bool [S]
    stop_tokens: jax.Array  # int32 [S, MAX_STOP_TOKENS], padded with −1
    draw: sampling.Draw


class Decoded(NamedTuple):
    """The tokens of a chunk of K decode steps. Steps k < counts[s] of slot s hold its tokens."""

    tokens: jax.Array  # int32 [K, S]
    logprobs: jax.Array  # float32 [K, S]
    counts: jax.Array  # int32 [S], new tokens of each slot, ≤ K
    active: jax.Array  # bool [S], False where a slot stopped or reached its limit
    kept: jax.Array | None = None  # int32 [K, S, M], of an engine that returns kept ids


class Prompts(NamedTuple):
    """Up to R distinct token rows of one bucket, and the slots that each goes to."""

    tokens: np.ndarray  # int32 [R, bucket]
    lengths: np.ndarray  # int32 [R]
    slots: np.ndarray  # int32 [S]: row r goes to slots[offsets[r]:offsets[r + 1]]
    offsets: np.ndarray  # int32 [R + 1]
    num_rows: np.ndarray  # int32 [], rows in use


class Scores(NamedTuple):
    """Log-probs of the tokens after the first of a row, and the K most probable ones in the place of each."""

    logprobs: np.ndarray  # float32 [T − 1]
    top_ids: np.ndarray  # int32 [T − 1, K], K = min(MAX_TOP, V), the most probable first
    top_logprobs: np.ndarray  # float32 [T − 1, K]


class Shapes:
    """The programs of one model at one shape, and what they take. Nothing is compiled, and no device is needed."""

    def __init__(
        self,
        config: transformer.ModelConfig,
        *,
        num_slots: int,
        max_total_tokens: int,
        decode_chunk: int,
        max_kept: int = 0,
        device: jax.Device | None = None,
    ):
        """Args: those of the engine; the device to compile for, which need not exist, None for this process's."""
        self.max_kept = min(max_kept, config.vocab_size)  # M
        self.config, self._num_slots, self._decode_chunk = config, num_slots, decode_chunk
        self._max_total_tokens = max_total_tokens
        self.device = device
        self._device = device or jax.devices()[0]
        self.params = weights_like(config, device)
        self.layers = None  # of the parameters, apart, for `decode` on a GPU: a slice of an array is a copy there
        shape = num_slots, config.num_kv_heads, max_total_tokens, config.head_dim
        keys = jax.ShapeDtypeStruct((config.num_layers, *shape), jnp.dtype(config.dtype))
        if self._device.platform == "gpu":
            keys = config.num_layers * (jax.ShapeDtypeStruct(shape, keys.dtype),)
            self.layers = jax.eval_shape(transformer.layers_apart, self.params["blocks"])
        self.cache = transformer.KVCache(keys, keys, self._routes(max_total_tokens))
        self.buckets = tuple(_buckets(max_total_tokens))

    def _routes(self, max_total_tokens):
        """Of the experts of each cached token, as keys lie; None without experts."""
        c = self.config
        if not c.num_experts:
            return None
        shape = self._num_slots, max_total_tokens, c.experts_per_token
        dtype = experts.route_dtype(c.num_experts)
        if self._device.platform == "gpu":
            return c.num_layers * (jax.ShapeDtypeStruct(shape, dtype),)
        return jax.ShapeDtypeStruct((c.num_layers, *shape), dtype)

    def trace_decode(self) -> jax.stages.Traced:
        """`Programs.decode`."""
        c = self.config
        by_kernel = gpu_decode.takes(self._device, c, self._max_total_tokens)
        attend = gpu_decode.attend if by_kernel else None
        static = transformer.graphdef(c), self._decode_chunk, self.max_kept, attend
        decode = functools.partial(_decode, *static)
        weights = self.params, self.layers
        return self._trace(decode, weights, self.cache, empty_slots(self._num_slots, self.max_kept))

    def trace_apart(self) -> jax.stages.Traced:
        """`transformer.layers_apart`."""
        return self._trace(transformer.layers_apart, self.params["blocks"])

    def trace_prefill(self, bucket: int) -> jax.stages.Traced:
        """The program of `Programs.prefill` for one of the buckets."""
        c = self.config
        kernel = attention.choose("auto", self._device, bucket, c.dtype, c.windows, c.head_dim)
        prefill = functools.partial(_prefill, transformer.graphdef(c), kernel)
        return self._trace(prefill, self.params, self.cache, self.empty_prompts(bucket))

    def max_rows(self, bucket: int) -> int:
        """Distinct rows that one prefill of this bucket takes."""
        return max(1, min(self._num_slots, _MAX_PREFILL_TOKENS // bucket))

    def empty_prompts(self, bucket: int) -> Prompts:
        """A prefill of no row, as NumPy arrays to fill in."""
        num_rows = self.max_rows(bucket)
        return Prompts(
            tokens=np.zeros((num_rows, bucket), np.int32),
            lengths=np.zeros(num_rows, np.int32),
            slots=np.zeros(self._num_slots, np.int32),
            offsets=np.zeros(num_rows + 1, np.int32),
            num_rows=np.zeros((), np.int32),
        )

    def _trace(self, function, *arguments):
        sharding = self.device and jax.sharding.SingleDeviceSharding(self.device)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
        donated = 1 if len(arguments) > 1 else ()
        return jax.jit(function, donate_argnums=donated).trace(*abstract)


class Programs:
    """The compiled programs of one model at one shape: `decode`, and `prefill` for each bucket."""

    def __init__(self, shapes: Shapes):
        """Compiles them for the device of the shapes."""
        self._shapes = shapes
        self.decode = shapes.trace_decode().lower().compile()
        self._prefill = {
            bucket: shapes.trace_prefill(bucket).lower().compile() for bucket in shapes.buckets
        }
        self._apart = shapes.layers and shapes.trace_apart().lower().compile()
        self._routes = jax.jit(_routes_of_slot)
        if shapes.config.num_experts:
            self._routes = self._routes.trace(shapes.cache.routes, np.int32(0)).lower().compile()
        self._score = jax.jit(functools.partial(_score, transformer.graphdef(shapes.config)))

    @property
    def count(self) -> int:
        """Programs compiled before the first request."""
        return (
            1
            + len(self._prefill)
            + sum(x is not None for x in (self._shapes.cache.routes, self._apart))
        )

    def for_decode(self, params):
        """What `decode` takes of the weights: them, and on a GPU a copy of each of their layers."""
        return params, self._apart and self._apart(params["blocks"])

    def empty_cache(self) -> transformer.KVCache:
        """Zeros. The programs take the cache by donation and return the new one."""
        return jax.tree.map(
            lambda keys: jax.device_put(np.zeros(keys.shape, keys.dtype), self._shapes.device),
            self._shapes.cache,
        )

    def bucket(self, num_tokens: int) -> int:
        """The padded length at which this many tokens (≥ 1) are prefilled."""
        return next(bucket for bucket in self._prefill if bucket >= num_tokens)

    def max_rows(self, bucket: int) -> int:
        """Distinct rows that one prefill of this bucket takes."""
        return self._shapes.max_rows(bucket)

    def prefill(self, params, cache, rows, slots):
        """Fills the cache with each row's keys and values.

        Every row is computed alone, padded to the bucket of its own length, so its numbers do not
        depend on the other rows.

        Args:
          params: nnx.State.
          cache: of `empty_cache`, donated.
          rows: int32 arrays of 1 to max_rows tokens' rows, all of one bucket.
          slots: for each row, the slots that receive it.

        Returns:
          the cache.
        """
        bucket = self.bucket(len(rows[0]))
        prompts = self._shapes.empty_prompts(bucket)
        for i, row in enumerate(rows):
            prompts.tokens[i, : len(row)] = row
            prompts.lengths[i] = len(row)
        prompts.offsets[1 : len(rows) + 1] = np.cumsum([len(s) for s in slots])
        prompts.slots[: prompts.offsets[len(rows)]] = np.concatenate(slots)
        prompts.num_rows[...] = len(rows)
        return self._prefill[bucket](params, cache, prompts)

    def routes(self, cache, slot: int) -> np.ndarray | None:
        """The routes of a slot's tokens, of `experts.route_dtype` [max_total_tokens, L, K]; None without experts."""
        if cache.routes is None:
            return None
        return np.asarray(jax.device_get(self._routes(cache.routes, np.int32(slot))))

    def score(self, params, tokens: np.ndarray, temperature: float) -> Scores:
        """Log-probs of the tokens int32 [T] of a row, each after those before it, by one forward pass.

            logprobs[t − 1] = log_softmax(logits(tokens[:t]) / temperature)[tokens[t]]

        The first row of a bucket compiles its program.
        """
        row = np.zeros(self.bucket(len(tokens)), np.int32)
        row[: len(tokens)] = tokens
        scores = self._score(params, row, np.int32(len(tokens)), np.float32(temperature))
        return Scores(*(array[: len(tokens) - 1] for array in jax.device_get(scores)))


def weights_like(config: transformer.ModelConfig, device: jax.Device | None = None) -> nnx.State:
    """Shapes and dtypes of the weights on a device, None for this process's: an nnx.State of jax.ShapeDtypeStruct.

    They are in the compute dtype, to which a forward pass casts all of them but the scales of norms. On a CPU they stay
    float32: its compiler does not round what is cast to bfloat16 and back, in the learner's programs as in these.
    """
    platform = jax.default_backend() if device is None else device.platform

    def on_device(path, param):
        kept = platform == "cpu" or path[-1] in transformer.IN_FLOAT32 or param.dtype != jnp.float32
        dtype = param.dtype if kept else jnp.dtype(config.dtype)
        return param.replace(jax.ShapeDtypeStruct(param.shape, dtype))

    return nnx.map_state(on_device, transformer.abstract_params(config))


def empty_slots(num_slots: int, max_kept: int = 0) -> Slots:
    """S free slots, as NumPy arrays for the engine to fill in."""
    keep = sampling.Keep(np.zeros(num_slots, np.int32), np.zeros(num_slots, np.float32))
    return Slots(
        tokens=np.zeros(num_slots, np.int32),
        positions=np.zeros(num_slots, np.int32),
        limits=np.zeros(num_slots, np.int32),
        active=np.zeros(num_slots, bool),
        stop_tokens=np.full((num_slots, sampling.MAX_STOP_TOKENS), -1, np.int32),
        draw=sampling.Draw(
            key=np.zeros((num_slots, 2), np.uint32),
            temperature=np.ones(num_slots, np.float32),
            top_p=np.ones(num_slots, np.float32),
            top_k=np.full(num_slots, -1, np.int32),
            never=np.full((num_slots, sampling.MAX_NEVER_TOKENS), -1, np.int32),
            keep=keep if max_kept else None,
        ),
    )


def _decode(graphdef, num_steps, max_kept, attend, weights, cache, slots):
    """Up to num_steps tokens for every active slot; ends early when none is active."""
    params, layers = weights
    model = nnx.merge(graphdef, params)
    num_slots = slots.tokens.shape[0]
    decoded = Decoded(
        tokens=jnp.zeros((num_steps, num_slots), jnp.int32),
        logprobs=jnp.zeros((num_steps, num_slots), jnp.float32),
        counts=jnp.zeros(num_slots, jnp.int32),
        active=slots.active,
        kept=jnp.full((num_steps, num_slots, max_kept), -1, jnp.int32) if max_kept else None,
    )

    def unfinished(carry):
        step, _, _, decoded = carry
        return (step < num_steps) & decoded.active.any()

    def one_step(carry):
        step, tokens, cache, decoded = carry
        positions = slots.positions + decoded.counts
        hidden, cache = model.decode(tokens, positions, cache, layers, decoded.active, attend)
        drawn = model.logits(hidden), positions + 1, slots.draw
        if max_kept:
            new, logprobs, kept = sampling.sample_kept(*drawn, max_kept)
        else:
            new, logprobs = sampling.sample(*drawn)
        active = decoded.active
        counts = decoded.counts + active
        stopped = (new[:, None] == slots.stop_tokens).any(axis=1)
        full = slots.positions + 1 + counts >= slots.limits
        decoded = Decoded(
            tokens=decoded.tokens.at[step].set(new),
            logprobs=decoded.logprobs.at[step].set(logprobs),
            counts=counts,
            active=active & ~stopped & ~full,
            kept=decoded.kept.at[step].set(kept) if max_kept else None,
        )
        return step + 1, jnp.where(active, new, tokens), cache, decoded

    carry = (jnp.int32(0), slots.tokens, cache, decoded)
    _, _, cache, decoded = jax.lax.while_loop(unfinished, one_step, carry)
    return cache, decoded


def _prefill(graphdef, kernel, params, cache, prompts):
    """Runs each row in use alone, and writes its keys and values into its slots."""
    model = nnx.merge(graphdef, params)
    positions = jnp.arange(prompts.tokens.shape[1])[None]

    def one_row(row, cache):
        segments = (positions < prompts.lengths[row]).astype(jnp.int32)
        rows = attention.of_rows(kernel, segments)
        given = experts.Given(segments > 0, segments)
        _, new = model.prefill(prompts.tokens[row][None], positions, *rows, given)
        if isinstance(cache.k, tuple):
            new = new.apart()

        def one_slot(i, cache):
            start = (prompts.slots[i],) if isinstance(cache.k, tuple) else (0, prompts.slots[i])
            return jax.tree.map(
                lambda c, n: jax.lax.dynamic_update_slice(
                    c, n, start + (0,) * (c.ndim - len(start))
                ),
                cache,
                new,
            )

        return jax.lax.fori_loop(prompts.offsets[row], prompts.offsets[row + 1], one_slot, cache)

    return jax.lax.fori_loop(0, prompts.num_rows, one_row, cache)


def _score(graphdef, params, tokens, length, temperature):
    model = nnx.merge(graphdef, params)
    positions = jnp.arange(tokens.shape[0])[None]
    segments = (positions < length).astype(jnp.int32)
    given = experts.Given(segments > 0, segments)
    hidden, _ = model.prefill(tokens[None], positions, (segments,), given=given)

    def one_token(at):
        hidden, token = at
        logprobs = jax.nn.log_softmax(model.logits(hidden) / temperature)
        top_logprobs, top_ids = jax.lax.top_k(logprobs, min(MAX_TOP, logprobs.shape[0]))
        return Scores(logprobs[token], top_ids, top_logprobs)

    return jax.lax.map(one_token, (hidden[0, :-1], tokens[1:]), batch_size=_SCORED_TOGETHER)


def _routes_of_slot(routes, slot):
    """[S, L, K]"""
    apart = isinstance(routes, tuple)
    of_layers = jnp.stack([layer[slot] for layer in routes]) if apart else routes[:, slot]
    return of_layers.swapaxes(0, 1)


def _buckets(max_total_tokens):
    """Powers of two, the last cut to the longest sequence."""
    bucket = _MIN_BUCKET
    while bucket < max_total_tokens:
        yield bucket
        bucket *= 2
    yield max_total_tokens

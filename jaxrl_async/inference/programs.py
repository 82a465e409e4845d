"""The engine's programs on the device, all but `score` compiled before the first request.

Such a program is compiled ahead of time from shapes alone, so a call of another shape is an error and never a
compilation. `Shapes` says which programs there are, `Programs` compiles them for this process. They see arrays, not
requests or versions.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_async.inference import sampling
from jaxrl_async.models import attention, experts, gpu_decode, tpu_decode, transformer
from jaxrl_async.models.state import mapped

_MIN_BUCKET = 16
# Tokens of a row that a prefill computes at a time, where it goes on from those before: on an accelerator enough of
# them to be worth the weights that are read for them.
_CPU_BLOCK_TOKENS, _BLOCK_TOKENS = 64, 1024
MAX_TOP = 20  # of the most probable tokens
_SCORED_TOGETHER = 32  # tokens whose logits are in memory at a time
MAX_PREFILL_TOKENS = 8192  # of one dispatch, padding included: the longest wait of a pause


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
    """Up to R blocks of tokens, of one width, to be computed one after the other."""

    tokens: np.ndarray  # int32 [R, width]
    lengths: np.ndarray  # int32 [R]
    starts: np.ndarray  # int32 [R], positions of the first tokens; the slot holds those before
    slots: np.ndarray  # int32 [R]
    num_rows: np.ndarray  # int32 [], in use


class Fill(NamedTuple):
    """A row of tokens for a slot, and the slot that holds its first ones."""

    slot: int
    row: np.ndarray  # int32 [P]
    num_held: int  # ≤ P
    source: int | None  # None: nothing is held


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
        self.config, self.num_slots, self._decode_chunk = config, num_slots, decode_chunk
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
        self.block = self._block()
        # Of prefills, whether they go on from earlier blocks, and their widths. The last block of the longest row has a
        # width of its own: a write that passes the cache's end would be moved.
        rest, last = max_total_tokens - self.block, max_total_tokens % self.block
        later = {width for width in (*_buckets(self.block), last) if 0 < width <= rest}
        self.prefills = [(False, width) for width in _buckets(self.block)]
        self.prefills += [(True, width) for width in sorted(later)]

    def _block(self) -> int:
        """Tokens that a prefill computes at a time; the longest row where no kernel of the device goes on in it."""
        total = self._max_total_tokens
        if self._device.platform == "cpu":
            return min(total, _CPU_BLOCK_TOKENS)
        block = math.gcd(total, _BLOCK_TOKENS)
        goes_on = self._kernel(block, continues=True) in attention.IN_PASSES
        return block if goes_on and block >= _BLOCK_TOKENS // 2 else total

    def _kernel(self, width: int, *, continues: bool) -> str:
        c = self.config
        kernel = attention.choose("auto", self._device, width, c.dtype, c.windows, c.head_dim)
        if continues and kernel == "splash" and self._max_total_tokens % width:
            return "xla"
        return kernel

    def _routes(self, max_total_tokens):
        """Of the experts of each cached token, as keys lie; None without experts."""
        c = self.config
        if not c.num_experts:
            return None
        shape = self.num_slots, max_total_tokens, c.experts_per_token
        dtype = experts.route_dtype(c.num_experts)
        if self._device.platform == "gpu":
            return c.num_layers * (jax.ShapeDtypeStruct(shape, dtype),)
        return jax.ShapeDtypeStruct((c.num_layers, *shape), dtype)

    def trace_decode(self) -> jax.stages.Traced:
        """`Programs.decode`."""
        c = self.config
        kernels = (
            kernel.attend
            for kernel in (gpu_decode, tpu_decode)
            if kernel.takes(self._device, c, self._max_total_tokens)
        )
        attend = next(kernels, None)
        static = transformer.graphdef(c), self._decode_chunk, self.max_kept, attend
        decode = functools.partial(_decode, *static)
        weights = self.params, self.layers
        return self._trace(decode, weights, self.cache, empty_slots(self.num_slots, self.max_kept))

    def trace_apart(self) -> jax.stages.Traced:
        """`transformer.layers_apart`."""
        return self._trace(transformer.layers_apart, self.params["blocks"])

    def trace_copy(self) -> jax.stages.Traced:
        """The program that copies slots to others."""
        pairs = np.zeros((self.num_slots, 2), np.int32)
        return self._trace(_copy, self.cache, pairs, np.int32(0), donated=0)

    def trace_prefill(self, width: int, continues: bool = False) -> jax.stages.Traced:
        """The program of `Programs.prefill` for blocks of a width, which begin their rows or go on from others."""
        kernel = self._kernel(width, continues=continues)
        prefill = functools.partial(_prefill, transformer.graphdef(self.config), kernel, continues)
        return self._trace(prefill, self.params, self.cache, self.empty_prompts(width))

    def max_rows(self, width: int) -> int:
        """Blocks that one prefill of this width takes."""
        return max(1, min(self.num_slots, MAX_PREFILL_TOKENS // width))

    def empty_prompts(self, width: int) -> Prompts:
        """A prefill of no block, as NumPy arrays to fill in."""
        num_rows = self.max_rows(width)
        of_row = (np.zeros(num_rows, np.int32) for _ in range(3))
        return Prompts(np.zeros((num_rows, width), np.int32), *of_row, np.zeros((), np.int32))

    def _trace(self, function, *arguments, donated=1):
        sharding = self.device and jax.sharding.SingleDeviceSharding(self.device)
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
        )
        donated = donated if len(arguments) > 1 else ()
        return jax.jit(function, donate_argnums=donated).trace(*abstract)


class Programs:
    """The compiled programs of one model at one shape: `decode`, a copy of slots, and `prefill` for each width."""

    def __init__(self, shapes: Shapes):
        """Compiles them for the device of the shapes."""
        self._shapes = shapes
        self.decode = shapes.trace_decode().lower().compile()
        self._prefill = {
            (continues, width): shapes.trace_prefill(width, continues).lower().compile()
            for continues, width in shapes.prefills
        }
        self._copy = shapes.trace_copy().lower().compile()
        self._apart = shapes.layers and shapes.trace_apart().lower().compile()
        self._routes = jax.jit(_routes_of_slot)
        if shapes.config.num_experts:
            self._routes = self._routes.trace(shapes.cache.routes, np.int32(0)).lower().compile()
        self._score = jax.jit(functools.partial(_score, transformer.graphdef(shapes.config)))

    @property
    def count(self) -> int:
        """Programs compiled before the first request."""
        return (
            2
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

    @property
    def block(self) -> int:
        """Tokens that a prefill computes at a time."""
        return self._shapes.block

    def prefill(self, params, cache, fills: Sequence[Fill]):
        """Gives slots the keys and values of their rows, one after the other; a later fill may go on from an earlier.

        A block's numbers depend on its row up to it alone: not on other rows, nor on what was held of its own.

        Args:
          params: nnx.State.
          cache: of `empty_cache`, donated.
          fills: of distinct slots.

        Returns:
          the cache.
        """
        before, blocks, after, pending = [], [], [], set()
        for slot, row, num_held, source in fills:
            if source in pending and num_held == len(row):
                after.append((source, slot))
                pending.add(slot)
                continue
            if source in pending:
                cache = self._run(params, cache, before, blocks, after)
                before, blocks, after, pending = [], [], [], set()
            if source not in (None, slot):
                before.append((source, slot))
            for start in range(num_held, len(row), self.block):
                blocks.append((slot, start, row[start : start + self.block]))
                pending.add(slot)
        return self._run(params, cache, before, blocks, after)

    def _run(self, params, cache, before, blocks, after):
        """Copies slots, computes blocks, and copies what was computed."""
        cache = self._copied(cache, before)
        by_program = {key: [] for key in self._prefill}
        for block in blocks:
            by_program[self._program(*block[1:])].append(block)
        # A row's blocks follow one another: only its last one is narrower.
        for continues, width in sorted(by_program, key=lambda key: (key[0], -key[1])):
            of_program, most = by_program[continues, width], self._shapes.max_rows(width)
            for first in range(0, len(of_program), most):
                some = of_program[first : first + most]
                prompts = self._shapes.empty_prompts(width)
                for i, (slot, start, tokens) in enumerate(some):
                    prompts.tokens[i, : len(tokens)] = tokens
                    prompts.lengths[i] = len(tokens)
                    prompts.starts[i], prompts.slots[i] = start, slot
                prompts.num_rows[...] = len(some)
                cache = self._prefill[continues, width](params, cache, prompts)
        return self._copied(cache, after)

    def _program(self, start, tokens):
        room = self._shapes.buckets[-1] - start
        of_kind = (key for key in self._prefill if key[0] == (start > 0))
        return next(key for key in of_kind if len(tokens) <= key[1] <= room)

    def _copied(self, cache, pairs):
        """Copies slots to others, given as (from, to)."""
        if not pairs:
            return cache
        padded = np.zeros((self._shapes.num_slots, 2), np.int32)
        padded[: len(pairs)] = pairs
        return self._copy(cache, padded, np.int32(len(pairs)))

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
        row = np.zeros(next(b for b in self._shapes.buckets if b >= len(tokens)), np.int32)
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

    return mapped(on_device, transformer.abstract_params(config))


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
    num_slots, num_tokens = slots.tokens.shape[0], jax.tree.leaves(cache.k)[0].shape[-2]
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
        if attend:
            # Outside the cache, where a kernel reads nothing.
            positions = jnp.where(decoded.active, positions, num_tokens)
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


def _prefill(graphdef, kernel, continues, params, cache, prompts):
    """Computes each block in use alone, and writes its keys and values into its slot."""
    model = nnx.merge(graphdef, params)
    index = jnp.arange(prompts.tokens.shape[1])[None]
    axis = _slot_axis(cache)

    def one_row(row, cache):
        slot, start = prompts.slots[row], prompts.starts[row]
        segments = (index < prompts.lengths[row]).astype(jnp.int32)
        given = experts.Given(segments > 0, segments)
        ids, attend, held = *attention.of_rows(kernel, segments), None
        if continues:
            held = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1, axis), cache)
            held = held.together()
            attend = functools.partial(attention.continued_attention, kernel, start)
        _, new = model.prefill(prompts.tokens[row][None], index + start, ids, attend, given, held)
        if axis == 0:
            new = new.apart()

        def written(cache, new):
            at = [0] * cache.ndim
            at[-2], at[axis] = start, slot
            return jax.lax.dynamic_update_slice(cache, new, at)

        return jax.tree.map(written, cache, new)

    return jax.lax.fori_loop(0, prompts.num_rows, one_row, cache)


def _slot_axis(cache):
    """Of each array: on a GPU the layers lie apart."""
    return 0 if isinstance(cache.k, tuple) else 1


def _copy(cache, pairs, count):
    """Copies slots to others, [from, to], one after the other."""
    axis = _slot_axis(cache)

    def one(i, cache):
        def copied(x):
            held = jax.lax.dynamic_slice_in_dim(x, pairs[i, 0], 1, axis)
            return jax.lax.dynamic_update_slice_in_dim(x, held, pairs[i, 1], axis)

        return jax.tree.map(copied, cache)

    return jax.lax.fori_loop(0, count, one, cache)


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

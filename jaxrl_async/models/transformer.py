"""One decoder for Qwen2, Qwen2.5, Qwen3, Llama, Mistral, Gemma 3, Qwen3-MoE and Mixtral. `families` has their tables.

Parameters are float32, but for a frozen base in bfloat16; the compute dtype is a setting; norms, softmax and logits are
float32. Independent of tokenizers, losses and the batching of requests; of a mesh it uses the names of the axes.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl_async.models import attention, axes, experts
from jaxrl_async.models import lora as adapters
from jaxrl_async.models.families import FAMILIES
from jaxrl_async.models.state import mapped

# The last part of the path of parameters that are not cast to compute.
IN_FLOAT32 = ("scale", "router_kernel")
PROJECTED = "projected"  # what attention is computed from, and its output's projection, of a layer


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama-3's stretching of RoPE's long wavelengths (config.json: rope_type "llama3")."""

    factor: float  # stretches long wavelengths
    low_freq_factor: float  # wavelengths > original_max_tokens / this are stretched in full
    high_freq_factor: float  # wavelengths < original_max_tokens / this are kept
    original_max_tokens: int  # context length before stretching


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """All of RoPE's wavelengths times a factor (config.json: rope_type "linear")."""

    factor: float


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN: pairs that turn seldom are stretched, those that turn often kept (config.json: rope_type "yarn").

    Source: YaRN (Peng et al., arXiv 2309.00071).
    """

    factor: float  # stretches long wavelengths
    original_max_tokens: int  # context length before stretching
    beta_fast: float  # turns in original_max_tokens from which a pair is kept
    beta_slow: float  # turns up to which it is stretched in full
    attention_factor: float  # of cosines and sines
    truncate: bool  # the two bounds are whole pairs


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of one decoder. Hashable, so that it can be a static argument of a jit."""

    vocab_size: int  # V
    num_layers: int  # L
    model_dim: int  # D
    num_heads: int  # H, a multiple of N
    num_kv_heads: int  # N
    head_dim: int  # C, even
    mlp_dim: int  # F
    rope_theta: float
    rope_scaling: RopeScaling | LinearScaling | YarnScaling | None
    norm_eps: float
    qk_norm: bool  # RMSNorm over each head of q and k before RoPE (Qwen3)
    attention_bias: bool  # biases on q, k and v (Qwen2)
    tied_embeddings: bool  # logits use the embedding table
    dtype: str  # compute dtype: "float32" | "bfloat16"
    # Recompute each layer in the backward pass: "full" (True), or without PROJECTED: "attention".
    remat: bool | str
    family: str = "llama"  # a name in families.FAMILIES
    # of each layer: how many tokens one sees, itself included, 0 for all; (): no layer has a window
    windows: tuple[int, ...] = ()
    local_rope_theta: float = 10_000.0  # of gemma3's layers with a window, whose RoPE is not scaled
    query_scalar: float = 0.0  # scores are q · k / √query_scalar; 0: head_dim
    num_experts: int = 0  # E of each layer, in the place of its MLP; 0: none
    experts_per_token: int = 0  # K of them
    expert_mlp_dim: int = 0  # F of one
    norm_topk: bool = True  # the weights of a token's experts add up to 1
    # layers with an MLP of mlp_dim among those with experts; as all are stacked, they hold idle experts
    dense_layers: tuple[int, ...] = ()
    lora: adapters.LoRA | None = None  # adapters, which alone are trained; None: all parameters are
    # Gradients of matrices are summed by `axes.ring_sum`, where devices divide them.
    ring_sums: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype must be 'float32' or 'bfloat16', got {self.dtype!r}")
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {list(FAMILIES)}, got {self.family!r}")
        if w := self.windows:
            if len(w) != self.num_layers or min(w) < 0 or not any(w):
                raise ValueError(
                    f"windows must be () or have an integer ≥ 0 for each of {self.num_layers} layers, not all 0, "
                    f"got {w}"
                )
        has_experts = "blocks.experts.router_kernel" in FAMILIES[self.family].tensors
        if bool(self.num_experts) != has_experts:
            raise ValueError(
                f"num_experts must be {'≥ 1' if has_experts else '0'} in family {self.family!r}, got {self.num_experts}"
            )
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts <= 65_535:
            raise ValueError(
                f"experts_per_token must be in [1, num_experts], got {self.experts_per_token} of {self.num_experts}"
            )
        dense = self.dense_layers
        if dense and not (self.family == "qwen3_moe" and {*dense} < {*range(self.num_layers)}):
            raise ValueError(
                f"dense_layers must be () or some of {self.num_layers} layers of qwen3_moe, got {dense}"
            )
        mlps = {"gate_proj", "up_proj", "down_proj"}
        if self.num_experts and self.lora and (odd := mlps & {*self.lora.targets}):
            raise ValueError(f"adapters of experts are unsupported: lora.targets has {sorted(odd)}")

    def divided_by_rings(self, kernel: jax.Array) -> bool:
        """Whether `axes.ring_sum` sums the gradient of a kernel."""
        return self.ring_sums and axes.size(kernel, *axes.SHARDS) > 1

    @property
    def expert_layers(self) -> list[int]:
        """The layers with experts."""
        return [
            i for i in range(self.num_layers) if self.num_experts and i not in self.dense_layers
        ]


class KVCache(NamedTuple):
    """Keys (after RoPE) and values of every layer, in the compute dtype.

    Layers lie in one array, or apart: on a GPU a slice of an array is a copy, in every step.
    """

    k: jax.Array | tuple[jax.Array, ...]  # [L, B, N, S, C], or L × [B, N, S, C]
    v: jax.Array | tuple[jax.Array, ...]
    # of the router's own choice, as `experts.Routing.routes`: [L, B, S, K], or L × [B, S, K]; None without experts
    routes: jax.Array | tuple[jax.Array, ...] | None = None

    def apart(self) -> "KVCache":
        """The same arrays, their layers apart."""
        return KVCache(*(array if array is None else tuple(array) for array in self))

    def together(self) -> "KVCache":
        """The same arrays, their layers in one."""
        arrays = (jnp.stack(x) if isinstance(x, tuple) else x for x in self)
        return KVCache(*arrays)


class Transformer(nnx.Module):
    """A causal decoder. Its layers are stacked on a leading axis and scanned."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        V, D, L = config.vocab_size, config.model_dim, config.num_layers
        self.config = config
        self.embedding = nnx.Param(0.02 * jax.random.normal(rngs.params(), (V, D), jnp.float32))
        self.blocks = nnx.vmap(lambda rngs: Block(config, rngs=rngs))(rngs.split(L))
        self.final_norm = _norm(D, config)
        if not config.tied_embeddings:
            self.head = _linear(D, V, config, rngs)

    def __call__(
        self, tokens_BT, positions_BT, ids, attend=attention.causal_attention, trained=None
    ):
        """The hidden states of `routed`, which takes the same arguments."""
        return self.routed(tokens_BT, positions_BT, ids, attend, trained)[0]

    def routed(
        self,
        tokens_BT,
        positions_BT,
        ids,
        attend=attention.causal_attention,
        trained=None,
        given: experts.Given | None = None,
    ):
        """Hidden states of whole rows, and what the routers did.

        Args:
          tokens_BT: int32 [B, T].
          positions_BT: int32 [B, T], from 0 within each segment.
          ids: (segment_ids,) or (segment_ids, prefix_ids), int32 [B, T] each, as in `attention.causal_mask`.
          attend: (q, k, v, ids) → attended, from `attention.of_rows`.
          trained: (first, end), layers: the others get no gradient, and a backward pass keeps nothing of those before
            the first, as long as the embedding has none either. None: all layers.
          given: of a model with experts, its tokens and, perhaps, their experts; None: all count.

        Returns:
          [B, T, D] in the compute dtype, after the final norm, and `experts.Routing` [L, …] of the layers with
          experts, None without.
        """
        graphdef, blocks = nnx.split(self.blocks)
        of_layer = self._layers(positions_BT, ids)
        given = self._given(tokens_BT, given)
        layers = (blocks, self._windows(), given and given.of_layers)

        def layer(x_BTD, own):
            block, window, of_experts = own
            block = mapped(self._gathered, block)
            of_tokens = given and given._replace(**of_experts)
            x_BTD, _, routing = nnx.merge(graphdef, block)(
                x_BTD, *of_layer(window), attend, of_tokens
            )
            return x_BTD, routing

        constant = jax.lax.stop_gradient(layers)

        def constant_layer(x_BTD, index):
            # Given to the scan as slices, these layers would be copied, and kept for the backward pass.
            return layer(x_BTD, jax.tree.map(lambda leaf: leaf[index], constant))

        # Without remat the outputs of the matmuls and of attention are kept and the cheap rest is recomputed:
        # stacking every intermediate of every layer costs more than computing it again.
        policies = jax.checkpoint_policies
        again, has_experts = self.config.remat, bool(self.config.num_experts)
        names = [attention.ATTENDED, *([PROJECTED] if again == "attention" else [])]
        names += [] if again else [adapters.PRODUCT]
        names += has_experts * ([experts.USED] if again else [experts.USED, experts.MULTIPLIED])
        attended = policies.save_only_these_names(*names)
        kept = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, attended)
        if again:
            # A kernel would otherwise run twice forwards.
            in_passes = attend in attention.IN_PASSES.values()
            kept = attended if in_passes or has_experts or again == "attention" else None
        # prevent_cse is not needed within a scan.
        remat = functools.partial(jax.checkpoint, policy=kept, prevent_cse=False)
        first, end = trained or (0, self.config.num_layers)
        own = layers if trained is None else jax.tree.map(lambda leaf: leaf[first:end], layers)
        x_BTD, parts = self._embed(tokens_BT), []
        if first > 0:
            x_BTD, part = jax.lax.scan(remat(constant_layer), x_BTD, jnp.arange(first))
            parts.append(part)
        x_BTD, part = jax.lax.scan(remat(layer), x_BTD, own)
        parts.append(part)
        if end < self.config.num_layers:
            above = jnp.arange(end, self.config.num_layers)
            x_BTD, part = jax.lax.scan(remat(constant_layer), x_BTD, above)
            parts.append(part)
        routing = jax.tree.map(lambda *parts: jnp.concatenate(parts), *parts)
        if self.config.dense_layers:
            routing = jax.tree.map(lambda x: x[np.array(self.config.expert_layers)], routing)
        return self.final_norm(x_BTD), routing

    def prefill(
        self,
        tokens_BT,
        positions_BT,
        ids,
        attend=attention.causal_attention,
        given=None,
        held: KVCache | None = None,
    ):
        """As `routed`; also returns the keys and values.

        Args:
          held: of the tokens before these, each layer's keys and values go to `attend` before the other arguments.

        Returns:
          hidden [B, T, D] and a KVCache of [L, B, N, T, C], with the routes.
        """
        graphdef, blocks = nnx.split(self.blocks)
        of_layer = self._layers(positions_BT, ids)
        given = self._given(tokens_BT, given)

        def layer(x_BTD, own):
            block, window, of_experts, kv = own
            own_attend = functools.partial(attend, *kv)
            x_BTD, cache, routing = nnx.merge(graphdef, block)(
                x_BTD, *of_layer(window), own_attend, given and given._replace(**of_experts)
            )
            return x_BTD, cache._replace(routes=routing and routing.routes)

        kv = held[:2] if held else ()
        layers = (blocks, self._windows(), given and given.of_layers, kv)
        x_BTD, cache = jax.lax.scan(layer, self._embed(tokens_BT), layers)
        return self.final_norm(x_BTD), cache

    def decode(
        self,
        tokens_B,
        positions_B,
        cache: KVCache,
        layers: list[nnx.State] | None = None,
        counts_B=None,
        attend=None,
    ):
        """One token for each row, against the cache.

        Writes the token's key and value, and its routes, at cache index positions_B, then attends to the indexes
        ≤ positions_B that the layer's window holds. A row whose position lies outside the cache writes nothing.

        Args:
          tokens_B: int32 [B].
          positions_B: int32 [B], in [0, S).
          cache: index s holds the token at position s.
          layers: of `layers_apart`, where those of the cache lie apart.
          counts_B: bool [B], rows whose tokens go to experts; None: all.
          attend: `gpu_decode.attend` where the layers lie apart, `tpu_decode.attend` where they do not; None: attention
            to the whole cache, masked.

        Returns:
          hidden [B, D], after the final norm, and the cache. It is updated in place where the enclosing jit
          donates it.
        """
        of_layer = self._layers(positions_B[:, None], ())
        # An index for each head: TPUs would write all heads of a token at once only after transposing the whole cache.
        rows, heads = jnp.ogrid[: tokens_B.shape[0], : self.config.num_kv_heads]
        at_B1 = positions_B[:, None]
        indexes_1S = jnp.arange((cache.k[0] if layers else cache.k).shape[-2])[None]
        mask_B1S = (indexes_1S <= at_B1)[:, None]
        given = self._given(tokens_B[:, None], None)
        if given is not None and counts_B is not None:
            given = given._replace(counts=counts_B[:, None])

        def layer(x_B1D, block, window, of_experts, cache, index):
            rope, _ = of_layer(window)
            q, new_k, new_v = block.project(x_B1D, rope)
            if attend:
                new = (x[:, 0] for x in (q, new_k, new_v))
                # Layers that lie together have no windows.
                first = () if index else (attention.first_of_window(positions_B, window or 0),)
                attended, k, v = attend(*new, cache.k, cache.v, *first, positions_B, *index)
            else:
                k = cache.k.at[*index, rows, heads, at_B1].set(new_k[:, 0])
                v = cache.v.at[*index, rows, heads, at_B1].set(new_v[:, 0])
                seen_B1S = mask_B1S
                if window is not None:
                    seen_B1S &= (indexes_1S >= attention.first_of_window(at_B1, window))[:, None]
                attended = attention.cached_attention(q, k[index], v[index], seen_B1S)
            own = given and given._replace(**of_experts)
            x_B1D, routing = block.finish(x_B1D, attended, own)
            routes = cache.routes
            if routing is not None:
                routes = routes.at[*index, rows[:, 0], positions_B].set(routing.routes[:, 0])
            return x_B1D, KVCache(k, v, routes)

        x_B1D = self._embed(tokens_B[:, None])
        if layers:
            graphdef, _ = nnx.split(self.blocks)
            windows, apart = self.config.windows or [None] * len(layers), []
            routes = cache.routes or [None] * len(layers)
            of_layers = zip(layers, windows, cache.k, cache.v, routes, strict=True)
            for i, (own_params, window, *own) in enumerate(of_layers):
                block = nnx.merge(graphdef, own_params)
                of_experts = given and jax.tree.map(lambda x: x[i], given.of_layers)  # noqa: B023
                x_B1D, own = layer(x_B1D, block, window, of_experts, KVCache(*own), ())
                apart.append(own)
            k, v, routes = zip(*apart, strict=True)
            cache = KVCache(k, v, routes if cache.routes else None)
        else:
            graphdef, blocks = nnx.split(self.blocks)

            # The cache is carried whole: as a scanned input and output, it would be copied in full by each step.
            def indexed(carry, indexed_block):
                index, block, *own = indexed_block
                return layer(carry[0], nnx.merge(graphdef, block), *own, carry[1], (index,)), None

            indexes = jnp.arange(self.config.num_layers)
            indexed_blocks = (indexes, blocks, self._windows(), given and given.of_layers)
            (x_B1D, cache), _ = jax.lax.scan(indexed, (x_B1D, cache), indexed_blocks)
        return self.final_norm(x_B1D)[:, 0], cache

    def logits(self, hidden):
        """Unnormalised log-probs of the next token: float32 [..., V] from hidden [..., D]."""
        kernel, vocab_axis = self.head_kernel()
        name = "embedding" if self.config.tied_embeddings else "head.kernel"
        kernel = axes.gathered(kernel, axes.of_param(name), self.config.dtype)
        kernel_DV = kernel.T if vocab_axis == 0 else kernel
        kernel_DV = axes.constrain(kernel_DV.astype(self.config.dtype), None, "tensor")
        return jnp.dot(hidden, kernel_DV, preferred_element_type=jnp.float32)

    def head_kernel(self):
        """The projection onto the vocabulary, float32 as stored, and the index of its vocabulary axis.

        Returns:
          [V, D] and 0 for tied embeddings, else [D, V] and 1.
        """
        if self.config.tied_embeddings:
            return self.embedding[...], 0
        return self.head.kernel[...], 1

    def _windows(self):
        """Each layer's window, int32 [L]; None where no layer has one."""
        windows = self.config.windows
        return jnp.asarray(windows, jnp.int32) if windows else None

    def _layers(self, positions_BT, ids):
        """window → the rotations and the ids of a layer with this window, which is None where none has one."""
        rope = rope_cos_sin(self.config, positions_BT)
        if not self.config.windows:
            return lambda _: (rope, ids)
        has_local = FAMILIES[self.config.family].local_rope
        local_rope = rope_cos_sin(self.config, positions_BT, local=True) if has_local else rope

        def of_layer(window):
            own = (jnp.where(window > 0, *pair) for pair in zip(local_rope, rope, strict=True))
            return tuple(own), ids and attention.in_window(ids, positions_BT, window)

        return of_layer

    def _given(self, tokens_BT, given):
        """The tokens of a model with experts, all of them where nothing says which; None for another model."""
        if not self.config.num_experts:
            return None
        ones = jnp.ones_like(tokens_BT)
        given = given or experts.Given(ones > 0, ones)
        if not self.config.dense_layers:
            return given
        has_experts = np.isin(np.arange(self.config.num_layers), self.config.expert_layers)
        return given._replace(has_experts=jnp.asarray(has_experts))

    def _gathered(self, path, param):
        dtype = "float32" if path[-1] in IN_FLOAT32 else self.config.dtype
        in_copies = path[-1] == "kernel" and self.config.divided_by_rings(param[...])
        arguments = param[...], axes.of_layer(".".join(path)), dtype
        if not in_copies:
            return param.replace(axes.gathered(*arguments))
        # So both axes of a torus carry about as much.
        return param.replace(axes.copies(*arguments, path[0] not in ("gate", "down")))

    def _embed(self, tokens_BT):
        # Each device looks all rows up in its part of the table. Their parts are exchanged then, not the table's.
        tokens_BT = axes.constrain(tokens_BT, "data")
        x_BTD = self.embedding[...][tokens_BT].astype(self.config.dtype)
        if FAMILIES[self.config.family].scaled_embedding:
            x_BTD *= jnp.asarray(self.config.model_dim**0.5, x_BTD.dtype)
        x_BTD = axes.constrain(x_BTD, "data", None, axes.SHARDS)
        x_BTD = axes.constrain(x_BTD, axes.ROWS, None, axes.COLUMNS)
        return axes.constrain(x_BTD, axes.ROWS, axes.COLUMNS)


def layers_apart(blocks: nnx.State) -> list[nnx.State]:
    """Each layer of the parameters of `Transformer.blocks`, for `decode` with a cache whose layers lie apart."""
    num_layers = len(jax.tree.leaves(blocks)[0])
    return [jax.tree.map(lambda leaf: leaf[i], blocks) for i in range(num_layers)]  # noqa: B023


def graphdef(config: ModelConfig) -> nnx.GraphDef:
    """The static half of a Transformer, without allocating one: nnx.merge(graphdef, params)."""
    return _abstract(config)[0]


def abstract_params(config: ModelConfig) -> nnx.State:
    """The parameters' shapes and dtypes, adapters included: an nnx.State of jax.ShapeDtypeStruct."""
    return jax.tree.map(lambda leaf: leaf, _abstract(config)[1])  # A copy for the caller.


def abstract_trained(config: ModelConfig) -> nnx.State:
    """`abstract_params` of those that are trained: the adapters where the model has some, else all."""
    params = abstract_params(config)
    return adapters.split(params)[0] if config.lora else params


def abstract_frozen(config: ModelConfig) -> nnx.State | None:
    """`abstract_params` of the others; None where all are trained."""
    return adapters.split(abstract_params(config))[1] if config.lora else None


def with_base(config: ModelConfig, params: nnx.State, base: nnx.State | None) -> nnx.State:
    """All parameters, of the trained ones and the frozen ones, by reference."""
    return adapters.join(params, base) if config.lora else params


def rope_cos_sin(config: ModelConfig, positions_BT, *, local: bool = False):
    """Cosines and sines of the rotations, float32 [B, T, 1, C/2] each.

    angle[t, i] = t · θ^(−2i/C), with a stretching of long wavelengths, or a linear one. Gemma 3's layers with a window
    (`local`) have a θ of their own, and nothing is stretched.

    Source: RoFormer (Su et al., arXiv 2104.09864); The Llama 3 Herd of Models (arXiv 2407.21783).
    """
    C, scaling, theta = config.head_dim, config.rope_scaling, config.rope_theta
    if local:
        scaling, theta = None, config.local_rope_theta
    frequency = theta ** (-jnp.arange(0, C, 2, dtype=jnp.float32) / C)
    if isinstance(scaling, LinearScaling):
        frequency = frequency / scaling.factor
    elif scaling is not None:
        frequency = _stretch(frequency, scaling, theta)
    angle = positions_BT[:, :, None, None].astype(jnp.float32) * frequency[None, None, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if isinstance(scaling, YarnScaling):
        return scaling.attention_factor * cos, scaling.attention_factor * sin
    return cos, sin


class RMSNorm(nnx.Module):
    """x / rms(x) · scale over the last axis, in float32 (Zhang, Sennrich, arXiv 1910.07467); or · (1 + scale)."""

    def __init__(self, dim: int, eps: float, *, zero_centered: bool = False):
        self.scale = nnx.Param(jnp.full(dim, 0.0 if zero_centered else 1.0, jnp.float32))
        self.eps, self.zero_centered = eps, zero_centered

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        inverse_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        scale = jnp.expand_dims(self.scale[...], range(x.ndim - 1))
        if self.zero_centered:
            scale = 1 + scale.astype(jnp.float32)
        return (x32 * inverse_rms * scale).astype(x.dtype)


class Block(nnx.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)), the mlp gated; with post-norms x + norm(…)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        D, F, C = config.model_dim, config.mlp_dim, config.head_dim
        H, N, bias = config.num_heads, config.num_kv_heads, config.attention_bias
        self.config = config
        post_norms = FAMILIES[config.family].post_norms
        self.attention_norm = _norm(D, config)
        self.query = _linear(D, H * C, config, rngs, use_bias=bias)
        self.key = _linear(D, N * C, config, rngs, use_bias=bias)
        self.value = _linear(D, N * C, config, rngs, use_bias=bias)
        self.output = _linear(H * C, D, config, rngs)
        if config.qk_norm:
            self.query_norm = _norm(C, config)
            self.key_norm = _norm(C, config)
        self.attention_post_norm = _norm(D, config) if post_norms else None
        self.mlp_norm = _norm(D, config)
        if config.num_experts:
            activation = FAMILIES[config.family].activation
            self.experts = experts.Experts(config, activation, rngs=rngs)
        if config.dense_layers or not config.num_experts:
            self.gate = _linear(D, F, config, rngs)
            self.up = _linear(D, F, config, rngs)
            self.down = _linear(F, D, config, rngs)
        self.mlp_post_norm = _norm(D, config) if post_norms else None
        # Last: the base's random weights are those of a model without adapters.
        if lora := config.lora:
            for target in lora.targets:
                getattr(self, adapters.LAYERS[target]).adapt(lora.scale, lora.rank, rngs)

    def __call__(self, x_BTD, rope, ids, attend=attention.causal_attention, given=None):
        q, k, v = self.project(x_BTD, rope)
        cache = KVCache(k.swapaxes(1, 2), v.swapaxes(1, 2))
        with jax.named_scope("attention"):
            attended = attend(q, k, v, ids)
        x_BTD, routing = self.finish(x_BTD, attended, given)
        return x_BTD, cache, routing

    @jax.named_scope("projections")
    def project(self, x_BTD, rope):
        """Queries [B, T, H, C], keys and values [B, T, N, C]; queries and keys after RoPE."""
        B, T, _ = x_BTD.shape
        # Tokens on one axis: XLA's CPU backend transposes around the gradients of 3-D matmuls.
        x_ND = axes.on_one_axis(self.attention_norm(x_BTD))
        q, k, v = (
            axes.in_rows(_kept(project(x_ND)).reshape(B * T, -1, self.config.head_dim), B, T)
            for project in (self.query, self.key, self.value)
        )
        if self.config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        # Attention divides scores by √C.
        scale = (self.config.head_dim / (self.config.query_scalar or self.config.head_dim)) ** 0.5
        rope_of_q = rope if scale == 1 else tuple(scale * x for x in rope)
        return _rotate(q, rope_of_q), _rotate(k, rope), v

    @jax.named_scope("mlp")
    def finish(self, x_BTD, attended_BTHC, given=None):
        """The rest of the layer after attention: output projection, MLP or experts, post-norms, both residuals.

        Returns:
          [B, T, D], and the layer's `experts.Routing`, None without experts.
        """
        B, T, _ = x_BTD.shape
        attended_ND = axes.on_one_axis(attended_BTHC).reshape(B * T, -1)
        x_ND = axes.on_one_axis(x_BTD)
        x_ND += _normed(self.attention_post_norm, _kept(self.output(attended_ND)))
        y_ND, routing = self.mlp_norm(x_ND), None
        if not self.config.num_experts:
            y_ND = self._mlp(y_ND)
        elif given.has_experts is None:
            y_ND, routing = self.experts(y_ND, given, (B, T))
        else:
            y_ND, routing = jax.lax.cond(
                given.has_experts,
                lambda x_ND: self.experts(x_ND, given, (B, T)),
                lambda x_ND: (self._mlp(x_ND), experts.no_routing(self.config, given)),
                y_ND,
            )
        x_ND += _normed(self.mlp_post_norm, y_ND)
        return axes.in_rows(x_ND, B, T), routing

    def _mlp(self, x_ND):
        activation = FAMILIES[self.config.family].activation
        return self.down(activation(self.gate(x_ND)) * self.up(x_ND))


def _norm(dim, config):
    zero_centered = FAMILIES[config.family].zero_centered_norms
    return RMSNorm(dim, config.norm_eps, zero_centered=zero_centered)


def _kept(x):
    return checkpoint_name(x, PROJECTED)


def _normed(norm, x):
    return x if norm is None else norm(x)


def _linear(num_in, num_out, config, rngs, *, use_bias=False):
    return adapters.AdaptedLinear(
        num_in,
        num_out,
        use_bias=use_bias,
        dtype=config.dtype,
        param_dtype=jnp.float32,
        kernel_init=jax.nn.initializers.normal(num_in**-0.5),
        rngs=rngs,
    )


@functools.lru_cache
def _abstract(config):
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    if not config.lora:
        return graphdef, params

    def stored(path, param):
        kept = isinstance(param, adapters.Adapter) or path[-1] in IN_FLOAT32
        dtype = param.dtype if kept else jnp.dtype(config.lora.base_dtype)
        return param.replace(jax.ShapeDtypeStruct(param.shape, dtype))

    return graphdef, mapped(stored, params)


def _stretch(frequency, scaling, theta):
    """Interpolates between stretched (long) and unchanged (short) wavelengths."""
    if isinstance(scaling, YarnScaling):
        keep = _kept_by_yarn(len(frequency), scaling, theta)
    else:
        turns = scaling.original_max_tokens * frequency / (2 * jnp.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = jnp.clip((turns - low) / (high - low), 0, 1)
    return keep * frequency + (1 - keep) * frequency / scaling.factor


def _kept_by_yarn(num_pairs, scaling, theta):
    """1 for pairs that turn beta_fast times in the original context, 0 at beta_slow; linear in the pair's index."""

    def pair(turns):  # θ^(−pair / num_pairs) · original_max_tokens = 2π · turns
        return num_pairs * math.log(scaling.original_max_tokens / (2 * math.pi * turns), theta)

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    ramp = (jnp.arange(num_pairs, dtype=jnp.float32) - first) / (last - first or 0.001)
    return 1 - jnp.clip(ramp, 0, 1)


def _rotate(x_BTHC, rope):
    """Rotates the pairs (i, i + C/2), in float32."""
    cos, sin = rope
    a, b = jnp.split(x_BTHC.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHC.dtype)

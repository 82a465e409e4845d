"""Mixtures of experts: of E gated MLPs a router picks K for each token, and their outputs are added by its weights.

    p = softmax(W x),  y = Σ_{e ∈ top-K of p} w_e · MLP_e(x),  w_e = p_e, or p_e / Σ p of the K

No token is dropped: shapes are static, and rows of experts are as many as there are. Router, softmax and a device's sum
over its experts are float32. Independent of attention, files and losses; of a mesh it uses the names of the axes.

Source: Mixtral of Experts (Jiang et al., arXiv 2401.04088); Qwen3 Technical Report (arXiv 2505.09388).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxrl_async.models import axes, gpu_experts

_TOKENS = (*axes.ROWS, axes.COLUMNS)  # divide tokens on one axis
# Names of what a backward pass keeps: the experts used, and with room what they computed.
USED, MULTIPLIED = "used", "multiplied"
_MAX_BLOCK = 128  # rows that one expert multiplies at a time
_MAX_GPU_BLOCK = 1024  # of a described GPU: there each block is a kernel that the host waits for
_TILE_ROWS, _MAX_TILE_SIDE = 128, 1024  # of Megablox: few rows, as many experts have few


class Given(NamedTuple):
    """The tokens of a pass, for a model with experts; of one layer without the axis of layers."""

    counts: jax.Array  # bool [B, T]; the others are padding, which goes to no expert
    segment_ids: jax.Array  # int32 [B, T], the sequences of `Routing.balance`
    # of `route_dtype` [L, B, T, K]: recorded experts, its maximum where there are none and the router decides
    routes: jax.Array | None = None
    replay: bool = True  # use them; else the router decides, and is compared with them
    # bool [L]; those without have an MLP. None: all have
    has_experts: jax.Array | None = None

    @property
    def of_layers(self) -> dict[str, jax.Array | None]:
        """The fields with an axis of layers."""
        return {"routes": self.routes, "has_experts": self.has_experts}


class Routing(NamedTuple):
    """The routers of a pass: of one layer, or with a leading axis of layers. 0 for padding, but for `routes`."""

    # of `route_dtype` [B, T, K]: the router's own choice, best first; the maximum for padding
    routes: jax.Array
    # float32 [B, T]: 1 where the own choice is another set than the recorded experts
    differs: jax.Array
    known: jax.Array  # float32 [B, T]: 1 where experts are recorded
    entropy: jax.Array  # float32 [B, T], nats
    load: jax.Array  # float32 []: tokens of the busiest expert over their mean
    # float32 [B, T]: the token's sequence's E · Σ_e (share of uses of e) · (mean p of e), ≥ 0
    balance: jax.Array


def route_dtype(num_experts: int) -> np.dtype:
    """The dtype of routes; its maximum stands where they are not known."""
    return np.dtype(np.uint8 if num_experts < 256 else np.uint16)


def no_routing(config, given: Given) -> Routing:
    """Of a layer without experts."""
    none_BT, dtype = jnp.zeros(given.counts.shape), route_dtype(config.num_experts)
    routes = jnp.full((*none_BT.shape, config.experts_per_token), np.iinfo(dtype).max, dtype)
    return Routing(routes, none_BT, none_BT, none_BT, jnp.zeros(()), none_BT)


class Experts(nnx.Module):
    """The MLP of a layer. `activation` is of the gates."""

    def __init__(self, config, activation, *, rngs: nnx.Rngs):
        E, D, F = config.num_experts, config.model_dim, config.expert_mlp_dim
        self.config, self.activation = config, activation

        def kernel(*shape):
            return nnx.Param(shape[-2] ** -0.5 * jax.random.normal(rngs.params(), shape))

        self.router_kernel = kernel(D, E)
        self.gate_kernel = kernel(E, D, F)
        self.up_kernel = kernel(E, D, F)
        self.down_kernel = kernel(E, F, D)

    def __call__(self, x_ND, given: Given, shape: tuple[int, int]):
        """Their outputs for the tokens of rows [B, T] that are `shape`, on one axis as by `axes.on_one_axis`.

        Returns:
          [N, D] in the dtype of x, 0 for padding, and the layer's Routing.
        """
        E, K = self.config.num_experts, self.config.experts_per_token
        dtype = route_dtype(E)
        counts_N = axes.on_one_axis(given.counts, x_ND)
        routes_NK = jnp.full((len(x_ND), K), np.iinfo(dtype).max, dtype)
        if given.routes is not None:
            routes_NK = axes.on_one_axis(given.routes, x_ND)
        kernels = [kernel[...] for kernel in (self.gate_kernel, self.up_kernel, self.down_kernel)]
        router_DE = self.router_kernel[...].astype(jnp.float32)
        y_ND, probs_NE, used_NK, own_NK = self._divided(
            given.replay,
            *(x_ND, counts_N, routes_NK, router_DE),
            *(k.astype(x_ND.dtype) for k in kernels),
        )
        routing = _routing(probs_NE, routes_NK, own_NK, counts_N)
        rows = [axes.in_rows(x, *shape) for x in routing]
        balance_BT = _balance(*(axes.in_rows(x, *shape) for x in (probs_NE, used_NK)), given)
        return y_ND, Routing(*rows, _load(used_NK, counts_N, E), balance_BT)

    def _divided(self, replay, x_ND, counts_N, routes_NK, *kernels):
        """`_of_device` on each device of the mesh, if there is one."""
        mesh = jax.typeof(x_ND).sharding.mesh
        if mesh.empty or mesh.size == 1:
            return self._of_device(replay, x_ND, counts_N, routes_NK, *kernels)
        num = len(x_ND)
        padding = -num % axes.size(x_ND, *_TOKENS)  # Of rows that the mesh cannot divide.
        tokens = (
            jnp.pad(x, ((0, padding),) + (x.ndim - 1) * ((0, 0),)) if padding else x
            for x in (x_ND, counts_N, routes_NK)
        )
        of_tokens, wide = PartitionSpec(_TOKENS), PartitionSpec("expert", None, "tensor")
        divided = jax.shard_map(
            functools.partial(self._of_device, replay, on_mesh=True),
            mesh=mesh,
            in_specs=(
                *(3 * (of_tokens,)),
                PartitionSpec(),
                wide,
                wide,
                PartitionSpec("expert", "tensor"),
            ),
            out_specs=of_tokens,
            check_vma=False,
        )
        return tuple(x[:num] for x in divided(*tokens, *kernels))

    def _of_device(
        self,
        replay,
        x_ND,
        counts_N,
        routes_NK,
        router_DE,
        gate_EDF,
        up_EDF,
        down_EFD,
        *,
        on_mesh=False,
    ):
        K, num_own = self.config.experts_per_token, len(gate_EDF)
        # Else TPUs and GPUs would round: a token near a tie changes its experts.
        logits_NE = jnp.dot(x_ND.astype(jnp.float32), router_DE, precision="highest")
        probs_NE = jax.nn.softmax(logits_NE)
        _, own_NK = jax.lax.top_k(jax.lax.stop_gradient(logits_NE), K)
        used_NK = _known_or(own_NK, routes_NK, replay)
        used_NK = checkpoint_name(used_NK, USED)
        weights_NK = jnp.take_along_axis(probs_NE, used_NK, axis=1)
        if self.config.norm_topk:
            weights_NK /= weights_NK.sum(axis=1, keepdims=True)
        # An expert's number among those of this device; the last number is of none of them.
        to_NK = jnp.where(counts_N[:, None], used_NK, self.config.num_experts)
        if on_mesh:
            x_ND, to_NK, weights_MK = (
                jax.lax.all_gather(x, "expert", tiled=True) for x in (x_ND, to_NK, weights_NK)
            )
            to_NK -= num_own * jax.lax.axis_index("expert")
            to_NK = jnp.where((to_NK >= 0) & (to_NK < num_own), to_NK, num_own)
        else:
            weights_MK = weights_NK
        y_ND = self._mlp(x_ND, to_NK, weights_MK, gate_EDF, up_EDF, down_EFD)
        if on_mesh:
            y_ND = jax.lax.psum_scatter(y_ND, "expert", tiled=True)
            y_ND = jax.lax.psum(y_ND, "tensor")
        return y_ND, probs_NE, used_NK, own_NK

    def _mlp(self, x_ND, to_NK, weights_NK, gate_EDF, up_EDF, down_EFD):
        """Σ_k weights · MLP of expert to_NK; to_NK = E is of no expert."""
        N, K = to_NK.shape
        E = len(gate_EDF)
        block = _block(N * K, E)
        order_R = checkpoint_name(jnp.argsort(to_NK.reshape(-1), stable=True), MULTIPLIED)
        places_NK = checkpoint_name(jnp.argsort(order_R).reshape(N, K), MULTIPLIED)
        order_R = jnp.pad(order_R, (0, block))  # The last block of rows may end after the last row.
        sizes_E = jnp.sum(to_NK.reshape(-1, 1) == jnp.arange(E)[None], axis=0, dtype=jnp.int32)

        def dot(x_RD, kernel_EDF):
            return checkpoint_name(grouped_dot(block, x_RD, kernel_EDF, sizes_E), MULTIPLIED)

        x_RD = _sorted(x_ND, order_R // K, places_NK)
        h_RF = self.activation(dot(x_RD, gate_EDF)) * dot(x_RD, up_EDF)
        y_NKD = _unsorted(dot(h_RF, down_EFD), order_R, places_NK)
        return jnp.sum(weights_NK[..., None] * y_NKD, axis=1).astype(x_ND.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_dot(block: int, x_RD, kernel_EDF, sizes_E):
    """The rows of group e, which follow those of group e − 1, times kernel e; 0 after the last group.

    On CPUs a loop over blocks of rows, of which each has one kernel: their compiler multiplies every row of a
    `ragged_dot` by all E kernels, and a GPU's writes E copies of the rows. On a TPU Megablox, by its compiler's
    prediction less than a 20th of the time. On GPUs `gpu_experts`.

    Args:
      block: rows multiplied together, ≥ 1.
      x_RD: [R, D]; at least `block` rows are after the last group.
      kernel_EDF: [E, D, F], of the dtype of x.
      sizes_E: int32 [E], rows of each group.

    Returns:
      [R, F] in the dtype of x, of sums in float32.
    """
    return _product(block, x_RD, kernel_EDF, sizes_E)


def _product(block, x_RD, kernel_EDF, sizes_E, transposed=False):
    """`grouped_dot`; of `transposed` kernels, [E, F, D]."""
    return jax.lax.platform_dependent(
        *(x_RD, kernel_EDF, sizes_E),
        cpu=functools.partial(_by_blocks, block, transposed=transposed),
        tpu=functools.partial(_by_megablox, transposed=transposed),
        default=functools.partial(_on_gpu, transposed=transposed),
    )


def _forward(block, x_RD, kernel_EDF, sizes_E):
    return grouped_dot(block, x_RD, kernel_EDF, sizes_E), (x_RD, kernel_EDF, sizes_E)


def _backward(block, saved, g_RF):
    x_RD, kernel_EDF, sizes_E = saved
    d_x = _product(block, g_RF, kernel_EDF, sizes_E, transposed=True)
    d_kernel = jax.lax.platform_dependent(
        x_RD,
        g_RF,
        sizes_E,
        cpu=functools.partial(_kernel_gradient_by_blocks, block),
        tpu=_kernel_gradient_by_megablox,
        default=_kernel_gradient_on_gpu,
    )
    return d_x, d_kernel, None


grouped_dot.defvjp(_forward, _backward)


def _by_megablox(x_RD, kernel_EDF, sizes_E, transposed=False, interpret=False):
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    tiles = _tiles(x_RD.shape[1], kernel_EDF.shape[1 if transposed else 2])
    how = dict(transpose_rhs=transposed, interpret=interpret)
    y_RF = gmm(_whole_tiles(x_RD), kernel_EDF, sizes_E, x_RD.dtype, tiles, **how)[: len(x_RD)]
    # It leaves what is after the last group unwritten.
    return jnp.where((jnp.arange(len(x_RD)) < sizes_E.sum())[:, None], y_RF, 0)


def _kernel_gradient_by_megablox(x_RD, g_RF, sizes_E, interpret=False):
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    tiles = _tiles(x_RD.shape[1], g_RF.shape[1])
    x_DR, g_RF = _whole_tiles(x_RD).T, _whole_tiles(g_RF)
    return tgmm(x_DR, g_RF, sizes_E, x_DR.dtype, tiles, interpret=interpret)


def _tiles(*sides):
    return _TILE_ROWS, *(min(side, _MAX_TILE_SIDE) for side in sides)


def _whole_tiles(rows):
    return jnp.pad(rows, ((0, -len(rows) % _TILE_ROWS), (0, 0)))


def _on_gpu(x_RD, kernel_EDF, sizes_E, transposed=False):
    by = _by_large_blocks if _is_described() else gpu_experts.product
    return by(x_RD, kernel_EDF, sizes_E, transposed)


def _kernel_gradient_on_gpu(x_RD, g_RF, sizes_E):
    by = _kernel_gradient_by_large_blocks if _is_described() else gpu_experts.kernel_gradient
    return by(x_RD, g_RF, sizes_E)


def _is_described() -> bool:
    """Whether the GPU is only described, for a compiler: it has no name, and JAX builds Triton for a named one."""
    chip = jax.sharding.get_abstract_mesh().abstract_device
    return chip is not None and not chip.device_kind


def _by_blocks(block, x_RD, kernel_EDF, sizes_E, transposed=False):
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    experts, firsts, _, num = _blocks(block, len(x_RD), sizes_E)

    def visit(i, y_RF):
        rows, kernel = jax.lax.dynamic_slice_in_dim(x_RD, firsts[i], block), kernel_EDF[experts[i]]
        y = jax.lax.dot_general(rows, kernel, dimensions, preferred_element_type=jnp.float32)
        # The rows after the group's last are written again, by the next group or below.
        return jax.lax.dynamic_update_slice_in_dim(y_RF, y.astype(y_RF.dtype), firsts[i], 0)

    zeros = jnp.zeros((len(x_RD), kernel_EDF.shape[1 if transposed else 2]), x_RD.dtype)
    y_RF = jax.lax.fori_loop(0, num, visit, zeros)
    return jax.lax.dynamic_update_slice_in_dim(y_RF, zeros[:block], sizes_E.sum(), 0)


def _kernel_gradient_by_blocks(block, x_RD, g_RF, sizes_E):
    experts, firsts, ends, num = _blocks(block, len(x_RD), sizes_E)

    def visit(i, sums_EDF):
        x, g = (jax.lax.dynamic_slice_in_dim(rows, firsts[i], block) for rows in (x_RD, g_RF))
        own = (firsts[i] + jnp.arange(block) < ends[i])[:, None]
        product = jnp.dot(jnp.where(own, x, 0).T, g, preferred_element_type=jnp.float32)
        return sums_EDF.at[experts[i]].add(product)

    zeros = jnp.zeros((len(sizes_E), x_RD.shape[1], g_RF.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, num, visit, zeros).astype(x_RD.dtype)


def _by_large_blocks(x_RD, kernel_EDF, sizes_E, transposed=False):
    block = _block(len(x_RD), len(sizes_E), _MAX_GPU_BLOCK)
    padded = jnp.pad(x_RD, ((0, block), (0, 0)))
    return _by_blocks(block, padded, kernel_EDF, sizes_E, transposed)[: len(x_RD)]


def _kernel_gradient_by_large_blocks(x_RD, g_RF, sizes_E):
    block = _block(len(x_RD), len(sizes_E), _MAX_GPU_BLOCK)
    padded = (jnp.pad(rows, ((0, block), (0, 0))) for rows in (x_RD, g_RF))
    return _kernel_gradient_by_blocks(block, *padded, sizes_E)


def _blocks(block, num_rows, sizes_E):
    """Expert, first row and end of the group of each block of rows, and the number of blocks."""
    blocks_E = -(-sizes_E // block)
    last_E, end_E = jnp.cumsum(blocks_E), jnp.cumsum(sizes_E)
    numbers = jnp.arange(num_rows // block + len(sizes_E))
    experts = jnp.sum(numbers[:, None] >= last_E[None], axis=1)
    experts = jnp.minimum(experts, len(sizes_E) - 1)
    before = numbers - (last_E - blocks_E)[experts]
    firsts = (end_E - sizes_E)[experts] + before * block
    return experts, firsts, end_E[experts], last_E[-1]


def _block(num_rows, num_experts, largest=_MAX_BLOCK):
    """A power of two, near the rows of an expert."""
    return min(largest, max(8, 2 ** (num_rows // num_experts).bit_length() // 2))


@jax.custom_vjp
def _sorted(x_ND, tokens_R, places_NK):
    """Row r is x[tokens[r]]. Both passes are gathers: token n is in the rows places[n]."""
    return x_ND[tokens_R]


def _sorted_backward(places_NK, g_RD):
    return g_RD[places_NK].sum(axis=1, dtype=jnp.float32).astype(g_RD.dtype), None, None


_sorted.defvjp(lambda x, tokens, places: (x[tokens], places), _sorted_backward)


@jax.custom_vjp
def _unsorted(y_RD, order_R, places_NK):
    """[N, K, D]: y[places], whose inverse is order. Rows after the first N · K get a gradient that counts nowhere."""
    return y_RD[places_NK]


def _unsorted_backward(order_R, g_NKD):
    return g_NKD.reshape(-1, g_NKD.shape[-1])[order_R], None, None


_unsorted.defvjp(lambda y, order, places: (y[places], order), _unsorted_backward)


def _known_or(own_NK, routes_NK, replay=True):
    """The recorded experts, the router's own where there are none."""
    is_known = (routes_NK != np.iinfo(routes_NK.dtype).max) & replay
    return jnp.where(is_known, routes_NK.astype(own_NK.dtype), own_NK)


def _routing(probs_NE, routes_NK, own_NK, counts_N):
    """The fields routes, differs, known and entropy of `Routing`, of tokens on one axis."""
    unknown = np.iinfo(routes_NK.dtype).max
    probs_NE = jax.lax.stop_gradient(probs_NE)
    logs_NE = jnp.log(jnp.maximum(probs_NE, jnp.finfo(jnp.float32).tiny))
    entropy_N = jnp.where(counts_N, -jnp.sum(probs_NE * logs_NE, axis=1), 0)
    recorded_NK = _known_or(own_NK, routes_NK)
    differs_N = (
        jnp.any(jnp.sort(recorded_NK, axis=1) != jnp.sort(own_NK, axis=1), axis=1) & counts_N
    )
    known_N = (routes_NK[:, 0] != unknown) & counts_N
    own_NK = jnp.where(counts_N[:, None], own_NK, unknown).astype(routes_NK.dtype)
    return own_NK, *(x.astype(jnp.float32) for x in (differs_N, known_N)), entropy_N


def _load(used_NK, counts_N, num_experts):
    to_NK = jnp.where(counts_N[:, None], used_NK, num_experts)
    uses_E = jnp.sum(to_NK.reshape(-1, 1) == jnp.arange(num_experts)[None], axis=0)
    return uses_E.max() / jnp.maximum(uses_E.mean(), 1e-30)


def _balance(probs_BTE, used_BTK, given):
    """E · Σ_e f_e · p̄_e of each token's sequence, 1 where uses or probabilities are even (arXiv 2412.19437, 2.1.2)."""
    T, E = probs_BTE.shape[1:]
    uses_BTE = jnp.sum(used_BTK[..., None] == jnp.arange(E)[None, None, None], axis=2)
    values = jnp.concatenate(
        [probs_BTE, uses_BTE / used_BTK.shape[2], jnp.ones_like(probs_BTE[..., :1])], axis=2
    )
    values = jnp.where(given.counts[..., None], values, 0)

    def mean(values, segments):
        sums = jax.ops.segment_sum(values, segments, T + 1)
        return sums[:, :-1] / jnp.maximum(sums[:, -1:], 1), segments

    means, segments_BT = jax.vmap(mean)(values, given.segment_ids)
    probs, uses = means[..., :E], jax.lax.stop_gradient(means[..., E:])
    of_segment = E * jnp.sum(probs * uses, axis=2)
    balance_BT = jnp.take_along_axis(of_segment, segments_BT, axis=1)
    return jnp.where(given.counts, balance_BT, 0)

"""Log-probs of given tokens from hidden states, without the logits of a whole row in memory.

There is no mask: padding gets a finite number like any token.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxrl_async.models import axes
from jaxrl_async.models.kept import kept_logprobs

_NEVER = -1e30  # Finite: 0 · −1e30 is 0, but 0 · −∞ is NaN.


def token_logprobs(
    model,
    hidden_BTD,
    tokens_BT,
    predictor_index_BT,
    *,
    temperature: float,
    chunk_tokens: int | None,
    kept_BTM=None,
):
    """Log-prob of each token, and entropy of the distribution that predicts it.

        logprobs[b, t] = log_softmax(logits(hidden[b, predictor_index[b, t]]) / temperature)[tokens[b, t]]

    Args:
      model: a Transformer; its `logits` is the head.
      hidden_BTD: [B, T, D], after the final norm.
      tokens_BT: int32 [B, T], in [0, V).
      predictor_index_BT: int32 [B, T], in [0, T): the column whose hidden state predicts the token.
      temperature: of sampling, > 0; carries no gradient.
      chunk_tokens: bound on memory, ≥ 1: at most the logits of this many columns exist at a time on a device, and the
        backward pass recomputes them. None computes all at once and keeps them.
      kept_BTM: int32 [B, T, M], the ids that each token was drawn from, padded with −1: the distribution is that over
        them, and tokens without any have log-prob 0. None: that over all ids.

    Returns:
      logprobs float32 [B, T]; entropy float32 [B, T] in nats, without a gradient.

    Raises:
      ValueError: chunk_tokens < 1.
    """
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be ≥ 1 or None, got {chunk_tokens}")
    temperature = jax.lax.stop_gradient(temperature)
    B, T = tokens_BT.shape
    hidden_BTD = axes.constrain(hidden_BTD, axes.ROWS)  # A predictor may lie on another device.
    hidden_BTD = jnp.take_along_axis(hidden_BTD, predictor_index_BT[:, :, None], axis=1)
    hidden_BTD = axes.constrain(hidden_BTD, axes.ROWS, axes.COLUMNS)
    if kept_BTM is not None:
        return kept_logprobs(model, hidden_BTD, tokens_BT, kept_BTM, temperature=temperature)
    if chunk_tokens is None or chunk_tokens >= T:
        return _logprobs_and_entropy(model.logits(hidden_BTD) / temperature, tokens_BT)
    kernel, vocab_axis = model.head_kernel()
    shards = axes.size(kernel, "tensor")
    shard_size = kernel.shape[vocab_axis] // shards
    tile = min(shard_size, -(-shard_size * chunk_tokens * axes.size(hidden_BTD, axes.COLUMNS) // T))
    is_frozen = model.config.lora is not None
    parts = axes.size(kernel, *axes.ROWS, axes.COLUMNS)
    parts = parts if model.config.divided_by_rings(kernel) else 0
    head = _TiledHead(vocab_axis, model.config.dtype, shards, shard_size, tile, is_frozen, parts)
    hidden_ND, tokens_N = axes.on_one_axis(hidden_BTD), axes.on_one_axis(tokens_BT)
    logprobs_N, entropy_N = _tiled(head, hidden_ND, kernel, tokens_N, temperature)
    return axes.in_rows(logprobs_N, B, T), axes.in_rows(entropy_N, B, T)


def _logprobs_and_entropy(logits_BTV, tokens_BT):
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    # A comparison instead of a gather: it partitions over a sharded vocabulary, and its gradient is a
    # select that fuses with the softmax's; the gradient of a gather is a scatter into [B, T, V].
    chosen_BTV = jnp.arange(logits_BTV.shape[-1])[None, None] == tokens_BT[:, :, None]
    logprobs_BT = jnp.sum(jnp.where(chosen_BTV, logits_BTV, 0), axis=-1) - log_z_BT
    logits_BTV, log_z_BT = jax.lax.stop_gradient((logits_BTV, log_z_BT))
    probs_BTV = jnp.exp(logits_BTV - log_z_BT[:, :, None])
    return logprobs_BT, log_z_BT - jnp.sum(probs_BTV * logits_BTV, axis=-1)


@dataclasses.dataclass(frozen=True)
class _TiledHead:
    """The cut of the kernel: S shards of the vocabulary side by side, each walked in tiles of W.

    The vocabulary is tiled instead of the tokens. Each slice of the kernel's gradient is then one matmul over all N
    tokens and is written once; a sum over chunks of tokens would hold the gradient twice and pass over all of it for
    each chunk.
    """

    vocab_axis: int  # of the kernel: 0 of [V, D], 1 of [D, V]
    dtype: str  # compute dtype
    shards: int  # S
    shard_size: int  # V / S
    tile: int  # W, ≤ V / S
    is_frozen: bool  # The kernel gets no gradient.
    parts: int  # of tokens, whose gradients `axes.ring_sum` sums, in the compute dtype; 0: the compiler does

    @property
    def num_tiles(self):
        return -(-self.shard_size // self.tile)

    @property
    def axes(self):
        """Dimensions of the sharded kernel: v is walked in tiles, d is whole."""
        return ("svd", "sdv")[self.vocab_axis]

    def constrain(self, kernel, of_d):
        """Fixes the division of a sharded kernel: its shards over tensor, its model dimension over `of_d`."""
        return axes.constrain(kernel, *self.spec(of_d))

    def spec(self, of_d):
        """The mesh axes of `constrain`."""
        return tuple({"s": "tensor", "v": None, "d": of_d}[a] for a in self.axes)

    def split(self, kernel):
        """[V, D] → [S, V / S, D], and [D, V] → [S, D, V / S]."""
        if self.vocab_axis == 0:
            return kernel.reshape(self.shards, self.shard_size, -1)
        return kernel.reshape(-1, self.shards, self.shard_size).swapaxes(0, 1)

    def join(self, kernel):
        """The inverse of `split`."""
        if self.vocab_axis == 0:
            return kernel.reshape(self.shards * self.shard_size, -1)
        return kernel.swapaxes(0, 1).reshape(-1, self.shards * self.shard_size)

    def start(self, index):
        """Start of a tile in its shard. Where W does not divide V / S, the last tile overlaps the one before."""
        return jnp.minimum(index * self.tile, self.shard_size - self.tile)

    def gathered(self, shards, index):
        """A tile of a sharded kernel, whole over SHARDS."""
        # Cut first: no more is gathered.
        tile = self.constrain(self.slice(shards, index), axes.SHARDS)
        return self.constrain(tile, None)

    def scan(self, visit, carry, shards):
        """jax.lax.scan of visit(carry, tile, index) over the tiles of a sharded kernel."""
        indexes = jnp.arange(self.num_tiles)
        if axes.size(shards, *axes.SHARDS) == 1:
            return jax.lax.scan(
                lambda carry, i: visit(carry, self.slice(shards, i), i), carry, indexes
            )

        def visit_and_gather(state, index):
            carry, tile = state
            following = self.gathered(shards, (index + 1) % self.num_tiles)  # meanwhile
            carry, found = visit(carry, tile, index)
            return (carry, following), found

        (carry, _), found = jax.lax.scan(
            visit_and_gather, (carry, self.gathered(shards, 0)), indexes
        )
        return carry, found

    def slice(self, kernel, index):
        """A tile of a sharded kernel."""
        return jax.lax.dynamic_slice_in_dim(
            kernel, self.start(index), self.tile, self.axes.index("v")
        )

    def add(self, kernel, tile, index):
        """A sharded kernel with `tile` added to one of its tiles."""
        return jax.lax.dynamic_update_slice_in_dim(
            kernel, self.slice(kernel, index) + tile, self.start(index), self.axes.index("v")
        )

    def logits(self, hidden_ND, kernel_tile, tokens_N, temperature, index):
        """Logits / temperature [N, S, W] of a tile, and where they belong to the given tokens.

        Entries that an earlier tile has covered are −1e30 here and belong to no token.
        """
        logits_NSW = jnp.einsum(
            f"nd,{self.axes}->nsv", hidden_ND, kernel_tile, preferred_element_type=jnp.float32
        )
        place_W = self.start(index) + jnp.arange(self.tile)
        fresh_NSW = (place_W >= index * self.tile)[None, None]
        entry_SW = self.shard_size * jnp.arange(self.shards)[:, None] + place_W[None]
        chosen_NSW = fresh_NSW & (entry_SW[None] == tokens_N[:, None, None])
        return jnp.where(fresh_NSW, logits_NSW / temperature, _NEVER), chosen_NSW


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tiled(head: _TiledHead, hidden_ND, kernel, tokens_N, temperature):
    """Log-probs and entropies, float32 [N] each."""
    return _tiled_forward(head, hidden_ND, kernel, tokens_N, temperature)[0]


def _tiled_forward(head, hidden_ND, kernel, tokens_N, temperature):
    shards = head.constrain(head.split(kernel.astype(head.dtype)), axes.SHARDS)

    def visit(_, kernel_tile, index):
        logits_NSW, chosen_NSW = head.logits(hidden_ND, kernel_tile, tokens_N, temperature, index)
        top_NS = logits_NSW.max(axis=-1)
        weights_NSW = jnp.exp(logits_NSW - top_NS[:, :, None])
        total_NS = weights_NSW.sum(axis=-1)
        # An einsum instead of a sum of products, which takes XLA's CPU backend seven times as long.
        mean_NS = jnp.einsum("nsv,nsv->ns", weights_NSW, logits_NSW) / total_NS
        own_NS = jnp.sum(jnp.where(chosen_NSW, logits_NSW, 0), axis=-1)
        return None, (top_NS + jnp.log(total_NS), mean_NS, own_NS)

    # Shards are summed at the end: the loop communicates nothing.
    _, (log_z_INS, mean_INS, own_INS) = head.scan(visit, None, shards)
    log_z_N = jax.nn.logsumexp(log_z_INS, axis=(0, 2))
    share_INS = jnp.exp(log_z_INS - log_z_N[None, :, None])
    entropy_N = log_z_N - jnp.sum(share_INS * mean_INS, axis=(0, 2))
    saved = hidden_ND, kernel, tokens_N, temperature, log_z_N
    return (jnp.sum(own_INS, axis=(0, 2)) - log_z_N, entropy_N), saved


def _tiled_backward(head, saved, cotangents):
    """∂ logprob / ∂ logits = (one-hot of the token − softmax) / temperature, a tile at a time."""
    hidden_ND, kernel, tokens_N, temperature, log_z_N = saved
    scale_N = cotangents[0] / temperature  # The entropy's cotangent is dropped.
    shards = head.constrain(head.split(kernel.astype(head.dtype)), axes.SHARDS)
    dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def visit(grads, kernel_tile, index):
        d_hidden_SND, d_kernel = grads
        logits_NSW, chosen_NSW = head.logits(hidden_ND, kernel_tile, tokens_N, temperature, index)
        probs_NSW = jnp.exp(logits_NSW - log_z_N[:, None, None])
        d_logits_NSW = ((chosen_NSW - probs_NSW) * scale_N[:, None, None]).astype(head.dtype)
        d_hidden_SND += dot(f"nsv,{head.axes}->snd", d_logits_NSW, kernel_tile)
        if head.is_frozen:
            return (d_hidden_SND, None), None
        if head.parts:
            hidden, d_logits = (
                x.reshape(head.parts, -1, *x.shape[1:]) for x in (hidden_ND, d_logits_NSW)
            )
            d_tiles = jnp.einsum(f"nkd,nksv->n{head.axes}", hidden, d_logits)
            mesh = jax.typeof(kernel).sharding.mesh
            d_tile = axes.ring_sum(d_tiles, head.spec(axes.SHARDS), mesh)
            return (d_hidden_SND, head.add(d_kernel, d_tile, index)), None
        # Hidden states first: with the logits first, XLA's CPU backend would transpose the logits. It multiplies
        # bfloat16 as matrices alone: a product of three axes is unimplemented there.
        d_tile_DM = dot("nd,nm->dm", hidden_ND, d_logits_NSW.reshape(len(hidden_ND), -1))
        d_tile = d_tile_DM.reshape(-1, *d_logits_NSW.shape[1:])
        d_tile = jnp.einsum(f"dsv->{head.axes}", d_tile)
        d_kernel = head.add(d_kernel, head.constrain(d_tile, axes.SHARDS), index)
        return (d_hidden_SND, d_kernel), None

    d_kernel = None if head.is_frozen else head.constrain(jnp.zeros(shards.shape), axes.SHARDS)
    zeros = jnp.zeros((head.shards, *hidden_ND.shape)), d_kernel
    (d_hidden_SND, d_kernel), _ = head.scan(visit, zeros, shards)
    d_hidden_ND = d_hidden_SND.sum(axis=0).astype(hidden_ND.dtype)
    return d_hidden_ND, None if head.is_frozen else head.join(d_kernel), None, None


_tiled.defvjp(_tiled_forward, _tiled_backward)

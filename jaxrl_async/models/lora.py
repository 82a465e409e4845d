"""Low-rank adapters: the trained parameters of a model whose own weights are frozen.

    y = x W + (α / r) (x A) B

Learner and engine run this one layer, in one order and dtype. A starts at random and B at zero, so that the first
policy is the base model's, bit for bit.

Source: LoRA: Low-Rank Adaptation of Large Language Models (Hu et al., arXiv 2106.09685). Independent of files, meshes
and losses.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxrl_async.models.state import by_path, mapped, of_paths

PRODUCT = "product"  # of a layer with copies of its kernel
LAYERS = {  # PEFT's name of a target → our layer within a block
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
}


@dataclasses.dataclass(frozen=True)
class LoRA:
    """The adapters of a model. Hashable, as a part of ModelConfig."""

    rank: int  # r ≥ 1
    alpha: float  # α > 0
    targets: tuple[str, ...]  # names of LAYERS, in its order
    base_dtype: str = "float32"  # of the frozen kernels, biases and embeddings, as they are stored

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank must be ≥ 1, got {self.rank}")
        if not self.targets or set(self.targets) - LAYERS.keys():
            raise ValueError(f"targets must be some of {list(LAYERS)}, got {self.targets}")

    @property
    def scale(self) -> float:
        """α / r"""
        return self.alpha / self.rank


class Adapter(nnx.Param):
    """A trained parameter beside frozen ones: lora_a [num_in, r] or lora_b [r, num_out], of each layer; float32."""


class AdaptedLinear(nnx.Linear):
    """A linear layer that may have an adapter."""

    lora_a = lora_b = None

    def adapt(self, scale: float, rank: int, rngs: nnx.Rngs) -> None:
        """Adds an adapter: A is uniform in ±1/√num_in, as PEFT's, and B zero."""
        bound = self.in_features**-0.5
        shape = self.in_features, rank
        self.lora_scale = scale
        self.lora_a = Adapter(jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound))
        self.lora_b = Adapter(jnp.zeros((rank, self.out_features), jnp.float32))

    def __call__(self, x):
        y = self._of_copies(x) if self.kernel[...].ndim == 3 else super().__call__(x)
        if self.lora_a is None:
            return y
        a, b = (kernel[...].astype(self.dtype) for kernel in (self.lora_a, self.lora_b))
        return y + self.lora_scale * ((x.astype(self.dtype) @ a) @ b)

    def _of_copies(self, x_ND):
        """With a copy of the kernel for each device, of `axes.copies`, which multiplies its tokens."""
        kernel = self.kernel[...]
        parts = x_ND.astype(self.dtype).reshape(len(kernel), -1, x_ND.shape[-1])
        y = checkpoint_name(jnp.einsum("nkd,ndf->nkf", parts, kernel), PRODUCT)
        y = y.reshape(len(x_ND), -1)
        return y if self.bias is None else y + self.bias[...].astype(self.dtype)[None]


def split(params: nnx.State) -> tuple[nnx.State, nnx.State]:
    """Parameters → (adapters, the frozen rest)."""
    found = by_path(params)
    adapters = {path: leaf for path, leaf in found.items() if isinstance(leaf, Adapter)}
    return of_paths(adapters), of_paths({p: v for p, v in found.items() if p not in adapters})


def join(adapters: nnx.State, base: nnx.State) -> nnx.State:
    """The inverse of `split`, by reference."""
    return of_paths(by_path(base) | by_path(adapters))


def merged(params: nnx.State, lora: LoRA) -> nnx.State:
    """Parameters without adapters that compute the same: W + (α / r) A B, float32.

    Args:
      params: base and adapters, layers stacked; on the host or on devices.
    """
    adapters, base = split(params)
    of = {path: leaf.get_value() for path, leaf in by_path(adapters).items()}

    def merge(path, param):
        own = tuple(path[:-1])
        if path[-1] != "kernel" or (*own, "lora_a") not in of:
            return param
        product = jnp.einsum(
            "lir,lro->lio", of[*own, "lora_a"], of[*own, "lora_b"], precision="highest"
        )
        return param.replace(param.get_value().astype(jnp.float32) + lora.scale * product)

    return mapped(merge, base)

"""Blocks: n groups of consecutive layers, of which each step trains one, in turn (`learner.blocks` = n).

    the step that trains version v trains block v mod n;    layer l of L is in block ⌊l · n / L⌋

The embedding is in the first block, a tied one too; final norm and head are in the last. An adapter is in its layer's.
A step changes the parameters and moments of its block, and no bit of the others.

After ParaBlock (Wang, Cao, Chen; arXiv 2511.19959), without its federated correction. Independent of losses and meshes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def check(num_blocks: int, num_layers: int) -> None:
    """Refuses blocks without a layer.

    Raises:
      ValueError: num_blocks is not in [1, num_layers].
    """
    if not 1 <= num_blocks <= num_layers:
        raise ValueError(
            f"learner.blocks must be in [1, {num_layers}], the layers of the model, got {num_blocks}"
        )


class Blocks:
    """The blocks of one model, by the number of updates made so far, which may be traced: one program serves all."""

    def __init__(self, num_blocks: int, num_layers: int, num_minibatches: int):
        """Raises ValueError as `check`; num_minibatches is the number of updates of a step, all of one block."""
        check(num_blocks, num_layers)
        self._num_blocks, self._num_minibatches = num_blocks, num_minibatches
        self._of_layer = np.arange(num_layers) * num_blocks // num_layers  # [L]

    def trained(self, params: nnx.State, updates: jax.Array) -> nnx.State:
        """What the next update trains.

        Args:
          params: all parameters or adapters; layers are stacked on a leading axis.
          updates: int32 [], updates applied so far.

        Returns:
          The same tree of bool, [L, 1, …] for the layers and [] for the rest.
        """
        block = updates // self._num_minibatches % self._num_blocks

        def of(path, param):
            if path[0] == "blocks":
                ones = (1,) * (len(param.shape) - 1)
                return param.replace((self._of_layer == block).reshape(-1, *ones))
            return param.replace(block == (0 if path[0] == "embedding" else self._num_blocks - 1))

        return nnx.map_state(of, params)

    def num_own(self, updates: jax.Array) -> jax.Array:
        """The updates that the next update's block has had before, int32 []: the count of Adam's bias correction."""
        per_cycle = self._num_minibatches * self._num_blocks
        return updates // per_cycle * self._num_minibatches + updates % self._num_minibatches


def with_adam_count(opt_state: optax.OptState, count: jax.Array) -> optax.OptState:
    """An optimizer's state whose Adam has counted as many updates."""

    def is_adam(state: Any) -> bool:
        return isinstance(state, optax.ScaleByAdamState)

    return jax.tree.map(
        lambda state: state._replace(count=count) if is_adam(state) else state,
        opt_state,
        is_leaf=is_adam,
    )


def select(
    optimizer: optax.GradientTransformation,
    trained: nnx.State,
    moved: optax.OptState,
    kept: optax.OptState,
) -> optax.OptState:
    """The moments of `moved` where `trained`, else those of `kept`; everything else, as the counts, of `moved`."""
    chosen = optax.tree_utils.tree_map_params(
        optimizer, lambda _, own: own, moved, trained, transform_non_params=lambda _: True
    )
    return jax.tree.map(jnp.where, chosen, moved, kept)

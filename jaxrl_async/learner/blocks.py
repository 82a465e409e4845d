"""Blocks: n groups of consecutive layers, of which each step trains one, in turn (`learner.blocks` = n).

    the step that starts from version v trains block v mod n;    layer l of L is in block ⌊l · n / L⌋

The embedding is in the first block, a tied one too; final norm and head are in the last. An adapter is in its layer's.
A step has the gradient of its block alone, and changes its parameters and moments and no bit of the others.

After ParaBlock (Wang, Cao, Chen; arXiv 2511.19959), without its federated correction. Independent of losses and meshes.
"""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jaxrl_async.learner.optimizer import map_state
from jaxrl_async.models.state import mapped

WHOLE = slice(None)
_NOTHING = slice(0, 0)


def check(num_blocks: int, num_layers: int) -> None:
    """Refuses blocks without a layer. Raises ValueError: num_blocks is not in [1, num_layers]."""
    if not 1 <= num_blocks <= num_layers:
        raise ValueError(
            f"learner.blocks must be in [1, {num_layers}], the layers of the model, got {num_blocks}"
        )


class Blocks:
    """The blocks of one model. In trees of parameters, adapters or gradients, layers are stacked on a leading axis."""

    def __init__(self, num_blocks: int, num_layers: int, num_minibatches: int):
        """Raises ValueError as `check`; num_minibatches is the number of updates of a step, all of one block."""
        check(num_blocks, num_layers)
        self.num = num_blocks
        self._num_minibatches = num_minibatches
        of_layer = np.arange(num_layers) * num_blocks // num_layers  # [L]
        self._ends = np.searchsorted(of_layer, np.arange(num_blocks + 1)).tolist()

    def at(self, policy_version: int) -> int:
        """The block of the step that starts from this version."""
        return policy_version % self.num

    def layers(self, block: int) -> tuple[int, int] | None:
        """Its layers, from the first to before the second; None where one block has all."""
        return None if self.num == 1 else (self._ends[block], self._ends[block + 1])

    def cuts(self, params: nnx.State, block: int) -> nnx.State:
        """Of each array, the part along its leading axis that is the block's, as a slice: none, some or all of it."""

        def of(path, param):
            if self.num == 1:
                return param.replace(WHOLE)
            if path[0] == "blocks":
                return param.replace(slice(*self.layers(block)))
            own = block == (0 if path[0] == "embedding" else self.num - 1)
            return param.replace(WHOLE if own else _NOTHING)

        return mapped(of, params)

    def num_own(self, updates: jax.Array) -> jax.Array:
        """The updates that the next update's block has had before, int32 []: the count of Adam's bias correction."""
        per_cycle = self._num_minibatches * self.num
        return updates // per_cycle * self._num_minibatches + updates % self._num_minibatches


def own(tree: Any, cuts: Any) -> Any:
    """The parts of arrays that `cuts` tells. A part may be [0, …]; one that is all is the array itself."""
    return jax.tree.map(lambda leaf, cut: leaf if cut == WHOLE else leaf[cut], tree, cuts)


def put(tree: Any, parts: Any, cuts: Any) -> Any:
    """The arrays with these parts, of `own`, in their places."""

    def one(leaf, part, cut):
        if cut == WHOLE:
            return part
        return jax.lax.dynamic_update_slice_in_dim(leaf, part, cut.start, 0) if part.size else leaf

    return jax.tree.map(one, tree, parts, cuts)


def constant(params: nnx.State, cuts: nnx.State) -> nnx.State:
    """The same parameters; those of which a block has nothing get no gradient."""
    return jax.tree.map(
        lambda leaf, cut: jax.lax.stop_gradient(leaf) if cut == _NOTHING else leaf, params, cuts
    )


def cuts_of_state(
    optimizer: optax.GradientTransformation, opt_state: optax.OptState, cuts: nnx.State
) -> optax.OptState:
    """`cuts` of an optimizer's state: of its moments those of the parameters, of the rest, as the counts, all."""
    return map_state(optimizer, lambda _, cut: cut, opt_state, cuts, otherwise=lambda _: WHOLE)


def with_adam_count(opt_state: optax.OptState, count: jax.Array) -> optax.OptState:
    """An optimizer's state whose Adam has counted as many updates."""

    def is_adam(state: Any) -> bool:
        return isinstance(state, optax.ScaleByAdamState)

    return jax.tree.map(
        lambda state: state._replace(count=count) if is_adam(state) else state,
        opt_state,
        is_leaf=is_adam,
    )

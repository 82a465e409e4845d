"""An nnx.State by its paths.

The walk of `nnx.to_flat_state`, and of what calls it (`map_state`, `split_state`, `merge_state`), leaves a cycle behind
in which the arrays live until the garbage collector comes: whole copies of a model's weights, on its devices. These
leave nothing.
"""

from collections.abc import Callable

import jax
from flax import nnx

Path = tuple[str, ...]


def by_path(state: nnx.State) -> dict[Path, nnx.Variable]:
    """The variables by their paths, in the order of the tree's leaves."""
    leaves = jax.tree.leaves_with_path(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return {tuple(key.key for key in path): variable for path, variable in leaves}


def mapped(function: Callable[[Path, nnx.Variable], nnx.Variable], state: nnx.State) -> nnx.State:
    """The state with function(path, variable) in each variable's place."""
    return of_paths({path: function(path, param) for path, param in by_path(state).items()})


def of_paths(variables: dict[Path, nnx.Variable]) -> nnx.State:
    """The inverse of `by_path`."""
    return nnx.from_flat_state(variables)

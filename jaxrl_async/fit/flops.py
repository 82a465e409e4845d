"""Counts a traced program's floating-point operations in products, and those of the model itself."""

import math

import jax

from jaxrl_async.models import gpu_decode, gpu_experts, transformer
from jaxrl_async.models.transformer import ModelConfig


def of_jaxpr(jaxpr, *, kernels_alone: bool = False, grouped_share: float = 1.0) -> float:
    """FLOPs of all matrix products, on all devices together.

    Loops count with their length; one whose length depends on the data counts once. Of branches the dearest counts.
    Kernels count with the blocks that the causal mask leaves: about half of their grid. What else a mask lets them
    skip depends on the data.

    Args:
      jaxpr: a jax.extend.core.Jaxpr or ClosedJaxpr.
      kernels_alone: of the products within custom kernels.
      grouped_share: of the rows of grouped products, those that are in a group. Of experts that a mesh divides a device
        has some, and gets all rows.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_of_equation(equation, kernels_alone, grouped_share) for equation in jaxpr.eqns)


def _of_equation(equation, kernels_alone, grouped_share) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        if kernels_alone:
            return 0.0
        left, right = (variable.aval.shape for variable in equation.invars)
        (contracted, _), (batch, _) = params["dimension_numbers"]
        kept = math.prod(right) // math.prod(left[i] for i in (*contracted, *batch))
        return 2.0 * math.prod(left) * kept
    if name == "pallas_call" and _is_grouped(params):
        return grouped_share * params["cost_estimate"].flops
    if name == "pallas_call" and params["name"] == gpu_decode.NAME:
        return float(params["cost_estimate"].flops)
    if params.get("name") == "paged_attention":  # of JAX, to half of the pages in its list
        queries, pages, _, _, listed = (variable.aval.shape for variable in equation.invars[:5])
        return 2.0 * math.prod(queries) * listed[1] * pages[2]
    if name == "mpmd_map":
        return _of_gpu_kernel(equation)
    inner = [
        value
        for given in params.values()
        for value in (given if isinstance(given, tuple | list) else [given])
        if hasattr(value, "eqns") or hasattr(value, "jaxpr")
    ]
    if not inner:
        return 0.0
    alone = kernels_alone and name != "pallas_call"
    if name == "shard_map":
        grouped_share = 1 / params["mesh"].shape.get("expert", 1)
    counts = [of_jaxpr(v, kernels_alone=alone, grouped_share=grouped_share) for v in inner]
    if name == "cond":
        return max(counts)
    times = 1.0
    if name == "scan":
        times = params["length"]
    elif name == "shard_map":  # The inner program is that of one device.
        times = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    elif name == "pallas_call":
        times = _blocks_of_kernel(params)
    return times * sum(counts)


def _is_grouped(params) -> bool:
    """Whether it is Megablox's kernel, whose number of blocks depends on the rows of each group, or that of a GPU."""
    if params["name"] == gpu_experts.NAME:
        return True
    has_fixed_grid = all(isinstance(n, int) for n in params["grid_mapping"].grid)
    return not has_fixed_grid and not (params["name"] or "").startswith("splash")


def _blocks_of_kernel(params) -> float:
    """Steps of a kernel's grid that compute something. Those of splash are pairs of blocks of queries and keys."""
    grid = [n for n in params["grid_mapping"].grid if isinstance(n, int)]
    blocks = float(math.prod(grid))
    name = params["name"] or ""
    if not name.startswith("splash"):
        return blocks
    # Forwards and for dq the grid ends in (queries, keys), for dk and dv in (keys, heads, queries). A device of
    # several may have a part of the queries: of n · n pairs all devices together compute those with key ≤ query.
    n = max(grid[-1], grid[-3] if "dkv" in name else grid[-2])
    return blocks * (n + 1) / (2 * n)


def _of_gpu_kernel(equation) -> float:
    """Of attention by tokamax's kernel for Hopper, which computes the pairs with key ≤ query."""
    found, given = (
        [v.aval.shape for v in variables if len(v.aval.shape) == 4]
        for variables in (equation.outvars, equation.invars)
    )
    B, T, H, C = given[0]  # queries; keys are the next
    with_residuals = len(equation.outvars) == 3
    # Forwards two products, three for the gradient of queries, four for those of keys and values.
    products = 2 if with_residuals else 2 + len(found)
    return products * 2.0 * B * H * T * given[1][1] * C / 2


def bytes_of_attention(
    config: ModelConfig, num_rows: int, row_tokens: int, *, backward: bool
) -> float:
    """What attention reads and writes at least, on all devices together: each array once forwards and once backwards.

    Queries, keys and values, the result; then these, its gradient, and theirs.
    """
    c = config
    heads = (6 if backward else 2) * (c.num_heads + c.num_kv_heads)
    number = 2 if c.dtype == "bfloat16" else 4
    return float(c.num_layers * num_rows * row_tokens * heads * c.head_dim * number)


def of_model(
    config: ModelConfig, num_rows: int, row_tokens: int, *, backward: bool, logits: bool = True
) -> float:
    """FLOPs that the model needs for full rows, without recomputation, on all devices together.

    Twice the matrices' size for each token, and as much again, twice, for the backward pass, or once where they are
    frozen beside adapters; causal attention of each token to half of its row, or to its window. PaLM (Chowdhery et al.,
    arXiv 2204.02311), appendix B, with the causal half. The projection onto the vocabulary counts with `logits`.
    """
    c = config
    matrices = used_by_a_token(c)
    matrices += logits * c.model_dim * c.vocab_size
    windows = c.windows or (0,) * c.num_layers
    # Twice the keys of a token: all before it, T / 2, or w of them once there are as many.
    keys = sum(2 * w - w * w / row_tokens if 0 < w < row_tokens else row_tokens for w in windows)
    attention = c.num_heads * c.head_dim * keys
    adapters = size(transformer.abstract_trained(c)) if c.lora else 0
    products = matrices + adapters + attention
    if backward:
        products += (1 if c.lora else 2) * matrices + 2 * (adapters + attention)
    return num_rows * row_tokens * 2.0 * products


def used_by_a_token(config: ModelConfig) -> int:
    """How many numbers the matrices have that compute a token: of experts the router's, and K experts'."""
    c, sparse = config, len(config.expert_layers)
    mlps = sparse * (c.num_experts + 3 * c.experts_per_token * c.expert_mlp_dim)
    mlps += (c.num_layers - sparse) * 3 * c.mlp_dim
    return c.model_dim * (c.num_layers * 2 * c.head_dim * (c.num_heads + c.num_kv_heads) + mlps)


def size(params) -> int:
    """How many numbers parameters, or their shapes, have."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))

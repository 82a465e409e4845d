"""Grouped products of experts on GPUs, by two Pallas kernels in Triton: rows times the kernel of their group, and the
gradient of the kernels. A number is written by one program, in one order of sums: the bits are the same each time.

Source: MegaBlocks: Efficient Sparse Training with Mixture-of-Experts (Gale et al., arXiv 2211.15841).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas
from jax.experimental.pallas import triton

NAME = "grouped"  # of the kernels


class Tiles(NamedTuple):
    """How a kernel is cut and compiled: sides of the tile that a program writes, and of what it sums at a time."""

    rows: int
    columns: int
    summed: int
    num_warps: int
    num_stages: int


PRODUCT = Tiles(128, 128, 64, 8, 3)
GRADIENT = Tiles(128, 128, 64, 8, 3)


def product(x_RD, kernel_EDF, sizes_E, transposed=False, tiles: Tiles = PRODUCT):
    """As `experts.grouped_dot`, of `transposed` kernels [E, F, D]; any number of rows may follow the last group."""
    R, E, F = len(x_RD), len(sizes_E), kernel_EDF.shape[1 if transposed else 2]
    x_RD, kernel_EDF = _in_16s(x_RD, 1), _in_16s(kernel_EDF, 1, 2)
    columns, summed = kernel_EDF.shape[1:] if transposed else kernel_EDF.shape[:0:-1]
    tiles = tiles._replace(
        columns=_side(tiles.columns, columns), summed=_side(tiles.summed, summed)
    )
    # Every group begins a tile; those after the last are empty.
    tiles_E = pallas.cdiv(sizes_E, tiles.rows)
    number, last_E = jnp.arange(pallas.cdiv(R, tiles.rows) + E), jnp.cumsum(tiles_E)
    expert = jnp.searchsorted(last_E, number, side="right", method="compare_all").astype(jnp.int32)
    used, expert = expert < E, jnp.minimum(expert, E - 1)
    end_E = jnp.cumsum(sizes_E)
    first = (end_E - sizes_E)[expert] + (number - (last_E - tiles_E)[expert]) * tiles.rows
    end = jnp.where(used, end_E[expert], 0)
    of_tile = pallas.BlockSpec((None,), lambda f, i: (i,))

    def kernel(expert, first, end, x, kernel, y):
        first, end = first[...], end[...]
        row = first + jnp.arange(tiles.rows)
        rows, written = pallas.ds(first, tiles.rows), (row < end)[:, None]
        own = pallas.ds(pallas.program_id(0) * tiles.columns, tiles.columns)

        def add(k, total):
            part = pallas.ds(k * tiles.summed, tiles.summed)
            x_RK = triton.load(x.at[rows, part], mask=written, other=0.0)
            if transposed:
                return total + _dot(x_RK, kernel[expert[...], own, part].T)
            return total + _dot(x_RK, kernel[expert[...], part, own])

        num = (first < end).astype(jnp.int32) * (summed // tiles.summed)
        zeros = jnp.zeros((tiles.rows, tiles.columns), jnp.float32)
        total = jax.lax.fori_loop(0, num, add, zeros)
        triton.store(y.at[rows, own], total.astype(y.dtype), mask=written)

    out = jax.ShapeDtypeStruct((R, columns), x_RD.dtype)
    grid = columns // tiles.columns, len(number)
    found = _call(kernel, tiles, grid, of_tile, _whole(out), out)(
        expert, first, end, x_RD, kernel_EDF
    )
    # What is after the last group is unwritten.
    return jnp.where((jnp.arange(R) < end_E[-1])[:, None], found[:, :F], 0)


def kernel_gradient(x_RD, g_RF, sizes_E, tiles: Tiles = GRADIENT):
    """Σ over the rows of group e of xᵀ g: [E, D, F], in the dtype of x, of sums in float32."""
    D, F = x_RD.shape[1], g_RF.shape[1]
    x_RD, g_RF = _in_16s(x_RD, 1), _in_16s(g_RF, 1)
    sides = x_RD.shape[1], g_RF.shape[1]
    tiles = tiles._replace(rows=_side(tiles.rows, sides[0]), columns=_side(tiles.columns, sides[1]))
    end_E = jnp.cumsum(sizes_E)
    of_group = pallas.BlockSpec((None,), lambda f, d, e: (e,))

    def kernel(first, end, x, g, found):
        first, end = first[...], end[...]
        own_x = pallas.ds(pallas.program_id(1) * tiles.rows, tiles.rows)
        own_g = pallas.ds(pallas.program_id(0) * tiles.columns, tiles.columns)

        def add(k, total):
            start = first + k * tiles.summed
            rows, read = pallas.ds(start, tiles.summed), (start + jnp.arange(tiles.summed)) < end
            load = functools.partial(triton.load, mask=read[:, None], other=0.0)
            return total + _dot(load(x.at[rows, own_x]).T, load(g.at[rows, own_g]))

        zeros = jnp.zeros(found.shape, jnp.float32)
        num = pallas.cdiv(end - first, tiles.summed)
        found[...] = jax.lax.fori_loop(0, num, add, zeros).astype(found.dtype)

    out = jax.ShapeDtypeStruct((len(sizes_E), *sides), x_RD.dtype)
    own = pallas.BlockSpec((None, tiles.rows, tiles.columns), lambda f, d, e: (e, d, f))
    grid = sides[1] // tiles.columns, sides[0] // tiles.rows, len(sizes_E)
    found = _call(kernel, tiles, grid, of_group, own, out)(end_E - sizes_E, end_E, x_RD, g_RF)
    return found[:, :D, :F]


def _call(kernel, tiles, grid, of_program, of_out, out):
    """A kernel that takes integers, one a program, then two whole arrays, of which the first is rows [R, ·]."""

    def call(*arrays):
        *integers, x, y = arrays
        return pallas.pallas_call(
            kernel,
            out_shape=out,
            grid=grid,
            in_specs=(*[of_program] * len(integers), _whole(x), _whole(y)),
            out_specs=of_out,
            compiler_params=triton.CompilerParams(
                num_warps=tiles.num_warps, num_stages=tiles.num_stages
            ),
            # Of all rows, whatever the sizes of the groups.
            cost_estimate=pallas.CostEstimate(
                flops=2 * x.size * out.shape[-1],
                transcendentals=0,
                bytes_accessed=sum(a.size * a.dtype.itemsize for a in (x, y, out)),
            ),
            name=NAME,
        )(*arrays)

    return call


def _whole(x):
    return pallas.BlockSpec(x.shape, lambda *_: (0,) * len(x.shape))


def _in_16s(x, *axes):
    padding = [(0, -x.shape[axis] % 16 if axis in axes else 0) for axis in range(x.ndim)]
    return jnp.pad(x, padding)


def _side(most: int, side: int) -> int:
    """The largest power of 2 that divides a side, up to a bound."""
    return min(most, side & -side)


def _dot(a, b):
    presets = jax.lax.DotAlgorithmPreset
    half = a.dtype == jnp.bfloat16
    precision = presets.BF16_BF16_F32 if half else presets.F32_F32_F32
    return jax.lax.dot(a, b, precision=precision, preferred_element_type=jnp.float32)

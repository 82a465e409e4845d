import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import compilers
from fixtures.models import tiny
from flax import nnx
from jax.experimental import pallas
from jax.sharding import PartitionSpec

from jaxrl_async.fit import programs
from jaxrl_async.fit.targets import target_of
from jaxrl_async.models import axes, experts, gpu_experts, lora, sharding, transformer

CONFIG = tiny(family="qwen3_moe", num_experts=8, experts_per_token=2, expert_mlp_dim=12)
B, T, D = 8, 6, CONFIG.model_dim
UNKNOWN = 255

_rng = np.random.default_rng(0)
X_ND = _rng.normal(size=(B * T, D)).astype(np.float32)
# Two sequences and padding in each row; the last row is padding alone.
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0]] * (B - 1) + [[0] * T], np.int32)
COUNTS = SEGMENTS > 0


def _module(config=CONFIG):
    module = experts.Experts(config, jax.nn.silu, rngs=nnx.Rngs(0))
    # At their first scale all experts are about as probable.
    return nnx.merge(nnx.graphdef(module), jax.tree.map(lambda x: 2 * x, nnx.state(module)))


def _given(routes=None):
    return experts.Given(COUNTS, SEGMENTS, routes)


def _loop(module, x_ND, counts_N, routes_NK=None):
    """Every expert computes every token; weights choose."""
    probs_NE = jax.nn.softmax(x_ND @ module.router_kernel[...])
    used_NK = jnp.argsort(-probs_NE, axis=1)[:, : module.config.experts_per_token]
    if routes_NK is not None:
        used_NK = jnp.where(routes_NK == UNKNOWN, used_NK, routes_NK)
    weights_NK = jnp.take_along_axis(probs_NE, used_NK, axis=1)
    if module.config.norm_topk:
        weights_NK /= weights_NK.sum(axis=1, keepdims=True)
    y_ND = jnp.zeros_like(x_ND)
    for e in range(module.config.num_experts):
        gate, up, down = (
            k[...][e] for k in (module.gate_kernel, module.up_kernel, module.down_kernel)
        )
        own_N = jnp.sum(jnp.where(used_NK == e, weights_NK, 0), axis=1) * counts_N
        y_ND += own_N[:, None] * ((jax.nn.silu(x_ND @ gate) * (x_ND @ up)) @ down)
    return y_ND


def _gradients(outputs_of, module, x_ND):
    """Of a sum that weighs each output differently."""
    graphdef, params = nnx.split(module)
    weights = np.random.default_rng(1).normal(size=X_ND.shape).astype(np.float32)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def gradient(params, x_ND):
        y_ND = outputs_of(nnx.merge(graphdef, params), x_ND)
        return jnp.sum(weights * y_ND), y_ND

    (_, y_ND), grads = gradient(params, x_ND)
    return y_ND, *grads


def _assert_close(found, expected, atol):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=atol * max(1, np.abs(np.asarray(b)).max()))


@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize("routes", [None, "given"])
def test_experts_and_their_gradients_equal_a_loop_over_all_experts(norm_topk, routes):
    module = _module(dataclasses.replace(CONFIG, norm_topk=norm_topk))
    if routes:  # Of half of the tokens they are not known.
        routes = _rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (B * T, 1)), axis=1)[:, :2]
        routes[::2] = UNKNOWN
    found = _gradients(
        lambda m, x: m(x, _given(None if routes is None else routes.reshape(B, T, 2)), (B, T))[0],
        module,
        X_ND,
    )
    expected = _gradients(lambda m, x: _loop(m, x, COUNTS.reshape(-1), routes), module, X_ND)
    _assert_close(found, expected, 1e-6)
    assert np.abs(np.asarray(found[1]["router_kernel"][...])).max() > 1e-3  # gradients reach it


def test_padding_goes_to_no_expert_whatever_it_holds():
    module, far = _module(), X_ND.copy()
    far[~COUNTS.reshape(-1)] = 1e30
    call = jax.jit(lambda x_ND: module(x_ND, _given(), (B, T)))
    y, routing = call(X_ND)
    of_far, of_far_routing = call(far)
    np.testing.assert_array_equal(y, of_far)
    for a, b in zip(routing, of_far_routing, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.asarray(y)[~COUNTS.reshape(-1)], 0)
    assert (np.asarray(routing.routes)[~COUNTS] == UNKNOWN).all()
    assert (np.asarray(routing.routes)[COUNTS] < 8).all()


@pytest.mark.parametrize(
    "sizes", [(0, 9, 0, 1, 22), (32, 0, 0, 0, 0), (0, 0, 0, 0, 0), (1, 1, 1, 1, 1)]
)
@pytest.mark.parametrize("block", [8, pytest.param(16, marks=pytest.mark.long)])
def test_a_grouped_product_equals_one_product_a_group(monkeypatch, sizes, block):
    x, g = (_rng.normal(size=(32 + block, n)).astype(np.float32) for n in (4, 3))
    kernel = jnp.asarray(_rng.normal(size=(5, 4, 3)), jnp.float32)
    y, backward = jax.vjp(
        lambda x, kernel: experts.grouped_dot(block, x, kernel, jnp.array(sizes)),
        jnp.asarray(x),
        kernel,
    )
    group = np.repeat(np.arange(6), [*sizes, len(x) - sum(sizes)])
    own = np.concatenate([kernel, np.zeros((1, 4, 3), np.float32)])[group]
    np.testing.assert_allclose(y, np.einsum("rd,rdf->rf", x, own), atol=1e-5)
    d_x, d_kernel = backward(g)
    np.testing.assert_allclose(d_x, np.einsum("rf,rdf->rd", g, own), atol=1e-5)
    one_hot = (group[:, None] == np.arange(5)[None]).astype(np.float32)
    np.testing.assert_allclose(d_kernel, np.einsum("re,rd,rf->edf", one_hot, x, g), atol=1e-5)
    tiled = experts._by_megablox(x, kernel, jnp.array(sizes), interpret=True)  # of TPUs
    np.testing.assert_allclose(tiled, y, atol=1e-5)
    tiled = experts._by_megablox(g, kernel, jnp.array(sizes), transposed=True, interpret=True)
    np.testing.assert_allclose(tiled, d_x, atol=1e-5)
    tiled = experts._kernel_gradient_by_megablox(x, g, jnp.array(sizes), interpret=True)
    np.testing.assert_allclose(tiled, d_kernel, atol=1e-5)
    call = functools.partial(pallas.pallas_call, interpret=True)
    monkeypatch.setattr(pallas, "pallas_call", call)
    tiled = gpu_experts.product(x, kernel, jnp.array(sizes))  # of GPUs
    np.testing.assert_allclose(tiled, y, atol=1e-5)
    tiled = gpu_experts.product(g, kernel, jnp.array(sizes), transposed=True)
    np.testing.assert_allclose(tiled, d_x, atol=1e-5)
    tiled = gpu_experts.kernel_gradient(x, g, jnp.array(sizes))
    np.testing.assert_allclose(tiled, d_kernel, atol=1e-5)
    large = experts._by_large_blocks(x[:32], kernel, jnp.array(sizes))  # of GPUs without a name
    np.testing.assert_array_equal(large, y[:32])
    large = experts._kernel_gradient_by_large_blocks(x[:32], g[:32], jnp.array(sizes))
    np.testing.assert_allclose(large, d_kernel, atol=1e-5)


def _squares(x, kernel, sizes):
    return jnp.sum(jnp.square(experts.grouped_dot(128, x, kernel, sizes).astype(jnp.float32)))


@pytest.mark.optimised
@compilers.needs("tpu")
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.long)], ids=["bf16", "f32"]
)
def test_the_tpu_compiler_gets_a_kernel_for_each_grouped_product(dtype):
    """Of the largest tiles. Nothing is executed."""
    D, F, E = 2048, 1024, 4
    device = programs.devices_of(target_of("v5e-4"))[0]
    where = jax.sharding.SingleDeviceSharding(device)
    x, kernel, sizes = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=where)
        for shape, dtype in [((500, D), dtype), ((E, D, F), dtype), ((E,), jnp.int32)]
    )

    compiled = jax.jit(jax.grad(_squares, (0, 1))).lower(x, kernel, sizes).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
def test_triton_takes_a_kernel_for_each_grouped_product_without_a_card(dtype):
    x, kernel = (jax.ShapeDtypeStruct(s, dtype) for s in ((500, 96), (4, 96, 160)))
    card = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=card)):
        sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
        traced = jax.jit(jax.grad(_squares, (0, 1))).trace(x, kernel, sizes)
        program = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("__gpu$xla.gpu.triton") == 3


@pytest.mark.accelerator
@pytest.mark.optimised
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
def test_grouped_products_on_an_accelerator_equal_one_product_a_group(dtype):
    sizes = [0, 129, 1, 640, 0, 254]
    shapes = (1100, 512), (6, 512, 384), (1100, 384)
    x, kernel, g = (jnp.asarray(_rng.normal(size=shape), dtype) for shape in shapes)
    y, backward = jax.vjp(
        lambda x, kernel: experts.grouped_dot(64, x, kernel, jnp.array(sizes)), x, kernel
    )
    found = y, *backward(g)
    x, kernel, g = (np.asarray(a, np.float64) for a in (x, kernel, g))
    expected = [np.zeros(a.shape) for a in found]
    for e, rows in enumerate(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])):
        expected[0][rows], expected[1][rows] = x[rows] @ kernel[e], g[rows] @ kernel[e].T
        expected[2][e] = x[rows].T @ g[rows]
    for a, b in zip(found, expected, strict=True):
        bound = 0.01 if dtype == jnp.bfloat16 else 1e-5
        assert np.abs(np.asarray(a, np.float64) - b).max() < bound * np.abs(b).max()


def test_what_the_routers_did_by_hand():
    # Two experts of four, so even uses are 1/4 each. A router of the identity on x = (3, 2, 1, 0) takes 0 and 1.
    config = dataclasses.replace(CONFIG, num_experts=4, model_dim=4)
    module = _module(config)
    module.router_kernel = nnx.Param(jnp.eye(4))
    x = np.tile(np.array([3.0, 2.0, 1.0, 0.0], np.float32), (3, 1))
    routes = np.array([[[1, 0], [2, 3], [0, 1]]], np.uint8)
    segments = np.array([[1, 1, 0]], np.int32)
    call = jax.jit(lambda given: module(x, given, (1, 3))[1])
    routing = call(experts.Given(segments > 0, segments, routes))
    np.testing.assert_array_equal(routing.routes, [[[0, 1], [0, 1], [UNKNOWN] * 2]])
    np.testing.assert_array_equal(routing.differs, [[0, 1, 0]])  # as sets
    p = np.exp([3.0, 2, 1, 0]) / np.exp([3.0, 2, 1, 0]).sum()
    entropy = -(p * np.log(p)).sum()
    np.testing.assert_allclose(routing.entropy, [[entropy, entropy, 0]], rtol=1e-6)
    assert routing.load == 1  # each expert has one token
    np.testing.assert_allclose(routing.balance, [[1, 1, 0]], rtol=1e-6)  # uses are even
    routing = call(experts.Given(segments > 0, segments))
    assert routing.load == 2
    uneven = 4 * (p[0] + p[1]) / 2
    np.testing.assert_allclose(routing.balance, [[uneven, uneven, 0]], rtol=1e-6)


@pytest.mark.parametrize(
    "shape",
    [
        dict(expert=8),
        dict(expert=2, context=2),
        dict(expert=2, fsdp=2, tensor=2),
        pytest.param(dict(expert=4), marks=pytest.mark.long),
        pytest.param(dict(expert=2), marks=pytest.mark.long),
        pytest.param(dict(data=2, tensor=2), marks=pytest.mark.long),
    ],
)
def test_experts_divided_over_a_mesh_compute_the_same(shape):
    module = _module()
    expected = _gradients(lambda m, x: m(x, _given(), (B, T))[0], module, X_ND)
    sizes = dict(data=1, fsdp=1, tensor=1) | shape
    mesh = sharding.make_mesh(**sizes, devices=jax.devices()[: np.prod(list(shape.values()))])

    def on_mesh(path, param):
        spec = PartitionSpec(*axes.of_layer(f"experts.{path[-1]}"))
        return param.replace(
            jax.device_put(param.get_value(), jax.sharding.NamedSharding(mesh, spec))
        )

    divided = nnx.merge(nnx.graphdef(module), nnx.map_state(on_mesh, nnx.state(module)))
    gate = divided.gate_kernel[...].addressable_shards[0].data
    num_shards = sizes.get("fsdp", 1) * sizes.get("context", 1)
    expected_shape = (8 // sizes.get("expert", 1), D // num_shards, 12 // sizes["tensor"])
    assert gate.shape == expected_shape

    def outputs(m, x_ND):
        x_BTD = axes.constrain(x_ND.reshape(B, T, D), axes.ROWS, axes.COLUMNS)
        y_ND, _ = m(axes.on_one_axis(x_BTD), _given(), (B, T))
        return axes.in_rows(y_ND, B, T).reshape(B * T, D)

    x_ND = jax.device_put(X_ND, jax.sharding.NamedSharding(mesh, PartitionSpec()))
    _assert_close(_gradients(outputs, divided, x_ND), expected, 1e-5)


def test_a_number_of_experts_that_the_axis_does_not_divide_is_refused():
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:3], expert=3)
    params = transformer.abstract_params(dataclasses.replace(CONFIG, model_dim=48, vocab_size=48))
    with pytest.raises(ValueError, match=r"blocks\.experts\.\w+ \[2, 8, .* expert = 3"):
        sharding.param_shardings(mesh, params)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_experts=0), "num_experts must be ≥ 1 in family 'qwen3_moe', got 0"),
        (dict(family="llama"), "num_experts must be 0 in family 'llama', got 8"),
        (dict(dense_layers=(0, 1)), r"dense_layers must be .* some of 2 layers .* got \(0, 1\)"),
        (dict(experts_per_token=9), r"experts_per_token must be in \[1, num_experts\], got 9 of 8"),
        (
            dict(lora=lora.LoRA(rank=1, alpha=1.0, targets=("q_proj", "up_proj"))),
            r"adapters of experts .*up_proj",
        ),
    ],
)
def test_experts_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)

"""Programs compiled for TPUs and GPUs that are not there. Needs their compilers; says so where they are missing."""

import dataclasses
import importlib.metadata
import json
import os
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl_async.cli import main
from jaxrl_async.config.settings import Settings
from jaxrl_async.fit import flops, hlo, page, plans, programs
from jaxrl_async.fit.targets import EXAMPLES, TargetError, target_of
from jaxrl_async.models import transformer


def installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


TPU = pytest.mark.skipif(
    not installed("libtpu"), reason='no TPU compiler: pip install "jaxrl_async[fit-tpu]"'
)
GPU = pytest.mark.skipif(
    not installed("jax-cuda13-plugin"), reason='no GPU compiler: pip install "jaxrl_async[fit-gpu]"'
)
CONFIG = transformer.ModelConfig(
    vocab_size=1024,
    num_layers=3,
    model_dim=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=512,
    rope_theta=1e4,
    rope_scaling=None,
    norm_eps=1e-6,
    qk_norm=True,
    attention_bias=False,
    tied_embeddings=True,
    dtype="bfloat16",
    remat=True,
)


def settings_of(**learner) -> Settings:
    base = Settings()
    values = dict(microbatch_rows=4, row_tokens=128, fsdp=4, num_minibatches=1) | learner
    return dataclasses.replace(base, learner=dataclasses.replace(base.learner, **values))


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_name_is_a_target(name):
    target = target_of(name)
    assert target.name == name and target.num_devices >= 1 and target.topology["topology_name"]


def test_names_stand_for_devices():
    assert target_of("v5e-16").num_devices == 16
    assert target_of("v5p-64").num_devices == 32  # The name counts cores.
    assert target_of("2xh100-8").topology["topology"] == "1x2x8"
    assert target_of("v5e-1").topology["chips_per_host_bounds"] == (1, 1, 1)


@pytest.mark.parametrize(
    ("name", "near"), [("v5e-15", "v5e-1"), ("h10-8", "h100-8"), ("2xv5e-8", "v5e-8"), ("", "v5e")]
)
def test_an_unknown_target_is_refused_with_the_nearest(name, near):
    with pytest.raises(TargetError, match=rf"unknown target '{name}'; the nearest: .*{near}"):
        target_of(name)


TEXT = """
HloModule jit_f

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %ag = bf16[8,16]{1,0} all-gather(%x), dimensions={0}
  %f = f32[4]{0} fusion(%y), calls=%fused, backend_config={"window_config":{"estimated_cycles":"100"}}
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %n = s32[] constant(3)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%of_data (p: (s32[], f32[4])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %j), direction=LT
}

%fused (p: f32[4]) -> f32[4] {
  %start = bf16[8,32]{1,0} all-gather(%p), dimensions={0}
  ROOT %c = (bf16[4,32]{1,0}, bf16[8,32]{1,0}) custom-call(%start), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (p: f32[4]) -> f32[4] {
  %again = bf16[8,32]{1,0} all-gather(%p), dimensions={0}
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%t), condition=%condition, body=%body, metadata={op_name="a
 b }"}
  %v = (s32[], f32[4]) while(%t), condition=%of_data, body=%body
  %u = (s32[], f32[4]) while(%t), condition=%of_data, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %more = f32[4] fusion(%t), calls=%async_collective_fusion.1
  %k = f32[4] custom-call(%t), custom_call_target="tpu_custom_call"
  %ars = (f32[2]{0}, f32[8]{0}) all-reduce-start(%t), to_apply=%condition
  ROOT %ard = f32[8]{0} all-reduce-done(%ars)
}
"""


def test_counts_in_a_loop_are_multiplied_by_its_length():
    cost = hlo.read(TEXT)
    times = 3 + 1 + 2
    assert cost.cycles == 100 * times and cost.kernels == 1 and cost.unknown_loops == 1
    found = {(c.kind, c.asynchronous): (c.count, c.num_bytes) for c in cost.collectives}
    assert found == {
        ("all-gather", False): (times, times * 8 * 16 * 2),
        ("all-gather", True): (times, times * 8 * 32 * 2),
        ("all-reduce", True): (1, 8 * 4),
    }


def test_flops_are_those_of_products_with_the_lengths_of_loops():
    a, b = jnp.ones((3, 4)), jnp.ones((4, 4))

    def f(a, b):
        looped = jax.lax.scan(lambda x, _: (x @ b, None), a, length=5)[0]
        chosen = jax.lax.cond(a[0, 0] > 0, lambda x: x @ b @ b, lambda x: x, looped)
        return jnp.einsum("ij,kj->ik", chosen, a).sum()

    products = 3 * 4 * 4
    assert flops.of_jaxpr(jax.make_jaxpr(f)(a, b)) == 2 * (5 * products + 2 * products + 3 * 3 * 4)
    gradient = flops.of_jaxpr(jax.make_jaxpr(jax.grad(f))(a, b))
    assert gradient > flops.of_jaxpr(jax.make_jaxpr(f)(a, b))


def test_the_models_flops_are_six_for_each_weight_and_token():
    c = CONFIG
    weights = c.num_layers * c.model_dim * (2 * c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    weights += c.num_layers * 3 * c.model_dim * c.mlp_dim + c.model_dim * c.vocab_size
    attention = c.num_layers * c.num_heads * c.head_dim * 128
    assert flops.of_model(c, 2, 128, backward=True) == 6 * 2 * 128 * (weights + attention)
    assert flops.of_model(c, 2, 128, backward=False) == 2 * 2 * 128 * (weights + attention)


def compiled(name: str, **learner):
    target = target_of(name)
    return programs.compile_run(settings_of(**learner), CONFIG, target, programs.devices_of(target))


def check_fit(fit):
    assert fit.fits and not fit.error
    assert [p.name for p in fit.programs] == ["accumulate", "update"]
    accumulate, update = fit.programs
    params = sum(leaf.size for leaf in jax.tree.leaves(transformer.abstract_params(CONFIG)))
    # Divided by 4: weights and gradients; weights, gradients and Adam's two moments.
    assert accumulate.argument_bytes == pytest.approx(2 * params, rel=0.05)
    assert update.argument_bytes == pytest.approx(4 * params, rel=0.05)
    assert accumulate.resident_bytes == pytest.approx(2 * params, rel=0.05)
    # Remat runs the layers' products forwards twice.
    assert 1.0 < accumulate.flops / accumulate.model_flops < 1.5
    kinds = {c.kind for c in accumulate.cost.collectives}
    assert "all-gather" in kinds and kinds & {"reduce-scatter", "all-reduce"}
    assert "fits: " in page.text(fit) and "remat True" in page.text(fit)


@TPU
def test_the_learner_compiles_for_a_tpu():
    fit = compiled("v5e-4")
    check_fit(fit)
    assert fit.programs[0].secs > 0 and 0 < fit.programs[0].peak_share < 1


@TPU
def test_splash_is_the_tpus_kernel_and_its_forward_pass_runs_once():
    fit = compiled("v5e-4", attention_kernel="splash")
    assert not fit.error
    # Forwards, and backwards to queries and to keys. With remat the forward pass would be there twice.
    assert fit.programs[0].cost.kernels == 3 * CONFIG.num_layers
    assert fit.programs[0].cost.unknown_loops == 0


@GPU
def test_the_learner_compiles_for_gpus():
    fit = compiled("h100-4")
    check_fit(fit)
    assert fit.programs[0].secs == 0


def a_fit(name="v5e-4", needed=2 << 30) -> programs.Fit:
    cost = hlo.Cost((hlo.Collective("all-gather", False, 2, 1 << 21, 1 << 20),), 0.0, 0, 0)
    program = programs.Program(
        "accumulate", needed // 2, needed // 2, needed, 0, 3e12, 2e12, cost, 0.5, 0.25, 60.0
    )
    plan = {
        "data": 1,
        "fsdp": 4,
        "tensor": 1,
        "microbatch_rows": 4,
        "row_tokens": 128,
        "remat": True,
    }
    return programs.Fit(target_of(name), plan, (program,))


def test_what_does_not_fit_says_by_how_much():
    assert page.verdict(a_fit()) == "fits: accumulate needs 2.00 of 16.00 GiB (88% free)"
    large = a_fit(needed=20 << 30)
    assert not large.fits
    assert (
        page.verdict(large) == "does not fit: accumulate needs 20.00 GiB, 4.00 more than there are"
    )
    broken = dataclasses.replace(large, error="accumulate: RESOURCE_EXHAUSTED")
    assert page.verdict(broken) == "does not compile: accumulate: RESOURCE_EXHAUSTED"


def test_a_page_has_a_bar_for_each_program_and_escapes_what_it_shows():
    fit = a_fit()
    program = dataclasses.replace(fit.programs[0], name="a<b")
    html = page.to_html(dataclasses.replace(fit, programs=(program,)))
    assert "a&lt;b" in html and "a<b" not in html and html.count('class="bar"') == 1
    assert json.dumps(page.to_json(fit)) and page.to_json(fit)["fits"]


def test_smaller_plans_are_each_on_top_of_those_before():
    settings = settings_of(data=2, fsdp=2, microbatch_rows=16)
    found = [(flags, s.learner, s.model.remat) for flags, s in plans.smaller(settings)]
    assert [(lr.data, lr.fsdp, lr.microbatch_rows, remat) for _, lr, remat in found] == [
        (2, 2, 16, True),
        (1, 4, 16, True),
        (1, 4, 8, True),
        (1, 4, 4, True),
    ]
    assert "--config.learner.microbatch_rows=4" in found[-1][0]
    assert "--config.model.remat=True" in found[-1][0]


def test_a_search_has_plans_of_the_targets_size_alone():
    target = target_of("v5e-8")
    found = [s.learner for _, s in plans.search(settings_of(microbatch_rows=8), CONFIG, target)]
    assert found
    for learner in found:
        assert learner.data * learner.fsdp * learner.tensor == 8
        assert learner.microbatch_rows % (learner.data * learner.fsdp) == 0
        assert CONFIG.num_kv_heads % learner.tensor == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target=v5e-17"], "unknown target 'v5e-17'; the nearest: v5e-1"),
        (["--target=h100-8"], r"1 · 1 · 1 = 1, and h100-8 has 8 devices: --config.learner.fsdp=8"),
        (
            [
                "--target=h100-1",
                "--config.learner.attention_kernel=splash",
                "--config.learner.row_tokens=128",
            ],
            "'splash' is a TPU's, and h100-1 has none",
        ),
        (
            [
                "--target=h100-1",
                "--config.learner.attention_kernel=cudnn",
                "--config.model.dtype=bfloat16",
            ],
            "'cudnn' is built by the card's own library",
        ),
        (["--target=v5e-1", "--config.model.path=/nowhere"], "model.path: .*nowhere"),
    ],
)
def test_bad_input_is_refused_before_anything_is_compiled(flags, message, capsys, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # The verb sets some.
    monkeypatch.setattr(programs, "check_compiler", lambda target: None)
    assert main.main(["fit", "--config=configs/quickstart.py", *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_missing_compiler_is_named_with_its_remedy(monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(
        programs.FitError, match=r'needs the compiler libtpu.*pip install "jaxrl_async\[fit-tpu\]"'
    ):
        programs.check_compiler(target_of("v5e-4"))
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.0.1")
    with pytest.raises(programs.FitError, match=r"jax-cuda13-plugin 0.0.1 is of another JAX than"):
        programs.check_compiler(target_of("h100-8"))

"""Predictions of the compilers of TPUs and GPUs for real shapes; and budgets of small ones, which a test holds.

    python benchmarks/fit.py --model=checkpoints/Qwen2.5-1.5B-Instruct --target=v5e-16,h100-8
    python benchmarks/fit.py --write [--target=v5e-4]
    python benchmarks/fit.py --real [--only=8b_v5p]

The first compiles the learner of --config, and embedded servers where the config starts them, for each target, with
`learner.fsdp` = its devices, and prints a table. --model is a directory with a config.json; --set changes a setting.
With --out the figures are kept there as fit.json of the verb `fit`.

The second compiles the small shape below and writes BUDGETS, which tests/fit/test_fit.py reads. It fails
where a figure exceeds its budget by more than 5 %. A budget is written on purpose: the change that moves it says why.

The third compiles REAL_RUNS, or those whose names hold a text, and writes benchmarks/results/fit/NAME.json. With --long
the tests hold these too. It takes an hour and a half of a core.

Nothing runs, and no figure is a measurement. Needs the compilers: pip install "jaxrl_async[fit-tpu,fit-gpu]".
"""

import argparse
import ast
import dataclasses
import functools
import json
import pathlib
import tempfile
from typing import Any

import jax
import record

from jaxrl_async import parts
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.settings import Learner, Server, Settings
from jaxrl_async.fit import page, programs
from jaxrl_async.fit.targets import target_of
from jaxrl_async.models.transformer import ModelConfig

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fit"
# The compilers of other releases of jax divide and fuse otherwise: Python 3.12 has budgets of its own.
BUDGETS = RESULTS / ("budgets.json" if jax.__version_info__ < (0, 11) else "budgets_jax_0.12.json")
CONFIG = str(ROOT / "configs" / "gsm8k_qwen2_5_1p5b.py")
REASON = str(ROOT / "configs" / "reason.py")
WRITE = "python benchmarks/fit.py --write"
TOLERANCE = 0.05  # by which a figure may exceed its budget
SMALL_TARGETS = ("v5e-4", "h100-1")
SMALL = ModelConfig(
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
# Of the cache's 48 MiB a whole copy would show beside all else that a step needs.
SMALL_SERVER = Server(num_slots=64, max_total_tokens=512, decode_chunk=8)

_QWEN = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=151_936,
    head_dim=128,
    hidden_act="silu",
    max_position_embeddings=40_960,
    num_key_value_heads=8,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    tie_word_embeddings=False,
)
# The config.json of Qwen3-0.6B, Qwen2.5-1.5B, Qwen3-8B, Qwen3-32B, Qwen3-30B-A3B and Gemma-3-1B, as far as it is read.
MODELS = {
    "0.6b": _QWEN
    | dict(
        hidden_size=1024,
        intermediate_size=3072,
        num_attention_heads=16,
        num_hidden_layers=28,
        tie_word_embeddings=True,
    ),
    "1.5b": _QWEN
    | dict(
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        hidden_size=1536,
        intermediate_size=8960,
        num_attention_heads=12,
        num_hidden_layers=28,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "8b": _QWEN
    | dict(
        hidden_size=4096, intermediate_size=12_288, num_attention_heads=32, num_hidden_layers=36
    ),
    "32b": _QWEN
    | dict(
        hidden_size=5120, intermediate_size=25_600, num_attention_heads=64, num_hidden_layers=64
    ),
    "30b_a3b": _QWEN
    | dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=2048,
        num_attention_heads=32,
        num_hidden_layers=48,
        num_key_value_heads=4,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "gemma3_1b": dict(
        architectures=["Gemma3ForCausalLM"],
        model_type="gemma3_text",
        vocab_size=262_144,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        head_dim=256,
        hidden_activation="gelu_pytorch_tanh",
        hidden_size=1152,
        intermediate_size=6912,
        max_position_embeddings=32_768,
        num_attention_heads=4,
        num_hidden_layers=26,
        num_key_value_heads=1,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-6,
        rope_local_base_freq=1e4,
        rope_scaling=None,
        rope_theta=1e6,
        sliding_window=512,
        sliding_window_pattern=6,
        tie_word_embeddings=True,
    ),
}
REAL_TARGETS = ("v5e-16", "v5e-256", "v6e-64", "v5p-64", "h100-8", "2xh100-8")


@dataclasses.dataclass(frozen=True)
class RealRun:
    """A model on a target: CONFIG with rows of 4,096 tokens, at least one on each device, or another config."""

    model: str  # of MODELS
    target: str
    changes: dict[str, Any]  # of the learner's settings
    config: str = CONFIG

    @property
    def settings(self) -> dict[str, Any]:
        if self.config != CONFIG:
            return {f"learner.{name}": value for name, value in self.changes.items()}
        target = target_of(self.target)
        kernel = "splash" if target.chip.platform == "tpu" else "xla"
        rows = max(16, target.num_devices)
        values = {"attention_kernel": kernel, "microbatch_rows": rows, "shared_prompts": False}
        return {f"learner.{name}": value for name, value in (values | self.changes).items()}


def _real_runs() -> dict[str, RealRun]:
    models = ("1.5b", "8b", "32b")
    runs = {f"{m}_{t}": RealRun(m, t, {}) for m in models for t in REAL_TARGETS}
    for target in ("v5e-4", "v5e-8", "v6e-4", "v6e-8"):  # Of benchmarks/splits.py.
        runs[f"1.5b_{target}"] = RealRun("1.5b", target, {})
    for chips in (4, 8):
        target = f"2xv5e-{chips}"
        runs[f"1.5b_{target}"] = RealRun("1.5b", target, {"slices": 2, "fsdp": chips})
    for target in ("v5e-16", "h100-8"):  # "splash" has no windows.
        runs[f"gemma3_1b_{target}"] = RealRun("gemma3_1b", target, {"attention_kernel": "xla"})
    runs["1.5b_v5e-16_xla"] = RealRun("1.5b", "v5e-16", {"attention_kernel": "xla"})
    runs["1.5b_v5e-16_shared_prompts"] = RealRun("1.5b", "v5e-16", {"shared_prompts": True})
    long = {"row_tokens": 32_768, "context": 4}
    runs["8b_v5p-64_32k"] = RealRun("8b", "v5p-64", long | {"fsdp": 8, "microbatch_rows": 8})
    runs["1.5b_2xv5e-16"] = RealRun("1.5b", "2xv5e-16", {"slices": 2, "fsdp": 16})
    runs["1.5b_v6e-64_parts"] = RealRun("1.5b", "v6e-64", {"slices": 4, "fsdp": 16})
    ring = {"gradient_sums": "ring"}
    for model in models:
        runs[f"{model}_v6e-64_ring"] = RealRun(model, "v6e-64", ring)
    runs["1.5b_v5e-256_ring"] = RealRun("1.5b", "v5e-256", ring)
    for model in ("0.6b", "gemma3_1b"):  # One device for learner and engine.
        for target in ("v5e-1", "a100-1"):
            runs[f"reason_{model}_{target}"] = RealRun(model, target, {}, REASON)
    runs["reason_0.6b_lora_v5e-1"] = RealRun("0.6b", "v5e-1", {}, f"{REASON}:lora")
    experts = {"fsdp": 2, "expert": 8, "microbatch_rows": 16}
    runs["30b_a3b_2xh100-8"] = RealRun("30b_a3b", "2xh100-8", experts)
    runs["30b_a3b_v5p-64"] = RealRun("30b_a3b", "v5p-64", experts | {"expert": 4, "context": 4})
    runs["30b_a3b_v6e-64"] = RealRun("30b_a3b", "v6e-64", experts | {"fsdp": 1, "context": 8})
    runs["8b_2xh100-8_32k"] = RealRun("8b", "2xh100-8", long | {"fsdp": 4, "microbatch_rows": 4})
    return runs


REAL_RUNS = _real_runs()  # by the name of its result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--model", default="", help="directory with a config.json")
    parser.add_argument("--target", default="", help="names, with commas between")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=pathlib.Path, help="directory for TARGET.json")
    parser.add_argument("--write", action="store_true", help="write budgets.json")
    parser.add_argument("--real", action="store_true", help="compile REAL_RUNS, and write them")
    parser.add_argument("--only", default="", help="a part of the names of REAL_RUNS")
    parser.add_argument("--budgets", type=pathlib.Path, default=BUDGETS)
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    targets = [name for name in args.target.split(",") if name]
    if args.write:
        write_budgets(args.budgets, targets or SMALL_TARGETS)
        return
    print(HEADER)
    if args.real:
        for name in (name for name in REAL_RUNS if args.only in name):
            _show(real_fit(name), args.out or RESULTS, name)
        return
    changes = dict(_change(word) for word in args.set)
    for name in targets:
        _show(fit_of(args.config, args.model, name, changes), args.out, name)


def _show(fit: programs.Fit, directory: pathlib.Path | None, name: str) -> None:
    """Prints the figures, and keeps them in a directory where one is given."""
    print("\n".join(rows(fit)), flush=True)
    if directory:
        raw = ["programs", "verdict"]
        record.write(directory / f"{name}.json", page.to_json(fit), seeds=[], raw=raw)


def small_settings(target_name: str, **learner: Any) -> Settings:
    """The run of the small shape, with some of the learner's settings changed."""
    values = {"microbatch_rows": 4, "row_tokens": 128, "num_minibatches": 1}
    values |= {"fsdp": target_of(target_name).num_devices} | learner
    return Settings(learner=Learner(**values), server=SMALL_SERVER)


@functools.cache
def small_fit(target_name: str) -> programs.Fit:
    """The small shape's programs on a target, compiled once."""
    return compiled(small_settings(target_name), SMALL, target_of(target_name))


def compiled(settings: Settings, config: ModelConfig, target) -> programs.Fit:
    """The learner's programs, and those of embedded servers where the run starts them."""
    programs.check_compiler(target)
    programs.check_plan(settings, target)
    devices = programs.devices_of(target)
    fit = programs.compile_run(settings, config, target, devices)
    if not programs.has_engine(settings):
        return fit
    engine = programs.compile_engine(settings, config, target, devices[0])
    return dataclasses.replace(fit, engine=engine)


def real_fit(name: str) -> programs.Fit:
    """The programs of one of REAL_RUNS."""
    run = REAL_RUNS[name]
    with tempfile.TemporaryDirectory() as directory:
        (pathlib.Path(directory) / "config.json").write_text(json.dumps(MODELS[run.model]))
        return fit_of(run.config, directory, run.target, run.settings)


def fit_of(config: str, model: str, target_name: str, changes: dict[str, Any]) -> programs.Fit:
    """A config's programs on a target, with the mesh fsdp = its devices."""
    target = target_of(target_name)
    values = load_config(config).unlock()
    words = {"learner.fsdp": target.num_devices} | changes
    if model:
        words["model.path"] = model
    with values.ignore_type():
        values.update_from_flattened_dict(words)
    settings = settings_of(values)
    return compiled(settings, parts.model_config_of(settings, tokenizer=None), target)


def _change(word: str) -> tuple[str, Any]:
    key, _, text = word.partition("=")
    try:
        return key, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return key, text


HEADER = (
    "| target | program | needs, GiB | arguments | temporary | FLOPs / model | cycles, s | kernels, s | waits, s | "
    "predicted, s | of peak | between devices, MiB | compiled in, s |\n" + "|---" * 13 + "|"
)


def rows(fit: programs.Fit) -> list[str]:
    """Rows of a table: each program's figures, then whether it all fits."""
    found = []
    for p in fit.all_programs:
        sizes = (p.needed_bytes, p.argument_bytes, p.temporary_bytes)
        cells = [fit.target.name, p.name, *(f"{size / page.GIB:.2f}" for size in sizes)]
        cells += [f"{p.flops / p.model_flops:.2f}" if p.model_flops else "-"]
        cells += [f"{p.secs:.3g}" if p.secs else "-"]
        spans = (p.kernel_secs, p.wait_secs, p.total_secs)
        cells += [page.span(ends) if ends and any(ends) else "-" for ends in spans]
        cells += [page.percent(p.peak_share) if p.peak_share else "-"]
        cells += [f"{sum(c.num_bytes for c in p.cost.collectives) / (1 << 20):.1f}"]
        found.append(f"| {' | '.join([*cells, f'{p.compile_secs:.0f}'])} |")
    return [*found, "", page.verdict(fit), ""]


def figures(program: dict[str, Any]) -> dict[str, float]:
    """The figures that a budget bounds, of a program in the JSON of a fit."""
    ratio = program["flops"] / program["model_flops"] if program["model_flops"] else 0.0
    found = {"peak_bytes": program["peak_bytes"], "flops_over_model": round(ratio, 4)}
    found["cycles"] = program["cost"]["cycles"]
    for collective in program["cost"]["collectives"]:
        key = f"{collective['kind']}_bytes"
        found[key] = found.get(key, 0) + collective["num_bytes"]
    return found


def figures_of(fit: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Program → figure → value, of the JSON of a fit."""
    found = [*fit["programs"], *(fit["engine"] or {"programs": []})["programs"]]
    return {program["name"]: figures(program) for program in found}


def exceeded(name: str, found: dict, budgets: dict, way: str = "") -> list[str]:
    """A sentence for each figure that is more than TOLERANCE above its budget; a missing budget is 0."""
    said, way = [], way or f"{WRITE} --target={name}"
    for program, values in found.items():
        allowed = budgets.get(program, {})
        for figure, value in values.items():
            budget = allowed.get(figure, 0)
            if value > budget * (1 + TOLERANCE):
                said.append(
                    f"{name}, {program}: {figure} is {value:g}, its budget {budget:g}; if that is meant, "
                    f"{way}, and say why"
                )
    return said


def read_budgets(path: pathlib.Path = BUDGETS) -> dict[str, Any]:
    """{target: {"compiler": name and version, "programs": {program: {figure: value}}}}."""
    return json.loads(path.read_text("utf-8"))


def compiler_of(target_name: str) -> str:
    """Name and version."""
    return programs.compiler_of(target_of(target_name))


def write_budgets(path: pathlib.Path, target_names) -> None:
    """Compiles the small shape for these targets, and writes what was found; other targets keep their budgets."""
    kept = read_budgets(path) if path.exists() else {}
    for name in target_names:
        fit = small_fit(name)
        if error := fit.error or fit.engine.error:
            raise ValueError(f"{name}: {error}")
        found = figures_of(page.to_json(fit))
        for line in exceeded(name, found, kept.get(name, {}).get("programs", {})):
            print(line.partition(";")[0])
        kept[name] = {"compiler": compiler_of(name), "programs": found}
    record.write(path, kept, seeds=[], raw=["programs"], part=" ".join(target_names))
    print(f"written: {path}")


if __name__ == "__main__":
    main()

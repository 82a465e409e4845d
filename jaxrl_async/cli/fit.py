"""`fit`: compiles a run's programs for TPUs or GPUs that are not there, and says whether they fit."""

import dataclasses
import functools
import json
import os
import pathlib
import sys

from jaxrl_async.cli.config import UsageError, parse_flags, refusing, settings_of
from jaxrl_async.config.settings import Learner, Server, Settings

USAGE = """Compiles the programs of the learner, and of embedded servers if the config starts them, by the compiler of
a TPU or GPU, on a machine that has none. Prints memory, FLOPs, transfers between devices and predicted time of each,
then whether they fit, and what would make them: other plans are compiled, too. A minute or two a plan. Needs the
compiler: pip install "jaxrl_async[fit-tpu]" or "jaxrl_async[fit-gpu]".

    python -m jaxrl_async fit --config=configs/gsm8k_qwen2_5_1p5b.py --target=v5e-16 --config.learner.fsdp=16

Exit code 1 if the plan does not fit."""
BEST = 3  # plans that a search prints


def main(argv: list[str]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        config=True,
        target=(
            "",
            "v5e-1 … v5e-256, v6e-…, v5p-8 … v5p-512, 2xv5e-16, a100-8, h100-8, 2xh100-8, h200-8 …",
        ),
        search=(False, "try other meshes, rows and remat, and print the best three that fit"),
        out=("", "directory for fit.json and fit.html"),
        compare=(
            "",
            "fit.json of another commit, or a peer's compiled module as text, to print beside",
        ),
    )
    from jaxrl_async.fit.targets import TargetError, target_of

    with refusing(TargetError, what="--target: "):
        target = target_of(flags.target)
    settings = settings_of(flags.config)
    if flags.out:
        with refusing(OSError, what="--out: "):
            pathlib.Path(flags.out).mkdir(parents=True, exist_ok=True)
    os.environ["JAX_PLATFORMS"] = "cpu"  # No device of this machine is used.
    from jaxrl_async import parts
    from jaxrl_async.fit import compare, page, plans, programs

    with refusing(programs.FitError):
        programs.check_compiler(target)
        beside = flags.compare and compare.load(
            pathlib.Path(flags.compare), target.name, settings.learner.num_devices
        )
        if not flags.search:
            programs.check_plan(settings, target)
        config = model_config_of(settings)
        devices = programs.devices_of(target)

        @functools.cache
        def learner_of(learner: Learner, remat: bool | str) -> programs.Fit:
            some = dataclasses.replace(settings, learner=learner)
            with_remat = dataclasses.replace(config, remat=remat)
            return programs.compile_run(some, with_remat, target, devices)

        @functools.cache
        def engine_of(server: Server) -> programs.Engine | None:
            some = dataclasses.replace(settings, server=server)
            if not programs.has_engine(some):
                return None
            return programs.compile_engine(some, config, target, devices[-1])

        def compiled(some: Settings) -> programs.Fit:
            fit = learner_of(some.learner, parts.remat_of(some.model))
            return dataclasses.replace(fit, engine=engine_of(some.server))

        if flags.search:
            fit = _search(plans.search(settings, config, target), compiled)
        else:
            fit = compiled(settings)
            print(page.text(fit), flush=True)
            if not fit.fits:
                _try_smaller(page, plans, compiled, settings, fit)
        if beside and fit is not None and fit.programs:
            print(compare.text(fit, compare.figures_of(beside, fit), flags.compare))
    if flags.out and fit is not None:
        out = pathlib.Path(flags.out)
        (out / "fit.json").write_text(json.dumps(page.to_json(fit), indent=2) + "\n", "utf-8")
        (out / "fit.html").write_text(page.to_html(fit), "utf-8")
        print(f"written: {out / 'fit.json'}, {out / 'fit.html'}")
    return 0 if fit is not None and fit.fits else 1


def model_config_of(settings: Settings):
    """The model's shape; the files of a Hugging Face directory are not needed, but for its config.json."""
    from jaxrl_async import parts
    from jaxrl_async.learner import blocks
    from jaxrl_async.models import attention
    from jaxrl_async.tasks.tokenizer import CharTokenizer

    if not settings.model.path and settings.tokenizer.kind != "char":
        raise UsageError(
            f"needs a model.path, or tokenizer.kind = 'char', got {settings.tokenizer.kind!r}: the size of the "
            "vocabulary is not known"
        )
    with refusing(OSError, ValueError, what="model.path: "):
        tokenizer = None if settings.model.path else CharTokenizer(settings.tokenizer.alphabet)
        config = parts.model_config_of(settings, tokenizer)
        attention.check_model(settings.learner.attention_kernel, config.windows, config.head_dim)
        blocks.check(settings.learner.blocks, config.num_layers)
        return config


def _try_smaller(page, plans, compiled, settings: Settings, large) -> None:
    for flags, some in plans.smaller(settings, large):
        fit = compiled(some)
        print(f"with {flags}: {page.verdict(fit)}", flush=True)
        if fit.fits:
            return
    print(
        "nothing that was tried fits: more devices, a smaller model, shorter rows (learner.row_tokens) or "
        "requests (server.max_total_tokens)"
    )


def _search(candidates, compiled):
    """The best plan, after the best few are printed; None where none fits."""
    from jaxrl_async.fit import page, plans
    from jaxrl_async.fit.programs import FitError

    found = []
    for flags, some in candidates:
        try:
            fit = compiled(some)
        except (FitError, ValueError) as error:  # a dimension that the mesh does not divide
            print(f"{flags}: {error}", file=sys.stderr, flush=True)
            continue
        print(f"{flags}: {page.verdict(fit)}", file=sys.stderr, flush=True)
        if fit.fits:
            found.append((plans.cost(fit), flags, fit))
    found.sort(key=lambda item: item[0])
    for (secs, flops, num_bytes), flags, fit in found[:BEST]:
        counts = f"{flops:.3g} FLOPs, {num_bytes:.3g} bytes between devices"
        speed = f"{secs * 1e6:.3g} µs" if secs else counts
        print(f"{flags}: {speed} a token, {page.verdict(fit)}")
    if not found:
        print("no plan fits")
        return None
    return found[0][2]

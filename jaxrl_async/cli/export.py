"""`export`: a checkpoint as a Hugging Face directory."""

import pathlib

from jaxrl_async.cli.config import FailedError, UsageError, load_config, parse_flags, settings_of

USAGE = """Writes a checkpoint of a run as a Hugging Face directory: config.json, safetensors, tokenizer and generation
settings. transformers and SGLang load it, and so does --config.model.path of a new run."""


def main(argv: list[str]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        workdir=("", "directory of the run"),
        step=("last", "checkpoint; `last` is the newest"),
        checkpoint=("", "WORKDIR/checkpoints/N, in place of --workdir and --step"),
        out=("", "directory to write, new or empty"),
        adapter=(False, "of a run with model.lora: its adapters alone, in PEFT's format"),
        dtype=("", "float32 or bfloat16; default the run's weights.dtype, which its servers had"),
    )
    workdir, step = _which(flags.workdir, flags.step, flags.checkpoint)
    if not flags.out:
        raise UsageError("--out=DIR is needed")
    if flags.dtype not in ("", "float32", "bfloat16"):
        raise UsageError(f"--dtype must be float32 or bfloat16, got {flags.dtype!r}")
    settings = settings_of(load_config(str(workdir / "config.json")))
    if flags.adapter and not settings.model.lora.rank:
        raise UsageError(f"--adapter: the run in {workdir} has none, its model.lora.rank is 0")
    out = pathlib.Path(flags.out).absolute()
    # After the flags are known to be good: it loads JAX.
    from jaxrl_async.tools.export import export

    try:
        dtype = flags.dtype or settings.weights.dtype
        step = export(settings, workdir, step, out, dtype=dtype, adapter=flags.adapter)
    except FileExistsError as error:
        raise UsageError(f"{error}: name another --out") from None
    except (OSError, ValueError) as error:
        raise FailedError(str(error)) from None
    print(f"checkpoint {step} of {workdir}: {out}")
    return 0


def _which(workdir: str, step: str, checkpoint: str) -> tuple[pathlib.Path, int | None]:
    """(workdir, step; None for the last one) of the flags."""
    if bool(workdir) == bool(checkpoint):
        raise UsageError("one of --workdir=DIR and --checkpoint=DIR/checkpoints/N is needed")
    if checkpoint:
        path = pathlib.Path(checkpoint).absolute()
        if path.parent.name != "checkpoints" or not path.name.isdecimal():
            raise UsageError(f"--checkpoint must be WORKDIR/checkpoints/N, got {checkpoint!r}")
        return path.parent.parent, int(path.name)
    if step != "last" and not step.isdecimal():
        raise UsageError(f"--step must be a number or `last`, got {step!r}")
    return pathlib.Path(workdir).absolute(), None if step == "last" else int(step)

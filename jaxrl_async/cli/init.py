"""`init`: the model of a config as a Hugging Face directory, before there is a run."""

import pathlib

from jaxrl_async.cli.config import FailedError, UsageError, parse_flags, settings_of

USAGE = """Writes the model that a run of a config starts from as a Hugging Face directory: config.json, safetensors,
tokenizer. A server of your own (SGLang's --model-path=DIR) needs one before the run exists; the run then pushes its
own weights. Without --warm_start the weights are random. A config with model.path has such a directory already."""


def main(argv: list[str]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        config=True,
        out=("", "directory to write, new or empty"),
        dtype=("", "float32 or bfloat16; default the config's weights.dtype"),
        warm_start=(False, "trains the warm start of the config first, which takes its time"),
    )
    if not flags.out:
        raise UsageError("--out=DIR is needed")
    if flags.dtype not in ("", "float32", "bfloat16"):
        raise UsageError(f"--dtype must be float32 or bfloat16, got {flags.dtype!r}")
    settings = settings_of(flags.config)
    if settings.model.path:
        raise UsageError(
            f"the config starts from model.path = {settings.model.path!r}: give the server that directory"
        )
    if flags.warm_start and not settings.warm_start.num_steps:
        raise UsageError("--warm_start needs warm_start.num_steps > 0, got 0")
    out = pathlib.Path(flags.out).absolute()
    from jaxrl_async.tools.export import init  # After the flags are known to be good: JAX.

    try:
        init(settings, out, dtype=flags.dtype or settings.weights.dtype, warm=flags.warm_start)
    except FileExistsError as error:
        raise UsageError(f"{error}: name another --out") from None
    except (OSError, ValueError) as error:
        raise FailedError(str(error)) from None
    kind = "after the warm start" if flags.warm_start else "random weights"
    print(f"{kind}: {out}")
    return 0

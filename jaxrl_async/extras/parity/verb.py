"""`parity`: a server's log-probs against the learner's forward, and the likely cause; or two computations by layer."""

import asyncio
from collections.abc import Mapping, Sequence

from jaxrl_async.cli.config import UsageError, failing, parse_flags
from jaxrl_async.config.checks import key_named

USAGE = """Asks a server (SGLang, SGLang-JAX or this project's) random prompts, twice, and computes its log-probs again
with the learner's forward on a checkpoint. Prints how far they differ, and the likely cause. A server whose
log-probs differ gets its prefix cache flushed once; nothing else of it changes.
With --layers there is no server: the learner's hidden states after each layer are compared, in this process, with the
engine's, with transformers', or with the learner's in another dtype or on another checkpoint, a directory. The first
layer where they part is named.
Exits with 0 within the tolerance, 1 beyond it or where nothing could be compared, 2 for bad usage."""

AGREES, DIFFERS = 0, 1
_LEAST = {"num_prompts": 1, "prompt_tokens": 2, "max_new_tokens": 1, "seed": 0}


def main(argv: list[str]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        server=("", "http://host:port"),
        checkpoint=("", "Hugging Face directory, as WORKDIR/weights/00000012"),
        adapter=("", "beside it, one in PEFT's format, as WORKDIR/weights/00000012 of a LoRA"),
        temperature=("1.0", "asked of the server, > 0; that of the run shows more than 1.0 does"),
        top_p=("1.0", "asked of the server, in (0, 1]"),
        num_prompts=(16, "prompts"),
        prompt_tokens=(32, "tokens of a prompt"),
        max_new_tokens=(32, "tokens of a completion"),
        dtype=("float32", "of the learner's forward: float32 | bfloat16"),
        tolerance=("0.001", "nats, of the mean difference; some 0.03 where a side has bfloat16"),
        timeout_secs=("120.0", "seconds, of each call"),
        api_key_env=("", "name of the environment variable that holds the server's key"),
        tls_ca=("", "PEM file of the authorities to trust at https://; default the system's"),
        seed=(0, "of the prompts"),
        layers=("", "compare with: engine | transformers | float32 | bfloat16 | a directory"),
        bound=("", "|difference| / |hidden state| with --layers; default 0.001, 0.1 with bfloat16"),
    )
    if flags.layers:
        return _layers(flags)
    options = _options(flags)
    from jaxrl_async.extras.parity import parity  # After the flags are known to be good: loads JAX.

    questions = parity.Questions(
        num_prompts=flags.num_prompts,
        prompt_tokens=flags.prompt_tokens,
        max_new_tokens=flags.max_new_tokens,
        temperature=number("temperature", flags.temperature),
        top_p=number("top_p", flags.top_p, at_most=1.0),
        seed=flags.seed,
    )
    server, tolerance = flags.server.rstrip("/"), options["tolerance"]
    with failing(parity.ParityError):
        evidence = asyncio.run(parity.measure(server, flags.checkpoint, questions, **options))
    verdict = parity.diagnose(evidence, tolerance)
    print(parity.table(evidence, tolerance))
    print(f"verdict: {verdict}")
    return AGREES if verdict.cause == "ok" else DIFFERS


def _layers(flags) -> int:
    """`parity --layers`."""
    if flags.server:
        raise UsageError("--layers compares in this process: leave --server out")
    check(flags, ("checkpoint",), _LEAST)
    rounds = "bfloat16" in (flags.dtype, flags.layers)
    bound = number("bound", flags.bound or ("0.1" if rounds else "0.001"))
    from jaxrl_async.extras.parity import layers, parity

    sequences = layers.Sequences(
        num_sequences=flags.num_prompts,
        prompt_tokens=flags.prompt_tokens,
        completion_tokens=flags.max_new_tokens,
        seed=flags.seed,
    )
    with failing(parity.ParityError):
        found = layers.compare(flags.checkpoint, sequences, dtype=flags.dtype, against=flags.layers)
    print(layers.table(found, bound))
    first = layers.first_beyond(found, bound)
    if first is None:
        print(
            f"verdict: ok: no hidden state of the learner and of {flags.layers} differs by more than {bound:g}"
        )
        return AGREES
    print(
        f"verdict: learner and {flags.layers} part at {first.name}: {first.relative:.3g} > {bound:g}"
    )
    return DIFFERS


def _options(flags) -> dict:
    """The keyword arguments of `measure`, from checked flags."""
    check(flags, ("server", "checkpoint"), _LEAST)
    return {
        "dtype": flags.dtype,
        "tolerance": number("tolerance", flags.tolerance),
        "timeout_secs": number("timeout_secs", flags.timeout_secs),
        "api_key": key_named("--api_key_env", flags.api_key_env),
        "tls_ca": flags.tls_ca,
        "adapter": flags.adapter or None,
    }


def check(flags, needed: Sequence[str], least: Mapping[str, int]) -> None:
    """Refuses a flag that is needed and missing, another form or dtype, and a number below its least."""
    for name in needed:
        if not getattr(flags, name):
            raise UsageError(f"--{name} is needed")
    if flags.server and not flags.server.startswith(("http://", "https://")):
        raise UsageError(f"--server must be http://host:port, got {flags.server!r}")
    if "dtype" in flags and flags.dtype not in ("float32", "bfloat16"):
        raise UsageError(f"--dtype must be float32 or bfloat16, got {flags.dtype!r}")
    for name, bound in least.items():
        if getattr(flags, name) < bound:
            raise UsageError(f"--{name} must be ≥ {bound}, got {getattr(flags, name)}")


def number(name: str, text: str, at_most: float = float("inf")) -> float:
    """A finite number in (0, at_most]."""
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"--{name} must be a number, got {text!r}") from None
    if not (0 < value <= at_most and value < float("inf")):
        bound = "> 0 and finite" if at_most == float("inf") else f"in (0, {at_most:g}]"
        raise UsageError(f"--{name} must be {bound}, got {text}")
    return value

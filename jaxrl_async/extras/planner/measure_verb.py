"""`measure`: the rates that `simulate` needs, from a running server and from a run's metrics."""

import asyncio
import json
import pathlib
import sys

from jaxrl_async.cli.config import (
    FailedError,
    UsageError,
    check_out,
    failing,
    load_config,
    parse_flags,
    settings_of,
)
from jaxrl_async.config.checks import key_named
from jaxrl_async.extras.parity.verb import check, number
from jaxrl_async.extras.planner import measure
from jaxrl_async.metrics import read_metrics

USAGE = """Measures the rates that `simulate` needs, and writes them to a file for `simulate --rates=FILE`. --server is
asked for one completion, then for many at once, and loads its own weights again, as in a push (SGLang, SGLang-JAX or
this project's; nobody else should ask it meanwhile). --workdir is a run of a few steps, whose metrics give the
learner's rates and the seconds of a push.

    python -m jaxrl_async measure --server=http://127.0.0.1:30000 --workdir=runs/a --out=rates.json

Exits with 0, 1 where something could not be measured, 2 for bad usage."""

UNITS = {
    "request_rate": "tokens/s of a request that is alone on the server",
    "server_rate": "tokens/s that the server approaches as it fills",
    "step_secs": "s of the learner for a step, whatever is in it",
    "token_secs": "s of the learner for each completion token",
    "push_secs": "s of a push of weights",
    "pause_secs": "s of a push in which generation stands still",
    "num_slots": "requests that run at once on the server",
}
_SOURCES = {
    "request_rate": "the servers' rates (--server)",
    "step_secs": "the learner's (--workdir, or simulate --fit)",
    "push_secs": "the push (--workdir, or --push)",
}


def main(argv: list[str]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        server=("", "http://host:port, for its rates and the pause of a push"),
        workdir=("", "directory of a run, for the learner's rates and the seconds of a push"),
        out=("rates.json", "JSON file, for simulate --rates"),
        num_requests=(0, "at once; 0: the server's slots, or 64 where it does not say"),
        max_new_tokens=(128, "tokens of a completion; fewer where the server's bound is lower"),
        prompt_tokens=(32, "tokens of a prompt, likewise"),
        push=(True, "also load the server's own weights again"),
        timeout_secs=("120.0", "seconds, of each call"),
        api_key_env=("", "name of the environment variable that holds the server's key"),
        admin_api_key_env=("", "the same for the key of its control routes"),
        tls_ca=("", "PEM file of the authorities to trust at https://; default the system's"),
    )
    timeout_secs = _check(flags)
    found: dict[str, float] = {}
    with failing(measure.MeasureError):
        if flags.workdir:
            found |= _of_workdir(pathlib.Path(flags.workdir))
        if flags.server:
            server = measure.of_server(
                flags.server.rstrip("/"),
                num_requests=flags.num_requests,
                max_new_tokens=flags.max_new_tokens,
                prompt_tokens=flags.prompt_tokens,
                push=flags.push,
                timeout_secs=timeout_secs,
                api_key=key_named("--api_key_env", flags.api_key_env),
                admin_api_key=key_named("--admin_api_key_env", flags.admin_api_key_env),
                tls_ca=flags.tls_ca,
                say=lambda line: print(line, file=sys.stderr, flush=True),
            )
            found |= asyncio.run(server)
    if "pause_secs" in found:  # A push lasts at least as long as its pause.
        found["push_secs"] = max(found.get("push_secs", 0.0), found["pause_secs"])
    for name in UNITS:
        value = f"{found[name]:.4g}" if name in found else "not measured"
        print(f"{name:12} {value:>12}  {UNITS[name]}")
    if missing := [text for name, text in _SOURCES.items() if name not in found]:
        print(f"not measured: {', '.join(missing)}")
    path = pathlib.Path(flags.out)
    try:
        path.write_text(json.dumps({"rates": found}, indent=2) + "\n", "utf-8")
    except OSError as error:
        raise FailedError(f"--out={path}: {error.strerror}") from None
    print(f"written: {path}; next: python -m jaxrl_async simulate --rates={path} --config=…")
    return 0


def _check(flags) -> float:
    """The timeout; raises UsageError for a flag outside its bound."""
    check_out(flags.out)
    if not (flags.server or flags.workdir):
        raise UsageError("--server or --workdir is needed")
    if flags.num_requests < 0 or flags.num_requests == 1:
        raise UsageError(f"--num_requests must be 0 or ≥ 2, got {flags.num_requests}")
    check(flags, (), {"max_new_tokens": 1, "prompt_tokens": 1})
    return number("timeout_secs", flags.timeout_secs)


def _of_workdir(workdir: pathlib.Path) -> dict[str, float]:
    settings = settings_of(load_config(str(workdir / "config.json")))
    completions = settings.learner.groups_per_step * settings.rollout.group_size
    try:
        return measure.of_run(read_metrics(workdir), completions)
    except (ValueError, KeyError, measure.MeasureError) as error:
        raise measure.MeasureError(f"{workdir}: {error}") from None

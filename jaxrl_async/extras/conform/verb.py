"""`conform`: measures a server of any kind on what a run needs of it."""

import asyncio
import contextlib
import datetime
import json
import os
import pathlib
import platform
import tempfile
from typing import Any

from jaxrl_async.cli.config import check_out, failing, parse_flags
from jaxrl_async.config.checks import key_named
from jaxrl_async.extras.parity.verb import check, number

USAGE = """Measures a server (SGLang, SGLang-JAX, vLLM or this project's) on eight facts that a run relies on:
log-probs, swaps under load, spans, aborts, digests, the prefix cache, the distribution, and its death. It gets versions
of the model, so it must not be one of a run. Prints a table; exits with 0 where all that was measured holds, 1 where a
fact fails, 2 for bad usage."""

HOLDS, FAILS = 0, 1
_LEAST = {"num_pushes": 1, "num_workers": 1, "num_samples": 50, "max_total_tokens": 24}


def main(argv: list[str]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        server=("", "http://host:port"),
        model=("", "Hugging Face directory of the model that it has"),
        transport=("disk", "weights.transport"),
        versions=("", "directory for versions, which the server sees; default a temporary one"),
        num_pushes=(20, "pushes under load"),
        num_workers=(16, "requests at once"),
        num_samples=(500, "samples of the distribution"),
        max_total_tokens=(128, "tokens of a request, ≥ 24"),
        tolerance=("0.0001", "nats; some 0.1 where a side has bfloat16"),
        dtype=("float32", "of the learner's forward: float32 | bfloat16"),
        timeout_secs=("120.0", "seconds, of each call"),
        kill=("", "a command that kills the server"),
        start=("", "a command that starts it again, and returns"),
        api_key_env=("", "name of the environment variable that holds the server's key"),
        admin_api_key_env=("", "the same, of its control routes"),
        tls_ca=("", "PEM file of the authorities to trust at https://; default the system's"),
        out=("", "a JSON file to write"),
    )
    check(flags, ("server", "model"), _LEAST)
    check_out(flags.out)
    tolerance = number("tolerance", flags.tolerance)
    timeout_secs = number("timeout_secs", flags.timeout_secs)
    from jaxrl_async.extras.parity import parity  # Loads JAX.

    with failing(parity.ParityError):
        found = asyncio.run(_measure(flags, tolerance, timeout_secs))
    print(table(found))
    if flags.out:
        pathlib.Path(flags.out).write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return FAILS if any(fact["holds"] is False for fact in found["facts"]) else HOLDS


def table(found: dict[str, Any]) -> str:
    """The facts, a line each."""
    lines = [
        f"{found['server']}: {found['kind']}, {found['model']}, tolerance {found['tolerance']:g} nats"
    ]
    for fact in found["facts"]:
        mark = {True: "holds", False: "FAILS", None: "-"}[fact["holds"]]
        lines.append(f"  {fact['name']:13} {mark:6} {fact['found']}")
    return "\n".join(lines)


async def _measure(flags, tolerance: float, timeout_secs: float) -> dict[str, Any]:
    from jaxrl_async.extras.conform import facts
    from jaxrl_async.extras.conform.subject import Subject
    from jaxrl_async.extras.parity import parity
    from jaxrl_async.servers.client import InferenceClient
    from jaxrl_async.servers.port import ServerError

    config, _ = parity.read_checkpoint(flags.model, flags.dtype)
    keys = {
        "api_key": key_named("--api_key_env", flags.api_key_env),
        "admin_api_key": key_named("--admin_api_key_env", flags.admin_api_key_env),
    }
    plan = facts.Plan(
        tolerance=tolerance,
        num_pushes=flags.num_pushes,
        num_workers=flags.num_workers,
        num_samples=flags.num_samples,
        kill=flags.kill,
        start=flags.start,
    )
    async with InferenceClient(**keys, tls_ca=flags.tls_ca) as client:
        try:
            kind = await client.recognise(flags.server, timeout_secs=timeout_secs)
            vocab_size = await kind.vocab_size(timeout_secs=timeout_secs)
        except ServerError as error:
            raise parity.ParityError(str(error)) from error
        parity.check_vocabulary(flags.server, vocab_size, config, flags.model)
        held = str(kind.info.get("weight_version"))
        if held.count(".") == 2:
            raise parity.ParityError(
                f"{flags.server} has weights of a run ({held}): stop the run first"
            )
        with contextlib.ExitStack() as stack:
            root = flags.versions or stack.enter_context(
                tempfile.TemporaryDirectory(prefix="conform-")
            )
            subject = Subject(
                client,
                flags.server,
                config=config,
                params=parity.read_params(flags.model, config),
                directory=pathlib.Path(root) / "weights",
                transport=flags.transport,
                max_total_tokens=flags.max_total_tokens,
                timeout_secs=timeout_secs,
            )
            stack.callback(subject.close)
            found = await facts.measure(subject, plan)
            with contextlib.suppress(ServerError):
                await subject.push(0)  # the model's own weights
    return {
        "server": flags.server,
        "kind": type(kind).__name__.lower(),
        "model": flags.model,
        "dtype": flags.dtype,
        "transport": flags.transport,
        "tolerance": plan.tolerance,
        "date": datetime.date.today().isoformat(),
        "processor": f"{os.cpu_count()} x {platform.processor() or platform.machine()}",
        "facts": [vars(fact) for fact in found],
    }

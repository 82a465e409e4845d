"""`status`: who waits for whom in a run, and since when."""

import pathlib

from jaxrl_async import status
from jaxrl_async.channels import queue_client
from jaxrl_async.cli.config import UsageError, load_config, parse_flags, settings_of
from jaxrl_async.metrics import last_metrics
from jaxrl_async.settings import queue_access_of

CONNECT_SECS = 2.0

USAGE = """Prints who waits for whom in a run, since when, and who is at the end of the chain. A run whose roles are on
several hosts needs --queue."""


def main(argv: list[str]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        workdir=("", "directory of the run"),
        queue=("", "HOST:PORT of its queue; default the one that runs on this machine"),
    )
    if not flags.workdir:
        raise UsageError("--workdir=DIR is needed")
    workdir = pathlib.Path(flags.workdir)
    address = flags.queue or status.address_of(workdir)
    if address is None:
        raise UsageError(f"{workdir} has no {status.ROLES_FILE}: give --queue=HOST:PORT")
    row = last_metrics(workdir)
    try:
        found = _ask(address, workdir / "config.json")
    except PermissionError as error:
        raise UsageError(str(error)) from None
    print(status.explain(found, status.processes_of(workdir), int(row["step"]) if row else None))
    return 0 if found else 1


def _ask(address: str, config: pathlib.Path):
    options = dict(connect_timeout_secs=CONNECT_SECS, call_timeout_secs=CONNECT_SECS)
    if config.exists():
        options |= queue_access_of(settings_of(load_config(str(config))))
    try:
        with queue_client.LearnerQueue(address, **options) as queue:
            return queue.status()
    except (ConnectionError, TimeoutError, queue_client.QueueError):
        return None

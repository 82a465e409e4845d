"""`status`: who waits for whom in a run, and since when."""

import dataclasses
import pathlib

from jaxrl_async.cli.config import UsageError, load_config, parse_flags, refusing, settings_of
from jaxrl_async.config.checks import queue_access_of
from jaxrl_async.metrics import read_metrics
from jaxrl_async.queue.calls import BlockingGrpcCalls, QueueError
from jaxrl_async.queue.client import LearnerQueue
from jaxrl_async.runtime import keys, status
from jaxrl_async.runtime import workdir as workdirs
from jaxrl_async.runtime.progress import score_of

CONNECT_SECS = 2.0

USAGE = """Prints who waits for whom in a run, since when, and who is at the end of the chain; for a run that has ended,
how, and the command that resumes it. The score so far follows. It asks the queue, and lists the processes of a
supervisor on this machine."""


def main(argv: list[str]) -> int:
    flags = parse_flags(
        USAGE,
        argv,
        workdir=("", "directory of the run"),
        queue=("", "HOST:PORT of its queue; default as DIR/roles.json or DIR/config.json has it"),
    )
    if not flags.workdir:
        raise UsageError("--workdir=DIR is needed")
    workdir = pathlib.Path(flags.workdir)
    rows = read_metrics(workdir)
    step = int(rows[-1]["step"]) if rows else None
    score = f"\nscore so far: {score_of(rows)}" if score_of(rows) else ""
    end = status.end_of(workdir)
    if end and not flags.queue:
        print(_ended(end, step, workdir.absolute()) + score)
        return 0
    address = flags.queue or status.address_of(workdir)
    if address is None:
        raise UsageError(
            f"{workdir} has no {status.ROLES_FILE}, and no {status.CONFIG_FILE} with queue.address: "
            "give --queue=HOST:PORT"
        )
    with refusing(PermissionError):
        found = _ask(address, workdir)
    print(status.explain(found, status.processes_of(workdir), step) + score)
    return 0 if found else 1


def _ended(how: str, step: int | None, workdir: pathlib.Path) -> str:
    """How a supervised run ended, and the command that resumes it."""
    if how == "done":
        return f"the run is done: its last step was {step}"
    when = "before the first step" if step is None else f"after step {step}"
    words = {"left": f"the run stopped {when}"}
    words["failed"] = f"the run failed {when}, see {workdir}/logs"
    if not workdirs.checkpoint_steps(workdir):
        return f"{words[how]}; it has no checkpoint to resume from"
    return f"{words[how]}; resume with: {workdirs.resume_command(workdir)}"


def _ask(address: str, workdir: pathlib.Path):
    options = dict(
        connect_timeout_secs=CONNECT_SECS, call_timeout_secs=CONNECT_SECS, outage_secs=CONNECT_SECS
    )
    if (path := workdir / status.CONFIG_FILE).exists():
        settings = settings_of(load_config(str(path)))
        asked = dataclasses.replace(settings.queue, address=address)  # perhaps beyond loopback
        settings = keys.found(dataclasses.replace(settings, queue=asked), workdir)
        options |= queue_access_of(settings)
    try:
        with LearnerQueue(BlockingGrpcCalls(address, **options)) as queue:
            return queue.status()
    except (ConnectionError, TimeoutError, QueueError):
        return None

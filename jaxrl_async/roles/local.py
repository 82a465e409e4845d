"""All roles of a run on this machine, each a supervised process. Reads no flags."""

import pathlib
from collections.abc import Callable

from jaxrl_async.config.settings import Settings
from jaxrl_async.roles import start
from jaxrl_async.runtime import supervisor


def run(
    settings: Settings,
    *,
    workdir: pathlib.Path,
    resume: bool,
    on_step: Callable[[], None] | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> bool:
    """Runs every role until the run is done. `start.begin` comes first.

    Args:
      settings: the run.
      workdir: holds its config.json, which every role reads.
      resume: continue from the last checkpoint.
      on_step: called in this thread after steps.
      stop_requested: whether to stop at the end of a step, with a checkpoint.

    Returns:
      Whether the last step is done.

    Raises:
      StartError: the task, the tokenizer or the model cannot be used; nothing was started.
      RoleDiedError, StalledError: the run failed.
      ValueError: the machine has fewer devices than the roles need.
    """
    start.prepare(settings, workdir, resume=resume)
    return supervisor.run(
        settings, workdir=workdir, resume=resume, on_step=on_step, stop_requested=stop_requested
    )

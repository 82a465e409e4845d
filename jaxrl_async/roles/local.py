"""All roles of a run on this machine, each a supervised process. It knows no flags."""

import pathlib
from collections.abc import Callable

import ml_collections

from jaxrl_async.config.settings import Settings
from jaxrl_async.roles import start
from jaxrl_async.runtime import supervisor


def run(
    config: ml_collections.ConfigDict,
    settings: Settings,
    *,
    workdir: pathlib.Path,
    resume: bool,
    on_step: Callable[[], None] | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> bool:
    """Starts a run in a workdir, and returns when it is over.

    Args:
      config: written to the workdir's config.json, which every role reads.
      settings: the checked settings of the config.
      workdir: of a new run or, with resume, of one that has a checkpoint.
      resume: continue from the last checkpoint. Changes to the run's config are printed.
      on_step: called in this thread after steps.
      stop_requested: whether to stop at the end of a step, with a checkpoint.

    Returns:
      Whether the last step is done.

    Raises:
      StartError: the workdir or the task cannot be used; nothing was started.
      RoleDiedError, StalledError: the run failed.
      ValueError: the machine has fewer devices than the roles need.
    """
    if not start.begin(config, settings, workdir, resume=resume):
        return True
    start.prepare(settings, workdir)
    return supervisor.run(
        settings, workdir=workdir, resume=resume, on_step=on_step, stop_requested=stop_requested
    )

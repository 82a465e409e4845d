"""jaxrl_async: an asynchronous RL trainer for language models, in JAX.

    config = jaxrl_async.load_config("configs/quickstart.py")
    run = jaxrl_async.run(config, workdir="runs/a")
    run.evaluate()

Names are imported on first use: a role's process loads no more than it needs.

Reading order:

    types                  Prompt, Trajectory, Sample, Group, Chunk, Batch; the alignment law
    config/settings        every setting with its default, type and unit
    queue/admission        how many groups may be generated; queue/leases: which ones a step trains on
    rollout/worker         a permit becomes a rewarded group
    learner/learner        the loop: lease, pack, accumulate, update, commit, publish
    learner/train_step     its three jitted programs; a group's tokens become a gradient here
    objectives/objective   the loss, composed of named parts
    publishing/publisher   a version becomes what the servers hold
    roles/                 wires these parts; runtime/ starts and supervises the processes
"""

import importlib
import sys

__version__ = "0.2.0"

if sys.version_info < (3, 11):  # noqa: UP036
    # By its name `python -m` shows the line alone.
    raise ImportError(
        f"jaxrl_async needs Python >= 3.11, this is {sys.version.split()[0]}", name=__name__
    )

_NAMES = {
    "run": "jaxrl_async.api",
    "Run": "jaxrl_async.api",
    "load_config": "jaxrl_async.api",
    "register_task": "jaxrl_async.tasks",
    "register_reward": "jaxrl_async.rewards",
    "register_environment": "jaxrl_async.environments",
    "register_tool": "jaxrl_async.environments",
    "Observation": "jaxrl_async.environments",
    "Example": "jaxrl_async.tasks",
}
__all__ = list(_NAMES)


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]

"""The directory of a run: whether it holds one, the config it starts with, and what a resumed run may change of it."""

import json
import pathlib
import shlex
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import ml_collections

from jaxrl_async.rewards import importable
from jaxrl_async.tasks import TASKS

# Keys and blocks that a resumed run cannot change, and why. Whatever is not here is taken from the step on.
_PROMPTS = "the journal and the checkpoint count prompts of the old stream"
_MODEL = "the checkpoint holds the old model"
FIXED = {
    "mode": "the prompts that are under way were admitted by the old mode's bound on staleness",
    "seed": "samples and delays are drawn from it",
    "task": _PROMPTS,
    "tokenizer": _PROMPTS,
    "rollout.max_prompt_tokens": _PROMPTS,  # Longer ones are left out before they are counted.
    "rollout.group_size": "the journal holds groups of the old size",
    "learner.groups_per_step": "the journal holds steps of so many groups",
    "model": _MODEL,
}
FREE = ("model.remat",)  # of them: costs time or memory, and changes no number


def checkpoint_steps(workdir: pathlib.Path) -> list[int]:
    """The steps whose checkpoints are there, ascending; one that was not written to its end has another name."""
    return sorted(int(path.name) for path in workdir.glob("checkpoints/*") if path.name.isdigit())


def check(workdir: pathlib.Path, *, resume: bool) -> None:
    """Raises ValueError where a run can neither begin nor, with resume, go on."""
    started = bool(checkpoint_steps(workdir))
    if started and not resume:
        raise ValueError(f"{workdir} holds a run: go on with --resume, or name another --workdir")
    if resume and not started:
        raise ValueError(f"{workdir} has no checkpoint to resume from")


def nothing_to_do(workdir: pathlib.Path, num_steps: int) -> str:
    """Why a run that is resumed has nothing to do, "" where it has."""
    last = max(checkpoint_steps(workdir), default=-1)
    if last < num_steps:
        return ""
    return f"nothing to do: the last checkpoint is of step {last} (learner.num_steps = {num_steps})"


def changes(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> list[str]:
    """What a config changes of the one that the workdir's run has, a sentence for each key; [] where it has none.

    Raises:
      ValueError: a key of FIXED, with the reason; or the workdir's config.json is not JSON.
    """
    path = workdir / "config.json"
    if not path.is_file():
        return []
    old, new = dict(_flat(_read(path))), dict(_flat(json.loads(_text(config))))
    nothing = object()
    said = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key, nothing), new.get(key, nothing)
        if before == after:
            continue
        words = " → ".join("nothing" if v is nothing else repr(v) for v in (before, after))
        said.append(f"config differs from {path}: {key} {words}")
        if reason := _reason(key):
            raise ValueError(
                f"{said[-1]}: a resumed run cannot change it, {reason}; leave --config away, or name another --workdir"
            )
    return said


def write_config(workdir: pathlib.Path, config: ml_collections.ConfigDict) -> None:
    """Writes config.json, from which every role starts, into a directory that is made for it.

    A task that was registered by name is written as "module:attribute", which other processes can import. Another
    config.json, which the run has come to its last checkpoint with, is kept as config.until-step-N.json.

    Raises:
      ValueError: the config.json that is there is not JSON.
    """
    text, path = _text(config), workdir / "config.json"
    workdir.mkdir(parents=True, exist_ok=True)
    steps = checkpoint_steps(workdir)
    if steps and path.is_file() and _read(path) != json.loads(text):
        kept = workdir / f"config.until-step-{steps[-1]}.json"
        if not kept.exists():  # Else no checkpoint was made with what is there now.
            shutil.copy(path, kept)
    aside = workdir / ".config.json"  # Other roles may read it now.
    aside.write_text(text, encoding="utf-8")
    aside.rename(path)


def resume_command(workdir: pathlib.Path) -> str:
    """What goes on with a run, for a shell."""
    return f"python -m jaxrl_async train --resume {shlex.quote(f'--workdir={workdir}')}"


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON: {error}; mend it, or delete it and give --config"
        ) from None


def _text(config: ml_collections.ConfigDict) -> str:
    config = config.copy_and_resolve_references()
    config.task.name = importable(config.task.name, TASKS)
    return config.to_json(indent=2)


def _flat(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in block.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _reason(key: str) -> str:
    if key in FREE:
        return ""
    return next(
        (why for name, why in FIXED.items() if key == name or key.startswith(f"{name}.")), ""
    )

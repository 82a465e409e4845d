"""Other plans for the same run: what would make it fit, and which fits best. Every one is compiled, none guessed."""

import dataclasses
import math
import statistics
from collections.abc import Iterator

from jaxrl_async import parts
from jaxrl_async.config.settings import Settings
from jaxrl_async.fit.programs import Fit
from jaxrl_async.fit.targets import Target
from jaxrl_async.models.transformer import ModelConfig

TENSORS = (1, 2, 4, 8)
_REMATS = (False, "attention", "full")  # each needs less memory than the one before


def smaller(settings: Settings, fit: Fit | None = None) -> Iterator[tuple[str, Settings]]:
    """Changes that need less memory, each on top of those before, with the flags that make them.

    Args:
      settings: of the plan that does not fit.
      fit: of that plan; what is changed is of the roles that need too much. None: the learner's.
    """
    flags: list[str] = []
    large = fit.large_roles if fit else ("learner",)
    if "learner" in large:
        for flags, smaller_settings in _smaller_learner(settings):
            yield " ".join(flags), smaller_settings
        settings = smaller_settings if flags else settings
    if "servers" not in large:
        return
    slots = settings.server.num_slots
    while slots > 1:
        slots //= 2
        settings = _with(settings, "server", num_slots=slots)
        yield " ".join([*flags, f"--config.server.num_slots={slots}"]), settings


def _smaller_learner(settings: Settings) -> Iterator[tuple[list[str], Settings]]:
    flags = []
    now = parts.remat_of(settings.model)
    for remat in _REMATS[_REMATS.index(now) + 1 :]:
        flag, settings = _remat(settings, remat)
        flags = [flag]
        yield [flag], settings
    learner = settings.learner
    if learner.data > 1:
        fsdp = learner.fsdp * learner.data
        settings = _with(settings, "learner", data=1, fsdp=fsdp)
        flags.append(f"--config.learner.data=1 --config.learner.fsdp={fsdp}")
        yield [*flags], settings
    rows, shards = learner.microbatch_rows, learner.row_shards
    halved = []
    while rows // 2 >= shards and rows // 2 % shards == 0:
        rows //= 2
        settings = _with(settings, "learner", microbatch_rows=rows)
        halved = [f"--config.learner.microbatch_rows={rows}"]
        yield [*flags, *halved], settings
    if not learner.offload_moments:
        settings = _with(settings, "learner", offload_moments=True)
        yield [*flags, *halved, "--config.learner.offload_moments=True"], settings


def search(
    settings: Settings, config: ModelConfig, target: Target
) -> Iterator[tuple[str, Settings]]:
    """Meshes, rows and remat that target and settings allow, with the flags that make them. Expert and context stay,
    and slices are the target's."""
    rows, context = settings.learner.microbatch_rows, settings.learner.context
    expert, slices = settings.learner.expert, math.lcm(settings.learner.slices, target.num_slices)
    num_devices = target.num_devices - settings.server.devices
    for tensor in TENSORS:
        for data in (1, 2):
            fsdp, rest = divmod(num_devices, slices * data * expert * context * tensor)
            if rest or not fsdp or (data > 1 and fsdp == 1) or config.num_kv_heads % tensor:
                continue
            for some in sorted({rows // 2, rows, rows * 2}):
                if not some or some % (slices * data * fsdp * expert):
                    continue
                for remat in _REMATS:
                    mesh = {"data": data, "fsdp": fsdp, "tensor": tensor, "microbatch_rows": some}
                    mesh |= {"slices": slices} if slices != settings.learner.slices else {}
                    flags = [f"--config.learner.{name}={value}" for name, value in mesh.items()]
                    flag, changed = _remat(_with(settings, "learner", **mesh), remat)
                    yield " ".join([*flags, flag]), changed


def cost(fit: Fit) -> tuple[float, ...]:
    """Seconds, FLOPs and bytes between devices for a token. The seconds are the middle of what is predicted; they are 0
    where the compiler estimates none."""
    program = next(p for p in fit.programs if p.name == "accumulate")
    tokens = fit.plan["microbatch_rows"] * fit.plan["row_tokens"]
    num_bytes = sum(c.num_bytes for c in program.cost.collectives)
    secs = statistics.fmean(program.total_secs) if program.total_secs else 0.0
    return (secs / tokens, program.flops / tokens, num_bytes / tokens)


def _remat(settings: Settings, remat: bool | str) -> tuple[str, Settings]:
    """The flags for one of _REMATS, and the settings with it."""
    if not remat:
        return "--config.model.remat=False", _with(settings, "model", remat=False)
    flags = f"--config.model.remat=True --config.model.remat_policy={remat}"
    return flags, _with(settings, "model", remat=True, remat_policy=remat)


def _with(settings: Settings, block: str, **values) -> Settings:
    return dataclasses.replace(
        settings, **{block: dataclasses.replace(getattr(settings, block), **values)}
    )

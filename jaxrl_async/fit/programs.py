"""Compiles a run's programs for a target and measures them: memory, FLOPs, collectives, cycles.

The programs are the learner's own. The compilers of TPUs (libtpu) and of GPUs (JAX's CUDA plug-in) run on any Linux
machine; nothing is executed.
"""

import dataclasses
import importlib.metadata
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_async.config.settings import Settings
from jaxrl_async.fit import flops, hlo
from jaxrl_async.fit.targets import Target
from jaxrl_async.learner.packing import Packer
from jaxrl_async.models import sharding
from jaxrl_async.models.transformer import ModelConfig
from jaxrl_async.roles import parts

# libtpu looks for the machine's chips, asks its cloud about them, and takes a lock for one process.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
COMPILERS = {"tpu": ("libtpu", "fit-tpu"), "cuda": ("jax-cuda13-plugin", "fit-gpu")}


class FitError(ValueError):
    """Programs that cannot be compiled for a target; the message names the setting or what to install."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program. Bytes and seconds are of one device."""

    name: str
    argument_bytes: int
    temporary_bytes: int
    peak_bytes: int  # while it runs: arguments, results and temporaries
    resident_bytes: (
        int  # of the learner, not among its arguments: the optimizer's state, a reference policy
    )
    flops: float  # of products
    model_flops: float  # that the model needs for the same tokens
    cost: hlo.Cost
    secs: float  # predicted, of fusions and copies alone; 0 where the compiler estimates no cycles
    peak_share: float  # model_flops over those of the device's peak in secs; 0 without secs
    compile_secs: float

    @property
    def needed_bytes(self) -> int:
        return self.peak_bytes + self.resident_bytes


@dataclasses.dataclass(frozen=True)
class Fit:
    """The programs of one plan on one target."""

    target: Target
    plan: Mapping[str, Any]  # the settings that a search changes
    programs: tuple[Program, ...]
    error: str = ""  # of the compiler, where it gave up

    @property
    def needed_bytes(self) -> int:
        return max((p.needed_bytes for p in self.programs), default=0)

    @property
    def fits(self) -> bool:
        return not self.error and self.needed_bytes <= self.target.chip.memory_bytes


def check_compiler(target: Target) -> None:
    """Refuses a target whose compiler is not installed, or belongs to another JAX.

    Raises:
      FitError: names the pip command.
    """
    package, extra = COMPILERS[target.chip.platform]
    remedy = f'pip install "jaxrl_async[{extra}]"'
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise FitError(
            f"target {target.name} needs the compiler {package}, which is not installed: {remedy}"
        ) from None
    if target.chip.platform == "cuda" and found != jax.__version__:
        raise FitError(f"{package} {found} is of another JAX than {jax.__version__}: {remedy}")


def check_plan(settings: Settings, target: Target) -> None:
    """Refuses a mesh that is not the target's, and kernels that the target lacks.

    Raises:
      FitError: names the settings and the bound.
    """
    learner, kernel = settings.learner, settings.learner.attention_kernel
    sizes = learner.data, learner.fsdp, learner.tensor
    if math.prod(sizes) != target.num_devices:
        needed = max(1, target.num_devices // (learner.data * learner.tensor))
        raise FitError(
            f"learner.data · learner.fsdp · learner.tensor = {' · '.join(map(str, sizes))} = {math.prod(sizes)}, and "
            f"{target.name} has {target.num_devices} devices: --config.learner.fsdp={needed}, or --search"
        )
    if kernel == "splash" and target.chip.platform != "tpu":
        raise FitError(f"learner.attention_kernel 'splash' is a TPU's, and {target.name} has none")
    if kernel == "cudnn":
        raise FitError(
            "learner.attention_kernel 'cudnn' is built by the card's own library: it cannot be compiled here; "
            "--config.learner.attention_kernel=xla shows the rest"
        )


def devices_of(target: Target) -> list:
    """The target's devices, which no machine needs to have.

    Raises:
      FitError: the compiler refuses the topology.
    """
    from jax.experimental import topologies

    if target.chip.platform == "tpu":
        for name, value in _WITHOUT_TPU.items():
            os.environ.setdefault(name, value)
    try:
        return list(topologies.get_topology_desc(**target.topology).devices)
    except Exception as error:  # of the plug-in, of any kind
        raise FitError(f"the compiler of {target.name} does not start: {error}") from error


def compile_run(settings: Settings, config: ModelConfig, target: Target, devices) -> Fit:
    """Compiles the learner's programs for a target.

    Args:
      settings: of the run; its mesh has the target's number of devices.
      config: the model's shape.
      target: the devices, described.
      devices: of `devices_of`.
    """
    learner = dataclasses.replace(settings.learner, num_processes=1)
    settings = dataclasses.replace(settings, learner=learner)
    mesh = sharding.make_mesh(learner.data, learner.fsdp, learner.tensor, devices=devices)
    train_step = parts.train_step_of(settings, config, mesh)
    plan = {
        "data": learner.data,
        "fsdp": learner.fsdp,
        "tensor": learner.tensor,
        "microbatch_rows": learner.microbatch_rows,
        "row_tokens": learner.row_tokens,
        "num_minibatches": learner.num_minibatches,
        "remat": config.remat,
    }
    state = train_step.abstract_state()
    opt_bytes, param_bytes = _bytes_of_one(state.opt_state), _bytes_of_one(state.params)
    found = []
    batch = Packer(learner, process=0).padding()
    for name, traced in train_step.trace(batch).items():
        start = time.monotonic()
        try:
            compiled = traced.lower().compile()
        except Exception as error:  # RESOURCE_EXHAUSTED, and what else a compiler refuses
            return Fit(target, plan, tuple(found), f"{name}: {_short(error)}")
        resident = opt_bytes if name != "update" else 0
        if settings.loss.needs_reference and name != "accumulate":
            resident += param_bytes
        if name == "score":
            resident += param_bytes  # of the accumulator's gradients
        found.append(
            _measure(
                name, traced, compiled, config, learner, target, resident, time.monotonic() - start
            )
        )
    return Fit(target, plan, tuple(found))


def _measure(name, traced, compiled, config, learner, target, resident, compile_secs) -> Program:
    memory, cost = compiled.memory_analysis(), hlo.read(compiled.as_text())
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    model = 0.0
    if name != "update":
        rows, tokens = learner.microbatch_rows, learner.row_tokens
        model = flops.of_model(config, rows, tokens, backward=name == "accumulate")
    clock, peak = target.chip.clock_hz, target.chip.peak_flops
    secs = cost.cycles / clock if clock else 0.0
    return Program(
        name=name,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=memory.argument_size_in_bytes + memory.temp_size_in_bytes + results,
        resident_bytes=resident,
        flops=flops.of_jaxpr(traced.jaxpr),
        model_flops=model,
        cost=cost,
        secs=secs,
        peak_share=model / target.num_devices / peak / secs if secs else 0.0,
        compile_secs=compile_secs,
    )


def _bytes_of_one(tree) -> int:
    """Bytes of one device's shards."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _short(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:400]

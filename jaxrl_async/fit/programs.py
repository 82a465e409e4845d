"""Compiles a run's programs for a target and measures them: memory, FLOPs, collectives, cycles.

The programs are the learner's own, and the embedded engine's where a run starts one. The compilers of TPUs (libtpu)
and of GPUs (JAX's CUDA plug-in) run on any Linux machine; nothing is executed.
"""

import dataclasses
import functools
import importlib.metadata
import os
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_async import parts
from jaxrl_async.config.settings import Settings
from jaxrl_async.fit import flops, hlo, links
from jaxrl_async.fit.targets import Target
from jaxrl_async.inference import programs as inference
from jaxrl_async.learner.train_step import mesh_of
from jaxrl_async.models import lora
from jaxrl_async.models.transformer import ModelConfig
from jaxrl_async.runtime.supervisor import divide_devices, in_one_process

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


Range = tuple[float, float]  # with links, kernels and the kernels' memory at full rate, and at half


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """Predicted seconds of one run on one device."""

    cost: hlo.Cost  # its collectives with the waits for them
    secs: float  # of fusions and copies alone, by the compiler's cycles; 0 where it estimates none
    ideal_secs: float  # of the FLOPs that the model needs, at the device's peak
    kernel_flops: float = 0.0  # of custom kernels, on all devices
    kernel_secs: Range = (0.0, 0.0)  # of these FLOPs, or of the kernels' bytes: an assumption

    @property
    def wait_secs(self) -> Range:
        """That computation waits for transfers; 0 where the target's links are not published."""
        waits = [c.waits for c in self.cost.collectives if c.waits]
        return sum(fast for fast, _ in waits), sum(slow for _, slow in waits)

    @property
    def total_secs(self) -> Range | None:
        """All that is predicted; None where the compiler estimates no cycles."""
        if not self.secs:
            return None
        ends = zip(self.kernel_secs, self.wait_secs, strict=True)
        return tuple(self.secs + kernels + waits for kernels, waits in ends)

    @property
    def peak_share(self) -> Range | None:
        """The model's FLOPs beside the device's peak in that time, at full rate and at half."""
        if not self.total_secs or not self.ideal_secs:
            return None
        return tuple(self.ideal_secs / secs for secs in self.total_secs)


@dataclasses.dataclass(frozen=True)
class Program(Times):
    """One compiled program. Bytes and seconds are of one device."""

    name: str
    argument_bytes: int
    temporary_bytes: int
    peak_bytes: int  # while it runs: arguments, results and temporaries
    # kept beside its arguments: the optimizer's state, a base, a reference policy; of an engine the next version
    resident_bytes: int
    flops: float  # of products
    model_flops: float  # that the model needs for the same tokens
    compile_secs: float
    aliased_bytes: int = 0  # of arguments that results overwrite in place
    attention_bytes: float = 0.0  # that attention reads and writes at least

    @property
    def needed_bytes(self) -> int:
        return self.peak_bytes + self.resident_bytes


@dataclasses.dataclass(frozen=True)
class Engine:
    """The programs of the embedded engine, each server on one device."""

    programs: tuple[Program, ...]  # "decode": one step; "prefill": the longest row's last block
    num_servers: int
    num_slots: int
    max_total_tokens: int
    weights_bytes: int  # of a whole model
    version_bytes: int  # of those, that a version holds: all, or adapters alone
    cache_bytes: int  # keys and values of all slots
    in_learner: bool = False  # of one process with the learner
    own_devices: bool = False  # of that process
    error: str = ""  # of the compiler, where it gave up

    @property
    def needed_bytes(self) -> int:
        return _most(self.programs)


@dataclasses.dataclass(frozen=True)
class Fit:
    """The programs of one plan on one target."""

    target: Target
    plan: Mapping[str, Any]  # the settings that a search changes
    programs: tuple[Program, ...]  # the learner's
    error: str = ""  # of the compiler, where it gave up
    compiler: str = ""  # name and version
    network: links.Network | None = None  # of the learner's devices
    engine: Engine | None = None  # of a run that starts embedded servers

    @property
    def all_programs(self) -> tuple[Program, ...]:
        """The learner's, then the embedded servers'."""
        return self.programs + (self.engine.programs if self.engine else ())

    @property
    def role_bytes(self) -> tuple[int, ...]:
        """What the learner needs of a device, and what a server does."""
        return _most(self.programs), *([self.engine.needed_bytes] if self.engine else [])

    @property
    def shares_device(self) -> bool:
        """Whether the servers run on a device of the learner."""
        engine = self.engine
        if engine is None or engine.own_devices:
            return False
        return engine.in_learner or self.target.num_devices == 1

    @property
    def share(self) -> float:
        """The part of a device's memory that one role may take."""
        on_gpu = self.target.chip.platform == "cuda"
        if not self.shares_device or self.engine.in_learner or not on_gpu:
            return 1.0
        division = divide_devices(("gpu", 1), num_servers=self.engine.num_servers)
        return float(division["learner"]["XLA_PYTHON_CLIENT_MEM_FRACTION"])

    @property
    def needed_bytes(self) -> int:
        """Of the device that needs most; of a single one, by learner and servers together."""
        if not self.shares_device:
            return max(self.role_bytes)
        learner, server = self.role_bytes
        return learner + self.engine.num_servers * server

    @property
    def large_roles(self) -> tuple[str, ...]:
        """Of a plan that does not fit: which of "learner" and "servers" need too much, alone or else together."""
        memory = self.share * self.target.chip.memory_bytes
        errors = self.error, self.engine.error if self.engine else ""
        roles = list(zip(("learner", "servers"), self.role_bytes, errors, strict=False))
        alone = tuple(name for name, needed, error in roles if error or needed > memory)
        return alone or tuple(name for name, *_ in roles)

    @property
    def fits(self) -> bool:
        if self.error or (self.engine and self.engine.error):
            return False
        memory = self.target.chip.memory_bytes
        return self.needed_bytes <= memory and max(self.role_bytes) <= self.share * memory


def _most(programs: tuple[Program, ...]) -> int:
    return max((program.needed_bytes for program in programs), default=0)


def compiler_of(target: Target) -> str:
    """Name and version of the compiler, and of JAX."""
    package, _ = COMPILERS[target.chip.platform]
    return f"{package} {importlib.metadata.version(package)}, jax {jax.__version__}"


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
    sizes = (
        learner.slices,
        learner.data,
        learner.fsdp,
        learner.expert,
        learner.context,
        learner.tensor,
    )
    taken = settings.server.devices
    num_devices = target.num_devices - taken
    if num_devices < 1:
        raise FitError(
            f"server.devices = {taken} leaves the learner none of the {target.num_devices} devices "
            f"of {target.name}"
        )
    if learner.slices % target.num_slices:
        raise FitError(
            f"learner.slices = {learner.slices} must be a multiple of {target.num_slices}, the slices of "
            f"{target.name}: --config.learner.slices={target.num_slices}, or --search"
        )
    if learner.num_devices != num_devices:
        needed = max(1, num_devices * learner.fsdp // learner.num_devices)
        beside = f" beside server.devices = {taken}" if taken else ""
        raise FitError(
            f"learner.slices · data · fsdp · expert · context · tensor = {' · '.join(map(str, sizes))} = "
            f"{learner.num_devices}, and {target.name} has {num_devices} devices{beside}: "
            f"--config.learner.fsdp={needed}, or --search"
        )
    if kernel == "splash" and target.chip.platform != "tpu":
        raise FitError(f"learner.attention_kernel 'splash' is a TPU's, and {target.name} has none")
    if kernel in ("cudnn", "triton"):
        builder = (
            "the card's own library" if kernel == "cudnn" else "JAX for the card that it finds"
        )
        raise FitError(
            f"learner.attention_kernel {kernel!r} is built by {builder}: it cannot be compiled here; "
            "--config.learner.attention_kernel=xla shows the rest"
        )


def devices_of(target: Target) -> list:
    """The target's devices, which no machine needs to have. Raises FitError: the compiler refuses the topology."""
    from jax.experimental import topologies

    if target.chip.platform == "tpu":
        for name, value in _WITHOUT_TPU.items():
            os.environ.setdefault(name, value)
    try:
        return list(topologies.get_topology_desc(**target.topology).devices)
    except Exception as error:  # of the plug-in, of any kind
        raise FitError(f"the compiler of {target.name} does not start: {error}") from error


def network_of(target: Target, devices, partitions) -> links.Network | None:
    """What links the devices of a program; None of a single one, and where the rates are not published.

    Args:
      devices: all of the target's.
      partitions: those of the program, in its order.
    """
    if len(partitions) < 2 or not target.chip.link_bandwidth:
        return None
    if target.chip.platform == "cuda":  # Each host is a process.
        return links.Network(target.chip, (), tuple(d.process_index for d in partitions))
    slices = tuple(getattr(d, "slice_index", None) or 0 for d in partitions)
    shape = tuple(1 + max(places) for places in zip(*(d.coords for d in devices), strict=True))
    rank = len(shape) - (shape[-1] == 1)
    coords = tuple(tuple(d.coords[:rank]) for d in partitions)
    return links.Network(target.chip, coords, slices, shape[:rank])


def compile_run(settings: Settings, config: ModelConfig, target: Target, devices) -> Fit:
    """Compiles the learner's programs for a target's `devices`; its mesh has all of them, less server.devices."""
    learner = dataclasses.replace(settings.learner, num_processes=1)
    settings = dataclasses.replace(settings, learner=learner)
    try:
        mesh = mesh_of(learner, devices[: learner.num_devices])
        train_step = parts.train_step_of(settings, config, mesh)
    except ValueError as error:  # of a kernel on a target that it is not written for, or of slices
        raise FitError(f"{target.name}: {error}") from error
    plan = {
        "slices": learner.slices,
        "data": learner.data,
        "fsdp": learner.fsdp,
        "expert": learner.expert,
        "context": learner.context,
        "tensor": learner.tensor,
        "microbatch_rows": learner.microbatch_rows,
        "row_tokens": learner.row_tokens,
        "num_minibatches": learner.num_minibatches,
        "remat": config.remat,
        "attention": train_step.attention_kernel,
        "gradient_sums": learner.gradient_sums,
    }
    state = train_step.abstract_state()
    opt_bytes, param_bytes = _bytes_of_one(state.opt_state), _bytes_of_one(state.params)
    grads_bytes = _bytes_of_one(train_step.abstract_accumulator().grads)
    host_bytes = 0  # among the arguments that the compiler counts
    if learner.offload_moments:
        if target.chip.platform == "cuda":  # A described GPU has no host: all count as its own.
            own = 2 * _bytes_of_one(train_step.abstract_moments())  # on their way in and out
            host_bytes = opt_bytes - min(own, opt_bytes)
        opt_bytes = 0
    base_bytes = _bytes_of_one(train_step.abstract_base())
    found = []
    batch = parts.packer_of(settings).padding()
    network = network_of(target, devices, list(mesh.devices.flat))
    for name, traced in train_step.trace(batch).items():
        resident = opt_bytes if name != "update" else base_bytes
        if settings.loss.needs_reference and name != "accumulate":
            resident += param_bytes
        if name == "score":
            resident += grads_bytes
        model = attention_bytes = 0.0
        if name != "update":
            work = (config, learner.microbatch_rows, learner.row_tokens)
            model = flops.of_model(*work, backward=name == "accumulate")
            attention_bytes = flops.bytes_of_attention(*work, backward=name == "accumulate")
        elsewhere = host_bytes if name == "update" else 0
        measured = (traced, model, target, network, learner.num_devices, resident, elsewhere)
        try:
            program = _compile(name, *measured)
            attention_bytes /= learner.num_devices
            found.append(dataclasses.replace(program, attention_bytes=attention_bytes))
        except FitError as error:
            return Fit(target, plan, tuple(found), str(error), compiler_of(target), network)
    return Fit(target, plan, tuple(found), "", compiler_of(target), network)


def has_engine(settings: Settings) -> bool:
    """Whether the run starts embedded servers: it has no addresses of others, and no command that starts them."""
    return bool(settings.server.num_started and not settings.server.command)


def compile_engine(settings: Settings, config: ModelConfig, target: Target, device) -> Engine:
    """Compiles the embedded engine's programs for one device of a target."""
    server = settings.server
    shapes = inference.Shapes(
        config,
        num_slots=server.num_slots,
        max_total_tokens=server.max_total_tokens,
        decode_chunk=server.decode_chunk,
        max_kept=parts.record_of(settings).max_kept,
        device=device,
    )
    tokens, block = server.max_total_tokens, shapes.block
    model_flops = functools.partial(flops.of_model, config, 1, backward=False)
    last_block = model_flops(tokens, logits=False) - model_flops(tokens - block, logits=False)
    programs = {
        # A step decodes a token for each slot, which attends to half of the cache on average.
        "decode": (shapes.trace_decode, server.num_slots * model_flops(tokens) / tokens),
        # Of the longest row.
        "prefill": (lambda: shapes.trace_prefill(block, block < tokens), last_block),
    }
    weights, cache = _bytes(shapes.params), _bytes(shapes.cache)
    version = _bytes(lora.split(shapes.params)[0]) if config.lora else weights
    # A new version is loaded while the one before it still answers. On a GPU its layers lie in one array, and apart.
    resident = version + _bytes(shapes.layers)
    found, error = [], ""
    for name, (trace, model) in programs.items():
        try:
            found.append(_compile(name, trace(), model, target, None, 1, resident))
        except FitError as refused:
            error = str(refused)
            break
    return Engine(
        tuple(found),
        num_servers=server.num_started,
        in_learner=in_one_process(settings, (target.chip.platform, target.num_devices)),
        own_devices=settings.server.devices > 0,
        num_slots=server.num_slots,
        max_total_tokens=server.max_total_tokens,
        weights_bytes=weights,
        version_bytes=version,
        cache_bytes=cache,
        error=error,
    )


def times_of(
    text: str,
    target: Target,
    network: links.Network | None,
    *,
    num_devices: int,
    model_flops: float,
    kernel_flops: float,
) -> Times:
    """The predicted times of a compiled module's text. FLOPs are those of all devices."""
    chip, schedule = target.chip, hlo.schedule_of(text)
    cost = hlo.cost_of(schedule)
    moved_secs = cost.kernel_bytes / chip.bandwidth
    peak_secs = max(kernel_flops / num_devices / chip.peak_flops, moved_secs)
    kernel_secs = tuple(peak_secs / share for share in links.SHARES)
    if network:
        ends = [
            links.waits_of(schedule, network, chip.clock_hz, secs / max(1, cost.kernels), share)
            for secs, share in zip(kernel_secs, links.SHARES, strict=True)
        ]
        charged = [
            dataclasses.replace(c, waits=tuple(end[c.kind, c.asynchronous] for end in ends))
            for c in cost.collectives
        ]
        cost = dataclasses.replace(cost, collectives=tuple(charged))
    return Times(
        cost=cost,
        secs=cost.cycles / chip.clock_hz if chip.clock_hz else 0.0,
        ideal_secs=model_flops / num_devices / chip.peak_flops,
        kernel_flops=kernel_flops,
        kernel_secs=kernel_secs,
    )


def _compile(
    name, traced, model_flops, target, network, num_devices, resident, host_bytes=0
) -> Program:
    """Raises FitError where the compiler gives up."""
    start = time.monotonic()
    try:
        compiled = traced.lower().compile()
    except Exception as error:  # RESOURCE_EXHAUSTED, and what else a compiler refuses
        raise FitError(f"{name}: {_short(error)}") from error
    compile_secs = time.monotonic() - start
    memory = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes - host_bytes
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    times = times_of(
        compiled.as_text(),
        target,
        network,
        num_devices=num_devices,
        model_flops=model_flops,
        kernel_flops=flops.of_jaxpr(traced.jaxpr, kernels_alone=True),
    )
    return Program(
        name=name,
        argument_bytes=arguments,
        temporary_bytes=memory.temp_size_in_bytes,
        peak_bytes=arguments + memory.temp_size_in_bytes + results,
        resident_bytes=resident,
        flops=flops.of_jaxpr(traced.jaxpr),
        model_flops=model_flops,
        compile_secs=compile_secs,
        aliased_bytes=memory.alias_size_in_bytes - host_bytes,
        **vars(times),
    )


def _bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _bytes_of_one(tree) -> int:
    """Bytes of one device's shards."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def _short(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:400]

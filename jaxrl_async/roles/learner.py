"""The learner role: one process of the SPMD program. Process 0 also publishes weights and writes metrics."""

import contextlib
import dataclasses
import errno
import functools
import logging
import os
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_async import parts
from jaxrl_async.config.checks import queue_access_of
from jaxrl_async.config.forms import delay_of
from jaxrl_async.config.settings import Settings
from jaxrl_async.evaluation.evaluator import Evaluator
from jaxrl_async.learner import checkpoint, follower, processes
from jaxrl_async.learner import learner as learners
from jaxrl_async.learner.checkpoint import Checkpoints
from jaxrl_async.learner.lease import Lease
from jaxrl_async.learner.processes import Agreement
from jaxrl_async.learner.profile import Profile, TracedTimers
from jaxrl_async.learner.train_step import TrainState, TrainStep, mesh_of
from jaxrl_async.learner.versions import Delay, Versions
from jaxrl_async.metrics import MetricsWriter, Timers
from jaxrl_async.models import hf, sharding
from jaxrl_async.preflight import peers
from jaxrl_async.preflight.server import kept_adapters
from jaxrl_async.publishing import scored
from jaxrl_async.publishing.discovery import Discovery
from jaxrl_async.publishing.publisher import Publisher
from jaxrl_async.publishing.scored import ScoredPrompts
from jaxrl_async.publishing.transports import Transport
from jaxrl_async.queue.calls import CALL_TIMEOUT_SECS, CONNECT_TIMEOUT_SECS, BlockingGrpcCalls
from jaxrl_async.queue.client import LearnerQueue
from jaxrl_async.records import Identity, ResumePoint, Share, Wait
from jaxrl_async.runtime import disk, preemption
from jaxrl_async.runtime.gc_freeze import gc_freeze
from jaxrl_async.runtime.supervisor import visible_devices
from jaxrl_async.runtime.workdir import watched
from jaxrl_async.samples import SampleWriter
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import Expected
from jaxrl_async.tasks.task import Task
from jaxrl_async.types import Group
from jaxrl_async.versions.memory import MemoryStore
from jaxrl_async.versions.store import WeightStore

REPORT_SECS = 2.0  # between the learner's reports to the queue

log = logging.getLogger(__name__)


def run(
    settings: Settings,
    workdir: pathlib.Path,
    *,
    process: int,
    coordinator: str,
    resume: bool,
    fallback: bool = False,
    stop_requested: Callable[[], bool],
    links: "Links | None" = None,
) -> bool:
    """Trains as one process of the learner, from the start or from the last checkpoint.

    Args:
      settings: the run; queue.address and server.addresses are set.
      workdir: directory of the run.
      process: index of this process, in [0, learner.num_processes).
      coordinator: "host:port" of process 0, where there are several; see `processes.joined`.
      resume: continue from the last checkpoint.
      fallback: from the last intact one, where later ones are damaged; a run epoch begins.
      stop_requested: whether to stop at the end of a step, with a checkpoint.
      links: to the queue and the servers; over the network for None.

    Returns:
      Whether the last step is done.
    """
    set_flags(settings)
    num_processes, directory = settings.learner.num_processes, settings.checkpoint.directory
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            processes.joined(coordinator=coordinator, process=process, num_processes=num_processes)
        )
        lease = Lease(directory, workdir) if directory and process == 0 else None
        if lease:
            stack.enter_context(lease.held())
        checkpoints = parts.checkpoints_of(settings, workdir, remove_unfinished=True)
        # Whatever fails meanwhile: a process that ends while one is written logs errors below the cause.
        stack.enter_context(contextlib.closing(checkpoints))
        of = (settings, workdir, process, links or Links(settings), checkpoints, lease)
        return _Process(*of).train(resume=resume, fallback=fallback, stop_requested=stop_requested)


def set_flags(settings: Settings) -> None:
    """Sets the flags of JAX and XLA that the settings ask for, before JAX looks for devices or compiles."""
    if settings.learner.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", settings.learner.compilation_cache)
    if settings.learner.deterministic and visible_devices()[0] == "gpu":
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"


class Links:
    """The learner's ways to the queue and to the servers, over the network."""

    devices: Sequence[jax.Device] | None = None  # of the learner's mesh; None for all

    def __init__(self, settings: Settings):
        self._settings = settings

    def check(self, expected: Expected) -> bool:
        """Checks the servers and the reward services that answer; raises PreflightError.

        Returns:
          Whether a server verifies nothing itself.
        """
        found = peers.check_servers(self._settings, expected)
        peers.check_rewards(self._settings)
        return found

    def sharing(self) -> dict[str, Any]:
        """Arguments of `TrainStep` that say what is shared with servers."""
        return {}

    def freeze(self, base: Any) -> None:
        """Gives engines in this process the weights beside the adapters; the others read them. None: there are none."""

    def metrics(self, workdir: pathlib.Path) -> MetricsWriter:
        """Writes the rows of steps."""
        return MetricsWriter(workdir, parts.tracker_of(self._settings, workdir))

    def queue(self, share: Share) -> LearnerQueue:
        """The client of the queue, not opened yet, of the learner process with this share."""
        queue, access = self._settings.queue, queue_access_of(self._settings)
        calls = BlockingGrpcCalls(queue.address, outage_secs=queue.outage_secs, **access)
        kind = LearnerQueue if share.process == 0 else follower.FollowerQueue
        return kind(calls, share)

    def store(self, workdir: pathlib.Path, delay: Delay, writer: Identity) -> WeightStore:
        """Keeps the versions that servers may still read."""
        keep = max(self._settings.weights.keep, delay.max_steps + 2)
        return WeightStore(workdir / "weights", keep=keep, writer=writer)

    def versions(self, publisher, store: WeightStore, **values: Any) -> Versions:
        """Passes versions to the publisher; arguments as of `Versions`."""
        return Versions(publisher, store, **values)

    def servers(self, writer: Identity, expected: Expected) -> dict[str, Any]:
        """Arguments of `Publisher` that say how it reaches the servers."""
        settings, weights = self._settings, self._settings.weights
        access = parts.servers_access_of(settings) | {"vocab_size": expected.config["vocab_size"]}
        return {
            "client": InferenceClient(**access, run_id=writer.run_id),
            "transport": Transport(
                weights.transport,
                mode=weights.pause_mode,
                writer=writer,
                pause_lease_secs=weights.pause_lease_secs,
                verify=weights.verify,
                keep_adapters=kept_adapters(settings.queue.max_staleness),
                delta=weights.delta,
                fanout=weights.fanout,
                rendezvous=weights.rendezvous,
            ),
            "discovery": discovery_of(settings),
            "preflight": peers.check_of(settings, expected),
            "scored": _scored_of(settings, writer.run_id),
            "scores_every_push": weights.verify != "all",
        }


@dataclasses.dataclass(frozen=True)
class _Start:
    """The state that a learner begins with."""

    state: TrainState
    version: int = 0  # of the state
    resume_point: ResumePoint | None = None  # None for a new run
    forked: bool = False  # Later checkpoints were damaged.


@dataclasses.dataclass(frozen=True)
class _Process:
    """One process of the learner: `train`, and what it makes, in the order of the calls."""

    settings: Settings
    workdir: pathlib.Path
    process: int
    links: Links
    checkpoints: Checkpoints
    lease: Lease | None  # on the bucket of the checkpoints, of process 0

    @property
    def _part(self) -> dict[str, int]:
        return {"process": self.process, "num_processes": self.settings.learner.num_processes}

    def train(self, *, resume: bool, fallback: bool, stop_requested: Callable[[], bool]) -> bool:
        """Trains to the last step, or to a stop; arguments and result as of `run`."""
        settings, workdir, links = self.settings, self.workdir, self.links
        tokenizer = parts.tokenizer_of(settings, workdir)
        config = parts.model_config_of(settings, tokenizer)
        expected = peers.expected_of(settings, config)
        is_foreign = self.process == 0 and links.check(expected)
        if self.process == 0:
            peers.check_teachers(settings, expected)
        mesh = mesh_of(settings.learner, links.devices)
        train_step = parts.train_step_of(settings, config, mesh, **links.sharing())
        read_task = functools.cache(functools.partial(parts.same_task_of, settings, workdir))
        if resume:
            start = self._restored(train_step, fallback)
        else:
            params = self._first_trained(config, mesh, tokenizer, read_task)
            start = _Start(train_step.init(params))
            self.checkpoints.save(0, start.state, ResumePoint(0, 0, (), {}, {}).to_json())
        evaluator = evaluator_of(settings, workdir, read_task) if self.process == 0 else None
        read_task.cache_clear()  # Frees its questions.
        base = parts.base_params(settings, workdir, config, mesh)
        train_step.freeze(base)
        links.freeze(base)

        def first() -> Any:
            return self.checkpoints.restore(0, train_step.abstract_state())[0].params

        reference = parts.reference_of(settings, config, mesh, first)
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(start.state))
        if self.process == 0:
            _log_plan(*preemption.plan(num_bytes, None, settings.checkpoint.grace_secs))
        with contextlib.ExitStack() as stack:
            share = Share(**self._part, num_minibatches=settings.learner.num_minibatches)
            queue = stack.enter_context(links.queue(share))
            stack.callback(self.checkpoints.settle)  # Its end may need the queue.
            identity = self._begin(queue)
            delay = Delay(*delay_of(settings.rollout.delay_steps), seed=settings.seed)
            store = links.store(workdir, delay, identity)
            if self.process == 0:
                servers = links.servers(identity, expected)
                stack.callback(servers["transport"].close)
                own = {"is_resumed": resume, "evaluation": evaluator, **servers}
                publisher = self._publisher(queue, store, identity, **own)
                metrics = links.metrics(workdir)
            else:  # It follows process 0, which alone prunes the store.
                publisher = follower.FollowerPublisher(queue.watch_version)
                metrics = follower.FollowerMetrics()
            kept = SampleWriter(
                workdir,
                functools.partial(tokenizer.decode, special=True),
                per_step=settings.journal.samples_per_step if self.process == 0 else 0,
                show=metrics.show,
            )
            for part_of_run in (kept, metrics, publisher):
                stack.callback(part_of_run.close)
            versions = links.versions(
                publisher,
                store,
                config=config,
                dtype=settings.weights.dtype,
                base=parts.base_name(settings, workdir) if config.lora else "",
                timeout_secs=push_deadline_of(settings),
                delay=delay,
                score=_score_of(settings, train_step, publisher, is_foreign),
                num_parts=_num_parts(settings),
                **self._part,
            )
            profile = Profile(workdir / "profile", settings.learner.profile_steps)
            stack.callback(profile.close)
            timers = TracedTimers() if settings.learner.profile_steps else Timers()
            ended = threading.Event()
            stack.callback(ended.set)
            of = (queue, self.process, timers, publisher, ended)
            report = functools.partial(_report_status, *of)
            threading.Thread(target=report, name="status", daemon=True).start()
            kept_bytes = 0 if settings.checkpoint.directory else num_bytes
            record = parts.record_of(settings)
            version_bytes = _version_bytes(start.state, settings.weights.dtype, store)
            return self._loop(
                start,
                disk.Room(settings, workdir, kept_bytes, version_bytes, record.token_bytes),
                stop_requested,
                train_step=train_step,
                queue=queue,
                publisher=versions,
                metrics=metrics,
                timers=timers,
                reference=reference,
                kept=kept,
                profile=profile,
            )

    def _restored(self, train_step: TrainStep, fallback: bool) -> _Start:
        version, state, position, damaged = self.checkpoints.restore_last(
            train_step.abstract_state(), fallback=fallback
        )
        for sentence in damaged:
            log.warning("fallback: %s; it is put aside, and a run epoch begins", sentence)
        log.info("resumed at version %d", version)
        return _Start(state, version, ResumePoint.from_json(position), bool(damaged))

    def _first_trained(self, config, mesh, tokenizer, read_task):
        """The trained parameters of version 0. Of adapters, their base is written first, where no files have it."""
        settings, workdir = self.settings, self.workdir
        of_first = (settings, config, mesh, tokenizer, read_task)
        if not config.lora:
            return parts.first_params_of(*of_first)
        if not parts.has_base_files(settings):
            base, plain = parts.first_params_of(*of_first), dataclasses.replace(config, lora=None)
            tensors = hf.to_tensors(base, plain, config.lora.base_dtype, part=self.process)
            if self.process == 0:
                store = WeightStore(parts.base_directory(settings, workdir).parent, keep=1)
                store.write(0, tensors, hf.write_config(plain))
            else:  # It gathers with process 0.
                list(tensors)
            processes.barrier("the base is written", timeout_secs=checkpoint.WRITE_TIMEOUT_SECS)
        if not settings.model.lora.path:
            return sharding.init_adapters(config, mesh, settings.seed)
        adapters = hf.read_adapters(settings.model.lora.path, config)
        return sharding.place(adapters, sharding.param_shardings(mesh, adapters))

    def _begin(self, queue: LearnerQueue) -> Identity:
        """Starts the learner at the queue, in process 0; all its processes call as one."""
        begun = queue.begin() if self.process == 0 else None
        text = processes.share(
            "identity",
            begun and f"{begun.run_id} {begun.generation}",
            num_processes=self.settings.learner.num_processes,
            timeout_secs=CONNECT_TIMEOUT_SECS + CALL_TIMEOUT_SECS,
        )
        run_id, generation = text.split()
        queue.join(int(generation))
        return Identity(run_id, int(generation))

    def _publisher(
        self, queue: LearnerQueue, store: WeightStore, identity: Identity, **own: Any
    ) -> Publisher:
        weights, server = self.settings.weights, self.settings.server
        return Publisher(
            server.controls,
            run_id=identity.run_id,
            pin=store.pin,
            announce=queue.publish_version,
            push_timeout_secs=weights.push_timeout_secs,
            poll_secs=weights.poll_secs,
            max_paused=weights.max_paused,
            start_timeout_secs=server.start_timeout_secs,
            quorum=server.quorum,
            discover_secs=server.discover_secs,
            **own,
        )

    def _loop(
        self,
        start: _Start,
        room: disk.Room,
        stop_requested: Callable[[], bool],
        *,
        queue: LearnerQueue,
        publisher: Versions,
        timers: Timers,
        kept: SampleWriter,
        profile: Profile,
        **others: Any,
    ) -> bool:
        """Publishes the version of the start, and trains from there; further arguments as of `learner.train`."""
        settings, checkpoints = self.settings, self.checkpoints
        saves = Saves(
            checkpoints,
            queue.checkpointed,
            settings.checkpoint.grace_secs,
            in_background=settings.checkpoint.in_background,
            says=self.process == 0,
            **({"snapshot": queue.snapshot} if settings.checkpoint.directory else {}),
        )
        # Nothing of a run leaves the learner before checkpoint 0 is on disk.
        saves.check(wait=True)
        version, state, point = start.version, start.state, start.resume_point
        if point is None:
            publisher.begin(state, queue.status())
        else:
            publisher.resume(version, state, queue.status(), point, forked=start.forked)
        watch = disk.Watch(room)
        if self.process == 0:
            _log_plan(*room.plan(version))
        agreement = Agreement(
            lambda: stop_requested() or (self.process == 0 and watch()),
            **self._part,
            timeout_secs=settings.learner.lease_timeout_secs,
        )
        with timers("wait_push"):
            publisher.wait(lambda: agreement.should_stop(version + 1, False))
        with watched(self.workdir) as check_workdir:

            def should_stop(step: int, chunk_arrived: bool) -> bool:
                check_workdir()
                if self.lease:
                    self.lease.check()
                saves.check()
                if chunk_arrived:
                    profile.begin(step)
                    gc_freeze("the learner's programs")
                return agreement.should_stop(step, chunk_arrived)

            def save(step: int, state: TrainState, resume_point: ResumePoint) -> None:
                queue.confirm()  # An elder learner must not overwrite a younger one's checkpoints.
                if self.lease:
                    self.lease.confirm()
                saves.save(step, state, resume_point)

            def keep(step: int, groups: Sequence[Group]) -> None:
                kept.write(step, groups)
                profile.end(step)

            learners.train(
                state,
                first_step=version + 1,
                settings=settings,
                pack=parts.packer_of(settings, self.process),
                queue=queue,
                publisher=publisher,
                save=save,
                timers=timers,
                should_stop=should_stop,
                keep_samples=keep,
                **others,
            )
            saves.check(wait=True)
            done = checkpoints.latest() >= settings.learner.num_steps  # It is always saved.
            if watch.is_low and not done:
                raise OSError(errno.ENOSPC, room.error())
            return done


@dataclasses.dataclass(eq=False)
class Saves:
    """Saves checkpoints; the queue hears of one when it is on disk."""

    checkpoints: Checkpoints
    checkpointed: Callable[[int], None]  # of the oldest step that can be restored
    grace_secs: float
    _: dataclasses.KW_ONLY
    in_background: bool
    says: bool  # log once whether a checkpoint, at the rate of the first, fits into grace_secs
    snapshot: Callable[[int], None] = lambda step: None  # puts a copy of the journal beside it

    def save(self, step: int, state: TrainState, resume_point: ResumePoint) -> None:
        """Begins to write a checkpoint, after the end of the one before, or writes it."""
        self.check(wait=True)
        self.checkpoints.save(step, state, resume_point.to_json(), self.snapshot)
        if not self.in_background:
            self.check(wait=True)

    def check(self, *, wait: bool = False) -> None:
        """Reports a checkpoint that is on disk now; raises CheckpointError where one was not written."""
        written = self.checkpoints.written(wait=wait)
        if written is None:
            return
        if written.step:  # Nothing resumes from before checkpoint 0.
            self.checkpointed(self.checkpoints.oldest())
        if self.says:
            rate = written.num_bytes / written.secs
            _log_plan(*preemption.plan(written.num_bytes, rate, self.grace_secs))
            self.says = False


def _num_parts(settings: Settings) -> int:
    """Of a version: 1 where processes need not share a disk, and for an adapter, which PEFT reads from one file."""
    is_whole = settings.checkpoint.directory or settings.model.lora.rank
    return 1 if is_whole else settings.learner.num_processes


def _version_bytes(state: TrainState, dtype: str, store: WeightStore | MemoryStore) -> int:
    """Bytes that a version takes on the disk; 0 in a store in memory."""
    if isinstance(store, MemoryStore):
        return 0
    return sum(leaf.size for leaf in jax.tree.leaves(state.params)) * jnp.dtype(dtype).itemsize


def _log_plan(text: str, fits: bool) -> None:
    """Logs a plan, of a checkpoint in the grace period or of the disk; a warning where it does not fit."""
    log.log(logging.INFO if fits else logging.WARNING, "%s", text)


def _scored_of(settings: Settings, run_id: str) -> ScoredPrompts | None:
    """The comparison of servers with scored prompts; None where weights.max_score_error is 0."""
    if not settings.weights.max_score_error:
        return None
    return ScoredPrompts(
        num_tokens=_prompt_tokens(settings),
        temperature=settings.rollout.temperature,
        max_error=settings.weights.max_score_error,
        adapters=settings.model.lora.rank > 0,
        run_id=run_id,
    )


def _prompt_tokens(settings: Settings) -> int:
    return min(scored.PROMPT_TOKENS, settings.server.max_total_tokens - 1)


def _score_of(
    settings: Settings, train_step: TrainStep, publisher: Any, is_foreign: bool
) -> Callable[[Any], jax.Array | None]:
    """Scores versions, once a server is known that verifies nothing itself; with several processes, always: each takes
    part in every program."""
    known = is_foreign or settings.server.command or settings.learner.num_processes > 1

    def score(params: Any) -> jax.Array | None:
        if not settings.weights.max_score_error or not (known or publisher.wants_scores):
            return None
        return train_step.score_prompts(params, _prompt_tokens(settings))

    return score


def discovery_of(settings: Settings) -> Discovery | None:
    """The list of servers that join and leave; None where the run has none."""
    server = settings.server
    if not server.discover:
        return None
    scheme = "https" if server.tls_ca else "http"
    return Discovery(server.discover, scheme=scheme, insecure=settings.security.insecure)


def evaluator_of(
    settings: Settings, workdir: pathlib.Path, read_task: Callable[[], Task] | None = None
) -> Evaluator | None:
    """The evaluator of versions during training; None where evaluate.every_steps is 0.

    Args:
      read_task: reads the run's task; None: as `parts.same_task_of`.
    """
    evaluate, temperature = settings.evaluate, settings.rollout.temperature
    if not evaluate.every_steps:
        return None
    task = read_task() if read_task else parts.same_task_of(settings, workdir)
    tokenizer = parts.tokenizer_of(settings, workdir)
    split = "validation" if evaluate.num_validation > 0 else "test"
    tasks = parts.evaluation_tasks(settings)
    parts.check_sets(settings, workdir, tasks)
    sets = parts.evaluation_sets(settings, tokenizer, task, split, tasks)
    return Evaluator(workdir, sets, settings=evaluate, temperature=temperature)


def push_deadline_of(settings: Settings) -> float:
    """Bound on one push in seconds: a server's start, the push itself, and an evaluation on the only server."""
    evaluation = settings.evaluate.timeout_secs if settings.evaluate.every_steps else 0.0
    return settings.server.start_timeout_secs + settings.weights.push_timeout_secs + evaluation


def _report_status(queue, process: int, timers, publisher, ended: threading.Event) -> None:
    """Reports the learner's stage to the queue, every REPORT_SECS until the learner has ended."""
    places = {
        "wait_data": "the queue",
        "update": "its device",
        "accumulate": "its device",
        "checkpoint": "the disk of its checkpoints",
    }
    while not ended.is_set():
        name, secs = timers.current() or ("start", 0.0)
        pushing = name in ("wait_push", "publish")  # A push waits for the one before it.
        place = publisher.waits_for() if pushing else places.get(name, "itself")
        with contextlib.suppress(ValueError, RuntimeError):  # The queue's end comes meanwhile.
            queue.report(f"learner-{process}", [Wait(f"learner ({name})", place, secs)])
        ended.wait(REPORT_SECS)

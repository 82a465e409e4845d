"""What each role of a run is made of: the one place that wires parts together.

Each role imports its own parts, so that queue and rollout workers never load JAX.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import pathlib
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable

from jaxrl_async import security
from jaxrl_async.config.checks import command_words, delay_of, key_named, queue_access_of
from jaxrl_async.config.settings import Settings, SettingsError

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_SECS = 60.0  # to the queue, which needs no device and is up within seconds
CALL_TIMEOUT_SECS = 30.0
TELL_SECS = 2.0  # The queue hears so often what the learner is at.
COMMAND_STOP_SECS = 4.0  # A server that ignores SIGTERM for so long is killed, before its role is.


def run(
    role: str,
    settings: Settings,
    *,
    index: int,
    workdir: pathlib.Path,
    resume: bool,
    coordinator: str = "",
    stop_requested: Callable[[], bool] = lambda: False,
) -> bool:
    """Runs one role until it is done (the learner) or interrupted (the others).

    Args:
      role: "queue" | "server" | "rollout" | "learner".
      settings: the run; queue.address and server.addresses are set.
      index: which server, rollout worker or learner process.
      workdir: directory of the run.
      resume: the learner goes on from the last checkpoint.
      coordinator: "host:port" of learner process 0, where there are several; see `processes.joined`.
      stop_requested: whether to leave early; the learner does, with a checkpoint, at the end of a step.

    Returns:
      Whether it is done; False for a learner that left early.
    """
    match role:
        case "queue":
            asyncio.run(_queue(settings, workdir))
        case "server":
            if settings.server.command:
                _command(settings, workdir, index)
            else:
                asyncio.run(_server(settings, workdir, index))
        case "rollout":
            asyncio.run(_rollout(settings, workdir, index))
        case "learner":
            from jaxrl_async.learner import processes
            from jaxrl_async.run.supervisor import visible_devices

            if settings.learner.deterministic and visible_devices()[0] == "gpu":
                flags = os.environ.get("XLA_FLAGS", "")
                os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_deterministic_ops=true"
            with processes.joined(
                coordinator=coordinator,
                process=index,
                num_processes=settings.learner.num_processes,
            ) as process:
                return _learner(
                    settings, workdir, process, resume=resume, stop_requested=stop_requested
                )
    return True


def prepare(settings: Settings, workdir: pathlib.Path) -> None:
    """Reads the task and makes the tokenizer, so that what is wrong with them is found before roles start.

    Writes the config.json that servers started by `server.command` read, where the run has no model.path.

    Raises:
      OSError, TypeError, ValueError: names the file, the argument or the line.
    """
    task = task_of(settings)
    for split in ("train", "test"):
        task.examples(split)
    frictions_of(settings, tokenizer_of(settings, workdir))
    if settings.server.command and not settings.server.addresses:
        _model_path(settings, workdir)


def keys_of(settings: Settings) -> dict[str, str | None]:
    """The servers' keys from the environment, as {"api_key", "admin_api_key"}; None where none is named.

    Raises:
      SettingsError: a variable that the config names is unset or empty.
    """
    return {
        key: key_named(f"server.{key}_env", getattr(settings.server, f"{key}_env"))
        for key in ("api_key", "admin_api_key")
    }


def check_access(settings: Settings, role: str, index: int) -> None:
    """Reads the keys and certificates that a role needs, so that what is wrong with them is found before it starts.

    Args:
      settings: the run.
      role: as of `run`, or "all".
      index: which one.

    Raises:
      SettingsError: names the setting, and the variable, file or address.
    """
    queue, server = settings.queue, settings.server
    try:
        if role != "queue":
            keys = keys_of(settings)
        if role != "server":
            queue_access_of(settings)
        if role in ("all", "queue"):
            security.server_context(queue.tls_cert, queue.tls_key)
        if role in ("all", "learner", "rollout"):
            for ca in filter(None, (queue.tls_ca, server.tls_ca)):
                security.client_context(ca)
        if role in ("all", "server") and not server.command:
            security.server_context(server.tls_cert, server.tls_key)
        if role == "server" and not server.command and index < len(server.addresses):
            url = urllib.parse.urlparse(server.addresses[index])
            what = f"the embedded server {index}"
            security.check_listener(what, url.netloc, keys["api_key"], "server.api_key_env")
            if (url.scheme == "https") != bool(server.tls_cert):
                raise ValueError(
                    f"server.addresses says {server.addresses[index]}, and server.tls_cert {server.tls_cert!r}: "
                    "the embedded server speaks https with a certificate, http without one"
                )
    except ValueError as error:
        raise SettingsError(str(error)) from None


def weight_roots_of(settings: Settings, workdir: pathlib.Path) -> list[pathlib.Path]:
    """The directories that an embedded server takes weights from: the run's versions, and model.path."""
    model = [pathlib.Path(settings.model.path)] if settings.model.path else []
    return [workdir / "weights", *model]


def tokenizer_of(settings: Settings, workdir: pathlib.Path):
    """The run's tokenizer: made by the first role that needs it, the same files for all."""
    from jaxrl_async.tasks import tokenizer as tokenizers

    wanted, directory = settings.tokenizer, workdir / "tokenizer"
    if wanted.kind == "huggingface":
        return tokenizers.load_tokenizer(wanted.path)
    if directory.exists():
        return tokenizers.load_tokenizer(directory)
    if wanted.kind == "bpe":
        texts = (text for pair in task_of(settings).demonstrations() for text in pair)
        return tokenizers.train_bpe(texts, vocab_size=wanted.vocab_size, directory=directory)
    tokenizer = tokenizers.CharTokenizer(wanted.alphabet)
    tokenizer.save(directory)
    return tokenizer


def task_of(settings: Settings):
    """The run's task."""
    from jaxrl_async.tasks import make_task

    return make_task(settings.task.name, **settings.task.args)


def reward_pool_of(settings: Settings, reward: str):
    """Processes that score completions with a reward, within the run's bounds; not started yet."""
    from jaxrl_async.rewards import REWARDS, importable
    from jaxrl_async.rewards.pool import RewardPool

    rollout = settings.rollout
    return RewardPool(
        importable(reward, REWARDS),
        num_processes=rollout.reward_processes,
        timeout_secs=rollout.reward_timeout_secs,
        memory_bytes=rollout.reward_memory_bytes,
        calls_per_process=rollout.reward_calls_per_process,
    )


def evaluator_of(settings: Settings, workdir: pathlib.Path):
    """What scores versions while the run trains; None where evaluate.every_steps is 0."""
    from jaxrl_async.evaluation.evaluator import Evaluator
    from jaxrl_async.tasks.prompts import test_prompts

    evaluate, rollout = settings.evaluate, settings.rollout
    if not evaluate.every_steps:
        return None
    tokenizer, task = tokenizer_of(settings, workdir), task_of(settings)
    prompts = test_prompts(task, tokenizer, max_prompt_tokens=rollout.max_prompt_tokens)
    return Evaluator(
        workdir,
        prompts[: evaluate.num_prompts],
        every_steps=evaluate.every_steps,
        num_samples=evaluate.num_samples,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        stop_token_ids=tokenizer.stop_token_ids,
        seed=evaluate.seed,
        max_running_requests=evaluate.max_running_requests,
        timeout_secs=evaluate.timeout_secs,
        decode=tokenizer.decode,
        pool=functools.partial(reward_pool_of, settings, task.reward),
    )


def vocab_size_of(settings: Settings, tokenizer) -> int:
    """Bound on token ids: the model's, which published checkpoints pad beyond the tokenizer's."""
    if not settings.model.path:
        return tokenizer.vocab_size
    config = pathlib.Path(settings.model.path) / "config.json"
    return json.loads(config.read_text(encoding="utf-8"))["vocab_size"]


def frictions_of(settings: Settings, tokenizer):
    """What the run's rollouts get wrong on purpose; None where nothing does.

    Raises:
      ValueError: an actor bug is asked for, and the tokenizer has no single token for the "0" that it writes.
    """
    from jaxrl_async.rollout.frictions import Frictions

    wanted = settings.rollout.frictions
    if not any(vars(wanted).values()):
        return None
    zero_id = _zero_id(tokenizer) if wanted.actor_bug else 0  # Else nothing writes it.
    return Frictions(**vars(wanted), zero_id=zero_id)


def _zero_id(tokenizer) -> int:
    needs = "rollout.frictions.actor_bug needs a tokenizer with one token for '0'"
    try:
        ids = tokenizer.encode("0")
    except ValueError as error:  # not in its alphabet
        raise ValueError(f"{needs}: {error}") from None
    if len(ids) != 1:
        raise ValueError(f"{needs}, got the ids {ids}")
    return ids[0]


def model_config_of(settings: Settings, tokenizer):
    """The model's shape: from the files at model.path, or from the config."""
    from jaxrl_async.models import hf, transformer

    model = settings.model
    if model.path:
        return hf.read_config(model.path, dtype=model.dtype, remat=model.remat)
    return transformer.ModelConfig(
        vocab_size=tokenizer.vocab_size,
        num_layers=model.num_layers,
        model_dim=model.model_dim,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        mlp_dim=model.mlp_dim,
        rope_theta=model.rope_theta,
        rope_scaling=None,
        norm_eps=model.norm_eps,
        qk_norm=model.qk_norm,
        attention_bias=model.attention_bias,
        tied_embeddings=model.tied_embeddings,
        dtype=model.dtype,
        remat=model.remat,
    )


def engine_of(settings: Settings, workdir: pathlib.Path, *, name: str):
    """An embedded engine for the run's model, not started, without weights."""
    from jaxrl_async.inference.engine import Engine

    server = settings.server
    return Engine(
        model_config_of(settings, tokenizer_of(settings, workdir)),
        num_slots=server.num_slots,
        max_total_tokens=server.max_total_tokens,
        decode_chunk=server.decode_chunk,
        max_queued_requests=server.max_queued_requests,
        name=name,
    )


def train_step_of(settings: Settings, config, mesh):
    """The learner's programs, on a mesh."""
    from jaxrl_async.learner import optimizer
    from jaxrl_async.learner.train_step import TrainStep

    learner = settings.learner
    return TrainStep(
        config,
        mesh,
        loss=settings.loss,
        temperature=settings.rollout.temperature,
        optimizer=optimizer.make_optimizer(
            learning_rate=learner.learning_rate,
            warmup_updates=learner.warmup_updates,
            decay_updates=None,
            b1=learner.adam_b1,
            b2=learner.adam_b2,
            eps=learner.adam_eps,
            weight_decay=learner.weight_decay,
        ),
        max_grad_norm=learner.max_grad_norm,
        num_minibatches=learner.num_minibatches,
        head_chunk_tokens=learner.head_chunk_tokens or None,
        attention_kernel=learner.attention_kernel,
    )


def checkpoint_params(settings: Settings, workdir: pathlib.Path, step: int | None = None):
    """(step, parameters on one device) of a checkpoint of the run; the last one for step None."""
    import jax

    from jaxrl_async.models import sharding

    config = model_config_of(settings, tokenizer_of(settings, workdir))
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    with contextlib.closing(_checkpoints(settings, workdir)) as checkpoints:
        step = checkpoints.latest() if step is None else step
        state, _ = checkpoints.restore(step, train_step_of(settings, config, mesh).abstract_state())
    return step, state.params


def _checkpoints(settings: Settings, workdir: pathlib.Path):
    from jaxrl_async.evaluation.evaluator import best_version
    from jaxrl_async.learner.checkpoint import Checkpoints

    return Checkpoints(
        workdir / "checkpoints",
        keep=settings.checkpoint.keep,
        best=functools.partial(best_version, workdir),
    )


async def _queue(settings: Settings, workdir: pathlib.Path) -> None:
    from jaxrl_async.queue import service as queue_service
    from jaxrl_async.queue.admission import Admission
    from jaxrl_async.queue.journal import Journal

    queue = settings.queue
    admission = Admission(
        batch_groups=settings.learner.groups_per_step,
        max_staleness=queue.max_staleness,
        push_every_steps=settings.weights.push_every_steps,
        max_running_groups=queue.max_running_groups,
        max_attempts=queue.max_attempts,
        permit_timeout_secs=queue.permit_timeout_secs,
        max_bytes=queue.max_bytes,
        chunk_groups=queue.chunk_groups or None,
    )
    wanted = settings.journal
    journal = None
    if wanted.keep != "none":
        journal = Journal(
            pathlib.Path(wanted.path or workdir / "journal.sqlite"),
            batch_groups=settings.learner.groups_per_step,
            keep=wanted.keep,
            mode=wanted.mode,
            synchronous=wanted.synchronous,
        )
    await queue_service.serve(
        queue.address,
        admission=admission,
        group_size=settings.rollout.group_size,
        vocab_size=vocab_size_of(settings, tokenizer_of(settings, workdir)),
        max_tokens=settings.learner.row_tokens,
        max_message_bytes=queue.max_message_bytes,
        journal=journal,
        on_bound=lambda address: log.info("queue at %s", address),
        token=queue_access_of(settings)["token"],
        tls_cert=queue.tls_cert,
        tls_key=queue.tls_key,
    )


async def _server(settings: Settings, workdir: pathlib.Path, index: int) -> None:
    from jaxrl_async.inference import http

    engine = engine_of(settings, workdir, name=f"engine-{index}")
    address = settings.server.addresses[index]
    url = urllib.parse.urlparse(address)
    engine.start()
    log.info("engine ready: %d programs", engine.num_compiled)
    try:
        async with http.serve(
            engine,
            host=url.hostname,
            port=url.port,
            weight_roots=weight_roots_of(settings, workdir),
            tls_cert=settings.server.tls_cert,
            tls_key=settings.server.tls_key,
            **keys_of(settings),
        ):
            log.info("server %d at %s", index, address)
            await asyncio.wrap_future(engine.stopped)
    finally:
        engine.close(timeout_secs=CALL_TIMEOUT_SECS)


def _command(settings: Settings, workdir: pathlib.Path, index: int) -> None:
    """Runs the server of `server.command` for as long as this role runs; neither outlives the other."""
    from jaxrl_async.run.supervisor import how_it_ended

    url = urllib.parse.urlparse(settings.server.addresses[index])
    words = command_words(
        settings.server.command,
        model_path=_model_path(settings, workdir),
        host=url.hostname,
        port=url.port,
        index=index,
        weights=workdir / "weights",
    )
    log.info("server %d: %s", index, words)
    environment = {name: value for name, value in os.environ.items() if name != "JAXRL_PARENT"}
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, env=environment)
    try:
        code = process.wait()
    except BaseException:
        _end(process)
        raise
    raise RuntimeError(f"server.command ended {how_it_ended(code)}")


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(COMMAND_STOP_SECS)
    process.kill()
    process.wait()
    if "JAXRL_PARENT" in os.environ:
        # This role leads a group of its own: end what the command left in it.
        os.killpg(0, signal.SIGKILL)


def _model_path(settings: Settings, workdir: pathlib.Path) -> pathlib.Path:
    """The directory a local server starts from: model.path, or one with a config.json and nothing else."""
    if settings.model.path:
        return pathlib.Path(settings.model.path)
    from jaxrl_async.models import hf

    directory = workdir / "model"
    directory.mkdir(parents=True, exist_ok=True)
    config = hf.write_config(model_config_of(settings, tokenizer_of(settings, workdir)))
    text = json.dumps(config, indent=2)
    (directory / "config.json").write_text(text, encoding="utf-8")
    return directory


async def _rollout(settings: Settings, workdir: pathlib.Path, index: int) -> None:
    from jaxrl_async.queue.client import QueueClient
    from jaxrl_async.rewards.overlong import overlong_penalty
    from jaxrl_async.rollout.sampler import Sampler
    from jaxrl_async.rollout.worker import Worker, rollout_function
    from jaxrl_async.servers.client import InferenceClient
    from jaxrl_async.servers.fleet import Fleet
    from jaxrl_async.tasks.prompts import prompt_stream

    rollout, tokenizer = settings.rollout, tokenizer_of(settings, workdir)
    task = task_of(settings)
    prompts = prompt_stream(
        task,
        tokenizer,
        split="train",
        seed=settings.task.seed,
        max_prompt_tokens=rollout.max_prompt_tokens,
    )
    overlong = functools.partial(
        overlong_penalty,
        max_tokens=rollout.max_new_tokens,
        buffer_tokens=rollout.overlong_buffer_tokens,
    )
    server = settings.server
    fleet = Fleet(
        suspect_secs=settings.weights.poll_secs,
        clock=time.monotonic,
        speeds=dict(zip(server.addresses, server.speeds, strict=False)),
    )
    async with (
        InferenceClient(**keys_of(settings), tls_ca=server.tls_ca) as client,
        reward_pool_of(settings, task.reward) as rewards,
        QueueClient(
            settings.queue.address,
            connect_timeout_secs=CONNECT_TIMEOUT_SECS,
            call_timeout_secs=CALL_TIMEOUT_SECS,
            **queue_access_of(settings),
        ) as queue,
    ):
        sampler = Sampler(
            client=client,
            fleet=fleet,
            controls=server.controls,
            sampling={
                "max_new_tokens": rollout.max_new_tokens,
                "temperature": rollout.temperature,
                "stop_token_ids": list(tokenizer.stop_token_ids),
            },
            run_seed=settings.seed,
            vocab_size=vocab_size_of(settings, tokenizer),
            request_timeout_secs=rollout.request_timeout_secs,
            max_retries=rollout.max_retries,
        )
        worker = Worker(
            name=f"rollout-{index}@{socket.gethostname()}",
            queue=queue,
            sampler=sampler,
            fleet=fleet,
            rewards=rewards,
            prompts=prompts,
            decode=tokenizer.decode,
            rollout=rollout_function(rollout.function),
            group_size=rollout.group_size,
            max_running_groups=rollout.max_running_groups,
            vocab_size=vocab_size_of(settings, tokenizer),
            max_tokens=settings.learner.row_tokens,
            stop_token_ids=tokenizer.stop_token_ids,
            drop_equal_rewards=rollout.drop_equal_rewards,
            overlong=overlong,
            frictions=frictions_of(settings, tokenizer),
            run_seed=settings.seed,
        )
        await worker.run()


def _learner(
    settings: Settings,
    workdir: pathlib.Path,
    process: int,
    *,
    resume: bool,
    stop_requested: Callable[[], bool],
) -> bool:
    import jax

    from jaxrl_async.learner import learner as learners
    from jaxrl_async.learner.processes import Agreement
    from jaxrl_async.learner.versions import Delay, Versions
    from jaxrl_async.metrics import Timers
    from jaxrl_async.models import sharding
    from jaxrl_async.queue.client import LearnerQueue
    from jaxrl_async.queue.records import ResumePoint, Share
    from jaxrl_async.weights.store import WeightStore

    learner, weights = settings.learner, settings.weights
    if learner.compilation_cache:
        jax.config.update("jax_compilation_cache_dir", learner.compilation_cache)
    part = {"process": process, "num_processes": learner.num_processes}
    tokenizer = tokenizer_of(settings, workdir)
    config = model_config_of(settings, tokenizer)
    mesh = sharding.make_mesh(learner.data, learner.fsdp, learner.tensor)
    train_step = train_step_of(settings, config, mesh)
    checkpoints = _checkpoints(settings, workdir)
    version, resume_point = 0, None
    if resume:
        version = checkpoints.latest()
        state, resume_point = checkpoints.restore(version, train_step.abstract_state())
        resume_point = ResumePoint.from_json(resume_point)
        log.info("resumed at version %d", version)
    else:
        state = train_step.init(first_params_of(settings, config, mesh, tokenizer))
        checkpoints.save(0, state, ResumePoint(0, 0, (), {}, {}).to_json())
    reference = _reference(settings, checkpoints, train_step)

    with contextlib.ExitStack() as stack:
        queue = stack.enter_context(
            LearnerQueue(
                settings.queue.address,
                connect_timeout_secs=CONNECT_TIMEOUT_SECS,
                call_timeout_secs=CALL_TIMEOUT_SECS,
                share=Share(**part, num_minibatches=learner.num_minibatches),
                **queue_access_of(settings),
            )
        )
        make_parts = _leader_parts if process == 0 else _follower_parts
        queue, publisher, metrics = make_parts(settings, workdir, queue)
        for part_of_run in (checkpoints, metrics, publisher):
            stack.callback(part_of_run.close)
        delay = Delay(*delay_of(settings.rollout.delay_steps), seed=settings.seed)
        versions = Versions(
            publisher,
            WeightStore(workdir / "weights", keep=max(weights.keep, delay.max_steps + 2)),
            config=config,
            dtype=weights.dtype,
            timeout_secs=push_deadline_of(settings),
            delay=delay,
            **part,
        )
        timers = Timers()
        tell = functools.partial(_tell_status, queue, process, timers, publisher)
        threading.Thread(target=tell, name="status", daemon=True).start()
        if resume_point is None:
            versions.publish(version, versions.snapshot(state))
        else:
            versions.resume(version, state, queue.status(), resume_point)
        agreement = Agreement(stop_requested, **part, timeout_secs=learner.lease_timeout_secs)
        with timers("wait_push"):
            versions.wait(lambda: agreement.should_stop(version + 1, False))

        def save(step: int, state, resume_point) -> None:
            checkpoints.save(step, state, resume_point.to_json())
            queue.checkpointed(checkpoints.oldest())

        learners.train(
            state,
            first_step=version + 1,
            schedule=schedule_of(settings),
            train_step=train_step,
            pack=pack_of(settings, process=process),
            padding=padding_of(settings),
            advantages=advantages_of(settings),
            queue=queue,
            publisher=versions,
            save=save,
            metrics=metrics,
            timers=timers,
            reference=reference,
            should_stop=agreement.should_stop,
        )
        return checkpoints.latest() >= learner.num_steps  # The last step is always saved.


def _tell_status(queue, process: int, timers, publisher) -> None:
    """Tells the queue what the learner is at, for as long as the process lives."""
    from jaxrl_async.queue.client import QueueError
    from jaxrl_async.queue.records import Wait

    places = {"wait_data": "the queue", "update": "its device", "accumulate": "its device"}
    while True:
        name, secs = timers.current() or ("start", 0.0)
        pushing = name in ("wait_push", "publish")  # A push waits for the one before it.
        place = publisher.waits_for() if pushing else places.get(name, "itself")
        # Another call finds out, and says so, when the queue is gone.
        with contextlib.suppress(ConnectionError, TimeoutError, QueueError, ValueError):
            queue.report(f"learner-{process}", [Wait(f"learner ({name})", place, secs)])
        time.sleep(TELL_SECS)


def _leader_parts(settings: Settings, workdir: pathlib.Path, queue):
    """What learner process 0 has beside the loop: the queue, a publisher and a writer of metrics."""
    from jaxrl_async.metrics import MetricsWriter
    from jaxrl_async.servers.client import InferenceClient
    from jaxrl_async.weights.publisher import Publisher
    from jaxrl_async.weights.transports import TRANSPORTS

    weights = settings.weights
    publisher = Publisher(
        settings.server.controls,
        client=InferenceClient(**keys_of(settings), tls_ca=settings.server.tls_ca),
        transport=functools.partial(TRANSPORTS[weights.transport], mode=weights.pause_mode),
        announce=queue.publish_version,
        push_timeout_secs=weights.push_timeout_secs,
        poll_secs=weights.poll_secs,
        start_timeout_secs=settings.server.start_timeout_secs,
        evaluation=evaluator_of(settings, workdir),
    )
    return queue, publisher, MetricsWriter(workdir)


def _follower_parts(settings: Settings, workdir: pathlib.Path, queue):
    """What the other learner processes have in their place."""
    from jaxrl_async.learner import follower

    return (
        follower.FollowerQueue(queue),
        follower.FollowerPublisher(queue.status),
        follower.FollowerMetrics(),
    )


def _reference(settings: Settings, checkpoints, train_step):
    """Version 0, which a KL penalty may be taken to; None where the loss takes none."""
    if not settings.loss.needs_reference:
        return None
    state, _ = checkpoints.restore(0, train_step.abstract_state())
    return state.params


def first_params_of(settings: Settings, config, mesh, tokenizer):
    """Version 0: random weights or those at model.path, after the warm start."""
    from jaxrl_async.learner.warm_start import warm_start
    from jaxrl_async.models import hf, sharding
    from jaxrl_async.tasks.prompts import demonstration_tokens

    if settings.model.path:
        params = hf.from_tensors(hf.read_tensors(settings.model.path), config)
        params = sharding.place(params, sharding.param_shardings(mesh, params))
    else:
        params = sharding.init_sharded(config, mesh, settings.seed)
    stage = settings.warm_start
    if stage.num_steps == 0:
        return params
    demonstrations = demonstration_tokens(
        task_of(settings), tokenizer, num=stage.num_demonstrations, max_tokens=stage.row_tokens
    )

    def report(step: int, loss: float) -> None:
        if step % 100 == 0 or step == stage.num_steps:
            log.info("warm start: step %d of %d, loss %.4f", step, stage.num_steps, loss)

    return warm_start(
        config,
        mesh,
        params,
        demonstrations,
        num_steps=stage.num_steps,
        batch_size=stage.batch_size,
        row_tokens=stage.row_tokens,
        learning_rate=stage.learning_rate,
        head_chunk_tokens=settings.learner.head_chunk_tokens or None,
        seed=settings.seed,
        report=report,
    )


def pack_of(settings: Settings, *, process: int):
    """Groups and advantages → the microbatches of one process of the learner."""
    from jaxrl_async.learner.packing import Packer

    learner = settings.learner
    return Packer(
        process=process,
        num_processes=learner.num_processes,
        microbatch_rows=learner.microbatch_rows,
        row_tokens=learner.row_tokens,
        policy=learner.packing,
        shared_prompts=learner.shared_prompts,
    )


def padding_of(settings: Settings):
    """A microbatch of one process without a token."""
    from jaxrl_async.learner.packing import empty_batch

    learner = settings.learner
    return empty_batch(learner.microbatch_rows // learner.num_processes, learner.row_tokens)


def advantages_of(settings: Settings):
    """Rewards [N, G] → advantages [N, G]."""
    from jaxrl_async.objectives.advantages import ADVANTAGES

    return ADVANTAGES[settings.loss.advantage]


def push_deadline_of(settings: Settings) -> float:
    """Seconds a push may take: servers that start, or take it late, after an evaluation on the only one."""
    evaluation = settings.evaluate.timeout_secs if settings.evaluate.every_steps else 0.0
    return settings.server.start_timeout_secs + settings.weights.push_timeout_secs + evaluation


def schedule_of(settings: Settings):
    """When the run pushes, saves and stops."""
    from jaxrl_async.learner.learner import Schedule

    return Schedule(
        num_steps=settings.learner.num_steps,
        push_every_steps=settings.weights.push_every_steps,
        wait_for_push=settings.mode != "async",
        checkpoint_every_steps=settings.checkpoint.every_steps,
        num_minibatches=settings.learner.num_minibatches,
        lease_timeout_secs=settings.learner.lease_timeout_secs,
        max_failures=settings.queue.max_failures,
        budgets=settings.queue.budgets,
        fail_on_recompile=settings.learner.fail_on_recompile,
    )

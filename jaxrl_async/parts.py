"""Parts that several roles, tools and benchmarks make from the settings.

Each function imports its own part, so that a process loads no more than it needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from jaxrl_async import sealed
from jaxrl_async.config import forms
from jaxrl_async.config.checks import key_named, queue_access_of
from jaxrl_async.config.fields import StartError
from jaxrl_async.config.settings import Model, Settings
from jaxrl_async.names import importable
from jaxrl_async.tasks import hub
from jaxrl_async.tasks.task import texts_of
from jaxrl_async.types import Record
from jaxrl_async.versions.store import WeightStore

if TYPE_CHECKING:
    import jax

    from jaxrl_async.active_clock import ActiveClock
    from jaxrl_async.evaluation.score import EvaluationSet
    from jaxrl_async.inference.engine import Engine
    from jaxrl_async.learner.checkpoint import Checkpoints
    from jaxrl_async.learner.packing import Packer
    from jaxrl_async.learner.train_step import TrainStep
    from jaxrl_async.models.lora import LoRA
    from jaxrl_async.models.transformer import ModelConfig
    from jaxrl_async.rewards.client import RewardClient
    from jaxrl_async.rewards.pool import RewardPool
    from jaxrl_async.rollout.context import Rollout
    from jaxrl_async.rollout.frictions import Frictions
    from jaxrl_async.rollout.runner import Runner
    from jaxrl_async.rollout.teachers import Teachers
    from jaxrl_async.tasks.digest import Splits
    from jaxrl_async.tasks.task import Task
    from jaxrl_async.tasks.tokenizer import Tokenizer
    from jaxrl_async.tracker import Tracker

log = logging.getLogger(__name__)

# Bound on the bytes of a group's message for each token: 13 are of its arrays.
TOKEN_BYTES = 16


def keys_of(settings: Settings) -> dict[str, Any]:
    """The servers' keys from the environment, {"api_key": …, "admin_api_key": …}; None where none is named.

    Raises:
      SettingsError: a variable that the config names is unset or empty.
    """
    return {
        key: key_named(f"server.{key}_env", getattr(settings.server, f"{key}_env"))
        for key in ("api_key", "admin_api_key")
    }


def servers_access_of(settings: Settings) -> dict[str, Any]:
    """The arguments of a client of the run's servers, beside the run's id; raises as `keys_of`."""
    adapters = settings.model.lora.rank > 0
    return keys_of(settings) | {"tls_ca": settings.server.tls_ca, "adapters": adapters}


def teachers_of(settings: Settings, clock: ActiveClock) -> Teachers | None:
    """The teachers that are servers, whose client is not opened yet; None without any. `clock`: a worker's.

    Raises:
      SettingsError: no key where loss.teacher_key_env names one.
    """
    from jaxrl_async.rollout.teachers import Teachers
    from jaxrl_async.servers.client import InferenceClient

    if not settings.loss.teachers:
        return None
    key = key_named("loss.teacher_key_env", settings.loss.teacher_key_env)
    return Teachers(
        client=InferenceClient(api_key=key, tls_ca=settings.server.tls_ca),
        addresses=settings.loss.teachers,
        task=settings.task.name,
        timeout_secs=settings.rollout.request_timeout_secs,
        outage_secs=settings.queue.outage_secs,
        clock=clock,
    )


def weight_roots_of(settings: Settings, workdir: pathlib.Path) -> list[pathlib.Path]:
    """The directories that an embedded server takes weights from: the run's versions, and model.path."""
    model = [model_directory(settings)] if settings.model.path else []
    return [workdir / "weights", *model]


def model_directory(settings: Settings, needed: tuple[str, ...] = hub.MODEL_FILES) -> pathlib.Path:
    """The files at model.path, of a run that has one; with other `needed`, perhaps those alone.

    Raises:
      FileNotFoundError: as of `hub.directory_of`.
    """
    return hub.directory_of("model.path", settings.model.path, needed=needed)


def tokenizer_of(settings: Settings, workdir: pathlib.Path) -> Tokenizer:
    """The run's tokenizer. The first role that needs it writes its files; the others read them.

    Raises:
      OSError, ValueError: the message begins with the setting's name within its block.
    """
    from jaxrl_async.tasks.tokenizer import InstructedTokenizer

    wanted, tokenizer = settings.tokenizer, _plain_tokenizer_of(settings, workdir)
    tools = _tools_of(settings)
    if not wanted.system_prompt and not wanted.instruction and not tools:
        return tokenizer
    instructed = InstructedTokenizer(
        tokenizer, instruction=wanted.instruction, system_prompt=wanted.system_prompt, tools=tools
    )
    return cast("Tokenizer", instructed)  # Its other members are the tokenizer's own.


def _tools_of(settings: Settings) -> list[Mapping[str, Any]]:
    """The schemas of the tools of the run's environment; [] without any."""
    if not (name := settings.environment.name):
        return []
    from jaxrl_async.environments import environment_class

    args = settings.environment.args
    return getattr(environment_class(name, args)(**args), "schemas", [])


def _plain_tokenizer_of(settings: Settings, workdir: pathlib.Path) -> Tokenizer:
    from jaxrl_async.tasks import tokenizer as tokenizers

    wanted, directory = settings.tokenizer, workdir / "tokenizer"
    if wanted.kind == "huggingface":
        files = hub.directory_of("tokenizer.path", wanted.path, needed=hub.TOKENIZER_FILES)
        model = model_directory(settings, ("config.json",)) if settings.model.path else ""
        names = ("chat_template", "date", "stop_tokens", "all_files")
        reading = {name: getattr(wanted, name) for name in names}
        return tokenizers.load_tokenizer(files, model=model, **reading)
    if directory.exists():
        try:
            return tokenizers.load_tokenizer(directory)
        except (OSError, ValueError) as error:
            raise sealed.DamagedError(
                f"{error}; {directory} may be deleted: it is written again"
            ) from None
    if wanted.kind == "bpe":
        task = task_of(settings)
        pairs = task.demonstrations() or [(e.text, e.answer) for e in task.examples("train")]
        texts = (text for prompt, turns in pairs for text in (prompt, *texts_of(turns)))
        return tokenizers.train_bpe(texts, vocab_size=wanted.vocab_size, directory=directory)
    tokenizer = tokenizers.CharTokenizer(wanted.alphabet)
    tokenizer.save(directory)
    return tokenizer


def task_of(settings: Settings) -> Task:
    """The run's task; with a validation split where evaluate.num_validation > 0."""
    from jaxrl_async.tasks import make_task
    from jaxrl_async.tasks.checked import CheckedTask
    from jaxrl_async.tasks.validation import WithValidation

    task = CheckedTask(make_task(settings.task.name, **settings.task.args))
    num = settings.evaluate.num_validation
    return WithValidation(task, num=num, seed=settings.task.seed) if num > 0 else task


def splits_of(settings: Settings, task: Task) -> Splits:
    """The questions of each split of the run's task: train, validation where the run has one, and test."""
    validation = ("validation",) if settings.evaluate.num_validation > 0 else ()
    return {split: task.examples(split) for split in ("train", *validation, "test")}


def same_task_of(settings: Settings, workdir: pathlib.Path, *, keep: bool = True) -> Task:
    """`task_of`, with the questions that the run in a workdir began with; raises as `check_task`."""
    task = task_of(settings)
    check_task(settings, workdir, task, splits_of(settings, task), keep=keep)
    return task


def check_task(
    settings: Settings,
    workdir: pathlib.Path,
    task: Task,
    splits: Splits,
    *,
    name: str = "",
    keep: bool = True,
) -> None:
    """Compares a task, or the one called `name` of evaluate.sets, with the digest in a run's workdir.

    Where there is none, `keep` stores one.

    Raises:
      StartError: it has other questions than the run, which task.changed does not allow; names the first.
    """
    from jaxrl_async.tasks import digest

    what = f"evaluate.sets[{name!r}]" if name else f"task {settings.task.name!r}"
    try:
        now = digest.digest_of(splits, getattr(task, "files", ()))
        run = digest.read(workdir, name)
    except (OSError, ValueError) as error:
        raise StartError(f"{what}: {error}") from error
    if run and (found := digest.difference(run, now, splits)):
        found = f"{what} is not the one that the run in {workdir} began with: {found}"
        if not settings.task.changed:
            raise StartError(
                f"{found}. A task must have equal questions in every process, in one order: sort what comes from a set "
                "or a directory, and seed each shuffle; or bring the run's data back. --config.task.changed=True takes "
                "the task as it is now"
            )
        log.warning("task.changed: %s", found)
    if keep and (run is None or settings.task.changed):
        digest.write(workdir, now, name, replace=settings.task.changed)


def check_sets(
    settings: Settings, workdir: pathlib.Path, tasks: Mapping[str, Task], *, keep: bool = True
) -> None:
    """`check_task` of each of `evaluation_tasks`."""
    for name, task in tasks.items():
        splits = {"test": task.examples("test")}
        check_task(settings, workdir, task, splits, name=name, keep=keep)


def reward_name_of(settings: Settings, reward: str) -> str:
    """The reward of a run, by which every process finds it: that of task.rewards, or else the task's own.

    Raises:
      ValueError: two parts of task.rewards have one name.
    """
    from jaxrl_async.rewards import REWARDS, weighted

    rewards = settings.task.rewards
    return weighted.name_of(rewards) if rewards else importable(reward, REWARDS)


def evaluation_tasks(settings: Settings) -> dict[str, Task]:
    """The tasks of evaluate.sets, checked, by the names of the sets.

    Raises:
      ValueError: one that `make_task` cannot make; names the set.
    """
    from jaxrl_async.tasks import make_task
    from jaxrl_async.tasks.checked import CheckedTask

    found = {}
    for name, (task, args) in forms.evaluation_sets(settings.evaluate.sets).items():
        try:
            found[name] = CheckedTask(make_task(task, **args))
        except (TypeError, ValueError) as error:
            raise ValueError(f"evaluate.sets[{name!r}]: {error}") from None
    return found


def settings_of_sets(settings: Settings) -> Settings:
    """The settings by which evaluate.sets are scored: each has the reward of its own task."""
    return dataclasses.replace(settings, task=dataclasses.replace(settings.task, rewards={}))


def evaluation_sets(
    settings: Settings, tokenizer: Tokenizer, task: Task, split: str, tasks: Mapping[str, Task]
) -> list[EvaluationSet]:
    """The prompts that a version is scored on: of a split of the run's task, and of `evaluation_tasks`.

    Services judge by the run's reward alone: a set of another has a pool of this machine.

    Raises:
      ValueError: no prompt fits.
    """
    from jaxrl_async.evaluation.score import EvaluationSet
    from jaxrl_async.tasks.prompts import held_out_prompts

    bound, found = settings.rollout.max_prompt_tokens, []
    asked, of_sets = [("", task, split, settings)], settings_of_sets(settings)
    asked += [(name, source, "test", of_sets) for name, source in tasks.items()]
    served = reward_name_of(settings, task.reward)
    for name, source, part, of_set in asked:
        is_served = reward_name_of(of_set, source.reward) == served
        make = rewards_of if is_served else reward_pool_of
        prompts = held_out_prompts(source, tokenizer, max_prompt_tokens=bound, split=part)
        found.append(
            EvaluationSet(
                prompts[: settings.evaluate.num_prompts],
                num_fit=len(prompts),
                num_questions=len(source.examples(part)),
                runner=runner_of(of_set, tokenizer, source),
                # A client of services judges as a pool does.
                pool=cast(Any, functools.partial(make, of_set, source.reward)),
                name=name,
            )
        )
    return found


def rewards_of(settings: Settings, reward: str) -> RewardClient | RewardPool:
    """The reward services of a run, or else a pool of this machine; not started yet."""
    make = reward_client_of if settings.rollout.reward_addresses else reward_pool_of
    return make(settings, reward)


def reward_client_of(settings: Settings, reward: str) -> RewardClient:
    """The reward services of a run that has them; not started yet."""
    from jaxrl_async.rewards.client import RewardClient

    rollout = settings.rollout
    return RewardClient(
        rollout.reward_addresses,
        reward_name_of(settings, reward),
        timeout_secs=rollout.reward_timeout_secs,
        outage_secs=settings.queue.outage_secs,
        **queue_access_of(settings),
    )


def reward_pool_of(settings: Settings, reward: str) -> RewardPool:
    """Processes that score completions with a reward, within the run's bounds; not started yet."""
    from jaxrl_async.rewards.pool import RewardPool

    rollout = settings.rollout
    return RewardPool(
        reward_name_of(settings, reward),
        num_processes=rollout.reward_processes,
        timeout_secs=rollout.reward_timeout_secs,
        memory_bytes=rollout.reward_memory_bytes,
        calls_per_process=rollout.reward_calls_per_process,
        environment=rollout.reward_environment,
    )


def rollout_of(settings: Settings) -> Rollout:
    """The run's rollout function.

    Raises:
      ValueError, TypeError: no such function, environment or agent, or an environment that does not take
        environment.args.
    """
    from jaxrl_async.rollout import agent, environment
    from jaxrl_async.rollout.runner import rollout_function

    rollout = settings.rollout
    if rollout.function == "agent":
        return agent.AgentRollout(
            rollout.agent,
            agent_timeout_secs=rollout.agent_timeout_secs,
            agent_calls=rollout.agent_calls,
            agent_rows=rollout.agent_rows,
        )
    if rollout.function != "environment":
        return rollout_function(rollout.function)
    wanted = settings.environment
    # A reset and max_turns turns, and one outage of the servers.
    turn_secs = wanted.timeout_secs + rollout.request_timeout_secs
    episode_secs = (wanted.max_turns + 1) * turn_secs + settings.queue.outage_secs
    return environment.EnvironmentRollout(**vars(wanted), episode_secs=episode_secs)


def runner_of(settings: Settings, tokenizer: Tokenizer, task: Task) -> Runner:
    """The run's rollout function, as training and every evaluation run it. Raises ValueError: no such function."""
    from jaxrl_async.rewards import weighted
    from jaxrl_async.rollout.runner import Runner
    from jaxrl_async.tasks.task import RIGHT

    return Runner(
        rollout_of(settings),
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        stop_token_ids=tuple(tokenizer.stop_token_ids),
        vocab_size=vocab_size_of(settings, tokenizer),
        max_new_tokens=settings.rollout.max_new_tokens,
        max_request_tokens=settings.server.max_total_tokens,
        max_tokens=settings.learner.row_tokens,
        never_token_ids=never_token_ids(settings, tokenizer),
        decode_raw=functools.partial(tokenizer.decode, special=True),
        encode_reply=getattr(tokenizer, "encode_reply", None),
        encode_chat=getattr(tokenizer, "encode_chat", None),
        right=getattr(task, "right", RIGHT),
        deciding=weighted.deciding(settings.task.rewards),
        temperature=settings.rollout.temperature,
        truncation=settings.rollout.truncation,
        record=dataclasses.replace(record_of(settings), has_teacher=False),
        max_sample_tokens=message_bytes_of(settings)
        // (bytes_a_token(settings) * settings.rollout.group_size),
    )


def record_of(settings: Settings) -> Record:
    """What the run records of each token, beside what trains without it."""
    kept = settings.rollout.max_kept if settings.rollout.truncation else 0
    has_teacher = bool(settings.loss.teachers)
    sizes = settings.model.num_layers, settings.model.experts_per_token, settings.model.num_experts
    if settings.model.path:
        sizes = _route_sizes(model_directory(settings, ("config.json",)) / "config.json")
    return Record(*sizes if sizes[2] else (), max_kept=kept, has_teacher=has_teacher)


def packer_of(settings: Settings, process: int = 0) -> Packer:
    """The packer of a process of the learner."""
    from jaxrl_async.learner.packing import Packer

    by_prompt = settings.loss.reduction == "prompt_mean"
    return Packer(
        settings.learner, process=process, record=record_of(settings), by_prompt=by_prompt
    )


@functools.cache
def _route_sizes(path: pathlib.Path) -> tuple[int, int, int]:
    """Layers, experts of a token, and experts."""
    from jaxrl_async.models.config_json import num_experts

    found = json.loads(path.read_text(encoding="utf-8"))
    per_token = found.get("num_experts_per_tok", 0)
    return found.get("num_hidden_layers", 0), per_token, num_experts(found)


def message_bytes_of(settings: Settings) -> int:
    """Bound on a message to the queue: queue.max_message_bytes, or more where a group of whole rows is larger."""
    num_tokens = settings.rollout.group_size * settings.learner.row_tokens
    return max(settings.queue.max_message_bytes, bytes_a_token(settings) * num_tokens)


def bytes_a_token(settings: Settings) -> int:
    """Bound on the bytes of a group's message for each token, its record included."""
    return TOKEN_BYTES + record_of(settings).token_bytes


def never_token_ids(settings: Settings, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The padding token, where it may not be sampled; it may where it ends completions."""
    ends = tokenizer.pad_id in tokenizer.stop_token_ids
    return () if ends or settings.rollout.sample_padding else (tokenizer.pad_id,)


def vocab_size_of(settings: Settings, tokenizer: Tokenizer) -> int:
    """Bound on token ids: the model's, which published checkpoints pad beyond the tokenizer's.

    Raises:
      OSError: model.path has no config.json.
      ValueError: it is not JSON, lacks a vocab_size, or has fewer ids than the tokenizer.
    """
    if not settings.model.path:
        return tokenizer.vocab_size
    config = model_directory(settings, ("config.json",)) / "config.json"
    vocab_size = json.loads(config.read_text(encoding="utf-8")).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ValueError(f"{config} has vocab_size {vocab_size!r}")
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, and vocab_size of {config} is {vocab_size}"
        )
    return vocab_size


def check_context(settings: Settings) -> None:
    """Refuses a run whose tokens may lie beyond the positions that the model at model.path was made for.

    Raises:
      OSError, ValueError: names the settings and both numbers; or config.json cannot be read.
    """
    if not (bound := context_tokens_of(settings)):
        return
    rollout, stage = settings.rollout, settings.warm_start
    most = rollout.max_prompt_tokens + rollout.max_new_tokens
    lengths = {"rollout.max_prompt_tokens + rollout.max_new_tokens": most}
    if rollout.function != "single_turn":  # It may call `generate` again, up to the server's bound.
        lengths["server.max_total_tokens"] = settings.server.max_total_tokens
    if stage.num_steps:
        lengths["warm_start.row_tokens"] = stage.row_tokens
    for what, length in lengths.items():
        if length > bound:
            raise ValueError(
                f"{what} = {length} exceeds the context length of {settings.model.path}, {bound} tokens "
                "(max_position_embeddings of its config.json, with its RoPE scaling)"
            )


def context_tokens_of(settings: Settings) -> int | None:
    """The context length of the files at model.path; None without files, or where they state none."""
    if not settings.model.path:  # The supervisor would load JAX for nothing.
        return None
    from jaxrl_async.models import hf

    return hf.read_context_tokens(model_directory(settings, ("config.json",)))


def frictions_of(settings: Settings, tokenizer: Tokenizer) -> Frictions | None:
    """The frictions of the run's rollouts; None where every probability is 0.

    Raises:
      ValueError: rollout.frictions.actor_bug > 0, and the tokenizer has no single token for "0".
    """
    from jaxrl_async.rollout.frictions import Frictions

    wanted = settings.rollout.frictions
    if not any(vars(wanted).values()):
        return None
    ids, needs = [0], "rollout.frictions.actor_bug needs a tokenizer with one token for '0'"
    if wanted.actor_bug:  # Otherwise the id is unused.
        try:
            ids = tokenizer.encode("0")
        except ValueError as error:  # not in its alphabet
            raise ValueError(f"{needs}: {error}") from None
    if len(ids) != 1:
        raise ValueError(f"{needs}, got the ids {ids}")
    return Frictions(**vars(wanted), zero_id=ids[0])


def model_config_of(settings: Settings, tokenizer: Tokenizer | None) -> ModelConfig:
    """The model's shape: from the files at model.path, or from the config and the tokenizer."""
    from jaxrl_async.models import hf, transformer

    model = settings.model
    if model.path:
        directory = model_directory(settings, ("config.json",))
        config = hf.read_config(directory, dtype=model.dtype, remat=remat_of(model))
        return dataclasses.replace(config, lora=_lora_of(settings))
    others = ("path", "remat_policy")
    shape = {name: value for name, value in vars(model).items() if name not in others}
    shape |= {"lora": _lora_of(settings), "remat": remat_of(model)}
    assert tokenizer is not None  # It may be where the files name the vocabulary's size.
    return transformer.ModelConfig(vocab_size=tokenizer.vocab_size, rope_scaling=None, **shape)


def remat_of(model: Model) -> bool | str:
    """`ModelConfig.remat` of a run's settings."""
    return model.remat and model.remat_policy


def _lora_of(settings: Settings) -> LoRA | None:
    from jaxrl_async.models.lora import LAYERS, LoRA

    wanted = settings.model.lora
    if not wanted.rank:
        return None
    targets = tuple(sorted(wanted.targets, key=list(LAYERS).index))
    return LoRA(wanted.rank, wanted.alpha, targets, wanted.base_dtype)


def has_base_files(settings: Settings) -> bool:
    """Whether the files at model.path are what a run starts from."""
    return bool(settings.model.path) and not settings.warm_start.num_steps


def base_directory(settings: Settings, workdir: pathlib.Path) -> pathlib.Path:
    """The frozen weights of a run with adapters: the files at model.path, or those that the learner wrote once."""
    if has_base_files(settings):
        return model_directory(settings)
    return WeightStore(workdir / "base", keep=1).path(0)


def base_name(settings: Settings, workdir: pathlib.Path) -> str:
    """The frozen weights of a run with adapters, as files of an adapter name them: model.path or a directory."""
    return (
        settings.model.path if has_base_files(settings) else str(base_directory(settings, workdir))
    )


def base_params(
    settings: Settings, workdir: pathlib.Path, config: ModelConfig, mesh: jax.sharding.Mesh
) -> Any:
    """The frozen weights of a run with adapters, on a mesh; None of a run without."""
    from jaxrl_async.learner.train_step import frozen_shardings
    from jaxrl_async.models import hf

    if not config.lora:
        return None
    shardings = frozen_shardings(config, mesh)
    assert shardings is not None
    if not has_base_files(settings):  # The run wrote them, with digests.
        WeightStore(workdir / "base", keep=1).get(0).verify()
    return hf.load(hf.read_tensors(base_directory(settings, workdir)), config, shardings)


def first_params_of(
    settings: Settings,
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    tokenizer: Tokenizer,
    read_task: Callable[[], Task] | None = None,
) -> Any:
    """Version 0 on a mesh, without adapters: random weights or those at model.path, after the warm start.

    Args:
      read_task: reads the task of a warm start; None: as `task_of`.

    Raises:
      ValueError: the warm start finds no demonstrations.
    """
    from jaxrl_async.learner.warm_start import warm_start
    from jaxrl_async.models import hf, sharding, transformer
    from jaxrl_async.tasks.prompts import demonstration_tokens

    config = dataclasses.replace(config, lora=None)
    if settings.model.path:
        shardings = sharding.param_shardings(mesh, transformer.abstract_params(config))
        params = hf.load(hf.read_tensors(model_directory(settings)), config, shardings)
    else:
        params = sharding.init_sharded(config, mesh, settings.seed)
    stage = settings.warm_start
    if stage.num_steps == 0:
        return params
    task = read_task() if read_task else task_of(settings)
    demonstrations = demonstration_tokens(
        task, tokenizer, num=stage.num_demonstrations, max_tokens=stage.row_tokens
    )

    def report(step: int, loss: float) -> None:
        if step % 100 == 0 or step == stage.num_steps:
            log.info("warm start: step %d of %d, loss %.4f", step, stage.num_steps, loss)

    return warm_start(
        config,
        mesh,
        params,
        demonstrations,
        stage,
        head_chunk_tokens=settings.learner.head_chunk_tokens or None,
        seed=settings.seed,
        report=report,
    )


def reference_of(
    settings: Settings,
    config: ModelConfig,
    mesh: jax.sharding.Mesh,
    first: Callable[[], Any],
) -> Any:
    """The policy that a loss compares with, on a mesh: the teacher, else version 0, `first()`; None if it needs none.

    Raises:
      StartError: the teacher's shape is not the policy's.
      FileNotFoundError, ValueError: its files cannot be read.
    """
    from jaxrl_async.models import hf, sharding, transformer

    if not settings.loss.teacher or settings.loss.teachers:
        return first() if settings.loss.needs_reference else None
    directory = hub.directory_of("loss.teacher", settings.loss.teacher, needed=hub.MODEL_FILES)
    shape = hf.read_config(directory, dtype=config.dtype, remat=config.remat)
    if differs := [n for n, value in vars(config).items() if getattr(shape, n) != value]:
        name = differs[0]
        raise StartError(
            f"loss.teacher must have the policy's shape, got {name} = {getattr(shape, name)!r}, the policy's is "
            f"{getattr(config, name)!r}"
        )
    shardings = sharding.param_shardings(mesh, transformer.abstract_params(config))
    return hf.load(hf.read_tensors(directory), config, shardings)


def model_path(settings: Settings, workdir: pathlib.Path) -> pathlib.Path:
    """The directory that a local server starts from: model.path, or one that holds a config.json alone."""
    if settings.model.path:
        return model_directory(settings)
    from jaxrl_async.models import hf

    directory = workdir / "model"
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(settings, workdir)
    config = hf.write_config(model_config_of(settings, tokenizer)) | ends_of(tokenizer)
    text = json.dumps(config, indent=2)
    (directory / "config.json").write_text(text, encoding="utf-8")
    return directory


def ends_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """Token ids of config.json. Servers end a completion there, and at their class's where it names none."""
    ends = list(tokenizer.stop_token_ids)
    return {"bos_token_id": None, "eos_token_id": ends, "pad_token_id": tokenizer.pad_id}


def tracker_of(settings: Settings, workdir: pathlib.Path) -> Tracker | None:
    """The run's experiment tracker; None without one."""
    from jaxrl_async.tracker import SERVICES, Tracker

    wanted = settings.tracker
    if not wanted.kind:
        return None
    _, service = SERVICES[wanted.kind]
    config = dataclasses.asdict(settings)
    return Tracker(service, workdir, project=wanted.project, config=config)


def engine_of(settings: Settings, workdir: pathlib.Path, *, name: str, **sharing: Any) -> Engine:
    """An embedded engine for the run's model, not started, without weights; see `Engine` for `device_lock`."""
    from jaxrl_async.inference.engine import Engine

    server, lora = settings.server, settings.model.lora
    return Engine(
        model_config_of(settings, tokenizer_of(settings, workdir)),
        num_slots=server.num_slots,
        max_total_tokens=server.max_total_tokens,
        decode_chunk=server.decode_chunk,
        max_kept=record_of(settings).max_kept,
        max_queued_requests=server.max_queued_requests,
        release_cache=server.release_cache,
        base=str(base_directory(settings, workdir)) if lora.rank else "",
        name=name,
        **sharing,
    )


def train_step_of(
    settings: Settings, config: ModelConfig, mesh: jax.sharding.Mesh, **sharing: Any
) -> TrainStep:
    """The learner's programs, on a mesh; see `TrainStep` for keeps_params and device_lock."""
    from jaxrl_async.learner import optimizer
    from jaxrl_async.learner.train_step import TrainStep

    return TrainStep(
        config,
        mesh,
        loss=settings.loss,
        learner=settings.learner,
        temperature=settings.rollout.temperature,
        optimizer=optimizer.make_optimizer(settings.learner),
        **sharing,
    )


def checkpoint_directory(settings: Settings, workdir: pathlib.Path) -> str | pathlib.Path:
    """The directory or the bucket of the run's checkpoints."""
    return settings.checkpoint.directory or workdir / "checkpoints"


def checkpoints_of(
    settings: Settings, workdir: pathlib.Path, *, remove_unfinished: bool = False
) -> Checkpoints:
    """The checkpoints of the run; the best evaluated version is kept besides the last ones."""
    from jaxrl_async.evaluation.evaluator import best_version
    from jaxrl_async.learner.checkpoint import Checkpoints

    return Checkpoints(
        checkpoint_directory(settings, workdir),
        keep=settings.checkpoint.keep,
        best=functools.partial(best_version, workdir),
        remove_unfinished=remove_unfinished,
    )


def checkpoint_params(
    settings: Settings, workdir: pathlib.Path, step: int | None = None
) -> tuple[int, Any]:
    """(step, all weights on one device) of a checkpoint of the run; the last one for step None."""
    import jax

    from jaxrl_async.models import sharding

    config = model_config_of(settings, tokenizer_of(settings, workdir))
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    # No program runs, and the run's kernel may be of another device than this one.
    learner = dataclasses.replace(settings.learner, attention_kernel="xla")
    with contextlib.closing(checkpoints_of(settings, workdir)) as checkpoints:
        step = checkpoints.latest() if step is None else step
        train_step = train_step_of(dataclasses.replace(settings, learner=learner), config, mesh)
        state, _ = checkpoints.restore(step, train_step.abstract_state())
    train_step.freeze(base_params(settings, workdir, config, mesh))
    return step, train_step.all_params(state.params)

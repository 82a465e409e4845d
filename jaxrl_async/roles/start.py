"""Starting a run or one of its roles: the one path of `jaxrl_async.run` and of the verb `train`."""

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import pathlib
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence

import ml_collections

from jaxrl_async import security
from jaxrl_async.config.checks import check_waits, queue_access_of
from jaxrl_async.config.settings import Evaluate, Settings, SettingsError
from jaxrl_async.publishing.discovery import check_tls, parse
from jaxrl_async.rewards import check_reward, reward_function
from jaxrl_async.roles import parts
from jaxrl_async.rollout import agent, environment
from jaxrl_async.rollout.failures import code_error
from jaxrl_async.runtime import workdir as workdirs
from jaxrl_async.runtime.workdir import SHAPE
from jaxrl_async.servers import descriptors as files
from jaxrl_async.tasks.prompts import completion_tokens
from jaxrl_async.tasks.task import texts_of
from jaxrl_async.tracker import SERVICES

RESOLVE_SECS = 10.0  # for the names of all servers; one that takes longer is left to the preflight


class StartError(ValueError):
    """A run that cannot start: a taken workdir, a change that a resumed run refuses, or an unreadable task."""


def default_workdir(settings: Settings) -> pathlib.Path:
    """runs/TASK-TIME, where TASK is the task's name or, for "module:attribute", its module."""
    task = settings.task.name.partition(":")[0]
    return pathlib.Path(f"runs/{task}-{time.strftime('%Y%m%d-%H%M%S')}")


def check_workdir(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, *, resume: bool
) -> list[str]:
    """The changes of a config to the run in a workdir, a sentence for each key; writes nothing.

    Raises:
      StartError: the workdir holds a run; with resume, it holds none, or the run cannot take a change.
    """
    try:
        workdirs.check(workdir, resume=resume)
        return workdirs.changes(workdir, config) if resume else []
    except ValueError as error:
        raise StartError(str(error)) from None


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Holds the workdir, before anything is written there, until the end of a run of all roles on this machine.

    Raises:
      StartError: another run has it, or it cannot be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(workdirs.lock(workdir))
        except OSError as error:
            raise StartError(f"--workdir={workdir} cannot be written: {error}") from None
        except ValueError as error:
            raise StartError(str(error)) from None
        yield


def begin(
    config: ml_collections.ConfigDict,
    settings: Settings,
    workdir: pathlib.Path,
    *,
    resume: bool,
    process: int = 0,
) -> bool:
    """Checks the workdir, prints the changes to a resumed run, and writes config.json.

    Args:
      config: written to the workdir, with the shape of the model at model.path.
      settings: the checked settings of the config.
      workdir: made where it does not exist.
      resume: continue the run in the workdir.
      process: index of the learner process; only process 0 prints and writes.

    Returns:
      Whether there is anything to do; False, with the reason printed, where the last step is done.

    Raises:
      StartError: as `check_workdir`; or the workdir cannot be written, or model.path not be read.
      SettingsError: as `check_waits`.
    """
    changes = check_workdir(config, workdir, resume=resume)
    if not resume:
        check_waits(settings)
        try:
            settings.loss.check_new()
        except ValueError as error:
            raise SettingsError(f"loss.{error}") from None
    if resume and (reason := workdirs.nothing_to_do(workdir, settings.learner.num_steps)):
        print(reason)
        return False
    if process == 0:
        for line in changes:
            print(line, flush=True)
        try:
            workdirs.write_config(workdir, _with_shape(config, settings))
        except OSError as error:
            raise StartError(f"--workdir={workdir} cannot be written: {error}") from None
    return True


def _with_shape(config: ml_collections.ConfigDict, settings: Settings) -> ml_collections.ConfigDict:
    """A config with the shape that the files at model.path have, whatever it states; without a path, the config."""
    if not settings.model.path:
        return config
    with _errors_of("model.path: "):
        shape = vars(parts.model_config_of(settings, None))
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.model.update({name: shape[name] for name in SHAPE})
    return config


def prepare(settings: Settings, workdir: pathlib.Path, *, resume: bool = False) -> None:
    """Reads task, tokenizer, model and addresses, so that errors in them are found before any role starts.

    Writes the config.json that servers started by `server.command` read, where the run has no model.path.

    Args:
      settings: the run.
      workdir: its directory.
      resume: a run that has begun keeps an evaluate.num_prompts that a new one may not have.

    Raises:
      StartError: names the setting, the file, the argument or the line.
    """
    _check_hosts(settings)
    _check_discovery(settings)
    _check_tracker(settings)
    splits = {}
    with _errors_of(f"task {settings.task.name!r}: "):
        task = parts.task_of(settings)
        validation = ("validation",) if settings.evaluate.num_validation > 0 else ()
        for split in ("train", *validation, "test"):
            splits[split] = task.examples(split)
            _check_examples(splits[split], split)
        reward = reward_function(task.reward)
        if not settings.rollout.reward_addresses:  # else in the services' processes
            for examples in splits.values():
                check_reward(reward, examples)
    settings_of = {environment.NAME: "environment.name", agent.NAME: "rollout.agent"}
    function = settings.rollout.function
    with _errors_of(f"{settings_of.get(function, 'rollout.function')}: "):
        parts.rollout_of(settings)
    with _errors_of("tokenizer."):
        tokenizer = parts.tokenizer_of(settings, workdir)
    if function == agent.NAME and not getattr(tokenizer, "has_chat_template", False):
        raise StartError(
            f"rollout.function = {agent.NAME!r} needs a tokenizer with a chat template: "
            "tokenizer.kind = 'huggingface', and its files' own or tokenizer.chat_template"
        )
    with _errors_of(""):
        parts.frictions_of(settings, tokenizer)
    with _errors_of("model.path: "):
        parts.vocab_size_of(settings, tokenizer)
        if settings.model.path:
            _check_model(settings)
        if settings.server.command and settings.server.num_started:
            parts.model_path(settings, workdir)
    if settings.model.lora.path:
        with _errors_of("model.lora.path: "):
            from jaxrl_async.models import hf

            config = parts.model_config_of(settings, tokenizer)
            hf.read_adapters(settings.model.lora.path, config)
    _check_texts(settings, tokenizer, task, splits)
    num_prompts, num_test = settings.evaluate.num_prompts, len(splits["test"])
    if not resume and num_test < num_prompts != Evaluate.num_prompts:
        raise StartError(
            f"evaluate.num_prompts = {num_prompts} must be ≤ {num_test}, the questions of the test split of task "
            f"{settings.task.name!r}"
        )


def _check_tracker(settings: Settings) -> None:
    if not (kind := settings.tracker.kind):
        return
    package, _ = SERVICES[kind]
    if importlib.util.find_spec(package) is None:
        raise StartError(
            f"tracker.kind = {kind!r} needs the package {package}, which is not installed: "
            f"pip install 'jaxrl_async[{kind}]'"
        )


@contextlib.contextmanager
def _errors_of(prefix: str) -> Iterator[None]:
    """Errors of a setting as StartErrors: a line for what is foreseen, a traceback for the task's own code."""
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise StartError(f"{prefix}{error}") from error
    except Exception as error:
        raise StartError(f"{prefix.rstrip(': .')} failed:\n{code_error(error).text}") from error


def _check_model(settings: Settings) -> None:
    """Reads config.json and the headers of the weights; touches no device."""
    from jaxrl_async.learner import blocks
    from jaxrl_async.models import attention, hf

    config = parts.model_config_of(settings, None)
    attention.check_windows(settings.learner.attention_kernel, config.windows)
    blocks.check(settings.learner.blocks, config.num_layers)
    hf.check_files(parts.model_directory(settings), config)


def _check_texts(settings: Settings, tokenizer, task, splits) -> None:
    """Refuses a split, or demonstrations, of which no text fits; and texts that the alphabet cannot write."""
    bound = settings.rollout.max_prompt_tokens
    for split, examples in splits.items():
        texts = [example.text for example in examples]
        asked = [settings.tokenizer.instruction + text for text in texts]
        _check_alphabet(settings, f"the {split} split", asked)
        _check_some_fit(
            "rollout.max_prompt_tokens",
            bound,
            f"prompts of the {split} split",
            texts,
            tokenizer.encode_prompt,
        )
    stage = settings.warm_start
    if not stage.num_steps:
        return
    with _errors_of(f"task {settings.task.name!r}: "):
        pairs = task.demonstrations(stage.num_demonstrations)
        texts = [text for prompt, turns in pairs for text in (prompt, *texts_of(turns))]
    _check_alphabet(settings, "the demonstrations", texts)
    _check_some_fit(
        "warm_start.row_tokens",
        stage.row_tokens,
        "demonstrations",
        pairs,
        lambda pair: [
            *tokenizer.encode_prompt(pair[0]),
            *completion_tokens(tokenizer, pair[1])[0],
        ],
    )


def _check_alphabet(settings: Settings, where: str, texts: Sequence[str]) -> None:
    alphabet = settings.tokenizer.alphabet
    if settings.tokenizer.kind != "char":
        return
    if missing := sorted(set().union(*map(set, texts)) - set(alphabet)):
        text = next(text for text in texts if missing[0] in text)
        raise StartError(
            f"tokenizer.alphabet = {alphabet!r} lacks {', '.join(map(repr, missing[:8]))}, which {where} of task "
            f"{settings.task.name!r} needs: {text!r:.80}"
        )


def _check_some_fit(setting: str, bound: int, what: str, texts: Sequence, encode) -> None:
    """Refuses a bound below the shortest text; a warning of the roles counts the longer ones."""
    lengths = []
    for text in texts:
        with _errors_of("tokenizer: "):
            lengths.append(len(encode(text)))
        if lengths[-1] <= bound:
            return
    raise StartError(
        f"{setting} = {bound} is below the shortest of {len(lengths)} {what}, which has "
        f"{min(lengths, default=0)} tokens"
    )


def _check_hosts(settings: Settings) -> None:
    """Resolves the names of the hosts of servers and reward services, all at once."""
    server, hosts = settings.server, {}
    for address in settings.rollout.reward_addresses:
        host = urllib.parse.urlsplit(f"//{address}").hostname
        hosts.setdefault(host, f"rollout.reward_addresses has {address}")
    for name in ("addresses", "control_addresses"):
        for url in getattr(server, name):
            hosts.setdefault(urllib.parse.urlsplit(url).hostname, f"server.{name} has {url}")
    if not hosts:
        return
    pool = concurrent.futures.ThreadPoolExecutor(len(hosts), thread_name_prefix="resolve")
    found = {host: pool.submit(socket.getaddrinfo, host, None) for host in hosts}
    concurrent.futures.wait(found.values(), RESOLVE_SECS)
    pool.shutdown(wait=False, cancel_futures=True)
    lost = [
        f"{hosts[host]}, whose host does not resolve ({future.exception().strerror})"
        for host, future in found.items()
        if future.done() and not future.cancelled() and future.exception()
    ]
    if lost:
        raise StartError("\n  ".join(lost))


def _check_examples(examples, split: str) -> None:
    for i, example in enumerate(examples):
        if not (isinstance(example.text, str) and isinstance(example.answer, str)):
            raise TypeError(
                f"example {i} of split {split!r} must have a text and an answer of type str, got {example!r:.200}"
            )


def _check_discovery(settings: Settings) -> None:
    """Reads the list of servers, where there is one already."""
    place = settings.server.discover
    path = pathlib.Path(place.removeprefix("file:"))
    if not place.startswith("file:") or not path.exists():
        return
    try:
        servers = parse(path.read_text(encoding="utf-8"), str(path))
        if not settings.security.insecure:
            check_tls(servers, str(path))
    except (OSError, ValueError) as error:
        raise StartError(f"server.discover: {error}") from error


def check_access(settings: Settings, role: str, index: int) -> None:
    """Reads the keys and certificates that a role needs, so that errors in them are found before it starts.

    Args:
      settings: the run.
      role: as in `run_role`, or "all".
      index: of the server, rollout worker, reward service or learner process.

    Raises:
      SettingsError: names the setting, and the variable, file or address.
    """
    queue, server = settings.queue, settings.server
    try:
        if role not in ("queue", "rewards"):
            keys = parts.keys_of(settings)
        if role != "server":
            access = queue_access_of(settings)
        if role in ("all", "queue", "rewards"):
            security.server_context(queue.tls_cert, queue.tls_key)
        if role == "rewards" and index < len(settings.rollout.reward_addresses):
            listener, address = f"reward service {index}", settings.rollout.reward_addresses[index]
            security.check_listener(listener, address, access["token"], "queue.token_env")
        if role in ("all", "learner", "rollout"):
            for ca in filter(None, (queue.tls_ca, server.tls_ca)):
                security.client_context(ca)
        if role in ("all", "server") and not server.command:
            security.server_context(server.tls_cert, server.tls_key)
        if role == "server" and not server.command and index < len(server.addresses):
            url = urllib.parse.urlparse(server.addresses[index])
            listener = f"the embedded server {index}"
            security.check_listener(listener, url.netloc, keys["api_key"], "server.api_key_env")
            if (url.scheme == "https") != bool(server.tls_cert):
                raise ValueError(
                    f"server.addresses has {server.addresses[index]}, server.tls_cert is {server.tls_cert!r}: "
                    "the embedded server speaks https with a certificate, http without one"
                )
    except ValueError as error:
        raise SettingsError(str(error)) from None


def run_role(
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

    The soft limit of open files is raised first. A role's module is imported when the role starts, so that queue and
    rollout workers load no JAX.

    Args:
      role: "queue" | "server" | "rollout" | "rewards" | "learner", or "one" for all but "rewards" in this process.
      settings: the run; queue.address and server.addresses are set.
      index: of the server, rollout worker, reward service or learner process.
      workdir: directory of the run.
      resume: the learner continues from the last checkpoint.
      coordinator: "host:port" of learner process 0, where there are several.
      stop_requested: whether the learner should stop at the end of a step, with a checkpoint.

    Returns:
      Whether the run is done; False for a learner that stopped early.
    """
    files.raise_open_file_limit()
    match role:
        case "queue":
            from jaxrl_async.roles import queue

            asyncio.run(queue.run(settings, workdir))
        case "server":
            from jaxrl_async.roles import server

            server.run(settings, workdir, index)
        case "rollout":
            from jaxrl_async.roles import rollout

            asyncio.run(rollout.run(settings, workdir, index))
        case "rewards":
            from jaxrl_async.roles import rewards

            asyncio.run(rewards.run(settings, index))
        case "one":
            from jaxrl_async.roles import one

            return one.run(settings, workdir, resume=resume, stop_requested=stop_requested)
        case "learner":
            from jaxrl_async.roles import learner

            return learner.run(
                settings,
                workdir,
                process=index,
                coordinator=coordinator,
                resume=resume,
                stop_requested=stop_requested,
            )
    return True

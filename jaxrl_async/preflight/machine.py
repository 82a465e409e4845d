"""The preflight of this machine: what can be known before a role starts, of its environment, files and packages.

It reads the task, the tokenizer, the model's files, keys, certificates and names of hosts, and touches no device.
"""

import concurrent.futures
import contextlib
import importlib.util
import math
import pathlib
import shutil
import socket
import sys
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence

from jaxrl_async import parts, security
from jaxrl_async.config.checks import queue_access_of
from jaxrl_async.config.fields import StartError
from jaxrl_async.config.settings import Evaluate, Model, Settings, SettingsError
from jaxrl_async.publishing.discovery import check_tls, parse
from jaxrl_async.rewards import check_reward, reward_function
from jaxrl_async.rollout.failures import code_error
from jaxrl_async.tasks import digest
from jaxrl_async.tasks.coverage import Coverage, coverage
from jaxrl_async.tasks.digest import Splits
from jaxrl_async.tasks.prompts import completion_tokens
from jaxrl_async.tasks.task import Task, texts_of
from jaxrl_async.tracker import SERVICES
from jaxrl_async.types import MAX_STOP_TOKENS

SLOW_SECS = 5.0  # after which a wait for the user's own code is named
RESOLVE_SECS = 10.0  # for the names of all servers; a slower one is left to the preflight of peers


def check_access(settings: Settings, role: str, index: int) -> None:
    """Reads the keys and certificates that a role needs, so that errors in them are found before it starts.

    Args:
      role: as in `run_role`, or "all".
      index: of the server, rollout worker, reward service or learner process.

    Raises:
      SettingsError: names the setting, and the variable, file or address.
    """
    queue, server = settings.queue, settings.server
    try:
        keys = parts.keys_of(settings) if role not in ("queue", "rewards") else {}
        access = queue_access_of(settings) if role != "server" else {}
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


def prepare(settings: Settings, workdir: pathlib.Path, *, resume: bool = False) -> None:
    """Reads task, tokenizer, model and addresses, so that errors in them are found before any role starts.

    Writes the config.json that servers started by `server.command` read, where the run has no model.path.

    Args:
      resume: a run that has begun keeps an evaluate.num_prompts that a new one may not have.

    Raises:
      StartError: names the setting, the file, the argument or the line.
    """
    _check_hosts(settings)
    _check_discovery(settings)
    _check_tracker(settings)
    with _named(f"task {settings.task.name!r}"):
        task, splits, sets = _questions(settings)
    if not resume:  # Of a start that came to no checkpoint. No role of this one has begun.
        for path in workdir.glob(digest.FILES):
            path.unlink(missing_ok=True)
        shutil.rmtree(workdir / "tokenizer", ignore_errors=True)
    parts.check_task(settings, workdir, task, splits)
    parts.check_sets(settings, workdir, sets)
    splits = _with_sets(splits, sets)
    settings_of = {"environment": "environment.name", "agent": "rollout.agent"}
    function = settings.rollout.function
    with errors_of(f"{settings_of.get(function, 'rollout.function')}: "):
        rollout = parts.rollout_of(settings)
    if settings.task.rewards and getattr(rollout, "judges", False) and not resume:
        raise StartError(
            f"task.rewards must be {{}} with environment.name = {settings.environment.name!r}, whose turns have the "
            f"rewards; got {settings.task.rewards}"
        )
    with errors_of("tokenizer."):
        tokenizer = parts.tokenizer_of(settings, workdir)
    if not resume:
        _check_ends(tokenizer)
    if function == "agent" and not getattr(tokenizer, "has_chat_template", False):
        raise StartError(
            "rollout.function = 'agent' needs a tokenizer with a chat template: "
            "tokenizer.kind = 'huggingface', and its files' own or tokenizer.chat_template"
        )
    with errors_of(""):
        parts.frictions_of(settings, tokenizer)
    if not resume and not settings.model.path:
        _check_shape(settings.model)
        with errors_of("learner."):
            _check_kernel(settings, settings.model)
    with errors_of("model.path: "):
        parts.vocab_size_of(settings, tokenizer)
        if settings.model.path:
            _check_model(settings)
        if settings.server.command and settings.server.num_started:
            parts.model_path(settings, workdir)
    if settings.model.lora.path:
        with errors_of("model.lora.path: "):
            from jaxrl_async.models import hf

            config = parts.model_config_of(settings, tokenizer)
            hf.read_adapters(settings.model.lora.path, config)
    _check_texts(settings, tokenizer, task, splits)
    found = _coverage(settings, tokenizer, splits)
    for split in found.splits:
        if not split.num_fit:
            raise StartError(
                f"rollout.max_prompt_tokens = {split.max_tokens}: none of {split.num_questions} prompts of the "
                f"{split.name} split has 1 to {split.max_tokens} tokens; they have {split.shortest} to {split.longest}"
            )
    found.write(workdir)
    num_prompts, num_test = settings.evaluate.num_prompts, len(splits["test"])
    if not resume and num_test < num_prompts != Evaluate.num_prompts:
        raise StartError(
            f"evaluate.num_prompts = {num_prompts} must be ≤ {num_test}, the questions of the test split of task "
            f"{settings.task.name!r}"
        )


def count_prompts(settings: Settings, workdir: pathlib.Path) -> Coverage:
    """The prompts of each split; the tokenizer is of the workdir, or is written there.

    Raises:
      StartError: as of `prepare`, of the task and the tokenizer.
    """
    _, splits, sets = _questions(settings)
    with errors_of("tokenizer."):
        tokenizer = parts.tokenizer_of(settings, workdir)
    _check_ends(tokenizer)
    return _coverage(settings, tokenizer, _with_sets(splits, sets))


def _coverage(settings: Settings, tokenizer, splits) -> Coverage:
    max_tokens, max_scored = settings.rollout.max_prompt_tokens, settings.evaluate.num_prompts
    with errors_of("tokenizer: "):
        return coverage(
            splits, tokenizer.encode_prompt, max_tokens=max_tokens, max_scored=max_scored
        )


def _with_sets(splits: Splits, sets: Mapping[str, Task]) -> Splits:
    """The splits of the task, and evaluate.sets as further ones."""
    return {**splits, **{name: task.examples("test") for name, task in sets.items()}}


def _questions(settings: Settings) -> tuple[Task, Splits, dict[str, Task]]:
    """The task, its splits, and the tasks of evaluate.sets; examples that their rewards do not take are refused."""

    def check(name: str, splits: Splits) -> None:
        reward = reward_function(name)
        # else in the processes of the services, which judge by the run's reward alone
        if not settings.rollout.reward_addresses or name != of_run:
            for examples in splits.values():
                check_reward(reward, examples)

    with errors_of(f"task {settings.task.name!r}: "):
        task = parts.task_of(settings)
        splits = parts.splits_of(settings, task)
        of_run = parts.reward_name_of(settings, task.reward)
        check(of_run, splits)
    with errors_of(""):
        sets, of_sets = parts.evaluation_tasks(settings), parts.settings_of_sets(settings)
    for name, other in sets.items():
        with errors_of(f"evaluate.sets[{name!r}]: "):
            check(parts.reward_name_of(of_sets, other.reward), {name: other.examples("test")})
    return task, splits, sets


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Says after SLOW_SECS that it is still read."""
    said = f"{what}: still imported and read after {SLOW_SECS:g} s"
    timer = threading.Timer(SLOW_SECS, print, (said,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
def errors_of(prefix: str) -> Iterator[None]:
    """Errors of a setting as StartErrors: a line for what is foreseen, a traceback for the task's own code."""
    try:
        yield
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise StartError(f"{prefix}{error}") from error
    except Exception as error:
        raise StartError(f"{prefix.rstrip(': .')} failed:\n{code_error(error).text}") from error


def _check_ends(tokenizer) -> None:
    """Refuses more stop tokens than the embedded engine takes, on which `evaluate` samples whatever the servers are."""
    if (num := len(tokenizer.stop_token_ids)) > MAX_STOP_TOKENS:
        raise StartError(
            f"tokenizer.stop_tokens: {num} tokens end a completion, with those of the files of tokenizer and model; "
            f"at most {MAX_STOP_TOKENS} may"
        )


def _check_model(settings: Settings) -> None:
    """Reads config.json and the headers of the weights; touches no device."""
    from jaxrl_async.learner import blocks
    from jaxrl_async.models import hf

    config = parts.model_config_of(settings, None)
    _check_kernel(settings, config)
    blocks.check(settings.learner.blocks, config.num_layers)
    expert = settings.learner.expert
    if expert > 1 and (not config.num_experts or config.num_experts % expert):
        raise ValueError(
            f"learner.expert = {expert} does not divide the experts of model.path, {config.num_experts}"
        )
    if settings.learner.replay_routes == "on" and not config.num_experts:
        raise ValueError("learner.replay_routes = 'on' needs a model with experts")
    hf.check_files(parts.model_directory(settings), config)


def _check_kernel(settings: Settings, model) -> None:
    kernel = settings.learner.attention_kernel
    if kernel in ("auto", "xla"):  # They take every model, and need no JAX here.
        return
    from jaxrl_async.models import attention

    attention.check_model(kernel, model.windows, model.head_dim)


def _check_shape(model: Model) -> None:
    """Refuses a shape of no architecture: export could not write it, or transformers not read it."""
    if model.qk_norm and model.attention_bias:
        raise StartError("model.qk_norm and model.attention_bias are both True: choose one")
    if model.family == "gemma3" and model.model_dim % model.num_heads:
        raise StartError(
            f"model.num_heads = {model.num_heads} of gemma3 must divide model.model_dim = {model.model_dim}"
        )


def _check_texts(settings: Settings, tokenizer, task, splits) -> None:
    """Refuses texts that the alphabet cannot write, and demonstrations of which none fits."""
    for split, examples in splits.items():
        asked = [settings.tokenizer.instruction + example.text for example in examples]
        _check_alphabet(settings, f"the {split} split", asked)
    stage = settings.warm_start
    if not stage.num_steps:
        return
    with errors_of(f"task {settings.task.name!r}: "):
        pairs = task.demonstrations(stage.num_demonstrations)
        if not pairs:
            raise ValueError(
                f"it has no demonstrations for warm_start.num_steps = {stage.num_steps}"
            )
        texts = [text for prompt, turns in pairs for text in (prompt, *texts_of(turns))]
    _check_alphabet(settings, "the demonstrations", texts)
    shortest = math.inf
    for prompt, turns in pairs:
        with errors_of("tokenizer: "):
            ids = [*tokenizer.encode_prompt(prompt), *completion_tokens(tokenizer, turns)[0]]
        shortest = min(shortest, len(ids))
        if shortest <= stage.row_tokens:  # A warning of the roles counts the longer ones.
            return
    raise StartError(
        f"warm_start.row_tokens = {stage.row_tokens} is below the shortest of {len(pairs)} demonstrations, which has "
        f"{shortest} tokens"
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
        f"{hosts[host]}, whose host does not resolve ({getattr(error, 'strerror', error)})"
        for host, future in found.items()
        if future.done() and not future.cancelled() and (error := future.exception())
    ]
    if lost:
        raise StartError("\n  ".join(lost))


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

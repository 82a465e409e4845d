"""The checks between settings, each once: a config that cannot be run is refused before any device is touched.

Settings that are written in a small language of their own (a delay, a command, the name of a key's variable) are read
here too: reading is their check. The bounds of a loss alone are `loss.LossConfig`'s. Imports no JAX.
"""

import dataclasses
import math
import re
import shlex
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jaxrl_async import security
from jaxrl_async.config.settings import (
    ADDED,
    AGENT_ROWS,
    ATTENTION_KERNELS,
    DTYPES,
    FAMILIES,
    JOURNAL_KEEPS,
    JOURNAL_MODES,
    JOURNAL_SYNCHRONOUS,
    LORA_TARGETS,
    MODES,
    PACKINGS,
    PAUSE_MODES,
    PROCESSES,
    TOKENIZERS,
    TRACKERS,
    TRANSPORTS,
    Model,
    Queue,
    Rollout,
    Server,
    Settings,
    SettingsError,
    Tokenizer,
)
from jaxrl_async.names import nearest
from jaxrl_async.queue.admission import check_staleness
from jaxrl_async.records import EXHAUSTED, REISSUE_REASONS, RETIRE_REASONS
from jaxrl_async.rewards.pool import MIN_MEMORY_BYTES

# A library of environments → their player: rollout.agent, where task.name is "LIBRARY:ENVIRONMENT".
LIBRARY_AGENTS = {
    "openenv": "jaxrl_async.extras.openenv:agent",
    "verifiers": "jaxrl_async.extras.verifiers:agent",
}
COMMAND_FIELDS = ("model_path", "host", "port", "index", "weights")
REASONS = (*sorted(REISSUE_REASONS), *sorted(RETIRE_REASONS), EXHAUSTED)
_ONE_OF = {
    "mode": MODES,
    "learner.packing": PACKINGS,
    "learner.attention_kernel": ATTENTION_KERNELS,
    "model.dtype": DTYPES,
    "model.family": FAMILIES,
    "model.lora.base_dtype": DTYPES,
    "learner.param_dtype": DTYPES,
    "learner.moment_dtype": DTYPES,
    "weights.dtype": DTYPES,
    "weights.transport": TRANSPORTS,
    "weights.pause_mode": PAUSE_MODES,
    "rollout.agent_rows": AGENT_ROWS,
    "journal.keep": JOURNAL_KEEPS,
    "journal.mode": JOURNAL_MODES,
    "journal.synchronous": JOURNAL_SYNCHRONOUS,
    "tokenizer.kind": TOKENIZERS,
    "supervisor.processes": PROCESSES,
    "tracker.kind": TRACKERS,
}
_AT_LEAST_ONE = {
    "queue": ("max_running_groups", "max_bytes", "max_message_bytes", "max_attempts"),
    "server": ("num_slots", "decode_chunk", "max_total_tokens", "max_queued_requests"),
    "rollout": (
        "group_size", "max_prompt_tokens", "max_new_tokens", "num_workers",
        "max_running_groups", "reward_processes", "agent_calls",
    ),
    "environment": ("max_turns", "num_processes"),
    "learner": (
        "num_steps", "groups_per_step", "num_minibatches", "blocks", "microbatch_rows", "row_tokens",
        "num_processes", "data", "fsdp", "context", "tensor",
    ),
    "weights": ("push_every_steps",),
    "checkpoint": ("every_steps", "keep"),
    "evaluate": ("num_prompts", "num_samples", "max_running_requests"),
    "model": ("num_layers", "model_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim"),
    "warm_start": ("batch_size", "row_tokens"),
}  # fmt: skip
_AT_LEAST_ZERO = (
    "seed", "task.seed", "tokenizer.vocab_size", "warm_start.num_steps", "warm_start.learning_rate",
    "warm_start.num_demonstrations", "queue.max_staleness",
    "queue.max_failures", "journal.max_bytes", "journal.samples_per_step",
    "rollout.max_retries", "rollout.reward_calls_per_process",
    "learner.head_chunk_tokens", "learner.learning_rate", "learner.warmup_updates", "learner.weight_decay",
    "environment.max_turn_tokens", "learner.max_mismatch", "server.devices", "weights.max_paused", "evaluate.seed",
    "weights.fanout", "supervisor.max_restarts", "model.lora.rank",
)  # fmt: skip
_ABOVE_ZERO = (
    "model.rope_theta", "model.norm_eps", "model.lora.alpha", "queue.permit_timeout_secs", "server.start_timeout_secs",
    "environment.timeout_secs", "rollout.agent_timeout_secs", "rollout.temperature", "rollout.request_timeout_secs",
    "rollout.reward_timeout_secs", "learner.adam_eps", "learner.max_grad_norm",
    "weights.push_timeout_secs", "weights.poll_secs",
)  # fmt: skip
_BELOW_ONE = ("learner.adam_b1", "learner.adam_b2")  # and at least 0
_ADDRESS = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+)(:\d{1,5})?(/\S*)?")
_DEFAULTS = Settings()
_MAY_BE_INFINITE = ("learner.max_grad_norm",)


def check(s: Settings) -> None:
    """Refuses settings that cannot be run.

    Raises:
      SettingsError: each value outside its bound, and each contradiction.
    """
    refuse(problems(s))


def problems(s: Settings, refused: Iterable[str] = ()) -> list[str]:
    """A sentence for each value outside its bound, and for each contradiction.

    Args:
      s: the settings.
      refused: keys and blocks that are refused already, and have their defaults in `s`.

    Returns:
      The sentences. Of a value outside its bound the contradictions with others are left out, which follow from it.
    """
    bounds = list(_bounds(s))
    for key, _ in bounds:
        s = _with_default(s, key)
    known = [*refused, *(key for key, _ in bounds)]
    follows = re.compile("|".join(rf"(?<![\w.]){re.escape(key)}(?!\w)" for key in known) or r"(?!)")
    contradictions = [text for text in _contradictions(s) if not follows.search(text)]
    return [*(f"{key} {text}" for key, text in bounds), *contradictions]


def refuse(found: Sequence[str]) -> None:
    """Raises the problems of one config together, each on a line of its own.

    Raises:
      SettingsError: there is one.
    """
    if len(found) == 1:
        raise SettingsError(found[0])
    if found:
        raise SettingsError("\n  ".join([f"{len(found)} errors in the config:", *found]))


def check_mode(mode: str, *, max_staleness: int, push_every_steps: int, chunk_groups: int) -> None:
    """The mode's rule: on-policy modes have η = 0 and N = 1, "periodic" alone has chunks; η ≥ N − 1.

    Raises:
      SettingsError: settings of another mode, or a run that would deadlock.
    """
    if text := _not_one_of(mode, MODES):
        raise SettingsError(f"mode {text}")
    if mode != "async" and (max_staleness, push_every_steps) != (0, 1):
        raise SettingsError(
            f"mode {mode!r} needs queue.max_staleness = 0 and weights.push_every_steps = 1, got "
            f"{max_staleness} and {push_every_steps}"
        )
    if chunk_groups < 0 or (mode == "periodic") != (chunk_groups > 0):
        raise SettingsError(
            f"queue.chunk_groups must be ≥ 1 in mode 'periodic' and 0 in the others, got {chunk_groups} in {mode!r}"
        )
    try:
        check_staleness(max_staleness, push_every_steps)
    except ValueError as error:
        raise SettingsError(f"queue.{error}") from None


def refusal_of_one_process(s: Settings) -> str:
    """Why the run needs several processes; "" where one will do."""
    server, learner = s.server, s.learner
    if server.addresses or server.discover:
        key = "addresses" if server.addresses else "discover"
        return f"has servers of its own, and server.{key} = {getattr(server, key)!r}"
    if server.command:
        return f"has embedded servers alone, and server.command = {server.command!r}"
    if learner.num_processes > 1:
        return f"has one learner, and learner.num_processes = {learner.num_processes}"
    return ""


def _check_distributed(s: Settings) -> Iterator[str]:
    """weights.transport = "distributed" is one broadcast of whole weights to servers that find the learner."""
    needs = "weights.transport 'distributed' needs"
    if s.model.lora.rank:
        yield f"{needs} model.lora.rank = 0, got {s.model.lora.rank}: it broadcasts whole weights"
    if s.weights.max_paused:
        yield f"{needs} weights.max_paused = 0, got {s.weights.max_paused}: a broadcast pauses all servers at once"
    host = s.weights.rendezvous
    if not host or host.strip("[]") in ("0.0.0.0", "::"):
        yield f"weights.rendezvous must be an address that the servers can reach, got {host!r}"
    urls = [url for behind in s.server.controls.values() for url in behind]
    far = [url for url in urls if not is_local(url.partition("://")[2])]
    if far and security.is_loopback(host):
        yield (
            f"weights.rendezvous = {host!r} is of this machine alone, and {far[0]} must find the learner there: a "
            "server waits half an hour for it"
        )


def _check_devices(s: Settings) -> Iterator[str]:
    """server.devices divides the devices of a run in one process."""
    of_engines = f"server.devices = {s.server.devices}"
    if s.server.num_local not in (1, s.server.devices):
        yield f"{of_engines} is as many engines, and server.num_local = {s.server.num_local}"
    if s.supervisor.processes == "many":
        yield f"{of_engines} is of a run in one process, and supervisor.processes = 'many'"
    elif s.supervisor.processes == "auto" and (refusal := refusal_of_one_process(s)):
        yield f"{of_engines} is of a run in one process, which {refusal}"


def in_the_clear(s: Settings) -> list[str]:
    """The addresses beyond loopback, "queue.address = …", to which keys, prompts and weights go without TLS."""
    found = []
    if s.queue.address and not s.queue.tls_ca and not is_local(s.queue.address):
        found.append(f"queue.address = {s.queue.address}")
    for address in s.rollout.reward_addresses:
        if not s.queue.tls_ca and not is_local(address):
            found.append(f"rollout.reward_addresses = {address}")
    for name in ("addresses", "control_addresses"):
        for url in getattr(s.server, name):
            scheme, _, address = url.partition("://")
            if scheme == "http" and not is_local(address):
                found.append(f"server.{name} = {url}")
    if s.weights.transport == "distributed" and not security.is_loopback(s.weights.rendezvous):
        found.append(f"weights.rendezvous = {s.weights.rendezvous}")
    return found


def is_local(address: str) -> bool:
    """Whether "host:port", or one with a path, is of this machine alone."""
    return security.is_loopback(address.partition("/")[0].rpartition(":")[0])


def delay_of(delay_steps: int | str) -> tuple[int, bool]:
    """(D, whether the delay of each step is drawn uniformly from 0 to D) of rollout.delay_steps.

    Raises:
      SettingsError: neither D nor "uniform(D)" with a whole D ≥ 0.
    """
    match = re.fullmatch(r"(\d+)|uniform\((\d+)\)", str(delay_steps).strip())
    if not match:
        raise SettingsError(
            f'rollout.delay_steps must be D or "uniform(D)", with a whole D ≥ 0; got {delay_steps!r}'
        )
    return int(match[1] or match[2]), match[2] is not None


def discovery_of(discover: str) -> tuple[str, str, int]:
    """("file", path, 0) or ("dns", name, port) of server.discover.

    Raises:
      SettingsError: neither "file:PATH" nor "dns://name:port".
    """
    dns = re.fullmatch(r"dns://([A-Za-z0-9._-]+):(\d{1,5})", discover)
    if dns and 0 < int(dns[2]) < 1 << 16:
        return "dns", dns[1], int(dns[2])
    kind, _, path = discover.partition(":")
    if kind == "file" and path:
        return "file", path, 0
    raise SettingsError(
        f'server.discover must be "file:PATH" or "dns://name:port", got {discover!r}'
    )


def command_words(command: str, **values: Any) -> list[str]:
    """The words that start one local server.

    Args:
      command: `server.command`; it is cut into words first, so a value may hold spaces.
      **values: of the placeholders, COMMAND_FIELDS.

    Raises:
      SettingsError: an unknown placeholder, or quotes or braces that do not close.
    """
    try:
        words = shlex.split(command)
        fields = [field for word in words for _, field, _, _ in string.Formatter().parse(word)]
    except ValueError as error:
        raise SettingsError(f"server.command {command!r}: {error}") from None
    for field in fields:
        if field is not None and field not in COMMAND_FIELDS:
            known = ", ".join(f"{{{name}}}" for name in COMMAND_FIELDS)
            raise SettingsError(
                f"server.command has the placeholder {{{field}}}, which is none of {known}"
            )
    return [word.format(**values) for word in words]


# Waits, each with the longer one that must outlast it: else the longer one ends a run that the shorter would mend.
_OUTLASTED = (
    ("rollout.request_timeout_secs", "learner.lease_timeout_secs"),
    ("weights.push_timeout_secs", "learner.lease_timeout_secs"),
    ("learner.lease_timeout_secs", "supervisor.stall_secs"),
    ("queue.outage_secs", "supervisor.stall_secs"),
)


def check_waits(s: Settings) -> None:
    """Refuses waits that contradict one another. For new runs: older ones may have such settings.

    Raises:
      SettingsError: names both keys and both numbers.
    """
    for shorter, longer in _OUTLASTED:
        if not _value(s, shorter) < _value(s, longer):
            raise SettingsError(
                f"{shorter} = {_value(s, shorter):g} must be < {longer} = {_value(s, longer):g}"
            )


def queue_access_of(settings: Settings) -> dict[str, Any]:
    """The keyword arguments of a client of the queue, beside its address.

    Raises:
      SettingsError: as of `key_named`.
    """
    queue = settings.queue
    return {"token": key_named("queue.token_env", queue.token_env), "tls_ca": queue.tls_ca}


def key_named(option: str, variable: str) -> str | None:
    """The key in the environment variable that an option names (`security.read_key`); None for "".

    Raises:
      SettingsError: no key there; the message never shows it.
    """
    try:
        return security.read_key(option, variable)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def _bounds(s: Settings) -> Iterator[tuple[str, str]]:
    """(key, "must …") of each setting that is outside its bound, whatever the others are."""
    for key, known in _ONE_OF.items():
        if text := _not_one_of(_value(s, key), known):
            yield key, text
    for block, names in _AT_LEAST_ONE.items():
        for name in names:
            yield from _below(f"{block}.{name}", _value(s, f"{block}.{name}"), 1)
    yield from _below(
        "weights.keep", s.weights.keep, 2
    )  # A late server may still read the version before.
    host, _, port = s.queue.address.rpartition(":")
    if s.queue.address and not (host and port.isdecimal() and int(port) < 1 << 16):
        yield (
            "queue.address",
            f"must be host:port, with a port < 65536; got {s.queue.address!r}",
        )
    for key in (*_AT_LEAST_ZERO, *_ABOVE_ZERO, *_BELOW_ONE):
        value = _value(s, key)
        if math.isnan(value) or (math.isinf(value) and key not in _MAY_BE_INFINITE):
            yield key, f"must be finite, got {value}"
    for key in _AT_LEAST_ZERO:
        yield from _below(key, _value(s, key), 0)
    for key in _ABOVE_ZERO:
        if (value := _value(s, key)) <= 0:
            yield key, f"must be > 0, got {value:g}"
    for key in _BELOW_ONE:
        if (value := _value(s, key)) < 0 or value >= 1:
            yield key, f"must be in [0, 1), got {value:g}"


def _contradictions(s: Settings) -> Iterator[str]:
    """A sentence for each, of settings that are within their bounds."""
    permit_secs, lease_secs = s.queue.permit_timeout_secs, s.learner.lease_timeout_secs
    is_older = s.queue.failure_window_secs == ADDED["queue.failure_window_secs"]
    # A run of before this check keeps what it has.
    if not is_older and not permit_secs < lease_secs:
        yield (
            f"queue.permit_timeout_secs = {permit_secs:g} must be < learner.lease_timeout_secs = {lease_secs:g}: the "
            "learner would give up before the groups of a lost worker are issued again"
        )
    for key in ("outage_secs", "failure_window_secs"):
        if not getattr(s.queue, key) > 0:
            yield f"queue.{key} must be > 0, got {getattr(s.queue, key):g}"
    if s.journal.max_bytes and s.journal.keep != "all":
        yield (
            f"journal.max_bytes = {s.journal.max_bytes} needs journal.keep = 'all', got {s.journal.keep!r}"
        )
    if not s.supervisor.stall_secs > 0:
        yield f"supervisor.stall_secs must be > 0, got {s.supervisor.stall_secs}"
    if not 0 < s.checkpoint.grace_secs < float("inf"):
        yield (f"checkpoint.grace_secs must be > 0 and finite, got {s.checkpoint.grace_secs}")
    keys = (s.queue.token_env, s.server.api_key_env, s.server.admin_api_key_env)
    for name in s.rollout.reward_environment:
        if name in keys:
            yield (f"rollout.reward_environment must not name a key's variable, got {name!r}")
    if s.weights.delta and s.weights.transport not in ("disk", "stream"):
        yield (
            f"weights.delta needs weights.transport 'disk' or 'stream', got {s.weights.transport!r}: SGLang takes "
            "whole tensors alone"
        )
    if s.weights.transport == "distributed":
        yield from _check_distributed(s)
    if s.weights.fanout and s.weights.transport != "stream":
        yield (
            f"weights.fanout needs weights.transport 'stream', got {s.weights.fanout} with "
            f"{s.weights.transport!r}: servers hand on files that were sent to them"
        )
    lease, push = s.weights.pause_lease_secs, s.weights.push_timeout_secs
    if lease != 0 and not push < lease <= 86_400:
        yield (
            f"weights.pause_lease_secs must be 0 or in (weights.push_timeout_secs = {push:g}, 86400], got {lease:g}: "
            "a push that is within its time must not be ended"
        )
    window = s.supervisor.restart_window_secs
    if not window > 0:
        yield f"supervisor.restart_window_secs must be > 0, got {window}"
    yield from _check_tokenizer(s.tokenizer)
    if s.supervisor.processes == "one" and (refusal := refusal_of_one_process(s)):
        yield f"supervisor.processes = 'one' {refusal}"
    if s.server.devices:
        yield from _check_devices(s)
    yield from _check_queue(s.queue)
    yield from _check_server(s.server)
    yield from _check_rollout(s.rollout)
    yield from _check_environment(s)
    yield from _check_agent(s)
    yield from _check_loop(s)
    yield from _check_minibatches(s)
    yield from _check_shapes(s)
    yield from _check_attention(s)
    yield from _check_lora(s)
    yield from _check_delay(s)
    yield from _check_evaluate(s)
    if (found := in_the_clear(s)) and not s.security.insecure:
        yield (
            f"{', '.join(found)} would be reached over the network without TLS: set queue.tls_*, and https:// in "
            "server.addresses, or security.insecure = True on a network that is trusted"
        )


def _check_queue(queue: Queue) -> Iterator[str]:
    try:
        security.check_listener(
            "the queue", queue.address or "localhost:0", queue.token_env, "queue.token_env"
        )
    except ValueError as error:
        yield f"queue.address: {error}"
    if len({bool(path) for path in (queue.tls_cert, queue.tls_key, queue.tls_ca)}) > 1:
        yield (
            "queue.tls_cert, queue.tls_key and queue.tls_ca go together, got "
            f"{queue.tls_cert!r}, {queue.tls_key!r} and {queue.tls_ca!r}"
        )
    for reason, budget in queue.budgets.items():
        if text := _not_one_of(reason, REASONS):
            yield f"queue.budgets' reasons {text}"
        if type(budget) is not int or budget < 0:
            yield (f"queue.budgets.{reason} must be a whole number ≥ 0, got {budget!r}")


def _check_server(server: Server) -> Iterator[str]:
    num_servers, num_controls = len(server.addresses), len(server.control_addresses)
    if server.discover:
        yield from _raised(discovery_of, server.discover)
    if not server.discover_secs > 0:
        yield f"server.discover_secs must be > 0, got {server.discover_secs}"
    if num_servers == 0 and not server.discover and server.num_local < 1:
        yield (f"server.num_local must be ≥ 1 where server.addresses is (), got {server.num_local}")
    for name in ("addresses", "control_addresses"):
        if len(set(getattr(server, name))) < len(getattr(server, name)):
            yield f"server.{name} names a server twice: {getattr(server, name)}"
    if num_controls and num_servers not in (1, num_controls):
        yield (
            f"server.control_addresses has {num_controls} entries and server.addresses has {num_servers}: "
            "there must be as many, or one address (a router) in front of them all"
        )
    wanted = num_servers or server.num_started
    if server.speeds and len(server.speeds) != wanted:
        yield (
            f"server.speeds must have one entry for each of {wanted} servers, or none; got {len(server.speeds)}"
        )
    for speed in server.speeds:
        if not 0 < speed < float("inf"):
            yield f"server.speeds must be > 0 and finite, got {speed}"
    if not 0 < server.quorum <= 1:
        yield f"server.quorum must be in (0, 1], got {server.quorum}"
    if bool(server.tls_cert) != bool(server.tls_key):
        yield (
            f"server.tls_cert and server.tls_key go together, got {server.tls_cert!r} and {server.tls_key!r}"
        )
    for name in ("addresses", "control_addresses"):
        for address in getattr(server, name):
            match = _ADDRESS.fullmatch(address)
            if not match or int((match[2] or ":0")[1:]) >= 1 << 16:
                yield (
                    f"server.{name} must be http://HOST:PORT or https://HOST:PORT, with a port < 65536; "
                    f"got {address!r}"
                )
    for address in (*server.addresses, *server.control_addresses) if server.tls_cert else ():
        if not address.startswith("https://"):
            yield (f"server.addresses must be https:// with server.tls_cert, got {address}")
    yield from _raised(_check_command, server.command)


def _check_command(command: str) -> None:
    for word in command_words(command, **dict.fromkeys(COMMAND_FIELDS, "0")):
        flag = word.partition("=")[0]
        if flag in ("--api-key", "--admin-api-key"):  # config.json and `ps` would show it.
            raise SettingsError(f"server.command gives {flag}: keys stay in the environment")


def _check_rollout(rollout: Rollout) -> Iterator[str]:
    if rollout.reward_memory_bytes != 0:
        if rollout.reward_memory_bytes < MIN_MEMORY_BYTES:
            yield (
                f"rollout.reward_memory_bytes must be 0 or ≥ {MIN_MEMORY_BYTES}, got {rollout.reward_memory_bytes}"
            )
    if len(set(rollout.reward_addresses)) < len(rollout.reward_addresses):
        yield f"rollout.reward_addresses names a service twice: {rollout.reward_addresses}"
    for address in rollout.reward_addresses:
        host, _, port = address.rpartition(":")
        if not (host and "/" not in host and port.isdecimal() and int(port) < 1 << 16):
            yield f"rollout.reward_addresses must be host:port, with a port < 65536; got {address!r}"
    for name, value in vars(rollout.frictions).items():
        if not 0 <= value <= 1:
            yield f"rollout.frictions.{name} must be in [0, 1], got {value}"
    if rollout.drop_equal_rewards and rollout.group_size < 2:
        yield (
            "rollout.drop_equal_rewards needs rollout.group_size ≥ 2: the rewards of a group of 1 are always equal"
        )
    if not 0 <= rollout.overlong_buffer_tokens <= rollout.max_new_tokens:
        yield (
            f"rollout.overlong_buffer_tokens must be in [0, rollout.max_new_tokens = {rollout.max_new_tokens}], got "
            f"{rollout.overlong_buffer_tokens}"
        )


def _check_environment(s: Settings) -> Iterator[str]:
    wanted = s.environment
    if wanted.memory_bytes != 0 and wanted.memory_bytes < MIN_MEMORY_BYTES:
        yield f"environment.memory_bytes must be 0 or ≥ {MIN_MEMORY_BYTES}, got {wanted.memory_bytes}"
    if (s.rollout.function == "environment") != bool(wanted.name):
        yield (
            f"rollout.function = 'environment' and environment.name go together, got {s.rollout.function!r} and "
            f"{wanted.name!r}"
        )


def _check_agent(s: Settings) -> Iterator[str]:
    rollout, tokenizer = s.rollout, s.tokenizer
    needed = LIBRARY_AGENTS.get(s.task.name.partition(":")[0])
    if needed and rollout.agent != needed:
        yield (
            f"task.name = {s.task.name!r} needs rollout.function = 'agent' and rollout.agent = {needed!r}, got "
            f"{rollout.function!r} and {rollout.agent!r}"
        )
        return
    if (rollout.function == "agent") != bool(rollout.agent):
        yield (
            f"rollout.function = 'agent' and rollout.agent go together, got {rollout.function!r} and {rollout.agent!r}"
        )
    if rollout.function != "agent":
        return
    for name in ("system_prompt", "instruction"):  # They would be asked of no one.
        if value := getattr(tokenizer, name):
            yield (
                f"tokenizer.{name} must be '' where rollout.function = 'agent', whose messages are its own; got "
                f"{value!r:.60}"
            )


def _check_loop(s: Settings) -> Iterator[str]:
    yield from _raised(
        check_mode,
        s.mode,
        max_staleness=s.queue.max_staleness,
        push_every_steps=s.weights.push_every_steps,
        chunk_groups=s.queue.chunk_groups,
    )
    # Not in check_mode: a plan may have η = 0, as the limit of small bounds.
    if s.mode == "async" and s.queue.max_staleness < 1:
        yield (
            f"mode 'async' needs queue.max_staleness ≥ 1, got {s.queue.max_staleness}; with 0 it is mode 'sync', bit "
            "for bit"
        )
    if s.mode == "periodic" and s.learner.num_minibatches != 1:
        yield (
            "mode 'periodic' accumulates one gradient over the whole step, so learner.num_minibatches must be 1, "
            f"got {s.learner.num_minibatches}"
        )


def _check_minibatches(s: Settings) -> Iterator[str]:
    if s.learner.groups_per_step % s.learner.num_minibatches:
        yield (
            f"learner.num_minibatches = {s.learner.num_minibatches} does not divide "
            f"learner.groups_per_step = {s.learner.groups_per_step}"
        )
    try:
        s.loss.check_minibatches(s.learner.num_minibatches)
    except ValueError as error:
        yield f"loss.{error}"
    if s.loss.advantage in ("grpo", "rloo") and s.rollout.group_size < 2:
        yield (
            f"loss.advantage {s.loss.advantage!r} needs rollout.group_size ≥ 2, got {s.rollout.group_size}"
        )
    if s.loss.advantage == "turns":
        if s.rollout.function in ("single_turn", "agent"):
            yield (
                "loss.advantage 'turns' needs turns that have rewards of their own, as those of an environment have; "
                f"got rollout.function = {s.rollout.function!r}"
            )
        if s.rollout.drop_equal_rewards:
            yield (
                "rollout.drop_equal_rewards must be False with loss.advantage 'turns': the turns of a group may differ "
                "where its rewards are equal"
            )


def _check_tokenizer(tokenizer: Tokenizer) -> Iterator[str]:
    for name in ("chat_template", "system_prompt"):
        if (value := getattr(tokenizer, name)) and tokenizer.kind != "huggingface":
            yield f"tokenizer.{name} = {value!r:.60} needs tokenizer.kind = 'huggingface', got {tokenizer.kind!r}"


def _check_shapes(s: Settings) -> Iterator[str]:
    if not s.model.path and s.model.num_heads % s.model.num_kv_heads:
        yield f"model.num_kv_heads = {s.model.num_kv_heads} does not divide model.num_heads = {s.model.num_heads}"
    if not s.model.path:
        yield from _check_family(s.model)
        if s.learner.blocks > s.model.num_layers:
            yield f"learner.blocks must be in [1, model.num_layers = {s.model.num_layers}], got {s.learner.blocks}"
    if s.warm_start.num_steps and s.warm_start.num_demonstrations < 1:
        yield (
            f"warm_start.num_demonstrations must be ≥ 1 where warm_start.num_steps = {s.warm_start.num_steps}, got "
            f"{s.warm_start.num_demonstrations}"
        )
    longest = s.rollout.max_prompt_tokens + s.rollout.max_new_tokens
    bounds = {key: _value(s, key) for key in ("learner.row_tokens", "server.max_total_tokens")}
    if exceeded := [f"{key} = {bound}" for key, bound in bounds.items() if longest > bound]:
        yield (
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest} exceeds {' and '.join(exceeded)}"
        )
    row_shards = s.learner.data * s.learner.fsdp
    if s.learner.microbatch_rows % row_shards:
        yield (
            f"learner.microbatch_rows = {s.learner.microbatch_rows} must be a multiple of "
            f"learner.data · learner.fsdp = {row_shards}"
        )
    if row_shards % s.learner.num_processes:  # Each has rows of its own.
        yield (
            f"learner.data · learner.fsdp = {row_shards} must be a multiple of "
            f"learner.num_processes = {s.learner.num_processes}"
        )
    context = s.learner.context
    warm_start = ("warm_start.row_tokens",) if s.warm_start.num_steps else ()
    for key in ("learner.row_tokens", *warm_start):
        if _value(s, key) % context:
            yield (f"{key} = {_value(s, key)} must be a multiple of learner.context = {context}")


def _check_lora(s: Settings) -> Iterator[str]:
    lora = s.model.lora
    if not lora.rank:
        if lora.path:
            yield f"model.lora.path = {lora.path!r} needs model.lora.rank ≥ 1, got 0"
        return
    for target in lora.targets:
        if text := _not_one_of(target, LORA_TARGETS):
            yield f"model.lora.targets' names {text}"
    if s.weights.delta:
        yield "weights.delta must be False with model.lora: a push carries the small adapter alone, got True"
    if not lora.targets or len(set(lora.targets)) < len(lora.targets):
        yield f"model.lora.targets must be names, each once, got {lora.targets}"
    if s.server.control_addresses:
        yield (
            "model.lora needs server.control_addresses = (): the servers that take requests say which adapter they "
            f"hold, and a router does not; got {s.server.control_addresses}"
        )


def _check_family(model: Model) -> Iterator[str]:
    windows, num_layers = model.windows, model.num_layers
    if model.family != "gemma3":
        if windows:
            yield f"model.windows = {windows} needs model.family = 'gemma3', got {model.family!r}"
        return
    for name, needed in (("qk_norm", True), ("attention_bias", False)):
        if getattr(model, name) != needed:
            yield f"model.family 'gemma3' needs model.{name} = {needed}, got {not needed}"
    if windows and (len(windows) != num_layers or min(windows) < 0 or len({*windows} - {0}) != 1):
        yield (
            "model.windows must be () or have 0 or one number of tokens ≥ 1 for each of model.num_layers = "
            f"{num_layers} layers, not 0 for all, got {windows}"
        )


def _check_attention(s: Settings) -> Iterator[str]:
    kernel, learner = s.learner.attention_kernel, s.learner
    if kernel == "cudnn" and s.model.dtype != "bfloat16":
        yield (
            f"learner.attention_kernel 'cudnn' needs model.dtype = 'bfloat16', got {s.model.dtype!r}"
        )
    if kernel == "cudnn" and learner.context > 1:
        yield (f"learner.attention_kernel 'cudnn' needs learner.context = 1, got {learner.context}")
    if kernel == "splash" and s.model.windows and not s.model.path:
        yield (
            "learner.attention_kernel 'splash' has no windows, and model.windows has one of "
            f"{max(s.model.windows)} tokens: choose 'xla', or 'cudnn' on an NVIDIA GPU"
        )
    part = learner.row_tokens // learner.context
    if kernel == "splash" and part % 128:
        yield (
            "learner.attention_kernel 'splash' needs learner.row_tokens / learner.context to be a multiple of 128, "
            f"got {part}"
        )


def _check_delay(s: Settings) -> Iterator[str]:
    if refused := list(_raised(delay_of, s.rollout.delay_steps)):
        yield from refused
        return
    max_delay, _ = delay_of(s.rollout.delay_steps)
    if max_delay and s.weights.push_every_steps != 1:
        yield (
            f"rollout.delay_steps = {s.rollout.delay_steps!r} needs weights.push_every_steps = 1, got "
            f"{s.weights.push_every_steps}: the versions in between are never written, so no server could be given one"
        )
    if max_delay and s.mode == "periodic":
        yield (
            f"mode 'periodic' is on-policy, which rollout.delay_steps = {s.rollout.delay_steps!r} is not: use mode "
            "'sync' for the same gradient at that delay"
        )


def _check_evaluate(s: Settings) -> Iterator[str]:
    every, timeout = s.evaluate.every_steps, s.evaluate.timeout_secs
    if every < 0:
        yield f"evaluate.every_steps must be ≥ 0, got {every}"
    if every % s.weights.push_every_steps:  # Servers hold no other version.
        yield (
            f"evaluate.every_steps must be a multiple of weights.push_every_steps = {s.weights.push_every_steps}, "
            f"got {every}"
        )
    if s.evaluate.num_validation < -1:
        yield f"evaluate.num_validation must be ≥ -1, got {s.evaluate.num_validation}"
    if every and s.evaluate.num_validation == 0:
        yield (
            f"evaluate.every_steps = {every} chooses the best version, and needs evaluate.num_validation ≥ 1 questions "
            "that do not also score it, got 0; -1 chooses on the test split"
        )
    if not timeout > 0:
        yield f"evaluate.timeout_secs must be > 0, got {timeout}"
    # Where there is one server the learner waits for it during an evaluation.
    if every and not timeout < s.learner.lease_timeout_secs:
        yield (
            f"evaluate.timeout_secs must be < learner.lease_timeout_secs = {s.learner.lease_timeout_secs:g}, "
            f"got {timeout:g}"
        )


def _value(settings: Settings, key: str) -> Any:
    for part in key.split("."):
        settings = getattr(settings, part)
    return settings


def _with_default(block: Any, key: str, default: Any = _DEFAULTS) -> Any:
    """A copy of settings in which a key has its default."""
    head, _, rest = key.partition(".")
    value = getattr(default, head)
    if rest:
        value = _with_default(getattr(block, head), rest, value)
    return dataclasses.replace(block, **{head: value})


def _raised(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[str]:
    """The message of the SettingsError that a call raises, if it does."""
    try:
        function(*args, **kwargs)
    except SettingsError as error:
        yield str(error)


def _below(key: str, value: int, bound: int) -> Iterator[tuple[str, str]]:
    if value < bound:
        yield key, f"must be ≥ {bound}, got {value}"


def _not_one_of(value: str, known: tuple[str, ...]) -> str:
    """ "must be …" where a value is none of the known ones, else ""."""
    if value in known:
        return ""
    return f"must be one of {', '.join(known)}; got {value!r}{nearest(value, known)}"

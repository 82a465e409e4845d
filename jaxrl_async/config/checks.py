"""The contradictions between settings, each once: a config that cannot be run is refused before any device is touched.

Bounds and choices of one setting stand in its field; parts of a loss that contradict one another are refused by
`loss.LossConfig`. Imports no JAX.
"""

import functools
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jaxrl_async import security
from jaxrl_async.config.fields import one_of
from jaxrl_async.config.forms import delay_of
from jaxrl_async.config.settings import ADDED, MODES, Settings, SettingsError
from jaxrl_async.queue.admission import check_staleness

# A library of environments → their player: rollout.agent, where task.name is "LIBRARY:ENVIRONMENT".
LIBRARY_AGENTS = {
    "openenv": "jaxrl_async.extras.openenv:agent",
    "verifiers": "jaxrl_async.extras.verifiers:agent",
}


def contradictions(s: Settings, refused: Collection[str] = ()) -> list[str]:
    """A sentence for each contradiction between settings.

    Args:
      s: settings within their bounds.
      refused: keys and blocks that are refused already, and have their defaults in `s`: the contradictions that name
        one of them, and may follow from it, are left out.
    """
    follows = re.compile(
        "|".join(rf"(?<![\w.]){re.escape(key)}(?!\w)" for key in refused) or r"(?!)"
    )
    return [text for text in _contradictions(s) if not follows.search(text)]


def refuse(found: Sequence[str]) -> None:
    """Raises one SettingsError with all problems of a config, where there are some, each on a line of its own."""
    if len(found) == 1:
        raise SettingsError(found[0])
    if found:
        raise SettingsError("\n  ".join([f"{len(found)} errors in the config:", *found]))


def check_mode(mode: str, *, max_staleness: int, push_every_steps: int, chunk_groups: int) -> None:
    """The mode's rule: on-policy modes have η = 0 and N = 1, "periodic" alone has chunks; η ≥ N − 1.

    Raises:
      SettingsError: settings of another mode, or a run that would deadlock.
    """
    if text := one_of(mode, MODES):
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


def in_the_clear(s: Settings) -> list[str]:
    """The addresses beyond loopback, "queue.address = …", to which keys, prompts and weights go without TLS."""
    found = []
    if s.queue.address and not s.queue.tls_ca and not is_local(s.queue.address):
        found.append(f"queue.address = {s.queue.address}")
    for address in s.rollout.reward_addresses:
        if not s.queue.tls_ca and not is_local(address):
            found.append(f"rollout.reward_addresses = {address}")
    if s.monitoring.address and not is_local(s.monitoring.address):
        found.append(f"monitoring.address = {s.monitoring.address}")
    urls = [
        (f"server.{n}", u) for n in ("addresses", "control_addresses") for u in getattr(s.server, n)
    ]
    for key, url in urls + [("loss.teacher", url) for url in s.loss.teachers.values()]:
        scheme, _, address = url.partition("://")
        if scheme == "http" and not is_local(address):
            found.append(f"{key} = {url}")
    if s.weights.transport == "distributed" and not security.is_loopback(s.weights.rendezvous):
        found.append(f"weights.rendezvous = {s.weights.rendezvous}")
    return found


def is_local(address: str) -> bool:
    """Whether "host:port", or one with a path, is of this machine alone."""
    return security.is_loopback(address.partition("/")[0].rpartition(":")[0])


# Advantages that are undefined in a group of 1. The others are 0 there: an earlier run resumes, and learns nothing.
NEEDS_PEERS = ("grpo", "rloo", "batch")

# Waits, each with the longer one that must outlast it: else the longer one ends a run that the shorter would mend.
_OUTLASTED = (
    ("rollout.request_timeout_secs", "learner.lease_timeout_secs"),
    ("weights.push_timeout_secs", "learner.lease_timeout_secs"),
    ("learner.lease_timeout_secs", "supervisor.stall_secs"),
    ("queue.outage_secs", "supervisor.stall_secs"),
)


def check_new(s: Settings) -> None:
    """Refuses for a new run what earlier ones may have: waits out of order, a loss that does less than its name says,
    a group of 1, in which every advantage is 0, and a warm start that the mesh of a resumed run cannot divide.

    Raises:
      SettingsError: names both keys and both numbers of such waits; as `LossConfig.check_new`.
    """
    found = []
    if s.rollout.group_size < 2 and s.loss.advantage not in (*NEEDS_PEERS, "none"):
        found.append(
            _needs_peers(s) + ": the baseline is the group's mean, so that each advantage is 0"
        )
    if s.warm_start.num_steps and s.warm_start.batch_size % s.learner.row_shards:
        found.append(f"{_is(s, 'warm_start.batch_size')} must be a multiple of {_shards(s)}")
    waits = [(a, b) for a, b in _OUTLASTED if not _value(s, a) < _value(s, b)]
    found += [f"{_is(s, shorter)} must be < {_is(s, longer)}" for shorter, longer in waits]
    try:
        s.loss.check_new()
    except ValueError as error:
        found.append(f"loss.{error}")
    refuse(found)


def warnings(s: Settings) -> list[str]:
    """A sentence for each setting that a run may have, and hardly means."""
    learner, found = s.learner, []
    if learner.warmup_updates > learner.num_updates:
        share = learner.num_updates / learner.warmup_updates
        found.append(
            f"learner.warmup_updates = {learner.warmup_updates} exceeds the run's {learner.num_updates} updates: the "
            f"learning rate ends at {share * learner.learning_rate:g}, and never is learner.learning_rate = "
            f"{learner.learning_rate:g}"
        )
    if s.evaluate.every_steps % s.checkpoint.every_steps:
        found.append(
            f"{_is(s, 'evaluate.every_steps')} is no multiple of {_is(s, 'checkpoint.every_steps')}: the best version "
            "may be one without a checkpoint, and is lost then"
        )
    return found


def queue_access_of(settings: Settings) -> dict[str, Any]:
    """The keyword arguments of a client of the queue, beside its address. Raises SettingsError: as of `key_named`."""
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


def _contradictions(s: Settings) -> Iterator[str]:
    parts = (_of_queue, _of_server, _of_weights, _of_processes, _of_rollout, _of_agent, _of_loop)
    parts += (
        _of_optimizer,
        _of_loss,
        _of_shapes,
        _of_model,
        _of_lora,
        _of_attention,
        _of_delay,
        _of_evaluation,
        _of_profile,
    )
    for part in parts:
        yield from part(s)
    if (found := in_the_clear(s)) and not s.security.insecure:
        yield (
            f"{', '.join(found)} would be reached over the network without TLS: set queue.tls_*, and https:// in "
            "server.addresses, or security.insecure = True on a network that is trusted"
        )


def _of_queue(s: Settings) -> Iterator[str]:
    queue, permit, lease = s.queue, "queue.permit_timeout_secs", "learner.lease_timeout_secs"
    # A run of before this check keeps what it has.
    is_older = queue.failure_window_secs == ADDED["queue.failure_window_secs"]
    if not is_older and not _value(s, permit) < _value(s, lease):
        yield (
            f"{_is(s, permit)} must be < {_is(s, lease)}: the learner would give up before the groups of a lost "
            "worker are issued again"
        )
    for what, key in (("the queue", "queue.address"), ("metrics", "monitoring.address")):
        address = _value(s, key) or "localhost:0"
        try:
            security.check_listener(what, address, queue.token_env, "queue.token_env")
        except ValueError as error:
            yield f"{key}: {error}"
    if len({bool(path) for path in (queue.tls_cert, queue.tls_key, queue.tls_ca)}) > 1:
        given = f"{queue.tls_cert!r}, {queue.tls_key!r} and {queue.tls_ca!r}"
        yield f"queue.tls_cert, queue.tls_key and queue.tls_ca go together, got {given}"
    if s.journal.max_bytes and s.journal.keep != "all":
        yield f"{_is(s, 'journal.max_bytes')} needs journal.keep = 'all', got {s.journal.keep!r}"


def _of_server(s: Settings) -> Iterator[str]:
    server = s.server
    num_servers, num_controls = len(server.addresses), len(server.control_addresses)
    if num_servers == 0 and not server.discover and server.num_local < 1:
        yield f"server.num_local must be ≥ 1 where server.addresses is (), got {server.num_local}"
    if num_controls and num_servers not in (1, num_controls):
        yield (
            f"server.control_addresses has {num_controls} entries and server.addresses has {num_servers}: "
            "there must be as many, or one address (a router) in front of them all"
        )
    wanted, num_speeds = num_servers or server.num_started, len(server.speeds)
    if num_speeds not in (0, wanted):
        yield f"server.speeds must have one entry for each of {wanted} servers, or none; got {num_speeds}"
    if bool(server.tls_cert) != bool(server.tls_key):
        given = f"{server.tls_cert!r} and {server.tls_key!r}"
        yield f"server.tls_cert and server.tls_key go together, got {given}"
    for address in (*server.addresses, *server.control_addresses) if server.tls_cert else ():
        if not address.startswith("https://"):
            yield f"server.addresses must be https:// with server.tls_cert, got {address}"


def _of_weights(s: Settings) -> Iterator[str]:
    weights = s.weights
    if weights.delta and weights.transport not in ("disk", "stream"):
        yield (
            f"weights.delta needs weights.transport 'disk' or 'stream', got {weights.transport!r}: SGLang takes "
            "whole tensors alone"
        )
    if weights.fanout and weights.transport != "stream":
        yield (
            f"weights.fanout needs weights.transport 'stream', got {weights.fanout} with "
            f"{weights.transport!r}: servers hand on files that were sent to them"
        )
    lease, push = weights.pause_lease_secs, weights.push_timeout_secs
    if lease and not push < lease:
        yield (
            f"weights.pause_lease_secs must be 0 or > weights.push_timeout_secs = {push:g}, got {lease:g}: "
            "a push that is within its time must not be ended"
        )
    if weights.transport == "distributed":
        yield from _of_broadcast(s)


def _of_broadcast(s: Settings) -> Iterator[str]:
    """weights.transport = "distributed" is one broadcast of whole weights to servers that find the learner."""
    needs = "weights.transport 'distributed' needs"
    if s.model.lora.rank:
        yield f"{needs} model.lora.rank = 0, got {s.model.lora.rank}: it broadcasts whole weights"
    if s.weights.max_paused:
        yield f"{needs} weights.max_paused = 0, got {s.weights.max_paused}: a broadcast pauses all servers at once"
    host = s.weights.rendezvous
    if not host or host.strip("[]") in ("0.0.0.0", "::"):
        yield f"weights.rendezvous must be an address that the servers can reach, got {host!r}"
    urls = s.server.control_addresses or s.server.addresses
    far = [url for url in urls if not is_local(url.partition("://")[2])]
    if far and security.is_loopback(host):
        yield (
            f"weights.rendezvous = {host!r} is of this machine alone, and {far[0]} must find the learner there: a "
            "server waits half an hour for it"
        )


def _of_processes(s: Settings) -> Iterator[str]:
    processes, refusal = s.supervisor.processes, refusal_of_one_process(s)
    if processes == "one" and refusal:
        yield f"supervisor.processes = 'one' {refusal}"
    if not s.server.devices:
        return
    of_engines = f"server.devices = {s.server.devices}"
    if s.server.num_local not in (1, s.server.devices):
        yield f"{of_engines} is as many engines, and server.num_local = {s.server.num_local}"
    if processes == "many":
        yield f"{of_engines} is of a run in one process, and supervisor.processes = 'many'"
    elif processes == "auto" and refusal:
        yield f"{of_engines} is of a run in one process, which {refusal}"


def _of_rollout(s: Settings) -> Iterator[str]:
    rollout, environment = s.rollout, s.environment
    keys = (s.queue.token_env, s.server.api_key_env, s.server.admin_api_key_env)
    keys += (s.loss.teacher_key_env,) if s.loss.teacher_key_env else ()
    for name in rollout.reward_environment:
        if name in keys:
            yield f"rollout.reward_environment must not name a key's variable, got {name!r}"
    if rollout.drop_equal_rewards and rollout.group_size < 2:
        yield "rollout.drop_equal_rewards needs rollout.group_size ≥ 2: the rewards of a group of 1 are always equal"
    if rollout.drop_equal_rewards and s.loss.advantage in ("none", "turns"):
        where = f"loss.advantage {s.loss.advantage!r}"
        yield f"rollout.drop_equal_rewards must be False with {where}: a group of equal rewards has a gradient, too"
    if rollout.overlong_buffer_tokens > rollout.max_new_tokens:
        bound, tokens = _is(s, "rollout.max_new_tokens"), rollout.overlong_buffer_tokens
        yield f"rollout.overlong_buffer_tokens must be in [0, {bound}], got {tokens}"
    if rollout.truncation and rollout.top_k > rollout.max_kept:
        yield f"rollout.max_kept must be ≥ {_is(s, 'rollout.top_k')}, got {rollout.max_kept}"
    if rollout.truncation and rollout.frictions.actor_bug:
        yield (
            f"{_is(s, 'rollout.frictions.actor_bug')} replaces tokens after they were drawn, and must be 0 with "
            "rollout.top_p, top_k or min_p, which train a token among those it was drawn from"
        )
    if (rollout.function == "environment") != bool(environment.name):
        given = f"{rollout.function!r} and {environment.name!r}"
        yield f"rollout.function = 'environment' and environment.name go together, got {given}"
    for name in ("chat_template", "system_prompt", "date", "stop_tokens"):
        if (value := getattr(s.tokenizer, name)) and s.tokenizer.kind != "huggingface":
            yield f"tokenizer.{name} = {value!r:.60} needs tokenizer.kind = 'huggingface', got {s.tokenizer.kind!r}"


def _of_agent(s: Settings) -> Iterator[str]:
    rollout, tokenizer = s.rollout, s.tokenizer
    given = f"{rollout.function!r} and {rollout.agent!r}"
    needed = LIBRARY_AGENTS.get(s.task.name.partition(":")[0])
    if needed and s.task.rewards:
        yield f"task.rewards must be {{}} with {_is(s, 'task.name')}, which judges by itself; got {s.task.rewards}"
    if needed and rollout.agent != needed:
        agent = f"rollout.function = 'agent' and rollout.agent = {needed!r}"
        yield f"{_is(s, 'task.name')} needs {agent}, got {given}"
        return
    if (rollout.function == "agent") != bool(rollout.agent):
        yield f"rollout.function = 'agent' and rollout.agent go together, got {given}"
    if rollout.function != "agent":
        return
    for name in ("system_prompt", "instruction"):  # They would be asked of no one.
        if value := getattr(tokenizer, name):
            yield (
                f"tokenizer.{name} must be '' where rollout.function = 'agent', whose messages are its own; got "
                f"{value!r:.60}"
            )


def _of_profile(s: Settings) -> Iterator[str]:
    steps = s.learner.profile_steps
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        yield f"learner.profile_steps must be (), or (first, last) step; got {steps}"


def _of_loop(s: Settings) -> Iterator[str]:
    try:
        check_mode(
            s.mode,
            max_staleness=s.queue.max_staleness,
            push_every_steps=s.weights.push_every_steps,
            chunk_groups=s.queue.chunk_groups,
        )
    except SettingsError as error:
        yield str(error)
    # Not in check_mode: a plan may have η = 0, as the limit of small bounds.
    if s.mode == "async" and s.queue.max_staleness < 1:
        yield (
            f"mode 'async' needs queue.max_staleness ≥ 1, got {s.queue.max_staleness}; with 0 it is mode 'sync', bit "
            "for bit"
        )
    if s.mode != "async" and s.queue.order != "prompt":
        yield f"queue.order = {s.queue.order!r} is of mode 'async', got mode {s.mode!r}"
    if s.mode == "periodic" and s.learner.num_minibatches != 1:
        yield (
            "mode 'periodic' accumulates one gradient over the whole step, so learner.num_minibatches must be 1, "
            f"got {s.learner.num_minibatches}"
        )


def _of_optimizer(s: Settings) -> Iterator[str]:
    learner, floor = s.learner, s.learner.final_learning_rate
    if learner.schedule == "constant" and floor:
        yield f"learner.final_learning_rate = {floor:g} needs learner.schedule = 'linear' or 'cosine', got 'constant'"
    if floor > learner.learning_rate:
        yield f"learner.final_learning_rate must be ≤ {_is(s, 'learner.learning_rate')}, got {floor:g}"
    if learner.schedule != "constant" and learner.warmup_updates >= learner.num_updates:
        yield (
            f"learner.warmup_updates must be < {learner.num_updates}, the updates of the run, with learner.schedule = "
            f"{learner.schedule!r}; got {learner.warmup_updates}"
        )
    for key, alone in (("learner.blocks", 1), ("learner.offload_moments", False)):
        if learner.optimizer != "adamw" and _value(s, key) != alone:
            yield f"{_is(s, key)} needs learner.optimizer = 'adamw', got {learner.optimizer!r}"


def _of_loss(s: Settings) -> Iterator[str]:
    loss, learner, rollout = s.loss, s.learner, s.rollout
    if learner.groups_per_step % learner.num_minibatches:
        minibatches, groups = "learner.num_minibatches", "learner.groups_per_step"
        yield f"{_is(s, minibatches)} does not divide {_is(s, groups)}"
    try:
        loss.check_minibatches(learner.num_minibatches)
    except ValueError as error:
        yield f"loss.{error}"
    if loss.advantage in NEEDS_PEERS and rollout.group_size < 2:
        yield _needs_peers(s)
    if loss.teacher and not loss.teachers and s.model.lora.rank:
        yield (
            f"loss.teacher needs model.lora.rank = 0, got {s.model.lora.rank}: a teacher's files are a second set of "
            "weights; the URL of a server is none"
        )
    if loss.teachers and (rollout.temperature != 1 or rollout.truncation):
        yield (
            "loss.teacher at a URL scores at temperature 1 among all tokens, and needs rollout.temperature = 1, "
            f"top_p = 1, top_k = 0 and min_p = 0, got {rollout.temperature:g} and {rollout.truncation}"
        )
    if loss.advantage == "batch" and s.mode == "periodic":
        yield (
            "loss.advantage 'batch' needs the rewards of all groups of a step, and mode 'periodic' trains the first "
            "before it has the last: mode must be 'sync' or 'async'"
        )
    if loss.advantage == "turns":
        if rollout.function in ("single_turn", "agent"):
            yield (
                "loss.advantage 'turns' needs turns that have rewards of their own, as those of an environment have; "
                f"got rollout.function = {rollout.function!r}"
            )


def _needs_peers(s: Settings) -> str:
    return f"loss.advantage {s.loss.advantage!r} needs rollout.group_size ≥ 2, got {s.rollout.group_size}"


def _of_shapes(s: Settings) -> Iterator[str]:
    learner, warm_start = s.learner, s.warm_start
    if warm_start.num_steps and warm_start.num_demonstrations < 1:
        where = _is(s, "warm_start.num_steps")
        yield f"warm_start.num_demonstrations must be ≥ 1 where {where}, got {warm_start.num_demonstrations}"
    longest = s.rollout.max_prompt_tokens + s.rollout.max_new_tokens
    keys = ("learner.row_tokens", "server.max_total_tokens")
    if exceeded := [_is(s, key) for key in keys if longest > _value(s, key)]:
        longest = f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest}"
        yield f"{longest} exceeds {' and '.join(exceeded)}"
    row_shards, shards = learner.row_shards, _shards(s)
    if learner.microbatch_rows % row_shards:
        yield f"{_is(s, 'learner.microbatch_rows')} must be a multiple of {shards}"
    if row_shards % learner.num_processes:  # Each has rows of its own.
        yield f"{shards} must be a multiple of {_is(s, 'learner.num_processes')}"
    few, many = sorted((learner.slices, learner.num_processes))
    if many % few:
        which = f"{_is(s, 'learner.num_processes')} must be a multiple or a divisor"
        yield f"{which} of {_is(s, 'learner.slices')}"
    warmed = ["warm_start.row_tokens"] if warm_start.num_steps else []
    for key in ["learner.row_tokens", *warmed]:
        if _value(s, key) % learner.context:
            yield f"{_is(s, key)} must be a multiple of {_is(s, 'learner.context')}"


def _shards(s: Settings) -> str:
    """`learner.row_shards` in words."""
    slices = "learner.slices · " if s.learner.slices > 1 else ""
    expert = " · learner.expert" if s.learner.expert > 1 else ""
    return f"{slices}learner.data · learner.fsdp{expert} = {s.learner.row_shards}"


def _of_model(s: Settings) -> Iterator[str]:
    model, windows, layers = s.model, s.model.windows, _is(s, "model.num_layers")
    if model.path:  # The checkpoint has a shape of its own.
        return
    if model.num_heads % model.num_kv_heads:
        yield f"{_is(s, 'model.num_kv_heads')} does not divide {_is(s, 'model.num_heads')}"
    if s.learner.blocks > model.num_layers:
        yield f"learner.blocks must be in [1, {layers}], got {s.learner.blocks}"
    yield from _of_experts(s)
    if model.family != "gemma3":
        if windows:
            yield f"{_is(s, 'model.windows')} needs model.family = 'gemma3', got {model.family!r}"
        return
    for name, needed in (("qk_norm", True), ("attention_bias", False)):
        if getattr(model, name) != needed:
            yield f"model.family 'gemma3' needs model.{name} = {needed}, got {not needed}"
    if windows and (len(windows) != model.num_layers or len({*windows} - {0}) != 1):
        yield (
            f"model.windows must be () or have 0 or one number of tokens ≥ 1 for each of {layers} layers, not 0 for "
            f"all, got {windows}"
        )


def _of_experts(s: Settings) -> Iterator[str]:
    model, num = s.model, s.model.num_experts
    if (model.family in ("qwen3_moe", "mixtral")) != (num > 0):
        yield (
            "model.num_experts must be ≥ 1 with model.family 'qwen3_moe' and 'mixtral' and 0 with others, got "
            f"{num} with {model.family!r}"
        )
    if not num:
        if s.learner.expert > 1:
            yield f"{_is(s, 'learner.expert')} needs a model with experts"
        if s.learner.replay_routes == "on":
            yield f"{_is(s, 'learner.replay_routes')} needs a model with experts"
        return
    if not 1 <= model.experts_per_token <= num:
        yield f"model.experts_per_token must be in [1, {num}], the experts of a layer, got {model.experts_per_token}"
    if model.expert_mlp_dim < 1:
        yield f"model.expert_mlp_dim must be ≥ 1 with experts, got {model.expert_mlp_dim}"
    if num % s.learner.expert:
        yield f"{_is(s, 'learner.expert')} does not divide {_is(s, 'model.num_experts')}"
    needed = {"qk_norm": False, "norm_topk": True, "expert_mlp_dim": model.mlp_dim}
    needed = needed if model.family == "mixtral" else {"qk_norm": True, "attention_bias": False}
    for name, value in needed.items():
        if getattr(model, name) != value:
            yield f"model.family {model.family!r} needs model.{name} = {value}, got {getattr(model, name)}"
    if s.model.lora.rank and (
        odd := {"gate_proj", "up_proj", "down_proj"} & {*s.model.lora.targets}
    ):
        yield f"model.lora.targets has {sorted(odd)}: adapters of experts are unsupported"


def _of_lora(s: Settings) -> Iterator[str]:
    lora = s.model.lora
    if not lora.rank:
        if lora.path:
            yield f"{_is(s, 'model.lora.path')} needs model.lora.rank ≥ 1, got 0"
        return
    if s.weights.delta:
        yield "weights.delta must be False with model.lora: a push carries the small adapter alone, got True"
    if not lora.targets or len(set(lora.targets)) < len(lora.targets):
        yield f"model.lora.targets must be names, each once, got {lora.targets}"
    if s.server.control_addresses:
        yield (
            "model.lora needs server.control_addresses = (): the servers that take requests say which adapter they "
            f"hold, and a router does not; got {s.server.control_addresses}"
        )


def _of_attention(s: Settings) -> Iterator[str]:
    learner, model, kernel = s.learner, s.model, s.learner.attention_kernel
    needs = f"learner.attention_kernel {kernel!r} needs"
    of_gpu = kernel in ("cudnn", "mosaic_gpu", "triton")
    if of_gpu and model.dtype != "bfloat16":
        yield f"{needs} model.dtype = 'bfloat16', got {model.dtype!r}"
    if kernel == "cudnn" and learner.context > 1:
        yield f"{needs} learner.context = 1, got {learner.context}"
    if kernel == "splash" and model.windows and not model.path:
        yield (
            "learner.attention_kernel 'splash' has no windows, and model.windows has one of "
            f"{max(model.windows)} tokens: choose 'xla', or another on an NVIDIA GPU"
        )
    part = learner.row_tokens // learner.context
    if kernel in ("splash", "mosaic_gpu", "triton") and part % 128:
        yield f"{needs} learner.row_tokens / learner.context to be a multiple of 128, got {part}"


def _of_delay(s: Settings) -> Iterator[str]:
    if not delay_of(s.rollout.delay_steps)[0]:
        return
    delay, every = _is(s, "rollout.delay_steps"), s.weights.push_every_steps
    if every != 1:
        yield (
            f"{delay} needs weights.push_every_steps = 1, got {every}: the versions in between are never written, so "
            "no server could be given one"
        )
    if s.mode == "periodic":
        yield f"mode 'periodic' is on-policy, which {delay} is not: use mode 'sync' for the same gradient at that delay"


def _of_evaluation(s: Settings) -> Iterator[str]:
    every, timeout = s.evaluate.every_steps, s.evaluate.timeout_secs
    if every % s.weights.push_every_steps:  # Servers hold no other version.
        multiple = f"a multiple of {_is(s, 'weights.push_every_steps')}"
        yield f"evaluate.every_steps must be {multiple}, got {every}"
    if every and s.evaluate.num_validation == 0:
        yield (
            f"evaluate.every_steps = {every} chooses the best version, and needs evaluate.num_validation ≥ 1 questions "
            "that do not also score it, got 0; -1 chooses on the test split"
        )
    # Where there is one server the learner waits for it during an evaluation.
    if every and not timeout < s.learner.lease_timeout_secs:
        yield f"evaluate.timeout_secs must be < {_is(s, 'learner.lease_timeout_secs')}, got {timeout:g}"


def _value(settings: Any, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), settings)


def _is(s: Settings, key: str) -> str:
    """ "key = value"."""
    value = _value(s, key)
    return f"{key} = {value:g}" if isinstance(value, float) else f"{key} = {value!r}"

"""What a run is: a tree of small frozen dataclasses, one per block of a config, all fields required.

A config (ml_collections, in a file under configs/) or a workdir's config.json becomes `Settings` once, at the
door; below it, parts receive plain keyword arguments. Unknown keys, wrong types and settings that contradict
one another are refused here, before any device is touched. This module knows nothing of JAX.
"""

import dataclasses
import difflib
import re
import shlex
import string
import types
import typing
from collections.abc import Mapping
from typing import Any

from jaxrl_async import security
from jaxrl_async.config.loss import LossConfig
from jaxrl_async.queue.records import EXHAUSTED, REISSUE_REASONS, RETIRE_REASONS
from jaxrl_async.rewards.pool import MIN_MEMORY_BYTES

MODES = ("sync", "periodic", "async")
PACKINGS = ("in_order", "first_fit", "fewest")  # learner.packing knows each of these names.
TRANSPORTS = ("disk", "tensor", "stream")  # weights.transports has one of each name.
ATTENTION_KERNELS = ("xla", "cudnn", "splash")  # models.attention has one of each name.
PAUSE_MODES = ("retract", "in_place")
REASONS = (*sorted(REISSUE_REASONS), *sorted(RETIRE_REASONS), EXHAUSTED)
JOURNAL_KEEPS = ("all", "checkpointed", "none")  # queue.journal knows each of these names.
JOURNAL_MODES = ("wal", "delete")
JOURNAL_SYNCHRONOUS = ("normal", "full")
COMMAND_FIELDS = ("model_path", "host", "port", "index", "weights")


class SettingsError(ValueError):
    """A config that cannot be run; the message names the key, the value and the bound."""


@dataclasses.dataclass(frozen=True)
class Task:
    name: str  # a name in tasks.TASKS, or "module:function"
    args: Mapping[str, Any]  # keyword arguments of the task
    seed: int  # of the shuffled stream of prompts


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    kind: str  # "char" (alphabet) | "bpe" (trained on the task's text) | "huggingface" (files in path)
    alphabet: str
    vocab_size: int  # of the trained BPE
    path: str


@dataclasses.dataclass(frozen=True)
class Model:
    path: str  # Hugging Face directory to start from; "" for random weights of the shape below
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float
    norm_eps: float
    qk_norm: bool
    attention_bias: bool
    tied_embeddings: bool
    dtype: str  # of the forward pass: "float32" | "bfloat16"
    remat: bool


@dataclasses.dataclass(frozen=True)
class WarmStart:
    num_steps: int  # 0 for none
    batch_size: int  # demonstrations
    row_tokens: int
    learning_rate: float
    num_demonstrations: int


@dataclasses.dataclass(frozen=True)
class Frictions:
    """What an experiment lets go wrong, each with a probability per sample; see rollout/frictions.py."""

    actor_bug: float  # the answer is replaced by zeros, recorded as certain
    reward_corruption: float  # the reward is replaced by 0 or 1, at random
    rare_discovery: float  # a reward below 1 is recorded as 0


@dataclasses.dataclass(frozen=True)
class Rollout:
    function: str  # a name in rollout.ROLLOUTS, or "module:function"
    group_size: int  # G, completions per prompt
    max_prompt_tokens: int
    max_new_tokens: int
    temperature: float
    num_workers: int
    max_running_groups: int  # per worker
    request_timeout_secs: float
    max_retries: int
    reward_processes: int  # per worker
    reward_timeout_secs: float
    reward_memory_bytes: int  # of each process, beyond what it starts with; 0 for no limit
    reward_calls_per_process: int  # after which it is replaced; 0 for never
    drop_equal_rewards: (
        bool  # DAPO: a group whose rewards are all equal is retired, the next index drawn
    )
    overlong_buffer_tokens: (
        int  # DAPO: the last tokens of max_new_tokens cost up to 1 of reward; 0 for none
    )
    delay_steps: int | str  # servers hold weights that many steps old: D, or "uniform(D)"
    frictions: Frictions


@dataclasses.dataclass(frozen=True)
class Queue:
    address: str  # "host:port"; "" for a free loopback port
    # NAME of the environment variable that holds the token that every call must give, or "@PATH" of its file; "" for
    # none, on loopback only
    token_env: str
    tls_cert: str  # PEM files, all three or none: of the queue's certificate,
    tls_key: str  # its key, which no other role reads,
    tls_ca: str  # and the authorities whose certificates the other roles trust
    max_staleness: int  # η, in steps
    chunk_groups: int  # periodic mode: groups per chunk; 0 means the whole batch in prompt order
    max_running_groups: int
    max_bytes: int  # held groups; no permits are given beyond it
    max_message_bytes: int
    permit_timeout_secs: float
    max_attempts: int  # issues of one prompt_index before it is retired as exhausted
    max_failures: int  # groups returned for infrastructure failures before the run is stopped
    budgets: Mapping[
        str, int
    ]  # reason → groups that may come back for it before the run is stopped


@dataclasses.dataclass(frozen=True)
class Journal:
    """The queue's memory of the run; see queue/journal.py."""

    keep: str  # groups: "all", for replay | "checkpointed", for a restored learner | "none": no journal
    path: str  # of the file; "" for WORKDIR/journal.sqlite
    mode: str  # "wal" | "delete", which also suits network file systems
    synchronous: str  # "normal": survives a killed process | "full": a loss of power, too


@dataclasses.dataclass(frozen=True)
class Server:
    addresses: tuple[str, ...]  # "http://host:port"; () starts num_local servers on this machine
    control_addresses: tuple[
        str, ...
    ]  # for pause, update, model_info and abort; () for `addresses`
    speeds: tuple[float, ...]  # relative, of each address; () for all equal
    # NAME of the environment variable that holds the servers' key, or "@PATH" of its file; "" for none
    api_key_env: str
    admin_api_key_env: str  # the same for the key of the control routes
    tls_cert: str  # PEM file of the embedded servers' certificate; addresses are https:// with it
    tls_key: str  # and of its key
    tls_ca: str  # PEM file of the authorities that clients of https:// trust; "" for the system's
    command: str  # starts one local server; see command_words. "" for the embedded server
    num_local: int
    num_slots: int
    decode_chunk: int  # decode steps per dispatch; weights change between chunks
    max_total_tokens: int  # prompt + completion of one request
    max_queued_requests: int
    start_timeout_secs: float

    @property
    def controls(self) -> dict[str, tuple[str, ...]]:
        """Each of `addresses` → the control addresses behind it: itself, its pair, or all behind a router."""
        if not self.control_addresses:
            return {address: (address,) for address in self.addresses}
        if len(self.addresses) == 1:
            return {self.addresses[0]: self.control_addresses}
        pairs = zip(self.addresses, self.control_addresses, strict=True)
        return {address: (control,) for address, control in pairs}


@dataclasses.dataclass(frozen=True)
class Learner:
    num_steps: int
    groups_per_step: int  # B
    num_minibatches: int  # optimizer updates per step
    microbatch_rows: int
    row_tokens: int
    packing: str  # one of PACKINGS
    shared_prompts: bool  # a prompt stands once before its group's completions, not before each one
    attention_kernel: str  # "xla" | "cudnn" (NVIDIA GPUs, bfloat16) | "splash" (TPUs)
    head_chunk_tokens: int  # columns' worth of logits at a time; 0 for all at once
    num_processes: int  # of the learner, each with its part of the devices and of every minibatch
    data: int  # mesh axes: data · fsdp · tensor devices
    fsdp: int
    tensor: int
    learning_rate: float
    warmup_updates: int
    adam_b1: float
    adam_b2: float
    adam_eps: float
    weight_decay: float
    max_grad_norm: float
    lease_timeout_secs: float
    fail_on_recompile: bool  # stop where a program compiles after the first step
    deterministic: (
        bool  # on GPUs: the same bits for the same input, slower; CPUs and TPUs are so anyway
    )
    compilation_cache: str  # directory that keeps compiled programs between runs; "" for none


@dataclasses.dataclass(frozen=True)
class Weights:
    push_every_steps: int  # N
    dtype: str
    transport: str  # one of TRANSPORTS; "stream" and "tensor" need no shared file system
    pause_mode: (
        str  # "retract": exact | "in_place": keeps the KV of old weights; to compare with only
    )
    push_timeout_secs: float
    poll_secs: float  # between looks at every server
    keep: int  # versions kept on disk; D + 2 of them at least with rollout.delay_steps


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    every_steps: int
    keep: int  # besides checkpoint 0


@dataclasses.dataclass(frozen=True)
class Supervisor:
    """Of a run whose roles are all on this machine."""

    max_restarts: (
        int  # of roles that were killed, over the whole run; requests and pushes must outlast one
    )
    stall_secs: float  # without a step for so long the run is stopped, and says who waits for whom


@dataclasses.dataclass(frozen=True)
class Evaluate:
    num_prompts: int  # held-out prompts
    num_samples: int  # per prompt, for pass@k
    seed: int
    every_steps: int  # versions that are scored while the run trains; 0 for none
    max_running_requests: int  # of that at a time
    timeout_secs: float  # bound on one version


@dataclasses.dataclass(frozen=True)
class Cpus:
    """Processor cores of each role on this machine; () leaves the choice to the system."""

    learner: tuple[int, ...]
    server: tuple[int, ...]
    rollout: tuple[int, ...]
    queue: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Settings:
    """A whole run. Blocks stand in the order in which data meets them."""

    mode: str  # "sync" | "periodic" | "async"
    seed: int
    task: Task
    tokenizer: Tokenizer
    model: Model
    warm_start: WarmStart
    queue: Queue
    journal: Journal
    server: Server
    rollout: Rollout
    loss: LossConfig
    learner: Learner
    weights: Weights
    checkpoint: Checkpoint
    evaluate: Evaluate
    supervisor: Supervisor
    cpus: Cpus

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "Settings":
        """Builds and checks the settings of a run.

        Args:
          config: nested mapping with exactly the fields above.

        Raises:
          SettingsError: an unknown key (with the nearest), a missing key, a wrong type, or a contradiction.
        """
        settings = _build(cls, config, "config")
        _check(settings)
        return settings


def nearest(name: str, known) -> str:
    """ ", did you mean 'x'?", or nothing when no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _build(cls, values: Mapping[str, Any], path: str):
    hints = typing.get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise SettingsError(f"unknown config key {path}.{key}{nearest(key, hints)}")
    for key in hints:
        if key not in values:
            raise SettingsError(f"missing config key {path}.{key}")
    fields = {key: _convert(hints[key], values[key], f"{path}.{key}") for key in hints}
    try:
        return cls(**fields)
    except ValueError as error:  # of a block that checks itself
        raise SettingsError(f"{path.removeprefix('config.')}: {error}") from None


def _convert(hint, value, path: str):
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise SettingsError(f"{path} must be a block of settings, got {value!r}")
        return _build(hint, value, path)
    if isinstance(hint, types.UnionType):
        kinds = typing.get_args(hint)
        if value is None and type(None) in kinds:
            return None
        return _convert(type(value) if type(value) in kinds else kinds[0], value, path)
    origin = typing.get_origin(hint)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_convert(typing.get_args(hint)[0], item, path) for item in value)
    if origin is Mapping and isinstance(value, Mapping):
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool) and type(value) is hint:
        return value
    raise SettingsError(f"{path} must be {getattr(hint, '__name__', hint)}, got {value!r}")


def _check(s: Settings) -> None:
    _one_of("mode", s.mode, MODES)
    _one_of("learner.packing", s.learner.packing, PACKINGS)
    _one_of("model.dtype", s.model.dtype, ("float32", "bfloat16"))
    _one_of("weights.dtype", s.weights.dtype, ("float32", "bfloat16"))
    _one_of("weights.transport", s.weights.transport, TRANSPORTS)
    _one_of("weights.pause_mode", s.weights.pause_mode, PAUSE_MODES)
    for reason, budget in s.queue.budgets.items():
        _one_of("queue.budgets' reasons", reason, REASONS)
        if type(budget) is not int or budget < 0:
            raise SettingsError(
                f"queue.budgets.{reason} must be a whole number ≥ 0, got {budget!r}"
            )
    _one_of("journal.keep", s.journal.keep, JOURNAL_KEEPS)
    _one_of("journal.mode", s.journal.mode, JOURNAL_MODES)
    _one_of("journal.synchronous", s.journal.synchronous, JOURNAL_SYNCHRONOUS)
    _one_of("tokenizer.kind", s.tokenizer.kind, ("char", "bpe", "huggingface"))
    for name, value in _positive(s).items():
        if value < 1:
            raise SettingsError(f"{name} must be ≥ 1, got {value}")
    if s.weights.keep < 2:  # A late server may still be reading the version before.
        raise SettingsError(f"weights.keep must be ≥ 2, got {s.weights.keep}")
    if s.supervisor.max_restarts < 0:
        raise SettingsError(f"supervisor.max_restarts must be ≥ 0, got {s.supervisor.max_restarts}")
    if not s.supervisor.stall_secs > 0:
        raise SettingsError(f"supervisor.stall_secs must be > 0, got {s.supervisor.stall_secs}")
    _check_evaluate(s)
    _check_servers(s.server)
    _check_tls(s.queue, s.server)
    _check_rewards(s.rollout)
    _check_mode(s)
    _check_lengths(s)
    _check_attention(s)
    _check_experiments(s)


def _check_attention(s: Settings) -> None:
    kernel, learner = s.learner.attention_kernel, s.learner
    _one_of("learner.attention_kernel", kernel, ATTENTION_KERNELS)
    if kernel == "cudnn" and s.model.dtype != "bfloat16":
        raise SettingsError(
            f"learner.attention_kernel 'cudnn' needs model.dtype = 'bfloat16', got {s.model.dtype!r}"
        )
    if kernel == "splash" and learner.row_tokens % 128:
        raise SettingsError(
            "learner.attention_kernel 'splash' needs learner.row_tokens to be a multiple of 128, got "
            f"{learner.row_tokens}"
        )
    if kernel == "splash" and learner.shared_prompts:
        raise SettingsError(
            "learner.attention_kernel 'splash' has masks of segments alone, which cannot say that every completion "
            "sees its group's prompt: set learner.shared_prompts = False"
        )


def _check_experiments(s: Settings) -> None:
    max_delay, _ = delay_of(s.rollout.delay_steps)
    if max_delay and s.weights.push_every_steps != 1:
        raise SettingsError(
            f"rollout.delay_steps = {s.rollout.delay_steps!r} needs weights.push_every_steps = 1, got "
            f"{s.weights.push_every_steps}: the versions in between are never written, so no server could be given one"
        )
    if max_delay and s.mode == "periodic":
        raise SettingsError(
            f"mode 'periodic' is on-policy, which rollout.delay_steps = {s.rollout.delay_steps!r} is not: use mode "
            "'sync' for the same gradient at that delay"
        )
    for name, value in vars(s.rollout.frictions).items():
        if not 0 <= value <= 1:
            raise SettingsError(f"rollout.frictions.{name} must be in [0, 1], got {value}")
    if s.rollout.drop_equal_rewards and s.rollout.group_size < 2:
        raise SettingsError(
            "rollout.drop_equal_rewards needs rollout.group_size ≥ 2: the rewards of a group of 1 are always equal"
        )
    if not 0 <= s.rollout.overlong_buffer_tokens <= s.rollout.max_new_tokens:
        raise SettingsError(
            f"rollout.overlong_buffer_tokens must be in [0, rollout.max_new_tokens = {s.rollout.max_new_tokens}], got "
            f"{s.rollout.overlong_buffer_tokens}"
        )


def delay_of(delay_steps: int | str) -> tuple[int, bool]:
    """(D, whether the delay is drawn anew for every step, uniformly from 0 … D) of rollout.delay_steps.

    Raises:
      SettingsError: neither D nor "uniform(D)" with a whole D ≥ 0.
    """
    match = re.fullmatch(r"(\d+)|uniform\((\d+)\)", str(delay_steps).strip())
    if not match:
        raise SettingsError(
            f'rollout.delay_steps must be D or "uniform(D)", with a whole D ≥ 0; got {delay_steps!r}'
        )
    return int(match[1] or match[2]), match[2] is not None


def _positive(s: Settings) -> dict[str, int]:
    fields = {
        "queue": ("max_running_groups", "max_bytes", "max_message_bytes", "max_attempts"),
        "server": ("num_slots", "decode_chunk", "max_total_tokens", "max_queued_requests"),
        "rollout": (
            "group_size", "max_prompt_tokens", "max_new_tokens", "num_workers",
            "max_running_groups", "reward_processes",
        ),
        "learner": (
            "num_steps", "groups_per_step", "num_minibatches", "microbatch_rows", "row_tokens",
            "num_processes", "data", "fsdp", "tensor",
        ),
        "weights": ("push_every_steps",),
        "checkpoint": ("every_steps", "keep"),
        "evaluate": ("num_prompts", "num_samples", "max_running_requests"),
    }  # fmt: skip
    return {f"{b}.{f}": getattr(getattr(s, b), f) for b, names in fields.items() for f in names}


def _check_evaluate(s: Settings) -> None:
    every = s.evaluate.every_steps
    if every < 0:
        raise SettingsError(f"evaluate.every_steps must be ≥ 0, got {every}")
    if every % s.weights.push_every_steps:  # Servers hold no other version.
        raise SettingsError(
            f"evaluate.every_steps must be a multiple of weights.push_every_steps = {s.weights.push_every_steps}, "
            f"got {every}"
        )
    timeout, lease = s.evaluate.timeout_secs, s.learner.lease_timeout_secs
    if not timeout > 0:
        raise SettingsError(f"evaluate.timeout_secs must be > 0, got {timeout}")
    # The only server is lent: the learner may wait for that long.
    if every and not timeout < lease:
        raise SettingsError(
            f"evaluate.timeout_secs must be < learner.lease_timeout_secs = {lease:g}, got {timeout:g}"
        )


def _check_servers(server: Server) -> None:
    num_servers, num_controls = len(server.addresses), len(server.control_addresses)
    if num_servers == 0 and server.num_local < 1:
        raise SettingsError(
            f"server.num_local must be ≥ 1 where server.addresses is (), got {server.num_local}"
        )
    for name in ("addresses", "control_addresses"):
        if len(set(getattr(server, name))) < len(getattr(server, name)):
            raise SettingsError(f"server.{name} names a server twice: {getattr(server, name)}")
    if num_controls and num_servers not in (1, num_controls):
        raise SettingsError(
            f"server.control_addresses has {num_controls} entries and server.addresses has {num_servers}: "
            "there must be as many, or one address (a router) in front of them all"
        )
    wanted = num_servers or server.num_local
    if server.speeds and len(server.speeds) != wanted:
        raise SettingsError(
            f"server.speeds must have one entry for each of {wanted} servers, or none; got {len(server.speeds)}"
        )
    for speed in server.speeds:
        if not 0 < speed < float("inf"):
            raise SettingsError(f"server.speeds must be > 0 and finite, got {speed}")
    for word in command_words(server.command, **dict.fromkeys(COMMAND_FIELDS, "0")):
        flag = word.partition("=")[0]
        if flag in ("--api-key", "--admin-api-key"):  # config.json and `ps` would show it.
            raise SettingsError(f"server.command gives {flag}: keys stay in the environment")


def _check_tls(queue: Queue, server: Server) -> None:
    try:
        security.check_listener(
            "the queue", queue.address or "localhost:0", queue.token_env, "queue.token_env"
        )
    except ValueError as error:
        raise SettingsError(f"queue.address: {error}") from None
    if len({bool(path) for path in (queue.tls_cert, queue.tls_key, queue.tls_ca)}) > 1:
        raise SettingsError(
            "queue.tls_cert, queue.tls_key and queue.tls_ca go together, got "
            f"{queue.tls_cert!r}, {queue.tls_key!r} and {queue.tls_ca!r}"
        )
    if bool(server.tls_cert) != bool(server.tls_key):
        raise SettingsError(
            f"server.tls_cert and server.tls_key go together, got {server.tls_cert!r} and {server.tls_key!r}"
        )
    for address in (*server.addresses, *server.control_addresses) if server.tls_cert else ():
        if not address.startswith("https://"):
            raise SettingsError(
                f"server.addresses must be https:// with server.tls_cert, got {address}"
            )


def _check_rewards(rollout: Rollout) -> None:
    if rollout.reward_memory_bytes != 0 and rollout.reward_memory_bytes < MIN_MEMORY_BYTES:
        raise SettingsError(
            f"rollout.reward_memory_bytes must be 0 or ≥ {MIN_MEMORY_BYTES}, got {rollout.reward_memory_bytes}"
        )
    if rollout.reward_calls_per_process < 0:
        raise SettingsError(
            f"rollout.reward_calls_per_process must be ≥ 0, got {rollout.reward_calls_per_process}"
        )


def command_words(command: str, **values: Any) -> list[str]:
    """The words that start one local server.

    Args:
      command: `server.command`; it is cut into words first, so a value may hold spaces.
      **values: of the placeholders model_path, host, port, index and weights.

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


def _check_mode(s: Settings) -> None:
    eta, every, chunk = s.queue.max_staleness, s.weights.push_every_steps, s.queue.chunk_groups
    if s.mode == "async":
        if eta < 1:
            raise SettingsError(
                f"mode 'async' needs queue.max_staleness ≥ 1, got {eta}; with 0 it is mode 'sync', bit for bit"
            )
    elif eta != 0 or every != 1:
        raise SettingsError(
            f"mode {s.mode!r} needs queue.max_staleness = 0 and weights.push_every_steps = 1, got {eta} and {every}"
        )
    if (s.mode == "periodic") != (chunk > 0):
        raise SettingsError(
            f"queue.chunk_groups must be ≥ 1 in mode 'periodic' and 0 in the others, got {chunk} in {s.mode!r}"
        )
    if s.mode == "periodic" and s.learner.num_minibatches != 1:
        raise SettingsError(
            "mode 'periodic' accumulates one gradient over the whole step, so learner.num_minibatches must be 1, "
            f"got {s.learner.num_minibatches}"
        )
    if eta < every - 1:
        raise SettingsError(
            f"queue.max_staleness = {eta} is too small for weights.push_every_steps = {every}: "
            f"the run would wait for ever; it must be ≥ {every - 1}"
        )
    if s.learner.groups_per_step % s.learner.num_minibatches:
        raise SettingsError(
            f"learner.num_minibatches = {s.learner.num_minibatches} does not divide "
            f"learner.groups_per_step = {s.learner.groups_per_step}"
        )
    try:
        s.loss.check_minibatches(s.learner.num_minibatches)
    except ValueError as error:
        raise SettingsError(f"loss.{error}") from None
    if s.loss.advantage in ("grpo", "rloo") and s.rollout.group_size < 2:
        raise SettingsError(f"loss.advantage {s.loss.advantage!r} needs rollout.group_size ≥ 2")


def _check_lengths(s: Settings) -> None:
    longest = s.rollout.max_prompt_tokens + s.rollout.max_new_tokens
    for name, bound in (
        ("learner.row_tokens", s.learner.row_tokens),
        ("server.max_total_tokens", s.server.max_total_tokens),
    ):
        if longest > bound:
            raise SettingsError(
                f"rollout.max_prompt_tokens + rollout.max_new_tokens = {longest} exceeds {name} = {bound}"
            )
    if s.learner.microbatch_rows % (s.learner.data * s.learner.fsdp):
        raise SettingsError(
            f"learner.microbatch_rows = {s.learner.microbatch_rows} must be a multiple of "
            f"learner.data · learner.fsdp = {s.learner.data * s.learner.fsdp}"
        )
    if s.learner.data * s.learner.fsdp % s.learner.num_processes:  # Each has rows of its own.
        raise SettingsError(
            f"learner.data · learner.fsdp = {s.learner.data * s.learner.fsdp} must be a multiple of "
            f"learner.num_processes = {s.learner.num_processes}"
        )


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SettingsError(
            f"{name} must be one of {', '.join(known)}; got {value!r}{nearest(value, known)}"
        )


def queue_access_of(settings: Settings) -> dict[str, Any]:
    """What a client of the queue needs beside its address, as keyword arguments.

    Raises:
      SettingsError: as of `key_named`.
    """
    queue = settings.queue
    return {"token": key_named("queue.token_env", queue.token_env), "tls_ca": queue.tls_ca}


def key_named(option: str, variable: str) -> str | None:
    """The key in the environment variable whose name an option holds (`security.read_key`); None for "".

    Raises:
      SettingsError: no key there; the message never shows it.
    """
    try:
        return security.read_key(option, variable)
    except ValueError as error:
        raise SettingsError(str(error)) from None

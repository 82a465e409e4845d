"""The settings of a run: a tree of frozen dataclasses, the only place of a default, a type, a unit and a comment.

A config file (configs/) changes some of them, a workdir's config.json holds them all, and
`python -m jaxrl_async config` prints them. `build` makes `Settings` of either, `checks` refuses settings that
contradict one another. To add a setting: a line here, a line in ADDED, and the place that reads it.

Imports the standard library alone.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_async.config.loss import LossConfig

# The names that a setting can have. Each is documented where it is implemented.
MODES = ("sync", "periodic", "async")
TOKENIZERS = ("char", "bpe", "huggingface")
DTYPES = ("float32", "bfloat16")
PACKINGS = ("in_order", "first_fit", "fewest")  # learner.packing.assign_rows
ATTENTION_KERNELS = ("xla", "cudnn", "splash")  # models.attention.of_rows
FAMILIES = ("llama", "gemma3")  # models.families
LORA_TARGETS = (  # models.lora.LAYERS, by PEFT's names
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
TRANSPORTS = ("disk", "tensor", "stream", "distributed")  # weights.transports
PAUSE_MODES = ("retract", "in_place")  # of a server, around new weights
AGENT_ROWS = ("all", "one", "last")  # rollout.sessions
JOURNAL_KEEPS = ("all", "checkpointed", "none")  # queue.journal
TRACKERS = ("", "wandb", "mlflow")  # tracker.SERVICES
PROCESSES = ("auto", "many", "one")  # runtime.supervisor.in_one_process
JOURNAL_MODES = ("wal", "delete")
JOURNAL_SYNCHRONOUS = ("normal", "full")

# Renamed settings, old key → new key. Old names are accepted in configs, in config.json and on the command line.
RENAMED: dict[str, str] = {"loss.behavior_cap_mode": "loss.behavior_weight"}
# Settings that old workdirs may lack, key → the value that the code had before the setting existed. Such a run is
# read with that value, whatever the default is now.
ADDED: dict[str, Any] = {
    "checkpoint.grace_secs": 60.0,
    "rollout.reward_addresses": (),
    "cpus.rewards": (),
    "rollout.reward_environment": (),
    "security.insecure": True,
    "server.discover": "",
    "server.discover_secs": 5.0,
    "evaluate.num_validation": -1,
    "journal.max_bytes": 0,
    "server.quorum": 1.0,
    "weights.pause_lease_secs": 0.0,
    "weights.max_paused": 0,
    "weights.delta": False,
    "weights.fanout": 0,
    "weights.rendezvous": "127.0.0.1",
    "supervisor.restart_window_secs": 1e9,  # the whole run
    "queue.outage_secs": 30.0,
    "queue.failure_window_secs": 1e9,
    "tokenizer.chat_template": "",
    "tokenizer.system_prompt": "",
    "tokenizer.instruction": "",
    "learner.blocks": 1,
    "learner.context": 1,
    "learner.param_dtype": "float32",
    "learner.moment_dtype": "float32",
    "learner.offload_moments": False,
    "rollout.sample_padding": True,
    "supervisor.processes": "many",
    "loss.preset": "",
    "journal.samples_per_step": 0,
    "tracker.kind": "",
    "tracker.project": "",
    "server.devices": 0,
    "server.release_cache": False,
    "model.family": "llama",
    "model.windows": (),
    "learner.max_mismatch": 0.0,
    "model.lora.rank": 0,
    "model.lora.alpha": 32.0,
    "model.lora.targets": LORA_TARGETS,
    "model.lora.base_dtype": "float32",
    "model.lora.path": "",
    "environment.name": "",
    "environment.args": {},
    "environment.max_turns": 8,
    "environment.max_turn_tokens": 0,
    "environment.timeout_secs": 10.0,
    "environment.num_processes": 8,
    "environment.memory_bytes": 1 << 30,
    "checkpoint.in_background": True,
    "rollout.agent": "",
    "rollout.agent_timeout_secs": 60.0,
    "rollout.agent_calls": 64,
    "rollout.agent_rows": "one",
}


class SettingsError(ValueError):
    """A config that cannot be run; the message names the key, the value and the bound."""


@dataclasses.dataclass(frozen=True)
class Task:
    # a name in tasks.TASKS | "module:function" | a library's environment, "verifiers:ENVIRONMENT" or "openenv:URL"
    name: str = "arithmetic"
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the task, by keyword
    seed: int = 0  # of the shuffled stream of prompts


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    kind: str = "char"  # "char": alphabet | "bpe": trained on the task's text | "huggingface": path
    alphabet: str = ""  # the characters of "char"
    vocab_size: int = 0  # tokens, of "bpe"
    path: str = ""  # of "huggingface": the directory of its files, or a model's id on the hub
    chat_template: str = ""  # of "huggingface": "" for the files' own | "none" | a Jinja file
    system_prompt: str = ""  # before the question, by the chat template; "": none
    instruction: str = ""  # text before every question, as it is; "": none


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Adapters, which alone are trained, beside a frozen model; see models/lora.py."""

    rank: int = 0  # 0: none, the whole model is trained
    alpha: float = 32.0  # an adapter's product is scaled by alpha / rank
    targets: tuple[str, ...] = LORA_TARGETS  # the layers that have one, some of LORA_TARGETS
    base_dtype: str = "float32"  # in which the frozen weights are stored, one of DTYPES
    path: str = ""  # to start from: a directory in PEFT's format; "": adapters that change nothing


@dataclasses.dataclass(frozen=True)
class Model:
    # to start from: a Hugging Face directory, or a model's id on its hub, "ORGANIZATION/NAME", which then also say the
    # shape; "": random weights of the shape below
    path: str = ""
    family: str = "llama"  # "llama": also Qwen2 (attention_bias) and Qwen3 (qk_norm) | "gemma3"
    num_layers: int = 2
    model_dim: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    mlp_dim: int = 192
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True
    attention_bias: bool = False
    tied_embeddings: bool = True
    # of "gemma3": for each layer, how many tokens one sees, itself included, 0 for all; (): no layer has a window
    windows: tuple[int, ...] = ()
    dtype: str = "float32"  # of the forward pass, one of DTYPES
    remat: bool = False  # recompute activations in the backward pass: less memory, more time
    lora: LoRA = LoRA()


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Supervised training on the task's demonstrations, before version 0."""

    num_steps: int = 0  # 0: none
    batch_size: int = 128  # demonstrations
    row_tokens: int = 12  # the longest demonstration
    learning_rate: float = 3e-3
    num_demonstrations: int = 20_000


@dataclasses.dataclass(frozen=True)
class Queue:
    address: str = ""  # "host:port"; "": a free loopback port
    # NAME of the environment variable that holds the token that every call must give, or "@PATH" of its file; "": no
    # token, on loopback only
    token_env: str = ""
    tls_cert: str = ""  # PEM files, all three or none: of the queue's certificate,
    tls_key: str = ""  # its key, which no other role reads,
    tls_ca: str = ""  # and the authorities whose certificates the other roles trust
    max_staleness: int = 2  # η, steps; 0 in modes "sync" and "periodic"
    # groups per chunk in mode "periodic"; 0: the whole batch, in prompt order
    chunk_groups: int = 0
    max_running_groups: int = 256  # permits out at once
    max_bytes: int = 256 << 20  # of held groups; no permits are given beyond it
    max_message_bytes: int = 16 << 20
    # of a queue that does not answer: workers and the learner try again for this time, and then fail
    outage_secs: float = 600.0
    # of silence of a worker, after which its permits are issued again; of a caller without a name, their age
    permit_timeout_secs: float = 120.0
    max_attempts: int = 4  # issues of one prompt_index before it is retired as exhausted
    failure_window_secs: float = 600.0  # in which the next two count
    # groups returned for infrastructure failures before the run is stopped; all groups of a lost worker count as one
    max_failures: int = 64
    # reason → groups that may be returned for it before the run is stopped
    budgets: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Journal:
    """The queue's record of the run; see queue/journal.py."""

    # groups: "all", for replay | "checkpointed", for a restored learner | "none": no journal
    keep: str = "all"
    # of the groups of "all"; beyond it the oldest steps with a checkpoint are deleted; 0: no bound
    max_bytes: int = 0
    # completions kept as text, in samples.jsonl, TensorBoard and the report
    samples_per_step: int = 2
    path: str = ""  # of the file; "": WORKDIR/journal.sqlite
    mode: str = "wal"  # "wal" | "delete", which also suits network file systems
    synchronous: str = "normal"  # survives a killed process | "full": a loss of power, too


@dataclasses.dataclass(frozen=True)
class Server:
    addresses: tuple[str, ...] = ()  # "http://host:port"; (): start num_local on this machine
    # more servers, which join and leave: "file:PATH" | "dns://name:port" | "": none; servers/discovery.py
    discover: str = ""
    discover_secs: float = 5.0  # between two readings of that list
    # for pause, update, model_info and abort; (): those of `addresses`
    control_addresses: tuple[str, ...] = ()
    speeds: tuple[float, ...] = ()  # relative, of each address; (): all equal
    # NAME of the environment variable that holds the servers' key, or "@PATH" of its file; "": no key
    api_key_env: str = ""
    admin_api_key_env: str = ""  # the same for the key of the control routes
    tls_cert: str = ""  # PEM file of the embedded servers' certificate; addresses are then https://
    tls_key: str = ""  # and of its key
    tls_ca: str = ""  # PEM file of the authorities that clients of https:// trust; "": the system's
    command: str = ""  # starts one local server (checks.command_words); "": the embedded server
    num_local: int = 1
    # of a run in one process, for engines alone, one each; the learner has the rest. 0: they share the learner's
    devices: int = 0
    num_slots: int = 256  # completions at a time
    release_cache: bool = False  # of keys and values, while no completion is sampled
    decode_chunk: int = 8  # decode steps per dispatch; weights change between chunks
    max_total_tokens: int = 1536  # prompt + completion of one request
    max_queued_requests: int = 4096
    start_timeout_secs: float = 120.0
    # ⌈quorum · servers⌉ must hold the first version of a run or of a resumed one; the others join later
    quorum: float = 0.5

    @property
    def num_started(self) -> int:
        """Servers that the run starts itself: none where it is given addresses or a list of them."""
        return 0 if self.addresses or self.discover else self.devices or self.num_local

    @property
    def controls(self) -> dict[str, tuple[str, ...]]:
        """Each of `addresses` → its control addresses: itself, its pair, or all of them behind a router."""
        if not self.control_addresses:
            return {address: (address,) for address in self.addresses}
        if len(self.addresses) == 1:
            return {self.addresses[0]: self.control_addresses}
        pairs = zip(self.addresses, self.control_addresses, strict=True)
        return {address: (control,) for address, control in pairs}


@dataclasses.dataclass(frozen=True)
class Security:
    # Off loopback, let keys, prompts and weights cross the network without TLS: on a network that is trusted.
    insecure: bool = False


@dataclasses.dataclass(frozen=True)
class Frictions:
    """Faults that an experiment injects, each with a probability per sample; see rollout/frictions.py."""

    actor_bug: float = 0.0  # the answer is replaced by zeros, recorded as certain
    reward_corruption: float = 0.0  # the reward is replaced by 0 or 1, at random
    rare_discovery: float = 0.0  # a reward below 1 is recorded as 0


@dataclasses.dataclass(frozen=True)
class Rollout:
    # a name in rollout.ROLLOUTS | "environment": the block of that name | "agent": the setting | "module:function"
    function: str = "single_turn"
    # "module:function" of `async def agent(base_url, prompt) -> reward`, a client of an OpenAI endpoint
    agent: str = ""
    agent_timeout_secs: float = 60.0  # of an agent's own time, while none of its calls is answered
    agent_calls: int = 64  # of a session
    # rows of a session that are trained, with its one reward: "all" | "one": a second row fails the session | "last":
    # the row of the last call
    agent_rows: str = "all"
    group_size: int = 8  # G, completions per prompt
    max_prompt_tokens: int = 512  # longer prompts are left out of the stream
    max_new_tokens: int = 1024  # sampled, per completion
    temperature: float = 1.0
    sample_padding: bool = False  # True: the padding token may be sampled, as by older workdirs
    num_workers: int = 1
    max_running_groups: int = 128  # per worker
    request_timeout_secs: float = 60.0
    max_retries: int = 3  # of one request
    # "host:port" of each reward service (`python -m jaxrl_async rewards`), with the queue's token and authority; (): a
    # pool of each worker's own
    reward_addresses: tuple[str, ...] = ()
    reward_processes: int = 1  # per worker, or per service
    reward_timeout_secs: float = 5.0
    reward_memory_bytes: int = 1 << 30  # per process, beyond its size at start; 0: no limit
    reward_calls_per_process: int = 10_000  # after which it is replaced; 0: never
    # names of variables that rewards see, beside PATH, HOME and their like (rewards.child.ENVIRONMENT)
    reward_environment: tuple[str, ...] = ()
    # DAPO: retire a group whose rewards are all equal, and draw the next index
    drop_equal_rewards: bool = False
    # DAPO: the last tokens of max_new_tokens cost up to 1 of reward; 0: none
    overlong_buffer_tokens: int = 0
    # age of the servers' weights, steps: "D", or "uniform(D)" from 0 to D
    delay_steps: int | str = "0"
    frictions: Frictions = Frictions()


@dataclasses.dataclass(frozen=True)
class Environment:
    """What answers the policy between its turns, with rollout.function = "environment"."""

    name: str = ""  # a name in environments.ENVIRONMENTS, or "module:Name"
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of an episode, by keyword
    max_turns: int = 8  # of the policy; an episode that goes on is cut
    # sampled, of one turn; an episode is cut in a longer one. 0: rollout.max_new_tokens for all turns, alone
    max_turn_tokens: int = 0
    timeout_secs: float = 10.0  # of one reset or step
    # per worker, of an environment with `own_process`: as many episodes run at once
    num_processes: int = 8
    memory_bytes: int = 1 << 30  # per such process, beyond its size at start; 0: no limit


@dataclasses.dataclass(frozen=True)
class Learner:
    num_steps: int = 100
    groups_per_step: int = 64  # B
    num_minibatches: int = 2  # optimizer updates per step
    # parts of the layers, of which each step trains one, in turn (learner/blocks.py); 1: all layers in every step
    blocks: int = 1
    microbatch_rows: int = 16
    row_tokens: int = 4096
    packing: str = "in_order"  # one of PACKINGS
    shared_prompts: bool = False  # a prompt stands once before its group's completions
    attention_kernel: str = "xla"  # "xla" | "cudnn" (NVIDIA GPUs, bfloat16) | "splash" (TPUs)
    head_chunk_tokens: int = 0  # columns of logits at a time; 0: all at once
    num_processes: int = 1  # each has its part of the devices and of every minibatch
    data: int = 1  # mesh axes: data · fsdp · context · tensor devices
    fsdp: int = 1
    context: int = 1  # divides the tokens of a row
    tensor: int = 1
    # of the parameters between updates; "bfloat16" rounds stochastically, so that small updates count in the mean
    param_dtype: str = "float32"
    moment_dtype: str = "float32"  # of Adam's first moment; the second is float32
    # Adam's moments lie in the hosts' memory; an update takes those of its block to the devices and back
    offload_moments: bool = False
    learning_rate: float = 1e-6
    warmup_updates: int = 0  # linear, from 0
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lease_timeout_secs: float = 600.0  # without a batch for this time the learner stops
    fail_on_recompile: bool = True  # stop when a program compiles after the first step
    # of mismatch/mean_abs, nats: beyond it engine and learner compute different policies, and the run stops before the
    # step counts; 0: a warning alone
    max_mismatch: float = 0.0
    # on GPUs: the same bits for the same input, slower; CPUs and TPUs always give them
    deterministic: bool = False
    compilation_cache: str = ""  # directory that keeps compiled programs between runs; "": none

    @property
    def num_devices(self) -> int:
        """Of all its processes."""
        return self.data * self.fsdp * self.context * self.tensor


@dataclasses.dataclass(frozen=True)
class Weights:
    push_every_steps: int = 1  # N
    dtype: str = "float32"  # of the versions, one of DTYPES
    transport: str = "disk"  # one of TRANSPORTS; all but "disk" need no shared file system
    # this machine's address, at which the servers of transport "distributed" find the learner
    rendezvous: str = "127.0.0.1"
    # "retract": exact | "in_place": keeps the KV of old weights, for comparison only
    pause_mode: str = "retract"
    push_timeout_secs: float = 60.0
    # after which a server of this project ends the pause of a learner that died; above push_timeout_secs, or 0: none
    pause_lease_secs: float = 120.0
    # servers of this project get the difference from the version before, where that is shorter; lossless
    delta: bool = False
    # embedded servers to which the learner, and each of them, sends a version; "stream" alone; 0: the learner to all
    fanout: int = 0
    max_paused: int = 0  # servers that a push pauses at once, the others go on meanwhile; 0: all
    poll_secs: float = 2.0  # poll interval of every server's health
    keep: int = 2  # versions kept on disk; at least D + 2 with rollout.delay_steps


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    every_steps: int = 50
    keep: int = 2  # besides checkpoint 0
    # write while training goes on, the state twice in memory until it is done; false: the learner waits for the disk
    in_background: bool = True
    # from SIGTERM to the forced exit: the step under way and a checkpoint; the scheduler's must be longer
    grace_secs: float = 60.0


@dataclasses.dataclass(frozen=True)
class Evaluate:
    # of the test split, and of the validation split, at most; a number of one's own must not exceed the test split
    num_prompts: int = 512
    # questions of the validation split, on which the best version is chosen, taken from train (or test, for tasks that
    # make up their questions); 0: none | -1: the test split chooses, too, as in runs from before there was a choice
    num_validation: int = 0
    num_samples: int = 4  # per prompt, for pass@k
    seed: int = 0
    every_steps: int = 0  # score every such version while the run trains; 0: none
    max_running_requests: int = 64
    timeout_secs: float = 60.0  # of one version


@dataclasses.dataclass(frozen=True)
class Supervisor:
    """Of a run whose roles are all on this machine."""

    # of all roles within restart_window_secs; requests and pushes must outlast one
    max_restarts: int = 4
    restart_window_secs: float = 3600.0
    stall_secs: float = 1800.0  # without a step: the run is stopped, and says who waits for whom
    # "many": one for each role | "one" for all | "auto": one where there is a single accelerator
    processes: str = "auto"


@dataclasses.dataclass(frozen=True)
class Tracker:
    """Where the rows of metrics also go; tracker.py."""

    kind: str = ""  # "": nowhere else | "wandb": Weights & Biases | "mlflow"; by their own environment variables
    project: str = "jaxrl_async"  # W&B's project, MLflow's experiment


@dataclasses.dataclass(frozen=True)
class Cpus:
    """Processor cores of each role on this machine; (): the system chooses."""

    learner: tuple[int, ...] = ()
    server: tuple[int, ...] = ()
    rollout: tuple[int, ...] = ()
    queue: tuple[int, ...] = ()
    rewards: tuple[int, ...] = ()

    def of(self, role: str) -> tuple[int, ...]:
        """The cores of a role; of "one", those of all."""
        return (
            tuple(sorted(set(sum(vars(self).values(), ())))) if role == "one" else vars(self)[role]
        )


@dataclasses.dataclass(frozen=True)
class Settings:
    """A whole run, in the order of the loop."""

    mode: str = "async"  # one of MODES
    seed: int = 0  # of the model, the warm start and the samples
    task: Task = Task()
    tokenizer: Tokenizer = Tokenizer()
    model: Model = Model()
    warm_start: WarmStart = WarmStart()
    queue: Queue = Queue()
    journal: Journal = Journal()
    server: Server = Server()
    security: Security = Security()
    rollout: Rollout = Rollout()
    environment: Environment = Environment()
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    learner: Learner = Learner()
    weights: Weights = Weights()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    supervisor: Supervisor = Supervisor()
    tracker: Tracker = Tracker()
    cpus: Cpus = Cpus()

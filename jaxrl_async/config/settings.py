"""The settings of a run: a tree of frozen dataclasses, whose fields say all that is known of each (config/fields.py).

A config file (configs/) changes some of them, a workdir's config.json holds them all, and
`python -m jaxrl_async config` prints them. `build` makes `Settings` of either and refuses what a field refuses;
`checks` refuses settings that contradict one another. To add a setting: a field here, and the place that reads it.
docs/settings.md is written from the fields by `python launch/settings_page.py >docs/settings.md`.

Imports the standard library alone.
"""
# fmt: off

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_async.config import forms
from jaxrl_async.config.fields import SettingsError as SettingsError
from jaxrl_async.config.fields import setting, walk
from jaxrl_async.config.loss import LossConfig

# Choices that tables elsewhere have rows for; other choices stand in their field.
MODES = ("sync", "periodic", "async")
DTYPES = ("float32", "bfloat16")
SCHEDULES = ("constant", "linear", "cosine")  # learner.optimizer.learning_rate
OPTIMIZERS = ("adamw", "muon", "adafactor", "sgd")  # learner.optimizer.make_optimizer
PACKINGS = ("in_order", "first_fit", "fewest")  # learner.packing.assign_rows
ATTENTION_KERNELS = ("auto", "xla", "cudnn", "splash", "mosaic_gpu", "triton")  # models.attention.of_rows
FAMILIES = ("llama", "gemma3", "qwen3_moe", "mixtral")  # models.families
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # models.lora.LAYERS
TRANSPORTS = ("disk", "tensor", "stream", "distributed")  # publishing.transports
VERIFY = ("all", "rotating")
PAUSE_MODES = ("retract", "in_place")
TRACKERS = ("", "wandb", "mlflow")  # tracker.SERVICES
MIN_MEMORY_BYTES = 1 << 20  # the size in which Python takes memory from the system; rewards.pool refuses less, too


@dataclasses.dataclass(frozen=True)
class Task:
    """The source of prompts."""
    name: str = setting("arithmetic", "Task: a name in tasks.TASKS, `module:function`, or of a library, `datasets:ID`, "
        "`reasoning_gym:DATASET`, `verifiers:ENVIRONMENT` or `openenv:URL`.")
    args: Mapping[str, Any] = setting({}, "Keyword arguments of the task.")
    seed: int = setting(0, "Seed of the shuffled stream of prompts.", at_least=0)
    changed: bool = setting(False, "Accept a task whose questions differ from those that the run began with, and keep "
        "them as the run's; False refuses it.", since="0.2.0")
    rewards: Mapping[str, Any] = setting({}, "Rewards whose weighted sum takes the place of the task's own: `{NAME: "
        "weight}`, or `{COMPONENT: (NAME, weight)}`, of names or `module:function`. Those of the largest weight say "
        "which answers are right.", form=forms.rewards, since="0.2.0")


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """The tokenizer, and the text around a question."""
    kind: str = setting("char", "Tokenizer: one token per character (`char`), trained on the task's text (`bpe`), or "
        "read from tokenizer.path (`huggingface`).", choices=("char", "bpe", "huggingface"))
    alphabet: str = setting("", "Characters of a `char` tokenizer.")
    vocab_size: int = setting(0, "Vocabulary size of a `bpe` tokenizer.", at_least=0, unit="tokens")
    path: str = setting("", "Directory or Hugging Face Hub id of a `huggingface` tokenizer.", form=forms.local_path)
    chat_template: str = setting("", "Chat template of a `huggingface` tokenizer: a Jinja file, `none`, or empty for "
        "that of its own files.", since="0.1.0", form=forms.local_path)
    date: str = setting("", "Day that a chat template takes for today, `YYYY-MM-DD`; empty refuses a template that "
        "cannot do without, as prompts must not change overnight.", since="0.2.0")
    stop_tokens: tuple[str, ...] = setting((), "Tokens of a `huggingface` tokenizer that end a completion, beside "
        "those of its files and of the model's, 8 at most together.", unique=True, since="0.2.0")
    all_files: bool = setting(True, "Read a `huggingface` tokenizer as transformers does, with the tokens of all its "
        "files and the `eos_token_id` of `config.json`.", since="0.2.0", before=False)
    system_prompt: str = setting("", "System message, rendered by the chat template; empty for none.", since="0.1.0")
    instruction: str = setting("", "Text before every question, verbatim; empty for none.", since="0.1.0")


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adapters, which alone are trained, beside a frozen model (models/lora.py)."""
    rank: int = setting(0, "Rank of the adapters; 0 trains the whole model.", at_least=0, since="0.1.0")
    alpha: float = setting(32.0, "Scale of the adapters' product, alpha / rank.", above=0, since="0.1.0")
    targets: tuple[str, ...] = setting(LORA_TARGETS, "Layers that have an adapter, by PEFT's names.",
        choices=LORA_TARGETS, since="0.1.0")
    base_dtype: str = setting("float32", "Dtype of the frozen weights.", choices=DTYPES, since="0.1.0")
    path: str = setting("", "Directory of adapters to start from, in PEFT's format; empty for new ones.", since="0.1.0",
        form=forms.local_path)


@dataclasses.dataclass(frozen=True)
class Model:
    """The policy."""
    path: str = setting("", "Checkpoint to start from, a Hugging Face directory or a Hub id `ORGANIZATION/NAME`, which "
        "also sets the shape; empty for random weights.", form=forms.local_path)
    family: str = setting("llama", "Architecture; `llama` covers Mistral, Qwen2 and Qwen3.", choices=FAMILIES,
        since="0.1.0")
    num_layers: int = setting(2, "Transformer layers.", at_least=1)
    model_dim: int = setting(64, "Width of the residual stream.", at_least=1)
    num_heads: int = setting(4, "Query heads of each layer.", at_least=1)
    num_kv_heads: int = setting(2, "Key and value heads of each layer, a divisor of model.num_heads.", at_least=1)
    head_dim: int = setting(128, "Dimension of an attention head.", at_least=1)
    mlp_dim: int = setting(192, "Hidden dimension of the MLP.", at_least=1)
    num_experts: int = setting(0, "Experts of each layer, in the place of its MLP: of families `qwen3_moe` and "
        "`mixtral`; 0 for none.", at_least=0, since="0.2.0")
    experts_per_token: int = setting(0, "Experts that compute a token, at most model.num_experts.", at_least=0,
        since="0.2.0")
    expert_mlp_dim: int = setting(0, "Hidden dimension of an expert; of `mixtral` model.mlp_dim.", at_least=0,
        since="0.2.0")
    norm_topk: bool = setting(True, "Divide the weights of a token's experts by their sum; `mixtral` always does.",
        since="0.2.0")
    rope_theta: float = setting(10_000.0, "Base of the frequencies of the rotary position embedding.", above=0)
    norm_eps: float = setting(1e-6, "Epsilon of RMSNorm.", above=0)
    qk_norm: bool = setting(True, "Normalize queries and keys, as Qwen3 and Gemma 3 do.")
    attention_bias: bool = setting(False, "Add biases to the query, key and value projections, as Qwen2 does.")
    tied_embeddings: bool = setting(True, "Use the embedding matrix as the output head.")
    windows: tuple[int, ...] = setting((), "Attention window of each layer of `gemma3`, the token itself included; 0 "
        "is full attention, and an empty tuple gives no layer a window.", at_least=0, unit="tokens", since="0.1.0")
    dtype: str = setting("float32", "Dtype of the forward pass.", choices=DTYPES)
    remat: bool = setting(False, "Recompute activations in the backward pass, which saves memory and costs time.")
    remat_policy: str = setting("full", "What remat recomputes: each layer in full, or without attention and its "
        "projections.", choices=("full", "attention"), since="0.2.0")
    lora: LoRA = LoRA()


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Supervised training on the task's demonstrations, before version 0."""
    num_steps: int = setting(0, "Updates of the warm start; 0 for none.", at_least=0)
    batch_size: int = setting(128, "Demonstrations of one update.", at_least=1, unit="demonstrations")
    row_tokens: int = setting(12, "Longest demonstration; longer ones are left out.", at_least=1)
    learning_rate: float = setting(3e-3, "Learning rate of the warm start.", at_least=0)
    num_demonstrations: int = setting(20_000, "Demonstrations that are drawn from the task.", at_least=0)


@dataclasses.dataclass(frozen=True)
class Queue:
    """The trajectory queue between workers and learner."""
    address: str = setting("", "Address `host:port`; empty for a free loopback port.", form=forms.host_port)
    token_env: str = setting("", "Environment variable that holds the token of every call, or `@PATH` of its file; "
        "empty for one that the run makes for itself, on loopback only (docs/pods.md#keys).", form=forms.local_path)
    tls_cert: str = setting("", "PEM file of the queue's certificate, set with queue.tls_key and queue.tls_ca.",
        form=forms.local_path)
    tls_key: str = setting("", "PEM file of the private key of queue.tls_cert, which the queue alone reads.",
        form=forms.local_path)
    tls_ca: str = setting("", "PEM file of the authorities whose certificates the other roles trust.",
        form=forms.local_path)
    max_staleness: int = setting(2, "Maximum staleness η of a token that is trained; 0 in modes `sync` and `periodic`.",
        at_least=0, unit="steps")
    order: str = setting("prompt", "Order in which mode `async` trains groups: by prompt, so that a step waits for its "
        "slowest, or by completion, so that slow ones wait for a later step, and are sampled again where that would "
        "exceed queue.max_staleness.", choices=("prompt", "completion"), since="0.2.0")
    chunk_groups: int = setting(0, "Groups of a chunk in mode `periodic`; 0 in the other modes.", at_least=0)
    max_running_groups: int = setting(256, "Groups in progress at once, over all workers.", at_least=1)
    max_bytes: int = setting(256 << 20, "Memory of waiting groups, beyond which no permits are issued.", at_least=1)
    max_message_bytes: int = setting(16 << 20, "Largest message to the queue; a group of whole rows may exceed it.",
        at_least=1)
    outage_secs: float = setting(600.0, "Time for which workers and learner retry a queue that does not answer.",
        above=0, infinite=True, since="0.1.0", before=30.0)
    permit_timeout_secs: float = setting(120.0, "Silence of a worker after which its permits are issued again; for "
        "callers without a name, the age of a permit.", above=0)
    max_attempts: int = setting(4, "Attempts at a prompt index before it is retired as `exhausted`.", at_least=1)
    failure_window_secs: float = setting(600.0, "Sliding window in which queue.max_failures and queue.budgets count.",
        above=0, infinite=True, since="0.1.0", before=1e9)
    max_failures: int = setting(64, "Groups that may be returned for failures, of machines or of the run's own code, "
        "within queue.failure_window_secs before the run stops; those of a lost worker, or a faulty server, count as "
        "one.", at_least=0, unit="groups")
    budgets: Mapping[str, int] = setting({}, "Groups that may be returned or retired for a reason within "
        "queue.failure_window_secs before the run stops, by reason.", form=forms.budgets, unit="groups")


@dataclasses.dataclass(frozen=True)
class Journal:
    """The queue's record of the run (queue/journal.py)."""
    keep: str = setting("all", "Groups that the journal keeps: every one, for replay (`all`), those that a restored "
        "learner needs (`checkpointed`), or no journal (`none`).", choices=("all", "checkpointed", "none"))
    max_bytes: int = setting(0, "Size of the groups that journal.keep = `all` keeps, beyond which the oldest steps "
        "with a checkpoint are deleted; 0 for no bound.", at_least=0, since="0.1.0")
    samples_per_step: int = setting(2, "Completions of each step that are kept as text, in samples.jsonl, TensorBoard "
        "and the report.", at_least=0, unit="completions", since="0.1.0", before=0)
    path: str = setting("", "File of the journal; empty for WORKDIR/journal.sqlite.", form=forms.local_path)
    mode: str = setting("wal", "Journal mode of SQLite; `delete` also suits network file systems.",
        choices=("wal", "delete"))
    synchronous: str = setting("normal", "Durability: the journal survives a killed process (`normal`), and a loss of "
        "power (`full`).", choices=("normal", "full"))


@dataclasses.dataclass(frozen=True)
class Server:
    """The inference servers: given by address, discovered, or started by the run."""
    addresses: tuple[str, ...] = setting((), "Addresses of the servers, `http://host:port`; empty to start "
        "server.num_local of them on this machine.", form=forms.url, unique=True)
    discover: str = setting("", "List of further servers, which join and leave: `file:PATH` or `dns://name:port` "
        "(publishing/discovery.py); empty for none.", form=forms.discovery_of, since="0.1.0")
    discover_secs: float = setting(5.0, "Poll interval of server.discover.", above=0, infinite=True, since="0.1.0")
    control_addresses: tuple[str, ...] = setting((), "Addresses for pause, update, model info and abort, one for each "
        "of server.addresses or all behind one router; empty for server.addresses.", form=forms.url, unique=True)
    speeds: tuple[float, ...] = setting((), "Relative speeds of server.addresses; empty for equal ones.", above=0)
    api_key_env: str = setting("", "Environment variable with the servers' API key, or `@PATH` of its file; empty for "
        "none, or one that the run makes for embedded servers that it starts.", form=forms.local_path)
    admin_api_key_env: str = setting("", "Environment variable with the API key of the servers' control routes, or "
        "`@PATH` of its file; empty as server.api_key_env.", form=forms.local_path)
    tls_cert: str = setting("", "PEM file of the embedded servers' certificate; their addresses are then https://.",
        form=forms.local_path)
    tls_key: str = setting("", "PEM file of the private key of server.tls_cert.", form=forms.local_path)
    tls_ca: str = setting("", "PEM file of the authorities that clients of https:// trust; empty for the system's.",
        form=forms.local_path)
    command: str = setting("", "Command that starts one local server, with the placeholders {model_path}, {host}, "
        "{port}, {index} and {weights}; empty for the embedded server.", form=forms.command)
    num_local: int = setting(1, "Servers that the run starts, where it has neither server.addresses nor "
        "server.discover.", at_least=0, unit="servers")
    devices: int = setting(0, "Devices reserved for engines in a run of one process, one engine each; 0 shares the "
        "learner's.", at_least=0, since="0.1.0")
    num_slots: int = setting(256, "Completions an embedded server decodes at once.", at_least=1, unit="completions")
    release_cache: bool = setting(False, "Free an embedded server's keys and values while it is idle.", since="0.1.0")
    decode_chunk: int = setting(8, "Decode steps of one dispatch of an embedded server; weights change between "
        "dispatches.", at_least=1, unit="tokens")
    max_total_tokens: int = setting(1536, "Maximum length of one request, prompt and completion together.", at_least=1)
    max_queued_requests: int = setting(4096, "Requests that may wait for a slot of an embedded server.", at_least=1)
    start_timeout_secs: float = setting(120.0, "Deadline of the first push to the servers.", above=0)
    quorum: float = setting(0.5, "Share of the servers, rounded up, that must hold the first version of a run or of a "
        "resumed run; the others join later.", above=0, at_most=1, since="0.1.0", before=1.0)

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
    """Security of the network between roles."""
    insecure: bool = setting(False, "Let keys, prompts and weights cross the network without TLS, on a network that is "
        "trusted.", since="0.1.0", before=True)


@dataclasses.dataclass(frozen=True)
class Frictions:
    """Faults that an experiment injects, each with a probability per sample (rollout/frictions.py)."""
    actor_bug: float = setting(0.0, "Probability that an answer is replaced by zeros, recorded as certain.", at_least=0,
        at_most=1)
    reward_corruption: float = setting(0.0, "Probability that a reward is replaced by 0 or 1, at random.", at_least=0,
        at_most=1)
    rare_discovery: float = setting(0.0, "Probability that a reward below 1 is recorded as 0.", at_least=0, at_most=1)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Rollout workers, their samples and rewards."""
    function: str = setting("single_turn", "Rollout function: a name in rollout.ROLLOUTS, `environment` (the block of "
        "that name), `agent` (rollout.agent), or `module:function`.")
    agent: str = setting("", "Agent, `module:function` of `async def agent(base_url, prompt) -> reward`: a client of "
        "an OpenAI endpoint.", since="0.1.0")
    agent_timeout_secs: float = setting(60.0, "Timeout of an agent's own work, while none of its calls is answered.",
        above=0, since="0.1.0")
    agent_calls: int = setting(64, "Calls of the endpoint in one session of an agent.", at_least=1, since="0.1.0")
    agent_rows: str = setting("all", "Rows of an agent's session that are trained, with its one reward: all of them, "
        "the only one (`one`: a second fails the session), or that of the last call (`last`).",
        choices=("all", "one", "last"), since="0.1.0", before="one")
    group_size: int = setting(8, "Completions of each prompt, G.", at_least=1, unit="completions")
    max_prompt_tokens: int = setting(512, "Longest prompt; longer ones are left out of the stream.", at_least=1)
    max_new_tokens: int = setting(1024, "Maximum length of a completion.", at_least=1)
    temperature: float = setting(1.0, "Sampling temperature.", above=0)
    top_p: float = setting(1.0, "Probability of the nucleus, the most probable tokens, that alone is sampled and "
        "trained; 1 cuts nothing off.", above=0, at_most=1, since="0.2.0")
    top_k: int = setting(0, "Most probable tokens that alone are sampled and trained; 0 for all.", at_least=1,
        or_zero=True, since="0.2.0", unit="tokens")
    min_p: float = setting(0.0, "Share of the most probable token's probability that a token needs to be sampled; 0 "
        "cuts nothing off.", at_least=0, at_most=1, since="0.2.0")
    max_kept: int = setting(64, "Tokens that rollout.top_p, top_k and min_p leave at most; of more the most probable "
        "are sampled.", at_least=1, at_most=4096, unit="tokens", since="0.2.0")
    sample_padding: bool = setting(False, "Let the padding token be sampled.", since="0.1.0", before=True)
    num_workers: int = setting(1, "Rollout workers that the run starts.", at_least=1)
    max_running_groups: int = setting(128, "Groups in progress at once in each worker.", at_least=1)
    request_timeout_secs: float = setting(60.0, "Timeout of one request to a server.", above=0)
    max_retries: int = setting(3, "Retries of one request.", at_least=0)
    reward_addresses: tuple[str, ...] = setting((), "Addresses `host:port` of reward services (`python -m jaxrl_async "
        "rewards`), which have the queue's token and authority; empty for a pool in each worker.", form=forms.host_port,
        unique=True, since="0.1.0")
    reward_processes: int = setting(1, "Processes that compute rewards, in each worker or reward service.", at_least=1)
    reward_timeout_secs: float = setting(5.0, "Timeout of one reward.", above=0)
    reward_memory_bytes: int = setting(1 << 30, "Memory of a reward process beyond its size at start; 0 for no limit.",
        at_least=MIN_MEMORY_BYTES, or_zero=True)
    reward_calls_per_process: int = setting(10_000, "Rewards after which their process is replaced; 0 for never.",
        at_least=0, unit="calls")
    reward_environment: tuple[str, ...] = setting((), "Environment variables that rewards see, beside PATH, HOME and "
        "the like (rewards.child.ENVIRONMENT).", since="0.1.0")
    drop_equal_rewards: bool = setting(False, "Retire a group of equal rewards, and draw the next prompt (DAPO).")
    max_pass_rate: float | None = setting(None, "Mean reward of a group from which on its prompt is not drawn again in "
        "later epochs, by the worker that saw it, until that restarts (ScaleRL); None draws all.", since="0.2.0")
    overlong_buffer_tokens: int = setting(0, "Length of the soft penalty of DAPO: the last tokens before "
        "rollout.max_new_tokens cost up to 1 of reward; 0 for no penalty.", at_least=0)
    delay_steps: int | str = setting("0", "Age of the servers' weights in steps, for experiments: `D`, or `uniform(D)` "
        "for a random age from 0 to D.", form=forms.delay_of)
    frictions: Frictions = Frictions()

    @property
    def truncation(self) -> dict[str, Any]:
        """The sampling parameters that cut tokens off, by SGLang's names; {} where nothing is."""
        if self.top_p == 1 and not self.top_k and not self.min_p:
            return {}
        return {"top_p": self.top_p, "top_k": self.top_k or -1, "min_p": self.min_p}


@dataclasses.dataclass(frozen=True)
class Environment:
    """The environment that answers the policy between its turns, with rollout.function = `environment`."""
    name: str = setting("", "Environment: a name in environments.ENVIRONMENTS, or `module:Name`; empty for none.",
        since="0.1.0")
    args: Mapping[str, Any] = setting({}, "Keyword arguments of an episode's environment.", since="0.1.0")
    max_turns: int = setting(8, "Turns of the policy, after which an episode is cut.", at_least=1, since="0.1.0")
    max_turn_tokens: int = setting(0, "Sampled tokens of one turn, beyond which an episode is cut; 0 leaves "
        "rollout.max_new_tokens, of all turns, as the only bound.", at_least=0, since="0.1.0")
    timeout_secs: float = setting(10.0, "Timeout of one reset or step.", above=0, since="0.1.0")
    num_processes: int = setting(8, "Processes in each worker for an environment with `own_process`, each with one "
        "episode at a time.", at_least=1, since="0.1.0")
    memory_bytes: int = setting(1 << 30, "Memory of an environment's process beyond its size at start; 0 for no limit.",
        at_least=MIN_MEMORY_BYTES, or_zero=True, since="0.1.0")


@dataclasses.dataclass(frozen=True)
class Learner:
    """The learner: steps, batches, devices and optimizer."""
    num_steps: int = setting(100, "Training steps of the run.", at_least=1)
    groups_per_step: int = setting(64, "Groups of one step, B.", at_least=1, unit="groups")
    num_minibatches: int = setting(2, "Optimizer updates of one step, a divisor of learner.groups_per_step.",
        at_least=1)
    blocks: int = setting(1, "Blocks of layers, of which each step trains one, in turn (learner/blocks.py); 1 trains "
        "all layers in every step.", at_least=1, since="0.1.0")
    microbatch_rows: int = setting(16, "Rows of one microbatch, over all devices.", at_least=1)
    row_tokens: int = setting(4096, "Tokens of one packed row.", at_least=1)
    packing: str = setting("in_order", "Packing of samples into rows (learner/packing.py).", choices=PACKINGS)
    shared_prompts: bool = setting(False, "Store a prompt once before the completions of its group.")
    attention_kernel: str = setting("auto", "Attention kernel: for any device (`xla`), for TPUs (`splash`), or for "
        "NVIDIA GPUs and bfloat16: `cudnn`, and tokamax's `mosaic_gpu` for Hopper and `triton` since Ampere. `auto` "
        "takes the best that fits device, model and rows, of all but `cudnn`.",
        choices=ATTENTION_KERNELS)
    gradient_sums: str = setting("compiler", "What sums gradients of matrices over devices: the `compiler`, or a "
        "`ring` of permutes, which computation hides: for slices of 64 TPUs v6e.",
        choices=("compiler", "ring"), since="0.2.0")
    replay_routes: str = setting("auto", "Replay the engine's choice of experts: where servers return it (`auto`), or "
        "refuse servers that do not (`on`), or never (`off`): the router decides, and is compared with it.",
        choices=("auto", "on", "off"), since="0.2.0")
    head_chunk_tokens: int = setting(0, "Columns of a microbatch whose logits exist at a time; 0 for all.", at_least=0)
    num_processes: int = setting(1, "Processes of the learner, each with its part of the devices and of every "
        "minibatch.", at_least=1)
    slices: int = setting(1, "Slices, or groups of processes, each with whole parameters and its part of the rows; "
        "they sum their gradients once an update.", at_least=1, unit="slices", since="0.2.0")
    data: int = setting(1, "Size of the mesh axis that divides rows alone.", at_least=1, unit="devices")
    fsdp: int = setting(1, "Size of the mesh axis that divides rows and parameters.", at_least=1, unit="devices")
    expert: int = setting(1, "Size of the mesh axis that divides rows and experts, a divisor of their number; the "
        "other parameters are divided as by learner.fsdp.", at_least=1, unit="devices", since="0.2.0")
    context: int = setting(1, "Size of the mesh axis that divides tokens of a row.", at_least=1, unit="devices",
        since="0.1.0")
    tensor: int = setting(1, "Size of the mesh axis that divides heads, MLPs and vocabulary.", at_least=1,
        unit="devices")
    param_dtype: str = setting("float32", "Dtype of the parameters between updates; `bfloat16` rounds stochastically, "
        "so that small updates count in the mean.", choices=DTYPES, since="0.1.0")
    moment_dtype: str = setting("float32", "Dtype of the first moment, and of momentum; Adam's second is float32.",
        choices=DTYPES, since="0.1.0")
    offload_moments: bool = setting(False, "Keep Adam's moments in the hosts' memory; an update moves those of its "
        "block to the devices and back.", since="0.1.0")
    optimizer: str = setting("adamw", "Optimizer, of optax: learner.adam_* are those of `adamw`, and of `muon` for "
        "parameters that are no matrix of a layer; `adafactor` has its own.", choices=OPTIMIZERS, since="0.2.0")
    learning_rate: float = setting(1e-6, "Learning rate after the warm-up.", at_least=0)
    schedule: str = setting("constant", "Learning rate after the warm-up: constant, or down to "
        "learner.final_learning_rate after the last of the run's updates.", choices=SCHEDULES, since="0.2.0")
    final_learning_rate: float = setting(0.0, "Floor of learner.schedule `linear` and `cosine`.", at_least=0,
        since="0.2.0")
    rate_by_ess: bool = setting(False, "Scale each update's learning rate by the effective sample size of its "
        "sequences' ratios π_θ/π_b, as a share: by its root, with `sgd` by itself (VCPO).", since="0.2.0")
    warmup_updates: int = setting(0, "Updates of the linear warm-up of the learning rate.", at_least=0)
    momentum: float = setting(0.95, "Decay rate of the momentum of `muon` and `sgd`.", at_least=0, below=1,
        since="0.2.0")
    adam_b1: float = setting(0.9, "Decay rate of Adam's first moment.", at_least=0, below=1)
    adam_b2: float = setting(0.95, "Decay rate of Adam's second moment.", at_least=0, below=1)
    adam_eps: float = setting(1e-8, "Epsilon in the denominator of Adam's update.", above=0)
    weight_decay: float = setting(0.0, "Decoupled weight decay, per unit of learning rate.", at_least=0)
    max_grad_norm: float = setting(1.0, "Maximum norm of a gradient; larger ones are scaled down.", above=0,
        infinite=True)
    lease_timeout_secs: float = setting(600.0, "Time without a batch after which the learner stops.", above=0,
        infinite=True)
    fail_on_recompile: bool = setting(True, "Stop when a program compiles after the first step.")
    max_mismatch: float = setting(0.0, "Largest mismatch/mean_abs of engine and learner, beyond which the run stops "
        "before the step counts; 0 for a warning alone.", at_least=0, unit="nats", since="0.1.0")
    deterministic: bool = setting(False, "Reproduce the same bits on GPUs, at a cost; CPUs and TPUs always do.")
    profile_steps: tuple[int, ...] = setting((), "First and last step of a profile, which jax.profiler writes to "
        "WORKDIR/profile; empty for none.", at_least=1, unit="step numbers", since="0.2.0")
    compilation_cache: str = setting("", "Directory, or bucket as checkpoint.directory, that keeps compiled programs "
        "between runs; empty for none.")

    @property
    def num_updates(self) -> int:
        """Of the whole run."""
        return self.num_steps * self.num_minibatches

    @property
    def num_devices(self) -> int:
        """Of all its processes."""
        return self.row_shards * self.context * self.tensor

    @property
    def row_shards(self) -> int:
        """The devices that divide the rows of a microbatch: slices · data · fsdp · expert."""
        return self.slices * self.data * self.fsdp * self.expert


@dataclasses.dataclass(frozen=True)
class Weights:
    """Versions of the weights, and their pushes to the servers."""
    push_every_steps: int = setting(1, "Steps from one push to the next, N.", at_least=1)
    dtype: str = setting("float32", "Dtype of published weights.", choices=DTYPES)
    transport: str = setting("disk", "Transport of versions; all but `disk` need no shared file system.",
        choices=TRANSPORTS)
    rendezvous: str = setting("127.0.0.1", "Address of the learner's machine, where the servers of transport "
        "`distributed` find it.", since="0.1.0")
    pause_mode: str = setting("retract", "Keys and values of running requests under new weights: recomputed "
        "(`retract`, exact), or kept (`in_place`, for comparison only).", choices=PAUSE_MODES)
    push_timeout_secs: float = setting(60.0, "Time that a push waits for a server, which then becomes STALE.", above=0)
    pause_lease_secs: float = setting(120.0, "Time after which a server of this project ends the pause of a learner "
        "that died, above weights.push_timeout_secs; 0 for never.", at_least=0, at_most=86_400, since="0.1.0",
        before=0.0)
    verify: str = setting("all", "Tensors whose digests a push compares on a server that verifies nothing itself: "
        "`all`, or after the first push a `rotating` eighth, beside scored prompts.", choices=VERIFY, since="0.2.0")
    max_score_error: float = setting(0.25, "Bound on the mean difference of a server's log-probs from the learner's "
        "after fixed prompts, beyond which the server is refused; 0 asks for none.", at_least=0, unit="nats",
        since="0.2.0", before=0.0)
    delta: bool = setting(False, "Send servers of this project the lossless difference from the version before, where "
        "that is shorter.", since="0.1.0")
    fanout: int = setting(0, "Servers to which the learner, and each server of this project in turn, sends a version "
        "by transport `stream`; 0 sends to all from the learner.", at_least=0, unit="servers", since="0.1.0")
    max_paused: int = setting(0, "Servers that a push pauses at once while the others go on; 0 for all.", at_least=0,
        unit="servers", since="0.1.0")
    poll_secs: float = setting(2.0, "Poll interval of every server's health.", above=0)
    # A late server may still read the version before.
    keep: int = setting(2, "Versions kept on disk, at least D + 2 with rollout.delay_steps.", at_least=2,
        unit="versions")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Checkpoints, and the end of a preempted run."""
    every_steps: int = setting(50, "Steps from one checkpoint to the next.", at_least=1)
    keep: int = setting(2, "Checkpoints kept besides checkpoint 0.", at_least=1, unit="checkpoints")
    directory: str = setting("", "Bucket of the checkpoints, `gs://BUCKET/PATH` or `s3://BUCKET/PATH` (extras `gcs` "
        "and `s3`), from which another machine may resume the run; empty for WORKDIR/checkpoints.",
        form=forms.bucket, since="0.2.0")
    in_background: bool = setting(True, "Write while training goes on, with the state twice in memory; otherwise the "
        "learner waits for the disk.", since="0.1.0")
    grace_secs: float = setting(60.0, "Grace period from SIGTERM to the forced exit, for the step under way and a "
        "checkpoint; the scheduler's must be longer.", above=0, since="0.1.0")


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Scores of versions, and the choice of the best one."""
    num_prompts: int = setting(512, "Prompts scored in the test split and in the validation split, at most; a value "
        "other than the default must not exceed the test split.", at_least=1)
    num_validation: int = setting(0, "Questions of the validation split, which chooses the best version and is taken "
        "from the train split, or the test split of tasks that make up their questions. 0 for none, -1 to choose by "
        "the test split.", at_least=-1, unit="questions", since="0.1.0", before=-1)
    sets: Mapping[str, Any] = setting({}, "Further evaluation sets by name, each a task's test split with its reward, "
        "`{'hard': {'name': 'gsm8k', 'args': {…}}}` or a task's name alone. Each has scores of its own; none chooses "
        "the best version.", form=forms.evaluation_sets, since="0.2.0")
    num_samples: int = setting(4, "Samples of each prompt, for pass@k.", at_least=1)
    seed: int = setting(0, "Seed of an evaluation's samples.", at_least=0)
    every_steps: int = setting(0, "Steps between the versions that are scored while the run trains; 0 for none.",
        at_least=0)
    max_running_requests: int = setting(64, "Requests of an evaluation that run at once.", at_least=1)
    timeout_secs: float = setting(60.0, "Timeout of the evaluation of one version.", above=0, infinite=True)


@dataclasses.dataclass(frozen=True)
class Supervisor:
    """Supervision of a run whose roles are all on this machine."""
    max_restarts: int = setting(4, "Restarts of all roles together within supervisor.restart_window_secs; requests and "
        "pushes must outlast one.", at_least=0)
    restart_window_secs: float = setting(3600.0, "Sliding window in which supervisor.max_restarts counts.", above=0,
        infinite=True, since="0.1.0", before=1e9)
    stall_secs: float = setting(1800.0, "Time without a step after which the run is stopped, with a message that says "
        "who waits for whom.", above=0, infinite=True)
    processes: str = setting("auto", "Processes of the run: one for each role (`many`), one for all (`one`), or one "
        "where there is a single accelerator (`auto`).", choices=("auto", "many", "one"), since="0.1.0", before="many")


@dataclasses.dataclass(frozen=True)
class Tracker:
    """A service that receives the metrics, too (tracker.py)."""
    kind: str = setting("", "Experiment tracker, configured by environment variables; empty for none.",
        choices=TRACKERS, since="0.1.0")
    project: str = setting("jaxrl_async", "Project of Weights & Biases, or experiment of MLflow.", since="0.1.0",
        before="")


@dataclasses.dataclass(frozen=True)
class Monitoring:
    """A run as operators watch it (runtime/monitoring.py)."""
    address: str = setting("", "Address `host:port` at which every role answers `/metrics`, for Prometheus, and "
        "`/health`; port 0 takes a free one, which WORKDIR/scrape/ROLE.json names, and several roles on one machine "
        "take the ports after another one. Empty for none.", form=forms.host_port, since="0.2.0")
    logs: str = setting("text", "Form of the roles' log lines: text, or an object of JSON each.",
        choices=("text", "json"), since="0.2.0")


@dataclasses.dataclass(frozen=True)
class Cpus:
    """Processor cores of each role on this machine."""
    learner: tuple[int, ...] = setting((), "Cores of the learner; empty lets the system choose.")
    server: tuple[int, ...] = setting((), "Cores of the servers; empty lets the system choose.")
    rollout: tuple[int, ...] = setting((), "Cores of the rollout workers; empty lets the system choose.")
    queue: tuple[int, ...] = setting((), "Cores of the queue; empty lets the system choose.")
    rewards: tuple[int, ...] = setting((), "Cores of the reward services; empty lets the system choose.", since="0.1.0")

    def of(self, role: str) -> tuple[int, ...]:
        """The cores of a role; of "one", those of all."""
        return tuple(sorted(set(sum(vars(self).values(), ())))) if role == "one" else vars(self)[role]


@dataclasses.dataclass(frozen=True)
class Settings:
    """A whole run, in the order of the loop."""
    mode: str = setting("async", "Training mode: on-policy (`sync`), on-policy with gradients accumulated by chunk "
        "(`periodic`), or off-policy by up to queue.max_staleness steps (`async`).", choices=MODES)
    seed: int = setting(0, "Seed of the model, the warm start and the samples.", at_least=0)
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
    monitoring: Monitoring = Monitoring()
    cpus: Cpus = Cpus()


FIELDS = dict(walk(Settings))  # key, "block.name" → field, in order
# Old key → new key. Old keys are accepted in configs, in config.json and on the command line.
RENAMED = {field.metadata["was"]: key for key, field in FIELDS.items() if "was" in field.metadata}
# Key that old workdirs may lack → the value with which they are read.
ADDED = {key: field.metadata["before"] for key, field in FIELDS.items() if "since" in field.metadata}

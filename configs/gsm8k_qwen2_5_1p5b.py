"""Qwen2.5-1.5B on GSM8K: the config of a pod. Cost and accuracy are not measured: it needs accelerators.

One command per host, the same config everywhere:

    python -m jaxrl_async train --config=configs/gsm8k_qwen2_5_1p5b.py --workdir=DIR --role=queue
    python -m jaxrl_async train --config=... --workdir=DIR --role=learner
    python -m jaxrl_async train --config=... --workdir=DIR --role=rollout

with one secret of your making as JAXRL_QUEUE_TOKEN in the environment of each (or "@PATH" of its file), with the
checkpoint's files at `model.path` and an SGLang server on each host of `server.addresses`:

    python -m sglang.launch_server --config keys.yaml --model-path checkpoints/Qwen2.5-1.5B-Instruct \\
        --skip-tokenizer-init --host 0.0.0.0 --port 30000

where keys.yaml, which only its owner reads, has a line `api-key: KEY` and a line `admin-api-key: KEY`, and
`--config.server.api_key_env=SGLANG_API_KEY --config.server.admin_api_key_env=SGLANG_ADMIN_API_KEY` on the learner
and the rollout workers. The network between the hosts is trusted (`security.insecure`); `queue.tls_*` and https://
addresses do without. Weights travel through a file system that learner and servers share; without one,
`--config.weights.transport=tensor` sends them over HTTP. On TPU hosts a server is `python -m
jaxrl_async.extras.sglang_jax.server`, and the transport `stream`.

Arguments, after a colon: `smoke` (two steps of a tiny random model and an embedded server, on this machine),
`mode=sync|periodic|async`, `seed=N`.
"""

from jaxrl_async.config import base_config, parse_arg, set_mode

CHECKPOINT = "checkpoints/Qwen2.5-1.5B-Instruct"


def get_config(arg: str = ""):
    arg = parse_arg(arg, smoke=False, mode="async", seed=0)
    c = base_config()
    c.seed = arg.seed

    c.task.update(name="gsm8k", seed=arg.seed)
    c.task.args = dict(directory="data/gsm8k", reward="last_number")
    c.tokenizer.update(kind="huggingface", path=CHECKPOINT)
    c.model.update(path=CHECKPOINT, num_layers=28, model_dim=1536, num_heads=12, mlp_dim=8960)
    c.model.update(rope_theta=1e6, qk_norm=False, attention_bias=True, dtype="bfloat16", remat=True)
    c.warm_start.update(batch_size=16, row_tokens=1024, learning_rate=1e-5, num_demonstrations=0)

    c.queue.update(address="queue-0:7000", token_env="JAXRL_QUEUE_TOKEN", max_staleness=4)
    c.queue.update(max_bytes=4 << 30, max_message_bytes=64 << 20, max_running_groups=2048)
    c.learner.lease_timeout_secs, c.supervisor.stall_secs = 1800.0, 3600.0
    c.journal.keep = "checkpointed"
    c.server.addresses = ("http://sglang-0:30000", "http://sglang-1:30000")
    c.server.update(num_slots=16, start_timeout_secs=1200.0)
    c.security.insecure = True  # http:// within the cluster
    c.rollout.update(max_running_groups=512, request_timeout_secs=900.0, reward_processes=8)

    c.learner.update(num_steps=500, groups_per_step=128, num_minibatches=4, warmup_updates=10)
    c.learner.update(packing="first_fit", shared_prompts=True, head_chunk_tokens=512, fsdp=8)
    c.weights.update(
        dtype="bfloat16", push_timeout_secs=600.0, pause_lease_secs=900.0, poll_secs=5.0
    )
    c.evaluate.update(num_prompts=1319, timeout_secs=300.0)

    if arg.smoke:
        c.tokenizer.update(kind="bpe", vocab_size=1024, path="")
        c.model.update(path="", num_layers=2, model_dim=64, num_heads=2, head_dim=32, mlp_dim=128)
        c.model.update(dtype="float32", remat=False)
        c.queue.update(address="", token_env="")
        c.server.update(addresses=(), max_total_tokens=320)
        c.security.insecure = False
        c.rollout.update(max_prompt_tokens=256, max_new_tokens=32, reward_processes=1)
        c.learner.update(num_steps=2, groups_per_step=4, num_minibatches=2, microbatch_rows=4)
        c.learner.update(row_tokens=512, fsdp=1)
        c.weights.dtype, c.evaluate.num_prompts = "float32", 32
    set_mode(c, arg.mode, chunk_groups=2 if arg.smoke else 16)
    return c

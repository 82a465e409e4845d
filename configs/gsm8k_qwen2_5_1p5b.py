"""Qwen2.5-1.5B on GSM8K: what a pod would run. Not measured: it needs accelerators.

One command per host, the same config everywhere:

    python -m jaxrl_async train --config=configs/gsm8k_qwen2_5_1p5b.py --workdir=DIR --role=queue
    python -m jaxrl_async train --config=... --workdir=DIR --role=learner
    python -m jaxrl_async train --config=... --workdir=DIR --role=rollout

with one secret of your making as JAXRL_QUEUE_TOKEN in the environment of each (or "@PATH" of its file), with the
checkpoint's files at `model.path` and an SGLang server on each host of `server.addresses`:

    python -m sglang.launch_server --model-path checkpoints/Qwen2.5-1.5B-Instruct --skip-tokenizer-init \\
        --host 0.0.0.0 --port 30000 --api-key "$SGLANG_API_KEY" --admin-api-key "$SGLANG_ADMIN_API_KEY"

and `--config.server.api_key_env=SGLANG_API_KEY --config.server.admin_api_key_env=SGLANG_ADMIN_API_KEY` on the learner
and the rollout workers. Weights travel through a file system that learner and servers share; without one,
`--config.weights.transport=tensor` sends them over HTTP. On TPU hosts a server is
`python -m jaxrl_async.sglang_jax.server`, and `stream` sends over HTTP. The accuracy is not measured.

Arguments, after a colon: `smoke` (two steps of a tiny random model and an embedded server, on this machine),
`mode=sync|periodic|async`, `seed=N`.
"""

import ml_collections
from ml_collections.config_dict import placeholder

from jaxrl_async.cli.config import parse_arg


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    arg = parse_arg(arg, smoke=False, mode="async", seed=0)
    asynchronous, periodic = arg.mode == "async", arg.mode == "periodic"
    c = ml_collections.ConfigDict()
    c.mode = arg.mode
    c.seed = arg.seed

    c.task = dict(
        name="gsm8k",
        args=dict(directory="data/gsm8k", reward="last_number"),
        seed=arg.seed,
    )

    c.tokenizer = dict(
        kind="bpe" if arg.smoke else "huggingface",
        alphabet="",
        vocab_size=1024 if arg.smoke else 0,
        path="" if arg.smoke else "checkpoints/Qwen2.5-1.5B-Instruct",
    )

    c.model = dict(
        path="" if arg.smoke else "checkpoints/Qwen2.5-1.5B-Instruct",
        num_layers=2 if arg.smoke else 28,
        model_dim=64 if arg.smoke else 1536,
        num_heads=2 if arg.smoke else 12,
        num_kv_heads=2,
        head_dim=32 if arg.smoke else 128,
        mlp_dim=128 if arg.smoke else 8960,
        rope_theta=1_000_000.0,
        norm_eps=1e-6,
        qk_norm=False,
        attention_bias=True,
        tied_embeddings=True,
        dtype="float32" if arg.smoke else "bfloat16",
        remat=not arg.smoke,
    )

    c.warm_start = dict(
        num_steps=0,
        batch_size=16,
        row_tokens=1024,
        learning_rate=1e-5,
        num_demonstrations=0,
    )

    c.queue = dict(
        address="" if arg.smoke else "queue-0:7000",
        token_env="" if arg.smoke else "JAXRL_QUEUE_TOKEN",
        tls_cert="",
        tls_key="",
        tls_ca="",
        max_staleness=4 if asynchronous else 0,
        chunk_groups=(2 if arg.smoke else 16) if periodic else 0,
        max_running_groups=2048,
        max_bytes=4 << 30,
        max_message_bytes=64 << 20,
        permit_timeout_secs=1800.0,
        max_attempts=4,
        max_failures=64,
        budgets=dict(),
    )

    c.journal = dict(
        keep="checkpointed",
        path="",
        mode="wal",
        synchronous="normal",
    )

    c.server = dict(
        addresses=() if arg.smoke else ("http://sglang-0:30000", "http://sglang-1:30000"),
        control_addresses=(),
        speeds=(),
        api_key_env="",
        admin_api_key_env="",
        tls_cert="",
        tls_key="",
        tls_ca="",
        command="",
        num_local=1,
        num_slots=16,
        decode_chunk=8,
        max_total_tokens=320 if arg.smoke else 1536,
        max_queued_requests=4096,
        start_timeout_secs=1200.0,
    )

    c.rollout = dict(
        function="single_turn",
        group_size=8,
        max_prompt_tokens=256 if arg.smoke else 512,
        max_new_tokens=32 if arg.smoke else 1024,
        temperature=1.0,
        num_workers=1,
        max_running_groups=512,
        request_timeout_secs=900.0,
        max_retries=3,
        reward_processes=1 if arg.smoke else 8,
        reward_timeout_secs=5.0,
        reward_memory_bytes=1 << 30,
        reward_calls_per_process=10_000,
        drop_equal_rewards=False,
        overlong_buffer_tokens=0,
        delay_steps="0",
        frictions=dict(actor_bug=0.0, reward_corruption=0.0, rare_discovery=0.0),
    )

    c.loss = dict(
        advantage="grpo",
        anchor="current" if periodic else "a3po",
        a3po_fresh="behavior",
        ratio="token",
        surrogate="clipped",
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=placeholder(float),
        dg_temperature=1.0,
        dg_threshold=0.0,
        behavior_weight="mask",
        behavior_cap=5.0,
        behavior_floor=placeholder(float),
        dppo_delta=placeholder(float),
        kl="none",
        kl_to="reference",
        kl_coefficient=0.0,
        reduction="token_mean",
        fixed_length=placeholder(float),
        proximal_metrics=False,
    )

    c.learner = dict(
        num_steps=2 if arg.smoke else 500,
        groups_per_step=4 if arg.smoke else 128,
        num_minibatches=1 if periodic else 2 if arg.smoke else 4,
        microbatch_rows=4 if arg.smoke else 16,
        row_tokens=512 if arg.smoke else 4096,
        packing="first_fit",
        shared_prompts=True,
        attention_kernel="xla",
        head_chunk_tokens=512,
        num_processes=1,
        data=1,
        fsdp=1 if arg.smoke else 8,
        tensor=1,
        learning_rate=1e-6,
        warmup_updates=10,
        adam_b1=0.9,
        adam_b2=0.95,
        adam_eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lease_timeout_secs=1800.0,
        fail_on_recompile=True,
        deterministic=False,
        compilation_cache="",
    )

    c.weights = dict(
        push_every_steps=1,
        dtype="float32" if arg.smoke else "bfloat16",
        transport="disk",
        pause_mode="retract",
        push_timeout_secs=600.0,
        poll_secs=5.0,
        keep=2,
    )

    c.checkpoint = dict(
        every_steps=50,
        keep=2,
    )

    c.evaluate = dict(
        num_prompts=32 if arg.smoke else 1319,
        num_samples=4,
        seed=0,
        every_steps=0,
        max_running_requests=64,
        timeout_secs=300.0,
    )

    c.supervisor = dict(
        max_restarts=4,
        stall_secs=1800.0,
    )

    c.cpus = dict(learner=(), server=(), rollout=(), queue=())
    return c.lock()

"""A small random model on real GSM8K, to exercise the whole path; it learns the format, not arithmetic.

    python -m jaxrl_async train --config=configs/gsm8k_tiny.py --config.task.args.directory=DIR

DIR holds the published train.jsonl and test.jsonl (https://github.com/openai/grade-school-math). A BPE of 1,024
tokens is trained on the task's text. What to expect: 20 steps end to end, reward near 0 (see the README).

Arguments, after a colon: `smoke` (two steps of a smaller model), `mode=sync|periodic|async`, `seed=N`.
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
        kind="bpe",
        alphabet="",
        vocab_size=1024,
        path="",
    )

    c.model = dict(
        path="",
        num_layers=2 if arg.smoke else 4,
        model_dim=64 if arg.smoke else 128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        mlp_dim=128 if arg.smoke else 384,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        qk_norm=True,
        attention_bias=False,
        tied_embeddings=True,
        dtype="float32",
        remat=False,
    )

    c.warm_start = dict(
        num_steps=4 if arg.smoke else 200,
        batch_size=4 if arg.smoke else 16,
        row_tokens=512,
        learning_rate=3e-3,
        num_demonstrations=2_000,
    )

    c.queue = dict(
        address="",
        token_env="",
        tls_cert="",
        tls_key="",
        tls_ca="",
        max_staleness=2 if asynchronous else 0,
        chunk_groups=2 if periodic else 0,
        max_running_groups=64,
        max_bytes=256 << 20,
        max_message_bytes=16 << 20,
        permit_timeout_secs=120.0,
        max_attempts=4,
        max_failures=64,
        budgets=dict(),
    )

    c.journal = dict(
        keep="all",
        path="",
        mode="wal",
        synchronous="normal",
    )

    c.server = dict(
        addresses=(),
        control_addresses=(),
        speeds=(),
        api_key_env="",
        admin_api_key_env="",
        tls_cert="",
        tls_key="",
        tls_ca="",
        command="",
        num_local=1,
        num_slots=32,
        decode_chunk=8,
        max_total_tokens=448,
        max_queued_requests=4096,
        start_timeout_secs=120.0,
    )

    c.rollout = dict(
        function="single_turn",
        group_size=4,
        max_prompt_tokens=256,
        max_new_tokens=32 if arg.smoke else 128,
        temperature=1.0,
        num_workers=1,
        max_running_groups=32,
        request_timeout_secs=60.0,
        max_retries=3,
        reward_processes=1,
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
        num_steps=2 if arg.smoke else 20,
        groups_per_step=4 if arg.smoke else 8,
        num_minibatches=1 if periodic else 2,
        microbatch_rows=4,
        row_tokens=512,
        packing="in_order",
        shared_prompts=True,
        attention_kernel="xla",
        head_chunk_tokens=128,
        num_processes=1,
        data=1,
        fsdp=1,
        tensor=1,
        learning_rate=3e-4,
        warmup_updates=0,
        adam_b1=0.9,
        adam_b2=0.95,
        adam_eps=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lease_timeout_secs=120.0,
        fail_on_recompile=True,
        deterministic=False,
        compilation_cache="",
    )

    c.weights = dict(
        push_every_steps=1,
        dtype="float32",
        transport="disk",
        pause_mode="retract",
        push_timeout_secs=60.0,
        poll_secs=2.0,
        keep=2,
    )

    c.checkpoint = dict(
        every_steps=10,
        keep=2,
    )

    c.evaluate = dict(
        num_prompts=64,
        num_samples=2,
        seed=0,
        every_steps=0,
        max_running_requests=64,
        timeout_secs=60.0,
    )

    c.supervisor = dict(
        max_restarts=4,
        stall_secs=1800.0,
    )

    c.cpus = dict(learner=(), server=(), rollout=(), queue=())
    return c.lock()

"""Two-digit addition on a laptop: imperfect demonstrations, a verifier, and RL that repairs the habit.

    python -m jaxrl_async train --config=configs/quickstart.py --workdir=runs/quickstart
    python -m jaxrl_async evaluate --workdir=runs/quickstart

A decoder of 108k parameters is first trained on demonstrations of which 70 % forget the carry, and answers
about 40 % of the held-out sums. GRPO with a verifier then raises that: mostly by selecting what 30 % of the
demonstrations already show. What to expect, measured, stands in the README.

Arguments, after a colon: `smoke` (two steps), `mode=sync|periodic|async`, `seed=N`:

    --config=configs/quickstart.py:mode=periodic,seed=3
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
        name="arithmetic",
        args=dict(num_digits=2, num_test=512, forget_carry=0.7, seed=0),
        seed=arg.seed,
    )

    c.tokenizer = dict(
        kind="char",
        alphabet="0123456789+=",
        vocab_size=0,
        path="",
    )

    c.model = dict(
        path="",
        num_layers=2,
        model_dim=64,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        mlp_dim=192,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        qk_norm=True,
        attention_bias=False,
        tied_embeddings=True,
        dtype="float32",
        remat=False,
    )

    c.warm_start = dict(
        num_steps=20 if arg.smoke else 1500,
        batch_size=128,
        row_tokens=12,
        learning_rate=3e-3,
        num_demonstrations=20_000,
    )

    c.queue = dict(
        address="",
        token_env="",
        tls_cert="",
        tls_key="",
        tls_ca="",
        max_staleness=2 if asynchronous else 0,
        chunk_groups=16 if periodic else 0,
        max_running_groups=256,
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
        num_slots=256,
        decode_chunk=4,
        max_total_tokens=16,
        max_queued_requests=4096,
        start_timeout_secs=120.0,
    )

    c.rollout = dict(
        function="single_turn",
        group_size=8,
        max_prompt_tokens=8,
        max_new_tokens=4,
        temperature=1.0,
        num_workers=1,
        max_running_groups=128,
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
        num_steps=2 if arg.smoke else 100,
        groups_per_step=8 if arg.smoke else 64,
        num_minibatches=1 if periodic else 2,
        microbatch_rows=64,
        row_tokens=48,
        packing="in_order",
        shared_prompts=False,
        attention_kernel="xla",
        head_chunk_tokens=0,
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
        every_steps=20,
        keep=2,
    )

    c.evaluate = dict(
        num_prompts=512,
        num_samples=4,
        seed=0,
        every_steps=0 if arg.smoke else 20,
        max_running_requests=64,
        timeout_secs=60.0,
    )

    c.supervisor = dict(
        max_restarts=4,
        stall_secs=600.0,
    )

    c.cpus = dict(learner=(), server=(), rollout=(), queue=())
    return c.lock()

"""Token reversal from scratch with Delightful Policy Gradient, and what an actor can get wrong, by name.

    python -m jaxrl_async train --config=configs/token_reversal.py --workdir=runs/reversal
    python -m jaxrl_async train --config=configs/token_reversal.py:loss=ppo,frictions --workdir=runs/ppo

Ten symbols out of two come back in reverse; the reward is the share of positions that are right. Three blocks of
width 64 start from random weights: there is no warm start. "Delightful Distributed Policy Gradient", Osband,
arXiv 2603.20521; the magnitudes of the frictions are ours. benchmarks/delight_reversal.py compares the losses.

Arguments, after a colon: `smoke` (two steps), `mode=sync|periodic|async`, `seed=N`, `loss=dg|pg|ppo`, `frictions`
(all four at once):

    --config=configs/token_reversal.py:loss=pg,seed=3
"""

import ml_collections
from ml_collections.config_dict import placeholder

from jaxrl_async.cli.config import UsageError, parse_arg

SURROGATES = {"dg": "dg", "pg": "reinforce", "ppo": "clipped"}


def get_config(arg: str = "") -> ml_collections.ConfigDict:
    arg = parse_arg(arg, smoke=False, mode="sync", seed=0, loss="dg", frictions=False)
    if arg.loss not in SURROGATES:
        raise UsageError(f"loss must be one of {', '.join(SURROGATES)}; got {arg.loss!r}")
    asynchronous, periodic = arg.mode == "async", arg.mode == "periodic"
    c = ml_collections.ConfigDict()
    c.mode = arg.mode
    c.seed = arg.seed

    c.task = dict(
        name="token_reversal",
        args=dict(num_tokens=10, num_symbols=2, num_test=256, seed=0),
        seed=arg.seed,
    )

    c.tokenizer = dict(
        kind="char",
        alphabet="01>",
        vocab_size=0,
        path="",
    )

    c.model = dict(
        path="",
        num_layers=3,
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
        num_steps=0,
        batch_size=1,
        row_tokens=22,
        learning_rate=0.0,
        num_demonstrations=1,
    )

    c.queue = dict(
        address="",
        token_env="",
        tls_cert="",
        tls_key="",
        tls_ca="",
        max_staleness=2 if asynchronous else 0,
        chunk_groups=5 if periodic else 0,
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
        num_slots=100,
        decode_chunk=11,
        max_total_tokens=22,
        max_queued_requests=4096,
        start_timeout_secs=120.0,
    )

    c.rollout = dict(
        function="single_turn",
        group_size=10,
        max_prompt_tokens=11,
        max_new_tokens=11,
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
        delay_steps="uniform(30)" if arg.frictions else "0",
        frictions=dict(
            actor_bug=0.1 if arg.frictions else 0.0,
            reward_corruption=0.1 if arg.frictions else 0.0,
            rare_discovery=0.5 if arg.frictions else 0.0,
        ),
    )

    c.loss = dict(
        advantage="dr_grpo",
        anchor="behavior",
        a3po_fresh="behavior",
        ratio="token",
        surrogate=SURROGATES[arg.loss],
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=placeholder(float),
        dg_temperature=1.0,
        dg_threshold=0.0,
        behavior_weight="none",
        behavior_cap=placeholder(float),
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
        num_steps=2 if arg.smoke else 1000,
        groups_per_step=10,
        num_minibatches=1,
        microbatch_rows=20,
        row_tokens=110,
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
        adam_b2=0.999,
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
        every_steps=500,
        keep=2,
    )

    c.evaluate = dict(
        num_prompts=256,
        num_samples=4,
        seed=0,
        every_steps=0,
        max_running_requests=64,
        timeout_secs=60.0,
    )

    c.supervisor = dict(
        max_restarts=4,
        stall_secs=600.0,
    )

    c.cpus = dict(learner=(), server=(), rollout=(), queue=())
    return c.lock()

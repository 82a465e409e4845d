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

from jaxrl_async.config import base_config, parse_arg

SURROGATES = {"dg": "dg", "pg": "reinforce", "ppo": "clipped"}


def get_config(arg: str = ""):
    arg = parse_arg(arg, smoke=False, mode="sync", seed=0, loss=tuple(SURROGATES), frictions=False)
    c = base_config()
    c.mode, c.seed = arg.mode, arg.seed

    c.task.update(name="token_reversal", seed=arg.seed)
    c.task.args = dict(num_tokens=10, num_symbols=2, num_test=256, seed=0)
    c.tokenizer.alphabet = "01>"
    c.model.update(num_layers=3, model_dim=64, num_heads=4, num_kv_heads=4, head_dim=16)
    c.warm_start.update(batch_size=1, row_tokens=22, learning_rate=0.0, num_demonstrations=1)

    c.queue.max_running_groups = 64
    c.queue.max_staleness = 2 if arg.mode == "async" else 0
    c.queue.chunk_groups = 5 if arg.mode == "periodic" else 0
    c.server.update(num_slots=100, decode_chunk=11, max_total_tokens=22)
    c.rollout.update(group_size=10, max_prompt_tokens=11, max_new_tokens=11, max_running_groups=32)
    c.loss.update(advantage="dr_grpo", anchor="behavior", surrogate=SURROGATES[arg.loss])
    c.loss.update(behavior_weight="none", behavior_cap=None)
    c.learner.update(num_steps=2 if arg.smoke else 1000, groups_per_step=10, num_minibatches=1)
    c.learner.update(microbatch_rows=20, row_tokens=110, learning_rate=3e-4, adam_b2=0.999)
    c.checkpoint.every_steps = 500
    c.evaluate.num_prompts = 256
    c.supervisor.stall_secs = 900.0

    if arg.frictions:
        c.rollout.delay_steps = "uniform(30)"
        c.rollout.frictions.update(actor_bug=0.1, reward_corruption=0.1, rare_discovery=0.5)
    return c

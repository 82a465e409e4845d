"""Two-digit addition on a laptop: imperfect demonstrations, a verifier, and RL that repairs the habit.

    python -m jaxrl_async train --config=configs/quickstart.py --workdir=runs/quickstart
    python -m jaxrl_async evaluate --workdir=runs/quickstart

A decoder of 108k parameters is first trained on demonstrations of which 70 % forget the carry, and answers
about 40 % of the held-out sums. GRPO with a verifier then raises that: mostly by selecting what 30 % of the
demonstrations already show. The README has the measured cost and accuracy.

Arguments, after a colon: `smoke` (two steps), `mode=sync|periodic|async`, `seed=N`:

    --config=configs/quickstart.py:mode=periodic,seed=3
"""

from jaxrl_async.config import base_config, parse_arg, set_mode


def get_config(arg: str = ""):
    arg = parse_arg(arg, smoke=False, mode="async", seed=0)
    c = base_config()
    c.seed = arg.seed

    c.task.seed = arg.seed
    c.task.args = dict(num_digits=2, num_test=512, forget_carry=0.7, seed=0)
    c.tokenizer.alphabet = "0123456789+="
    c.model.update(num_layers=2, model_dim=64, num_heads=4, num_kv_heads=4, head_dim=16)
    c.warm_start.num_steps = 20 if arg.smoke else 1500

    c.server.update(decode_chunk=4, max_total_tokens=16)
    c.rollout.update(max_prompt_tokens=8, max_new_tokens=4)
    c.learner.update(
        num_steps=2 if arg.smoke else 100,
        groups_per_step=8 if arg.smoke else 64,
        microbatch_rows=64,
        row_tokens=48,
        learning_rate=3e-4,
    )
    c.checkpoint.every_steps = 20
    c.evaluate.update(every_steps=0 if arg.smoke else 20, num_validation=0 if arg.smoke else 128)
    c.supervisor.stall_secs = 900.0

    set_mode(c, arg.mode, chunk_groups=16)
    return c

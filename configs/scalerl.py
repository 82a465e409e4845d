"""The recipe of ScaleRL, "The Art of Scaling RL Compute for LLMs", arXiv 2510.13786, on two-digit addition.

    python -m jaxrl_async train --config=configs/scalerl.py --workdir=runs/scalerl
    python -m jaxrl_async report --workdir=runs/scalerl

CISPO, the mean by prompt, advantages in units of the whole batch's spread, groups of equal rewards dropped, prompts of
a pass rate of .9 not drawn again, logits in float32, and pushes while tokens are in flight, 8 steps behind at most. The
report draws the paper's sigmoid of the first half of the run beside the second. The paper's forced end of long answers
and its sizes are not here. Accuracy and cost: not measured.

Arguments, after a colon: `smoke` (two steps), `mode=sync|periodic|async`, `seed=N`. Mode `periodic`
trains a step in parts: its advantages are in units of their group's spread, and CISPO's weight is 1.
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
    c.model.dtype = "float32"  # of all logits, the head's too
    c.warm_start.num_steps = 20 if arg.smoke else 1500

    if arg.mode == "periodic":
        c.loss.update(surrogate="reinforce", behavior_weight="none", behavior_cap=None)
        c.loss.reduction = "prompt_mean"
    else:
        c.loss.preset = "scalerl"
    c.queue.max_staleness = 8
    # Running requests go on under new weights, with a cache that they recompute.
    c.weights.pause_mode = "retract"
    c.server.update(decode_chunk=4, max_total_tokens=16)
    c.rollout.update(max_prompt_tokens=8, max_new_tokens=4)
    c.rollout.update(drop_equal_rewards=True, max_pass_rate=0.9)
    c.learner.update(
        num_steps=2 if arg.smoke else 100,
        groups_per_step=8 if arg.smoke else 64,
        num_minibatches=1,
        microbatch_rows=64,
        row_tokens=48,
        learning_rate=3e-4,
    )
    c.checkpoint.every_steps = 20
    c.evaluate.update(every_steps=0 if arg.smoke else 20, num_validation=0 if arg.smoke else 128)
    set_mode(c, arg.mode, chunk_groups=16)
    return c

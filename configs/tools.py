"""A tiny policy learns to use a tool, or to play a text game, over several turns: minutes on two cores.

    python -m jaxrl_async train --config=configs/tools.py:env=calculator --workdir=runs/calculator
    python -m jaxrl_async evaluate --workdir=runs/calculator

calculator: "tom has 482 and gets 715." The policy may write an expression, reads its value, and answers. Half of its
demonstrations guess instead, and seven in ten of the others have another operation computed.

game: a door of one colour, and four rooms with a key each. Three quarters of the demonstrations find the key and do
not take it. docs/results.md has the measured cost and success.

Arguments, after a colon: `smoke` (two steps), `env=calculator|game`, `mode=sync|periodic|async`, `seed=N`.
"""

from jaxrl_async.config import base_config, parse_arg, set_mode


def get_config(arg: str = ""):
    arg = parse_arg(
        arg, smoke=False, env=("calculator", "game"), mode=("async", "sync", "periodic"), seed=0
    )
    c = base_config()
    c.seed = arg.seed

    c.task.seed = arg.seed
    c.rollout.function = "environment"
    if arg.env == "calculator":
        c.task.name, c.environment.name = "word_problems", "calculator"
        c.task.args = dict(
            num_digits=3, num_train=20_000, num_test=512, guesses=0.5, mistakes=0.7, seed=0
        )
        c.tokenizer.alphabet = "0123456789+-*=:. abcdefghijklmnopqrstuvwxyz"
        c.environment.args = dict(median_secs=0.0, sigma=1.0)  # log-normal seconds of a computation
        c.environment.update(max_turns=4, max_turn_tokens=10)
        c.rollout.update(max_prompt_tokens=28, max_new_tokens=32)
        c.warm_start.update(num_steps=700, batch_size=64, row_tokens=56)
    else:
        c.task.name, c.environment.name = "locked_door", "locked_door"
        c.task.args = dict(num_rooms=4, num_train=20_000, num_test=512, careless=0.75, seed=0)
        c.tokenizer.alphabet = "0123456789.: abcdefghijklmnopqrstuvwxyz"
        c.environment.update(max_turns=8, max_turn_tokens=6)
        c.rollout.update(max_prompt_tokens=42, max_new_tokens=36)
        c.warm_start.update(num_steps=1200, batch_size=32, row_tokens=128)
    c.model.update(num_layers=2, model_dim=64, num_heads=4, num_kv_heads=4, head_dim=16)
    if arg.smoke:
        c.warm_start.num_steps = 20

    c.server.update(decode_chunk=4, max_total_tokens=128)
    c.learner.update(
        num_steps=2 if arg.smoke else 80,
        groups_per_step=8 if arg.smoke else 32,
        microbatch_rows=16,
        row_tokens=256,
        shared_prompts=True,
        learning_rate=6e-4,
    )
    c.checkpoint.every_steps = 20
    c.evaluate.update(every_steps=0 if arg.smoke else 20, num_validation=0 if arg.smoke else 128)
    c.supervisor.stall_secs = 900.0

    set_mode(c, arg.mode, chunk_groups=8)
    return c

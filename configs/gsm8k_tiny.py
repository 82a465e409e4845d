"""A small random model on real GSM8K, to exercise the whole path; it learns the format, not arithmetic.

    python -m jaxrl_async train --config=configs/gsm8k_tiny.py --config.task.args.directory=DIR

DIR holds the published train.jsonl and test.jsonl (https://github.com/openai/grade-school-math). A BPE of 1,024
tokens is trained on the task's text. What to expect: 20 steps end to end, reward near 0 (see the README).

Arguments, after a colon: `smoke` (two steps of a smaller model), `mode=sync|periodic|async`, `seed=N`.
"""

from jaxrl_async.config import base_config, parse_arg, set_mode


def get_config(arg: str = ""):
    arg = parse_arg(arg, smoke=False, mode="async", seed=0)
    c = base_config()
    c.seed = arg.seed

    c.task.update(name="gsm8k", seed=arg.seed)
    c.task.args = dict(directory="data/gsm8k", reward="last_number")
    c.tokenizer.update(kind="bpe", vocab_size=1024)
    c.model.update(
        num_layers=4, model_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384
    )
    c.warm_start.update(num_steps=200, batch_size=16, row_tokens=512, num_demonstrations=2_000)

    c.queue.max_running_groups = 64
    c.server.update(num_slots=32, max_total_tokens=448)
    c.rollout.update(group_size=4, max_prompt_tokens=256, max_new_tokens=128, max_running_groups=32)
    c.learner.update(num_steps=20, groups_per_step=8, microbatch_rows=4, row_tokens=512)
    c.learner.update(shared_prompts=True, head_chunk_tokens=128, learning_rate=3e-4)
    c.checkpoint.every_steps = 10
    c.evaluate.update(num_prompts=64, num_samples=2)

    if arg.smoke:
        c.model.update(num_layers=2, model_dim=64, mlp_dim=128)
        c.warm_start.update(num_steps=4, batch_size=4)
        c.rollout.max_new_tokens = 32
        c.learner.update(num_steps=2, groups_per_step=4)
    set_mode(c, arg.mode, chunk_groups=2)
    return c

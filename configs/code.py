"""SmolLM2-135M-Instruct writes functions of one line, which run in a sandbox against tests, on two CPU cores.

    python -m jaxrl_async train --config=configs/code.py --workdir=runs/code

with the checkpoint that `python launch/smollm2_checkpoint.py checkpoints/SmolLM2-135M-Instruct` writes. The prompt is a
signature, a sentence and "return", without a chat template; the model goes on. Needs a machine that can hold a sandbox
(docs/rewards.md). docs/results.md has the measured cost and accuracy.

Arguments, after a colon: `smoke` (two steps of a tiny random model), `mode=sync|periodic|async`, `seed=N`.
"""

from jaxrl_async.config import base_config, parse_arg, set_mode

CHECKPOINT = "checkpoints/SmolLM2-135M-Instruct"


def get_config(arg: str = ""):
    arg = parse_arg(arg, smoke=False, mode=("async", "sync", "periodic"), seed=0)
    c = base_config()
    c.seed = arg.seed

    c.task.update(name="code", seed=arg.seed)
    c.task.args = dict(num_test=128, seed=0)
    c.rollout.update(max_prompt_tokens=64, max_new_tokens=20, reward_processes=2)
    c.learner.update(num_steps=40, groups_per_step=8, microbatch_rows=1, row_tokens=512)
    c.tokenizer.update(kind="huggingface", path=CHECKPOINT, chat_template="none")
    c.model.update(path=CHECKPOINT, num_layers=30, model_dim=576, num_heads=9, num_kv_heads=3)
    c.model.update(head_dim=64, mlp_dim=1536, rope_theta=1e5, norm_eps=1e-5, qk_norm=False)

    c.queue.max_running_groups = 3 * c.learner.groups_per_step
    c.server.update(num_slots=64, max_total_tokens=84)
    c.learner.update(shared_prompts=True, packing="first_fit", head_chunk_tokens=128)
    c.learner.update(learning_rate=1e-5, warmup_updates=4)
    c.checkpoint.every_steps = 20
    c.evaluate.update(num_prompts=128, num_samples=4)

    if arg.smoke:
        c.tokenizer.update(kind="bpe", vocab_size=512, path="", chat_template="")
        c.model.update(path="", num_layers=2, model_dim=64, num_heads=3, num_kv_heads=1, mlp_dim=96)
        c.rollout.max_prompt_tokens = 128
        c.server.max_total_tokens = 148
        c.learner.update(num_steps=2, groups_per_step=4)
        c.evaluate.num_prompts = 32
    set_mode(c, arg.mode, chunk_groups=2)
    return c

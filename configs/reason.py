"""A pretrained model of your choice on GSM8K, with all roles on one machine: the config of notebooks/reason.ipynb.

    python -m jaxrl_async train --config=configs/reason.py --workdir=runs/reason --config.task.args.directory=DIR
    python -m jaxrl_async train --config=configs/reason.py:device=cpu ...

DIR holds the published train.jsonl and test.jsonl (https://github.com/openai/grade-school-math). `device=accelerator`,
the default, is for one TPU chip of 16 GiB or a GPU of 24: Qwen3-0.6B from the Hugging Face hub, learner and engine in
bfloat16 by turns. `fit` predicts 15.98 GiB on a v5e and 17.1 on a GPU; --config.learner.moment_dtype=bfloat16 and
--config.server.num_slots=16 save 2.3; with `lora` a v5e needs 6.1. `device=cpu` is for two cores: SmolLM2-135M,
with few and short answers, to try the path; it learns nothing in so few steps. Accuracy is not measured on either, and
no accelerator was there.

Another model: --config.model.path=ID --config.tokenizer.path=ID, a hub id or a directory (Gemma 3 1B:
google/gemma-3-1b-it). Its shape is read from its files.

Arguments, after a colon: `smoke` (two steps of a tiny random model), `device=accelerator|cpu`,
`mode=sync|periodic|async`, `lora` (adapters of rank 16 beside a frozen model in bfloat16), `seed=N`.
"""

from jaxrl_async.config import base_config, parse_arg, set_mode

LARGE, SMALL = "Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTION = "{question}\nThink in short steps. End with #### and the answer as a number."


def get_config(arg: str = ""):
    arg = parse_arg(
        arg,
        smoke=False,
        device=("accelerator", "cpu"),
        mode=("async", "sync", "periodic"),
        lora=False,
        seed=0,
    )
    c = base_config()
    c.seed = arg.seed

    c.task.update(name="gsm8k", seed=arg.seed)
    c.task.args = dict(directory="data/gsm8k", template=QUESTION)
    c.learner.update(shared_prompts=True, packing="first_fit", microbatch_rows=1)
    if arg.device == "cpu":
        c.tokenizer.update(kind="huggingface", path=SMALL)
        c.model.update(path=SMALL, num_layers=30, model_dim=576, num_heads=9, num_kv_heads=3)
        c.model.update(head_dim=64, mlp_dim=1536, rope_theta=1e5, norm_eps=1e-5, qk_norm=False)
        c.rollout.update(group_size=4, max_prompt_tokens=128, max_new_tokens=96)
        c.server.num_slots = 48
        c.learner.update(num_steps=8, groups_per_step=4, row_tokens=512, head_chunk_tokens=128)
        c.learner.update(learning_rate=1e-5)
        c.checkpoint.every_steps = 4
        c.evaluate.update(num_prompts=32, num_samples=2)
    else:
        c.task.args.template = f"{QUESTION} /no_think"  # Else Qwen3 thinks at length.
        c.tokenizer.update(kind="huggingface", path=LARGE)
        c.model.update(path=LARGE, num_layers=28, model_dim=1024, num_heads=16, num_kv_heads=8)
        c.model.update(head_dim=128, mlp_dim=3072, rope_theta=1e6, dtype="bfloat16", remat=True)
        c.rollout.update(group_size=8, max_prompt_tokens=320, max_new_tokens=384)
        c.server.update(num_slots=32, start_timeout_secs=600.0)
        c.learner.update(num_steps=200, groups_per_step=16, row_tokens=3584, head_chunk_tokens=512)
        c.learner.update(param_dtype="bfloat16", learning_rate=1e-6, warmup_updates=10)
        c.weights.dtype = "bfloat16"
        c.checkpoint.every_steps = 20
        c.evaluate.update(num_prompts=256, num_samples=4)
    if arg.lora:
        c.model.lora.update(rank=16, alpha=32.0)
        c.learner.update(param_dtype="float32", learning_rate=20 * c.learner.learning_rate)
        if arg.device == "accelerator":
            c.model.lora.base_dtype = "bfloat16"
    c.rollout.request_timeout_secs = 300.0  # A request also waits for a slot of a slow server.
    c.queue.max_running_groups = 3 * c.learner.groups_per_step
    c.server.max_total_tokens = c.rollout.max_prompt_tokens + c.rollout.max_new_tokens

    if arg.smoke:
        c.tokenizer.update(kind="bpe", vocab_size=512, path="")
        c.model.update(path="", num_layers=2, model_dim=64, num_heads=3, num_kv_heads=1)
        c.model.update(head_dim=32, mlp_dim=96, dtype="float32", remat=False)
        c.rollout.update(group_size=4, max_new_tokens=32)
        c.server.max_total_tokens = c.rollout.max_prompt_tokens + 32
        c.learner.update(num_steps=2, groups_per_step=4, row_tokens=512, param_dtype="float32")
        c.weights.dtype, c.checkpoint.every_steps = "float32", 1
        c.evaluate.update(num_prompts=2, num_samples=2)
    set_mode(c, arg.mode, chunk_groups=2)
    return c

"""SmolLM2-135M-Instruct, a pretrained language model, on two CPU cores: sums in words, or GSM8K.

    ./launch/smollm2.sh

or, with the checkpoint that `python launch/smollm2_checkpoint.py checkpoints/SmolLM2-135M-Instruct` writes:

    python -m jaxrl_async train --config=configs/smollm2.py --workdir=runs/smollm2

"What is 17 minus 9? Answer with just the number." The model answers in sentences, often wrong ones, and rarely stops
where it is sure. docs/results.md has the measured cost and accuracy.

Arguments, after a colon: `smoke` (two steps of a tiny random model), `task=sums|gsm8k`, `mode=sync|periodic|async`,
`lora` (adapters of rank 16 beside the frozen model), `seed=N`, `sglang` (a real SGLang server on this machine's CPU in
place of the embedded one; once before: `tests/real/sglang.sh install .venv-servers/sglang`), `vllm` (a real vLLM, by
tests/real/vllm.sh alike). GSM8K also needs
--config.task.args.directory=DIR, which holds the published train.jsonl and test.jsonl.
"""

from jaxrl_async.config import base_config, parse_arg, set_mode

CHECKPOINT = "checkpoints/SmolLM2-135M-Instruct"
SGLANG = (
    "tests/real/sglang.sh serve .venv-servers/sglang --load-format=dummy --model-path={model_path} --host={host} "
    "--port={port} --max-total-tokens=16384 --max-running-requests=64 --context-length=512"
)
VLLM = (
    "tests/real/vllm.sh serve .venv-servers/vllm {model_path} --load-format=dummy --host={host} --port={port} "
    "--max-model-len=512 --max-num-seqs=64"
)
GSM8K = "{question}\nThink in short steps. End with #### and the answer as a number."


def get_config(arg: str = ""):
    arg = parse_arg(
        arg,
        smoke=False,
        task=("sums", "gsm8k"),
        mode=("async", "sync", "periodic"),
        lora=False,
        seed=0,
        sglang=False,
        vllm=False,
    )
    c = base_config()
    c.seed = arg.seed

    c.task.seed = arg.seed
    if arg.task == "sums":
        c.task.name = "word_sums"
        c.task.args = dict(max_number=20, num_test=256, seed=0)
        c.rollout.update(max_prompt_tokens=56, max_new_tokens=24)
        c.learner.update(num_steps=60, groups_per_step=8, microbatch_rows=1, row_tokens=512)
    else:
        c.task.name = "gsm8k"
        c.task.args = dict(directory="data/gsm8k", template=GSM8K)
        c.rollout.update(max_prompt_tokens=160, max_new_tokens=160, request_timeout_secs=300.0)
        c.rollout.drop_equal_rewards = True  # At first seven of eight groups have no right answer.
        c.learner.update(num_steps=60, groups_per_step=8, microbatch_rows=1, row_tokens=1536)
    c.tokenizer.update(kind="huggingface", path=CHECKPOINT)
    c.model.update(path=CHECKPOINT, num_layers=30, model_dim=576, num_heads=9, num_kv_heads=3)
    c.model.update(head_dim=64, mlp_dim=1536, rope_theta=1e5, norm_eps=1e-5, qk_norm=False)

    c.queue.max_running_groups = 3 * c.learner.groups_per_step
    c.server.update(
        num_slots=64, max_total_tokens=c.rollout.max_prompt_tokens + c.rollout.max_new_tokens
    )
    c.learner.update(shared_prompts=True, packing="first_fit", head_chunk_tokens=128)
    c.learner.update(learning_rate=2e-4 if arg.lora else 1e-5, warmup_updates=4)
    c.model.lora.update(rank=16 if arg.lora else 0, alpha=32.0)
    c.checkpoint.update(every_steps=20, in_background=False)
    c.evaluate.update(num_prompts=256, num_samples=4)

    if (
        arg.sglang or arg.vllm
    ):  # A CPU takes its time: a server starts slowly, and so does its first answer.
        command = SGLANG if arg.sglang else VLLM
        c.server.update(command=command, start_timeout_secs=300.0)
        c.rollout.request_timeout_secs, c.evaluate.timeout_secs = 300.0, 600.0
    if arg.smoke:
        c.tokenizer.update(kind="bpe", vocab_size=512, path="")
        c.model.update(path="", num_layers=2, model_dim=64, num_heads=3, num_kv_heads=1, mlp_dim=96)
        c.learner.update(num_steps=2, groups_per_step=4)
        c.evaluate.num_prompts = 32
    set_mode(c, arg.mode, chunk_groups=2)
    return c

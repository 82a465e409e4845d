"""Two-digit addition with a REAL SGLang server on this machine's CPU: the quickstart's run, another engine.

    tests/real/sglang.sh install .venv-servers/sglang       # once, 3 GB; Python 3.11
    python -m jaxrl_async train --config=configs/arithmetic_sglang.py --workdir=runs/sglang
    python -m jaxrl_async evaluate --workdir=runs/sglang

Run it from the repository's root. The server is started, watched and restarted by `train`; it starts without weights
and gets them by the first push. Heads of 128, so that SGLang-JAX takes the same model (arithmetic_sglang_jax.py).

Arguments, after a colon: `smoke` (two steps), `mode=sync|periodic|async`, `seed=N`, `every=N` (steps between pushes,
with a staleness bound of N + 1), `embedded` (the same run on the embedded server, to compare with), `vllm` (on a real
vLLM: `tests/real/vllm.sh install .venv-servers/vllm` once, 3.5 GB).
"""

from jaxrl_async.config import base_config, parse_arg, set_mode

COMMAND = (
    "tests/real/sglang.sh serve .venv-servers/sglang --load-format=dummy --model-path={model_path} "
    "--host={host} --port={port} --max-total-tokens=8192 --context-length=64"
)
VLLM = (
    "tests/real/vllm.sh serve .venv-servers/vllm {model_path} --load-format=dummy --host={host} --port={port} "
    "--max-model-len=64"
)


def get_config(arg: str = ""):
    arg = parse_arg(arg, smoke=False, mode="async", seed=0, every=1, embedded=False, vllm=False)
    c = base_config()
    c.seed = arg.seed

    c.task.seed = arg.seed
    c.task.args = dict(num_digits=2, num_test=512, forget_carry=0.7, seed=0)
    c.tokenizer.alphabet = "0123456789+="
    c.model.update(num_layers=2, model_dim=64, num_heads=4, num_kv_heads=2, head_dim=128)
    c.warm_start.update(num_steps=20 if arg.smoke else 1500, learning_rate=1.5e-3)

    # A CPU takes its time: the server starts slowly, and so does its first answer.
    c.queue.max_staleness = arg.every + 1
    c.server.command = "" if arg.embedded else VLLM if arg.vllm else COMMAND
    c.server.update(decode_chunk=4, max_total_tokens=16, start_timeout_secs=300.0)
    c.rollout.update(max_prompt_tokens=8, max_new_tokens=4, request_timeout_secs=300.0)
    c.learner.update(
        num_steps=2 if arg.smoke else 40,
        groups_per_step=8 if arg.smoke else 64,
        microbatch_rows=64,
        row_tokens=48,
        learning_rate=6e-4,
    )
    c.weights.push_every_steps = arg.every
    c.evaluate.timeout_secs = 120.0

    set_mode(c, arg.mode, chunk_groups=16)
    return c

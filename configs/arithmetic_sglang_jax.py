"""Two-digit addition with a REAL SGLang-JAX server on this machine's CPU: the quickstart's run, another engine.

    tests/real/sglang_jax.sh install .venv-servers/sglang_jax       # once, 2 GB; Python 3.12
    python -m jaxrl_async train --config=configs/arithmetic_sglang_jax.py --workdir=runs/sglang_jax
    python -m jaxrl_async evaluate --workdir=runs/sglang_jax

Run it from the repository's root. The server (jaxrl_async/extras/sglang_jax/server.py, in an environment of its
own) is started, watched and restarted by `train`; it starts without weights and gets them by the first push. On the
CPU it needs heads of a multiple of 128.

Arguments, after a colon: `smoke` (two steps), `mode=sync|periodic|async`, `seed=N`, `every=N` (steps between pushes,
with a staleness bound of N + 1), `embedded` (the same run on the embedded server, to compare with).
"""

from jaxrl_async.config import base_config, parse_arg, set_mode

COMMAND = (
    "tests/real/sglang_jax.sh serve .venv-servers/sglang_jax --load-format=dummy "
    "--model-path={model_path} --weights-root={weights} --host={host} --port={port} --context-length=64 "
    # Its attention on the CPU costs as much as the whole pool of KV, used or not.
    "--max-total-tokens=2048"
)


def get_config(arg: str = ""):
    arg = parse_arg(arg, smoke=False, mode="async", seed=0, every=1, embedded=False)
    c = base_config()
    c.seed = arg.seed

    c.task.seed = arg.seed
    c.task.args = dict(num_digits=2, num_test=512, forget_carry=0.7, seed=0)
    c.tokenizer.alphabet = "0123456789+="
    c.model.update(num_layers=2, model_dim=64, num_heads=4, num_kv_heads=2, head_dim=128)
    c.warm_start.update(num_steps=20 if arg.smoke else 1500, learning_rate=1.5e-3)

    # A CPU takes its time: the server starts slowly, and so does its first answer.
    c.queue.max_staleness = arg.every + 1
    c.server.command = "" if arg.embedded else COMMAND
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

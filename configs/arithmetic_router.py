"""Two-digit addition with SGLang servers of your own behind SGLang's router: requests go through it, weights past it.

    python -m jaxrl_async init --config=configs/arithmetic_router.py --out=models/addition
    for port in 30001 30002; do
      tests/real/sglang.sh serve .venv-servers/sglang --model-path=models/addition --port=$port \\
          --context-length=64 --max-total-tokens=8192 &
    done
    tests/real/router.sh serve .venv-servers/router --host=127.0.0.1 --port=30000 \\
        --worker-urls http://127.0.0.1:30001 http://127.0.0.1:30002 &
    python -m jaxrl_async train --config=configs/arithmetic_router.py --workdir=runs/router

Run it from the repository's root, after `tests/real/sglang.sh install .venv-servers/sglang` and `tests/real/router.sh
install .venv-servers/router`. On GPUs the servers are `python -m sglang.launch_server`. Nothing here starts, watches
or restarts them: a worker that died and came back is given the current version before it gets requests.

Arguments, after a colon: `smoke` (two steps), `mode=sync|periodic|async`, `seed=N`.
"""

from jaxrl_async.config import base_config, parse_arg, set_mode


def get_config(arg: str = ""):
    arg = parse_arg(arg, smoke=False, mode="async", seed=0)
    c = base_config()
    c.seed = arg.seed

    c.task.seed = arg.seed
    c.task.args = dict(num_digits=2, num_test=512, forget_carry=0.7, seed=0)
    c.tokenizer.alphabet = "0123456789+="
    c.model.update(num_layers=2, model_dim=64, num_heads=4, num_kv_heads=2, head_dim=128)
    c.warm_start.update(num_steps=20 if arg.smoke else 1500, learning_rate=1.5e-3)

    # One router for requests; pauses, weights and aborts go to each server behind it.
    c.server.addresses = ("http://127.0.0.1:30000",)
    c.server.control_addresses = ("http://127.0.0.1:30001", "http://127.0.0.1:30002")
    c.server.update(max_total_tokens=16, start_timeout_secs=300.0)
    # A CPU takes its time.
    c.rollout.update(max_prompt_tokens=8, max_new_tokens=4, request_timeout_secs=300.0)
    c.learner.update(
        num_steps=2 if arg.smoke else 40,
        groups_per_step=8 if arg.smoke else 64,
        microbatch_rows=64,
        row_tokens=48,
        learning_rate=6e-4,
        lease_timeout_secs=900.0,
    )
    c.evaluate.timeout_secs = 120.0

    set_mode(c, arg.mode, chunk_groups=16)
    return c

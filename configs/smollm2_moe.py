"""SmolLM2-135M-Instruct as a mixture of 8 experts, 2 for each token, on two CPU cores: sums in words, or GSM8K.

    python launch/smollm2_checkpoint.py checkpoints/SmolLM2-135M-Instruct
    python launch/upcycle.py checkpoints/SmolLM2-135M-Instruct checkpoints/SmolLM2-8x135M
    python -m jaxrl_async train --config=configs/smollm2_moe.py --workdir=runs/smollm2_moe

Experts begin as copies of the layer's MLP, so the first answers are the dense model's. All 692M parameters are trained
in float32. Adafactor keeps no moments, and in one process the engine reads the learner's own arrays: docs/experts.md
has memory, time and reward.

Arguments, after a colon: `smoke` (two steps of a tiny random mixture), and `task`, `mode` and `seed` of
configs/smollm2.py.
"""

import pathlib
import runpy

DENSE = runpy.run_path(str(pathlib.Path(__file__).with_name("smollm2.py")))


def get_config(arg: str = ""):
    c = DENSE["get_config"](arg)
    mixture = dict(family="mixtral", num_experts=8, experts_per_token=2)
    c.model.update(**mixture, expert_mlp_dim=c.model.mlp_dim, remat=True)
    if c.model.path:
        c.model.path = "checkpoints/SmolLM2-8x135M"
    c.supervisor.processes = "one"
    c.learner.update(optimizer="adafactor", learning_rate=2e-5, warmup_updates=0, num_minibatches=1)
    # Cores that other programs use as well answer slowly.
    c.rollout.request_timeout_secs = 300.0
    c.weights.push_every_steps = 1
    return c

"""On a GPU or TPU, skipped elsewhere: offloaded moments, the same bits twice, one process. Kernels: tests/models."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import shapes

from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.models import sharding
from jaxrl_async.runtime.supervisor import in_one_process, visible_devices

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.optimised,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning"),
]
MODEL = dict(
    vocab_size=512, num_layers=2, model_dim=128, num_heads=2, num_kv_heads=1, head_dim=64, mlp_dim=256
)  # fmt: skip
WORK = dict(rows=2, row_tokens=256, prompt=32, completion=32)
TWICE = """
import hashlib, sys
import jax, numpy as np
sys.path[:0] = ["benchmarks", "tests"]
import test_accelerator
digest = hashlib.sha256()
for leaf in jax.tree.leaves(test_accelerator.updated(False)):
    digest.update(np.asarray(jax.device_get(leaf)).tobytes())
print(digest.hexdigest())
"""


def updated(offload_moments, num_updates=3):
    """The state after some updates."""
    config = shapes.model_config(MODEL)
    step = shapes.make_train_step(config, learning_rate=1e-3, offload_moments=offload_moments)
    state = step.init(sharding.init_sharded(config, shapes.one_device(), seed=0))
    batches = shapes.full_rows(WORK, vocab_size=512, num_microbatches=2, versions=(1,))
    accumulator = step.zero_accumulator()
    for _ in range(num_updates):
        for batch in batches:
            accumulator = step.accumulate(state.params, accumulator, batch, None, 2)
        state, accumulator, metrics = step.update(state, accumulator)
        assert metrics["finite"] == 1
    return state


def test_offloaded_moments_lie_with_the_host_and_the_updates_are_the_same():
    kept, offloaded = updated(False), updated(True)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(offloaded.opt_state[0].mu)}
    assert kinds == {"pinned_host"}
    for a, b in zip(*(jax.tree.leaves(s.params) for s in (kept, offloaded)), strict=True):
        # Adam's first updates are the sign of a gradient, which atomic sums change near zero.
        assert np.mean(np.abs(jax.device_get(a - b)) > 1e-5) < 1e-3


def test_a_deterministic_learner_has_the_same_bits_in_two_processes():
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"
    environment = os.environ | {"XLA_FLAGS": flags}
    digests = [
        subprocess.run(
            [sys.executable, "-c", TWICE],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for _ in range(2)
    ]
    assert digests[0] == digests[1] and len(digests[0].strip()) == 64


def test_a_single_device_has_all_roles_in_one_process():
    found = visible_devices()
    if found[1] != 1:
        pytest.skip(f"{found[1]} devices")
    assert in_one_process(settings_of(load_config("configs/quickstart.py")), found)

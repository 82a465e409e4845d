"""One process of a learner that trains on groups made up from their index, for the tests of several processes.

    python tests/learner_process.py DIRECTORY PROCESS NUM_PROCESSES COORDINATOR MESH FIRST_STEP

Process 0 leaves DIRECTORY/rows.json, the metrics of every step; all leave checkpoints/ and weights/.
"""

import functools
import json
import pathlib
import sys

import jax
import numpy as np
import optax
from small_learner import empty_status

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.learner import learner, packing, processes
from jaxrl_async.learner.checkpoint import Checkpoints
from jaxrl_async.learner.train_step import TrainStep
from jaxrl_async.learner.versions import Delay, Versions
from jaxrl_async.learner.warm_start import warm_start
from jaxrl_async.metrics import Timers
from jaxrl_async.models import sharding, transformer
from jaxrl_async.objectives import advantages
from jaxrl_async.queue import wire
from jaxrl_async.queue.records import ResumePoint, Share
from jaxrl_async.types import NOT_SAMPLED, Chunk, Group, Trajectory
from jaxrl_async.weights.store import WeightStore

MODEL = transformer.ModelConfig(  # of configs/quickstart.py
    vocab_size=14,
    num_layers=2,
    model_dim=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    mlp_dim=192,
    rope_theta=10_000.0,
    rope_scaling=None,
    norm_eps=1e-6,
    qk_norm=True,
    attention_bias=False,
    tied_embeddings=True,
    dtype="float32",
    remat=False,
)
GROUPS, GROUP_SIZE, NUM_MINIBATCHES, NUM_STEPS = 10, 4, 2, 6
MICROBATCH_ROWS, ROW_TOKENS = 4, 16
NO_RESUME_POINT = ResumePoint(0, 0, (), {}, {})


def make_group(index: int, version: int) -> Group:
    """Trajectories of 5 to 14 tokens, 3 of them their prompt, with random rewards."""
    rng = np.random.default_rng(index)
    prompt = rng.integers(0, MODEL.vocab_size, 3)

    def trajectory():
        length = int(rng.integers(5, 15))
        mask = np.arange(length) >= 3
        completion = rng.integers(0, MODEL.vocab_size, length - 3)
        return Trajectory(
            tokens=np.concatenate([prompt, completion]).astype(np.int32),
            logprobs=np.where(mask, -rng.uniform(2, 3, length), 0).astype(np.float32),
            versions=np.where(mask, version, NOT_SAMPLED).astype(np.int32),
            mask=mask,
            prompt_length=3,
            reward=float(rng.random()),
            finish_reason="length" if length > 12 else "stop",
        )

    return Group(index, 0, tuple(trajectory() for _ in range(GROUP_SIZE)))


class Queue:
    """Gives every process the same steps, with the tokens of its share."""

    def __init__(self, share: Share):
        self._share = share

    def lease(self, step, timeout_secs, should_stop):
        groups = [
            make_group(i, max(0, step - 2)) for i in range(step * GROUPS, (step + 1) * GROUPS)
        ]
        own = self._share.of_chunk(GROUPS)
        yield Chunk(
            step, 0, tuple(g if i in own else outline(g) for i, g in enumerate(groups)), True
        )

    def commit(self, step):
        return NO_RESUME_POINT

    def status(self):
        return empty_status()


def outline(group: Group) -> Group:
    return wire.decode_outline(wire.encode_outline(wire.encode_group(group)))


class Servers:
    """A publisher without servers: writes at once."""

    def publish(self, version, write, *, timeout_secs, resume_point, run_epoch):
        write()

    def wait(self, version, *, timeout_secs, should_stop): ...

    def check(self): ...

    def metrics(self):
        return {}


class Rows:
    def __init__(self):
        self.rows = []

    def write(self, step, row):
        self.rows.append({"step": step} | {name: float(value) for name, value in row.items()})


@functools.cache  # Compiled once for all runs of a process.
def make_train_step(mesh: jax.sharding.Mesh) -> TrainStep:
    return TrainStep(
        MODEL,
        mesh,
        loss=LossConfig(anchor="recompute", kl="k3", kl_coefficient=0.1),
        temperature=1.0,
        optimizer=optax.adam(1e-3, b2=0.95, eps=1e-6),
        max_grad_norm=1.0,
        num_minibatches=NUM_MINIBATCHES,
        head_chunk_tokens=None,
    )


def run(directory, *, process=0, num_processes=1, mesh_shape=(1, 1, 1), first_step=1):
    """Trains from first_step to NUM_STEPS; returns a row of metrics for each step.

    Args:
      directory: of checkpoints and weights; a later first_step restores the checkpoint before it.
      process: this one.
      num_processes: of the learner.
      mesh_shape: data, fsdp and tensor.
      first_step: ≥ 1.
    """
    directory = pathlib.Path(directory)
    part = {"process": process, "num_processes": num_processes}
    mesh = sharding.make_mesh(*mesh_shape, jax.devices()[: int(np.prod(mesh_shape))])
    train_step = make_train_step(mesh)
    checkpoints = Checkpoints(directory / "checkpoints", keep=10)
    if first_step == 1:
        rng = np.random.default_rng(0)
        params = warm_start(
            MODEL,
            mesh,
            sharding.init_sharded(MODEL, mesh, seed=0),
            [(rng.integers(1, 14, 3), np.append(rng.integers(1, 14, 4), 0)) for _ in range(20)],
            num_steps=4,
            batch_size=8,
            row_tokens=8,
            learning_rate=1e-3,
            head_chunk_tokens=None,
            seed=0,
            report=lambda step, loss: None,
        )
        state = train_step.init(params)
        checkpoints.save(0, state, NO_RESUME_POINT.to_json())
    else:
        state, _ = checkpoints.restore(first_step - 1, train_step.abstract_state())
    reference, _ = checkpoints.restore(0, train_step.abstract_state())
    metrics = Rows()
    learner.train(
        state,
        first_step=first_step,
        schedule=learner.Schedule(
            num_steps=NUM_STEPS,
            push_every_steps=1,
            wait_for_push=True,
            checkpoint_every_steps=3,
            num_minibatches=NUM_MINIBATCHES,
            lease_timeout_secs=10.0,
            max_failures=0,
            budgets={},
            fail_on_recompile=True,
        ),
        train_step=train_step,
        pack=packing.Packer(
            **part,
            microbatch_rows=MICROBATCH_ROWS,
            row_tokens=ROW_TOKENS,
            policy="first_fit",
            shared_prompts=True,
        ),
        padding=packing.empty_batch(MICROBATCH_ROWS // num_processes, ROW_TOKENS),
        advantages=advantages.grpo,
        queue=Queue(Share(**part, num_minibatches=NUM_MINIBATCHES)),
        publisher=Versions(
            Servers(),
            WeightStore(directory / "weights", keep=10),
            config=MODEL,
            dtype="float32",
            timeout_secs=60.0,
            delay=Delay(0, uniform=False, seed=0),
            **part,
        ),
        save=lambda step, state, resume_point: checkpoints.save(
            step, state, resume_point.to_json()
        ),
        metrics=metrics,
        timers=Timers(),
        reference=reference.params,
    )
    checkpoints.close()
    return metrics.rows


def main(directory, process, num_processes, coordinator, mesh, first_step):
    process, num_processes = int(process), int(num_processes)
    with processes.joined(
        coordinator=coordinator, process=process, num_processes=num_processes
    ) as found:
        assert found == process
        mesh_shape = tuple(map(int, mesh.split(",")))
        rows = run(
            directory,
            process=process,
            num_processes=num_processes,
            mesh_shape=mesh_shape,
            first_step=int(first_step),
        )
        if process == 0:
            (pathlib.Path(directory) / "rows.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])

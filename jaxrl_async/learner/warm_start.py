"""Warm start: supervised training on demonstrations before RL. The result is version 0.

RL needs a policy that is sometimes right, which random weights never are.
"""

import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
import optax
from flax import nnx

from jaxrl_async.config.settings import WarmStart
from jaxrl_async.learner import packing, train_step
from jaxrl_async.models import sharding, transformer
from jaxrl_async.objectives import masked
from jaxrl_async.types import Batch


def warm_start(
    config: transformer.ModelConfig,
    mesh: jax.sharding.Mesh,
    params: nnx.State,
    demonstrations: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]],
    settings: WarmStart,
    *,
    head_chunk_tokens: int | None,
    seed: int,
    report: Callable[[int, float], None],
) -> nnx.State:
    """Trains on prompts and completions with Adam, in seeded epochs.

        loss = −mean over the policy's own tokens in the completions of a batch of log π(token)

    Args:
      params: float32, consumed.
      demonstrations: prompt tokens int [P], completion tokens int [R] with their stop token, and which of these are
        the policy's own, bool [R]; P ≥ 1, R ≥ 1.
      settings: num_steps (optimizer updates), batch_size (demonstrations per update, one to a row; a multiple of the
        mesh's data · fsdp), row_tokens (length of a row, ≥ P + R) and learning_rate are read.
      head_chunk_tokens: columns whose logits exist at a time; None for all at once.
      seed: of the order of the demonstrations.
      report: called with (step, loss) for each step from 1, one step behind.

    Returns:
      The trained parameters.

    Raises:
      ValueError: no demonstrations, or one that is empty or longer than a row.
      FloatingPointError: the loss of a step is not finite; names the step.
    """
    rows = _rows(demonstrations, settings.row_tokens)
    optimizer = optax.adam(settings.learning_rate, b2=0.99)
    init, step_program = _programs(config, mesh, optimizer, head_chunk_tokens)
    row_sharding = sharding.batch_sharding(mesh)
    opt_state, loss = init(params), None
    for step, chosen in enumerate(
        _epochs(len(demonstrations), settings.batch_size, settings.num_steps, seed), start=1
    ):
        batch = rows.rows(chosen)
        if jax.process_count() > 1:  # A single process leaves it to the jit, which is faster.
            batch = sharding.place(batch, jax.tree.map(lambda _: row_sharding, batch))
        params, opt_state, next_loss = step_program(params, opt_state, batch)
        if loss is not None:  # Read while the next step runs.
            _checked_report(report, step - 1, loss)
        loss = next_loss
    if loss is not None:
        _checked_report(report, settings.num_steps, loss)
    return params


def _rows(demonstrations, row_tokens) -> Batch:
    """A batch with one demonstration per row."""
    if not demonstrations:
        raise ValueError("warm start needs demonstrations, got none")
    rows = packing.empty_batch(len(demonstrations), row_tokens)
    for i, (prompt, completion, own) in enumerate(demonstrations):
        start, end = len(prompt), len(prompt) + len(completion)
        if not 0 < start < end <= row_tokens:
            raise ValueError(
                f"demonstration {i} has {len(prompt)} + {len(completion)} tokens: prompt and completion must not "
                f"be empty, and at most row_tokens {row_tokens} together"
            )
        rows.tokens[i, :start], rows.tokens[i, start:end] = prompt, completion
        rows.mask[i, start:end] = own
        rows.segment_ids[i, :end] = 1
    column = np.arange(row_tokens)
    rows.positions[:] = column
    rows.predictor_index[:] = np.maximum(column - 1, 0)
    return rows


def _epochs(num_demonstrations, batch_size, num_steps, seed):
    """Indexes [batch_size] of each step, from consecutive shuffled epochs."""
    rng = np.random.default_rng(seed)
    waiting = np.zeros(0, np.int64)
    for _ in range(num_steps):
        while len(waiting) < batch_size:
            waiting = np.concatenate([waiting, rng.permutation(num_demonstrations)])
        yield waiting[:batch_size]
        waiting = waiting[batch_size:]


def _programs(config, mesh, optimizer, head_chunk_tokens):
    """The jitted params → optimizer state, and the jitted (params, optimizer state, batch) → both and the loss."""

    def loss_of(params, batch):
        logprobs, _ = train_step.policy_logprobs(
            config, params, batch, temperature=1.0, head_chunk_tokens=head_chunk_tokens
        )
        return -masked.total(logprobs, batch.mask) / batch.mask.sum()

    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    state, _ = train_step.make_shardings(config, mesh, optimizer)
    init = jax.jit(optimizer.init, in_shardings=(state.params,), out_shardings=state.opt_state)
    return init, jax.jit(
        step,
        in_shardings=(state.params, state.opt_state, sharding.batch_sharding(mesh)),
        out_shardings=(state.params, state.opt_state, state.updates),
        donate_argnums=(0, 1),
    )


def _checked_report(report, step, loss):
    if not math.isfinite(value := float(loss)):
        raise FloatingPointError(f"warm start: the loss of step {step} is {value}")
    report(step, value)

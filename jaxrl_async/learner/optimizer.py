"""The optimizer of the learner. Clipping is in `update`, which needs the norm for its flag."""

import optax


def make_optimizer(
    *,
    learning_rate: float,
    warmup_updates: int,
    decay_updates: int | None,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
) -> optax.GradientTransformation:
    """AdamW under a schedule of the learning rate; Adam where weight_decay is 0.

        lr(n) = learning_rate · min(1, (n + 1) / warmup_updates),    n updates made before
        then, with decay_updates, down a half cosine to 0 at that update

    "Decoupled Weight Decay Regularization", Loshchilov, Hutter, arXiv 1711.05101.

    Args:
      learning_rate: the peak, > 0.
      warmup_updates: optimizer updates of linear warm-up, ≥ 0; the first one already moves.
      decay_updates: the update at which the rate is 0, > warmup_updates; None for a constant rate.
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the root of the second moment.
      weight_decay: ≥ 0, per unit of learning rate, on every parameter.

    Raises:
      ValueError: decay_updates ends within the warm-up.
    """
    if decay_updates is not None and decay_updates <= warmup_updates:
        raise ValueError(
            f"decay_updates {decay_updates} must be greater than warmup_updates {warmup_updates}"
        )
    schedule = _schedule(learning_rate, warmup_updates, decay_updates)
    return optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)


def _schedule(learning_rate, warmup_updates, decay_updates):
    if decay_updates is None:
        after = optax.constant_schedule(learning_rate)
    else:
        after = optax.cosine_decay_schedule(learning_rate, decay_updates - warmup_updates)
    if not warmup_updates:
        return after
    first = learning_rate / warmup_updates
    warmup = optax.linear_schedule(first, learning_rate + first, warmup_updates)
    return optax.join_schedules([warmup, after], [warmup_updates])

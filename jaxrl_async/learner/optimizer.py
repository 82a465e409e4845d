"""The optimizer of the learner. Clipping is in `update`, which needs the norm for its flag."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxrl_async.config.settings import Learner


def learning_rate(settings: Learner) -> optax.Schedule:
    """Updates made before, n → the learning rate of an update: a linear warm-up, then the schedule.

        lr(n) = learning_rate · (n + 1) / warmup_updates                      n < warmup_updates
        lr(n) = final + (learning_rate − final) · f(x),    x the share of the other updates that is over
                f = 1 − x (linear) or (1 + cos πx) / 2 (cosine); constant: learning_rate

    "SGDR", Loshchilov, Hutter, arXiv 1608.03983, for the cosine, here without restarts.

    Args:
      settings: learning_rate, warmup_updates, schedule, final_learning_rate, num_steps and num_minibatches are read.
        The first update of the warm-up already moves.
    """
    peak, floor = settings.learning_rate, settings.final_learning_rate
    updates = settings.warmup_updates
    rest = settings.num_updates - updates
    if settings.schedule == "linear":
        schedule = optax.linear_schedule(peak, floor, rest)
    elif settings.schedule == "cosine":
        schedule = optax.cosine_decay_schedule(peak, rest, alpha=floor / peak if peak else 0.0)
    else:
        schedule = optax.constant_schedule(peak)
    if updates:
        warmup = optax.linear_schedule(peak / updates, peak + peak / updates, updates)
        schedule = optax.join_schedules([warmup, schedule], [updates])
    return schedule


def make_optimizer(settings: Learner) -> optax.GradientTransformation:
    """The optimizer of the settings; its state has the layout of its parameters wherever it has their shapes.

    adamw: "Decoupled Weight Decay Regularization", Loshchilov, Hutter, arXiv 1711.05101; Adam where weight_decay is 0.
    muon: "Muon is Scalable for LLM Training", Liu et al., arXiv 2502.16982, with its scale of 0.2, so that learning
      rates of AdamW suit it; for the kernels and adapters of layers. The rest has AdamW.
    adafactor: "Adafactor", Shazeer, Stern, arXiv 1804.04235, without momentum; the learning rate is absolute.
    sgd: with heavy-ball momentum.

    Args:
      settings: those of `learning_rate` are read, and optimizer, momentum, adam_b1, adam_b2, adam_eps, moment_dtype and
        weight_decay. Weight decay is per unit of learning rate, on every parameter.
    """
    return OPTIMIZERS[settings.optimizer](learning_rate(settings), settings)


def map_state(
    optimizer: optax.GradientTransformation,
    of_param: Callable[..., Any],
    opt_state: Any,
    *rest: Any,
    otherwise: Callable[[Any], Any],
) -> Any:
    """An optimizer's state with `of_param(leaf, *parts of rest)` where it has a parameter's, else `otherwise(leaf)`."""

    def is_masked(leaf: Any) -> bool:  # Another part of the optimizer has the parameter.
        return isinstance(leaf, optax.MaskedNode)

    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda leaf, *parts: leaf if is_masked(leaf) else of_param(leaf, *parts),
        opt_state,
        *rest,
        transform_non_params=otherwise,
        is_leaf=is_masked,
    )


def _adamw(rate: optax.Schedule, settings: Learner) -> optax.GradientTransformation:
    return optax.adamw(
        rate,
        b1=settings.adam_b1,
        b2=settings.adam_b2,
        eps=settings.adam_eps,
        mu_dtype=settings.moment_dtype,
        weight_decay=settings.weight_decay,
    )


def _muon(rate: optax.Schedule, settings: Learner) -> optax.GradientTransformation:
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)

    def dimensions(params: Any) -> Any:
        # Those of layers are stacked: [L, num_in, num_out], those of experts [L, E, num_in, num_out].
        return jax.tree.map(lambda x: matrix if x.ndim >= 3 else None, params)

    return optax.contrib.muon(
        rate,
        beta=settings.momentum,
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        mu_dtype=settings.moment_dtype,
        adam_b1=settings.adam_b1,
        adam_b2=settings.adam_b2,
        adam_weight_decay=settings.weight_decay,
        muon_weight_dimension_numbers=dimensions,
        consistent_rms=0.2,
    )


def _adafactor(rate: optax.Schedule, settings: Learner) -> optax.GradientTransformation:
    decay = settings.weight_decay
    return optax.adafactor(
        rate,
        multiply_by_parameter_scale=False,
        weight_decay_rate=(lambda n: decay * rate(n)) if decay else None,
    )


def _sgd(rate: optax.Schedule, settings: Learner) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(settings.momentum, accumulator_dtype=settings.moment_dtype),
        optax.add_decayed_weights(settings.weight_decay),
        optax.scale_by_learning_rate(rate),
    )


OPTIMIZERS: dict[str, Callable[[optax.Schedule, Learner], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "muon": _muon,
    "adafactor": _adafactor,
    "sgd": _sgd,
}


def stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """float32 [...] → bfloat16 [...]: one of the two neighbours at random, so that the mean is x.

    Rounded to the nearest, updates below 1/512 of a parameter would change nothing, however many there are.

    "Deep Learning with Limited Numerical Precision", Gupta et al., arXiv 1502.02551.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    bits = (bits + jax.random.bits(key, x.shape, jnp.uint16)) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)

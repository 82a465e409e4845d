"""The three jitted programs of the learner, on a mesh: `score`, `accumulate`, `update`.

Sums go in and one division comes out, so how a minibatch is cut into microbatches, hosts and devices
does not change its gradient. It knows nothing of groups, rewards, queues or time.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxrl_async.models import attention, logprobs, sharding, transformer
from jaxrl_async.objectives import anchors, kl, masked, policy_loss, ratios, surrogates, weights
from jaxrl_async.types import Batch

ANCHORS = ("recompute", "current", "a3po", "behavior")
LAG_BUCKETS = {"0": 0, "1": 1, "2": 2, "3-4": 3, "5-8": 5, "9+": 9}  # name → first staleness
_MEANS = {
    "loss/policy": "loss",
    "policy/ratio": "ratio",
    "policy/clip_fraction": "clipped",
    "policy/dropped_by_cap": "dropped",
    "policy/kl_behavior": "kl_k3",
    "policy/kl_behavior_k1": "kl_k1",
    "policy/entropy": "entropy",
    "staleness/mean": "staleness",
}
_LAG_MEANS = {"ratio": "ratio", "clip_fraction": "clipped", "kl": "kl_k3"}
_SUMS = ("tokens", "weight", "weight_squared", "abs_log_ratio", *_MEANS.values())
_MAXIMA = ("total_ratio", "staleness", "fresh_abs_log_ratio")

jax.tree_util.register_dataclass(Batch)


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What is minimised."""

    anchor: str  # one of ANCHORS
    a3po_fresh: str  # A-3PO's anchor of tokens with staleness 0: "behavior" | "current"
    clip_low: float  # in [0, 1]
    clip_high: float  # ≥ 0
    dual_clip: float | None  # > 1
    behavior_cap: float | None  # > 0 in the modes "mask" and "clamp", None in the others
    behavior_cap_mode: str  # one of objectives.weights.MODES
    temperature: float  # the sampler's, > 0: log-probs are of logits / temperature

    def __post_init__(self):
        for name, known in (
            ("anchor", ANCHORS),
            ("a3po_fresh", ("behavior", "current")),
            ("behavior_cap_mode", weights.MODES),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}; got {getattr(self, name)!r}"
                )
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ValueError(
                f"clip_low must be in [0, 1] and clip_high ≥ 0, got {self.clip_low}, {self.clip_high}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be > 1 or None, got {self.dual_clip}")
        if (self.behavior_cap_mode in ("mask", "clamp")) != (self.behavior_cap is not None):
            raise ValueError(
                "behavior_cap must be a number in the modes 'mask' and 'clamp' and None in the "
                f"others, got {self.behavior_cap} in mode {self.behavior_cap_mode!r}"
            )
        if self.temperature <= 0:
            raise ValueError(f"temperature must be > 0, got {self.temperature}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What an update changes. `update` consumes it: copy what has to outlive the call."""

    params: nnx.State  # float32
    opt_state: optax.OptState
    updates: jax.Array  # int32 [], updates applied so far


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Unnormalised sums over the microbatches of a minibatch. `accumulate` and `update` consume it."""

    grads: nnx.State  # float32, of the summed loss
    sums: jax.Array  # float32 [len(LAG_BUCKETS), len(_SUMS)], over the tokens of the original mask
    maxima: jax.Array  # float32 [len(_MAXIMA)], ≥ 0


class TrainStep:
    """The programs of one model, mesh, loss and optimizer. Each compiles once.

    Batches are of one shape, in NumPy; with several processes, each hands in its own rows.
    """

    def __init__(
        self,
        config: transformer.ModelConfig,
        mesh: jax.sharding.Mesh,
        *,
        loss: LossConfig,
        optimizer: optax.GradientTransformation,
        max_grad_norm: float,
        num_minibatches: int,
        head_chunk_tokens: int | None,
    ):
        """Declares the programs; nothing is compiled yet.

        Args:
          config: the model's shape.
          mesh: from sharding.make_mesh.
          loss: what is minimised.
          optimizer: from optimizer.make_optimizer.
          max_grad_norm: bound on the global norm of a minibatch's gradient, > 0.
          num_minibatches: optimizer updates per step; more than one refuses the anchor 'current'.
          head_chunk_tokens: columns whose logits exist at a time; None for all at once.

        Raises:
          ValueError: anchor 'current' with several minibatches.
        """
        if loss.anchor == "current":
            anchors.current(np.zeros(0), np.zeros(0, bool), num_minibatches=num_minibatches)
        self._config, self._loss, self._optimizer = config, loss, optimizer
        self._max_grad_norm, self._num_minibatches = max_grad_norm, num_minibatches
        self._head_chunk_tokens = head_chunk_tokens
        self._rows = rows = sharding.batch_sharding(mesh)
        # XLA's CPU collectives hang when programs of several devices pile up on few threads.
        self._one_at_a_time = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
        state, accumulator = make_shardings(config, mesh, optimizer)
        everywhere, self._state_shardings = accumulator.sums, state
        # Every output names its sharding: one that came back otherwise would compile again.
        self._init = jax.jit(
            self._init_program,
            in_shardings=(state.params,),
            out_shardings=(state.opt_state, state.updates),
        )
        self._zeros = jax.jit(self._zeros_program, out_shardings=accumulator)
        self._score = jax.jit(
            self._score_program, in_shardings=(state.params, rows), out_shardings=rows
        )
        self._accumulate = jax.jit(
            self._accumulate_program,
            in_shardings=(state.params, accumulator, rows, rows, everywhere),
            out_shardings=accumulator,
            donate_argnums=1,
        )
        self._update = jax.jit(
            self._update_program,
            in_shardings=(state, accumulator),
            out_shardings=(state, accumulator, everywhere),
            donate_argnums=(0, 1),
        )

    def init(self, params: nnx.State) -> TrainState:
        """The state before the first update; the parameters are part of it, not copied."""
        return TrainState(params, *self._init(params))

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of a state: what a checkpoint is restored into."""
        params = transformer.abstract_params(self._config)
        state = TrainState(params, *jax.eval_shape(self._init_program, params))
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            state,
            self._state_shardings,
        )

    def zero_accumulator(self) -> Accumulator:
        """The accumulator of a minibatch of which nothing was seen yet."""
        return self._zeros()

    def score(self, params: nnx.State, batch: Batch) -> jax.Array:
        """Log-probs of the batch's tokens at these weights, without a gradient.

        Returns:
          float32 [B, T], nats; finite but meaningless where the mask is False.
        """
        return self._serialise(self._score(params, self._place(batch)))

    def anchor(self, params: nnx.State, batch: Batch) -> jax.Array | None:
        """What `accumulate` needs as proximal_logprobs, at the weights the step starts from.

        Returns:
          `score` where the anchor is 'recompute'; None, and no work, elsewhere.
        """
        return self.score(params, batch) if self._loss.anchor == "recompute" else None

    def accumulate(
        self,
        params: nnx.State,
        accumulator: Accumulator,
        batch: Batch,
        proximal_logprobs: jax.Array | None,
        policy_version: int,
    ) -> Accumulator:
        """Adds a microbatch's gradient of the summed loss, and its sums and maxima.

        Args:
          params: the weights to differentiate at.
          accumulator: consumed.
          batch: one microbatch.
          proximal_logprobs: from `anchor`, at the weights the step started from.
          policy_version: v_θ of the step, s − 1.
        """
        version = np.int32(policy_version)
        return self._serialise(
            self._accumulate(params, accumulator, self._place(batch), proximal_logprobs, version)
        )

    def update(
        self, state: TrainState, accumulator: Accumulator
    ) -> tuple[TrainState, Accumulator, dict[str, jax.Array]]:
        """Divides by the minibatch's token count, clips, and applies the optimizer.

        Args:
          state: consumed.
          accumulator: consumed.

        Returns:
          The next state, or the same numbers where the loss or the gradient norm is not finite (a
          minibatch without a token included); the accumulator at zero; the minibatch's metrics, float32
          [] on the device, by the names of jaxrl_async.metrics, and beside them "finite" (1 or 0) and
          "tokens" (the denominator). mismatch/ is about the weights that were differentiated at: those
          of policy_version in a step's first minibatch only.
        """
        return self._serialise(self._update(state, accumulator))

    def num_compilations(self) -> int:
        """Programs compiled so far: at most one each of init, zeros, score, accumulate, update."""
        programs = (self._init, self._zeros, self._score, self._accumulate, self._update)
        return sum(program._cache_size() for program in programs)

    def _place(self, batch):
        if jax.process_count() == 1:
            return batch  # The jit places NumPy arrays, four times faster than device_put.
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self._rows, x), batch)

    def _serialise(self, outputs):
        return jax.block_until_ready(outputs) if self._one_at_a_time else outputs

    def _init_program(self, params):
        return self._optimizer.init(params), jnp.zeros((), jnp.int32)

    def _zeros_program(self):
        grads = jax.tree.map(jnp.zeros_like, transformer.abstract_params(self._config))
        sums = jnp.zeros((len(LAG_BUCKETS), len(_SUMS)))
        return Accumulator(grads, sums, jnp.zeros(len(_MAXIMA)))

    def _score_program(self, params, batch):
        return self._logprobs_and_entropy(params, batch)[0]

    def _accumulate_program(self, params, accumulator, batch, proximal_logprobs, policy_version):
        grads, (sums, maxima) = jax.grad(self._summed_loss, has_aux=True)(
            params, batch, proximal_logprobs, policy_version
        )
        return Accumulator(
            jax.tree.map(jnp.add, accumulator.grads, grads),
            accumulator.sums + sums,
            jnp.maximum(accumulator.maxima, maxima),
        )

    def _update_program(self, state, accumulator):
        sums = dict(zip(_SUMS, accumulator.sums.sum(axis=0), strict=True))
        grads = jax.tree.map(lambda g: g / sums["tokens"], accumulator.grads)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(sums["loss"] / sums["tokens"]) & jnp.isfinite(grad_norm)
        scale = jnp.minimum(1.0, self._max_grad_norm / grad_norm)
        updates, opt_state = self._optimizer.update(
            jax.tree.map(lambda g: g * scale, grads), state.opt_state, state.params
        )
        params = optax.apply_updates(state.params, updates)
        moved = TrainState(params, opt_state, state.updates + 1)
        state = jax.tree.map(lambda new, kept: jnp.where(finite, new, kept), moved, state)
        metrics = _metrics(accumulator.sums, accumulator.maxima)
        metrics |= {"policy/grad_norm": grad_norm, "finite": finite.astype(jnp.float32)}
        return state, jax.tree.map(jnp.zeros_like, accumulator), metrics

    def _summed_loss(self, params, batch, proximal_logprobs, policy_version):
        logprobs, entropy = self._logprobs_and_entropy(params, batch)
        staleness = jnp.where(batch.mask, policy_version - batch.token_versions, 0)
        anchor = self._anchor(logprobs, proximal_logprobs, staleness, batch)
        loss = policy_loss.policy_loss(
            logprobs,
            batch.behavior_logprobs,
            anchor,
            batch.advantages,
            batch.mask,
            clip_low=self._loss.clip_low,
            clip_high=self._loss.clip_high,
            behavior_cap=self._loss.behavior_cap,
            behavior_cap_mode=self._loss.behavior_cap_mode,
            dual_clip=self._loss.dual_clip,
        )
        measured = _measure(self._loss, batch, logprobs, entropy, anchor, staleness, loss)
        return jnp.sum(loss), jax.lax.stop_gradient(measured)

    def _logprobs_and_entropy(self, params, batch):
        return policy_logprobs(
            self._config,
            params,
            batch,
            temperature=self._loss.temperature,
            head_chunk_tokens=self._head_chunk_tokens,
        )

    def _anchor(self, logprobs, proximal_logprobs, staleness, batch):
        match self._loss.anchor:
            case "recompute":
                return anchors.recompute(proximal_logprobs, batch.mask)
            case "current":
                return anchors.current(logprobs, batch.mask, num_minibatches=self._num_minibatches)
            case "behavior":
                return anchors.behavior(batch.behavior_logprobs, batch.mask)
            case "a3po":
                return anchors.a3po(
                    logprobs,
                    batch.behavior_logprobs,
                    staleness,
                    batch.mask,
                    fresh=self._loss.a3po_fresh,
                )


def make_shardings(
    config: transformer.ModelConfig,
    mesh: jax.sharding.Mesh,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Accumulator]:
    """A NamedSharding for each array: what has a parameter's shape lies where that parameter lies."""
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    abstract = transformer.abstract_params(config)
    params = sharding.param_shardings(mesh, abstract)
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, of_param: of_param,
        jax.eval_shape(optimizer.init, abstract),
        params,
        transform_non_params=lambda _: everywhere,
    )
    return TrainState(params, opt_state, everywhere), Accumulator(params, everywhere, everywhere)


def policy_logprobs(
    config: transformer.ModelConfig,
    params: nnx.State,
    batch: Batch,
    *,
    temperature: float,
    head_chunk_tokens: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies of a batch's tokens, [B, T] in float32, under the parameters."""
    model = nnx.merge(transformer.graphdef(config), params)
    hidden = model(batch.tokens, batch.positions, attention.causal_mask(batch.segment_ids))
    return logprobs.token_logprobs(
        model,
        hidden,
        batch.tokens,
        batch.predictor_index,
        temperature=temperature,
        chunk_tokens=head_chunk_tokens,
    )


def _measure(loss_config, batch, logprobs, entropy, anchor, staleness, loss):
    """The sums and maxima of a microbatch, in the order of LAG_BUCKETS, _SUMS and _MAXIMA."""
    mask, behavior = batch.mask, batch.behavior_logprobs
    abs_log_ratio = jnp.abs(logprobs - behavior)
    ratio = ratios.token(logprobs, anchor, mask)
    clipped = surrogates.is_clipped(
        ratio, batch.advantages, clip_low=loss_config.clip_low, clip_high=loss_config.clip_high
    )
    weight = weights.capped(
        anchor - masked.keep(behavior, mask),
        cap=loss_config.behavior_cap,
        mode=loss_config.behavior_cap_mode,
    )
    of_token = {
        "tokens": mask,
        "loss": loss,
        "ratio": ratio,
        "clipped": clipped,
        "weight": weight,
        "weight_squared": jnp.square(weight),
        "abs_log_ratio": abs_log_ratio,
        "dropped": weight == 0,
        "kl_k1": kl.k1(behavior, logprobs, mask),
        "kl_k3": kl.k3(behavior, logprobs, mask),
        "entropy": entropy,
        "staleness": staleness,
    }
    largest = {
        "total_ratio": ratios.token(logprobs, behavior, mask),
        "staleness": staleness,
        "fresh_abs_log_ratio": masked.keep(abs_log_ratio, staleness == 0),
    }
    values = jnp.stack([masked.keep(of_token[name], mask) for name in _SUMS], axis=-1)
    bucket = sum(staleness >= first for first in list(LAG_BUCKETS.values())[1:])
    members = [jnp.where(bucket[..., None] == i, values, 0.0) for i in range(len(LAG_BUCKETS))]
    return (
        jnp.stack([member.sum(axis=(0, 1)) for member in members]),
        jnp.stack([masked.largest(largest[name], mask) for name in _MAXIMA]),
    )


def _metrics(sums, maxima):
    """The metrics of a minibatch, by their public names."""
    total = dict(zip(_SUMS, sums.sum(axis=0), strict=True))
    metrics = {name: total[key] / total["tokens"] for name, key in _MEANS.items()}
    metrics |= {
        "policy/ess": _effective_share(total),
        "policy/max_ratio": maxima[_MAXIMA.index("total_ratio")],
        "staleness/max": maxima[_MAXIMA.index("staleness")],
        "tokens": total["tokens"],
    }
    for name, row in zip(LAG_BUCKETS, sums, strict=True):
        lag = dict(zip(_SUMS, row, strict=True))
        tokens = jnp.maximum(lag["tokens"], 1.0)  # A bucket without tokens reads 0.
        metrics |= {f"lag/{name}/{key}": lag[of] / tokens for key, of in _LAG_MEANS.items()}
        metrics |= {f"lag/{name}/ess": _effective_share(lag), f"lag/{name}/tokens": lag["tokens"]}
    fresh = dict(zip(_SUMS, sums[list(LAG_BUCKETS).index("0")], strict=True))
    tokens = jnp.maximum(fresh["tokens"], 1.0)
    return metrics | {
        "mismatch/mean_abs": fresh["abs_log_ratio"] / tokens,
        "mismatch/max_abs": maxima[_MAXIMA.index("fresh_abs_log_ratio")],
        "mismatch/kl": fresh["kl_k3"] / tokens,
        "mismatch/tokens": fresh["tokens"],
    }


def _effective_share(sums):
    """Kish's effective sample size as a share of the tokens, (Σ w)² / (n Σ w²); 0 without weight."""
    return sums["weight"] ** 2 / jnp.maximum(sums["tokens"] * sums["weight_squared"], 1e-30)

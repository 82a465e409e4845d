"""Statistics of a loss: sums over tokens by staleness, and maxima. `accumulate` carries them beside the gradient.

Sums keep means independent of the cut into microbatches and devices; staleness shows which tokens a loss clips, drops
or down-weights.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxrl_async.config.loss import LossConfig
from jaxrl_async.models.experts import Routing
from jaxrl_async.objectives import anchors, kl, masked, ratios, reductions
from jaxrl_async.objectives.objective import Objective, teacher_gap
from jaxrl_async.objectives.tokens import Tokens

LAG_BUCKETS = {"0": 0, "1": 1, "2": 2, "3-4": 3, "5-8": 5, "9+": 9}  # name → first staleness

_MEANS = {
    "policy/ratio": "ratio",
    "policy/clip_fraction": "clipped",
    "policy/dropped_by_cap": "dropped",
    "policy/kl_behavior": "kl_k3",
    "policy/kl_behavior_k1": "kl_k1",
    "policy/entropy": "entropy",
    "staleness/mean": "staleness",
}
_LAG_MEANS = {
    "ratio": "ratio",
    "clip_fraction": "clipped",
    "kl": "kl_k3",
    "advantage_sign": "advantage_sign",
}
_MAXIMA = ("total_ratio", "ratio", "staleness", "fresh_abs_log_ratio")
_EXPERTS = {  # means over tokens, of a model with experts
    "experts/routes_known": "known",
    "experts/entropy": "router_entropy",
    "experts/load": "load",
    "experts/balance": "balance",
}
_BY_SEQUENCE = ("sequences", "sequence_weight", "sequence_weight_squared")  # of learner.rate_by_ess
_ERRORS = ("abs", "ratio", "weight")  # of an approximated anchor


class Statistics:
    """The columns of statistics that a loss needs, a model with experts, and a rate by sequences."""

    def __init__(self, config: LossConfig, *, has_experts: bool = False, by_sequence: bool = False):
        self._has_experts = has_experts
        self._penalty = config.kl != "none"
        self._approximations = anchors.APPROXIMATIONS if config.proximal_metrics else ()
        self._config = config
        sums = ["tokens", "loss", "share", "weight", "weight_squared", "abs_log_ratio"]
        sums += [*_MEANS.values(), "advantage_sign"]
        if self._penalty:
            sums.append("penalty")
        if config.teacher:
            sums.append("to_teacher")
        if self._approximations:
            sums.append("abs_proximal")
        sums += [f"{name}/{error}" for name in self._approximations for error in _ERRORS]
        if has_experts:
            sums += ["differs", *_EXPERTS.values()]
        self._by_sequence = by_sequence
        if by_sequence:
            sums += _BY_SEQUENCE
        self._sums = tuple(sums)

    def zeros(self) -> tuple[jax.Array, jax.Array]:
        """Sums float32 [buckets, columns] and maxima float32 [columns], all 0."""
        return jnp.zeros((len(LAG_BUCKETS), len(self._sums))), jnp.zeros(len(_MAXIMA))

    def measure(
        self,
        tokens: Tokens,
        entropy: jax.Array,
        parts: Objective,
        routing: Routing | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """The sums and maxima of a microbatch, in the shapes of `zeros`; entropy is float32 [B, T], nats.

        Of a model with experts also by its routers, [L, …], of which the mean over layers counts.
        """
        t = tokens.kept()
        abs_log_ratio = jnp.abs(t.logprobs - t.behavior_logprobs)
        of_token = {
            "tokens": t.mask,
            "loss": parts.loss,
            "share": parts.share,
            "weight": parts.weight,
            "weight_squared": jnp.square(parts.weight),
            "abs_log_ratio": abs_log_ratio,
            "ratio": parts.ratio,
            "clipped": parts.clipped,
            "dropped": parts.weight == 0,
            "kl_k1": kl.k1(t.behavior_logprobs, t.logprobs, t.mask),
            "kl_k3": kl.k3(t.behavior_logprobs, t.logprobs, t.mask),
            "entropy": entropy,
            "staleness": t.staleness,
            "advantage_sign": jnp.sign(parts.advantages),
            "penalty": parts.kl,
            "to_teacher": -teacher_gap(t) if self._config.teacher else None,
            "abs_proximal": None if t.proximal_logprobs is None else jnp.abs(t.proximal_logprobs),
        } | self._errors(t)
        if self._by_sequence:  # Each token has its part of the sequence's.
            part = reductions.sequence_mean(t.mask, t.segment_ids)[0]
            log_ratio = t.logprobs - t.behavior_logprobs
            weight = masked.exp(masked.segment_sum(log_ratio, t.segment_ids))
            parts_of = (part, part * weight, part * jnp.square(weight))
            of_token |= dict(zip(_BY_SEQUENCE, parts_of, strict=True))
        if routing is not None:
            of_token |= {
                "differs": routing.differs.mean(axis=0),
                "known": routing.known.mean(axis=0),
                "router_entropy": routing.entropy.mean(axis=0),
                "load": jnp.broadcast_to(routing.load.mean(), t.mask.shape),
                "balance": routing.balance.mean(axis=0),
            }
        largest = {
            "total_ratio": ratios.token(t.logprobs, t.behavior_logprobs, t.mask),
            "ratio": parts.ratio,
            "staleness": t.staleness,
            "fresh_abs_log_ratio": masked.keep(abs_log_ratio, t.staleness == 0),
        }
        values = jnp.stack([masked.keep(of_token[name], t.mask) for name in self._sums], axis=-1)
        bucket = sum(t.staleness >= first for first in list(LAG_BUCKETS.values())[1:])
        members = [jnp.where(bucket[..., None] == i, values, 0.0) for i in range(len(LAG_BUCKETS))]
        return (
            jnp.stack([member.sum(axis=(0, 1)) for member in members]),
            jnp.stack([masked.largest(largest[name], t.mask) for name in _MAXIMA]),
        )

    def denominator(self, sums: jax.Array) -> jax.Array:
        """The divisor of the summed loss and of its gradient, float32 []."""
        return sums[:, self._sums.index("share")].sum()

    def sequence_ess(self, sums: jax.Array) -> jax.Array:
        """Kish's effective sample size of the sequences as a share of them, float32 [], in [1/B, 1].

            ρ = (Σ w_i)² / (B Σ w_i²),    w_i = Π π_θ/π_b over the sampled tokens of sequence i, at most e^20

        "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs" (VCPO), arXiv 2602.17616. A sequence is a
        trajectory; 1 where all ratios are 1, as on the policy that sampled. It is 1/B where
        float32 loses the squares of all weights, below some 1e-30, as of long answers far from the sampler.
        """
        num, weight, squared = (sums[:, self._sums.index(name)].sum() for name in _BY_SEQUENCE)
        share = jnp.square(weight) / jnp.maximum(num * squared, 1e-30)
        return jnp.maximum(share, 1 / jnp.maximum(num, 1.0))

    def summed_loss(self, sums: jax.Array) -> jax.Array:
        """float32 []"""
        return sums[:, self._sums.index("loss")].sum()

    def metrics(self, sums: jax.Array, maxima: jax.Array) -> dict[str, jax.Array]:
        """The metrics of a minibatch by their public names, and "tokens", the number of its sampled tokens."""
        total = dict(zip(self._sums, sums.sum(axis=0), strict=True))
        largest = dict(zip(_MAXIMA, maxima, strict=True))
        metrics = {name: total[key] / total["tokens"] for name, key in _MEANS.items()}
        metrics |= {
            "loss/policy": total["loss"] / total["share"],
            "policy/ess": _effective_share(total),
            "policy/max_ratio": largest["total_ratio"],
            "policy/max_anchor_ratio": largest["ratio"],
            "staleness/max": largest["staleness"],
            "tokens": total["tokens"],
        }
        if self._penalty:
            metrics["policy/kl_penalty"] = total["penalty"] / total["tokens"]
        if self._config.teacher:
            metrics["policy/kl_teacher"] = total["to_teacher"] / total["tokens"]
        if self._has_experts:
            metrics |= {name: total[key] / total["tokens"] for name, key in _EXPERTS.items()}
            metrics["experts/routes_differ"] = total["differs"] / jnp.maximum(total["known"], 1e-30)
        rows = [dict(zip(self._sums, row, strict=True)) for row in sums]
        for name, lag in zip(LAG_BUCKETS, rows, strict=True):
            tokens = jnp.maximum(lag["tokens"], 1.0)  # A bucket without tokens reads 0.
            metrics |= {f"lag/{name}/{key}": lag[of] / tokens for key, of in _LAG_MEANS.items()}
            metrics |= {
                f"lag/{name}/ess": _effective_share(lag),
                f"lag/{name}/tokens": lag["tokens"],
            }
        return metrics | self._proximal(total) | _mismatch(rows[0], largest)

    def _errors(self, t: Tokens) -> dict[str, jax.Array]:
        """Errors of each approximated anchor against the recomputed one: |Δ log π_p|, |Δ π_θ/π_p|, |Δ π_p/π_b|."""
        found = {}
        for name in self._approximations:
            anchor, exact = anchors.ANCHORS[name](t, self._config), t.proximal_logprobs
            found[f"{name}/abs"] = jnp.abs(anchor - exact)
            ratio = masked.exp(t.logprobs - anchor) - masked.exp(t.logprobs - exact)
            weight = masked.exp(anchor - t.behavior_logprobs) - masked.exp(
                exact - t.behavior_logprobs
            )
            found |= {f"{name}/ratio": jnp.abs(ratio), f"{name}/weight": jnp.abs(weight)}
        return found

    def _proximal(self, total: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        metrics = {}
        for name in self._approximations:
            for error in _ERRORS:
                metrics[f"proximal/{name}/{error}"] = total[f"{name}/{error}"] / total["tokens"]
            metrics[f"proximal/{name}/relative"] = total[f"{name}/abs"] / jnp.maximum(
                total["abs_proximal"], 1e-30
            )
        return metrics


def _mismatch(fresh, largest):
    """Difference of engine and learner on the tokens with staleness 0."""
    tokens = jnp.maximum(fresh["tokens"], 1.0)
    return {
        "mismatch/mean_abs": fresh["abs_log_ratio"] / tokens,
        "mismatch/max_abs": largest["fresh_abs_log_ratio"],
        "mismatch/kl": fresh["kl_k3"] / tokens,
        "mismatch/tokens": fresh["tokens"],
    }


def _effective_share(sums):
    """Kish's effective sample size as a share of the tokens, (Σ w)² / (n Σ w²); 0 without weight."""
    return sums["weight"] ** 2 / jnp.maximum(sums["tokens"] * sums["weight_squared"], 1e-30)

"""The loss of a run: the names of its parts, their numbers, and the combinations that are refused.

    loss = Σ_t scale_t · m_t · (weight_t · surrogate_t(ratio_t, A_t) + kl_coefficient · kl_t) / D

Each part is a pure function in `jaxrl_async.objectives`, in a table with the names below. Imports no JAX: a config is
refused before any device is touched.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "turns")
ANCHORS = ("recompute", "current", "a3po", "linear", "behavior")
RATIOS = ("token", "sequence")
SURROGATES = ("clipped", "unclipped", "cispo", "reinforce", "dg")
WEIGHTS = ("none", "uncapped", "mask", "clamp", "tis", "icepop", "dppo_mask")
KLS = ("none", "k1", "k2", "k3")
REDUCTIONS = ("token_mean", "sequence_mean", "fixed_length")

# Of plain PPO, whose clip is around the policy that sampled.
_ON_BEHAVIOR = {"anchor": "behavior", "behavior_weight": "none", "behavior_cap": None}
# What a paper sets → the parts and numbers that are its own; docs/losses.md has the sources.
PRESETS = {
    "": {},
    "ppo": _ON_BEHAVIOR,
    "decoupled_ppo": {"anchor": "recompute", "behavior_weight": "mask", "behavior_cap": 5.0},
    "a3po": {"anchor": "a3po", "behavior_weight": "mask", "behavior_cap": 5.0},
    "grpo": _ON_BEHAVIOR
    | {
        "advantage": "grpo",
        "reduction": "sequence_mean",
        "kl": "k3",
        "kl_to": "reference",
        "kl_coefficient": 0.04,
    },
    "dr_grpo": _ON_BEHAVIOR | {"advantage": "dr_grpo", "reduction": "fixed_length"},
    "dapo": _ON_BEHAVIOR
    | {"advantage": "grpo", "clip_low": 0.2, "clip_high": 0.28, "reduction": "token_mean"},
    "gspo": _ON_BEHAVIOR
    | {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4, "reduction": "sequence_mean"},
    "cispo": _ON_BEHAVIOR
    | {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0, "reduction": "token_mean"},
    "dg": _ON_BEHAVIOR | {"surrogate": "dg", "advantage": "dr_grpo"},
}

WITHOUT_RATIO = ("reinforce", "dg")  # surrogates of log π_θ itself
_NAMES = {
    "preset": tuple(PRESETS),
    "advantage": ADVANTAGES,
    "anchor": ANCHORS,
    "a3po_fresh": ("behavior", "current"),
    "ratio": RATIOS,
    "surrogate": SURROGATES,
    "behavior_weight": WEIGHTS,
    "kl": KLS,
    "kl_to": ("reference", "behavior"),
    "reduction": REDUCTIONS,
}
_CAPPED = ("mask", "clamp", "tis", "icepop")  # weights that take behavior_cap


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """One loss, by the names of its parts; the defaults are A-3PO.

    Raises:
      ValueError: an unknown name, a number outside its bounds, or parts that contradict one another; says why.
    """

    # one of PRESETS: a paper's parts and numbers, in the place of defaults; "": none
    preset: str = ""
    advantage: str = "grpo"  # one of ADVANTAGES
    anchor: str = "a3po"  # π_p, the policy that the clip is around: one of ANCHORS
    a3po_fresh: str = "behavior"  # the anchor of tokens with staleness 0: "behavior" | "current"
    ratio: str = "token"  # π_θ/π_p of each token, or of its whole sequence (GSPO): one of RATIOS
    surrogate: str = "clipped"  # one of SURROGATES
    clip_low: float = 0.2  # ε_low, in [0, 1]
    clip_high: float = 0.2  # ε_high, ≥ 0
    dual_clip: float | None = None  # c > 1: bounds the loss of a negative advantage; None: no bound
    dg_temperature: float = 1.0  # η > 0 of the gate of "dg"
    dg_threshold: float = 0.0  # λ of the gate of "dg", nats
    behavior_weight: str = "mask"  # the weight π_p/π_b: one of WEIGHTS
    behavior_cap: float | None = 5.0  # C > 0 of "mask", "clamp", "tis", "icepop"; else None
    behavior_floor: float | None = None  # of "icepop", whose band ends at behavior_cap; else None
    dppo_delta: float | None = None  # δ in (0, 1) of "dppo_mask", in probability; else None
    kl: str = "none"  # penalty: one of KLS
    kl_to: str = "reference"  # of the policy to "reference" (version 0 of the run) | "behavior"
    kl_coefficient: float = 0.0  # ≥ 0, > 0 unless kl is "none"
    reduction: str = "token_mean"  # one of REDUCTIONS
    fixed_length: float | None = None  # tokens > 0: the constant of "fixed_length"; else None
    # report the error of each cheap anchor against "recompute": one more forward pass
    proximal_metrics: bool = False

    def __post_init__(self):
        for name, known in _NAMES.items():
            if getattr(self, name) not in known:
                words = ", ".join(filter(None, known))
                raise ValueError(f"{name} must be one of {words}; got {getattr(self, name)!r}")
        self._check_numbers()
        self._check_weight()
        self._check_parts()

    def check_new(self) -> None:
        """Refuses for a new run what does less than its name says; runs that had it go on.

        Raises:
          ValueError: a penalty without a gradient, or a weight with an anchor that makes it another one; says why.
        """
        for wrong, reason in (
            (
                self.kl == "k1",
                "kl 'k1' has a gradient that is 0 in expectation: as a penalty it adds noise and nothing else; use "
                "'k2', whose gradient is the KL's, or 'k3'",
            ),
            (
                self.behavior_weight == "icepop" and self.anchor not in ("recompute", "current"),
                "weight 'icepop' is a band of the trainer's own log-probs over the engine's: anchor must be "
                f"'recompute' or 'current', got {self.anchor!r}",
            ),
            (
                self.behavior_weight == "dppo_mask" and self.anchor != "behavior",
                "weight 'dppo_mask' takes the place of π_p/π_b, so the ratio must be to the policy that sampled: "
                f"anchor must be 'behavior', got {self.anchor!r}",
            ),
            (
                self.behavior_weight == "dppo_mask" and self.surrogate in WITHOUT_RATIO,
                f"weight 'dppo_mask' with surrogate {self.surrogate!r} has no importance ratio at all: use 'unclipped'",
            ),
        ):
            if wrong:
                raise ValueError(reason)

    def check_minibatches(self, num_minibatches: int) -> None:
        """Refuses an anchor that is exact with one minibatch per step only.

        Raises:
          ValueError: a clip against 'current' with several.
        """
        if (
            self.anchor == "current"
            and self.surrogate not in WITHOUT_RATIO
            and num_minibatches != 1
        ):
            raise ValueError(
                "anchor 'current' is exact with one minibatch per step only: from the second on the policy is not the "
                f"one that the step started from, and nothing would be clipped; got num_minibatches = {num_minibatches}"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the reference policy are needed."""
        return self.kl != "none" and self.kl_to == "reference"

    @property
    def needs_recompute(self) -> bool:
        """Whether log-probs at the weights of the step's start are needed: one more forward pass."""
        return self.anchor == "recompute" or self.proximal_metrics

    def _check_numbers(self):
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, got {value}")
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ValueError(
                f"clip_low must be in [0, 1] and clip_high ≥ 0, got {self.clip_low}, {self.clip_high}"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be > 1 or None, got {self.dual_clip}")
        if self.dg_temperature <= 0:
            raise ValueError(f"dg_temperature must be > 0, got {self.dg_temperature}")
        if (self.kl == "none") != (self.kl_coefficient == 0) or self.kl_coefficient < 0:
            raise ValueError(
                "kl_coefficient must be > 0 with an estimator and 0 with kl 'none', got "
                f"{self.kl_coefficient} with {self.kl!r}"
            )
        self._check_given(
            "fixed_length", self.reduction == "fixed_length", "reduction 'fixed_length'"
        )
        if self.fixed_length is not None and self.fixed_length <= 0:
            raise ValueError(f"fixed_length must be > 0, got {self.fixed_length}")

    def _check_weight(self):
        weight = self.behavior_weight
        if (weight in _CAPPED) != (self.behavior_cap is not None):
            raise ValueError(
                f"behavior_cap must be a number with behavior_weight {', '.join(map(repr, _CAPPED))} and None with "
                f"others, got {self.behavior_cap} with {weight!r}"
            )
        if self.behavior_cap is not None and self.behavior_cap <= 0:
            raise ValueError(f"behavior_cap must be > 0, got {self.behavior_cap}")
        self._check_given("behavior_floor", weight == "icepop", "behavior_weight 'icepop'")
        if self.behavior_floor is not None and not 0 <= self.behavior_floor <= self.behavior_cap:
            raise ValueError(
                f"behavior_floor must be in [0, behavior_cap = {self.behavior_cap}], got {self.behavior_floor}"
            )
        self._check_given("dppo_delta", weight == "dppo_mask", "behavior_weight 'dppo_mask'")
        if self.dppo_delta is not None and not 0 < self.dppo_delta < 1:
            raise ValueError(f"dppo_delta must be in (0, 1), got {self.dppo_delta}")

    def _check_given(self, name: str, wanted: bool, where: str):
        if (getattr(self, name) is not None) != wanted:
            raise ValueError(
                f"{name} must be a number with {where} and None otherwise, got {getattr(self, name)}"
            )

    def _check_parts(self):
        """Refuses parts that contradict one another, each with the reason."""
        uses_ratio = self.surrogate not in WITHOUT_RATIO
        weighted = self.behavior_weight != "none"
        for wrong, reason in (
            (
                self.dual_clip is not None and self.surrogate != "clipped",
                f"dual_clip bounds the loss of surrogate 'clipped'; {self.surrogate!r} has no such bound",
            ),
            (
                self.ratio == "sequence" and not uses_ratio,
                f"surrogate {self.surrogate!r} uses no ratio, so ratio 'sequence' would do nothing",
            ),
            (
                self.surrogate == "cispo" and self.clip_low != 1,
                f"surrogate 'cispo' has no lower clip: clip_low must be 1 (the ratio is ≥ 0), got {self.clip_low}",
            ),
            (
                self.surrogate == "cispo" and self.anchor == "current",
                "surrogate 'cispo' clips the ratio to the anchor, which is 1 with anchor 'current'",
            ),
            (
                self.surrogate == "dg" and weighted,
                "surrogate 'dg' uses no behavior probabilities, which a weight would bring back: behavior_weight "
                f"must be 'none', got {self.behavior_weight!r}",
            ),
            (
                self.surrogate == "dg" and self.kl != "none" and self.kl_to == "behavior",
                "surrogate 'dg' uses no behavior probabilities, which a KL to 'behavior' would bring back",
            ),
            (
                self.surrogate == "dg" and self.advantage == "grpo",
                "surrogate 'dg' gates by the advantage in units of reward, R − mean: advantage must be 'dr_grpo' or "
                "'rloo', or 'turns' of an environment, got 'grpo', which divides by the spread",
            ),
            (
                not uses_ratio and not weighted and self.anchor in ("recompute", "a3po", "linear"),
                f"surrogate {self.surrogate!r} without a weight uses no anchor, so {self.anchor!r} would do nothing: "
                "use 'behavior'",
            ),
            (
                self.behavior_weight == "tis" and self.anchor not in ("recompute", "current"),
                "weight 'tis' compares the trainer's own log-probs with the engine's: anchor must be 'recompute' or "
                f"'current', got {self.anchor!r}",
            ),
            (
                self.behavior_weight == "dppo_mask" and self.surrogate == "clipped",
                "weight 'dppo_mask' replaces the clip: surrogate must not be 'clipped'",
            ),
        ):
            if wrong:
                raise ValueError(reason)


def preset_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that the preset of a block of settings sets, which stand for defaults and for nothing else.

    Args:
      values: name → value of a `LossConfig`; a missing one has its default.

    Raises:
      ValueError: a part has a value that is neither the default nor the preset's; names both.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(LossConfig)}
    preset = values.get("preset", "")
    parts = PRESETS.get(preset, {}) if isinstance(preset, str) else {}
    for name, value in parts.items():
        given = values.get(name, defaults[name])
        if given not in (value, defaults[name]):
            raise ValueError(
                f"preset {preset!r} sets {name} = {value!r}, and the config {given!r}: leave one of them out "
                "(docs/losses.md has the parts of each preset)"
            )
    return parts

"""The loss of a run: the names of its parts, their numbers, and the combinations that are refused.

    loss = Σ_t scale_t · m_t · (weight_t · surrogate_t(ratio_t, A_t) + kl_coefficient · kl_t) / D

Each part is a pure function in `jaxrl_async.objectives`, in a table with the names below. Imports no JAX: a config is
refused before any device is touched.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrl_async.config import forms
from jaxrl_async.config.fields import refusal, setting

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "turns", "batch", "none")
ANCHORS = ("recompute", "current", "a3po", "linear", "behavior")
RATIOS = ("token", "sequence")
SURROGATES = ("clipped", "unclipped", "cispo", "reinforce", "dg", "sapo", "topr")
WEIGHTS = (
    "none",
    "uncapped",
    "mask",
    "clamp",
    "tis",
    "icepop",
    "dppo_mask",
    "sequence_tis",
    "sequence_mis",
    "geometric_tis",
    "geometric_mask",
)
KLS = ("none", "k1", "k2", "k3")
REDUCTIONS = ("token_mean", "sequence_mean", "fixed_length", "prompt_mean")

# Of plain PPO, whose clip is around the policy that sampled.
_ON_BEHAVIOR = {"anchor": "behavior", "behavior_weight": "none", "behavior_cap": None}
# The preset of a paper → the parts and numbers that are its own; docs/losses.md has the sources.
PRESETS: dict[str, dict[str, Any]] = {
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
    "sapo": _ON_BEHAVIOR | {"surrogate": "sapo", "advantage": "grpo", "reduction": "sequence_mean"},
    "topr": _ON_BEHAVIOR | {"surrogate": "topr", "advantage": "dr_grpo"},
    "asymre": _ON_BEHAVIOR
    | {"surrogate": "reinforce", "advantage": "dr_grpo", "baseline_shift": -0.1},
    "scalerl": _ON_BEHAVIOR
    | {
        "surrogate": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "advantage": "batch",
        "reduction": "prompt_mean",
    },
}

WITHOUT_RATIO = ("reinforce", "dg", "topr")  # surrogates of log π_θ itself
_BANDED = ("icepop", "geometric_mask")  # weights that take behavior_floor
# Weights of the trainer's own log-probs.
_OF_TRAINER = ("tis", "sequence_tis", "sequence_mis", "geometric_tis", "geometric_mask")
_CAPPED = ("mask", "clamp", "icepop", *_OF_TRAINER)  # weights that take behavior_cap


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """One loss, by the names of its parts; the defaults are A-3PO.

    The parts of a preset take the place of defaults.

    Raises:
      ValueError: an unknown name, a number outside its bounds, or parts that contradict one another; says why.
    """

    # fmt: off
    preset: str = setting("", "Loss of a paper, whose parts and numbers take the place of defaults (docs/losses.md); "
        "empty for none.", choices=tuple(PRESETS), since="0.1.0")
    advantage: str = setting("grpo", "Advantage estimator.", choices=ADVANTAGES)
    baseline_shift: float = setting(0.0, "Number δV that is added to the baseline of the advantage (AsymRE): below 0, "
        "good answers count more than bad ones.", unit="reward", since="0.2.0")
    teacher: str = setting("", "Model that the policy is distilled from, with its tokenizer: a Hugging Face directory "
        "or a Hub id `ORGANIZATION/NAME` of the policy's shape, which is the reference of the run, too; or the URL of "
        "an inference server of any kind, or `TASK=URL`, several with commas, by the `task` in the metadata of a "
        "prompt, else task.name; empty for none.", form=forms.teachers_of, since="0.2.0")
    teacher_key_env: str = setting("", "Environment variable with the API key of the teachers' servers, or `@PATH` of "
        "its file; empty for none.", form=forms.local_path, since="0.2.0")
    teacher_coefficient: float = setting(1.0, "Coefficient of log π_teacher − log π_θ of each token, which "
        "loss.teacher adds to the advantage.", at_least=0, since="0.2.0")
    anchor: str = setting("a3po", "Policy π_p that the clip is around.", choices=ANCHORS)
    a3po_fresh: str = setting("behavior", "Anchor of tokens with staleness 0 under anchor `a3po`.",
        choices=("behavior", "current"))
    ratio: str = setting("token", "Ratio π_θ/π_p of each token, or of its whole sequence (GSPO).", choices=RATIOS)
    surrogate: str = setting("clipped", "Surrogate objective of the policy.", choices=SURROGATES)
    clip_low: float = setting(0.2, "Lower clip range ε_low of the ratio.", at_least=0, at_most=1)
    clip_high: float = setting(0.2, "Upper clip range ε_high of the ratio.", at_least=0)
    dual_clip: float | None = setting(None, "Dual clip c, a bound on the loss of a negative advantage; None for none.",
        above=1)
    dg_temperature: float = setting(1.0, "Temperature η of the gate of surrogate `dg`.", above=0)
    dg_threshold: float = setting(0.0, "Threshold λ of the gate of surrogate `dg`.", unit="nats")
    behavior_weight: str = setting("mask", "Weight π_p/π_b of each token, for the policy that sampled it.",
        choices=WEIGHTS, was="loss.behavior_cap_mode")
    behavior_cap: float | None = setting(5.0, "Cap C of behavior_weight `mask`, `clamp`, `icepop`, `tis`, "
        "`sequence_tis`, `sequence_mis`, `geometric_tis` and `geometric_mask`; None for the others.", above=0)
    behavior_floor: float | None = setting(None, "Lower end of the band of behavior_weight `icepop` and "
        "`geometric_mask`, which ends at loss.behavior_cap; None for the others.", at_least=0)
    dppo_delta: float | None = setting(None, "Bound δ of behavior_weight `dppo_mask` on the difference of "
        "probabilities; None for the others.", above=0, below=1)
    off_policy_delta: float | None = setting(None, "Bound δ on the mean over an answer of log π_b − log π_θ, above "
        "which an answer with a negative advantage is dropped (DeepSeek-V3.2); None for no bound.", above=0,
        unit="nats", since="0.2.0")
    kl: str = setting("none", "Estimator of the KL penalty.", choices=KLS)
    kl_to: str = setting("reference", "Policy that the KL penalty is measured against: version 0 of the run "
        "(`reference`), or the one that sampled (`behavior`).", choices=("reference", "behavior"))
    kl_weighted: bool = setting(False, "Multiply each token's estimate by π_θ/π_b, which makes `k1` and `k3` unbiased "
        "where an older policy sampled.", since="0.2.0")
    kl_coefficient: float = setting(0.0, "Coefficient of the KL penalty, above 0 unless loss.kl is `none`.", at_least=0)
    kl_final_coefficient: float | None = setting(None, "Coefficient of the KL penalty in the last step, to which it "
        "goes linearly; None for a constant one.", at_least=0, since="0.2.0")
    reduction: str = setting("token_mean", "Reduction of per-token losses to the loss of a step.", choices=REDUCTIONS)
    fixed_length: float | None = setting(None, "Constant of reduction `fixed_length`; None for the others.", above=0,
        unit="tokens")
    router_balance: float = setting(0.0, "Coefficient of the auxiliary loss that spreads each sequence's tokens over "
        "experts; 0 for none.", at_least=0, since="0.2.0")
    proximal_metrics: bool = setting(False, "Report the error of each cheap anchor against `recompute`, by one more "
        "forward pass.")
    # fmt: on

    def __post_init__(self) -> None:
        for name, value in preset_of(vars(self)).items():
            object.__setattr__(self, name, value)
        for field in dataclasses.fields(self):
            if text := refusal(field, getattr(self, field.name)):
                raise ValueError(f"{field.name}{text}")
        _raise_first(self._contradictions())

    def check_new(self) -> None:
        """Refuses for a new run what does less than its name says; runs that had it go on.

        Raises:
          ValueError: a penalty without a gradient, or a weight with an anchor that makes it another one; says why.
        """
        _raise_first(self._does_less())

    def check_minibatches(self, num_minibatches: int) -> None:
        """Refuses an anchor that is exact with one minibatch per step only.

        Raises:
          ValueError: a clip against 'current' with several.
        """
        has_clip = self.surrogate not in WITHOUT_RATIO
        if self.anchor == "current" and has_clip and num_minibatches != 1:
            raise ValueError(
                "anchor 'current' is exact with one minibatch per step only: from the second on the policy is not the "
                f"one that the step started from, and nothing would be clipped; got num_minibatches = {num_minibatches}"
            )

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of the reference policy are needed."""
        from_files = bool(self.teacher) and not self.teachers
        return from_files or (self.kl != "none" and self.kl_to == "reference")

    @property
    def teachers(self) -> dict[str, str]:
        """Task → URL of the teachers that are servers; {} without any."""
        return forms.teachers_of(self.teacher)

    @property
    def needs_recompute(self) -> bool:
        """Whether log-probs at the weights of the step's start are needed: one more forward pass."""
        return self.anchor == "recompute" or self.proximal_metrics

    def kl_coefficient_of(self, step: Any, num_steps: int) -> Any:
        """The coefficient of the KL penalty in a step of a run: a float, or an array as the step is."""
        if self.kl_final_coefficient is None:
            return self.kl_coefficient
        rise = self.kl_final_coefficient - self.kl_coefficient
        return self.kl_coefficient + rise * (step - 1) / max(num_steps - 1, 1)

    def _contradictions(self) -> Iterator[str]:
        weight, surrogate, anchor = self.behavior_weight, self.surrogate, self.anchor
        if self.advantage == "none" and not (self.teacher and self.teacher_coefficient):
            yield "advantage 'none' leaves nothing to learn from but a teacher: it needs loss.teacher, got ''"
        if self.kl == "none" and self.kl_weighted:
            yield "kl_weighted must be False with kl 'none', got True"
        if self.baseline_shift and self.advantage in ("grpo", "batch"):
            yield (
                "baseline_shift is in units of reward: advantage must not be one that divides by a spread, got "
                f"{self.advantage!r}"
            )
        if self.kl == "none" and self.kl_final_coefficient is not None:
            yield f"kl_final_coefficient must be None with kl 'none', got {self.kl_final_coefficient}"
        if (self.kl == "none") != (not self.kl_coefficient and not self.kl_final_coefficient):
            yield (
                "kl_coefficient must be > 0 with an estimator and 0 with kl 'none', got "
                f"{self.kl_coefficient} with {self.kl!r}"
            )
        if (weight in _CAPPED) != (self.behavior_cap is not None):
            yield (
                f"behavior_cap must be a number with behavior_weight {', '.join(map(repr, _CAPPED))} and None with "
                f"others, got {self.behavior_cap} with {weight!r}"
            )
        for name, part, only in (
            ("fixed_length", "reduction", ("fixed_length",)),
            ("behavior_floor", "behavior_weight", _BANDED),
            ("dppo_delta", "behavior_weight", ("dppo_mask",)),
        ):
            if ((value := getattr(self, name)) is not None) != (getattr(self, part) in only):
                names = " or ".join(map(repr, only))
                yield f"{name} must be a number with {part} {names} and None otherwise, got {value}"
        if (self.behavior_floor or 0) > (self.behavior_cap or 0):
            cap = f"behavior_cap = {self.behavior_cap}"
            yield f"behavior_floor must be in [0, {cap}], got {self.behavior_floor}"
        if self.dual_clip is not None and surrogate != "clipped":
            yield f"dual_clip bounds the loss of surrogate 'clipped'; {surrogate!r} has no such bound"
        if self.ratio == "sequence" and surrogate in WITHOUT_RATIO:
            yield f"surrogate {surrogate!r} uses no ratio, so ratio 'sequence' would do nothing"
        if surrogate == "cispo" and self.clip_low != 1:
            yield (
                "surrogate 'cispo' has no lower clip: clip_low must be 1 (the ratio is ≥ 0), got "
                f"{self.clip_low}"
            )
        if surrogate == "cispo" and anchor == "current":
            yield "surrogate 'cispo' clips the ratio to the anchor, which is 1 with anchor 'current'"
        if surrogate == "dg":
            yield from self._contradictions_of_dg()
        is_used = surrogate not in WITHOUT_RATIO or weight != "none"
        if not is_used and anchor in ("recompute", "a3po", "linear"):
            yield (
                f"surrogate {surrogate!r} without a weight uses no anchor, so {anchor!r} would do nothing: "
                "use 'behavior'"
            )
        if surrogate == "topr" and weight != "none":
            yield (
                "surrogate 'topr' has its own correction for the policy that sampled: behavior_weight must be 'none', "
                f"got {weight!r}"
            )
        if weight in _OF_TRAINER and anchor not in ("recompute", "current"):
            yield (
                f"weight {weight!r} compares the trainer's own log-probs with the engine's: anchor must be "
                f"'recompute' or 'current', got {anchor!r}"
            )
        if weight == "dppo_mask" and surrogate == "clipped":
            yield "weight 'dppo_mask' replaces the clip: surrogate must not be 'clipped'"

    def _contradictions_of_dg(self) -> Iterator[str]:
        uses, weight = "surrogate 'dg' uses no behavior probabilities, which", self.behavior_weight
        if weight != "none":
            yield f"{uses} a weight would bring back: behavior_weight must be 'none', got {weight!r}"
        if self.kl != "none" and (self.kl_to == "behavior" or self.kl_weighted):
            yield f"{uses} a KL to 'behavior' or kl_weighted would bring back"
        if self.off_policy_delta is not None:
            yield f"{uses} off_policy_delta would bring back"
        if self.advantage in ("grpo", "batch"):
            yield (
                "surrogate 'dg' gates by the advantage in units of reward, R − mean: advantage must be 'dr_grpo' or "
                f"'rloo', or 'turns' of an environment, got {self.advantage!r}, which divides by the spread"
            )

    def _does_less(self) -> Iterator[str]:
        weight, anchor = self.behavior_weight, self.anchor
        if self.kl == "k1" and not self.kl_weighted:
            yield (
                "kl 'k1' has a gradient that is 0 in expectation: as a penalty it adds noise and nothing else; use "
                "'k2', whose gradient is the KL's, or 'k3'"
            )
        if weight == "icepop" and anchor not in ("recompute", "current"):
            yield (
                "weight 'icepop' is a band of the trainer's own log-probs over the engine's: anchor must be "
                f"'recompute' or 'current', got {anchor!r}"
            )
        if weight == "dppo_mask" and anchor != "behavior":
            yield (
                "weight 'dppo_mask' takes the place of π_p/π_b, so the ratio must be to the policy that sampled: "
                f"anchor must be 'behavior', got {anchor!r}"
            )
        if weight == "dppo_mask" and self.surrogate in WITHOUT_RATIO:
            yield (
                f"weight 'dppo_mask' with surrogate {self.surrogate!r} has no importance ratio at all: use "
                "'unclipped'"
            )


def _raise_first(texts: Iterator[str]) -> None:
    for text in texts:
        raise ValueError(text)


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

"""The losses that a config can name, and those that it refuses, with the reason."""

import dataclasses
import json
import math

import pytest
from fixtures.runs import QUICKSTART

from jaxrl_async.cli.config import settings_of
from jaxrl_async.config import base_config
from jaxrl_async.config import loss as loss_config
from jaxrl_async.config.build import config_dict
from jaxrl_async.config.loss import LossConfig
from jaxrl_async.config.settings import SettingsError
from jaxrl_async.objectives.advantages import ADVANTAGES
from jaxrl_async.objectives.anchors import ANCHORS, APPROXIMATIONS
from jaxrl_async.objectives.kl import KLS
from jaxrl_async.objectives.ratios import RATIOS
from jaxrl_async.objectives.reductions import REDUCTIONS
from jaxrl_async.objectives.surrogates import CLIPS, SURROGATES
from jaxrl_async.objectives.weights import MODES, WEIGHTS

NO_WEIGHT = {"behavior_weight": "none", "behavior_cap": None}
REINFORCE = NO_WEIGHT | {"surrogate": "reinforce", "anchor": "behavior"}
DG = REINFORCE | {"surrogate": "dg", "advantage": "dr_grpo"}
CISPO = {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 4.0}
ICEPOP = {"behavior_weight": "icepop", "behavior_floor": 0.5}
DPPO = {
    "surrogate": "unclipped",
    "behavior_weight": "dppo_mask",
    "behavior_cap": None,
    "dppo_delta": 0.2,
}
TIS = {"anchor": "recompute", "behavior_weight": "tis", "behavior_cap": 2.0}
GEOMETRIC = {"anchor": "recompute", "behavior_weight": "geometric_mask", "behavior_floor": 0.999}
KL = {"kl": "k3", "kl_coefficient": 0.1}


@pytest.mark.parametrize(
    ("names", "table"),
    [
        (loss_config.ADVANTAGES, ADVANTAGES),
        (loss_config.ANCHORS, ANCHORS),
        (loss_config.RATIOS, RATIOS),
        (loss_config.SURROGATES, SURROGATES),
        (loss_config.WEIGHTS, WEIGHTS),
        (loss_config.KLS, {"none": None, **KLS}),
        (loss_config.REDUCTIONS, REDUCTIONS),
    ],
)
def test_the_names_of_a_config_are_the_rows_of_a_table(names, table):
    assert names == tuple(table)


def test_the_smaller_tables_name_rows_of_the_larger():
    assert set(CLIPS) < set(SURROGATES) - set(loss_config.WITHOUT_RATIO)
    assert set(loss_config.WITHOUT_RATIO) < set(SURROGATES)
    assert set(MODES) < set(WEIGHTS)
    assert set(APPROXIMATIONS) == set(ANCHORS) - {"recompute"}


def test_the_default_is_a3po():
    c = LossConfig()
    assert (c.advantage, c.anchor, c.a3po_fresh, c.ratio) == ("grpo", "a3po", "behavior", "token")
    assert (c.surrogate, c.clip_low, c.clip_high, c.dual_clip) == ("clipped", 0.2, 0.2, None)
    assert (c.behavior_weight, c.behavior_cap, c.kl, c.reduction) == (
        "mask",
        5.0,
        "none",
        "token_mean",
    )
    assert not (c.proximal_metrics or c.needs_recompute or c.needs_reference)


@pytest.mark.parametrize(
    "settings",
    [
        *({"advantage": name, "teacher": "a"} for name in loss_config.ADVANTAGES),
        *({"anchor": name} for name in loss_config.ANCHORS),
        *({"ratio": name} for name in loss_config.RATIOS),
        *({"kl": name, "kl_coefficient": 0.1} for name in loss_config.KLS[1:]),
        {"a3po_fresh": "current"},
        {"surrogate": "unclipped"},
        {"dual_clip": 3.0},
        {"clip_low": 0.0, "clip_high": 0.0},
        {"clip_low": 1.0},
        {"behavior_weight": "uncapped", "behavior_cap": None},
        {"behavior_weight": "clamp", "behavior_cap": 100.0},
        {"reduction": "sequence_mean"},
        {"reduction": "fixed_length", "fixed_length": 1024},
        {"proximal_metrics": True},
        CISPO,
        ICEPOP,
        ICEPOP | {"behavior_floor": 0.0},
        ICEPOP | {"behavior_floor": 5.0},
        DPPO,
        TIS,
        TIS | {"anchor": "current"},
        NO_WEIGHT,
        REINFORCE,
        REINFORCE | {"anchor": "current"},
        REINFORCE | TIS,
        REINFORCE | {"behavior_weight": "mask", "behavior_cap": 5.0, "anchor": "a3po"},
        DG,
        DG | {"advantage": "rloo"},
        DG | KL,
        DG | {"dg_temperature": 0.1, "dg_threshold": -1.0},
        KL | {"kl_to": "behavior"},
    ],
    ids=str,
)
def test_parts_that_go_together_are_taken(settings):
    config = LossConfig(**settings)
    assert {name: getattr(config, name) for name in settings} == settings
    assert dataclasses.replace(config) == config


@pytest.mark.parametrize(
    ("field", "known"),
    [
        ("advantage", "grpo, dr_grpo, rloo, turns, batch, none"),
        ("anchor", "recompute, current, a3po, linear, behavior"),
        ("a3po_fresh", "behavior, current"),
        ("ratio", "token, sequence"),
        ("surrogate", "clipped, unclipped, cispo, reinforce, dg, sapo, topr"),
        (
            "behavior_weight",
            "none, uncapped, mask, clamp, tis, icepop, dppo_mask, sequence_tis, sequence_mis, geometric_tis, "
            "geometric_mask",
        ),
        ("kl", "none, k1, k2, k3"),
        ("kl_to", "reference, behavior"),
        ("reduction", "token_mean, sequence_mean, fixed_length, prompt_mean"),
    ],
)
@pytest.mark.parametrize("value", ["old", None])
def test_an_unknown_name_is_refused_with_the_known_ones(field, known, value):
    with pytest.raises(ValueError, match=f"^{field} .*{known}.*{value!r}$"):
        LossConfig(**{field: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_low": -0.1}, r"clip_low must be in \[0, 1\], got -0.1$"),
        ({"clip_low": 1.1}, r"clip_low must be in \[0, 1\], got 1.1$"),
        ({"clip_high": -0.1}, r"clip_high must be ≥ 0, got -0.1$"),
        ({"dual_clip": 1.0}, r"dual_clip .*> 1.* 1.0"),
        (DG | {"dg_temperature": 0.0}, r"dg_temperature .*> 0.* 0.0"),
        (DG | {"dg_temperature": -1.0}, r"dg_temperature .*> 0.* -1.0"),
        ({"kl": "k3"}, r"kl_coefficient .*> 0.* 0.0 .*'k3'"),
        ({"kl": "k1", "kl_coefficient": -0.1}, r"kl_coefficient must be ≥ 0, got -0.1$"),
        ({"kl_coefficient": 0.1}, r"kl_coefficient .* 0 .*'none'.* 0.1 "),
        (
            {"kl_final_coefficient": 0.1},
            r"kl_final_coefficient must be None with kl 'none', got 0.1$",
        ),
        ({"kl": "k3", "kl_final_coefficient": 0.0}, r"kl_coefficient .*> 0.* 0.0 .*'k3'"),
        (
            KL | {"kl_final_coefficient": -0.1},
            r"kl_final_coefficient must be ≥ 0 or None, got -0.1$",
        ),
        ({"reduction": "fixed_length"}, r"fixed_length .*'fixed_length'.* None$"),
        ({"fixed_length": 8.0}, r"fixed_length .*'fixed_length' and None.* 8.0"),
        (
            {"reduction": "fixed_length", "fixed_length": 0.0},
            r"fixed_length .*> 0.* 0.0",
        ),
        (
            {"behavior_cap": None},
            r"behavior_cap .*'mask', 'clamp', 'icepop', 'tis'.* None .*'mask'",
        ),
        (TIS | {"behavior_cap": None}, r"behavior_cap .* None .*'tis'$"),
        ({"behavior_weight": "none"}, r"behavior_cap .*None .* 5.0 .*'none'"),
        ({"behavior_weight": "uncapped"}, r"behavior_cap .* 5.0 .*'uncapped'"),
        (DPPO | {"behavior_cap": 5.0}, r"behavior_cap .* 5.0 .*'dppo_mask'"),
        ({"behavior_cap": 0.0}, r"behavior_cap .*> 0.* 0.0"),
        ({"behavior_cap": -1.0}, r"behavior_cap .*> 0.* -1.0"),
        (ICEPOP | {"behavior_floor": None}, r"behavior_floor .*behavior_weight 'icepop'.* None$"),
        ({"behavior_floor": 0.5}, r"behavior_floor .*None.* 0.5"),
        (ICEPOP | {"behavior_floor": 6.0}, r"behavior_floor .*\[0, behavior_cap = 5.0\].* 6.0"),
        (ICEPOP | {"behavior_floor": -0.5}, r"behavior_floor must be ≥ 0 or None, got -0.5$"),
        (DPPO | {"dppo_delta": None}, r"dppo_delta .*behavior_weight 'dppo_mask'.* None$"),
        ({"dppo_delta": 0.2}, r"dppo_delta .*None.* 0.2"),
        (DPPO | {"dppo_delta": 0.0}, r"dppo_delta .*\(0, 1\).* 0.0"),
        (DPPO | {"dppo_delta": 1.0}, r"dppo_delta .*\(0, 1\).* 1.0"),
    ],
)
def test_a_number_out_of_bounds_is_refused_with_the_bound(settings, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**settings)


def test_the_kl_coefficient_is_constant_or_goes_linearly_to_that_of_the_last_step():
    assert {LossConfig(**KL).kl_coefficient_of(step, 5) for step in range(1, 6)} == {0.1}
    falling = LossConfig(**KL, kl_final_coefficient=0.0)
    found = [falling.kl_coefficient_of(step, 5) for step in range(1, 6)]
    assert found == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0])
    rising = LossConfig(kl="k3", kl_final_coefficient=0.2)
    assert rising.kl_coefficient_of(1, 1) == 0.0 and rising.kl_coefficient_of(3, 3) == 0.2


NUMBERS = {
    "baseline_shift": {"advantage": "dr_grpo"},
    "off_policy_delta": {},
    "teacher_coefficient": {"teacher": "a"},
    "clip_low": {},
    "clip_high": {},
    "dual_clip": {},
    "dg_temperature": DG,
    "dg_threshold": DG,
    "behavior_cap": {},
    "behavior_floor": ICEPOP,
    "dppo_delta": DPPO,
    "kl_coefficient": KL,
    "kl_final_coefficient": KL,
    "fixed_length": {"reduction": "fixed_length"},
    "router_balance": {},
}


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} .*finite.* {value}"):
        LossConfig(**NUMBERS[field] | {field: value})


def test_every_number_of_a_config_is_tried():
    of_numbers = {f.name for f in dataclasses.fields(LossConfig) if "float" in str(f.type)}
    assert of_numbers == set(NUMBERS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"surrogate": "unclipped", "dual_clip": 3.0}, r"dual_clip .*'clipped'.*'unclipped'"),
        (CISPO | {"dual_clip": 3.0}, r"dual_clip .*'clipped'.*'cispo'"),
        (REINFORCE | {"ratio": "sequence"}, r"'reinforce' .*ratio 'sequence'"),
        (DG | {"ratio": "sequence"}, r"'dg' .*ratio 'sequence'"),
        (CISPO | {"clip_low": 0.2}, r"'cispo' .*clip_low must be 1.* 0.2"),
        (CISPO | {"anchor": "current"}, r"'cispo' .*anchor 'current'"),
        (DG | {"behavior_weight": "uncapped"}, r"'dg' .*behavior_weight .*'none'.*'uncapped'"),
        (DG | KL | {"kl_to": "behavior"}, r"'dg' .*KL to 'behavior'"),
        (DG | KL | {"kl_weighted": True}, r"'dg' .*kl_weighted"),
        (DG | {"off_policy_delta": 0.1}, r"'dg' .*off_policy_delta"),
        (DG | {"advantage": "grpo"}, r"'dg' .*advantage .*'dr_grpo' or 'rloo'.*'grpo'"),
        ({"advantage": "none"}, r"advantage 'none' .*needs loss.teacher, got ''"),
        ({"kl_weighted": True}, r"kl_weighted must be False with kl 'none'"),
        ({"baseline_shift": -0.1}, r"baseline_shift .*units of reward.*'grpo'$"),
        (GEOMETRIC | {"anchor": "behavior"}, r"'geometric_mask' .*anchor .*'recompute' or"),
        (GEOMETRIC | {"behavior_floor": None}, r"behavior_floor .*'icepop' or 'geometric_mask'"),
        *(
            (of | {"anchor": anchor}, f"'{of['surrogate']}' .*anchor.*'{anchor}'.*use 'behavior'")
            for of in (REINFORCE, DG)
            for anchor in ("recompute", "a3po", "linear")
        ),
        *(
            (TIS | {"anchor": anchor}, f"'tis' .*anchor .*'recompute' or 'current'.*'{anchor}'")
            for anchor in ("a3po", "linear", "behavior")
        ),
        (DPPO | {"surrogate": "clipped"}, r"'dppo_mask' .*surrogate must not be 'clipped'"),
    ],
)
def test_parts_that_do_not_go_together_are_refused_with_the_reason(settings, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**settings)


def test_a_clip_against_current_is_refused_with_several_minibatches():
    for surrogate in ("clipped", "unclipped"):
        current = LossConfig(anchor="current", surrogate=surrogate)
        current.check_minibatches(1)
        with pytest.raises(ValueError, match=r"'current' .*num_minibatches = 2"):
            current.check_minibatches(2)


def test_other_losses_take_any_number_of_minibatches():
    for anchor in set(loss_config.ANCHORS) - {"current"}:
        LossConfig(anchor=anchor).check_minibatches(4)
    for without_ratio in (REINFORCE, DG):  # No clip, so nothing that would never act.
        LossConfig(**without_ratio | {"anchor": "current"}).check_minibatches(4)


def test_a_loss_says_which_log_probs_it_needs():
    assert LossConfig(anchor="recompute").needs_recompute
    assert LossConfig(proximal_metrics=True).needs_recompute
    assert not any(LossConfig(anchor=anchor).needs_recompute for anchor in APPROXIMATIONS)
    assert LossConfig(**KL).needs_reference
    assert not LossConfig(**KL, kl_to="behavior").needs_reference
    assert not LossConfig(kl_to="reference").needs_reference
    assert LossConfig(teacher="a").needs_reference
    assert not LossConfig(teacher="http://a:1").needs_reference


def test_a_teacher_is_files_or_servers_by_task():
    assert LossConfig(teacher="a/b=c").teachers == {}
    two = LossConfig(teacher="sums=http://a:1, https://b:2/x=y")
    assert two.teachers == {"sums": "http://a:1", "": "https://b:2/x=y"}
    for teacher, words in (
        ("ftp://a", r"teacher must be http://HOST.*got 'ftp://a'"),
        ("sums=http://", r"teacher must be http://HOST.*got 'http://'"),
        ("http://a:1,http://b:2", "teacher must have each task once"),
        ("gs://a/b", "teacher must be on this machine"),
    ):
        with pytest.raises(ValueError, match=words):
            LossConfig(teacher=teacher)


@pytest.mark.parametrize("name", [p for p in loss_config.PRESETS if p not in ("", "dr_grpo")])
def test_a_preset_is_a_loss_of_its_parts(name):
    config = base_config()
    config.loss.preset = name
    settings = settings_of(config)
    for part, value in loss_config.PRESETS[name].items():
        assert getattr(settings.loss, part) == value == config.loss[part]
    settings.loss.check_new()
    kept = json.loads(config.to_json())  # as config.json
    assert settings_of(config_dict(kept)).loss == settings.loss


@pytest.mark.parametrize("name", sorted(loss_config.PRESETS))
def test_a_preset_that_is_built_directly_is_the_one_of_a_config(name):
    parts = loss_config.PRESETS[name]
    numbers = {"fixed_length": 4.0} if parts.get("reduction") == "fixed_length" else {}
    built = LossConfig(preset=name, **numbers)
    assert built == preset(name, **numbers)
    assert {key: getattr(built, key) for key in parts} == parts


def test_a_preset_that_is_built_directly_with_another_part_is_refused():
    with pytest.raises(ValueError, match=r"preset 'gspo' sets clip_low = 0\.0003, .* 0\.1"):
        LossConfig(preset="gspo", clip_low=0.1)


def test_the_preset_a3po_is_the_default():
    assert dataclasses.replace(preset("a3po"), preset="") == LossConfig()


def preset(name, **parts):
    config = base_config()
    with config.unlocked():
        config.loss.update({"preset": name} | parts)
    return settings_of(config).loss


def test_gspo_is_more_than_its_ratio():
    gspo = preset("gspo", kl="k3", kl_coefficient=0.1)
    assert (gspo.ratio, gspo.clip_low, gspo.clip_high) == ("sequence", 3e-4, 4e-4)
    assert (gspo.reduction, gspo.anchor, gspo.behavior_cap) == ("sequence_mean", "behavior", None)
    assert gspo.kl == "k3", "what a preset does not set is the config's"


@pytest.mark.parametrize(
    ("name", "parts", "named"),
    [
        (
            "gspo",
            {"clip_low": 0.1},
            "loss.preset 'gspo' sets clip_low = 0.0003, and the config 0.1",
        ),
        (
            "ppo",
            {"anchor": "current"},
            "preset 'ppo' sets anchor = 'behavior', and the config 'curr",
        ),
        ("gsop", {}, "preset must be one of ppo, decoupled_ppo, a3po"),
        ("dr_grpo", {}, "fixed_length must be a number with reduction 'fixed_length'"),
    ],
)
def test_a_preset_is_refused_where_the_config_contradicts_it(name, parts, named):
    with pytest.raises(SettingsError) as raised:
        preset(name, **parts)
    assert named in str(raised.value)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"kl": "k1", "kl_coefficient": 0.1}, "kl 'k1' .* use 'k2'.* or 'k3'"),
        (ICEPOP, "'icepop' .* 'recompute' or 'current', got 'a3po'"),
        (DPPO, "'dppo_mask' .* anchor must be 'behavior', got 'a3po'"),
        (
            DPPO | {"surrogate": "reinforce", "anchor": "behavior"},
            "'dppo_mask' with surrogate 'reinforce' has no importance ratio",
        ),
    ],
)
def test_a_new_run_refuses_what_does_less_than_its_name(parts, named):
    config = LossConfig(**parts)  # An older run goes on.
    with pytest.raises(ValueError, match=named):
        config.check_new()


def test_a_new_run_takes_them_where_they_do():
    for parts in (
        {"kl": "k1", "kl_coefficient": 0.1, "kl_weighted": True},
        KL,
        ICEPOP | {"anchor": "recompute"},
        DPPO | {"anchor": "behavior"},
    ):
        LossConfig(**parts).check_new()


def test_train_refuses_such_a_loss_before_it_writes(verb, tmp_path):
    flags = ["--config.loss.kl=k1", "--config.loss.kl_coefficient=0.1"]
    code, output = verb("train", f"--config={QUICKSTART}:smoke", *flags)
    assert code == 2 and "loss.kl 'k1' has a gradient that is 0 in expectation" in output, output
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.long
def test_a_preset_is_trained_with_and_kept_resolved(run, tmp_path):
    code, output = run("train", f"--config={QUICKSTART}:smoke", "--config.loss.preset=gspo")
    assert code == 0, output
    kept = json.loads((tmp_path / "run" / "config.json").read_text())["loss"]
    assert (kept["preset"], kept["clip_high"], kept["reduction"]) == ("gspo", 4e-4, "sequence_mean")

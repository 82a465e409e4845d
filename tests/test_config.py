"""Configs at the door: each builds, and what cannot be run is refused with the key, the value and the bound."""

import pathlib

import pytest

from jaxrl_async.cli import config as config_lib
from jaxrl_async.cli import main
from jaxrl_async.settings import Settings, SettingsError

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
QUICKSTART = ROOT / "configs" / "quickstart.py"


def parse(*argv):
    flags = config_lib.parse_flags("usage", list(argv), config=True, workdir=("", "directory"))
    return config_lib.settings_of(flags.config)


@pytest.mark.parametrize("arg", ["", "smoke"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_builds(path, arg):
    assert parse(f"--config={path}:{arg}").mode in ("sync", "periodic", "async")


@pytest.mark.parametrize("mode", ["sync", "periodic", "async"])
def test_the_quickstart_knows_three_modes(mode):
    settings = parse(f"--config={QUICKSTART}:mode={mode},seed=3")
    assert (settings.mode, settings.seed) == (mode, 3)


def test_a_value_is_set_from_the_command_line():
    assert parse(f"--config={QUICKSTART}", "--config.learner.num_steps=7").learner.num_steps == 7


def test_an_unknown_key_on_the_command_line_is_named_with_the_nearest():
    with pytest.raises(config_lib.UsageError, match=r"config.learner.num_stepz.*'num_steps'"):
        parse(f"--config={QUICKSTART}", "--config.learner.num_stepz=7")


def test_an_unknown_key_in_a_config_is_named_with_the_nearest():
    config = config_lib.load_config(str(QUICKSTART)).to_dict()
    config["learner"]["num_stepz"] = 7
    with pytest.raises(SettingsError, match=r"config.learner.num_stepz.*'num_steps'"):
        Settings.from_dict(config)


def test_a_missing_key_is_named():
    config = config_lib.load_config(str(QUICKSTART)).to_dict()
    del config["loss"]["anchor"]
    with pytest.raises(SettingsError, match="missing config key config.loss.anchor"):
        Settings.from_dict(config)


def test_an_unknown_config_argument_is_named_with_the_nearest():
    with pytest.raises(config_lib.UsageError, match=r"'smok', did you mean 'smoke'"):
        parse(f"--config={QUICKSTART}:smok")


def test_an_unknown_flag_is_named_with_the_nearest():
    with pytest.raises(config_lib.UsageError, match=r"'workdri'.*workdir"):
        parse(f"--config={QUICKSTART}", "--workdri=x")


def test_a_value_of_another_type_is_refused():
    with pytest.raises(config_lib.UsageError, match="num_steps=seven"):
        parse(f"--config={QUICKSTART}", "--config.learner.num_steps=seven")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--config.mode=asink"], r"'asink', did you mean 'async'"),
        (["--config.queue.max_staleness=1", "--config.weights.push_every_steps=4"], r"max_staleness = 1.*= 4"),
        (["--config.queue.max_staleness=0"], r"max_staleness ≥ 1, got 0"),
        (["--config.loss.anchor=current"], r"num_minibatches = 2"),
        (["--config.learner.num_minibatches=3"], r"num_minibatches = 3 does not divide.*64"),
        (["--config.rollout.group_size=1"], r"group_size ≥ 2"),
        (["--config.rollout.max_new_tokens=400"], r"= 408 exceeds learner.row_tokens"),
        (["--config.learner.num_steps=0"], r"num_steps must be ≥ 1, got 0"),
        (["--config.learner.data=3"], r"multiple of learner.data · learner.fsdp = 3"),
        (["--config.weights.keep=1"], r"weights.keep must be ≥ 2, got 1"),
        (["--config.queue.chunk_groups=8"], r"chunk_groups"),
    ],
)  # fmt: skip
def test_settings_that_contradict_one_another_are_refused(overrides, message):
    with pytest.raises(SettingsError, match=message):
        parse(f"--config={QUICKSTART}", *overrides)


@pytest.mark.parametrize("mode", ["sync", "periodic"])
def test_on_policy_modes_refuse_staleness(mode):
    with pytest.raises(
        SettingsError, match=rf"mode '{mode}' needs queue.max_staleness = 0 .* got 1 and 1"
    ):
        parse(f"--config={QUICKSTART}:mode={mode}", "--config.queue.max_staleness=1")


def test_periodic_mode_refuses_updates_inside_the_step():
    with pytest.raises(SettingsError, match="periodic.*num_minibatches must be 1, got 2"):
        parse(f"--config={QUICKSTART}:mode=periodic", "--config.learner.num_minibatches=2")


def test_a_config_survives_its_json(tmp_path):
    config = config_lib.load_config(str(QUICKSTART))
    (tmp_path / "config.json").write_text(config.to_json_best_effort())
    assert parse(f"--config={tmp_path}/config.json") == config_lib.settings_of(config)
    addresses = ("http://a:1", "http://b:2")  # A list in JSON, a tuple on the command line.
    override = f"--config.server.addresses={addresses!r}"
    assert parse(f"--config={tmp_path}/config.json", override).server.addresses == addresses


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        ([], 2, "usage"),
        (["--help"], 0, "evaluate"),
        (["trian"], 2, "did you mean 'train'"),
        (["train"], 2, "--config=FILE"),
        (["train", "--config=nowhere.py"], 2, "no config at nowhere.py"),
        (["train", f"--config={QUICKSTART}", "--role=quue"], 2, "did you mean 'queue'"),
        (["train", f"--config={QUICKSTART}", "--role=queue"], 2, "needs --config.queue.address"),
        (["train", f"--config={QUICKSTART}", "--role=server"], 2, "config.server.addresses"),
        (["evaluate"], 2, "--workdir=DIR"),
        (["evaluate", "--workdir=nowhere"], 2, "no config at"),
        (["evaluate", "--workdir=nowhere", "--steps=two"], 2, "got 'two'"),
        (["report", "--workdir=nowhere"], 2, "no metrics.jsonl"),
        (["serve"], 2, "--workdir=DIR"),
    ],
)
def test_exit_codes(argv, code, text, capsys):
    assert main.main(argv) == code
    out, err = capsys.readouterr()
    assert text in out + err

"""Whole runs that train adapters: what they write, that they resume and replay, and what comes out of them."""

import json

import numpy as np
import pytest
import safetensors.numpy
from fixtures.runs import QUICKSTART, assert_same, params_of

from jaxrl_async.metrics import read_metrics

LORA = (
    f"--config={QUICKSTART}:smoke,mode=sync",
    "--config.model.lora.rank=4",
    "--config.model.lora.alpha=8.0",
    "--config.learner.learning_rate=0.003",
    "--config.loss.kl=k3",
    "--config.loss.kl_coefficient=0.01",
    "--config.checkpoint.every_steps=1",
)


@pytest.mark.long
def test_a_run_of_many_processes_trains_adapters_alone(run, tmp_path):
    """By `stream`: the servers get adapters, and the base is read once."""
    workdir = tmp_path / "run"
    many = ("--config.supervisor.processes=many", "--config.weights.transport=stream")
    code, output = run("train", *LORA, *many)
    assert code == 0, output
    rows = read_metrics(workdir)
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["mismatch/mean_abs"] for row in rows) < 1e-5
    assert rows[1]["compile/count"] == rows[0]["compile/count"]
    base = json.loads((workdir / "base" / "00000000" / "manifest.json").read_text())
    assert rows[-1]["weights/bytes"] < base["total_bytes"] / 3
    path = workdir / "weights" / "00000001"
    assert {file.name for file in path.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "manifest.json"
    }  # fmt: skip
    first, last = params_of(workdir, 0), params_of(workdir, 2)
    assert first.keys() == {"blocks"}
    assert all(layer.keys() == {"lora_a", "lora_b"} for layer in first["blocks"].values())
    began, ended = (params["blocks"]["down"]["lora_b"]["value"] for params in (first, last))
    assert not np.any(began) and np.any(ended)

    # Resumed, it reads the base and goes on.
    code, output = run("train", "--resume", "--config.learner.num_steps=3")
    assert code == 0, output
    assert max(row["mismatch/mean_abs"] for row in read_metrics(workdir)) < 1e-5

    code, output = run("evaluate", "--steps=0,3")
    assert code == 0, output
    code, output = run("replay", "--until=2", f"--out={tmp_path / 'replay'}")
    assert code == 0 and "equal" in output, output

    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    code, output = run("export", f"--out={merged}", "--step=3")
    assert code == 0, output
    code, output = run("export", f"--out={adapter}", "--step=3", "--adapter")
    assert code == 0, output
    names = safetensors.numpy.load_file(adapter / "adapter_model.safetensors").keys()
    assert all(".lora_" in name for name in names)
    assert_merged(base_of(workdir), adapter, merged, scale=8.0 / 4)
    for files in (path, adapter):
        named = json.loads((files / "adapter_config.json").read_text())
        assert named["base_model_name_or_path"] == str(workdir / "base" / "00000000")

    # Another run starts from the adapter.
    other = tmp_path / "other"
    start = ("--config.learner.num_steps=1", f"--config.model.lora.path={adapter}")
    code, output = run("train", *LORA, *start, "--config.supervisor.processes=one", workdir=other)
    assert code == 0, output
    assert_same(params_of(other, 0), params_of(workdir, 3))


def base_of(workdir):
    return safetensors.numpy.load_file(workdir / "base" / "00000000" / "model.safetensors")


def assert_merged(base, adapter, merged, scale):
    own = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    found = safetensors.numpy.load_file(merged / "model.safetensors")
    assert found.keys() == base.keys()
    for name, weights in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in own:
            a, b = (own[f"{module}.lora_{letter}.weight"] for letter in "AB")
            weights = weights + scale * b @ a
        np.testing.assert_allclose(found[name], weights, atol=1e-5)


@pytest.mark.optimised
@pytest.mark.long
def test_one_process_trains_the_same_adapters_as_many(run, tmp_path):
    for processes in ("one", "many"):
        words = (f"--config.supervisor.processes={processes}", "--config.warm_start.num_steps=5")
        code, output = run("train", *LORA, *words, workdir=tmp_path / processes)
        assert code == 0, output
        assert read_metrics(tmp_path / processes)[-1]["mismatch/mean_abs"] < 1e-5
    assert_same(params_of(tmp_path / "one", 2), params_of(tmp_path / "many", 2))


@pytest.mark.parametrize(
    ("path", "warm", "name"),
    [
        ("org/name", 0, "org/name"),
        ("org/name", 5, "{workdir}/base/00000000"),
        ("", 0, "{workdir}/base/00000000"),
    ],
)
def test_an_adapter_names_the_weights_that_it_was_trained_beside(tmp_path, path, warm, name):
    from jaxrl_async import parts
    from jaxrl_async.cli.config import load_config, settings_of

    config = load_config(f"{QUICKSTART}:smoke")
    config.model.path, config.warm_start.num_steps = path, warm
    assert parts.base_name(settings_of(config), tmp_path) == name.format(workdir=tmp_path)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("lora.rank=-1", "model.lora.rank must be ≥ 0, got -1"),
        ("lora.alpha=0.0", "model.lora.alpha must be > 0, got 0"),
        ("lora.targets=('lm_head',)", "model.lora.targets' entries must be one of q_proj"),
        ("lora.targets=()", r"model.lora.targets must be names, each once, got \(\)"),
        ("lora.base_dtype='int8'", "model.lora.base_dtype must be one of"),
    ],
)
def test_settings_that_cannot_be_are_refused(flag, message):
    from jaxrl_async.cli.config import load_config, settings_of
    from jaxrl_async.config.settings import SettingsError

    config = load_config(f"{QUICKSTART}:smoke")
    config.model.lora.rank = 4
    name, value = flag.removeprefix("lora.").split("=")
    with config.unlocked():
        config.model.lora[name] = eval(value)
    with pytest.raises(SettingsError, match=message):
        settings_of(config)


def test_an_adapter_to_start_from_needs_a_rank():
    from jaxrl_async.cli.config import load_config, settings_of
    from jaxrl_async.config.settings import SettingsError

    config = load_config(f"{QUICKSTART}:smoke")
    config.model.lora.path = "somewhere"
    with pytest.raises(
        SettingsError, match="model.lora.path = 'somewhere' needs model.lora.rank ≥ 1"
    ):
        settings_of(config)

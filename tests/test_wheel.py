"""The wheel: what of the project works in an empty directory, without a checkout."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

import jaxrl_async
from jaxrl_async.cli import config as config_lib
from jaxrl_async.cli import main

ROOT = pathlib.Path(__file__).parents[1]


def test_the_version_is_said(capsys):
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxrl_async {jaxrl_async.__version__}\n"


@pytest.mark.parametrize("spec", ["quickstart:smoke", "configs/quickstart.py:smoke"])
def test_a_config_of_the_package_is_found_in_every_directory(tmp_path, monkeypatch, spec):
    monkeypatch.chdir(tmp_path)
    assert config_lib.load_config(spec).learner.num_steps == 2
    sweep = config_lib.load_sweep("configs/sweeps/seeds.py:smoke,num_seeds=2")
    assert len(sweep.points) == 2 and pathlib.Path(sweep.config.partition(":")[0]).is_file()


def test_every_config_that_a_command_of_the_docs_names_is_found_in_every_directory(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    load = {"config": config_lib.load_config, "sweep": config_lib.load_sweep}
    text = "".join(page.read_text("utf-8") for page in ROOT.glob("docs/*.md"))
    found = set(re.findall(r"jaxrl_async [a-z]+.* --(config|sweep)=([\w/.:,=]+)", text))
    assert len(found) > 10
    for kind, spec in found:
        if spec.endswith(".json") or spec == "FILE":  # of a run
            continue
        load[kind](spec)


def test_a_file_here_comes_before_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.py").write_text("def get_config(arg): raise RuntimeError")
    with pytest.raises(RuntimeError):
        config_lib.load_config("configs/quickstart.py")


@pytest.mark.parametrize(
    "load, spec, message",
    [
        (config_lib.load_config, "quikstart", "no config at quikstart, did you mean 'quickstart'"),
        (config_lib.load_config, "zzz.py", "no config at zzz.py; the package has .*quickstart, "),
        (
            config_lib.load_config,
            "zzz/config.json",
            "no config at zzz/config.json; `train --resume`",
        ),
        (config_lib.load_config, "sweeps/seeds", "no config at sweeps/seeds"),
        (config_lib.load_sweep, "quickstart", "no sweep at quickstart; the package has sweeps/"),
    ],
)
def test_a_name_that_is_none_is_refused_with_those_there_are(load, spec, message):
    with pytest.raises(config_lib.UsageError, match=message):
        load(spec)


@pytest.mark.long
def test_the_wheel_has_the_configs_the_types_and_a_command(tmp_path):
    source = tmp_path / "source"  # setuptools writes into it.
    ignored = shutil.ignore_patterns(".*", "runs", "shared", "notebooks", "benchmarks", "tests")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", f"--wheel-dir={tmp_path}"]
    subprocess.run([*pip, str(source)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        file.extractall(tmp_path / "site")
    configs = {f"jaxrl_async/{p.relative_to(ROOT)}" for p in ROOT.glob("configs/**/*.py")}
    files = {"jaxrl_async/py.typed", "jaxrl_async/report/page.css"}
    assert configs | files <= names
    (tmp_path / "empty").mkdir()
    code = "import sys; from jaxrl_async.cli.main import console; sys.exit(console())"
    for words in (["--version"], ["config", "--config=quickstart:smoke"]):
        subprocess.run(
            [sys.executable, "-P", "-c", code, *words],
            cwd=tmp_path / "empty",
            env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
            check=True,
            timeout=100,
        )
    entry = (next((tmp_path / "site").glob("*.dist-info")) / "entry_points.txt").read_text()
    assert "jaxrl_async = jaxrl_async.cli.main:console" in entry

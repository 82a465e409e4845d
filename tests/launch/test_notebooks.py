"""The notebooks run from top to bottom: one at the smoke size; with --long all, and whole."""

import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
ONE = "quickstart.ipynb"
CELL_TIMEOUT_SECS = 1800
MAX_BYTES = 200_000  # of a notebook with its outputs


def execute(
    name: str,
    size: str,
    directory: pathlib.Path,
    *,
    shared=("benchmarks", "configs", "launch"),
    changes: dict[str, str] | None = None,
    kernel: str = "python3",
) -> nbformat.NotebookNode:
    """Runs a notebook in a directory that stands for a clone, with some texts changed; the executed notebook."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    (parameters,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    assert 'size = "whole"' in parameters.source
    given = {'GSM8K = ""': f'GSM8K = "{ROOT}/tests/gsm8k_tiny"'} | (changes or {})
    for cell in notebook.cells:
        for old, new in given.items():
            cell.source = cell.source.replace(old, new)
    parameters.source = parameters.source.replace('size = "whole"', f'size = "{size}"')
    (directory / "notebooks").mkdir(parents=True, exist_ok=True)
    for link in shared:
        (directory / link).symlink_to(ROOT / link)
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_SECS,
        kernel_name=kernel,
        resources={"metadata": {"path": str(directory / "notebooks")}},
    )
    return client.execute()


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(o.text for o in outputs if o.output_type == "stream")


@pytest.fixture(autouse=True)
def this_checkout(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.optimised  # As all runs of the quickstart, whose programs it finds in the cache.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook packages
@pytest.mark.parametrize(
    "name", [n if n == ONE else pytest.param(n, marks=pytest.mark.long) for n in NOTEBOOKS]
)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path):
    done = execute(name, "smoke", tmp_path)
    assert "Traceback" not in printed(done)
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_in_one_process_as_on_a_single_chip(name, tmp_path):
    call = "run = jaxrl_async.run(config"
    done = execute(
        name, "smoke", tmp_path, changes={call: f'config.supervisor.processes = "one"\n{call}'}
    )
    assert "Traceback" not in printed(done)
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "config.json").read_text())["supervisor"]["processes"] == "one"
    assert [path.name for path in (run / "logs").iterdir()] == ["one.log"]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_run_on_a_drive_goes_on_where_it_was_left(tmp_path):
    """As after a disconnect: another machine, the same drive."""
    drive = tmp_path / "drive"
    drive.mkdir()
    call = "steps = checkpoint_steps(workdir)"
    changes = {'DRIVE = ""': f'DRIVE = "{drive}"'}
    first = printed(execute("reason.ipynb", "smoke", tmp_path / "a", changes=changes))
    assert f"a new run: {drive}/reason-random" in first
    changes[call] = f"config.learner.num_steps = 3\n{call}"
    second = printed(execute("reason.ipynb", "smoke", tmp_path / "b", changes=changes))
    assert f"the run in {drive}/reason-random goes on after step 2" in second
    run = drive / "reason-random"
    assert (run / "metrics.jsonl").read_text().count("\n") == 3
    assert {path.name for path in run.glob("huggingface-*")} == {"huggingface-2", "huggingface-3"}
    assert json.loads((run / "config.json").read_text())["journal"]["mode"] == "delete"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_whole_notebook_shows_what_it_says(name, tmp_path):
    if name == "reason.ipynb":
        pytest.skip("needs a pretrained model, and half an hour of two cores")
    done = printed(execute(name, "whole", tmp_path))
    if name in ("quickstart.ipynb", "tools.ipynb"):
        before, after = (
            float(line.split("greedy ")[1].split(" ")[0])
            for line in done.splitlines()
            if re.match("step .*greedy ", line)
        )
        assert before < 0.5 and after > 0.8
    if name == "replay.ipynb":
        assert "equal, bit for bit: True" in done


OLD = ("jax==0.7.0", "flax==0.10.7", "ipykernel")  # of a notebook service


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_notebook_runs_from_an_empty_folder_beside_an_old_jax(tmp_path, monkeypatch):
    """One notebook: all share the cell that installs."""

    def run(*words):
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=900)

    source, python = tmp_path / "source", tmp_path / "old" / "bin" / "python"
    run("git", "clone", "--quiet", ROOT, source)
    run("git", "-C", source, "checkout", "--quiet", "-B", "published")
    run(sys.executable, "-m", "venv", tmp_path / "old")
    run(python, "-m", "pip", "install", "--quiet", *OLD)
    kernel = {"argv": [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]}
    (tmp_path / "kernels" / "old").mkdir(parents=True)
    (tmp_path / "kernels" / "old" / "kernel.json").write_text(
        json.dumps(kernel | {"display_name": "old", "language": "python"})
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.delenv("PYTHONPATH")
    changes = {
        'REPOSITORY = ""': f'REPOSITORY = "file://{source}"',
        'REVISION = "main"': 'REVISION = "published"',
    }
    done = execute(ONE, "smoke", tmp_path / "empty", shared=(), changes=changes, kernel="old")
    assert re.search("^installing .*flax.* jax", printed(done), re.M)
    (run_of_it,) = (tmp_path / "empty" / "jaxrl_async" / "runs").iterdir()
    assert (run_of_it / "metrics.jsonl").read_text().count("\n") == 2


def test_what_notebooks_import_is_there():
    notebooks = [nbformat.read(ROOT / "notebooks" / name, as_version=4) for name in NOTEBOOKS]
    code = "\n".join(c.source for n in notebooks for c in n.cells if c.cell_type == "code")
    lines = set(re.findall(r"^from jaxrl_async.*$", code, re.M))
    assert len(lines) > 5
    for line in lines:
        exec(line, {})


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_with_what_it_showed(name):
    path = ROOT / "notebooks" / name
    notebook = nbformat.read(path, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs) or len(outputs) > 3
    assert not [output for output in outputs if output.output_type == "error"]
    assert not re.search(r"/(tmp|root|home|work|content)/", printed(notebook)), "a machine's path"


@pytest.fixture
def preparation():
    """launch/notebook.py, as a module."""
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "launch" / "notebook.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SETUP = """[options]
install_requires =
    absl-py>=2.1
    # A comment.
    jax>=0.10.2,<0.11; python_version < "3.99"
    jax>=0.99; python_version >= "3.99"
    numpy>=2.0
"""


@pytest.mark.parametrize(
    ("installed", "missing"),
    [
        ({"absl-py": "2.3", "jax": "0.10.2", "numpy": "2.1"}, []),
        ({"absl-py": "2.3", "jax": "0.7.2", "numpy": "2.1"}, ["jax<0.11,>=0.10.2"]),
        ({"jax": "0.10.2", "numpy": "1.26"}, ["absl-py>=2.1", "numpy>=2.0"]),
    ],
)
def test_what_is_missing_or_too_old_is_installed(preparation, installed, missing, monkeypatch):
    monkeypatch.setattr(preparation, "_version", lambda name: installed.get(name, "0"))
    assert preparation.unmet(preparation.requirements(SETUP)) == missing


@pytest.mark.parametrize(
    ("platform", "installed", "driver", "wanted"),
    [
        ("cpu", {}, 0, ""),
        ("gpu", {}, 580, "jax[cuda13]==0.10.2"),
        ("gpu", {"jax-cuda12-plugin": "0.7.2"}, 550, "jax[cuda12]==0.10.2"),
        ("gpu", {"jax-cuda12-plugin": "0.10.2"}, 550, ""),
        ("tpu", {}, 0, "jax[tpu]==0.10.2"),
        ("tpu", {"libtpu": "0.0.42"}, 0, ""),
    ],
)
def test_an_accelerator_gets_the_plug_in_of_the_installed_jax(
    preparation, platform, installed, driver, wanted, monkeypatch
):
    versions = {"jax": "0.10.2"} | installed
    monkeypatch.setattr(preparation, "_version", lambda name: versions.get(name, "0"))
    monkeypatch.setattr(preparation, "_driver", lambda: driver)
    assert preparation.missing_plugin(platform) == wanted


def test_a_pip_that_fails_and_a_jax_that_is_imported_say_so(preparation, monkeypatch):
    ended = subprocess.CompletedProcess([], 1, "", "no such package")
    monkeypatch.setattr(preparation.subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(RuntimeError, match="pip failed:\nno such package"):
        preparation.install(["jax==1"])
    ended.returncode = 0
    monkeypatch.setattr(preparation, "_version", lambda name: "99.0")
    with pytest.raises(RuntimeError, match=r"jax .* is imported, 99\.0 is installed: restart"):
        preparation.install(["jax==99"])


def test_the_machine_is_described(preparation):
    describe = preparation.describe
    assert describe(("tpu", 1), one_process=True) == "1 TPU: all roles share one process"
    assert describe(("gpu", 2), one_process=False) == ("2 GPUs: each role has a process of its own")
    assert describe(("cpu", 0), one_process=False).startswith("no accelerator: each role")


def test_notebooks_share_their_first_cell():
    cells = set()
    for name in NOTEBOOKS:
        notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
        cells |= {c.source for c in notebook.cells if "parameters" in c.metadata.get("tags", ())}
    assert len(cells) == 1


def test_outside_of_a_clone_the_first_cell_asks_for_the_url(tmp_path):
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="is no clone: set REPOSITORY"):
        execute("quickstart.ipynb", "smoke", tmp_path, shared=())


@pytest.fixture
def publish(tmp_path):
    """Runs launch/badges.py on copies of the notebooks: words → what it printed, and the notebooks by name."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks")
    (tmp_path / "launch").mkdir()
    script = shutil.copy(ROOT / "launch" / "badges.py", tmp_path / "launch")

    def run(*words):
        command = [sys.executable, script, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        files = {n: nbformat.read(tmp_path / "notebooks" / n, as_version=4) for n in NOTEBOOKS}
        return done, files

    return run


def test_whoever_publishes_gives_the_url_once_for_badges_and_clones(publish):
    publish("https://github.com/a/b")
    done, notebooks = publish("https://github.com/some-org/some.repo.git", "--revision=v1.2")
    assert done.returncode == 0, done.stderr
    for name, notebook in notebooks.items():
        before = nbformat.read(ROOT / "notebooks" / name, as_version=4)
        title, line, *rest = [t for t in notebook.cells[0].source.split("\n") if t]
        page = f"some-org/some.repo/blob/v1.2/notebooks/{name}"
        assert f"(https://colab.research.google.com/github/{page})" in line
        quoted = page.replace("/", "%2F")
        assert f"kernels/welcome?src=https%3A%2F%2Fgithub.com%2F{quoted})" in line
        assert [title, *rest] == [t for t in before.cells[0].source.split("\n") if t]
        code = 'REPOSITORY = "https://github.com/some-org/some.repo"'
        changed = [c for c, d in zip(notebook.cells, before.cells, strict=True) if c != d]
        assert changed[1].source.count(code) == 1 and 'REVISION = "v1.2"' in changed[1].source
        assert len(changed) == 2


def test_badges_are_for_github_alone(publish):
    done, _ = publish("https://example.org/a/b")
    assert done.returncode == 2 and "got 'https://example.org/a/b'" in done.stderr


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_small_and_has_a_size_to_set(name):
    assert (ROOT / "notebooks" / name).stat().st_size < MAX_BYTES

"""The notebooks run from top to bottom: at the smoke size in the normal run, whole with --long."""

import importlib.util
import pathlib

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
CELL_TIMEOUT_SECS = 600
MAX_BYTES = 200_000  # of a notebook with its outputs


def execute(name: str, size: str, directory: pathlib.Path) -> nbformat.NotebookNode:
    """Runs a notebook in a directory that stands for a clone; the executed notebook."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    (parameters,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    assert 'size = "whole"' in parameters.source
    parameters.source = parameters.source.replace('size = "whole"', f'size = "{size}"')
    (directory / "notebooks").mkdir()
    (directory / "configs").symlink_to(ROOT / "configs")
    client = nbclient.NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_SECS,
        kernel_name="python3",
        resources={"metadata": {"path": str(directory / "notebooks")}},
    )
    return client.execute()


def printed(notebook: nbformat.NotebookNode) -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(o.text for o in outputs if o.output_type == "stream")


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Notebooks run without the 8 host devices of the tests."""
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook packages
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path):
    done = execute(name, "smoke", tmp_path)
    assert "Traceback" not in printed(done)
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_whole_notebook_shows_what_it_says(name, tmp_path):
    done = printed(execute(name, "whole", tmp_path))
    if name == "quickstart.ipynb":
        before, after = (
            float(line.split("greedy ")[1].split(" ")[0])
            for line in done.splitlines()
            if line.startswith("step ")
        )
        assert before < 0.5 and after > 0.8
    if name == "replay.ipynb":
        assert "equal, bit for bit: True" in done


@pytest.mark.parametrize("name", NOTEBOOKS)
@pytest.mark.parametrize("missing", ["matplotlib", "grain", None])
def test_a_notebook_installs_where_a_dependency_is_missing(name, missing, tmp_path, monkeypatch):
    """The package itself is always found, in the clone that is the working directory."""
    notebook = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    (cell,) = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", ())]
    monkeypatch.chdir(tmp_path)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name)
    )
    found = {"installed": False}
    exec(cell.source.replace("%pip install --quiet {root}", "installed = True"), found)
    assert found["installed"] == (missing is not None)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_small_and_has_a_size_to_set(name):
    assert (ROOT / "notebooks" / name).stat().st_size < MAX_BYTES

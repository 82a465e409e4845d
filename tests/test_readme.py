"""The README is short and its tree is the code's; the table of losses and the lines that add one are true."""

import dataclasses
import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_async.config import loss as loss_config
from jaxrl_async.objectives import surrogates
from jaxrl_async.objectives.objective import objective
from jaxrl_async.objectives.tokens import Tokens

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
LOSSES = (ROOT / "docs" / "losses.md").read_text("utf-8")
TABLE = LOSSES.partition("| name | equation |")[2].partition("\n\n")[0]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.split("\n") if line.startswith("| `")]
ROOMS = {"worker": "rollout", "overlong": "rewards", "learner": "learner", "packing": "learner"}
MAX_LINES = 150
FIELDS = {field.name: field for field in dataclasses.fields(loss_config.LossConfig)}
NAMES = {n: field.metadata["choices"] for n, field in FIELDS.items() if "choices" in field.metadata}


def test_the_readme_fits_on_a_few_screens():
    assert len(README.splitlines()) <= MAX_LINES


def test_the_tree_names_every_room_once():
    tree = README.partition("## The tree")[2].partition("```\n")[2].partition("```")[0]
    package = ROOT / "jaxrl_async"
    rooms = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    modules -= {"sglang_jax.py"}  # an old name
    assert sorted(re.findall(r"^  (\S+)", tree, re.M)) == sorted(rooms | modules)
    for name in re.findall(r"(\w+)/", tree.splitlines()[-1]):
        assert (ROOT / name).is_dir()


def test_reading_starts_at_files_that_exist():
    words = README.partition("**Start reading at**")[2].partition("\n\n")[0]
    names = re.findall(r"`([\w/.]+)`", words)
    assert len(names) > 8
    for name in names:
        assert (ROOT / "jaxrl_async" / name).exists() or (ROOT / name).exists(), name


def test_the_readme_names_every_part_of_a_loss():
    words = README.partition("## Losses")[2].partition("\n## ")[0]
    for key in set(NAMES) - {"a3po_fresh", "kl_to"}:
        (names,) = re.findall(rf"`{key}`: ([^.`]*)", re.sub(r" \(.*?\)", "", words))
        assert set(re.findall(r"\w+", names)) == set(NAMES[key]) - {""}, key


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_names_what_there_is(row):
    _, _, functions, tests, _ = row
    for module, name in re.findall(r"`(\w+)\.([\w*]+)`", functions):
        found = importlib.import_module(f"jaxrl_async.{ROOMS.get(module, 'objectives')}.{module}")
        assert name == "*" or callable(getattr(found, name))
    for name in re.findall(r"`(test_\w+)`", tests):
        assert list((ROOT / "tests").rglob(f"{name}.py")), name


def test_every_name_of_a_loss_stands_in_the_table():
    text = "\n".join(row[0] for row in ROWS)
    for preset in set(loss_config.PRESETS) - {""}:
        assert f"\n| `{preset}` | " in LOSSES
    for key, names in NAMES.items():
        if key == "preset":
            continue
        for name in set(names) - {"none", "token"}:
            assert f'"{name}"' in text, f"loss.{key} = {name!r} is not in docs/losses.md"


def test_the_lines_that_add_a_surrogate_add_it(monkeypatch):
    (lines,) = re.findall(r"```python\n(.*?)```", LOSSES, re.DOTALL)
    source, names = lines.split("# config/loss.py\n")
    assert len(lines.splitlines()) <= 10
    monkeypatch.setattr(surrogates, "SURROGATES", dict(surrogates.SURROGATES))
    exec(source, dict(vars(surrogates)))
    found = {}
    exec(names, found)
    known = FIELDS["surrogate"].metadata | {"choices": found["SURROGATES"]}
    monkeypatch.setattr(FIELDS["surrogate"], "metadata", known)
    ones = jnp.ones((1, 2))
    tokens = Tokens(-ones, -1.1 * ones, None, None, ones, 0 * ones, ones.astype(int), ones > 0)
    config = loss_config.LossConfig(surrogate="tanh", anchor="behavior", clip_high=0.2)
    loss, grad = jax.value_and_grad(
        lambda x: objective(Tokens(x, *list(vars(tokens).values())[1:]), config).loss.sum()
    )(tokens.logprobs)
    np.testing.assert_allclose(loss, -2 * 0.2 * np.tanh(0.5), rtol=1e-5)
    np.testing.assert_allclose(grad, -(1 - np.tanh(0.5) ** 2) * np.ones((1, 2)), rtol=1e-5)

"""The README's table of losses and its example are true: names, functions, tests, and the lines that add one."""

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
LOSSES = (ROOT / "README.md").read_text("utf-8").partition("## Losses")[2].partition("\n## ")[0]
ROWS = [line.strip("| ").split(" | ") for line in LOSSES.split("\n") if line.startswith("| `")]
SECTIONS = {
    re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
    for title in re.findall(
        r"^## (.+)$", (ROOT / "benchmarks" / "README.md").read_text("utf-8"), re.M
    )
}
ROOMS = {"worker": "rollout", "overlong": "rewards"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_names_what_there_is(row):
    _, _, functions, tests, results = row
    for module, name in re.findall(r"`(\w+)\.([\w*]+)`", functions):
        found = importlib.import_module(f"jaxrl_async.{ROOMS.get(module, 'objectives')}.{module}")
        assert name == "*" or callable(getattr(found, name))
    for name in re.findall(r"`(test_\w+)`", tests):
        assert (ROOT / "tests" / f"{name}.py").exists(), name
    for section in re.findall(r"benchmarks/README.md#([\w-]+)", results):
        assert section in SECTIONS


def test_every_name_of_a_loss_stands_in_the_table():
    text = "\n".join(row[0] for row in ROWS)
    for key, names in loss_config._NAMES.items():
        for name in set(names) - {"none", "token"}:
            assert f'"{name}"' in text, f"loss.{key} = {name!r} is not in the README"


def test_the_lines_that_add_a_surrogate_add_it(monkeypatch):
    (lines,) = re.findall(r"```python\n(.*?)```", LOSSES, re.DOTALL)
    source, names = lines.split("# loss_config.py\n")
    assert len(lines.splitlines()) <= 10
    monkeypatch.setattr(surrogates, "SURROGATES", dict(surrogates.SURROGATES))
    exec(source, dict(vars(surrogates)))
    found = {}
    exec(names, found)
    monkeypatch.setattr(
        loss_config, "_NAMES", loss_config._NAMES | {"surrogate": found["SURROGATES"]}
    )
    ones = jnp.ones((1, 2))
    tokens = Tokens(-ones, -1.1 * ones, None, None, ones, 0 * ones, ones.astype(int), ones > 0)
    config = loss_config.LossConfig(surrogate="tanh", anchor="behavior", clip_high=0.2)
    loss, grad = jax.value_and_grad(
        lambda x: objective(Tokens(x, *list(vars(tokens).values())[1:]), config).loss.sum()
    )(tokens.logprobs)
    np.testing.assert_allclose(loss, -2 * 0.2 * np.tanh(0.5), rtol=1e-5)
    np.testing.assert_allclose(grad, -(1 - np.tanh(0.5) ** 2) * np.ones((1, 2)), rtol=1e-5)

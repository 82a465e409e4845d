"""A state by its paths is flax's; what walks it leaves no arrays to the garbage collector."""

import dataclasses
import gc
import pathlib
import re
import weakref

import jax
import jax.numpy as jnp
import pytest
from fixtures.adapters import ALL, host_params, one_device
from fixtures.models import tiny
from flax import nnx

import jaxrl_async
from jaxrl_async.learner.blocks import Blocks
from jaxrl_async.models import hf, lora, sharding, transformer
from jaxrl_async.models.state import by_path, mapped, of_paths

CONFIG = tiny(lora=ALL)
PLAIN = dataclasses.replace(CONFIG, lora=None)


def test_it_has_flaxs_paths_and_variables():
    params = transformer.abstract_params(CONFIG)
    found = by_path(params)
    assert list(found.items()) == list(nnx.to_flat_state(params))
    assert jax.tree.structure(of_paths(found)) == jax.tree.structure(params)
    names = mapped(lambda path, param: param.replace(".".join(path)), params)
    assert names["blocks"]["query"]["kernel"].get_value() == "blocks.query.kernel"


def test_the_package_walks_a_state_in_no_other_way():
    walks = re.compile(r"nnx\.(map|split|merge|filter|diff)_state|flat_state\(|pure_dict")
    files = pathlib.Path(jaxrl_async.__file__).parent.rglob("*.py")
    found = {file.name for file in files if walks.search(file.read_text("utf-8"))}
    assert found == {"state.py"}  # which makes one of paths, without a cycle


def pushed(params):
    for _ in hf.to_tensors(lora.split(params)[1], PLAIN, "float32"):
        pass


@pytest.mark.parametrize(
    "walk",
    [
        pytest.param(pushed, id="a push"),
        pytest.param(lambda params: lora.join(*lora.split(params)), id="adapters, apart and back"),
        pytest.param(lambda params: lora.merged(params, ALL), id="adapters, merged"),
        pytest.param(lambda params: sharding.param_shardings(one_device(), params), id="shardings"),
        pytest.param(lambda params: Blocks(2, 2, 1).cuts(params, 0), id="blocks"),
    ],
)
def test_no_array_waits_for_the_garbage_collector(walk):
    params = jax.tree.map(jnp.array, lora.join(*host_params(CONFIG)))
    arrays = [weakref.ref(leaf) for leaf in jax.tree.leaves(params)]
    gc.collect()
    gc.disable()
    try:
        walk(params)
        del params
        assert [found() for found in arrays if found() is not None] == []
    finally:
        gc.enable()

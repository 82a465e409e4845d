"""Tests run on the CPU with 8 host devices; rank promotion raises; warnings are errors."""

import os

from fixtures import compilation, leftovers

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ |= compilation.variables() | {leftovers.MARK: str(os.getpid())}

import hypothesis
import jax
import pytest
from fixtures import compilers, schedule
from fixtures.runs import command, finished, run, shared, verb  # noqa: F401

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Of pytest's processes, and not of those that they start.
jax.config.update("jax_num_cpu_devices", 8)
compilers.add_to_path()


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run what takes minutes")
    parser.addoption("--part", default="1/1", metavar="I/N", help="run part I of N, from 1")


def pytest_configure(config):
    if config.getoption("--long"):
        os.environ |= compilation.shipped()
        jax.config.update("jax_disable_most_optimizations", False)
    if not hasattr(config, "workerinput"):
        leftovers.end_orphans()
        compilation.prune(compilation.directory())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    compilation.optimise("optimised" in item.keywords or item.config.getoption("--long"))
    for mark in item.iter_markers("compiler"):
        compilers.require(*mark.args)
    if "accelerator" in item.keywords and jax.default_backend() == "cpu":
        pytest.skip("needs a GPU or a TPU: JAX_PLATFORMS= python -m pytest -m accelerator")


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left():
    yield
    left = leftovers.end()
    assert not left, "\n".join(left)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config, log):
    return schedule.Distribution(config, log) if config.getoption("--long") else None


def pytest_collection_modifyitems(config, items):
    long = config.getoption("--long")
    skip = pytest.mark.skip(reason="takes minutes: run with --long")
    for item in items:
        if "long" in item.keywords and not long:
            item.add_marker(skip)
    items[:] = schedule.in_order(items, schedule.weights_of(items, long))
    part, num_parts = (int(word) for word in config.getoption("--part").split("/"))
    if not 1 <= part <= num_parts:
        raise pytest.UsageError(f"--part must be i/n with 1 ≤ i ≤ n, got {part}/{num_parts}")
    chosen = schedule.part_of(items, schedule.weights_of(items, long), part, num_parts)
    out = [item for item, its in zip(items, chosen, strict=True) if not its]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item, its in zip(items, chosen, strict=True) if its]

"""Tests run on the CPU with 8 host devices; rank promotion raises; warnings are errors."""

import os

from fixtures import compilation

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ |= compilation.variables()

import hypothesis
import jax
import pytest
from fixtures.runs import command, finished, run, shared, verb  # noqa: F401

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run what takes minutes")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        compilation.prune(compilation.directory())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    compilation.optimise("optimised" in item.keywords or item.config.getoption("--long"))


def pytest_collection_modifyitems(config, items):
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="takes minutes: run with --long")
    for item in items:
        if "long" in item.keywords:
            item.add_marker(skip)

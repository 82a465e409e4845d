"""The list of mutations of the losses: it still fits the source, and (--long) each is noticed by a test."""

import subprocess
import sys

import pytest
from fixtures import mutations


def test_every_mutation_still_finds_what_it_replaces():
    assert mutations.not_found() == []
    assert all(m.old != m.new for m in mutations.MUTATIONS)
    assert len(mutations.MUTATIONS) > 100


@pytest.mark.long
@pytest.mark.parametrize("file", dict.fromkeys(m.file for m in mutations.MUTATIONS))
def test_every_mutation_is_killed(file):
    command = [sys.executable, mutations.__file__, file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

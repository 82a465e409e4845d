"""The weights of a published version: its own, or with a delay those of an older one."""

import collections
import concurrent.futures
import itertools
import json
import pathlib
import shutil
import threading
import types

import jax
import numpy as np
import pytest
from fixtures.models import tiny
from fixtures.small_learner import empty_status
from fixtures.tensors import read_tensors

from jaxrl_async.cli import config as config_lib
from jaxrl_async.config.build import make_settings
from jaxrl_async.config.settings import SettingsError
from jaxrl_async.learner import processes
from jaxrl_async.learner.versions import Delay, Versions
from jaxrl_async.models import sharding
from jaxrl_async.records import ResumePoint
from jaxrl_async.sealed import DamagedError
from jaxrl_async.versions.store import SCORES, WeightStore

QUICKSTART = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.py"
CONFIG = tiny(num_layers=1)
NORM = "model.norm.weight"
NO_DELAY = Delay(0, uniform=False, seed=0)
RESUME_POINT = ResumePoint(3, 12, (), {}, {})


class Publisher:
    """Writes at once; the last version is the one that servers would load."""

    def __init__(self):
        self.held = None
        self.pushed = []  # (version, run epoch, resume_point)

    def publish(self, version, write, *, timeout_secs, resume_point, run_epoch):
        self.held = write()
        self.pushed.append((version, run_epoch, resume_point))

    def metrics(self):
        return {"weights/version": 1, "weights/delay": 2}


@pytest.fixture(scope="module")
def params():
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    return sharding.init_sharded(CONFIG, mesh, seed=0)


@pytest.fixture
def make(params, tmp_path):
    """Versions over one directory; `given(n)` publishes n, all of whose weights are n, and returns what servers get."""

    def make(delay, *, keep):
        store, publisher = WeightStore(tmp_path / "weights", keep=keep), Publisher()
        versions = Versions(
            publisher, store, config=CONFIG, dtype="float32", timeout_secs=1.0, delay=delay
        )

        def given(version):
            state = types.SimpleNamespace(params=jax.tree.map(lambda x: x * 0 + version, params))
            versions.publish(version, versions.snapshot(state))
            held = publisher.held.version if publisher.held else None
            assert held is None or set(read_tensors(store.path(held))[NORM]) == {held}
            return held

        def resume(version, status, forked=False):
            state = types.SimpleNamespace(params=jax.tree.map(lambda x: x * 0 + version, params))
            versions.resume(version, state, status, RESUME_POINT, forked=forked)

        return types.SimpleNamespace(
            given=given, resume=resume, versions=versions, store=store, pushed=publisher.pushed
        )

    return make


def test_a_delay_of_d_steps_holds_the_version_d_steps_before_and_never_one_below_0():
    two = Delay(2, uniform=False, seed=0)
    assert [two.held(n) for n in range(6)] == [0, 0, 0, 1, 2, 3]
    none = Delay(0, uniform=False, seed=0)
    assert [none.held(n) for n in range(4)] == [0, 1, 2, 3]


def test_a_drawn_delay_is_any_of_0_to_d_alike_and_may_go_back():
    delay = Delay(3, uniform=True, seed=0)
    held = [delay.held(n) for n in range(4000)]
    counts = collections.Counter(n - h for n, h in enumerate(held[3:], start=3))
    # 4 values of 3997 draws: 1000 each, with a standard deviation of √(3997·¼·¾) = 27.
    assert set(counts) == {0, 1, 2, 3} and all(abs(c - 1000) < 140 for c in counts.values())
    assert any(after < before for before, after in itertools.pairwise(held))
    assert min(held) == 0


def test_a_drawn_delay_depends_on_the_seed_and_the_version_alone():
    def draws(seed, versions):
        return {n: Delay(3, uniform=True, seed=seed).held(n) for n in versions}

    assert draws(1, range(50)) == draws(1, reversed(range(50))) != draws(2, range(50))


def test_a_new_run_does_not_go_on_with_the_journal_of_another_one(make, params):
    run, state = make(NO_DELAY, keep=2), types.SimpleNamespace(params=params)
    with pytest.raises(DamagedError, match="published version 7.*journal.path"):
        run.versions.begin(state, empty_status(v_pub=7))
    assert run.pushed == []
    run.versions.begin(state, empty_status(v_pub=None))
    assert run.pushed == [(0, 0, None)]


def test_every_version_is_written_and_the_one_before_the_delay_is_given(make):
    run = make(Delay(2, uniform=False, seed=0), keep=4)
    assert [run.given(n) for n in range(7)] == [0, 0, 0, 1, 2, 3, 4]
    # The weights that servers had before are still there for one that is late.
    assert run.store.versions() == [3, 4, 5, 6]
    assert run.versions.metrics() == {"weights/version": 1, "weights/delay": 2}


def test_drawn_weights_are_in_the_store_whenever_they_are_asked_for(make, caplog):
    delay = Delay(3, uniform=True, seed=1)
    run = make(delay, keep=5)
    assert [run.given(n) for n in range(12)] == [delay.held(n) for n in range(12)]
    assert caplog.text == ""


def test_without_a_delay_every_version_is_given_itself(make):
    run = make(Delay(0, uniform=False, seed=0), keep=2)
    assert [run.given(n) for n in range(4)] == [0, 1, 2, 3]
    assert run.store.versions() == [2, 3]
    assert run.versions.metrics() == {"weights/version": 1}


def test_a_resumed_run_finds_the_delayed_weights_on_disk(make, caplog):
    delay = Delay(2, uniform=False, seed=0)
    before = make(delay, keep=4)
    for version in range(6):
        before.given(version)
    assert [make(delay, keep=4).given(n) for n in (5, 6)] == [3, 4]
    assert caplog.text == ""


def test_a_resumed_run_whose_delayed_weights_are_gone_takes_the_oldest_and_says_so(make, caplog):
    delay = Delay(3, uniform=False, seed=0)
    before = make(delay, keep=5)
    for version in range(8):
        before.given(version)
    after = make(delay, keep=5)  # … of a checkpoint of step 5. The store holds 3 to 7.
    assert after.given(5) == 3
    assert (
        "version 5 is published with the weights of version 3: those of version 2," in caplog.text
    )
    caplog.clear()
    assert [after.given(n) for n in (6, 7, 8)] == [3, 4, 5]
    assert caplog.text == ""


def at(v_pub, committed_step, run_epoch=0):
    return empty_status(v_pub=v_pub, committed_step=committed_step, run_epoch=run_epoch)


@pytest.fixture
def left(make):
    """Versions 0 to 5, published by a learner that is gone, and the next learner's."""
    before = make(NO_DELAY, keep=3)
    for version in range(6):
        before.given(version)
    return make(NO_DELAY, keep=3)


def test_a_queue_without_a_journal_gets_the_resume_point(left, caplog):
    left.resume(3, empty_status(v_pub=None))
    assert left.pushed == [(3, 0, RESUME_POINT)]


def test_a_restored_version_is_published_where_no_later_one_was(left):
    left.resume(3, at(v_pub=2, committed_step=4))
    assert left.pushed == [(3, 0, None)]


def test_a_published_version_is_pushed_again_and_the_steps_up_to_it_are_trained_without_a_push(
    left,
):
    left.resume(3, at(v_pub=5, committed_step=6, run_epoch=1))
    assert left.pushed == [(5, 1, None)]
    for version in (4, 5):  # 5 comes out with the bits it had.
        left.given(version)
    assert left.pushed == [(5, 1, None)]
    left.given(6)
    assert left.pushed == [(5, 1, None), (6, 1, None)]


def test_scores_of_an_earlier_learner_are_not_compared_with(left):
    """They are of its temperature and of its length of a request, which a resumed run may change."""
    np.save(left.store.path(5) / SCORES, np.zeros((8, 4), np.float32))
    left.resume(3, at(v_pub=5, committed_step=6, run_epoch=1))
    assert left.store.get(5).scores() is None


def test_other_weights_under_a_published_version_are_a_fork(left, params, caplog):
    left.resume(3, at(v_pub=5, committed_step=5))
    state = types.SimpleNamespace(params=jax.tree.map(lambda x: x * 0 + 5.5, params))
    left.versions.publish(5, left.versions.snapshot(state))
    assert left.pushed == [(5, 0, None), (5, 1, None)]
    assert set(read_tensors(left.store.path(5))[NORM]) == {5.5}
    assert "fork: version 5 has digest" in caplog.text
    left.given(6)
    assert left.pushed[-1] == (6, 1, None)


def test_a_resume_compares_its_weights_with_the_published_ones_of_that_version(
    left, params, caplog
):
    left.resume(5, at(v_pub=5, committed_step=5))
    assert left.pushed == [(5, 0, None)] and "fork" not in caplog.text
    left.pushed.clear()
    state = types.SimpleNamespace(params=jax.tree.map(lambda x: x * 0 + 5.5, params))
    left.versions.resume(5, state, at(v_pub=5, committed_step=5), RESUME_POINT)
    assert left.pushed == [(5, 1, None)] and "fork: version 5 has digest" in caplog.text
    assert set(read_tensors(left.store.path(5))[NORM]) == {5.5}


@pytest.mark.parametrize("version", [3, 5, 6])
def test_a_fallback_begins_a_run_epoch_whatever_was_published(left, version):
    left.resume(version, at(v_pub=5, committed_step=6), forked=True)
    assert left.pushed == [(max(version, 5), 1, None)]


@pytest.mark.parametrize("version", [3, 5])
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_damaged_files_of_a_published_version_are_neither_pushed_nor_compared_with(
    left, caplog, version, name
):
    path = left.store.path(5) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    left.resume(version, at(v_pub=5, committed_step=6))
    if version == 3:
        assert left.pushed == [] and f"{path}" in caplog.text
        left.given(5)
    assert left.pushed == [(5, 0, None)]
    assert set(read_tensors(left.store.path(5))[NORM]) == {5}


def test_a_published_version_whose_files_are_gone_is_published_when_it_was_trained_again(
    make, caplog
):
    run = make(NO_DELAY, keep=3)
    run.resume(3, at(v_pub=5, committed_step=6))
    assert run.pushed == [] and "published version 5 are no longer" in caplog.text
    run.versions.publish(4, iter(()))
    assert run.pushed == []
    run.given(5)
    assert run.pushed == [(5, 0, None)]


def test_a_journal_that_ends_before_the_checkpoint_is_refused(left):
    with pytest.raises(ValueError, match=r"step 3\b.*journal .*step 2\b"):
        left.resume(3, at(v_pub=2, committed_step=2))


@pytest.fixture
def two(params, tmp_path, monkeypatch):
    """Calls the versions of two processes, each with a disk of its own, at once; returns what each has pushed."""
    barriers = collections.defaultdict(lambda: threading.Barrier(2))
    lock = threading.Lock()

    def barrier(name, *, timeout_secs):
        with lock:
            found = barriers[name]
        found.wait(timeout_secs)

    monkeypatch.setattr(processes, "barrier", barrier)
    how = {"config": CONFIG, "dtype": "float32", "timeout_secs": 10.0, "delay": NO_DELAY}
    stores = [WeightStore(tmp_path / str(i), keep=3) for i in range(2)]

    def run(*calls):
        def one(process):
            publisher, part = Publisher(), {"process": process, "num_processes": 2}
            versions = Versions(publisher, stores[process], **how, **part)
            for call in calls:
                call(versions)
            return publisher.pushed

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2))), stores

    return run


def test_of_processes_without_a_common_disk_the_first_writes_all_of_a_version(
    two, params, tmp_path
):
    def given(version):
        state = types.SimpleNamespace(params=jax.tree.map(lambda x: x * 0 + version, params))
        return lambda versions: versions.publish(version, versions.snapshot(state))

    def resume(version, v_pub):
        state = types.SimpleNamespace(params=jax.tree.map(lambda x: x * 0 + version, params))
        status = at(v_pub, committed_step=v_pub)
        return lambda versions: versions.resume(version, state, status, RESUME_POINT)

    pushed, stores = two(*map(given, range(6)))
    assert [[version for version, *_ in of] for of in pushed] == [list(range(6))] * 2
    assert [store.versions() for store in stores] == [[3, 4, 5], []]
    assert set(read_tensors(stores[0].path(5))[NORM]) == {5}
    # A resume at the published version; and before it, with its files and without.
    assert two(resume(5, 5))[0] == [[(5, 0, None)]] * 2
    assert two(resume(3, 5), given(4), given(5), given(6))[0] == [[(5, 0, None), (6, 0, None)]] * 2
    shutil.rmtree(stores[0].path(6))
    assert two(resume(4, 6), given(5), given(6))[0] == [[(6, 0, None)]] * 2


@pytest.mark.parametrize("delay_steps", ["1", "uniform(2)"])
def test_a_delay_needs_every_step_to_be_published(delay_steps):
    config = json.loads(config_lib.load_config(str(QUICKSTART)).to_json())
    config["rollout"]["delay_steps"] = delay_steps
    make_settings(config)
    config["weights"]["push_every_steps"] = 2
    with pytest.raises(
        SettingsError, match=r"delay_steps.* weights\.push_every_steps .*1\b.*\b2\b"
    ):
        make_settings(config)
    config["rollout"]["delay_steps"] = "uniform(0)"
    make_settings(config)

"""The disk of a workdir: the plan at the start, and the stop before it is full."""

import pytest

from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.runtime import disk

GB = 10**9


def room(tmp_path, free, record=0, **changes):
    """A run of 5,000 steps, whose journal grows by 208 kB a step, with checkpoints of 5 GB and versions of 1 GB."""
    config = load_config("configs/quickstart.py")
    config.learner.update(num_steps=5000, groups_per_step=100)
    config.rollout.update(group_size=16, max_prompt_tokens=6, max_new_tokens=4)
    config.checkpoint.update(every_steps=20, keep=2)
    config.journal.update(changes)
    return disk.Room(settings_of(config), tmp_path, 5 * GB, GB, record, lambda path: int(free))


def test_the_plan_says_what_the_run_takes_and_from_which_step_on_it_may_not_fit(tmp_path):
    # 5 checkpoints, 3 versions and 5,000 · 100 · 16 · 10 · 13 bytes: 29.04 GB. The journal begins at 28 GB.
    text, fits = room(tmp_path, 79 * GB).plan(0)
    assert (
        fits
        and text
        == "disk: journal, versions, checkpoints: at most 29 GB of 79 GB free by step 5,000"
    )
    # With 384 bytes of routes a token, 5,000 · 100 · 16 · 10 · 397 bytes beside 28 GB.
    text, fits = room(tmp_path, 79 * GB, record=384).plan(0)
    assert fits and "at most 59.8 GB of 79 GB" in text
    text, fits = room(tmp_path, 28 * GB + 4100 * 208_000).plan(0)
    assert not fits and "at most 29 GB of 28.9 GB free by step 5,000" in text
    assert "with a checkpoint from step 4,100 on: free some, or lower journal.max_bytes" in text


@pytest.mark.parametrize(
    "changes",
    [{"keep": "none"}, {"path": "/elsewhere/j"}, {"max_bytes": 1000}, {"keep": "checkpointed"}],
)
def test_a_journal_that_is_bounded_or_elsewhere_fits(changes, tmp_path):
    assert room(tmp_path, 28.1 * GB, **changes).plan(0)[1]


def test_checkpoints_that_are_there_take_no_more_room(tmp_path):
    for step in (0, 20, 40):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    assert "at most 14 GB" in room(tmp_path, 79 * GB).plan(40)[0]


def test_the_room_is_low_while_a_last_checkpoint_still_fits(tmp_path):
    # Two checkpoints, as more of them are kept after the next one, and two versions.
    needed = 12 * GB + 2 * 208_000 + disk.RESERVE_BYTES
    assert not room(tmp_path, needed).is_low()
    assert room(tmp_path, needed - 1).is_low()
    assert (
        "before the disk is full: 12.1 GB are free, 12.1 GB are needed: free some"
        in room(tmp_path, needed - 1).error()
    )
    for step in (0, 20):  # One of these, of step 0, is kept beside the two newest ones.
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    assert room(tmp_path, needed - 1).is_low()
    (tmp_path / "checkpoints" / "40").mkdir()
    assert not room(tmp_path, needed - 5 * GB).is_low()
    assert room(tmp_path, needed - 5 * GB - 1).is_low()


def test_a_disk_that_was_low_stays_so_and_is_looked_at_once_in_a_while(tmp_path):
    now, free = [0.0], [100 * GB]
    watched = room(tmp_path, 0)
    watch = disk.Watch(
        disk.Room(watched.settings, tmp_path, 5 * GB, GB, 0, lambda path: free[0]), lambda: now[0]
    )
    assert not watch()
    free[0] = 0
    assert not watch()
    now[0] += disk.LOOK_SECS
    assert watch() and watch.is_low
    free[0], now[0] = 100 * GB, 100.0
    assert watch()


def test_the_plan_of_this_start_is_found_in_the_log(tmp_path):
    log = tmp_path / "learner.log"
    log.write_text("10:00 INFO jaxrl_async.roles.learner: disk: of an earlier start\n")
    start = log.stat().st_size
    assert disk.said(log, start) == ""
    with open(log, "a") as file:
        print("10:01 INFO jaxrl_async.roles.learner: disk: journal, …: at most 29 GB", file=file)
        print("10:02 INFO another line", file=file)
    assert disk.said(log, start) == "disk: journal, …: at most 29 GB"
    start = log.stat().st_size
    with open(log, "a") as file:
        print('{"logger": "a", "message": "disk: journal, \\u2026: at most 2 GB"}', file=file)
    assert disk.said(log, start) == "disk: journal, …: at most 2 GB"

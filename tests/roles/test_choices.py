"""An engine's discrete choices in a whole run: experts and kept tokens, from the servers to learner and replay."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest
from fixtures.runs import QUICKSTART, RUN_TIMEOUT_SECS, environment

from jaxrl_async.metrics import METRICS, read_metrics
from jaxrl_async.queue.journal import JournalReader

UNKNOWN = 255
SETTINGS = {
    "model.family": "qwen3_moe",
    "model.num_experts": 4,
    "model.experts_per_token": 2,
    "model.expert_mlp_dim": 64,
    "rollout.top_p": 0.9,
    "rollout.max_kept": 8,
    "learner.num_minibatches": 1,
}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Of a finished run in several processes, of a mixture of experts whose draws are truncated."""
    workdir = tmp_path_factory.mktemp("choices") / "run"
    words = [f"--config.{name}={value}" for name, value in SETTINGS.items()]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "jaxrl_async", "train", f"--workdir={workdir}"),
            *(f"--config={QUICKSTART}:smoke,mode=sync", *words),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_SECS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return workdir


def test_every_sampled_token_has_its_experts_and_was_among_those_kept(workdir):
    with contextlib.closing(JournalReader(workdir / "journal.sqlite")) as journal:
        rows = [
            row
            for group in map(journal.__getitem__, range(len(journal)))
            for row in group.trajectories
        ]
    assert len(rows) > 8
    for row in rows:
        routes, kept = row.choices.routes, row.choices.kept
        assert routes.shape == (len(row), 2, 2) and routes.dtype == np.uint8
        assert (routes[:-1] < 4).all() and (routes[-1] == UNKNOWN).all()
        assert (routes[:-1, :, 0] != routes[:-1, :, 1]).all()
        is_kept = (kept == row.tokens[:, None]).any(axis=1)
        np.testing.assert_array_equal(is_kept, row.mask)
        assert (kept[~row.mask] == -1).all() and kept.shape[1] <= 8


def test_the_learner_replays_them_to_the_same_log_probs(workdir):
    rows = read_metrics(workdir)
    names = {name for name in METRICS if name.startswith(("experts/", "rollout/kept_"))}
    assert len(names) == 7
    for row in rows:
        assert names <= row.keys()
        # One minibatch a step, so that nothing has moved since the tokens were sampled.
        assert row["mismatch/tokens"] > 0 and row["mismatch/max_abs"] <= 1e-5
        assert row["experts/routes_differ"] == 0 and 0.5 < row["experts/routes_known"] < 1
        assert 1 <= row["rollout/kept_mean"] <= 8 and 1 <= row["experts/load"] <= 2


def test_its_replay_is_the_same_bit_for_bit(workdir, run):
    code, output = run("replay", workdir=workdir)
    assert code == 0 and "step 2: equal, bit for bit" in output, output

"""A run whose teacher is a server: its log-probs in the journal, and a replay that asks nobody (--long)."""

import asyncio
import contextlib
import sys

import jax
import numpy as np
import pytest
from fixtures.runs import QUICKSTART, ROOT, environment
from fixtures.served_engine import serving

from jaxrl_async import parts
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.learner.train_step import mesh_of
from jaxrl_async.metrics import read_metrics
from jaxrl_async.models import sharding
from jaxrl_async.queue.journal import JournalReader

SECS = 300.0


async def verb(name, workdir, *words):
    """(exit code, output) of a verb, beside the servers of this loop."""
    command = [sys.executable, "-m", "jaxrl_async", name, f"--workdir={workdir}", *words]
    pipes = dict.fromkeys(("stdout", "stderr"), asyncio.subprocess.PIPE)
    ended = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=environment(), **pipes)
    output = b"".join(await asyncio.wait_for(ended.communicate(), SECS)).decode()
    return ended.returncode, output


@pytest.mark.long
@pytest.mark.parametrize("processes", ["many", "one"])
async def test_a_served_teachers_log_probs_are_trained_on_and_replayed(tmp_path, processes):
    workdir, config = tmp_path / "run", f"{QUICKSTART}:smoke,mode=sync"
    settings = settings_of(load_config(config))
    shape = parts.model_config_of(settings, parts.tokenizer_of(settings, tmp_path / "other"))
    engine = parts.engine_of(settings, tmp_path / "other", name="teacher")
    engine.start()
    try:
        weights = sharding.init_sharded(shape, mesh_of(settings.learner, jax.devices()[:1]), seed=5)
        engine.update_weights(weights, "0").result(SECS)
        async with serving(engine) as client:
            code, output = await verb(
                "train",
                workdir,
                f"--config={config}",
                f"--config.loss.teacher=arithmetic=http://127.0.0.1:{client.port}",
                f"--config.supervisor.processes={processes}",
            )
        assert code == 0, output
        with contextlib.closing(JournalReader(workdir / "journal.sqlite")) as journal:
            groups = [journal[i] for i in range(len(journal))]
        for row in groups[0].trajectories + groups[-1].trajectories:
            _, scores = engine.score(row.tokens, temperature=1.0).result(SECS)
            expected = np.where(row.mask[1:], scores.logprobs, 0)
            np.testing.assert_array_equal(row.choices.teacher[1:], expected)
    finally:
        engine.close(timeout_secs=SECS)
    assert all(row["policy/kl_teacher"] != 0 for row in read_metrics(workdir))
    code, output = await verb("replay", workdir)  # The teacher is gone.
    assert code == 0 and "step 2: equal, bit for bit" in output, output

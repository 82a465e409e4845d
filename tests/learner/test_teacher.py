"""Distillation from a teacher: its weights from files, its shape, and a policy that comes to have its log-probs."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest
from fixtures.recorded_run import CONFIG, B, Recorder, make_group, make_train_step, train
from fixtures.served_engine import serving
from fixtures.small_learner import flat

from jaxrl_async import parts
from jaxrl_async.active_clock import ActiveClock
from jaxrl_async.config.fields import StartError
from jaxrl_async.config.loss import LossConfig
from jaxrl_async.config.settings import Learner, Settings
from jaxrl_async.inference import engine as engines
from jaxrl_async.learner.packing import Packer
from jaxrl_async.models import hf, sharding
from jaxrl_async.types import Prompt, Record
from jaxrl_async.versions.store import WeightStore

ALONE = {"advantage": "none", "surrogate": "reinforce", "teacher": "a"}


@pytest.fixture
def teacher(tmp_path):
    """A directory of the model's files, and its weights on the mesh."""
    mesh = make_train_step("current", 1)[1]
    weights = jax.tree.map(lambda x: 3 * x, sharding.init_sharded(CONFIG, mesh, seed=1))
    store = WeightStore(tmp_path / "teacher", keep=1)
    return store.write(
        1, hf.to_tensors(weights, CONFIG, "float32"), hf.write_config(CONFIG)
    ), weights


def reference_of(loss, config=CONFIG):
    mesh = make_train_step("current", 1)[1]
    return parts.reference_of(Settings(loss=loss), config, mesh, lambda: "version 0")


def test_the_reference_is_the_teacher_else_version_0_else_none(teacher):
    path, weights = teacher
    found = reference_of(LossConfig(teacher=str(path)))
    np.testing.assert_array_equal(flat(found), flat(weights))
    assert reference_of(LossConfig(kl="k3", kl_coefficient=0.1)) == "version 0"
    assert reference_of(LossConfig()) is None


def test_a_teacher_of_another_shape_is_refused_by_name(teacher):
    other = dataclasses.replace(CONFIG, num_layers=CONFIG.num_layers + 1)
    with pytest.raises(StartError, match=r"loss.teacher .*num_layers = 1, the policy's is 2"):
        reference_of(LossConfig(teacher=str(teacher[0])), other)


def test_a_policy_comes_nearer_to_its_teacher_without_a_reward(teacher):
    class Repeated(Recorder):
        """The same samples in each step."""

        def lease(self, step, *args):
            for chunk in super().lease(step, *args):
                groups = tuple(make_group(g.prompt_index % B, step - 1) for g in chunk.groups)
                yield dataclasses.replace(chunk, groups=groups)

    taught, alone = Repeated(), Repeated()
    train(taught, num_steps=20, loss=ALONE, reference=teacher[1])
    gaps = [row["policy/kl_teacher"] for row in taught.rows]
    assert abs(gaps[-1]) < abs(gaps[0]) / 2
    train(alone, num_steps=1, loss=ALONE | {"teacher_coefficient": 2.0}, reference=teacher[1])
    assert alone.rows[0]["policy/grad_norm"] == pytest.approx(
        2 * taught.rows[0]["policy/grad_norm"], rel=1e-4
    )


@pytest.fixture
async def served(teacher):
    """The address of an embedded server with the teacher's weights."""
    shape = {"num_slots": 2, "max_total_tokens": 16, "decode_chunk": 2}
    engine = engines.Engine(CONFIG, **shape, max_queued_requests=8, name="teacher")
    engine.start()
    try:
        engine.update_weights(teacher[1], "1").result(60)
        async with serving(engine) as client:
            yield f"http://127.0.0.1:{client.port}"
    finally:
        engine.close(timeout_secs=60)


async def test_a_served_teacher_teaches_what_its_files_do(teacher, served):
    settings = Settings(loss=LossConfig(teacher=served))
    asked = parts.teachers_of(settings, ActiveClock())
    prompt = Prompt(0, np.ones(1, np.int32), "", "")
    async with asked.client:
        found = [asked.teach(make_group(i, i // B), prompt) for i in range(2 * B)]
        groups = await asyncio.gather(*found)

    class Taught(Recorder):
        """Whose groups have the server's log-probs."""

        def lease(self, step, *args):
            for chunk in super().lease(step, *args):
                found = tuple(groups[g.prompt_index] for g in chunk.groups)
                yield dataclasses.replace(chunk, groups=found)

    by_files, by_server = Recorder(), Taught()
    loss = ALONE | {"advantage": "dr_grpo", "teacher_coefficient": 0.5}
    expected = await asyncio.to_thread(train, by_files, loss=loss, reference=teacher[1])
    learner = Learner(microbatch_rows=4, row_tokens=16, packing="in_order")
    pack = Packer(learner, record=Record(has_teacher=True))
    loss |= {"teacher": served}
    state = await asyncio.to_thread(train, by_server, loss=loss, pack=pack)
    np.testing.assert_allclose(flat(state.params), flat(expected.params), atol=1e-5)
    names = ("policy/kl_teacher", "policy/grad_norm", "loss/policy", "lag/0/advantage_sign")
    for one, other in zip(by_files.rows, by_server.rows, strict=True):
        for name in names:
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-6), name
    # Rewards of 1 and 0 alone have as many signs of either kind.
    assert abs(by_server.rows[0]["lag/0/advantage_sign"]) > 0.01
    with pytest.raises(ValueError, match="has no log-probs of loss.teacher"):
        await asyncio.to_thread(train, Recorder(), loss=loss, pack=pack)

"""Gradients summed by rings of permutes are those that the compiler sums."""

import pytest
from fixtures.models import tiny
from fixtures.small_learner import assert_same
from fixtures.train_steps import RECOMPUTE, TINY, accumulated, groups_of, make, pack

from jaxrl_async.models.lora import LoRA

BATCHES = pack(groups_of(20), row_tokens=32)
MESHES = {
    "two": dict(mesh_shape=(1, 2, 1)),
    "four": dict(mesh_shape=(1, 4, 1), head_chunk_tokens=7),
    "eight": dict(mesh_shape=(1, 8, 1), head_chunk_tokens=7),
    "data and tensor": dict(mesh_shape=(2, 2, 2), head_chunk_tokens=7),
    "context": dict(mesh_shape=(1, 2, 1), context=4),
    "slices": dict(mesh_shape=(1, 2, 1), slices=2),
    "blocks": dict(mesh_shape=(1, 4, 1), blocks=2),
    "remat": dict(mesh_shape=(1, 4, 1), config=tiny(remat=True, tied_embeddings=False)),
    "lora": dict(mesh_shape=(1, 4, 1), config=tiny(lora=LoRA(2, 4.0, ("q_proj", "down_proj")))),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "four" else pytest.mark.long) for n in MESHES]
)
def test_a_ring_sums_what_the_compiler_sums(name):
    config, sums = MESHES[name].get("config", TINY), []
    for by in ("ring", "compiler"):
        mesh, train_step = make(RECOMPUTE, gradient_sums=by, **MESHES[name])
        assert ("ppermute" in str(train_step.trace(BATCHES[0])["accumulate"].jaxpr)) == (
            by == "ring"
        )
        sums.append(accumulated(BATCHES, (mesh, train_step), config=config))
    assert_same(*sums, tolerance=1e-6)

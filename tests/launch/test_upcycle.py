import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import safetensors.numpy
from fixtures.models import tiny
from flax import nnx

from jaxrl_async.models import hf, transformer

SCRIPT = pathlib.Path(__file__).parents[2] / "launch" / "upcycle.py"
DENSE = tiny(qk_norm=False)
TOKENS = np.random.default_rng(0).integers(0, DENSE.vocab_size, (2, 12))


def _logits(directory):
    config = hf.read_config(directory, dtype="float32", remat=False)
    params = hf.from_tensors(hf.read_tensors(directory), config)
    model = nnx.merge(transformer.graphdef(config), params)
    positions = np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape)
    call = jax.jit(lambda model: model.logits(model(TOKENS, positions, (np.ones_like(TOKENS),))))
    return np.asarray(call(model)), config, params


def test_an_upcycled_model_has_the_logits_of_the_dense_one(tmp_path):
    dense, out = tmp_path / "dense", tmp_path / "experts"
    dense.mkdir()
    params = nnx.split(transformer.Transformer(DENSE, rngs=nnx.Rngs(0)))[1]
    (dense / "config.json").write_text(json.dumps(hf.write_config(DENSE) | {"eos_token_id": 3}))
    tensors = dict(hf.to_tensors(params, DENSE, "float32"))
    safetensors.numpy.save_file(tensors, dense / "model.safetensors")
    (dense / "tokenizer.json").write_text("{}")
    subprocess.run([sys.executable, SCRIPT, dense, out], check=True, timeout=120)
    expected, *_ = _logits(dense)
    found, config, params = _logits(out)
    assert (config.family, config.num_experts, config.experts_per_token) == ("mixtral", 8, 2)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    router = np.asarray(params["blocks"]["experts"]["router_kernel"][...])
    assert router.std() > 0.1
    assert (out / "tokenizer.json").read_text() == "{}"
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 3

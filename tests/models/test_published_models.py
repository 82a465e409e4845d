"""Published models' config.json: read as transformers reads it, or refused with the reason."""

import json

import numpy as np
import pytest
from fixtures.published import LOADED, REFUSED
from flax import nnx

from jaxrl_async.models import hf, transformer

TOKENS = np.random.default_rng(0).integers(0, 64, (2, 40))


def write(directory, config):
    (directory / "config.json").write_text(json.dumps(config))
    return hf.read_config(directory, dtype="float32", remat=False)


@pytest.mark.parametrize("name", LOADED)
def test_a_published_config_says_a_shape(name, tmp_path):
    content = LOADED[name]
    found = write(tmp_path, content)
    rope = content.get("rope_parameters") or content
    nested = rope.get("full_attention", {})
    thetas = [rope.get("rope_theta"), nested.get("rope_theta"), 10000.0]
    assert found.rope_theta == next(theta for theta in thetas if theta)
    is_scaled = "factor" in str(content.get("rope_scaling")) + str(content.get("rope_parameters"))
    assert (found.rope_scaling is not None) == is_scaled
    assert set(found.windows) - {0} == (
        {content["sliding_window"]}
        if content["model_type"] in ("mistral", "gemma3_text") and content["sliding_window"]
        else set()
    )


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_of_another_model_is_refused_with_the_reason(name, tmp_path):
    content, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        write(tmp_path, content)


@pytest.mark.long
@pytest.mark.parametrize("name", LOADED)
def test_a_published_config_computes_the_logits_of_transformers(name, tmp_path):
    import torch
    import transformers

    write(tmp_path, LOADED[name])
    torch.manual_seed(0)
    wanted = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(wanted)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.float().save_pretrained(tmp_path)
    config = write(tmp_path, LOADED[name])  # as published, not as it was saved
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(TOKENS)).logits.numpy()
    params = hf.from_tensors(hf.read_tensors(tmp_path), config)
    ours = nnx.merge(transformer.graphdef(config), params)
    positions = np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape)
    found = ours.logits(ours(TOKENS, positions, (np.ones_like(TOKENS),)))
    np.testing.assert_allclose(found, expected, atol=5e-4)

"""parity --layers: a fault that is planted in one layer is named, whichever computation has it."""

import dataclasses

import jax
import numpy as np
import pytest
from fixtures.models import tiny
from flax import nnx

from jaxrl_async.cli import main as cli
from jaxrl_async.extras.parity import layers, parity
from jaxrl_async.models import hf, transformer
from jaxrl_async.versions import store as weight_store

LAYERS = 4
LLAMA = tiny(vocab_size=23, num_layers=LAYERS, qk_norm=False)
GEMMA = tiny(
    vocab_size=23, num_layers=LAYERS, family="gemma3", windows=(3, 0, 3, 0), query_scalar=3
)
NAMES = ["embedding", "layer 0", "layer 1", "layer 2", "layer 3", "final norm", "logits"]
SEQUENCES = layers.Sequences(num_sequences=3, prompt_tokens=9, completion_tokens=5, seed=0)


def weights(config, seed=0):
    params = nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(seed)))[1]
    # Of the size of trained ones: states of tiny weights would be those of the embedding.
    return jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 2 else leaf, params)


def write(directory, config, params=None):
    store = weight_store.WeightStore(directory, keep=1)
    tensors = hf.to_tensors(params or weights(config), config, "float32")
    return store.write(1, tensors, hf.write_config(config))


def faulty(config, layer, share=0.2):
    """Weights of which one projection of one layer is off."""

    def change(path, param):
        if path != ("blocks", "up", "kernel"):
            return param
        return param.replace(param[...].at[layer].multiply(1 + share))

    return nnx.map_state(change, weights(config))


def verb(checkpoint, against, *flags):
    argv = ["parity", f"--layers={against}", f"--checkpoint={checkpoint}", "--num_prompts=3"]
    return cli.main([*argv, "--prompt_tokens=9", "--max_new_tokens=5", *flags])


@pytest.mark.parametrize(
    ("config", "against"),
    [(LLAMA, "engine"), (GEMMA, "engine"), (GEMMA, "transformers")],
    ids=["llama-engine", "gemma3-engine", "gemma3-transformers"],
)
def test_two_computations_of_the_same_weights_agree_after_every_layer(tmp_path, config, against):
    directory = write(tmp_path, config)
    found = layers.compare(directory, SEQUENCES, dtype="float32", against=against)
    assert [d.name for d in found] == NAMES
    assert found[0].relative == 0 and max(d.relative for d in found) < 1e-4
    assert layers.first_beyond(found, 1e-3) is None


@pytest.mark.parametrize("layer", [0, 2])
def test_the_layer_in_which_another_checkpoint_differs_is_named(tmp_path, capsys, layer):
    ours, theirs = write(tmp_path / "a", LLAMA), write(tmp_path / "b", LLAMA, faulty(LLAMA, layer))
    assert verb(ours, theirs) == 1
    out = capsys.readouterr().out
    assert f"part at layer {layer}: " in out
    (marked,) = [line for line in out.splitlines() if "<- the first beyond 0.001" in line]
    assert marked.startswith(f"layer {layer} ")
    found = layers.compare(ours, SEQUENCES, dtype="float32", against=str(theirs))
    assert [d.relative for d in found[: layer + 1]] == [0] * (layer + 1)


def test_a_layer_whose_cache_the_engine_gets_wrong_is_named_and_so_is_decoding(
    tmp_path, monkeypatch
):
    config = dataclasses.replace(LLAMA, norm_eps=1e-5)  # Its programs are not compiled yet.
    decode = transformer.Transformer.decode

    def broken(self, tokens, positions, cache):
        return decode(self, tokens, positions, cache._replace(v=cache.v.at[2].multiply(1.5)))

    monkeypatch.setattr(transformer.Transformer, "decode", broken)
    found = layers.compare(write(tmp_path, config), SEQUENCES, dtype="float32", against="engine")
    first = layers.first_beyond(found, 1e-3)
    assert first.name == "layer 2"
    assert first.prompt < 1e-4 < 1e-3 < first.completion == first.relative


def test_a_layer_in_which_transformers_computes_otherwise_is_named(tmp_path, monkeypatch, capsys):
    import torch
    import transformers

    read = transformers.AutoModelForCausalLM.from_pretrained

    def broken(*args, **kwargs):
        model = read(*args, **kwargs)
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight *= 1.2
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", broken)
    assert verb(write(tmp_path, LLAMA), "transformers") == 1
    assert "part at layer 1: " in capsys.readouterr().out


def test_a_layer_that_is_not_finite_is_the_first_where_they_part(tmp_path):
    ours = write(tmp_path / "a", LLAMA)
    theirs = write(tmp_path / "b", LLAMA, faulty(LLAMA, 2, float("nan")))
    found = layers.compare(ours, SEQUENCES, dtype="float32", against=str(theirs))
    assert layers.first_beyond(found, 1e9).name == "layer 2"


def test_rounding_to_bfloat16_is_within_a_bound_of_its_own_and_beyond_that_of_float32(
    tmp_path, capsys
):
    directory = write(tmp_path, LLAMA)
    assert verb(directory, "bfloat16", "--bound=0.5") == 0
    assert verb(directory, "bfloat16", "--bound=0.001") == 1
    assert "part at embedding: " in capsys.readouterr().out


def test_a_difference_is_of_the_token_and_of_the_number_that_differ_most():
    ours, theirs = np.zeros((1, 3, 2)), np.zeros((1, 3, 2))
    theirs[0] = [[3, 4], [30, 40], [3, 4]]
    ours[0] = [[3, 4], [33, 44], [3, 6]]  # |d| = 0, 5, 2 of |x| = 5, 50, 5
    found = layers._difference("layer 7", ours, theirs, prompt_tokens=2)
    assert found == layers.Difference(
        "layer 7", max_abs=4, relative=0.4, prompt=0.1, completion=0.4
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--server=http://127.0.0.1:1"], "leave --server out"),
        (["--checkpoint="], "--checkpoint is needed"),
        (["--bound=0"], "--bound must be > 0 and finite, got 0"),
        (["--dtype=float16"], "--dtype must be float32 or bfloat16"),
    ],
)
def test_bad_flags_are_refused(tmp_path, capsys, flags, said):
    assert verb(tmp_path, "engine", *flags) == 2
    assert said in capsys.readouterr().err


def test_what_cannot_be_compared_is_named(tmp_path, capsys):
    directory = write(tmp_path / "a", LLAMA)
    assert verb(directory, "float32") == 1
    assert "--layers=float32 is the learner's own dtype" in capsys.readouterr().err
    assert verb(directory, tmp_path / "nothing") == 1
    assert "nothing is no Hugging Face checkpoint" in capsys.readouterr().err
    other = write(tmp_path / "b", dataclasses.replace(LLAMA, rope_theta=500.0))
    with pytest.raises(parity.ParityError, match="of another shape"):
        layers.compare(directory, SEQUENCES, dtype="float32", against=str(other))

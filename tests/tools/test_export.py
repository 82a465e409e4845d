"""Export: what transformers and a real SGLang make of the directory is what the learner had."""

import dataclasses
import json
import pathlib
import shutil
import socket
import subprocess

import jax
import numpy as np
import pytest
import safetensors
from fixtures import real_servers
from fixtures.tokenizers_hf import CHAT, make_bpe, write_hf
from flax import nnx

from jaxrl_async import parts
from jaxrl_async.cli import serving
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.cli.main import main
from jaxrl_async.models import hf, sharding, transformer
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.kinds.sglang import Sglang
from jaxrl_async.tasks.tokenizer import CharTokenizer, HFTokenizer
from jaxrl_async.versions import store as weight_store

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
TEXT = "47+38="
# As transformers would read it: its warnings about the tests' tiny vocabulary are its own.
TOKENIZE = """
import json, sys, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
print(json.dumps([tokenizer(sys.argv[2]).input_ids, tokenizer.eos_token_id, tokenizer.pad_token_id]))
"""


def make_run(workdir, config="quickstart.py", versions=(0, 3), **model):
    """A workdir with checkpoints of other weights each. Returns its settings and the last weights."""
    config = load_config(f"{CONFIGS / config}:smoke")
    config.model.update(model)
    workdir.mkdir()
    (workdir / "config.json").write_text(config.to_json())
    settings = settings_of(config)
    shape = parts.model_config_of(settings, parts.tokenizer_of(settings, workdir))
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    step = parts.train_step_of(settings, shape, mesh)
    checkpoints = parts.checkpoints_of(settings, workdir)
    for version in versions:
        params = sharding.init_sharded(shape, mesh, version)
        # Peaked enough that other weights show in every logit.
        params["embedding"] = params["embedding"].replace(params["embedding"].get_value() * 10)
        state = step.init(params)
        params = jax.device_get(state.params)
        checkpoints.save(version, state, {})
    checkpoints.close()
    return settings, params


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("export") / "run"
    return workdir, *make_run(workdir)


def our_logits(params, shape, tokens):
    model = nnx.merge(transformer.graphdef(shape), params)
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    ids = (np.ones_like(tokens),)
    return np.asarray(model.logits(model(tokens, positions, ids)))


def their_logits(directory, tokens):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()


def their_tokenizer(directory):
    import transformers

    return transformers.AutoTokenizer.from_pretrained(directory)


def write_files(tokenizer, directory):
    """What an export holds of a tokenizer; transformers wants to know of which model."""
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen3"}')
    for name, content in tokenizer.hf_files().items():
        (directory / name).write_bytes(content)


@pytest.mark.parametrize("by", ["step", "checkpoint", "last"])
def test_transformers_computes_what_the_learner_does(run, tmp_path, by, capsys):
    workdir, settings, params = run
    where = {
        "step": [f"--workdir={workdir}", "--step=3"],
        "checkpoint": [f"--checkpoint={workdir}/checkpoints/3"],
        "last": [f"--workdir={workdir}"],
    }[by]
    out = tmp_path / "exports" / "three"
    assert main(["export", *where, f"--out={out}"]) == 0
    assert "checkpoint 3 of" in capsys.readouterr().out
    shape = parts.model_config_of(settings, parts.tokenizer_of(settings, workdir))
    tokens = np.random.default_rng(0).integers(2, shape.vocab_size, (2, 12))
    np.testing.assert_allclose(
        their_logits(out, tokens), our_logits(params, shape, tokens), atol=2e-4
    )
    assert list(out.parent.iterdir()) == [out]  # Nothing is left beside it.
    weight_store.StoredVersion(out).verify()


def test_what_ends_a_completion_is_said(run, tmp_path):
    workdir, _, _ = run
    assert main(["export", f"--workdir={workdir}", f"--out={tmp_path / 'out'}"]) == 0
    for name in ("config.json", "generation_config.json"):
        content = json.loads((tmp_path / "out" / name).read_text())
        assert (content["eos_token_id"], content["pad_token_id"]) == ([1], 0)
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_dtype_may_be_chosen(run, tmp_path):
    workdir, _, _ = run
    out = tmp_path / "out"
    assert main(["export", f"--workdir={workdir}", f"--out={out}", "--dtype=bfloat16"]) == 0
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {str(x.dtype) for x in hf.read_tensors(out).values()} == {"bfloat16"}


def test_an_export_is_a_model_to_start_from_and_keeps_its_settings(run, tmp_path):
    workdir, _, _ = run
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["export", f"--workdir={workdir}", f"--out={first}"]) == 0
    content = json.loads((first / "config.json").read_text())
    changed = content | {"max_position_embeddings": 77, "dtype": "float16"}  # as if published
    (first / "config.json").write_text(json.dumps(changed))
    make_run(tmp_path / "run", versions=(3,), path=str(first))
    assert main(["export", f"--workdir={tmp_path / 'run'}", f"--out={second}"]) == 0
    expected = content | {"max_position_embeddings": 77}
    assert json.loads((second / "config.json").read_text()) == expected


@pytest.mark.parametrize("alphabet", ["0123456789+=", "ab \n\tßñ語😀<p>"])
def test_characters_have_the_same_ids_and_texts_in_transformers(tmp_path, alphabet):
    ours = CharTokenizer(alphabet)
    write_files(ours, tmp_path / "out")
    theirs = their_tokenizer(tmp_path / "out")
    text = alphabet[::-1] * 2 + alphabet[:2]
    ids = ours.encode(text)
    assert theirs(text).input_ids == ids
    assert theirs.decode(ids) == ours.decode(ids) == text
    assert theirs.decode([*ids, 1, 0], skip_special_tokens=True) == text
    assert (theirs.pad_token_id, theirs.eos_token_id) == (0, 1)
    with pytest.raises(Exception, match="WordLevel error"):
        theirs("unknown")


@pytest.mark.parametrize("kind", ["bpe", "huggingface"])
def test_byte_pairs_have_the_same_ids_and_texts_in_transformers(tmp_path, kind):
    if kind == "bpe":
        ours = make_bpe(tmp_path / "made")
    else:
        token = {"__type": "AddedToken", "content": "<|endoftext|>", "special": True}
        token |= dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
        config = {"eos_token": "<|im_end|>", "pad_token": token}
        generation = {"eos_token_id": [0], "temperature": 0.7}
        written = write_hf(tmp_path / "made", config=config, generation=generation, template=CHAT)
        (written / "vocab.json").write_text("{}")
        ours = HFTokenizer(written)
    write_files(ours, tmp_path / "out")
    theirs = their_tokenizer(tmp_path / "out")
    for text in ("Ada has 12 pens", "#### 4637", " ñ\n"):
        assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == ours.eos_id and theirs.pad_token_id == ours.pad_id
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert tuple(generation["eos_token_id"]) == ours.stop_token_ids
    assert generation.get("temperature") == (0.7 if kind == "huggingface" else None)
    assert (tmp_path / "out" / "vocab.json").exists() == (kind == "huggingface")
    if kind == "huggingface":
        chat = [{"role": "user", "content": "pens"}]
        asked = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert asked == ours.encode_prompt("pens")


def test_what_cannot_be_exported_is_refused_and_named(run, tmp_path, capsys):
    workdir, _, _ = run
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    here, out = f"--workdir={workdir}", f"--out={tmp_path / 'out'}"
    for words, code, message in [
        ([here, f"--out={tmp_path / 'full'}"], 2, "full is not empty: name another --out"),
        ([here, "--step=5", out], 1, "no checkpoint 5 in"),
        ([here, "--step=five", out], 2, "--step must be a number or `last`, got 'five'"),
        ([f"--checkpoint={workdir}/checkpoints/5", out], 1, "it holds [0, 3]"),
        ([f"--checkpoint={workdir}", out], 2, "--checkpoint must be WORKDIR/checkpoints/N"),
        ([here, f"--checkpoint={workdir}/checkpoints/3", out], 2, "one of --workdir=DIR and"),
        ([here, out, "--dtype=int8"], 2, "--dtype must be float32 or bfloat16, got 'int8'"),
        ([here], 2, "--out=DIR is needed"),
        ([f"--workdir={tmp_path}", out], 2, "no config at"),
    ]:
        assert main(["export", *words]) == code
        assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"full"}


def test_the_verbs_of_a_checkpoint_say_in_a_line_what_they_cannot_read(
    run, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(serving.security, "log_to_stderr", lambda text: None)
    workdir, out = tmp_path / "run", f"--out={tmp_path / 'out'}"
    shutil.copytree(run[0], workdir)
    here, missing = f"--workdir={workdir}", "no checkpoint 5 in"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for words, message in [
            (["serve", here, "--step=5", "--port=0"], missing),
            (["serve", here, f"--port={port}"], f"{port}"),
        ]:
            assert main(words) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("serve: ") and message in line
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')
    config = load_config(str(workdir / "config.json"))
    config.model.path = str(tmp_path / "gpt")
    (workdir / "config.json").write_text(config.to_json())
    for words, code in ((["serve", here, "--port=0"], 2), (["export", here, out], 1)):
        assert main(words) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{words[0]}: ") and "'gpt2'" in line


def params_in(directory, shape):
    return jax.tree.map(np.asarray, hf.from_tensors(hf.read_tensors(directory), shape))


def test_the_model_of_a_config_is_written_before_there_is_a_run(tmp_path, capsys):
    """Random weights by default; with the warm start they are the run's version 0."""
    config = f"--config={CONFIGS}/quickstart.py:smoke"
    settings = settings_of(load_config(f"{CONFIGS}/quickstart.py:smoke"))
    tokenizer = parts.tokenizer_of(settings, tmp_path / "work")
    shape = parts.model_config_of(settings, tokenizer)
    mesh = sharding.make_mesh(1, 1, 1, jax.devices()[:1])
    for name, flags, expected in [
        ("random", [], sharding.init_sharded(shape, mesh, settings.seed)),
        ("warm", ["--warm_start"], parts.first_params_of(settings, shape, mesh, tokenizer)),
    ]:
        out = tmp_path / "models" / name
        assert main(["init", config, f"--out={out}", *flags]) == 0
        assert str(out) in capsys.readouterr().out
        weight_store.StoredVersion(out).verify()
        assert hf.read_config(out, dtype=shape.dtype, remat=shape.remat) == shape
        jax.tree.map(np.testing.assert_array_equal, params_in(out, shape), jax.device_get(expected))
        theirs = their_tokenizer(out)
        assert theirs(TEXT).input_ids == tokenizer.encode(TEXT)
    assert main(["init", config, f"--config.model.path={out}", f"--out={tmp_path / 'x'}"]) == 2
    assert "give the server that directory" in capsys.readouterr().err
    assert main(["init", config, f"--out={out}"]) == 2
    assert "warm is not empty: name another --out" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"random", "warm"}


@pytest.mark.long
@pytest.mark.parametrize(
    "model", [{}, {"family": "gemma3", "windows": (4, 0)}], ids=["qwen3", "gemma3"]
)
async def test_a_real_sglang_serves_an_export(tmp_path, model):
    real_servers.require("sglang")
    settings, params = make_run(tmp_path / "run", "arithmetic_sglang.py", versions=(3,), **model)
    out = tmp_path / "out"
    assert main(["export", f"--workdir={tmp_path / 'run'}", f"--out={out}"]) == 0
    tokenizer = parts.tokenizer_of(settings, tmp_path / "run")
    python = real_servers.environment_of("sglang") / "bin" / "python"
    read = [python, "-c", TOKENIZE, out, TEXT]
    text = subprocess.run(read, check=True, capture_output=True, text=True, timeout=240).stdout
    assert json.loads(text.splitlines()[-1]) == [tokenizer.encode(TEXT), 1, 0]

    shape = parts.model_config_of(settings, tokenizer)
    flags = ["--load-format=auto"]  # The weights that are there, in place of random ones.
    with real_servers.serving("sglang", shape, out, tmp_path / "log", *flags) as address:
        async with InferenceClient(
            api_key=real_servers.API_KEY, admin_api_key=real_servers.ADMIN_API_KEY
        ) as client:
            # What no push gave, the client would refuse.
            await Sglang(client, address).rename("3", timeout_secs=60)
            completion = await client.generate(
                address,
                rid="0",
                input_ids=tokenizer.encode(TEXT),
                sampling_params={"max_new_tokens": 16, "temperature": 1.0, "stop_token_ids": [1]},
                timeout_secs=120,
            )
    row = np.array([tokenizer.encode(TEXT) + list(completion.tokens)])

    def expected(shape):
        logits = our_logits(params, shape, row)[0, len(TEXT) - 1 : -1]
        return np.asarray(jax.nn.log_softmax(logits))[range(len(logits)), completion.tokens]

    np.testing.assert_allclose(completion.logprobs, expected(shape), atol=1e-4)
    if shape.windows:
        everything = dataclasses.replace(shape, windows=())
        assert np.abs(expected(everything) - expected(shape)).max() > 1e-2


def test_the_model_that_a_run_starts_from_has_the_tokenizer_that_the_run_would_train(tmp_path):
    tiny = f"--config.task.args.directory={CONFIGS.parent / 'tests/gsm8k_tiny'}"
    assert main(["init", f"--config={CONFIGS}/gsm8k_tiny.py:smoke", tiny, f"--out={tmp_path}"]) == 0
    assert HFTokenizer(tmp_path).encode(TEXT)


def test_a_run_with_a_kernel_of_another_device_is_exported_on_this_one(run, tmp_path):
    workdir, _, _ = run
    own = shutil.copytree(workdir, tmp_path / "run")
    config = json.loads((own / "config.json").read_text())
    config["learner"] |= {"attention_kernel": "triton", "row_tokens": 128}
    config["model"]["dtype"] = "bfloat16"
    (own / "config.json").write_text(json.dumps(config))
    assert main(["export", f"--workdir={own}", f"--out={tmp_path / 'out'}"]) == 0

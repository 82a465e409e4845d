"""The clients that people have, unmodified, before the embedded engine.

JAXRL_CLIENTS names a Python with `lm_eval[api]`, `transformers`, `accelerate`, `peft`, `litellm` and `torch`; SGLang's
clients are those of the environment that tests/run.sh makes.
"""

import asyncio
import json
import os
import pathlib
import subprocess

import pytest
from fixtures import real_servers
from fixtures.models import tiny
from fixtures.served_engine import DEADLINE_SECS
from fixtures.tokenizers_hf import CHAT, write_hf
from flax import nnx

from jaxrl_async.inference import engine as engine_lib
from jaxrl_async.inference import http
from jaxrl_async.models import hf, transformer
from jaxrl_async.tasks.tokenizer import load_tokenizer
from jaxrl_async.versions import store as weight_store

pytestmark = pytest.mark.long
CLIENT_SECS = 300.0
MAX_TOKENS = 256


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("JAXRL_CLIENTS", "")
    if not found:
        pytest.skip("JAXRL_CLIENTS names no Python with the clients")
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    """A directory in Hugging Face's layout, as `export` writes it."""
    directory = tmp_path_factory.mktemp("model")
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    tokenizer = load_tokenizer(write_hf(directory / "tokenizer", config=special, template=CHAT))
    config = tiny(vocab_size=tokenizer.vocab_size)
    weights = nnx.split(transformer.Transformer(config, rngs=nnx.Rngs(0)))[1]
    tensors = hf.to_tensors(weights, config, "float32")
    store = weight_store.WeightStore(directory / "store", keep=1)
    path = pathlib.Path(store.write(1, tensors, hf.write_config(config)))
    for name, content in tokenizer.hf_files().items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture
async def url(model):
    tokenizer = load_tokenizer(model)
    engine = engine_lib.Engine(
        tiny(vocab_size=tokenizer.vocab_size),
        num_slots=8,
        max_total_tokens=MAX_TOKENS,
        decode_chunk=4,
        max_queued_requests=64,
        name="policy",
    )
    engine.start()
    engine.update_weights_from_disk(
        str(model), version="1", flush_cache=True, abort_all_requests=False
    ).result(DEADLINE_SECS)
    async with http.serve(engine, host="127.0.0.1", port=0, tokenizer=tokenizer) as port:
        yield f"http://127.0.0.1:{port}"
    engine.close(timeout_secs=DEADLINE_SECS)


async def output(python, script, *arguments, **environment) -> str:
    """What a client prints."""
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "1",
    }
    process = await asyncio.create_subprocess_exec(
        python,
        real_servers.SCRIPTS / script,
        *arguments,
        env=os.environ | offline | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        found, errors = await asyncio.wait_for(process.communicate(), CLIENT_SECS)
    except BaseException:
        process.kill()
        raise
    assert process.returncode == 0, errors.decode()[-4000:]
    return found.decode()


async def test_the_evaluation_harness_finds_what_it_finds_with_transformers(python, model, url):
    printed = await output(python, "client_lm_eval.py", url, str(model))
    found = json.loads(printed.splitlines()[-1])
    pairs = zip(found["completions"]["choices"], found["transformers"]["choices"], strict=True)
    for ours, theirs in pairs:
        for ((logprob, is_greedy),), ((expected, was_greedy),) in zip(ours, theirs, strict=True):
            assert float(logprob) == pytest.approx(float(expected), abs=1e-4)
            assert str(is_greedy) == str(was_greedy)
    assert found["completions"]["texts"] == found["transformers"]["texts"]
    assert found["chat"]["texts"] == found["transformers_chat"]["texts"]


async def test_litellm_stops_and_streams(python, url):
    found = json.loads((await output(python, "client_litellm.py", url)).splitlines()[-1])
    whole, stop = found["whole"], found["stop"]
    assert found["streamed"] == whole and found["text_streamed"] == found["text"] != ""
    assert found["stopped"] == [whole[: whole.find(stop)], "stop"]
    assert found["streamed_stopped"] == whole[: whole.find(stop)]
    assert all(logprob == tops[0] and len(tops) == 2 for logprob, tops in found["top"])  # greedy
    assert len(found["logprobs"]) > 1 and found["models"] == ["policy", "policy"]


@pytest.fixture(scope="module")
def sglang() -> str:
    real_servers.require("sglang")
    return str(real_servers.environment_of("sglang") / "bin" / "python")


async def test_sglangs_frontend_generates_streams_and_selects(sglang, url):
    printed = await output(sglang, "client_sglang.py", "endpoint", url, SGLANG_USE_CPU_ENGINE="1")
    found = json.loads(printed.splitlines()[-1])
    assert found["free"] == found["streamed"] != ""
    assert found["num_scored"] >= len("Ada has 12 pens") / 4
    assert {choice for pair in found["selected"] for choice in pair} <= {" yes", " no"}
    assert found["context_length"] == MAX_TOKENS


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat"])
async def test_sglangs_benchmark_ends_with_its_figures(
    python, sglang, model, url, backend, tmp_path
):
    (packages,) = pathlib.Path(python).parents[1].glob("lib/python*/site-packages")
    flags = f"--backend={backend} --base-url={url} --model={model} --num-prompts=6"
    flags += " --dataset-name=random-ids --random-input-len=32 --random-output-len=16"
    flags += f" --random-range-ratio=1 --output-file={tmp_path / 'figures.jsonl'}"
    arguments = ("bench", str(packages), *flags.split())
    await output(sglang, "client_sglang.py", *arguments, SGLANG_USE_CPU_ENGINE="1")
    figures = json.loads((tmp_path / "figures.jsonl").read_text())
    assert (figures["completed"], figures["total_output_tokens"]) == (6, 6 * 16)
    assert 0 < figures["median_ttft_ms"] < figures["median_e2e_latency_ms"]

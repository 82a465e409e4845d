"""The preflight: a server that cannot take part in a run is refused at once, by name and with a remedy."""

import dataclasses
import json
import subprocess
import sys

import pytest
from fixtures.fake_sglang import FakeServer, answer

from jaxrl_async.config.build import base_config, make_settings
from jaxrl_async.config.loss import LossConfig
from jaxrl_async.preflight import peers
from jaxrl_async.preflight.server import check as preflight
from jaxrl_async.preflight.server import check_router
from jaxrl_async.servers.client import InferenceClient
from jaxrl_async.servers.port import Expected, ServerError, UnfitServerError

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "hidden_size": 64,
}
EXPECTED = Expected(
    config=MODEL,
    max_total_tokens=256,
    transport="disk",
    api_key_env="THE_KEY",
    admin_api_key_env="THE_ADMIN_KEY",
)
TIMEOUT_SECS = 20.0


@pytest.fixture
def server():
    """A fit SGLang."""
    server = FakeServer().start()
    server.sglang, server.num_layers = True, 2
    server.config = {"architectures": ["Qwen3ForCausalLM"]}
    server.api_key, server.admin_api_key = "right", "right admin"
    yield server
    server.stop()


async def check(server, expected=EXPECTED, *, keys=("right", "right admin"), by=preflight):
    async with InferenceClient(api_key=keys[0], admin_api_key=keys[1]) as client:
        await by(client, server.address, expected, timeout_secs=TIMEOUT_SECS)


async def refused(server, *words, **options):
    with pytest.raises(UnfitServerError) as caught:
        await check(server, **options)
    for word in (server.address, *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("transport", ["disk", "tensor", "distributed"])
async def test_a_fit_server_passes_and_keeps_its_weights(server, transport):
    server.paused = True  # by a learner that was killed in a push
    await check(server, dataclasses.replace(EXPECTED, transport=transport))
    assert (server.version, server.paused, server.session_open) == ("default", False, False)


async def test_only_requests_of_ids_that_every_vocabulary_has_are_sent(server):
    await check(server)
    assert [payload["input_ids"] for payload in server.payloads("/generate")] == [[0], [0]]
    refusal, _ = server.payloads("/generate")
    # Refused even by a server that would take the bias: two grammars exclude one another.
    assert {"logit_bias", "json_schema", "regex"} < refusal["sampling_params"].keys()


@pytest.mark.parametrize(
    ("keys", "named", "words"),
    [
        (
            ("wrong", "right admin"),
            True,
            ("401", "THE_KEY (server.api_key_env) is not its --api-key"),
        ),
        ((None, None), False, ("401", "it has a key", "set server.api_key_env")),
        (
            ("right", "wrong"),
            True,
            ("401", "THE_ADMIN_KEY (server.admin_api_key_env) is not its --admin-api-key"),
        ),
        (("right", None), False, ("401", "it has a key", "set server.admin_api_key_env")),
    ],
)
async def test_a_wrong_key_is_named_by_its_setting(server, keys, named, words):
    expected = EXPECTED
    if not named:
        expected = dataclasses.replace(EXPECTED, api_key_env="", admin_api_key_env="")
    await refused(server, *words, keys=keys, expected=expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {"architectures": ["LlamaForCausalLM"]}}, ("LlamaForCausalLM", "Qwen3ForCausalLM")),
        ({"config": {"hidden_size": 32}}, ("hidden_size 32", "64")),
        ({"vocab_size": 128}, ("a vocabulary of 128 tokens", "100", "init --out")),
        ({"num_layers": 3}, ("3 layers", "has 2")),
        ({"context_length": 255}, ("255 tokens (--context-length)", "server.max_total_tokens is 256")),
        ({"missing": {"/update_weights_from_disk"}}, ("/update_weights_from_disk", "0.5.23")),
        ({"missing": {"/continue_generation"}}, ("no control routes",)),
        ({"answers": [{"meta_info": {"finish_reason": {"type": "length"}}}]}, ("no output_token_logprobs",)),
        ({"answers": [answer([1], versions=[])]}, ("no weight_versions",)),
        ({"config": {"architectures": 5}}, ("malformed answer to the preflight: TypeError",)),
        ({"answers": [{"meta_info": [1]}]}, ("malformed answer to the preflight: AttributeError",)),
    ],
)  # fmt: skip
async def test_a_server_of_another_kind_is_refused_with_what_to_do(server, change, words):
    for name, value in change.items():
        setattr(server, name, value)
    if "answers" in change:  # The question for the vocabulary comes first.
        server.answers.insert(0, {"meta_info": {}})
    await refused(server, *words)


async def test_the_config_that_a_server_names_is_compared_where_it_can_be_read(server, tmp_path):
    server.config = {"model_path": str(tmp_path)}
    (tmp_path / "config.json").write_text(json.dumps(MODEL | {"hidden_size": 128}))
    await refused(server, "hidden_size 128", "64")
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    await check(server)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"router_manager": True, "workers_count": 2}, ("router", "server.control_addresses")),
        ({"version": "0.1.0", "precompile_bs_paddings": []}, ("SGLang-JAX", "sglang_jax/server.py")),
        ({"version": "0.4.1"}, ("SGLang 0.4.1", "0.5.23")),
        ({}, ("no inference server",)),
    ],
)  # fmt: skip
async def test_what_takes_no_control_calls_is_named(server, says, words):
    server.missing, server.old_info = {"/model_info"}, says
    await refused(server, *words)


@pytest.mark.parametrize(
    ("sglang", "transport"), [(True, "stream"), (False, "tensor"), (False, "distributed")]
)
async def test_a_transport_of_the_other_kind_is_refused(server, sglang, transport):
    server.sglang = sglang
    expected = dataclasses.replace(EXPECTED, transport=transport)
    await refused(server, f"weights.transport {transport!r}", "'disk'", expected=expected)


async def test_sglang_behind_a_sidecar_takes_weights_by_stream(server):
    server.sglang, server.config = True, {"hands_on": True}
    expected = dataclasses.replace(EXPECTED, transport="stream")
    await check(server, expected=expected)
    server.missing = {"/update_weights_from_upload"}
    await refused(server, "weights.transport 'stream' needs", expected=expected)


async def test_a_port_that_answers_something_else_is_named_with_its_answer(server):
    server.answer_all = "<html><body>It works!</body></html>"
    await refused(server, "it is of no known kind", "<html><body>It works!")


async def test_a_router_is_asked_for_one_token_alone(server):
    server.missing = {"/model_info", "/continue_generation"}
    await check(server, by=check_router)
    assert server.routes() == ["/generate"]
    await refused(server, "server.api_key_env", keys=("wrong", None), by=check_router)
    server.missing = {"/generate"}
    await refused(server, "404", by=check_router)


async def test_a_server_that_is_not_up_is_no_refusal(server):
    server.fail["/model_info"] = (503, "loading")
    with pytest.raises(ServerError, match="loading") as caught:
        await check(server)
    assert caught.value.retryable and not isinstance(caught.value, UnfitServerError)
    server.fail.clear()
    server.answers = [{"meta_info": {}}, answer([], versions=[], reason="abort")]
    with pytest.raises(ServerError, match="aborted") as caught:  # as by a server that stops
        await check(server)
    assert caught.value.retryable


def settings_of(server, **changes):
    config = base_config()
    config.tokenizer.alphabet = "0123456789+="
    config.server.addresses = (server.address, "http://127.0.0.1:9")
    config.server.update(max_total_tokens=256, **changes)
    config.server.api_key_env = "THE_KEY"
    config.rollout.update(max_prompt_tokens=16, max_new_tokens=16)
    config.learner.update(row_tokens=64)
    return make_settings(config.to_dict())


def test_every_unfit_server_has_a_line_and_one_that_is_not_up_is_left_to_its_first_push(
    server, monkeypatch, caplog
):
    server.admin_api_key = None
    monkeypatch.setenv("THE_KEY", "right")
    caplog.set_level("INFO")
    settings = settings_of(server)
    peers.check_servers(settings, EXPECTED)
    assert "not up yet" in caplog.text and "http://127.0.0.1:9" in caplog.text
    monkeypatch.setenv("THE_KEY", "wrong")
    with pytest.raises(peers.PreflightError, match=r"1 of 2 .*\n.*server\.api_key_env"):
        peers.check_servers(settings, EXPECTED)


def test_a_router_in_the_place_of_its_servers_is_named(server):
    server.api_key = server.admin_api_key = None
    server.missing, server.old_info = {"/model_info"}, {"router_manager": True}
    settings = dataclasses.replace(settings_of(server), server=dataclasses.replace(
        settings_of(server).server,
        addresses=("http://127.0.0.1:9",), control_addresses=(server.address,), api_key_env="",
    ))  # fmt: skip
    with pytest.raises(peers.PreflightError, match="server.control_addresses"):
        peers.check_servers(settings, EXPECTED)


def test_a_learner_with_a_wrong_key_ends_at_once_and_says_so(server, run, monkeypatch):
    """It waits for no queue and trains no warm start: none is there, and the error is the server's."""
    monkeypatch.setenv("THE_KEY", "wrong")
    code, output = run(
        "train",
        "--role=learner",
        "--config=configs/quickstart.py:smoke",
        "--config.queue.address=127.0.0.1:9",
        f"--config.server.addresses=('{server.address}',)",
        "--config.server.api_key_env=THE_KEY",
    )
    assert code == 1
    assert "Traceback" not in output
    for word in (server.address, "THE_KEY (server.api_key_env) is not its --api-key"):
        assert word in output


async def test_a_server_that_gives_no_kept_ids_is_refused_where_the_run_cuts_tokens_off(server):
    words = ("none of the ids that a token was drawn from", "rollout.top_p", "max_kept = 8")
    await refused(server, *words, expected=dataclasses.replace(EXPECTED, max_kept=8))


async def test_a_server_without_routes_is_refused_where_replay_is_on_and_named_where_it_is_auto(
    server, caplog
):
    needs = dataclasses.replace(EXPECTED, replay_routes="on")
    words = ("returns no routes", "--enable-return-routed-experts", "learner.replay_routes")
    await refused(server, *words, expected=needs)
    for wanted, warns in (("auto", True), ("", False)):
        caplog.clear()
        await check(server, dataclasses.replace(EXPECTED, replay_routes=wanted))
        assert ("returns no routes" in caplog.text) == warns
    server.settings = {"enable_return_routed_experts": True}
    await check(server, needs)
    server.config |= {"num_experts_per_tok": 4}
    needs = dataclasses.replace(needs, config=MODEL | {"num_experts_per_tok": 2})
    await refused(server, "num_experts_per_tok 4, the run's has 2", expected=needs)


def test_a_run_of_all_roles_is_checked_without_jax_and_its_roles_start_without_aiohttp(tmp_path):
    script = f"""
import pathlib, sys
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.preflight import machine
from jaxrl_async.roles import start
assert "aiohttp" not in sys.modules
config, workdir = load_config("quickstart:smoke"), pathlib.Path({str(tmp_path)!r})
start.begin(config, settings_of(config), workdir, resume=False)
machine.prepare(settings_of(config), workdir)
sys.exit("jax" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_a_teacher_that_cannot_teach_ends_the_run_before_it_begins(server, monkeypatch, caplog):
    server.vocab_size = 100
    monkeypatch.setenv("THE_KEY", "right")

    def check(vocab_size=100, addresses=server.address, key="THE_KEY"):
        loss = LossConfig(teacher=addresses, teacher_key_env=key)
        settings = dataclasses.replace(settings_of(server), loss=loss)
        expected = dataclasses.replace(EXPECTED, config={"vocab_size": vocab_size})
        peers.check_teachers(settings, expected)

    check()
    assert server.payloads("/generate")[-1]["input_ids"] == [0] * 64  # as long as a row
    check(vocab_size=80)  # padded
    check(addresses="a=http://127.0.0.1:9")
    assert "a teacher is not up yet" in caplog.text and "http://127.0.0.1:9" in caplog.text
    for words, given in (
        (
            f"{server.address}.* of 100 token ids has another vocabulary .*, of 101",
            {"vocab_size": 101},
        ),
        ("of 5000 token ids has another vocabulary", {"vocab_size": 99}),
        ("HTTP 400: too long", {}),
        ("HTTP 401.*: loss.teacher_key_env must name its key", {"key": ""}),
    ):
        server.vocab_size = 5000 if "5000" in words else 100
        server.refused = {"max_new_tokens": "too long"} if "long" in words else {}
        with pytest.raises(peers.PreflightError, match=rf"1 of 1 teachers .*\n.*{words}"):
            check(**given)

"""Configs: each builds, and one that cannot be run is refused with the key, the value and the bound."""

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import settings_page

from jaxrl_async import names, parts
from jaxrl_async.cli import config as config_lib
from jaxrl_async.cli import main, serve
from jaxrl_async.config import base_config, build, checks, parse_arg
from jaxrl_async.config import settings as settings_lib
from jaxrl_async.config.build import default_values, make_settings
from jaxrl_async.config.forms import command_words
from jaxrl_async.config.loss import ADVANTAGES, LossConfig
from jaxrl_async.config.settings import SettingsError
from jaxrl_async.models import families
from jaxrl_async.preflight import machine
from jaxrl_async.roles import start
from jaxrl_async.servers import kinds

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
QUICKSTART = ROOT / "configs" / "quickstart.py"
ONE = "--config.server.addresses=('http://127.0.0.1:31000',)"


def parse(*argv):
    flags = config_lib.parse_flags("usage", list(argv), config=True, workdir=("", "directory"))
    return config_lib.settings_of(flags.config)


def _numbers(block, prefix=""):
    for field in dataclasses.fields(block):
        value = getattr(block, field.name)
        if dataclasses.is_dataclass(value):
            yield from _numbers(value, f"{prefix}{field.name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{field.name}", type(value)


def _only(key, value):
    """A config that states one setting."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(("key", "kind"), [*_numbers(settings_lib.Settings())])
def test_no_number_may_be_negative_or_none(key, kind):
    values = [kind(-5)] if key != "loss.dg_threshold" else []  # nats, of either sign
    for value in values + ([float("nan")] if kind is float else []):
        with pytest.raises(SettingsError, match=key.rpartition(".")[2]):
            make_settings(_only(key, value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "model.path: .*config.json"),
        ('{"vocab_size": 12}', r"model.path: the tokenizer has 14 ids, .*config.json is 12"),
        ("{}", r"model.path: .*config.json has vocab_size None"),
        ("{", r"model.path: .*"),
    ],
)
def test_a_model_that_lacks_ids_of_the_tokenizer_is_refused(text, message, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    if text is not None:
        (model / "config.json").write_text(text)
    settings = parse(f"--config={QUICKSTART}:smoke", f"--config.model.path={model}")
    with pytest.raises(machine.StartError, match=message):
        machine.prepare(settings, tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["attention_bias=True"], "model.qk_norm and model.attention_bias are both True"),
        (
            ["family=gemma3", "num_heads=12"],
            "num_heads = 12 of gemma3 must divide .*model_dim = 64",
        ),
    ],
)
def test_a_shape_that_export_could_not_write_is_refused_and_an_old_run_goes_on(
    flags, message, tmp_path
):
    flags = [f"--config.model.{flag}" for flag in flags]
    settings = parse(f"--config={QUICKSTART}:smoke", *flags)
    with pytest.raises(machine.StartError, match=message):
        machine.prepare(settings, tmp_path)
    machine.prepare(settings, tmp_path, resume=True)


def test_a_start_after_one_that_was_refused_has_the_tokenizer_of_its_own_settings(tmp_path):
    words = [f"--config={QUICKSTART}:smoke", "--config.tokenizer.alphabet=0123456789"]
    with pytest.raises(machine.StartError, match="lacks '[+=]'"):
        machine.prepare(parse(*words), tmp_path)
    machine.prepare(parse(f"{words[1]}+=", words[0]), tmp_path)


@pytest.fixture
def bounded(tmp_path):
    """Settings of a run with a model of so many positions: 8 + 4 tokens of prompt and completion, 16 of a request."""

    def settings(tokens, *words):
        content = {"model_type": "llama", "max_position_embeddings": tokens}
        (tmp_path / "config.json").write_text(json.dumps(content))
        words = (f"--config.model.path={tmp_path}", "--config.warm_start.num_steps=0", *words)
        return parse(f"--config={QUICKSTART}:smoke", *words)

    return settings


@pytest.mark.parametrize(
    ("tokens", "words", "named"),
    [
        (12, [], None),
        (11, [], r"max_prompt_tokens \+ rollout\.max_new_tokens = 12 exceeds .* 11 tokens"),
        # A function of one's own may call the server more than once.
        (15, ["--config.rollout.function=a:b"], r"server\.max_total_tokens = 16 .* 15 tokens"),
        (16, ["--config.rollout.function=a:b"], None),
        (19, ["--config.warm_start.num_steps=1", "--config.warm_start.row_tokens=20"],
         r"warm_start\.row_tokens = 20 .* 19 tokens"),
        (0, [], None),  # It states none.
    ],
)  # fmt: skip
def test_no_token_may_lie_beyond_the_models_positions(tokens, words, named, bounded):
    settings = bounded(tokens, *words)
    if named is None:
        return parts.check_context(settings)
    with pytest.raises(ValueError, match=named):
        parts.check_context(settings)


@pytest.mark.parametrize(("tokens", "most"), [(12, 12), (16, 16), (17, 16), (0, 16)])
async def test_a_served_checkpoint_takes_no_request_beyond_the_models_positions(
    tokens, most, bounded, monkeypatch, caplog, tmp_path
):
    def end(settings, *_):
        raise InterruptedError(settings.server.max_total_tokens)

    monkeypatch.setattr(parts, "checkpoint_params", end)
    with pytest.raises(InterruptedError, match=str(most)):
        await serve._serve(bounded(tokens), tmp_path, 0, {})
    assert ("context length: 12 of 16 tokens" in caplog.text) == (most == 12)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{'x': true, 'y': [false, null]}", {"x": True, "y": [False, None]}),
        ('{"x": true, "y": {"z": "true"}}', {"x": True, "y": {"z": "true"}}),
        ("{'x': True}", {"x": True}),
    ],
)
def test_the_words_of_json_are_taken_in_a_mapping(text, value):
    assert parse(f"--config={QUICKSTART}", f"--config.task.args={text}").task.args == value


MODES = ["", "mode=sync", "mode=periodic", "mode=async"]


@pytest.mark.parametrize("arg", [*MODES, *(f"smoke,{mode}" for mode in MODES)])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_builds(path, arg):
    settings = parse(f"--config={path}:{arg}")
    assert settings.mode in (arg.rpartition("=")[2], "async", "sync")
    if "smoke" in arg:
        assert settings.learner.num_steps == 2


@pytest.mark.parametrize("mode", ["sync", "periodic", "async"])
def test_the_quickstart_has_three_modes(mode):
    settings = parse(f"--config={QUICKSTART}:mode={mode},seed=3")
    assert (settings.mode, settings.seed) == (mode, 3)


def test_a_value_is_set_from_the_command_line():
    assert parse(f"--config={QUICKSTART}", "--config.learner.num_steps=7").learner.num_steps == 7


def test_the_reward_of_gsm8k_is_set_from_the_command_line():
    path = ROOT / "configs" / "gsm8k_tiny.py"
    args = parse(f"--config={path}", "--config.task.args.reward=math_verify").task.args
    assert args == {"directory": "data/gsm8k", "reward": "math_verify"}


def test_all_errors_of_a_config_are_found_at_once_and_nothing_that_follows_from_them():
    config = config_lib.load_config(f"{QUICKSTART}:smoke").to_dict()
    config["learner"] |= {"num_minibatches": 0, "row_tokens": -3, "packing": "firstfit"}
    config["learner"]["learning_rat"] = 1.0
    config["rollout"] |= {"group_size": "four", "overlong_buffer_tokens": 9}
    config["loss"]["clip_low"] = 2.0
    with pytest.raises(SettingsError) as caught:
        make_settings(config)
    head, *lines = str(caught.value).splitlines()
    assert head == "7 errors in the config:"
    for words in (
        "unknown config key config.learner.learning_rat, did you mean 'learning_rate'?",
        "loss.clip_low must be in [0, 1], got 2.0",
        "rollout.group_size must be int, got 'four'",
        "learner.packing must be one of in_order, first_fit, fewest; got 'firstfit'",
        "learner.num_minibatches must be ≥ 1, got 0",
        "learner.row_tokens must be ≥ 1, got -3",
        "rollout.overlong_buffer_tokens must be in [0, rollout.max_new_tokens = 4], got 9",
    ):
        assert sum(words in line for line in lines) == 1, words


def test_all_unknown_keys_on_the_command_line_are_named():
    with pytest.raises(config_lib.UsageError, match=r"'num_steps'\?\n.*'queue'"):
        parse(f"--config={QUICKSTART}", "--config.learner.num_stepz=7", "--config.queu.address=a:1")


@pytest.mark.parametrize("key", ["task.args.train", "task.args.test", "evaluate.sets.hard"])
def test_a_name_that_a_mapping_lacks_is_refused_with_the_flag_that_replaces_all(key):
    block = key.rpartition(".")[0]
    with pytest.raises(config_lib.UsageError, match=rf"{key}.* \(--config.{block}=.* replaces all"):
        parse(f"--config={QUICKSTART}", f"--config.{key}=a")


def test_an_unknown_key_on_the_command_line_is_named_with_the_nearest():
    with pytest.raises(config_lib.UsageError, match=r"config.learner.num_stepz.*'num_steps'"):
        parse(f"--config={QUICKSTART}", "--config.learner.num_stepz=7")


def test_an_unknown_key_in_a_config_is_named_with_the_nearest():
    config = config_lib.load_config(str(QUICKSTART)).to_dict()
    config["learner"]["num_stepz"] = 7
    with pytest.raises(SettingsError, match=r"config.learner.num_stepz.*'num_steps'"):
        make_settings(config)


def test_an_unknown_config_argument_is_named_with_the_nearest():
    with pytest.raises(config_lib.UsageError, match=r"'smok', did you mean 'smoke'"):
        parse(f"--config={QUICKSTART}:smok")


def test_an_argument_of_several_words_is_one_of_them():
    def read(arg):
        return parse_arg(arg, loss=("dg", "ppo"), every=1, smoke=False).to_dict()

    assert read("") == {"loss": "dg", "every": 1, "smoke": False}
    assert read("loss=ppo,every=4,smoke") == {"loss": "ppo", "every": 4, "smoke": True}
    with pytest.raises(config_lib.UsageError, match=r"loss must be one of dg, ppo; got 'pp'"):
        read("loss=pp")
    with pytest.raises(config_lib.UsageError, match=r"every must be int, got 'x'"):
        read("every=x")


def test_an_unknown_flag_is_named_with_the_nearest():
    with pytest.raises(config_lib.UsageError, match=r"'workdri'.*workdir"):
        parse(f"--config={QUICKSTART}", "--workdri=x")


def test_a_value_of_another_type_is_refused():
    with pytest.raises(config_lib.UsageError, match="num_steps=seven"):
        parse(f"--config={QUICKSTART}", "--config.learner.num_steps=seven")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--config.mode=asink"], r"mode .*'asink'.*'async'"),
        (["--config.queue.max_staleness=1", "--config.weights.push_every_steps=4"], r"max_staleness 1 < .*_steps 4"),
        (["--config.queue.max_staleness=0"], r"'async' .*queue.max_staleness ≥ 1.* 0.*'sync'"),
        (["--config.loss.anchor=current"], r"loss.*'current'.*num_minibatches = 2"),
        (["--config.learner.num_minibatches=3"], r"learner.num_minibatches = 3 .*groups_per_step = 64"),
        (["--config.learner.final_learning_rate=1e-7"], r"final_learning_rate = 1e-07 needs .*'linear' or 'cosine'"),
        (
            ["--config.learner.schedule=cosine", "--config.learner.final_learning_rate=1.0"],
            r"final_learning_rate must be ≤ learner.learning_rate = 0.0003, got 1",
        ),
        (
            ["--config.learner.schedule=linear", "--config.learner.warmup_updates=10000"],
            r"warmup_updates must be < \d+, .*learner.schedule = 'linear'; got 10000",
        ),
        (
            ["--config.learner.optimizer=muon", "--config.learner.offload_moments"],
            r"offload_moments = True needs learner.optimizer = 'adamw', got 'muon'",
        ),
        (["--config.learner.optimizer=adamx"], r"learner.optimizer must be one of .*'adamx'.*'adamw'"),
        (["--config.rollout.group_size=1"], r"loss.advantage .*rollout.group_size ≥ 2.* 1"),
        (
            ["--config.rollout.group_size=1", "--config.loss.advantage=dr_grpo", "--config.rollout.drop_equal_rewards"],
            r"drop_equal_rewards .*rollout.group_size ≥ 2",
        ),
        (
            ["--config.loss.teacher=a", "--config.model.lora.rank=2"],
            r"loss.teacher needs model.lora.rank = 0, got 2",
        ),
        (
            ["--config.loss.teacher=http://127.0.0.1:1", "--config.rollout.temperature=0.5"],
            r"loss.teacher at a URL .*rollout.temperature = 1, .*got 0.5",
        ),
        (
            ["--config.loss.teacher=http://a:1"],
            r"loss.teacher = http://a:1 would be reached over the network without TLS",
        ),
        (
            ["--config.loss.advantage=batch", "--config.mode=periodic"],
            r"'batch' needs the rewards of all groups .*'periodic'",
        ),
        (["--config.loss.advantage=turns"], r"'turns' needs turns .*rollout.function = 'single_turn'"),
        (
            ["--config.loss.advantage=turns", "--config.rollout.drop_equal_rewards"],
            r"drop_equal_rewards must be False with loss.advantage 'turns'",
        ),
        (
            ["--config.loss.teacher=http://a:1", "--config.loss.advantage=none", "--config.rollout.drop_equal_rewards"],
            r"drop_equal_rewards must be False with loss.advantage 'none'",
        ),
        (
            ["--config.rollout.overlong_buffer_tokens=5"],
            r"overlong_buffer_tokens .*\[0, rollout.max_new_tokens = 4\].* 5",
        ),
        (["--config.rollout.overlong_buffer_tokens=-1"], r"overlong_buffer_tokens .* -1"),
        (["--config.rollout.max_new_tokens=400"], r"max_new_tokens = 408 .*learner.row_tokens = 48"),
        (["--config.rollout.reward_memory_bytes=1048575"], r"rollout.reward_memory_bytes .*0 or ≥ 1048576.* 1048575"),
        (["--config.rollout.reward_memory_bytes=-1"], r"reward_memory_bytes .*0 or ≥ .* -1"),
        (["--config.rollout.reward_calls_per_process=-1"], r"reward_calls_per_process .*≥ 0.* -1"),
        (["--config.learner.num_steps=0"], r"learner.num_steps .*≥ 1.* 0"),
        (["--config.learner.data=3"], r"microbatch_rows = 64 .*learner.data · learner.fsdp = 3"),
        (["--config.learner.num_processes=0"], r"learner.num_processes .*≥ 1.* 0"),
        (
            ["--config.learner.num_processes=2", "--config.learner.tensor=2"],
            r"learner.data · learner.fsdp = 1 .*learner.num_processes = 2",
        ),
        (["--config.evaluate.every_steps=-1"], r"evaluate.every_steps .*≥ 0.* -1"),
        (
            ["--config.weights.push_every_steps=2", "--config.evaluate.every_steps=21"],
            r"evaluate.every_steps .*weights.push_every_steps = 2.* 21",
        ),
        (["--config.evaluate.timeout_secs=0.0"], r"evaluate.timeout_secs .*> 0.* 0.0"),
        (
            ["--config.evaluate.timeout_secs=600.0"],
            r"evaluate.timeout_secs .*< learner.lease_timeout_secs = 600.* 600",
        ),
        (
            ["--config.queue.permit_timeout_secs=300.0", "--config.learner.lease_timeout_secs=300.0"],
            r"queue.permit_timeout_secs = 300 .*< learner.lease_timeout_secs = 300",
        ),
        (["--config.queue.outage_secs=0.0"], r"queue.outage_secs .*> 0.* 0"),
        (["--config.queue.failure_window_secs=-1.0"], r"queue.failure_window_secs .*> 0.* -1"),
        (["--config.weights.keep=1"], r"weights.keep .*≥ 2.* 1"),
        (["--config.queue.chunk_groups=8"], r"queue.chunk_groups .*≥ 1 .*'periodic'.* 8 "),
        (["--config.weights.transport=pigeon"], r"weights.transport .* disk, tensor, stream.*'pigeon'"),
        (["--config.weights.pause_mode=abort"], r"weights.pause_mode .* retract, in_place.*'abort'"),
        (["--config.supervisor.max_restarts=-1"], r"supervisor.max_restarts .*≥ 0.* -1"),
        (
            ["--config.queue.token_env=T", "--config.rollout.reward_environment=('T',)"],
            "rollout.reward_environment .*'T'",
        ),
        (["--config.checkpoint.grace_secs=0.0"], r"checkpoint.grace_secs .*> 0.* 0.0"),
        (["--config.supervisor.stall_secs=0.0"], r"supervisor.stall_secs .*> 0.* 0.0"),
        (["--config.journal.max_bytes=-1"], r"journal.max_bytes must be ≥ 0, got -1"),
        (
            ["--config.journal.max_bytes=5", "--config.journal.keep=checkpointed"],
            r"journal.max_bytes = 5 needs journal.keep = 'all', got 'checkpointed'",
        ),
        (["--config.journal.keep=some"], r"journal.keep .* all, checkpointed, none.*'some'"),
        (["--config.server.num_local=0"], r"server.num_local .*≥ 1 .* 0"),
        (["--config.server.speeds=(1.0, 2.0)"], r"server.speeds .* 1 servers.* 2"),
        (["--config.server.speeds=(0.0,)"], r"server.speeds' entries must be > 0, got 0.0"),
        (["--config.server.discover=servers.txt"], r"server\.discover .*file:PATH.*'servers\.txt'"),
        (["--config.server.discover_secs=0.0"], r"server\.discover_secs .*> 0.* 0"),
        (
            ["--config.weights.pause_lease_secs=60.0", "--config.weights.push_timeout_secs=60.0"],
            r"weights\.pause_lease_secs .*push_timeout_secs = 60.* 60",
        ),
        (
            ["--config.weights.delta=True", "--config.weights.transport=tensor"],
            r"weights\.delta needs weights\.transport 'disk' or 'stream', got 'tensor'",
        ),
        (
            ["--config.weights.delta=True", "--config.weights.transport=distributed"],
            r"weights\.delta needs weights\.transport 'disk' or 'stream', got 'distributed'",
        ),
        (
            ["--config.weights.fanout=2", "--config.weights.transport=distributed"],
            r"weights\.fanout needs .*'stream', got 2 with 'distributed'",
        ),
        (
            ["--config.weights.max_paused=2", "--config.weights.transport=distributed"],
            r"weights\.max_paused = 0, got 2",
        ),
        (
            ["--config.model.lora.rank=4", "--config.weights.transport=distributed"],
            r"model\.lora\.rank = 0, got 4",
        ),
        (
            ["--config.weights.rendezvous=0.0.0.0", "--config.weights.transport=distributed"],
            r"weights\.rendezvous .*servers can reach, got '0\.0\.0\.0'",
        ),
        (
            ["--config.weights.rendezvous=10.0.0.1", "--config.weights.transport=distributed"],
            r"weights\.rendezvous = 10\.0\.0\.1 would be reached .* without TLS",
        ),
        (
            ["--config.server.addresses=('https://a:1',)", "--config.weights.transport=distributed"],
            r"weights\.rendezvous = '127\.0\.0\.1' is of this machine alone, and https://a:1",
        ),
        (["--config.weights.fanout=-1"], r"weights\.fanout .* 0.* -1"),
        (["--config.weights.fanout=2"], r"weights\.fanout needs .*'stream', got 2 with 'disk'"),
        (["--config.weights.max_paused=-1"], r"weights\.max_paused .* 0.* -1"),
        (["--config.server.quorum=0.0"], r"server\.quorum .*\(0, 1\].* 0"),
        (["--config.server.quorum=1.5"], r"server\.quorum .*\(0, 1\].* 1\.5"),
        (["--config.server.control_addresses=('http://c:1',)"], r"control_addresses .* 1 .*server.addresses .* 0"),
        (
            ["--config.server.addresses=('http://a:1','http://b:1')",
             "--config.server.control_addresses=('http://c:1','http://d:1','http://e:1')"],
            r"server.control_addresses .* 3 .*server.addresses .* 2",
        ),
        (
            ["--config.server.addresses=('http://a:1','http://a:1')"],
            r"server.addresses .*twice.*http://a:1",
        ),
        (
            ["--config.learner.slices=2", "--config.learner.microbatch_rows=3"],
            r"microbatch_rows = 3 must be a multiple of learner.slices · learner.data · learner.fsdp = 2",
        ),
        (
            ["--config.learner.slices=2", "--config.learner.fsdp=3", "--config.learner.num_processes=3"],
            r"learner.num_processes = 3 must be a multiple or a divisor of learner.slices = 2",
        ),
        (["--config.learner.replay_routes=on"], r"replay_routes = 'on' needs a model with experts"),
        (["--config.learner.expert=2"], r"learner.expert = 2 needs a model with experts"),
        (
            ["--config.model.family=qwen3_moe", "--config.model.num_experts=8", "--config.model.experts_per_token=2",
             "--config.model.expert_mlp_dim=8", "--config.learner.expert=3"],
            r"learner.expert = 3 does not divide model.num_experts = 8",
        ),
        (
            ["--config.rollout.top_k=65"],
            r"rollout.max_kept must be ≥ rollout.top_k = 65, got 64",
        ),
        (
            ["--config.rollout.top_p=0.9", "--config.rollout.frictions.actor_bug=0.5"],
            r"actor_bug = 0.5 replaces tokens .* 0 with rollout.top_p, top_k or min_p",
        ),
        (["--config.server.command=serve {modelpath}"], r"server.command .*{modelpath}.*{model_path}, {host}"),
        (["--config.server.command=serve {}"], r"server.command .*{}"),
        (["--config.server.command=serve {port"], r"server.command 'serve {port'.*'}'"),
        (["--config.server.command=serve 'x"], r"server.command .*serve 'x.*quotation"),
    ],
)  # fmt: skip
def test_settings_that_contradict_one_another_are_refused(overrides, message):
    with pytest.raises(SettingsError, match=message):
        parse(f"--config={QUICKSTART}", *overrides)


A, B, C, D = (f"http://localhost:{port}" for port in range(1, 5))


@pytest.mark.parametrize(
    ("addresses", "control_addresses", "controls"),
    [
        ((A, B), (), {A: (A,), B: (B,)}),
        ((A, B), (C, D), {A: (C,), B: (D,)}),
        ((A,), (C, D), {A: (C, D)}),  # a router
        ((A,), (C,), {A: (C,)}),
    ],
)
def test_control_addresses_are_pairs_or_stand_behind_a_router(
    addresses, control_addresses, controls
):
    settings = parse(
        f"--config={QUICKSTART}",
        f"--config.server.addresses={addresses!r}",
        f"--config.server.control_addresses={control_addresses!r}",
    )
    assert settings.server.controls == controls


def test_a_command_is_cut_into_words_before_its_placeholders_are_filled():
    words = command_words(
        "serve --model={model_path} 'two words' --at {host}:{port} {{index}} {index}",
        model_path="/a dir/model",
        host="127.0.0.1",
        port=80,
        index=1,
    )
    assert words == [
        "serve", "--model=/a dir/model", "two words", "--at", "127.0.0.1:80", "{index}", "1"
    ]  # fmt: skip


def test_every_transport_has_its_name_in_the_settings():
    ways = {way for _, name in kinds.TABLE.values() for way in names.load(name).WAYS}
    assert set(settings_lib.TRANSPORTS) == ways


def test_keys_come_from_the_environment(monkeypatch):
    flags = [f"--config={QUICKSTART}", "--config.server.api_key_env=THE_KEY"]
    monkeypatch.setenv("THE_KEY", "secret")
    settings = parse(*flags)
    assert parts.keys_of(settings) == {"api_key": "secret", "admin_api_key": None}
    assert "secret" not in repr(settings)


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("role", ["all", "learner"])
def test_a_key_that_the_environment_lacks_is_named_before_any_role_starts(
    value, role, monkeypatch, capsys, tmp_path
):
    monkeypatch.delenv("THE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("THE_KEY", value)
    argv = [f"--config={QUICKSTART}", "--config.server.admin_api_key_env=THE_KEY"]
    code = main.main(["train", *argv, f"--role={role}", f"--workdir={tmp_path}/run"])
    assert code == 2
    assert "server.admin_api_key_env names THE_KEY" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", ["sync", "periodic"])
def test_on_policy_modes_refuse_staleness(mode):
    with pytest.raises(
        SettingsError, match=rf"'{mode}' .*queue.max_staleness = 0 .*push_every_steps = 1.* 1 and 1"
    ):
        parse(f"--config={QUICKSTART}:mode={mode}", "--config.queue.max_staleness=1")


def test_periodic_mode_refuses_updates_inside_the_step():
    with pytest.raises(SettingsError, match="'periodic' .*learner.num_minibatches .* 1.* 2\n"):
        parse(f"--config={QUICKSTART}:mode=periodic", "--config.learner.num_minibatches=2")


@pytest.mark.parametrize("delay_steps", ["2", "uniform(3)"])
def test_periodic_mode_refuses_weights_that_are_older(delay_steps):
    delay = f"--config.rollout.delay_steps={delay_steps}"
    with pytest.raises(SettingsError, match=r"'periodic' .*rollout.delay_steps = .*'sync'"):
        parse(f"--config={QUICKSTART}:mode=periodic", delay)
    assert parse(f"--config={QUICKSTART}:mode=sync", delay).rollout.delay_steps == delay_steps


def test_a_config_survives_its_json(tmp_path):
    config = config_lib.load_config(str(QUICKSTART))
    (tmp_path / "config.json").write_text(config.to_json_best_effort())
    assert parse(f"--config={tmp_path}/config.json") == config_lib.settings_of(config)
    addresses = ("https://a:1", "https://b:2")  # A list in JSON, a tuple on the command line.
    override = f"--config.server.addresses={addresses!r}"
    assert parse(f"--config={tmp_path}/config.json", override).server.addresses == addresses
    clip = "--config.loss.dual_clip=3"  # null in JSON, where it keeps its type.
    assert parse(f"--config={tmp_path}/config.json", clip).loss.dual_clip == 3.0


# ── the defaults, and configs that do not state every setting ───────────────────────────────────────────────────────


def test_the_defaults_are_a_locked_config_that_passes_its_checks():
    config = base_config()
    assert config_lib.settings_of(config) == settings_lib.Settings()
    with pytest.raises(AttributeError, match="num_steps"):
        config.learner.num_stepz = 7


def test_the_settings_need_the_standard_library_alone():
    heavy = "{'jax', 'numpy', 'ml_collections', 'absl', 'grpc'}"
    code = f"import sys; import jaxrl_async.config.settings; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.fixture
def config_file(tmp_path):
    """Writes a config file with the given body of get_config; its path."""

    def write(*lines):
        path = tmp_path / "mine.py"
        text = "from jaxrl_async.config import base_config\ndef get_config(arg):\n"
        path.write_text(text + "".join(f"    {line}\n" for line in lines))
        return path

    return write


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("c.learner.num_stepz = 7", r"line 4: .*num_stepz.*num_steps"),
        ("c.learner.update(num_stepz=7)", r"line 4: .*num_stepz.*num_steps"),
        ("c.learner.num_steps = 'x'", r"line 4: .*num_steps.*str.*int"),
    ],
)
def test_a_setting_that_a_file_gets_wrong_is_named_with_its_line(
    line, message, config_file, capsys
):
    path = config_file("c = base_config()", line, "return c")
    assert main.main(["config", f"--config={path}"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert re.search(f"{path}, {message}", said), said


def test_a_mistake_of_another_kind_in_a_file_keeps_its_traceback(config_file):
    with pytest.raises(TypeError, match="unsupported operand"):
        parse(f"--config={config_file('return 1 + None')}")


def test_a_file_that_builds_its_own_config_has_the_defaults_of_what_it_leaves_out(config_file):
    path = config_file(
        "from ml_collections import ConfigDict",
        "c = ConfigDict(dict(mode='sync', queue=dict(max_staleness=0)))",
        "c.loss = dict(behavior_cap_mode='clamp', clip_high=0.3)",
        "c.task = dict(name='gsm8k', args=dict(directory='x'), seed=1)",
        "return c",
    )
    settings = parse(f"--config={path}", "--config.loss.dual_clip=7")
    assert settings.loss == LossConfig(behavior_weight="clamp", clip_high=0.3, dual_clip=7.0)
    assert settings.task == settings_lib.Task("gsm8k", {"directory": "x"}, 1)
    assert settings.learner == settings_lib.Learner()


# ── renamed and added settings ──────────────────────────────────────────────────────────────────────────────────────

OLD_KEYS = (ROOT / "tests/fixtures/config_keys.txt").read_text().split()


def test_every_setting_is_read_from_workdirs_that_are_older():
    """config_keys.txt has the keys that every workdir states; a later one needs its value from before it existed."""
    renamed = {settings_lib.RENAMED.get(key, key) for key in OLD_KEYS}
    assert set(default_values()) == renamed | settings_lib.ADDED.keys()
    assert set(settings_lib.RENAMED) <= set(OLD_KEYS) | settings_lib.ADDED.keys()


@pytest.fixture
def old_workdir(tmp_path):
    """Writes the config.json of a smoke run without some keys; the directory."""

    def write(*missing, **blocks):
        values = json.loads(config_lib.load_config(f"{QUICKSTART}:smoke").to_json())
        for key in missing:
            block, _, name = key.rpartition(".")
            del (values[block] if block else values)[name]
        for block, content in blocks.items():
            values[block] |= content
        (tmp_path / "config.json").write_text(json.dumps(values))
        return tmp_path

    return write


def test_a_setting_that_an_old_workdir_lacks_has_the_value_from_before_it_existed(
    old_workdir, monkeypatch, caplog
):
    before = {"loss.clip_low": 0.5, "evaluate.seed": 9, "evaluate.num_prompts": 3}
    before |= {f"cpus.{role}": () for role in ("learner", "server", "rollout", "queue", "rewards")}
    monkeypatch.setattr(settings_lib, "ADDED", before)
    monkeypatch.setattr(build, "ADDED", before)
    workdir = old_workdir("loss.clip_low", "evaluate.seed", "cpus")
    settings = parse(f"--config={workdir}/config.json")
    assert (settings.loss.clip_low, settings.evaluate.seed) == (0.5, 9)
    assert settings.evaluate.num_prompts == 512, "what config.json states"
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 7
    assert f"{workdir}/config.json: no loss.clip_low; read as 0.5" in said[0]


def test_a_setting_that_a_workdir_must_have_is_named_where_it_lacks_it(old_workdir, capsys):
    workdir = old_workdir("loss.anchor")
    assert main.main(["config", f"--workdir={workdir}"]) == 2
    said = capsys.readouterr().err
    assert f"{workdir}/config.json: missing config key config.loss.anchor; mend it, or" in said
    assert "resume with a --config" in said


def test_the_old_name_of_a_setting_is_taken_and_said(old_workdir, caplog):
    workdir = old_workdir("loss.behavior_weight", loss={"behavior_cap_mode": "clamp"})
    assert parse(f"--config={workdir}/config.json").loss.behavior_weight == "clamp"
    word = "--config.loss.behavior_cap_mode=clamp"
    assert parse(f"--config={QUICKSTART}", word).loss.behavior_weight == "clamp"
    first, second = (record.getMessage() for record in caplog.records)
    assert "config.json: loss.behavior_cap_mode is now loss.behavior_weight" in first
    assert "loss.behavior_cap_mode is now --config.loss.behavior_weight" in second


def test_a_setting_under_both_its_names_is_refused(old_workdir):
    workdir = old_workdir(loss={"behavior_cap_mode": "clamp"})
    with pytest.raises(SettingsError, match=r"loss\.behavior_cap_mode .*loss\.behavior_weight"):
        parse(f"--config={workdir}/config.json")


# ── verbs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("given", ["--config={}:smoke", "--workdir={}"])
def test_every_setting_is_printed_and_what_differs_from_the_defaults_is_marked(
    given, old_workdir, capsys
):
    where = QUICKSTART if "config" in given else old_workdir()
    assert main.main(["config", given.format(where), "--config.loss.dual_clip=3"]) == 0
    lines, _, prompts = capsys.readouterr().out.partition("\n\n")
    assert "  test: 512 of 512 prompts fit\n" in prompts
    lines = lines.splitlines()
    assert [line[2:].partition(" = ")[0] for line in lines] == list(default_values())
    assert "  learner.adam_b1 = 0.9" in lines
    assert "* learner.num_steps = 2    (default 100)" in lines
    assert "* loss.dual_clip = 3.0    (default None)" in lines
    assert sum(line.startswith("* ") for line in lines) < 30


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        ([], 2, "usage"),
        (["--help"], 0, "evaluate"),
        (["trian"], 2, "did you mean 'train'"),
        (["train"], 2, "--config=FILE"),
        (["config"], 2, "--config=FILE"),
        (["config", "--workdir=nowhere"], 2, "no config at nowhere/config.json"),
        (["config", f"--config={QUICKSTART}", "--config.mode=asink"], 2, "did you mean 'async'"),
        (["train", "--config=nowhere.py"], 2, "no config at nowhere.py"),
        (["train", f"--config={QUICKSTART}", "--role=quue"], 2, "did you mean 'queue'"),
        (["train", f"--config={QUICKSTART}", "--role=queue"], 2, "needs --config.queue.address"),
        (["train", f"--config={QUICKSTART}", "--role=server"], 2, "config.server.addresses"),
        (["train", f"--config={QUICKSTART}", "--role=server", "--index=-1", ONE], 2, "≥ 0, got -1"),
        (["evaluate"], 2, "--workdir=DIR"),
        (["evaluate", "--workdir=nowhere"], 2, "no config at"),
        (["evaluate", "--workdir=nowhere", "--steps=²"], 2, "must be numbers"),
        (["report", "--workdir=nowhere"], 2, "no metrics.jsonl"),
        (["serve"], 2, "--workdir=DIR"),
        (
            ["serve", "--workdir=nowhere", "--port=65536"],
            2,
            "--port=65536: 65536 is not an integer",
        ),
        (["rewards", f"--config={QUICKSTART}", "--port=-1"], 2, "in the range [0, 65535]"),
        (["relay", "--server=http://a:1", "--port=70000"], 2, "in the range [0, 65535]"),
    ],
)
def test_exit_codes(argv, code, text, capsys):
    assert main.main(argv) == code
    out, err = capsys.readouterr()
    assert text in out + err


@pytest.mark.parametrize(
    "argv",
    [
        ["simulate"],
        ["measure", "--server=http://127.0.0.1:1"],
        ["conform", "--server=http://127.0.0.1:1", "--model=nowhere"],
        ["fit", f"--config={QUICKSTART}", "--target=v5e-1"],
    ],
)
def test_an_out_that_cannot_be_written_is_refused_before_anything_is_computed(
    argv, tmp_path, capsys
):
    (tmp_path / "file").touch()
    assert main.main([*argv, f"--out={tmp_path}/file/found"]) == 2
    said = capsys.readouterr().err
    assert "--out" in said and f"{tmp_path}/file/found" in said


@pytest.mark.parametrize(
    ("words", "named"),
    [("simulate --out={}/found", "--out"), ("evaluate --workdir={}", "evaluation.json")],
)
def test_a_file_that_may_not_be_written_is_refused_before_it_is_computed(
    words, named, tmp_path, monkeypatch, capsys
):
    config = config_lib.load_config(f"{QUICKSTART}:smoke")
    (tmp_path / "config.json").write_text(config.to_json())
    (tmp_path / "checkpoints" / "0").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: not os.path.samefile(path, tmp_path))
    assert main.main(words.format(tmp_path).split()) == 2
    said = capsys.readouterr().err
    assert f"{named} must be a file that may be written, got {tmp_path}/" in said


def test_a_directory_may_have_colons_in_its_name(tmp_path, capsys):
    place = tmp_path / "12:30"
    place.mkdir()
    config = config_lib.load_config(f"{QUICKSTART}:smoke")
    (place / "config.json").write_text(config.to_json())
    (place / "own.py").write_text(QUICKSTART.read_text())
    for spec in (place / "config.json", f"{place}/own.py:smoke"):
        assert config_lib.load_config(str(spec)).to_json() == config.to_json()
    (place / "sweep.py").write_text(
        "from jaxrl_async.sweeps.points import Point, Sweep\n"
        "def get_sweep(arg):\n"
        "    return Sweep('own.py:' + arg, (Point('a', {}),))\n"
    )
    sweep = config_lib.load_sweep(f"{place}/sweep.py:smoke")
    found = config_lib.config_of_point(sweep, sweep.points[0])
    assert found.learner.num_steps == config.learner.num_steps
    assert main.main(["serve", f"--workdir={place}/gone"]) == 2
    assert f"no config at {place}/gone/config.json; `train" in capsys.readouterr().err


def test_evaluate_refuses_a_task_that_cannot_be_imported(tmp_path, capsys):
    config = config_lib.load_config(str(QUICKSTART))
    config.task.name = "no_such_module:Task"
    (tmp_path / "config.json").write_text(config.to_json())
    assert main.main(["evaluate", f"--workdir={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("evaluate: task 'no_such_module:Task'")
    assert line.endswith("No module named 'no_such_module'; is its directory on PYTHONPATH?")


@pytest.mark.parametrize(("num", "split", "left"), [(128, "validation", 384), (-1, "test", 512)])
def test_evaluate_says_which_row_is_the_best_version_and_what_it_does(
    num, split, left, tmp_path, capsys, monkeypatch
):
    config = config_lib.load_config(str(QUICKSTART))
    config.evaluate.num_validation = num
    (tmp_path / "config.json").write_text(config.to_json())
    (tmp_path / "best.json").write_text(json.dumps({"version": 40, "greedy": 0.5}))
    for step in (0, 40, 100):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    counts = {"num_prompts": 8, "num_fit": 8, "num_questions": 40}
    rows = [{"step": step, "greedy": 0.5, "few/greedy": 0.25} | counts for step in (0, 40, 100)]
    rows[0] |= {"num_failed": 3, "few/num_failed": 1}
    monkeypatch.setattr("jaxrl_async.tools.evaluate.evaluate", lambda *_: rows)
    assert main.main(["evaluate", f"--workdir={tmp_path}"]) == 0
    said = capsys.readouterr()
    assert said.err == f"scoring 0, 40, last on the test split: {left} of {left} prompts\n"
    first, *lines = said.out.splitlines()
    assert first == "test split: 8 of 40 prompts, 32 do not fit rollout.max_prompt_tokens"
    assert lines[0].split() == lines[5].split() == ["step", "greedy"]
    assert lines[4] == "few: " and lines[6].split() == ["0", "0.250", "1", "answer", "failed"]
    assert lines[1].endswith("0.500  3 answers failed") and "failed" not in lines[2] + lines[7]
    assert [
        line.split()[0] for line in said.out.splitlines() if f"on the {split} prompts" in line
    ] == ["40"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["attention_kernel=flash"],
            "attention_kernel .* auto, xla, cudnn, splash, mosaic_gpu, triton.*'flash'",
        ),
        (["attention_kernel=cudnn"], "'cudnn' .*model.dtype = 'bfloat16'.*'float32'"),
        (["attention_kernel=triton"], "'triton' .*model.dtype = 'bfloat16'.*'float32'"),
        (["attention_kernel=splash"], "'splash' .*learner.row_tokens .*128.* 48"),
        (["attention_kernel=mosaic_gpu"], "'mosaic_gpu' .*learner.row_tokens .*128.* 48"),
    ],
)
def test_an_attention_kernel_that_does_not_fit_the_run_is_refused(overrides, message):
    with pytest.raises(SettingsError, match=message):
        parse(f"--config={QUICKSTART}", *(f"--config.learner.{item}" for item in overrides))


def test_every_family_of_models_has_a_table():
    assert tuple(families.FAMILIES) == settings_lib.FAMILIES


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gemma"}, "model.family .* llama, gemma3.*'gemma'"),
        ({"family": "llama"}, r"model.windows = \(8, 0\) needs .* 'gemma3', got 'llama'"),
        ({"windows": (8,)}, r"model.windows .* model.num_layers = 2 layers.* \(8,\)"),
        ({"windows": (0, 0)}, r"model.windows .* not 0 for all, got \(0, 0\)"),
        ({"windows": (8, 4)}, r"model.windows .* one number .* \(8, 4\)"),
        ({"windows": (-1, 0)}, r"model.windows' entries must be ≥ 0, got -1"),
        ({"qk_norm": False}, "'gemma3' needs model.qk_norm = True, got False"),
        ({"attention_bias": True}, "'gemma3' needs model.attention_bias = False, got True"),
    ],
)
def test_a_model_that_its_family_does_not_have_is_refused(changes, message):
    fields = {"num_layers": 2, "family": "gemma3", "windows": (8, 0)}
    make_settings({"model": fields})
    with pytest.raises(SettingsError, match=message):
        make_settings({"model": fields | changes})


def test_windows_are_refused_for_a_kernel_that_has_none():
    learner = {"attention_kernel": "splash", "row_tokens": 2048}
    model = {"num_layers": 2, "family": "gemma3"}
    make_settings({"model": model, "learner": learner})
    with pytest.raises(SettingsError, match="'splash' has no windows.* 8 tokens.*'xla'"):
        make_settings({"model": model | {"windows": (8, 0)}, "learner": learner})


@pytest.mark.parametrize(
    ("shorter", "longer"),
    [
        ("rollout.request_timeout_secs", "learner.lease_timeout_secs"),
        ("weights.push_timeout_secs", "learner.lease_timeout_secs"),
        ("learner.lease_timeout_secs", "supervisor.stall_secs"),
        ("queue.outage_secs", "supervisor.stall_secs"),
    ],
)
def test_a_wait_must_be_outlasted_by_the_one_that_it_saves(shorter, longer):
    settings = parse(f"--config={QUICKSTART}")
    checks.check_new(settings)
    bound = checks._value(settings, longer)
    lease = "--config.weights.pause_lease_secs=0.0"  # Which a push must not outlast.
    equal = parse(f"--config={QUICKSTART}", lease, f"--config.{shorter}={bound}")
    with pytest.raises(SettingsError, match=rf"{shorter} = {bound:g} .*{longer} = {bound:g}"):
        checks.check_new(equal)


def test_a_new_warm_start_is_divided_by_the_mesh_and_a_resumed_run_has_made_it():
    words = (
        f"--config={QUICKSTART}",
        "--config.learner.fsdp=3",
        "--config.learner.microbatch_rows=63",
    )
    settings = parse(*words)
    with pytest.raises(SettingsError, match=r"warm_start.batch_size = 128 .*learner.fsdp = 3"):
        checks.check_new(settings)
    checks.check_new(parse(*words, "--config.warm_start.batch_size=126"))
    checks.check_new(parse(*words, "--config.warm_start.num_steps=0"))


def test_a_warm_up_that_is_longer_than_the_run_is_warned_about(tmp_path, capsys):
    flags = ["--config.learner.num_steps=5", "--config.learner.num_minibatches=2"]
    assert not checks.warnings(parse(f"--config={QUICKSTART}", *flags))
    flags += [f"--config={QUICKSTART}", "--config.learner.warmup_updates=30"]
    config = config_lib.parse_flags("usage", flags, config=True, workdir=("", "directory")).config
    start.begin(config, config_lib.settings_of(config), tmp_path, resume=False)
    said = "warmup_updates = 30 exceeds the run's 10 updates: the learning rate ends at 0.0001, and never is "
    assert f"warning: learner.{said}learner.learning_rate = 0.0003\n" in capsys.readouterr().out


def test_a_best_version_that_may_have_no_checkpoint_is_warned_about():
    every = ["--config.evaluate.every_steps=10", "--config.checkpoint.every_steps=20"]
    (said,) = checks.warnings(parse(f"--config={QUICKSTART}", *every))
    assert "evaluate.every_steps = 10 is no multiple of checkpoint.every_steps = 20" in said
    assert not checks.warnings(parse(f"--config={QUICKSTART}", "--config.evaluate.every_steps=0"))


@pytest.mark.parametrize("advantage", [name for name in ADVANTAGES if name != "none"])
def test_a_group_of_one_is_refused_by_every_advantage_whose_baseline_is_the_group(advantage):
    environment = ["--config.rollout.function=environment", "--config.environment.name=calculator"]
    with pytest.raises(
        SettingsError, match=f"loss.advantage '{advantage}' needs rollout.group_size ≥ 2, got 1"
    ):
        checks.check_new(
            parse(
                f"--config={QUICKSTART}",
                "--config.rollout.group_size=1",
                f"--config.loss.advantage={advantage}",
                *(environment if advantage == "turns" else ()),
            )
        )


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
@pytest.mark.parametrize("arg", ["", "mode=sync", "mode=periodic", "smoke"])
def test_the_waits_of_every_config_agree(path, arg):
    checks.check_new(parse(f"--config={path}:{arg}" if arg else f"--config={path}"))


def test_the_page_of_settings_is_that_of_their_fields():
    remedy = "write it anew: python launch/settings_page.py >docs/settings.md"
    page = (ROOT / "docs/settings.md").read_text("utf-8")
    assert page == settings_page.page(), remedy
    for name in default_values():
        assert page.count(f"| `{name}` |") == 1, name
    row = "| `server.quorum` | float in (0, 1] | `0.5` | 0.1.0 (`1.0`) | Share of the servers, rounded up"
    assert row in page

"""What a newcomer may type wrongly: each is one line that names setting, value and bound, with exit code 2.

Verbs run in this process, and a run that would have started its roles counts as a mistake that was accepted.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
from fixtures.models import TINY, tiny
from flax import nnx
from huggingface_hub import constants

from jaxrl_async.cli import main
from jaxrl_async.cli.config import load_config
from jaxrl_async.config.settings import FIELDS
from jaxrl_async.models import hf, transformer
from jaxrl_async.runtime import supervisor

ROOT = pathlib.Path(__file__).parents[2]
QUICKSTART = f"{ROOT}/configs/quickstart.py:smoke"
GSM8K = f"{ROOT}/configs/gsm8k_tiny.py:smoke"


def jsonl(**args):
    """The words of a train on sums.jsonl, whose second line has no answer."""
    args = {"train": "{tmp}/sums.jsonl"} | args
    words = ["--config.task.name=jsonl", f"--config.task.args={args}"]
    return ["train", f"--config={QUICKSTART}", *words, "--config.evaluate.num_validation=0"]


# (settings of a train on the quickstart, what the line must name)
SETTINGS = [
    ("learner.learning_rate=-1.0", ("learner.learning_rate", "≥ 0", "-1")),
    ("learner.learning_rate=nan", ("learner.learning_rate", "finite", "nan")),
    ("learner.learning_rate=fast", ("learner.learning_rate", "fast")),
    ("warm_start.learning_rate=-0.5", ("warm_start.learning_rate", "≥ 0", "-0.5")),
    ("learner.num_steps=0", ("learner.num_steps", "≥ 1", "0")),
    ("learner.num_steps=ten", ("learner.num_steps", "ten")),
    ("learner.num_stepz=10", ("learner.num_stepz", "'num_steps'")),
    ("lerner.num_steps=10", ("lerner", "'learner'")),
    ("optimizer.learning_rate=1.0", ("config.optimizer,", "config.learner.learning_rate")),
    ("learner.lr=0.1", ("config.learner.lr;", "jaxrl_async config", "prints them all")),
    ("learner.adam_b1=1.0", ("learner.adam_b1", "[0, 1)", "1")),
    ("learner.max_grad_norm=0.0", ("learner.max_grad_norm", "> 0", "0")),
    ("learner.microbatch_rows=-4", ("learner.microbatch_rows", "≥ 1", "-4")),
    ("learner.num_minibatches=3", ("learner.num_minibatches = 3", "groups_per_step = 8")),
    ("learner.blocks=3", ("learner.blocks", "[1, model.num_layers = 2]", "3")),
    ("learner.packing=firstfit", ("learner.packing", "'firstfit'", "'first_fit'")),
    ("learner.data=3", ("learner.data", "microbatch_rows = 64", "3")),
    ("mode=asink", ("mode", "'asink'", "'async'")),
    ("queue.max_staleness=0", ("queue.max_staleness", "≥ 1", "got 0")),
    ("queue.max_staleness=-1", ("queue.max_staleness", "-1")),
    ("queue.max_running_groups=0", ("queue.max_running_groups", "≥ 1", "0")),
    ("queue.address=somewhere", ("queue.address", "somewhere", "host:port")),
    ("rollout.group_size=1", ("rollout.group_size", "≥ 2", "1")),
    ("rollout.temperature=0.0", ("rollout.temperature", "> 0", "0")),
    ("rollout.temperature=-1.0", ("rollout.temperature", "> 0", "-1")),
    ("rollout.max_new_tokens=400", ("rollout.max_new_tokens = 408", "learner.row_tokens = 48")),
    ("rollout.max_prompt_tokens=3", ("rollout.max_prompt_tokens", "3", "6")),
    ("rollout.function=single_tern", ("rollout.function", "'single_tern'", "'single_turn'")),
    ("rollout.function=no_module:f", ("rollout.function", "no_module")),
    ("loss.anchor=behaviour", ("loss", "anchor", "'behaviour'", "behavior;")),
    ("loss.clip_low=2.0", ("loss", "clip_low", "[0, 1]", "2.0")),
    ("weights.push_every_steps=9", ("push_every_steps 9", "queue.max_staleness 2")),
    ("weights.transport=nccl", ("weights.transport", "'nccl'", "disk, tensor, stream")),
    ("weights.keep=1", ("weights.keep", "≥ 2", "1")),
    ("checkpoint.every_steps=0", ("checkpoint.every_steps", "≥ 1", "0")),
    ("evaluate.num_prompts=0", ("evaluate.num_prompts", "≥ 1", "0")),
    ("evaluate.num_prompts=100000", ("evaluate.num_prompts", "100000", "512")),
    ("evaluate.num_validation=100000", ("evaluate.num_validation", "100000", "512")),
    ("server.addresses=('sglang:30000',)", ("server.addresses", "sglang:30000", "http://")),
    ("server.addresses=('http://127.0.0.1:99999',)", ("server.addresses", ":99999", "65536")),
    (
        "server.addresses=('https://no-such-host.invalid:30000',)",
        ("server.addresses", "no-such-host.invalid", "resolve"),
    ),
    ("server.command=serve {modelpath}", ("server.command", "{modelpath}", "{model_path}")),
    ("server.api_key_env=NOT_A_VARIABLE", ("server.api_key_env", "NOT_A_VARIABLE")),
    ("task.name=arithmetics", ("task", "'arithmetics'", "'arithmetic'")),
    ("task.args.num_digits=12", ("task", "num_digits", "[1, 9]", "12")),
    ("tokenizer.kind=chars", ("tokenizer.kind", "'chars'", "char, bpe, huggingface")),
    ("tokenizer.alphabet=0123456789+", ("tokenizer.alphabet", "'='", "'0123456789+'")),
    ("tokenizer.instruction=Add ", ("tokenizer.alphabet", "' ', 'A', 'd'", "Add ")),
    ("tokenizer.system_prompt=Add.", ("tokenizer.system_prompt", "'Add.'", "'huggingface'")),
    ("tokenizer.alphabet=", ("tokenizer.alphabet", "''")),
    ("warm_start.row_tokens=5", ("warm_start.row_tokens", "5", "8")),
    ("warm_start.num_demonstrations=0", ("warm_start.num_demonstrations", "≥ 1", "0")),
    ("model.path={tmp}/nowhere", ("model.path", "nowhere")),
    ("model.path=some-org/some-model", ("model.path", "some-org/some-model", "huggingface_hub")),
    ("model.path={tmp}/gpt", ("model.path", "'gpt2'", "qwen2")),
    ("model.path={tmp}/small", ("model.path", "tokenizer has 14 ids", "is 12")),
    ("model.path={tmp}/empty", ("model.path", "safetensors")),
    ("model.path={tmp}/torn", ("model.path", "model.safetensors")),
    ("model.path={tmp}/short", ("model.path", "max_new_tokens = 12", "short", "11 tokens")),
    ("model.path={tmp}/narrow", ("model.path", "model.norm.weight", "[8]", "[16]")),
    ("model.num_heads=0", ("model.num_heads", "≥ 1", "0")),
    ("model.num_kv_heads=3", ("model.num_kv_heads", "num_heads = 4", "3")),
]  # fmt: skip
WORDS = [
    (["trian"], ("unknown verb 'trian'", "'train'")),
    (["train"], ("--config=FILE",)),
    (["train", "--config=nowhere.py"], ("nowhere.py",)),
    (["train", f"--config={QUICKSTART}e"], ("'smokee'", "'smoke'")),
    (["train", f"--config={QUICKSTART}", "--workdri=a"], ("workdri", "workdir")),
    (["train", f"--config={QUICKSTART}", "--role=lerner"], ("'lerner'", "'learner'")),
    (
        ["train", f"--config={QUICKSTART}", "--role=rewards"],
        ("--index=0", "rollout.reward_addresses"),
    ),
    (
        [
            "train",
            f"--config={QUICKSTART}",
            "--config.rollout.reward_addresses=('no-such-host.invalid:7100',)",
            "--config.security.insecure=True",
        ],
        ("rollout.reward_addresses", "no-such-host.invalid", "resolve"),
    ),
    (
        [
            "train",
            "--role=rewards",
            f"--config={QUICKSTART}",
            "--config.rollout.reward_addresses=('0.0.0.0:7100',)",
            "--config.security.insecure=True",
        ],
        ("reward service 0", "0.0.0.0:7100", "queue.token_env"),
    ),
    (["train", f"--config={QUICKSTART}", "--workdir=/dev/null/a"], ("--workdir", "/dev/null/a")),
    (["train", f"--config={GSM8K}", "--config.task.args.directory=nowhere"], ("nowhere", "task")),
    (
        [
            "train",
            f"--config={GSM8K}",
            "--config.task.args.reward=math_verify",
            f"--config.task.args.directory={ROOT}/tests/gsm8k_tiny",
            "--config.evaluate.num_prompts=2",
        ],
        ("math_verify", "pip install 'jaxrl_async[math]'"),
    ),
    (
        [
            "train",
            f"--config={QUICKSTART}",
            "--config.model.path={tmp}/windowed",
            "--config.learner.attention_kernel=splash",
            "--config.learner.row_tokens=128",
        ],
        ("model.path", "'splash' has no windows", "8 tokens", "'xla'"),
    ),
    (
        [
            "train",
            f"--config={QUICKSTART}",
            "--config.learner.attention_kernel=triton",
            "--config.learner.row_tokens=128",
            "--config.model.dtype=bfloat16",
            "--config.model.head_dim=24",
        ],
        ("learner.attention_kernel 'triton'", "multiple of 16 of at most 256", "24", "'xla'"),
    ),
    (
        [
            "train",
            f"--config={QUICKSTART}",
            "--config.model.path={tmp}/whole",
            "--config.learner.blocks=3",
        ],
        ("model.path", "learner.blocks", "[1, 2]", "3"),
    ),
    *(
        (
            ["train", f"--config={QUICKSTART}", "--config.model.path={tmp}/whole", flag],
            ("model.path", "experts", *words),
        )
        for flag, *words in (
            ("--config.learner.expert=2", "learner.expert = 2 does not divide"),
            ("--config.learner.replay_routes=on", "learner.replay_routes = 'on' needs a model"),
        )
    ),
    (
        [
            "train",
            f"--config={QUICKSTART}",
            "--config.task.name=fixtures.lines_task:Pairs",
            "--config.task.args={'path': '{tmp}/lines.txt'}",
        ],
        ("task 'fixtures", "example 0 of split 'train' must be an Example", "got ('1+1='"),
    ),
    (
        [
            "train",
            f"--config={QUICKSTART}",
            "--config.task.name=fixtures.lines_task:Untested",
            "--config.task.args={'path': '{tmp}/lines.txt'}",
            "--config.evaluate.num_validation=0",
        ],
        ("task 'fixtures", "split 'test' is empty"),
    ),
    (jsonl(train="nowhere.jsonl", num_test=2), ("task 'jsonl'", "'nowhere.jsonl'")),
    (jsonl(num_test=2), ("task 'jsonl'", "sums.jsonl, line 2", "column 'answer'", "None")),
    (jsonl(num_test=2, prompt="prompts"), ("line 1", "no column 'prompts'", "'prompt'")),
    (jsonl(), ("task 'jsonl'", "test files", "num_test")),
    (jsonl(trian="a"), ("task 'jsonl'", "'trian'", "train: str")),
    (
        ["train", f"--config={QUICKSTART}", "--config.task.rewards={'exakt': 1.0}"],
        ("unknown reward 'exakt'", "'exact'"),
    ),
    (
        ["train", f"--config={QUICKSTART}", "--config.task.rewards={'exact': 0}"],
        ("task.rewards", "not 0", "got 0 of 'exact'"),
    ),
    (["train", "--config=quikstart"], ("quikstart", "'quickstart'")),
    (["sweep"], ("--sweep=FILE",)),
    (["sweep", "--sweep=sweeps/sead"], ("no sweep at sweeps/sead", "'sweeps/seeds'")),
    (["train", "--resume", "--workdir={tmp}/nothing"], ("{tmp}/nothing",)),
    (["evaluate"], ("--workdir=DIR",)),
    (["evaluate", "--workdir={tmp}/nothing"], ("{tmp}/nothing",)),
    (["evaluate", "--workdir={tmp}/done", "--steps=two"], ("--steps", "'two'")),
    (["replay", "--workdir={tmp}/done", "--until=-5"], ("--until", "-5")),
    (["replay", "--workdir={tmp}/done", "--first=-1"], ("--first", "-1")),
    (["serve", "--workdir={tmp}/done", "--step=-5"], ("--step", "-5")),
    (["evaluate", "--workdir={tmp}/done", "--steps=7"], ("--steps", "7", "0, 2")),
    (["evaluate", "--workdir={tmp}/done", "--config.mode=sync"], ("config.mode",)),
    (["evaluate", "--workdir={tmp}/long"], ("model.path", "max_new_tokens = 12", "11 tokens")),
    (
        ["replay", "--workdir={tmp}/done", "--first=2", "--config.learner.blocks=2"],
        ("learner.blocks", "checkpoint 0", "--first=2"),
    ),
    (
        "replay --workdir={tmp}/done --first=2 --config.learner.schedule=linear "
        "--config.learner.num_minibatches=2".split(),
        ("learner.num_minibatches", "checkpoint 0", "--first=2", "learner.schedule"),
    ),
    (["report", "--workdir={tmp}/nothing"], ("{tmp}/nothing",)),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with checkpoints that no run can start from, and the workdir `done` of a run."""
    place = tmp_path_factory.mktemp("mistakes")
    zeros = nnx.map_state(
        lambda _, p: p.replace(np.zeros(p.shape, np.float32)), transformer.abstract_params(TINY)
    )
    tensors = dict(hf.to_tensors(zeros, TINY, "float32"))
    config = hf.write_config(TINY)
    contents = {
        "gpt": (config | {"model_type": "gpt2"}, tensors),
        "small": (config | {"vocab_size": 12}, tensors),
        "empty": (config, None),
        "torn": (config, b"not a header"),
        "narrow": (config, tensors | {"model.norm.weight": np.zeros(8, np.float32)}),
        "whole": (config, tensors),
        "short": (config | {"max_position_embeddings": 11}, tensors),
        "windowed": (hf.write_config(tiny(family="gemma3", windows=(8, 0))), tensors),
    }
    for name, (config, tensors) in contents.items():
        (place / name).mkdir()
        (place / name / "config.json").write_text(json.dumps(config))
        if isinstance(tensors, dict):
            safetensors.numpy.save_file(tensors, place / name / "model.safetensors")
        elif tensors:
            (place / name / "model.safetensors").write_bytes(tensors)
    for step in (0, 2):
        (place / "done" / "checkpoints" / str(step)).mkdir(parents=True)
    (place / "lines.txt").write_text("1+1= 2\n2+2= 4\n3+3= 6")
    rows = '{"prompt": "1+1=", "answer": 2}\n{"prompt": "2+2=", "answer": null}\n'
    (place / "sums.jsonl").write_text(rows)
    config = load_config(QUICKSTART)
    (place / "done" / "config.json").write_text(config.to_json())
    config.model.path = f"{place}/short"
    shutil.copytree(place / "done", place / "long")  # begun where no bound was known
    (place / "long" / "config.json").write_text(config.to_json())
    return place


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path, place):
    """Runs a command whose roles would not start: (exit code, its lines on stderr)."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(supervisor, "run", lambda *_, **__: True)
    monkeypatch.setitem(sys.modules, "math_verify", None)  # As where the extra is not installed.
    monkeypatch.delitem(sys.modules, "jaxrl_async.rewards.math_verifier", raising=False)

    def run(words):
        words = [word.replace("{tmp}", str(place)) for word in words]
        trains = words[0] == "train" and not any("workdi" in word for word in words)
        code = main.main([*words, *([f"--workdir={tmp_path}/run"] if trains else [])])
        return code, capsys.readouterr().err.splitlines()

    return run


def is_explained(code, lines, named):
    return code == 2 and len(lines) == 1 and all(piece in lines[0] for piece in named)


@pytest.mark.parametrize(("setting", "named"), SETTINGS, ids=[name for name, _ in SETTINGS])
def test_a_setting_that_is_wrong_is_one_line(setting, named, typed):
    code, lines = typed(["train", f"--config={QUICKSTART}", f"--config.{setting}"])
    assert is_explained(code, lines, named), (code, lines)


@pytest.mark.parametrize(("words", "named"), WORDS, ids=[" ".join(w[:3])[-60:] for w, _ in WORDS])
def test_a_command_that_is_wrong_is_one_line(words, named, typed, place):
    code, lines = typed(words)
    named = [piece.replace("{tmp}", str(place)) for piece in named]
    # The verb without words also lists the verbs.
    assert is_explained(code, lines[:1] if words == ["trian"] else lines, named), (code, lines)


def test_the_same_commands_without_a_mistake_would_start(typed):
    assert typed(["train", f"--config={QUICKSTART}"]) == (0, [])
    assert typed(["train", f"--config={QUICKSTART}", "--config.model.path={tmp}/whole"]) == (0, [])


def test_the_config_of_a_run_states_the_shape_of_its_checkpoint(typed, place, tmp_path, capsys):
    words = ["train", f"--config={QUICKSTART}", "--config.model.path={tmp}/whole"]
    workdir = f"--workdir={tmp_path}/shaped"
    assert typed([*words, workdir]) == (0, [])
    model = json.loads((tmp_path / "shaped" / "config.json").read_text())["model"]
    for name, value in json.loads(json.dumps(vars(TINY))).items():
        assert name == "lora" or name not in model or model[name] == value, name
    assert model["lora"]["rank"] == 0
    assert model["mlp_dim"] == 32 and model["path"] == f"{place}/whole"

    (tmp_path / "shaped" / "checkpoints" / "0").mkdir(parents=True)
    assert typed([*words, workdir, "--resume"]) == (0, [])
    assert typed(["train", workdir, "--resume"]) == (0, [])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["trian"], ("'train'",)),
        (
            ["train", f"--config={QUICKSTART}", "--config.learner.learning_rate=-1.0"],
            ("learner.learning_rate must be ≥ 0, got -1",),
        ),
        (
            ["train", f"--config={QUICKSTART}", "--config.evaluate.num_prompts=900"],
            ("evaluate.num_prompts = 900 must be ≤ 512",),
        ),
        (["evaluate", "--workdir=nowhere"], ("nowhere/config.json",)),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_in_a_shell_too_a_mistake_is_a_line_and_exit_code_2(words, named, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_async", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    line, *more = done.stderr.splitlines()
    assert done.returncode == 2 and (not more or words == ["trian"])
    assert all(piece in line for piece in named), line


# Every text that says that it is a file or a directory, but those that may be in a bucket.
PATHS = [
    key
    for key, field in FIELDS.items()
    if field.type is str
    and "choices" not in field.metadata
    and re.search(r"\b([Dd]irectory|[Ff]ile|PATH)\b", field.metadata["about"])
    and key not in ("learner.compilation_cache", "checkpoint.directory")
]


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_bucket_in_the_place_of_a_path_is_refused_by_name(scheme, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    marks = {"server.discover": "file:"} | {key: "@" for key in PATHS if key.endswith("_env")}
    flags = [f"--config.{key}={marks.get(key, '')}{scheme}://bucket/x" for key in PATHS]
    assert main.main(["train", f"--config={QUICKSTART}", *flags]) == 2
    said = capsys.readouterr().err
    for key in PATHS:
        assert re.search(
            rf"^ *{key} must be on this machine, got '.*{scheme}://bucket/x'", said, re.M
        ), key
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("az://bucket/x", "must be gs://BUCKET/PATH or s3://BUCKET/PATH, got 'az://bucket/x'"),
        ("/disk/x", "must be gs://BUCKET/PATH or s3://BUCKET/PATH, got '/disk/x'"),
        ("s3://bucket", "must be gs://BUCKET/PATH or s3://BUCKET/PATH, got 's3://bucket'"),
        ("gs://bucket/x/", "must be gs://BUCKET/PATH"),
    ],
)
def test_checkpoints_are_kept_in_a_bucket_that_orbax_writes_to(value, said, tmp_path, capsys):
    words = [f"--config={QUICKSTART}", f"--config.checkpoint.directory={value}"]
    assert main.main(["train", f"--workdir={tmp_path}/a", *words]) == 2
    assert f"checkpoint.directory {said}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_workdir_in_a_bucket_is_refused_by_every_verb(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in (["train", "--config=quickstart"], ["report"], ["status"], ["evaluate"]):
        assert main.main([*words, "--workdir=gs://bucket/run"]) == 2
        assert "--workdir must be on this machine, got gs://bucket/run" in capsys.readouterr().err
    assert main.main(["train", "--config=gs://bucket/config.json"]) == 2
    assert "--config must be on this machine" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("scheme", "client", "extra"), [("gs", "gcsfs", "gcs"), ("s3", "s3fs", "s3")]
)
def test_a_bucket_without_its_client_names_the_extra(
    scheme, client, extra, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, client, None)
    words = [f"--config={QUICKSTART}", f"--config.checkpoint.directory={scheme}://bucket/x"]
    assert main.main(["train", f"--workdir={tmp_path}/a", *words]) == 2
    said = capsys.readouterr().err
    assert f"checkpoint.directory needs `pip install jaxrl_async[{extra}]`" in said
    assert list(tmp_path.iterdir()) == []

"""The pages are true: links, anchors, names of metrics and of tests, examples, and every command that they show."""

import importlib
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import threading
import urllib.request

import api
import pytest
from fixtures import chat

from jaxrl_async import rewards, tasks
from jaxrl_async.cli.config import settings_of
from jaxrl_async.metrics import METRICS, read_metrics
from jaxrl_async.runtime.supervisor import free_port
from jaxrl_async.samples import read_samples

OPTIMISED = pytest.mark.optimised  # As the run that all share: for its cache, and for its replay.
ROOT = pathlib.Path(__file__).parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
RUN_TIMEOUT_SECS = 400
# Commands that are not run here, with the reason or the test that runs them.
ELSEWHERE = {
    "gs://BUCKET": "needs a bucket: test_bucket",
    "./launch/quickstart.sh": "installs: test_long",
    "./launch/smollm2.sh": "takes 20 minutes: test_launch",
    "./tests/run.sh": "is this",
    "jaxrl_async serve": "does not end: test_inference_http",
    "jaxrl_async rewards": "does not end: test_reward_service",
    "jaxrl_async relay": "does not end: test_sidecar",
    "jaxrl_async status": "needs a running run: test_status, test_stalls",
    "jaxrl_async measure": "needs a server: test_measure",
    "jaxrl_async conform": "needs a server: test_conform",
    "jaxrl_async parity": "needs a server, or a checkpoint: test_parity, test_layers",
    "python -m sglang.launch_server --config keys.yaml": "SGLang's own: test_conformance",
    "python -m sglang.bench_serving": "SGLang's own: test_clients",
    "python -m sglang_router.launch_router": "the router's own: test_router",
    "jaxrl_async fit": "needs a compiler: test_fit",
    "--fit=": "needs the output of fit: test_simulate",
    "--adapter": "needs a run with adapters: test_lora_runs",
    "benchmarks/": "test_benchmark_scripts",
    "pytest": "a test",
    "notebooks/": "test_notebooks",
    "configs/code.py": "needs a sandbox: test_code_reward",
    "my_task:Lines": "test_the_example_of_a_task_trains",
    "second_chance:SecondChance": "test_the_example_of_an_environment_trains_and_is_evaluated",
    "my_tools:multiply": "test_the_example_of_a_tool_is_called_by_a_chat_model",
    "task.name=verifiers:": "test_verifiers: test_the_example_of_the_docs_is_one",
    "task.name=openenv:": "needs a server: test_openenv",
    "my_agent:agent": "test_the_example_of_an_agent_is_trained",
    "--workdir=runs/calculator": "test_long, and the smoke run of test_agents",
    "calculator:calculator": "test_the_example_of_a_rollout_function_trains_and_is_evaluated",
    "gcloud": "a cloud's own",
    "SETUP=": "a variable of the next line",
    "launch/tpu_pod.sh": "needs gcloud: test_launch",
    "launch/slurm_pod.sbatch": "test_launch, and on a Slurm test_slurm",
    "job.sbatch": "test_launch, and on a Slurm test_slurm",
    "pod --workdir=runs/a --": "needs a pod that runs: test_hosts",
    "kubectl": "a cluster's own",
    "xpk": "a cloud's own",
    "launch/local.sh": "test_launch",
    "launch/badges.py": "writes into the notebooks: test_launch",
}
VARIABLES = r"""(?:[A-Z]+=(?:"[^"]*"|[^\s"]*) +)*"""  # set before a command


def blocks(page: pathlib.Path, *languages: str) -> list[str]:
    """The code blocks of a page that are fenced with one of the languages, "" for none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    return [block for language, block in found if language in languages]


def anchors(page: pathlib.Path) -> set[str]:
    """The sections of a page, as links name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def commands() -> list[str]:
    """Every line of a code block that calls a program of the project, without its comment."""
    lines = [
        line.partition("  #")[0].strip()
        for page in PAGES
        for block in blocks(page, "", "bash")
        for line in block.replace("\\\n", " ").splitlines()
        if re.match(rf"{VARIABLES}(python -m|python \w|\./|bash|sbatch|gcloud|kubectl|xpk)", line)
    ]
    return list(dict.fromkeys(lines))


def is_elsewhere(command: str) -> bool:
    return command == "python -m jaxrl_async" or any(part in command for part in ELSEWHERE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_are_there(page):
    text = page.read_text("utf-8")
    for target, anchor in re.findall(r"\]\(([^)#:]*)#?([^)#:]*)\)", text):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), f"{target}#{anchor}"
    for name in re.findall(r"`((?:tests|benchmarks|configs|launch|docs|notebooks)/[\w./]+)`", text):
        assert (ROOT / name).exists() or name.startswith("configs/X"), name


def test_every_promise_names_the_tests_that_hold_it():
    text = (ROOT / "docs" / "trust.md").read_text("utf-8")
    promises = text.partition("\n## Limits")[0]
    rows = re.findall(r"^\| (?!promise|---)(.+?) \| (.+) \|$", promises, re.M)
    assert len(rows) > 30
    for promise, holders in rows:
        found = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", holders)
        assert found and len(found) == holders.count("`") // 2, promise
        long = []
        for file, name in found:
            source = (ROOT / file).read_text("utf-8")
            marks = re.search(rf"((?:^@.*\n|^[ )\]].*\n)*)^(?:async )?def {name}\(", source, re.M)
            assert marks, f"{file}::{name}"
            all_of_file = re.search(r"^pytestmark = .*mark\.long", source, re.M)
            long.append(bool(all_of_file or re.search(r"^@pytest.mark.long$", marks[1], re.M)))
        assert not all(long) or "`--long`" in promise, f"only with --long: {promise}"


def test_the_lexicon_is_in_order_and_says_each_term_once():
    text = (ROOT / "docs" / "lexicon.md").read_text("utf-8")
    terms = [term.lower() for term in re.findall(r"^\| (?!term)(\w.*?) \| \S", text, re.M)]
    assert len(terms) > 30 and terms == sorted(set(terms))


def test_the_reference_of_metrics_is_the_table():
    text = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(.+?)` \| (.+) \|$", text, re.M))
    assert rows == METRICS


def test_the_reference_of_the_api_is_that_of_the_docstrings():
    assert (ROOT / "docs" / "api.md").read_text("utf-8") == api.page(), "python launch/api.py"


def test_the_example_of_a_config_is_one():
    *_, source = blocks(ROOT / "docs" / "command_line.md", "python")
    found = {}
    exec(source, found)
    settings = settings_of(found["get_config"]("smoke,seed=3"))
    assert (settings.seed, settings.task.seed, settings.learner.num_steps) == (3, 3, 2)


def test_the_example_of_a_task_is_one(tmp_path, monkeypatch):
    source, _ = blocks(ROOT / "docs" / "extending.md", "python")
    assert source == (ROOT / "tests" / "fixtures" / "my_task.py").read_text("utf-8")
    (tmp_path / "my_task.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_task", raising=False)  # from another test
    importlib.import_module("my_task")
    assert tasks.TASKS.pop("lines") == "my_task:Lines"
    assert rewards.REWARDS.pop("shorter") == "my_task:shorter"
    task = tasks.make_task("my_task:Lines", num_test=10)
    assert (len(task.examples("train")), len(task.examples("test"))) == (90, 10)
    assert len(task.demonstrations(7)) == 7
    del sys.modules["my_task"]


@pytest.mark.long
def test_the_example_of_a_task_trains(tmp_path):
    command, found = example("extending.md", "my_task", tmp_path)
    call(f"{command} --workdir={tmp_path / 'run'}", **found)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 <= row["component/ended"] <= 1 and "component/short" in row for row in rows)
    with pytest.raises(AssertionError, match=r"num_test.*task\.args.*forget_carry"):
        call(re.sub(r"--config.task.args=.*", f"--workdir={tmp_path / 'no'}", command), **found)


def test_the_example_of_a_rollout_function_trains_and_is_evaluated(tmp_path):
    command, found = example("extending.md", "calculator", tmp_path)
    run = f"--workdir={tmp_path / 'run'}"
    call(f"{command} {run}", **found)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
    call(f"python -m jaxrl_async evaluate {run}", **found)


@pytest.mark.long
def test_the_example_of_an_environment_trains_and_is_evaluated(tmp_path):
    command, found = example("agents.md", "second_chance", tmp_path)
    run = f"--workdir={tmp_path / 'run'}"
    call(f"{command} {run}", **found)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(1 <= row["component/turns"] <= 2 for row in rows)
    assert any("component/wrong" in row for row in rows)
    call(f"python -m jaxrl_async evaluate {run}", **found)


@pytest.mark.long
def test_the_example_of_a_tool_is_called_by_a_chat_model(tmp_path):
    command, found = example("agents.md", "my_tools", tmp_path)
    chat.tokenizer_of(tmp_path / "chat", "qwen")
    small = (
        f"--config.tokenizer.kind=huggingface --config.tokenizer.path={tmp_path / 'chat'} "
        "--config.tokenizer.vocab_size=0 --config.rollout.max_prompt_tokens=700 "
        "--config.server.max_total_tokens=760 --config.environment.num_processes=2"
    )
    command = command.replace("smollm2.py", "smollm2.py:smoke")
    run = f"--workdir={tmp_path / 'run'}"
    call(f"{command} {small} --config.learner.row_tokens=1024 {run}", **found)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2] and all("component/turns" in r for r in rows)
    prompt = next(iter(read_samples(tmp_path / "run").values()))[0].prompt
    assert '"name": "multiply"' in prompt


@pytest.mark.long
def test_the_example_of_an_agent_is_trained(tmp_path):
    pytest.importorskip("openai")
    command, found = example("agents.md", "my_agent", tmp_path)
    chat.tokenizer_of(tmp_path / "chat", "qwen")
    small = (
        f"--config.tokenizer.kind=huggingface --config.tokenizer.path={tmp_path / 'chat'} "
        "--config.tokenizer.vocab_size=0 --config.rollout.max_prompt_tokens=150"
    )
    command = command.replace("smollm2.py", "smollm2.py:smoke")
    command = command.replace("max_total_tokens=200", "max_total_tokens=400")
    call(f"{command} {small} --workdir={tmp_path / 'run'}", **found)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2] and all("component/turns" in r for r in rows)


def example(page: str, module: str, directory: pathlib.Path) -> tuple[str, dict[str, str]]:
    """Writes a page's module into a directory: the page's command for it, and the variable that finds it there."""
    source = (ROOT / "tests" / "fixtures" / f"{module}.py").read_text("utf-8")
    assert source in blocks(ROOT / "docs" / page, "python")
    (directory / f"{module}.py").write_text(source)
    (command,) = [b.strip() for b in blocks(ROOT / "docs" / page, "") if f"{module}:" in b]
    return command, {"PYTHONPATH": f"{ROOT}{os.pathsep}{directory}"}


@pytest.fixture(scope="module")
def workdir(finished, tmp_path_factory):
    """The smoke run that the commands take."""
    return shutil.copytree(finished("async"), tmp_path_factory.mktemp("docs") / "run")


@OPTIMISED
def test_a_checkpoint_is_served_in_texts_until_sigterm(workdir):
    command = [sys.executable, "-m", "jaxrl_async", "serve", f"--workdir={workdir}", "--port=0"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    server = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    killer = threading.Timer(240, server.kill)
    killer.start()
    try:
        said = []
        while not (address := re.search(r"at (http://\S+)$", said[-1]) if said else None):
            said.append(server.stderr.readline().rstrip())
            assert said[-1] or server.poll() is None, said
        body = {"messages": [{"role": "user", "content": "47+38="}]}
        request = urllib.request.Request(
            f"{address[1]}/v1/chat/completions", json.dumps(body).encode(), method="POST"
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.loads(answer.read())
        assert set(found["choices"][0]["message"]["content"]) <= set("0123456789+=")
        server.terminate()
        rest = server.stderr.read()
        assert server.wait(60) == 0 and "Traceback" not in rest, rest
    finally:
        killer.cancel()
        server.kill()
        server.wait()
        server.stderr.close()


def call(command: str, **variables: str) -> str:
    before = re.match(VARIABLES, command)[0]
    variables |= dict(word.split("=", 1) for word in shlex.split(before))
    words = shlex.split(command.removeprefix(before))
    words = [sys.executable if word == "python" else word for word in words]
    done = subprocess.run(
        words,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_SECS,
        stdin=subprocess.DEVNULL,
        env=environment() | variables,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAXRL_QUEUE_TOKEN": "made-up",
        "JAXRL_PYTHON": sys.executable,
    }


def at_smoke_size(command: str, workdir: pathlib.Path, out: pathlib.Path) -> str:
    """A command of a page, applied to the smoke run, and writing into a new directory."""
    if "jaxrl_async sweep" in command:  # printed, checked and gathered; test_sweeps runs them
        command = re.sub(r"(sweeps/\w+\.py)", r"\1:smoke", command)
        command = re.sub(r"--run( --jobs=\d+)?", "--dry-run", command)
        command = re.sub(r"(--submit=\S+)", r"\1 --dry-run", command)
    if "launch/slurm.sbatch" in command:  # test_slurm submits it
        return re.sub(r"^sbatch (\S+)", r"bash \1 --dry-run", command)
    if "--resume" in command and "--config=" not in command:
        return f"{re.sub(r'--workdir=[^ ]+', f'--workdir={workdir}', command)} --dry-run"
    if " train" in command:
        command = f"{command} --dry-run"
        command = re.sub(r"--workdir=\S+", f"--workdir={out / 'new'}", command)
        return command.replace(" --resume", "")
    command = re.sub(r"--workdir=\S+", f"--workdir={workdir}", command)
    command = re.sub(r"--(out|dir)=\S+", rf"--\1={out / 'out'}", command)
    command = re.sub(r"--checkpoint=\S+", f"--checkpoint={workdir}/checkpoints/2", command)
    return re.sub(r"--steps=\S+", "--steps=0,last", command)


def one_of_each_kind() -> list:
    """The commands to run: the first of each program or verb, and with --long all."""
    kinds, found = set(), []
    for command in commands():
        if not is_elsewhere(command):
            words = [word for word in command.split() if re.fullmatch(r"[\w./]*[a-z][\w./]*", word)]
            kind = " ".join(words[1:4] if "jaxrl_async" in words else words[:2])
            found.append(pytest.param(command, marks=[pytest.mark.long] * (kind in kinds)))
            kinds.add(kind)
    return found


@OPTIMISED
@pytest.mark.parametrize("command", one_of_each_kind())
def test_a_command_of_a_page_runs(command, workdir, tmp_path):
    call(at_smoke_size(command, workdir, tmp_path))


@OPTIMISED
def test_a_run_by_hand_goes_as_its_commands_are_printed(tmp_path):
    text = (ROOT / "docs" / "pods.md").read_text("utf-8").partition("## By hand")[2]
    lines = re.search(r"^```\n(.*?)^```$", text, re.M | re.S)[1].splitlines()
    assert len(lines) == 4
    queue, server = free_port(), free_port()
    roles = {}
    try:
        for line in lines:
            role = re.search(r"--role=(\w+)", line)[1]
            for old, new in (
                ("127.0.0.1:7000", f"127.0.0.1:{queue}"),
                ("127.0.0.1:30000", f"127.0.0.1:{server}"),
                ("runs/hand", str(tmp_path / "run")),
            ):
                assert old in line
                line = line.replace(old, new)
            words = [sys.executable if word == "python" else word for word in shlex.split(line)]
            with open(tmp_path / f"{role}.log", "w") as log:
                roles[role] = subprocess.Popen(
                    words, cwd=ROOT, env=environment(), stdout=log, stderr=log
                )
        logs = lambda: "".join(path.read_text() for path in tmp_path.glob("*.log"))  # noqa: E731
        assert roles["learner"].wait(RUN_TIMEOUT_SECS) == 0, logs()
        assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
        others = [roles[role] for role in ("rollout", "server", "queue")]
        assert [role.poll() for role in others] == [None] * 3, logs()
        call(f"python -m jaxrl_async status --workdir={tmp_path}/run")
        for role in others:
            role.terminate()
            assert role.wait(30) == 1, logs()
    finally:
        for role in roles.values():
            role.kill()
            role.wait()


def test_everything_that_a_run_logs_is_in_the_reference(workdir):
    rows = read_metrics(workdir)
    names = {name for row in rows for name in row} - {"step", "unix_time"}
    known = {n for n in names if n in METRICS or f"{n.split('/')[0]}/" in METRICS}
    assert len(rows) == 2 and names == known
    always = {
        n
        for n in METRICS
        if not n.endswith("/") and not n.startswith(("experts/", "rollout/kept_"))
    }
    always -= {
        "weights/delay",
        "policy/kl_penalty",
        "policy/kl_coefficient",
        "learner/rate_scale",
        "policy/kl_teacher",
    }
    assert always - names <= {
        "policy/max_anchor_ratio",
        "rollout/device_wait_secs",
        "time/checkpoint_secs",
        "time/device_wait_secs",
        "time/publish_secs",
        "time/wait_push_secs",
    }

"""Access: no listener beyond loopback without a key, and no key in a log, an error or a command line."""

import concurrent.futures
import contextlib
import re
import subprocess
import sys
import time

import psutil
import pytest
from fixtures.runs import environment
from fixtures.security import (
    ADMIN_KEY,
    API_KEY,
    QUICKSTART,
    ROOT,
    RUN_TIMEOUT_SECS,
    TOKEN,
    queue_of,
)

from jaxrl_async import security
from jaxrl_async.cli import config as config_lib
from jaxrl_async.cli import main
from jaxrl_async.config.settings import SettingsError
from jaxrl_async.inference import http
from jaxrl_async.runtime import supervisor

# Who may listen where.


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *(("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("[::1]", True)),
        *(("localhost", True), ("LOCALHOST", True), ("", False), ("0.0.0.0", False)),
        *(("::", False), ("[::]", False), ("10.0.0.1", False), ("localhost.evil.org", False)),
        *(("127.0.0.1.evil.org", False), ("queue-0", False), ("::ffff:10.0.0.1", False)),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host, loopback):
    assert security.is_loopback(host) == loopback


async def test_a_queue_for_everyone_needs_a_token():
    message = r"the queue would listen on 0\.0\.0\.0:0, .* without a key: set queue\.token_env"
    with pytest.raises(ValueError, match=message):
        async with queue_of("0.0.0.0:0"):
            pass
    async with queue_of("0.0.0.0:0", token=TOKEN) as address:
        assert address.startswith("0.0.0.0:")


@pytest.mark.parametrize("keys", [{}, {"admin_api_key": ADMIN_KEY}])
async def test_a_server_for_everyone_needs_a_key(engine, keys):
    message = r"would listen on 0\.0\.0\.0:0, .* without a key: set the server's api_key"
    with pytest.raises(ValueError, match=message):
        async with http.serve(engine, host="0.0.0.0", port=0, **keys):
            pass
    async with http.serve(engine, host="0.0.0.0", port=0, api_key=API_KEY) as port:
        assert port


def parse(*overrides):
    argv = [f"--config={QUICKSTART}", *(f"--config.{text}" for text in overrides)]
    return config_lib.settings_of(config_lib.parse_flags("", argv, config=True).config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["queue.address=queue-0:7000"],
            r"queue\.address: .*listen on queue-0:7000, .*set queue\.token_env",
        ),
        (["queue.address=[::]:7000"], r"listen on \[::\]:7000"),
        (["queue.tls_cert=c.pem", "queue.tls_key=k.pem"], "queue.tls_ca go together, got 'c.pem'"),
        (["server.tls_cert=c.pem"], "server.tls_key go together, got 'c.pem' and ''"),
        (
            ["server.tls_cert=c", "server.tls_key=k", "server.addresses=('http://a:1',)"],
            "must be https:// with server.tls_cert, got http://a:1",
        ),
        (
            ["queue.address=queue-0:7000", "queue.token_env=ANY"],
            r"queue\.address = queue-0:7000 .*without TLS: .*security\.insecure = True",
        ),
        (
            ["server.addresses=('http://127.0.0.1:1','http://a:1')"],
            r"^server\.addresses = http://a:1 would be reached .*without TLS",
        ),
        (["server.command=serve --api-key=abc"], "server.command gives --api-key: keys stay in"),
        (["server.command=serve --admin-api-key abc"], "gives --admin-api-key: keys stay in"),
    ],
)
def test_settings_that_would_be_open_are_refused(overrides, message):
    with pytest.raises(SettingsError, match=message):
        parse(*overrides)


def test_loopback_needs_no_token():
    for address in ("", "127.0.0.1:7000", "localhost:7000", "[::1]:7000"):
        parse(f"queue.address={address}")
    parse("queue.address=queue-0:7000", "queue.token_env=ANY", "security.insecure=True")
    tls = ("queue.tls_cert=c", "queue.tls_key=k", "queue.tls_ca=a")
    parse("queue.address=queue-0:7000", "queue.token_env=ANY", *tls)
    parse("server.addresses=('https://a:1',)")


def test_what_crosses_the_network_without_tls_is_said_in_the_banner():
    settings = parse(
        "queue.address=queue-0:7000",
        "queue.token_env=ANY",
        "server.addresses=('http://a:1','https://b:1')",
        "security.insecure=True",
    )
    shown = supervisor.banner(settings, "run", "queue-0:7000", settings.server.addresses, {})
    line = (
        "INSECURE security.insecure: without TLS to queue.address = queue-0:7000, server.addresses"
    )
    assert f"{line} = http://a:1\n" in shown + "\n"
    assert "INSECURE" not in supervisor.banner(parse(), "run", "127.0.0.1:1", (), {})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["server.addresses=('http://0.0.0.0:1',)", "security.insecure=True"],
            r"0\.0\.0\.0:1, .*set server\.api_key_env",
        ),
        (["server.addresses=('https://127.0.0.1:1',)"], "speaks https with a certificate"),
        (
            [
                "server.addresses=('https://127.0.0.1:1',)",
                "server.tls_cert=no",
                "server.tls_key=no",
            ],
            "no certificate and key in tls_cert no, tls_key no: No such file",
        ),
    ],
)
def test_a_server_role_that_would_be_open_is_refused_before_it_starts(
    overrides, message, tmp_path, capsys
):
    argv = [f"--config={QUICKSTART}", *(f"--config.{text}" for text in overrides)]
    code = main.main(["train", *argv, "--role=server", f"--workdir={tmp_path}/run"])
    assert code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_served_checkpoint_for_everyone_needs_a_key(capsys):
    assert main.main(["serve", "--workdir=nowhere", "--host=0.0.0.0"]) == 2
    assert "listen on 0.0.0.0:30000, which is not loopback" in capsys.readouterr().err


def test_a_served_checkpoint_for_everyone_needs_tls_or_says_that_it_has_none(monkeypatch, capsys):
    monkeypatch.setenv("A_KEY", "abc")
    words = ["serve", "--workdir=nowhere", "--host=0.0.0.0", "--api_key_env=A_KEY"]
    assert main.main(words) == 2
    assert "without TLS: set --tls_cert" in capsys.readouterr().err


# Keys.


def test_a_key_comes_from_the_environment_or_from_a_file(monkeypatch, tmp_path):
    monkeypatch.setenv("A_KEY", "abc")
    assert security.read_key("option", "A_KEY") == "abc"
    (tmp_path / "key").write_text("from-a-file\n")
    monkeypatch.setenv("A_KEY", f"@{tmp_path}/key")
    assert security.read_key("option", "A_KEY") == "from-a-file"
    assert security.read_key("option", f"@{tmp_path}/key") == "from-a-file"
    assert security.read_key("option", "") is None


@pytest.mark.parametrize(
    "key", ["abc def", "abc\ndef", "clé", "x" * 1025, "abc\0", "abc\r\nX-Other: header"]
)
def test_a_key_that_no_header_carries_is_refused_and_not_shown(key, monkeypatch, tmp_path):
    (tmp_path / "key").write_text(key)
    monkeypatch.setenv("A_KEY", f"@{tmp_path}/key")
    with pytest.raises(ValueError, match="server.x_env names A_KEY, whose file .* 1 to 1024") as e:
        security.read_key("server.x_env", "A_KEY")
    assert key[:3] not in str(e.value).replace(str(tmp_path), "")


@pytest.mark.parametrize(("value", "message"), [("", "unset or empty"), ("@/no/file", "No such")])
def test_a_key_that_is_not_there_is_named(value, message, monkeypatch):
    monkeypatch.setenv("A_KEY", value)
    with pytest.raises(ValueError, match=f"queue.token_env names A_KEY, .*{message}"):
        security.read_key("queue.token_env", "A_KEY")


@pytest.mark.parametrize("role", ["all", "queue", "learner", "rollout"])
def test_a_role_without_the_queues_token_does_not_start(role, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("NO_TOKEN", raising=False)
    argv = [f"--config={QUICKSTART}", "--config.queue.token_env=NO_TOKEN", f"--role={role}"]
    assert main.main(["train", *argv, f"--workdir={tmp_path}/run"]) == 2
    assert "queue.token_env names NO_TOKEN, which is unset" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "given", ["", "t", "Bearer", "Bearer x", "Basic t", "Bearer  t", "Bearer té", "Bearer \udcff"]
)
def test_a_header_without_the_key_is_refused(given):
    assert not security.is_bearer(given, "t")
    assert security.is_bearer("bearer t", "t")


# A run.


def test_a_run_with_every_key_and_tls_keeps_them_secret(certificates, tmp_path):
    (tmp_path / "token").write_text(TOKEN + "\n")
    variables = environment() | {
        "SEC_TOKEN": f"@{tmp_path}/token",
        "SEC_KEY": API_KEY,
        "SEC_ADMIN_KEY": ADMIN_KEY,
    }
    pem, key = certificates / "queue.pem", certificates / "queue.key"
    names = {"queue.token_env": "SEC_TOKEN", "server.api_key_env": "SEC_KEY"}
    names |= {"server.admin_api_key_env": "SEC_ADMIN_KEY"}
    for block in ("queue", "server"):
        names |= {f"{block}.tls_cert": pem, f"{block}.tls_key": key, f"{block}.tls_ca": pem}
    workdir = tmp_path / "run"
    verb = [sys.executable, "-m", "jaxrl_async"]
    command = [*verb, "train", f"--config={QUICKSTART}:smoke", f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in names.items()]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with concurrent.futures.ThreadPoolExecutor() as pool:
        printed = pool.submit(process.communicate, timeout=RUN_TIMEOUT_SECS)
        lines = set()  # As `ps` shows them.
        while not printed.done():
            lines |= command_lines(process.pid)
            time.sleep(0.3)
    output, _ = printed.result()
    assert process.returncode == 0, output
    assert "https://127.0.0.1:" in output
    assert {"queue", "server", "rollout", "learner"} <= set(
        re.findall(r"--role=(\w+)", " ".join(lines))
    )
    subprocess.run(
        [*verb, "report", f"--workdir={workdir}"], cwd=ROOT, check=True, capture_output=True
    )
    files = [path for path in workdir.glob("**/*") if path.is_file()]
    names = {path.name for path in files}
    wanted = {"config.json", "metrics.jsonl", "report.html", "queue.log", "server-0.log"}
    assert wanted | {"learner.log", "rollout-0.log", "journal.sqlite"} <= names
    for secret in (TOKEN, API_KEY, ADMIN_KEY):
        assert secret not in output
        assert not [line for line in lines if secret in line]
        assert not [path for path in files if secret.encode() in path.read_bytes()]


def command_lines(pid):
    lines = set()
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                lines.add(" ".join(process.cmdline()))
    return lines

"""The keys of a run's own: made once for its owner, found by the processes of its workdir, never beside a user's."""

import dataclasses
import os
import stat

import pytest

from jaxrl_async import parts
from jaxrl_async.cli.config import load_config, settings_of
from jaxrl_async.config.checks import queue_access_of
from jaxrl_async.config.fields import StartError
from jaxrl_async.runtime import keys, supervisor

FAR = {"queue.address": "queue-0:7000", "queue.token_env": "MINE", "security.insecure": True}


def settings(**changes):
    config = load_config("configs/quickstart.py:smoke")
    with config.unlocked():
        for key, value in changes.items():
            block, _, name = key.partition(".")
            config[block][name] = value
    return settings_of(config)


def values_of(settings):
    return [queue_access_of(settings)["token"], *parts.keys_of(settings).values()]


def test_the_keys_are_three_files_of_their_owner_and_a_resume_has_the_same(tmp_path):
    before = os.umask(0)
    try:
        made = keys.made(settings(), tmp_path, servers=True)
    finally:
        os.umask(before)
    files = sorted((tmp_path / "keys").iterdir())
    assert [path.name for path in files] == ["admin", "api", "queue"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600] * 3
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert len(set(values_of(made))) == 3 and min(map(len, values_of(made))) >= 32
    again = keys.made(settings(), tmp_path, servers=True)
    assert values_of(again) == values_of(made) == values_of(keys.found(settings(), tmp_path))


@pytest.mark.parametrize("damage", ["read by others", "empty", "binary", "a link"])
def test_a_key_that_others_know_or_that_is_none_is_made_anew(damage, tmp_path):
    (old, _, _) = values_of(keys.made(settings(), tmp_path, servers=True))
    path = tmp_path / "keys" / "queue"
    if damage == "read by others":
        path.chmod(0o640)
    elif damage == "a link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    else:
        path.write_bytes(b"\xff\xfe" if damage == "binary" else b"")
    (new, _, _) = values_of(keys.made(settings(), tmp_path, servers=True))
    assert new and new != old
    assert not path.is_symlink() and stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("changes", "servers", "files"),
    [
        ({}, False, ["queue"]),
        ({"queue.token_env": "MINE"}, True, ["admin", "api"]),
        ({"server.api_key_env": "MINE"}, True, ["queue"]),
        ({"server.admin_api_key_env": "MINE"}, True, ["queue"]),
        ({"server.command": "serve {model_path} {host} {port}"}, True, ["queue"]),
        ({"rollout.reward_addresses": ("127.0.0.1:7100",)}, False, ["queue"]),
        (FAR, False, []),
        ({"rollout.reward_addresses": ("rewards-0:7100",), "security.insecure": True}, False, []),
    ],
)
def test_what_its_user_has_set_or_is_beyond_this_machine_gets_no_key(
    changes, servers, files, tmp_path
):
    given = settings(**changes)
    made = keys.made(given, tmp_path, servers=servers)
    assert sorted(path.name for path in tmp_path.glob("keys/*")) == files
    for block, name in (("queue", "token_env"), ("server", "api_key_env")):
        if before := getattr(getattr(given, block), name):
            assert getattr(getattr(made, block), name) == before


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"server.addresses": ("http://127.0.0.1:1",)}, (True, True)),
        ({"server.addresses": ("http://a:1",), "security.insecure": True}, (True, False)),
        ({"server.discover": "file:/servers", "security.insecure": True}, (True, False)),
        (FAR, (False, True)),
    ],
)
def test_a_process_that_joins_sends_the_keys_to_this_machine_alone(changes, found, tmp_path):
    keys.made(settings(), tmp_path, servers=True)
    joins = keys.found(settings(**changes), tmp_path)
    named = [joins.queue.token_env, joins.server.api_key_env, joins.server.admin_api_key_env]
    assert [name.startswith("@") for name in named] == [found[0], found[1], found[1]]
    assert keys.found(settings(), tmp_path / "other") == settings()


def test_a_workdir_that_takes_no_keys_is_named(tmp_path):
    (tmp_path / "keys").write_text("")
    with pytest.raises(StartError, match="cannot be written"):
        keys.made(settings(), tmp_path, servers=True)


@pytest.mark.parametrize(
    ("changes", "files"),
    [
        ({}, ["admin", "api", "queue"]),
        ({"supervisor.processes": "one"}, ["queue"]),
        ({"server.addresses": ("http://127.0.0.1:1",)}, ["queue"]),
    ],
)
def test_every_role_is_given_the_files_and_no_key(changes, files, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(
        supervisor, "_start", lambda name, workdir, flags, _: commands.append(flags)
    )
    monkeypatch.setattr(supervisor, "_watch", lambda *_: True)
    monkeypatch.setattr(supervisor, "stop", lambda _: None)
    supervisor.run(settings(**changes), workdir=tmp_path, resume=False)
    flags = {
        f"--config.{key}=@{tmp_path}/keys/{name}" for name, key in KEYS.items() if name in files
    }
    assert commands and sorted(path.name for path in tmp_path.glob("keys/*")) == files
    for words in commands:
        assert {word for word in words if "_env=" in word} == flags
        assert not any(
            path.read_text().strip() in " ".join(words) for path in tmp_path.glob("keys/*")
        )


KEYS = {
    "queue": "queue.token_env",
    "api": "server.api_key_env",
    "admin": "server.admin_api_key_env",
}


def test_the_settings_of_a_run_name_files_and_hold_no_key(tmp_path):
    made = keys.made(settings(), tmp_path, servers=True)
    text = str(dataclasses.asdict(made))
    assert f"@{tmp_path}/keys/queue" in text
    assert not any(value in text for value in values_of(made))


def test_the_keys_of_a_pod_are_three_files_of_their_owner(tmp_path):
    keys.make(tmp_path / "run")
    files = sorted((tmp_path / "run" / "keys").iterdir())
    texts = [file.read_text() for file in files]
    keys.make(tmp_path / "run")  # Those that are there stay.
    assert [file.name for file in files] == ["admin", "api", "queue"]
    assert [file.read_text() for file in files] == texts and len(set(texts)) == 3
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert files[0].parent.stat().st_mode & 0o777 == 0o700
    named = keys.named(settings(**{"queue.token_env": "MINE"}), "run/keys")
    assert named == [
        "--config.server.api_key_env=@run/keys/api",
        "--config.server.admin_api_key_env=@run/keys/admin",
    ]

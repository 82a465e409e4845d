"""Lists of servers that join and leave: additions, removals, and lists that are damaged or being written."""

import asyncio
import socket

import pytest

from jaxrl_async.config.settings import Server, Settings, SettingsError
from jaxrl_async.preflight import machine
from jaxrl_async.publishing.discovery import Discovery, DiscoveryError, parse

A, B = "http://a:1", "http://b:2"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "servers.txt"


async def read(discovery, times=1):
    for _ in range(times):
        servers = await discovery.read()
    return servers


async def test_a_new_address_counts_at_once_and_a_missing_one_at_the_second_reading(path):
    path.write_text(f"# of team a\n{A}\n\n{B} 0.5  # slow\n")
    discovery = Discovery(f"file:{path}")
    assert await discovery.read() == {A: 1.0, B: 0.5}
    path.write_text(f"{B} 2\nhttp://[::1]:3\n")
    assert await discovery.read() == {A: 1.0, B: 2.0, "http://[::1]:3": 1.0}
    assert await discovery.read() == {B: 2.0, "http://[::1]:3": 1.0}
    path.write_text("")
    assert len(await discovery.read()) == 2
    assert await discovery.read() == {}


async def test_a_list_that_is_written_again_between_two_readings_loses_no_server(path):
    path.write_text(f"{A}\n{B}\n")
    discovery = Discovery(f"file:{path}")
    await discovery.read()
    for text in ("", f"{A}\n{B}\n", f"{A}\n", f"{A}\n{B}\n"):
        path.write_text(text)
        assert await discovery.read() == {A: 1.0, B: 1.0}


async def test_a_last_line_without_an_end_counts_when_it_stays(path):
    path.write_text(f"{A}\nhttp://b:30")
    discovery = Discovery(f"file:{path}")
    assert await discovery.read() == {}
    path.write_text(f"{A}\nhttp://b:3000")
    assert await discovery.read() == {}
    assert await discovery.read() == {A: 1.0, "http://b:3000": 1.0}


@pytest.mark.parametrize("damage", ["gone", "damaged", "binary"])
async def test_a_list_that_cannot_be_read_leaves_the_servers_as_they_are(path, damage, caplog):
    path.write_text(f"{A}\n")
    discovery = Discovery(f"file:{path}")
    await discovery.read()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"\xff\xfe\n" if damage == "binary" else b"htp://b:2\n")
    assert await read(discovery, times=3) == {A: 1.0}
    assert caplog.text.count("stay as they are") == 1 and str(path) in caplog.text
    path.write_text(f"{A}\n{B}\n")
    assert await discovery.read() == {A: 1.0, B: 1.0}


async def test_a_list_that_is_not_there_yet_is_waited_for(path):
    discovery = Discovery(f"file:{path}")
    assert await discovery.read() == {}
    path.write_text(f"{A}\n")
    assert await discovery.read() == {A: 1.0}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{A}\nb:2\n", r"line 2: 'b:2' is no http://host:port"),
        ("http://b:0\n", r"line 1: 'http://b:0' is no"),
        ("http://b:65536\n", r"line 1: 'http://b:65536' is no"),
        ("http://b:2/v1\n", r"line 1: 'http://b:2/v1' is no"),
        ("http://user@b:2\n", r"line 1: 'http://user@b:2' is no"),
        (f"{A}\n#\n{A}\n", r"line 3: http://a:1 is listed twice"),
        (f"{A} fast\n", r"line 1: a speed .*> 0, got 'fast'"),
        (f"{A} 0\n", r"line 1: a speed .*> 0, got '0'"),
        (f"{A} nan\n", r"line 1: a speed .*> 0, got 'nan'"),
        (f"{A} 1 2\n", r"line 1: .* more than an address and a speed"),
    ],
)
async def test_a_bad_line_is_named_with_its_value(path, text, said):
    with pytest.raises(DiscoveryError, match=said):
        parse(text, str(path))
    path.write_text(text)
    with pytest.raises(DiscoveryError, match=said):
        await Discovery(f"file:{path}").read()


def test_a_bad_line_is_found_before_any_role_starts(path, tmp_path):
    path.write_text(f"{A}\nb:2\n")
    settings = Settings(server=Server(discover=f"file:{path}"))
    with pytest.raises(machine.StartError, match=r"server\.discover: .*line 2: 'b:2'"):
        machine.prepare(settings, tmp_path)


@pytest.mark.parametrize(
    "place",
    [
        *("", "a:1", "file:", "dns://a", "dns://a:0", "dns://a:70000", "dns://:1"),
        *("dns://a..b:1", "dns://.:1", f"dns://{'x' * 64}.pool:1"),  # No host can have these names.
    ],
)
def test_a_place_that_is_neither_a_file_nor_a_name_is_refused(place):
    with pytest.raises(SettingsError, match=r"file:PATH.*dns://name:port"):
        Discovery(place)


async def test_a_name_gives_a_server_at_every_address(monkeypatch):
    answers = [["10.0.0.2", "10.0.0.1"], socket.gaierror("no answer"), ["10.0.0.3"], ["10.0.0.3"]]

    async def getaddrinfo(name, port, *, family, type):
        assert (name, port, family) == ("servers.pool", 30000, socket.AF_INET)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return [(family, type, 6, "", (ip, port)) for ip in answer]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    discovery = Discovery("dns://servers.pool:30000", scheme="https")
    first = {f"https://10.0.0.{n}:30000": 1.0 for n in (1, 2)}
    assert await discovery.read() == first
    assert await discovery.read() == first  # A name that does not resolve changes nothing.
    assert await discovery.read() == first | {"https://10.0.0.3:30000": 1.0}
    assert await discovery.read() == {"https://10.0.0.3:30000": 1.0}


@pytest.mark.parametrize("address", ["http://10.0.0.1:30000", "http://gpu-7:30000"])
async def test_a_list_with_a_server_without_tls_is_refused(address, path, tmp_path, caplog):
    path.write_text(f"http://127.0.0.1:1\nhttps://b:2\n{address}\n")
    refusal = rf"{address} would be reached over the network without TLS: .*security\.insecure"
    with pytest.raises(DiscoveryError, match=refusal):
        await Discovery(f"file:{path}", insecure=False).read()
    assert len(await Discovery(f"file:{path}", insecure=True).read()) == 3
    settings = Settings(server=Server(discover=f"file:{path}"))
    with pytest.raises(machine.StartError, match=refusal):
        machine.prepare(settings, tmp_path)


async def test_a_server_without_tls_that_joins_later_is_left_out_and_said(path, caplog):
    path.write_text("https://b:2\n")
    discovery = Discovery(f"file:{path}", insecure=False)
    assert await discovery.read() == {B.replace("http", "https"): 1.0}
    path.write_text("https://b:2\nhttp://gpu-7:3\n")
    assert await discovery.read() == {"https://b:2": 1.0}
    assert "http://gpu-7:3 would be reached over the network without TLS" in caplog.text

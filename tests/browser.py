"""A headless Chromium, driven over its DevTools protocol."""

import base64
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

import aiohttp
import pytest

START_SECS = 120.0
CALL_SECS = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def require() -> str:
    """The browser's path; skips the test, saying why, where there is none."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip(f"no browser here: none of {', '.join(_NAMES)} (Debian's package is chromium)")


class Page:
    """One page of a running browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket, self._calls = socket, 0

    async def call(self, method: str, **params):
        """The protocol's answer."""
        self._calls += 1
        await self._socket.send_json({"id": self._calls, "method": method, "params": params})
        while (answer := await self._socket.receive_json(timeout=CALL_SECS)).get(
            "id"
        ) != self._calls:
            pass  # an event
        assert "error" not in answer, answer
        return answer["result"]

    async def evaluate(self, script: str):
        """The value of an expression in the page, None where it has none."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def open(self, path: pathlib.Path, *, width: int, dark: bool) -> None:
        """Loads a file in a window of a width, with a dark or a light color scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + CALL_SECS
        loaded = "document.readyState == 'complete' && location.protocol == 'file:'"
        while not await self.evaluate(loaded):
            assert time.monotonic() < deadline, f"{path} was not loaded in {CALL_SECS:g} s"
            time.sleep(0.05)

    async def screenshot(self, file: pathlib.Path) -> None:
        """The whole page as a PNG."""
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(answer["data"]))


@contextlib.asynccontextmanager
async def browsing():
    """Starts a browser; yields its page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [require(), "--headless=new", "--no-sandbox", "--disable-gpu"]
        command += ["--disable-dev-shm-usage", "--disable-quic", "--no-first-run"]
        command += ["--disable-background-networking", "--disable-component-update"]
        command += ["--disable-sync", "--remote-debugging-port=0"]
        command += [f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = _port(process, pathlib.Path(profile))
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [p for p in await answer.json() if p["type"] == "page"]
                address = pages[0]["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    yield Page(socket)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _port(process: subprocess.Popen, profile: pathlib.Path) -> int:
    """The port that the browser listens on, from the file that it writes."""
    file, deadline = profile / "DevToolsActivePort", time.monotonic() + START_SECS
    while not (file.exists() and (lines := file.read_text().splitlines())):
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        assert time.monotonic() < deadline, f"the browser was not up after {START_SECS:g} s"
        time.sleep(0.05)
    return int(lines[0])

"""Headless Chromium, driven over its debugging pipe: no package and no port is needed."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import LAST_RESORT

Json = dict[str, Any]


class Browser:
    """One page. complaints: errors of its console, exceptions, and requests to hosts other than 127.0.0.1."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._ids = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Json:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        for reply in self._messages():
            if reply.get("id") == number:
                assert "error" not in reply, reply
                return reply["result"]
        raise AssertionError("unreachable")

    def _messages(self) -> Iterator[Json]:
        while True:
            while b"\0" in self._rest:
                line, _, self._rest = self._rest.partition(b"\0")
                message = json.loads(line)
                self._note(message)
                yield message
            assert select.select([self._read], [], [], LAST_RESORT)[0], "the browser does not answer"
            self._rest += os.read(self._read, 65536)

    def _note(self, message: Json) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("http://127.0.0.1:", "data:", "blob:http://127.0.0.1:")):
                    self.complaints.append(f"a request to {url}")
            case _:
                pass

    def open(self, url: str, *, width: int = 1200, height: int = 800, dark: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && !!document.querySelector('#ask')")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + LAST_RESORT
        while not self.run(condition):
            assert time.monotonic() < end, f"{condition}: {self.run('document.body.innerText')} {self.complaints}"
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Type into the focused field, and press Enter for a line's end."""
        for line in text.splitlines(keepends=True):
            self.send("Input.insertText", text=line.rstrip("\n"))
            if line.endswith("\n"):
                enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
                self.send("Input.dispatchKeyEvent", type="keyDown", **enter)
                self.send("Input.dispatchKeyEvent", type="keyUp", **enter)

    def press(self, text: str, within: str = "document") -> None:
        """Click the button with this text; `within` is an expression."""
        self.run(f"[...{within}.querySelectorAll('button')].find((each) => each.textContent === '{text}').click()")

    def choose_file(self, selector: str, path: Path) -> None:
        root = self.send("DOM.getDocument")["root"]["nodeId"]
        node = self.send("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


LAST = "[...document.querySelectorAll('.message')].at(-1)"
ENDED = "document.getElementById('stop').hidden && document.querySelectorAll('.assistant').length"


def ask(browser: Browser, question: str) -> None:
    """Type a question into the page and send it. ENDED is the number of answers once none is coming."""
    browser.run("document.getElementById('question').focus()")
    browser.type(f"{question}\n")


def open_page(browser: Browser, url: str) -> None:
    """Open the page of a server that needs no key, and wait until it knows the model."""
    browser.open(f"{url}/")
    browser.wait("document.getElementById('models').value === 'demo'")


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile. Skips the test where none is installed."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium (Debian's package chromium)")
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # The browser reads file descriptor 3 and writes 4.
    shell = f'exec "$@" 3<&{to_read} 4>&{from_write}'
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
    quiet = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", program, *flags, *quiet, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_read, from_write),
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Browser(to_write, from_read)
    finally:
        process.kill()
        process.wait()
        os.close(to_write)
        os.close(from_read)

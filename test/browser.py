"""Headless Chromium, told what to do over a pair of pipes; it needs no package.

`Browser` opens pages of a size, runs expressions in them and remembers their requests and errors.
The messages are those of the DevTools protocol: JSON, each ended by a zero byte.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
# Chromium reads commands from file descriptor 3 and writes to 4.
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4)\n"
    "os.execv(sys.argv[3], sys.argv[3:])"
)


class Browser:
    """One browser with one tab; a context manager.

    Attributes:
        requests: the addresses that pages asked for, since `forget`.
        errors: errors that pages wrote to the console or raised, since `forget`.
    """

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._events: list[dict[str, Any]] = []
        self._buffer, self._last_id, self._session = b"", 0, ""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        # Above 10, so that neither is replaced by the other.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (commands, answers)]
        program = [CHROMIUM, *_OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, ends), *program],
            pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (commands, answers, *ends):
            os.close(fd)

    def __enter__(self) -> Browser:
        tab = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def open(self, address: str) -> None:
        """Load a page, and wait until its images and scripts are there."""
        self._events.clear()
        answer = self.send("Page.navigate", url=address)
        assert "errorText" not in answer, f"{address}: {answer['errorText']}"
        self.wait_for("Page.loadEventFired")

    def resize(self, width: int, height: int = 800) -> None:
        """Give pages a window of this size, in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip

    def prefer(self, **features: str) -> None:
        """Set media features by name, as ``color_scheme="dark"``."""
        values = [
            {"name": f"prefers-{name.replace('_', '-')}", "value": value}
            for name, value in features.items()
        ]
        self.send("Emulation.setEmulatedMedia", features=values)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, JSON or a promise of it."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def forget(self) -> None:
        """Empty the lists of requests and errors."""
        self.requests.clear()
        self.errors.clear()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def wait_for(self, event: str) -> None:
        """Wait for an event that may have come already since the last `open`."""
        while all(message["method"] != event for message in self._events):
            self._message()

    def _message(self, seconds: float = 60.0) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], seconds)
            assert ready, f"Chromium has said nothing for {seconds} s; {self._process.poll()=}"
            read = os.read(self._read, 1 << 20)
            assert read, "Chromium has ended"
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message["params"])
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", details).get("description", str(details)))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))

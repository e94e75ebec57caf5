"""Chromium without a window, driven over the DevTools protocol: real keys, paper, screenshots.

Its pipe (``--remote-debugging-pipe``, messages end with a zero byte) needs no package.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-extensions", "--disable-breakpad", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
# Of the keys that have a text, that text; of the others "".
KEYS = {"Enter": (13, "\r"), " ": (32, " "), "Tab": (9, ""), "Escape": (27, "")}
KEYS |= {"End": (35, ""), "Home": (36, ""), "ArrowLeft": (37, ""), "ArrowUp": (38, "")}
KEYS |= {"ArrowRight": (39, ""), "ArrowDown": (40, "")}


class Browser:
    """One tab. Open it with ``with``; it skips the test where Chromium is not installed."""

    def __init__(self, folder, timeout=120):
        if CHROMIUM is None:
            pytest.skip("Chromium is not installed")
        self.folder, self.deadline = folder, time.monotonic() + timeout
        self.count, self.buffer, self.session, self.console = 0, b"", None, []

    def __enter__(self):
        there, self.write = os.pipe()
        self.read, back = os.pipe()
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={self.folder / 'profile'}"]
        command += ["--remote-debugging-pipe", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{there} 4>&{back}', "bash", *command],
            pass_fds=(there, back), stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(self.folder)},
        )  # fmt: skip
        os.close(there)
        os.close(back)
        (page,) = [t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")
        return self

    def __exit__(self, *error):
        os.close(self.write)  # ends Chromium
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.read)

    def __call__(self, method, **params):
        """Send one command and return its result."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self):
        while b"\0" not in self.buffer:
            left = self.deadline - time.monotonic()
            assert left > 0 and select.select([self.read], [], [], left)[0], "Chromium hangs"
            piece = os.read(self.read, 1 << 20)
            assert piece, "Chromium ended"
            self.buffer += piece
        one, self.buffer = self.buffer.split(b"\0", 1)
        answer = json.loads(one)
        params = answer.get("params", {})
        if answer.get("method") == "Log.entryAdded":
            self.console.append(params["entry"]["text"])
        elif answer.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.console.append(json.dumps(params)[:500])
        return answer

    def open(self, url, width=1280, height=900, dark=False, scale=1):
        """Load a page in a window of this size."""
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", media="", features=[scheme])
        self("Page.navigate", url="about:blank")  # a change of the fragment alone loads nothing
        self("Page.navigate", url=url)
        while self.evaluate("document.readyState + location.protocol") != "completefile:":
            time.sleep(0.02)

    def evaluate(self, expression):
        """The value of an expression in the page."""
        found = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key, count=1, shift=False):
        """A key of the keyboard, as the operating system would send it."""
        code, text = KEYS.get(key, (0, key))
        event = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        for _ in range(count):
            kind = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
            self("Input.dispatchKeyEvent", **event, **kind)
            self("Input.dispatchKeyEvent", **event, type="keyUp")

    def move_mouse(self, x, y):
        """Move the pointer."""
        self("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def tap(self, x, y):
        """A tap with a finger."""
        self("Emulation.setTouchEmulationEnabled", enabled=True)
        self("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self("Emulation.setTouchEmulationEnabled", enabled=False)

    def screenshot(self, path, full=False):
        """A PNG of the window, or of the whole page."""
        found = self("Page.captureScreenshot", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self, path):
        """The page as it prints on A4."""
        size = {"paperWidth": 8.27, "paperHeight": 11.69, "preferCSSPageSize": True}
        found = self("Page.printToPDF", printBackground=True, **size)
        path.write_bytes(base64.b64decode(found["data"]))

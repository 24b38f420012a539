"""A headless browser that tests drive through two pipes, by the protocol of its developer tools."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.test_browser import BROWSERS

_WAIT = 60.0  # seconds for an answer of the browser


class Browser:
    """One page of a browser.

    Args:
        profile: a folder for the files of the browser.
    """

    def __init__(self, profile: Path) -> None:
        path = next((path for name in BROWSERS if (path := shutil.which(name))), None)
        if path is None:
            pytest.skip(f"no browser is installed (looked for {', '.join(BROWSERS)})")
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        command = [
            path, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        # The browser reads commands from descriptor 3 and answers at descriptor 4.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "bash", *command],
            pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return the result of a command."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression, or of its promise, in the page."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true in the page."""
        end = time.monotonic() + _WAIT
        while not self.evaluate(script):
            assert time.monotonic() < end, f"in vain: {script}"
            time.sleep(0.1)

    def show(self, url: str, width: int, height: int, scheme: str) -> None:
        """Open an address on a screen of some size and colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=url)

    def shoot(self, path: Path) -> None:
        """Write a picture of the page."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait(_WAIT)
        os.close(self._to)
        os.close(self._from)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], _WAIT)
            assert ready, "the browser does not answer"
            chunk = os.read(self._from, 1 << 20)
            assert chunk, "the browser has ended"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

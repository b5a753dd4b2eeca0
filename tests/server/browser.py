"""A headless Chromium driven through its debugging pipe: no driver program, no library, no port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["Browser", "chromium"]


def chromium() -> str | None:
    """The program's path, or None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    """One tab. Messages are JSON, each ended by a NUL byte; the browser reads file descriptor 3 and writes file descriptor 4."""

    def __init__(self, program: str, timeout_s: float = 60) -> None:
        self._timeout_s = timeout_s
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        reads, self._to = _pipe()
        self._from, writes = _pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--remote-debugging-pipe"]
        flags += [f"--user-data-dir={self._profile.name}", "about:blank"]
        command = ["bash", "-c", f'exec "$@" 3<&{reads} 4>&{writes}', "bash", program, *flags]
        self._process = subprocess.Popen(command, pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(reads)
        os.close(writes)
        os.set_blocking(self._from, False)
        self._received = b""
        self._number = 0
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def call(self, method: str, **params: Any) -> Any:
        """The result of one command. Raises AssertionError with the browser's own words when it fails."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._timeout_s
        while True:
            one, nul, rest = self._received.partition(b"\0")
            if nul:
                self._received = rest
                answer = json.loads(one)
                if answer.get("id") == self._number:
                    assert "error" not in answer, (method, answer["error"])
                    return answer["result"]
                continue
            assert time.monotonic() < deadline, f"the browser did not answer {method} within {self._timeout_s:g} s"
            assert self._process.poll() is None, f"the browser ended with {self._process.returncode}"
            try:
                self._received += os.read(self._from, 1 << 20)
            except BlockingIOError:
                time.sleep(0.01)

    def open(self, url: str, width: int, height: int, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone)
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is, as JSON has it."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self.value(expression):
            assert time.monotonic() < deadline, f"{expression} did not come true; the page says: {self.value('document.body.innerText')}"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()


def _pipe() -> list[int]:
    """Both ends, clear of the descriptors that the browser's own are moved to."""
    ends = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
        os.close(end)
    return ends

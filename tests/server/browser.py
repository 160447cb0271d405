"""Drives a Chromium without a window through its debugging pipe: real clicks and keys, and pictures."""

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

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --remote-debugging-pipe"
).split()
_TIMEOUT_S = 30.0
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


class Browser:
    """One tab."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes, self._rest = reads, writes, b""
        self._numbers = itertools.count(1)
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def resize(self, width: int, height: int, scheme: str) -> None:
        """Sets the size of the window and the scheme of colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self._call("Emulation.setDeviceMetricsOverride", mobile=width < 500, **size)
        wanted = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=wanted)

    def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript; awaited if it is a promise."""
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def work_s(self, expression: str) -> float:
        """The processor time that the page's thread takes for an expression, in seconds: the least of three times."""
        self._call("Performance.enable", timeDomain="threadTicks")
        spent = []
        for _ in range(3):
            before = self._thread_s()
            self.value(expression)
            spent.append(self._thread_s() - before)
        return min(spent)

    def _thread_s(self) -> float:
        rows = self._call("Performance.getMetrics")["metrics"]
        return float(next(row["value"] for row in rows if row["name"] == "ThreadTime"))

    def until(self, expression: str) -> None:
        """Waits until an expression is true."""
        end_s = time.monotonic() + _TIMEOUT_S
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end_s, f"it does not come about: {expression}"
            time.sleep(0.01)

    def click(self, selector: str) -> None:
        """Clicks into the middle of an element, which nothing may cover."""
        x, y = self.value(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2] })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            code = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
            text = {"text": "\r"} if (key, kind) == ("Enter", "keyDown") else {}
            self._call("Input.dispatchKeyEvent", type=kind, **code, **text)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == number:
                assert "error" not in said, said["error"]
                found: dict[str, Any] = said["result"]
                return found
            self.events.append(said)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._reads], [], [], _TIMEOUT_S)[0], "Chromium says nothing"
            data = os.read(self._reads, 1 << 16)
            assert data, "Chromium has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile while the context lasts."""
    assert PROGRAM is not None
    to_it, from_it = os.pipe(), os.pipe()
    # Chromium reads from descriptor 3 and writes to 4.
    script = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
    inherited = (to_it[0], from_it[1])
    process = subprocess.Popen(
        ["bash", "-c", script, "_", *map(str, inherited), PROGRAM, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=inherited,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    for descriptor in inherited:
        os.close(descriptor)
    try:
        yield Browser(from_it[0], to_it[1])
    finally:
        process.terminate()
        process.wait(20)
        for descriptor in (to_it[1], from_it[0]):
            os.close(descriptor)

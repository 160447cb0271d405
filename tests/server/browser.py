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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync --remote-debugging-pipe"
).split()
_TIMEOUT_S = 60.0
_KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32, "Backspace": 8}


class _Pipe:
    """What Chromium says and is told, each message with a zero behind it."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes, self._rest = reads, writes, b""
        self.numbers = itertools.count(1)
        self.events: dict[str, list[dict[str, Any]]] = {}  # by the session of a tab

    def send(self, message: dict[str, Any]) -> None:
        os.write(self._writes, json.dumps(message).encode() + b"\0")

    def answer(self, number: int) -> dict[str, Any]:
        while (said := self._next()).get("id") != number:
            self.events.setdefault(said.get("sessionId", ""), []).append(said)
        return said

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._reads], [], [], _TIMEOUT_S)[0], "Chromium says nothing"
            data = os.read(self._reads, 1 << 16)
            assert data, "Chromium has ended"
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found


class Browser:
    """One tab."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe, self._session = pipe, ""
        self._target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        self.events: list[dict[str, Any]] = pipe.events.setdefault(self._session, [])
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self._call(f"{domain}.enable")

    @contextmanager
    def another(self) -> Iterator[Browser]:
        """A second tab of the same browser while the context lasts."""
        made = Browser(self._pipe)
        try:
            yield made
        finally:
            made._call("Page.close")

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
        """Waits until an expression, or what its promise becomes, is true."""
        end_s = time.monotonic() + _TIMEOUT_S
        while not self.value(f"(async () => Boolean(await ({expression})))()"):
            assert time.monotonic() < end_s, f"it does not come about: {expression}"
            time.sleep(0.01)

    def to_front(self) -> None:
        self._call("Page.bringToFront")

    def until_file(self, folder: Path, pattern: str) -> None:
        """Waits until the browser has saved a file."""
        end_s = time.monotonic() + _TIMEOUT_S
        while not any(folder.glob(pattern)) or any(folder.glob("*.crdownload")):
            assert time.monotonic() < end_s, f"no file {pattern} is saved"
            self.value("0")  # its messages are read
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """Clicks into the middle of an element, which nothing may cover, once what was drawn has its place."""
        drawn = "requestAnimationFrame(() => requestAnimationFrame(go)); setTimeout(go, 200)"  # none behind a tab
        x, y = self.value(
            f"(async e => {{ e.scrollIntoView({{block: 'nearest'}}); await new Promise(go => {{ {drawn} }});"
            " const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })"
            f"(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def choose_files(self, selector: str, paths: Sequence[Path]) -> None:
        """Gives files to an input, as its dialog would."""
        document = self._call("DOM.getDocument")["root"]["nodeId"]
        node = self._call("DOM.querySelector", nodeId=document, selector=selector)["nodeId"]
        self._call("DOM.setFileInputFiles", nodeId=node, files=[str(path) for path in paths])

    def download_to(self, folder: Path) -> None:
        """Lets the browser save files without asking."""
        self._call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    @contextmanager
    def running_first(self, source: str) -> Iterator[None]:
        """Runs a script in each page before its own while the context lasts."""
        made = self._call("Page.addScriptToEvaluateOnNewDocument", source=source)
        try:
            yield
        finally:
            self._call("Page.removeScriptToEvaluateOnNewDocument", **made)

    def clear(self, origin: str) -> None:
        """Forgets what pages of an origin stored."""
        self._call("Storage.clearDataForOrigin", origin=origin, storageTypes="all")

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            code = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
            typed = {"Enter": "\r", " ": " "}.get(key)
            text = {"text": typed} if typed and kind == "keyDown" else {}
            self._call("Input.dispatchKeyEvent", type=kind, **code, **text)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._pipe.numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._pipe.send(message)
        said = self._pipe.answer(number)
        assert "error" not in said, said["error"]
        found: dict[str, Any] = said["result"]
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
        yield Browser(_Pipe(from_it[0], to_it[1]))
    finally:
        process.terminate()
        process.wait(60)
        for descriptor in (to_it[1], from_it[0]):
            os.close(descriptor)

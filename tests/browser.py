"""A real headless browser: Debian's chromium, controlled through a pipe.

A browser shows one page at a time: ``open`` loads a file, ``run`` evaluates JavaScript in it, ``move`` moves
the pointer, ``shot`` takes a screenshot. Errors that the page logs or throws are kept in ``errors``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

from needs import need, which
from patience import patient

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--window-size=1280,1000",
    "--remote-debugging-pipe",
)
LIMIT_S = patient(30)


class Browser:
    """One chromium with one page. Messages are JSON, each terminated by a zero byte."""

    def __init__(self, directory: str) -> None:
        ours, theirs = os.pipe(), os.pipe()  # the descriptors it reads from (3) and writes to (4)
        program = [which("chromium"), *_FLAGS, f"--user-data-dir={directory}", "about:blank"]

        # A shell moves them to the descriptors that chromium expects.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}', "bash", *program],
            pass_fds=(ours[0], theirs[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._to, self._from = ours[1], theirs[0]
        self._number = 0
        self._unread = b""
        self._session: str | None = None
        self.errors: list[str] = []
        self._events: list[dict[str, Any]] = []

    def open(self, path: Path) -> None:
        """Load a file, wait until it is loaded, and forget the errors of the previous page."""
        if self._session is None:
            targets = self._ask("Target.getTargets")["targetInfos"]
            (target,) = (one for one in targets if one["type"] == "page")
            attached = self._ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self._ask(f"{domain}.enable")
            self._ask("Page.setLifecycleEventsEnabled", enabled=True)
        self._events.clear()
        self.errors.clear()
        loader = self._ask("Page.navigate", url=path.as_uri())["loaderId"]
        while not any(self._has_loaded(event, loader) for event in self._events):
            self._read()

    @staticmethod
    def _has_loaded(event: dict[str, Any], loader: str) -> bool:
        about = event["params"]
        loads = event["method"] == "Page.lifecycleEvent"
        return loads and (about["name"], about["loaderId"]) == ("load", loader)

    def run(self, script: str) -> Any:
        """Return the value of an expression, as JSON."""
        done = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def wheel(self, x: float, y: float, by: float) -> None:
        """Turn the wheel with Ctrl held."""
        self._ask("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=by, modifiers=2)

    def shot(self, path: Path) -> Path:
        """Take a screenshot of the visible part."""
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot")["data"]))
        return path

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self._ask("Browser.close")
        try:
            self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            said = self._read()
            if said.get("id") == self._number:
                assert "error" not in said, said["error"]
                return said["result"]

    def _read(self) -> dict[str, Any]:
        end = monotonic() + LIMIT_S
        while b"\0" not in self._unread:
            assert select.select([self._from], [], [], max(0.0, end - monotonic()))[0], (
                "the browser is silent"
            )
            more = os.read(self._from, 1 << 16)
            assert more, "the browser has ended"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\0")
        said = json.loads(line)
        if "method" in said:
            self._events.append(said)
            if said["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(said["params"]["exceptionDetails"]))
            if said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.errors.append(said["params"]["entry"]["text"])
        return said


@contextlib.contextmanager
def started() -> Iterator[Browser]:
    """Start a browser for the duration of the block."""
    need("chromium")
    with tempfile.TemporaryDirectory(prefix="asynccoll-browser-", ignore_cleanup_errors=True) as directory:
        browser = Browser(directory)
        try:
            yield browser
        finally:
            browser.close()

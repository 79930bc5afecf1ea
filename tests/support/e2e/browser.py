"""Debian's Chromium, driven over its own debugging pipe (Chrome DevTools Protocol): nothing to install beside it."""

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
PATIENCE_SECONDS = 60.0


class Browser:
    """One headless browser with one page. Use it as a context manager."""

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._process: subprocess.Popen[bytes] | None = None
        self._session = ""
        self._last_id = 0
        self._unread = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        command_out, self._to = os.pipe()
        self._from, answer_in = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        flags += ["--disable-background-networking", "--disable-component-update", f"--user-data-dir={self._profile}"]
        # It reads file 3 and writes file 4.
        script = f'exec "$0" "$@" 3<&{command_out} 4>&{answer_in}'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", script, CHROMIUM, *flags, "about:blank"],
            pass_fds=(command_out, answer_in),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_out)
        os.close(answer_in)
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **parameters: Any) -> Any:
        """One command and its result; events on the way are kept."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last_id:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self.events.append(answer)

    def open(self, url: str, width: int, *, scheme: str = "light") -> None:
        """Load a page at this width and wait until it has loaded."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors and warnings of the console and of the page's log since it was opened."""
        said = []
        for event in self.events:
            details = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                said.append(str(details["exceptionDetails"]["text"]))
            elif event.get("method") == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
                said.append(str(details["entry"]["text"]))
            elif event.get("method") == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
                said.append(str(details["args"]))
        return said

    def fetched(self) -> list[str]:
        """Every address that the page asked for since it was opened, its own first."""
        return [
            str(event["params"]["request"]["url"])
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def images(self) -> list[str]:
        """The accessible name of everything that assistive technology is shown as an image."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            str(node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored") and node.get("role", {}).get("value") in ("image", "img", "graphics-document")
        ]

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
        message, _, self._unread = self._unread.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

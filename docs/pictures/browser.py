"""Pictures of pages by a headless Chromium, which is told what to do over its DevTools protocol.

Debian: `apt-get install chromium`; elsewhere CHROMIUM names the program. The connection is tornado's, which Jupyter brings.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tornado.websocket import WebSocketClientConnection, websocket_connect

#: Seconds that a page or the program may take.
PATIENCE_S = 60.0


def program() -> str:
    """Chromium's path. Raises SystemExit: there is none."""
    for name in (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"):
        if name and (path := shutil.which(name)):
            return path
    raise SystemExit("no Chromium: install it (Debian: apt-get install chromium), or name the program in CHROMIUM")


class Page:
    """A page of a running browser."""

    def __init__(self, connection: WebSocketClientConnection):
        self._connection, self._number = connection, 0

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        """A command of the DevTools protocol. Raises RuntimeError with its answer if that is an error."""
        self._number += 1
        await self._connection.write_message(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            text = await asyncio.wait_for(self._connection.read_message(), PATIENCE_S)
            if text is None:
                raise RuntimeError(f"the browser left during {method}")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    async def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    async def wait_for(self, script: str) -> None:
        """Wait until an expression is true. Raises TimeoutError with the expression."""
        for _ in range(int(PATIENCE_S / 0.25)):
            if await self.evaluate(f"Boolean({script})"):
                return
            await asyncio.sleep(0.25)
        raise TimeoutError(f"not true within {PATIENCE_S:.0f} s: {script}")

    async def show(self, url: str, width: int, height: int) -> None:
        """Go to an address in a window of so many pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1.0}
        await self.call("Emulation.setDeviceMetricsOverride", **size, mobile=False)
        await self.call("Page.navigate", url="about:blank")  # a change of the part after # alone would load nothing
        await self.call("Page.navigate", url=url)
        await self.wait_for("document.readyState == 'complete' && location.href != 'about:blank'")

    async def picture(self) -> bytes:
        """The window as a PNG file."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])


@asynccontextmanager
async def opened_page() -> AsyncIterator[Page]:
    """A page of a browser of its own, which ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
        process = subprocess.Popen(
            [program(), *options, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(folder) / "DevToolsActivePort", process)
            with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                address = next(target for target in json.load(answer) if target["type"] == "page")
            connection = await websocket_connect(address["webSocketDebuggerUrl"], max_message_size=2**28)
            yield Page(connection)
            connection.close()
        finally:
            process.terminate()
            process.wait()


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    for _ in range(int(PATIENCE_S / 0.25)):
        if process.poll() is not None:
            raise SystemExit(f"Chromium ended with status {process.returncode}")
        if file.is_file() and (text := file.read_text()).count("\n"):
            return int(text.splitlines()[0])
        await asyncio.sleep(0.25)
    raise SystemExit(f"Chromium did not open its port within {PATIENCE_S:.0f} s")

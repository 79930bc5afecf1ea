"""What a client sees of a server, and what its ledger says afterwards."""

import threading
from typing import Any

import httpx
import openai

from tests.support.e2e.server import Server, sse_events, wait_until


def client_of(server: Server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def long_body(max_tokens: int = 4000) -> dict[str, Any]:
    body = {"model": "tiny-random", "prompt": [300, 301, 302], "stream": True, "max_tokens": max_tokens}
    return {**body, "ignore_eos": True, "min_tokens": max_tokens}


class Stream:
    """A stream read by a thread, so that the test can do something meanwhile."""

    def __init__(self, server: Server, key: str, body: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self.status = 0
        self.broke: Exception | None = None
        self._request = (f"{server.url}/v1/completions", body, {"authorization": f"Bearer {key}"})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        wait_until(lambda: any(line.startswith("data:") for line in self.lines), "the first token")

    def _read(self) -> None:
        url, body, headers = self._request
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=60) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    self.lines.append(line)
        except httpx.HTTPError as error:
            self.broke = error

    def events(self) -> list[str]:
        """All events, once the stream has ended."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the stream has not ended"
        return sse_events("\n".join(self.lines))


def ledger_rows(server: Server) -> list[dict[str, Any]]:
    """Ledger rows, straight from the database."""
    import sqlite3

    with sqlite3.connect(f"file:{server.data_dir / 'terazi.db'}?mode=ro", uri=True) as connection:
        connection.row_factory = sqlite3.Row
        rows = [dict(row) for row in connection.execute("SELECT * FROM ledger ORDER BY received_at_us")]
    connection.close()
    return rows

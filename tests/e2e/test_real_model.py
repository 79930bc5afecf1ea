"""The whole way on the real model: two teams' keys through `terazi serve`, real text out, one ledger row each."""

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import openai
import pytest

from engine.models.store import cache_root
from tests.support.e2e.server import Server

pytestmark = pytest.mark.real_model
LEDGER = "SELECT team, outcome, prompt_tokens, output_tokens, device_us FROM ledger WHERE team = 'search'"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The default model with its usual cache, so that its conversion and its step profile are made only once."""
    server = Server(tmp_path_factory.mktemp("real") / "data", cache_root())
    try:
        yield server.start("--engine", "torch", "--model", "smollm2-135m", "--kv-memory", "256MiB")
    finally:
        server.kill()


def test_a_question_gets_its_answer_and_one_ledger_row(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.make_key(), max_retries=0, timeout=120)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    whole = client.chat.completions.create(model="smollm2-135m", messages=question, temperature=0, max_tokens=32)  # type: ignore[arg-type]
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"

    stream = client.chat.completions.create(
        model="smollm2-135m",
        messages=question,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage

    assert server.stop() == 0
    with closing(sqlite3.connect(server.data_dir / "terazi.db")) as database:
        rows = database.execute(LEDGER).fetchall()
    assert whole.usage is not None
    counts = ("search", "ok", whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert [row[:4] for row in rows] == [counts, counts]
    assert all(row[4] > 0 for row in rows)
    server.start("--engine", "torch", "--model", "smollm2-135m", "--kv-memory", "256MiB")


@pytest.mark.case("I12")
def test_answers_over_http_do_not_depend_on_company(server: Server) -> None:
    """Greedy and seeded, alone and all at once: the same texts."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.make_key("crowd"), max_retries=0, timeout=120)
    prompts = ["The capital of France is", "Once upon a time", "def add(a, b):", "Water boils at", "Roses are red,"]

    def ask(case: tuple[str, float]) -> str:
        prompt, temperature = case
        answer = client.completions.create(
            model="smollm2-135m", prompt=prompt, temperature=temperature, seed=7, max_tokens=12
        )
        return answer.choices[0].text

    cases = [(prompt, temperature) for prompt in prompts for temperature in (0.0, 1.0)]
    alone = [ask(case) for case in cases]
    with ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(ask, cases))
    assert together == alone
    assert len(set(alone)) == len(cases)

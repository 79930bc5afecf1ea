"""Every ending of a request at every moment of it: one answer, one settlement, one ledger row, all blocks back.

A real gateway over TCP before a production core with small pools. The test moves the core's clock and steps, so each
request is caught exactly where it is wanted: queued, in prefill, decoding, swapped out.
"""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

from gateway.listen import protocol as http_protocol
from gateway.openai.app import HttpSettings
from policies.tiers import DEFAULT_TIERS
from tenants.rows import LedgerRow
from tests.support.engine.moments import MOMENTS as ALL_MOMENTS
from tests.support.engine.moments import check_cuts, moment_of, planned, read_steps
from tests.support.gateway.core_engine import DEVICE_BLOCKS, HOST_BLOCKS, CoreEngine, small_hello
from tests.support.gateway.harness import CHAT, WAIT, Gateway, chat_body, events, eventually, gateway, text_of

pytestmark = pytest.mark.anyio

OUTPUT = 100  # tokens the request may generate
MOMENTS = ("waiting", "prefill", "running", "swapped")
every_moment = pytest.mark.parametrize("moment", MOMENTS)
streaming_or_not = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
# The engine answers an abort when the test makes a step, however long this machine stands still before that.
PATIENT = HttpSettings(settle_wait=WAIT, close_wait=WAIT)
TIER = replace(DEFAULT_TIERS[2], max_queue_seconds=5)


@contextlib.asynccontextmanager
async def overloaded(moment: str = "") -> AsyncIterator[tuple[Gateway, CoreEngine]]:
    """A gateway before an engine with room for a few requests; everything is accounted for at the end."""
    async with gateway(tcp=True, greeting=small_hello(), make_engine=CoreEngine, tier=TIER, settings=PATIENT) as g:
        assert isinstance(g.engine, CoreEngine)
        if moment == "waiting":
            g.engine.saturate()
        yield g, g.engine
        await eventually(lambda: not g.outstanding() and not g.state.engine.num_streams)
        assert len(g.ledger.rows) == len(g.ledger.opened) == len(g.engine.submitted)
        assert g.state.leases.totals(1).is_balanced
        g.engine.run_dry()
        step = g.engine.core.step()
        assert step is None and g.engine.scheduler.num_live == 0


def body(stream: bool, text: str = "hello there", output: int = OUTPUT) -> dict[str, Any]:
    return chat_body(text, stream=stream, max_tokens=output, min_tokens=output, ignore_eos=True)


async def call(g: Gateway, key: str, document: dict[str, Any]) -> asyncio.Transport:
    """One request from a bare socket; what comes back is not kept."""
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, "127.0.0.1", g.port)
    sent = json.dumps(document).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(sent)}\r\n\r\n"
    transport.write(head.encode() + sent)
    return transport


@contextlib.asynccontextmanager
async def impatient_client(g: Gateway, stream: bool) -> AsyncIterator[None]:
    """One request; leaving the block hangs up."""
    transport = await call(g, g.key, body(stream))
    try:
        yield
    finally:
        transport.abort()


@contextlib.asynccontextmanager
async def patient_client(g: Gateway, stream: bool) -> AsyncIterator["asyncio.Task[httpx.Response]"]:
    """One request that is read to its end by a task."""
    task = asyncio.create_task(g.post(CHAT, body(stream)))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def free_blocks(engine: CoreEngine) -> tuple[int, int]:
    assert engine.latest is not None
    return engine.latest.num_free_blocks, engine.latest.num_free_host_blocks


def check_booked(g: Gateway, row: LedgerRow, moment: str, num_output: int) -> None:
    """Tokens of the row and of the settlement, by the rules of `gateway.openai.booking`."""
    assert row.output_tokens == num_output
    assert (row.started_at_us is None) == (moment == "waiting")
    totals = g.state.leases.totals(1)
    ran = moment != "waiting"
    assert totals.settled_tokens == (row.prompt_tokens + num_output if ran else 0)
    assert totals.outstanding_requests == totals.outstanding_tokens == 0
    assert totals.settled_requests + totals.released_requests == 1
    assert [other.request_id for other in g.ledger.rows] == [row.request_id]


def check_error(response: httpx.Response, stream: bool, has_tokens: bool, code: str, status: int) -> None:
    """Exactly one answer: a status before the first byte, an error event and no [DONE] after it."""
    if stream and has_tokens:
        documents = events(response.text)
        assert response.status_code == 200
        assert [document["error"]["code"] for document in documents if "error" in document] == [code]
        assert "error" in documents[-1] and "[DONE]" not in documents
    else:
        assert response.status_code == status and response.json()["error"]["code"] == code


@pytest.mark.case("G29", "G30")
@every_moment
@streaming_or_not
async def test_a_client_that_leaves(moment: str, stream: bool) -> None:
    async with overloaded(moment) as (g, engine):
        async with impatient_client(g, stream):
            submit = await engine.next_submit()
            sequence = engine.bring(submit.request_id, moment)
        assert await engine.next_abort() == submit.request_id
        engine.advance()
        assert sequence.is_finished and sequence.finish_reason == "abort"
        row = await g.ledger.next_row()
        engine.run_dry()
        (cut,) = engine.cuts
        assert (cut.request_id, cut.moment) == (submit.request_id, moment)
        check_cuts(read_steps(engine.log_path), engine.cuts)
        assert free_blocks(engine) == (DEVICE_BLOCKS, HOST_BLOCKS)
        assert (row.outcome, row.error_code, row.finish_reason) == ("client_closed", "client_closed", None)
        assert (row.device_us, row.num_swaps > 0) == (sequence.bill.device_us, moment == "swapped")
        check_booked(g, row, moment, len(sequence.output_token_ids))


@every_moment
@streaming_or_not
async def test_an_engine_that_is_killed(moment: str, stream: bool) -> None:
    async with overloaded(moment) as (g, engine), patient_client(g, stream) as task:
        submit = await engine.next_submit()
        sequence = engine.bring(submit.request_id, moment)
        num_output = len(sequence.output_token_ids)
        await eventually(lambda: engine.latest is None or g.state.engine.latest_step == engine.latest)
        engine.die()
        row = await g.ledger.next_row()
        check_error(await task, stream, num_output > 0, "engine_unavailable", 503)
        outcome = "error" if moment != "waiting" else "refused"
        assert (row.outcome, row.error_code, row.finish_reason) == (outcome, "engine_unavailable", None)
        assert row.device_us == sequence.bill.device_us, "what was received of it"
        assert row.output_tokens == num_output
        totals = g.state.leases.totals(1)
        assert totals.settled_tokens == (row.prompt_tokens + num_output if moment != "waiting" else 0)
        engine.core.abort(submit.request_id)


@every_moment
@streaming_or_not
async def test_a_shutdown_whose_drain_time_is_over(moment: str, stream: bool) -> None:
    async with overloaded(moment) as (g, engine), patient_client(g, stream) as task:
        submit = await engine.next_submit()
        sequence = engine.bring(submit.request_id, moment)
        await eventually(lambda: g.state.engine.latest_step is not None or moment == "waiting")
        g.state.end_streams()
        assert await engine.next_abort() == submit.request_id
        engine.advance()
        row = await g.ledger.next_row()
        check_error(await task, stream, bool(sequence.output_token_ids), "draining", 503)
        outcome = "shutdown" if moment != "waiting" else "refused"
        assert (row.outcome, row.error_code, row.finish_reason) == (outcome, "draining", None)
        assert (row.device_us, row.num_swaps > 0) == (sequence.bill.device_us, moment == "swapped")
        check_booked(g, row, moment, len(sequence.output_token_ids))
        engine.run_dry()
        assert free_blocks(engine) == (DEVICE_BLOCKS, HOST_BLOCKS)


@every_moment
@streaming_or_not
async def test_a_shutdown_that_gives_it_time_to_end(moment: str, stream: bool) -> None:
    async with overloaded(moment) as (g, engine), patient_client(g, stream) as task:
        submit = await engine.next_submit()
        engine.bring(submit.request_id, moment)
        g.state.is_draining = True
        assert (await g.chat()).status_code == 503
        engine.run_dry()
        row, response = await g.ledger.next_row(), await task
        assert response.status_code == 200
        if stream:
            documents = events(response.text)
            assert documents[-1] == "[DONE]" and not any("error" in document for document in documents[:-1])
        assert (row.outcome, row.finish_reason, row.output_tokens) == ("ok", "length", OUTPUT)
        assert row.num_swaps > 0 or moment != "swapped"
        assert g.state.leases.totals(1).settled_tokens == row.prompt_tokens + OUTPUT
        assert free_blocks(engine) == (DEVICE_BLOCKS, HOST_BLOCKS)


@streaming_or_not
async def test_a_request_that_has_not_started_when_its_queue_time_ends(stream: bool) -> None:
    async with overloaded() as (g, engine), patient_client(g, stream) as task:
        submit = await engine.next_submit()
        engine.clock.advance(TIER.max_queue_seconds * 1_000_000)
        engine.advance()
        row, response = await g.ledger.next_row(), await task
        check_error(response, stream, False, "queue_timeout", 429)
        assert int(response.headers["retry-after"]) >= 1
        assert (row.outcome, row.error_code, row.device_us) == ("timeout", "queue_timeout", 0)
        check_booked(g, row, "waiting", 0)
        assert g.state.leases.totals(1).released_requests == 1, "who was refused before its first step has made none"
        assert engine.find(submit.request_id) is None and not any(map(planned, read_steps(engine.log_path)))


async def test_when_the_last_microsecond_starts_it_it_is_served() -> None:
    async with overloaded() as (g, engine), patient_client(g, True) as task:
        await engine.next_submit()
        engine.clock.advance(TIER.max_queue_seconds * 1_000_000 - 1)
        engine.run_dry()
        assert (await g.ledger.next_row()).outcome == "ok"
        assert events((await task).text)[-1] == "[DONE]"


async def test_a_request_that_lies_swapped_out_when_its_queue_time_ends() -> None:
    async with overloaded() as (g, engine), patient_client(g, True) as task:
        submit = await engine.next_submit()
        sequence = engine.bring(submit.request_id, "swapped")
        engine.clock.advance(2 * TIER.max_queue_seconds * 1_000_000)
        engine.run_dry()
        row = await g.ledger.next_row()
        assert (row.outcome, row.output_tokens) == ("ok", OUTPUT) and row.num_swaps > 0
        assert sequence.finish_reason == "length"
        assert text_of(events((await task).text))


@pytest.mark.case("G09", "G21")
async def test_200_clients_that_leave_at_random_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "GRACE_SECONDS", 0.0)  # 200 times a tenth of a second is long
    rng = random.Random(2)
    counts: Counter[str] = Counter(dict.fromkeys(ALL_MOMENTS, 0))
    make_engine = partial(CoreEngine, max_delay=3)
    async with gateway(tcp=True, greeting=small_hello(), make_engine=make_engine, settings=PATIENT) as g:
        engine = g.engine
        assert isinstance(engine, CoreEngine)
        keys = [g.key, g.holder.add("team-b"), g.holder.add("team-c")]
        callers: dict[str, asyncio.Transport] = {}
        while len(engine.cuts) < 200:
            while len(callers) < 10:
                document = body(rng.random() < 0.5, "x" * rng.randint(1, 60), rng.randint(2, 90))
                transport = await call(g, rng.choice(keys), document)
                callers[(await engine.next_submit()).request_id] = transport
            engine.advance()
            await asyncio.sleep(0)
            there: dict[str, list[str]] = {}
            for request_id in list(callers):
                sequence = engine.find(request_id)
                if sequence is None:
                    callers.pop(request_id).close()
                else:
                    there.setdefault(moment_of(sequence), []).append(request_id)
            moment = min(sorted(there), key=lambda name: counts[name], default=None)
            if moment is not None and rng.random() < (0.4 if counts[moment] == min(counts.values()) else 0.05):
                counts[moment] += 1
                request_id = rng.choice(there[moment])
                callers.pop(request_id).abort()
                for _ in range(rng.randrange(3)):  # it takes a while to be noticed
                    engine.advance()
                await eventually(partial(is_noticed, engine, request_id))
        for transport in callers.values():
            transport.abort()
        await eventually(lambda: all(is_noticed(engine, request_id) for request_id in callers))
        engine.run_dry()
        await eventually(lambda: len(g.ledger.rows) == len(g.ledger.opened) and not g.outstanding())
        check_everything(g, engine)


def is_noticed(engine: CoreEngine, request_id: str) -> bool:
    return request_id in engine.aborted or engine.find(request_id) is None


def check_everything(g: Gateway, engine: CoreEngine) -> None:
    """Clients have left at every moment; the log, the engine's last words, the ledger and the leases agree."""
    lines = read_steps(engine.log_path)
    check_cuts(lines, engine.cuts)
    assert (lines[-1]["free_blocks"], lines[-1]["free_host_blocks"]) == (DEVICE_BLOCKS, HOST_BLOCKS)
    finished = {finished.request_id: finished for finished in engine.finished}
    rows = {row.request_id: row for row in g.ledger.rows}
    assert len(finished) == len(engine.finished) == len(rows) == len(g.ledger.rows) == len(engine.submitted)
    for request_id, row in rows.items():
        told = finished[request_id]
        assert (row.output_tokens, row.device_us, row.num_swaps) == (told.output_tokens, told.device_us, told.num_swaps)
    for cut in engine.cuts:
        assert rows[cut.request_id].outcome == "client_closed"
        if cut.moment in ("swapped", "swapping_in", "swapping_out"):
            assert rows[cut.request_id].num_swaps > 0
    counts = Counter(cut.moment for cut in engine.cuts)
    assert min(counts[moment] for moment in ALL_MOMENTS) >= 4, counts
    for team_id in (1, 2, 3):
        totals = g.state.leases.totals(team_id)
        assert totals.is_balanced and totals.outstanding_requests == 0
        started = [row for row in rows.values() if row.team_id == team_id and row.started_at_us is not None]
        assert totals.settled_tokens == sum(row.prompt_tokens + row.output_tokens for row in started)

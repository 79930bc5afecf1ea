"""Every ending of a request at every moment of it: one answer, one settlement, one ledger row, all blocks back.

A real gateway over TCP before a production core with small pools. The test moves the core's clock and steps, so each
request is caught exactly where it is wanted: queued, in prefill, decoding, swapped out.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from policies.tiers import DEFAULT_TIERS
from tenants.rows import LedgerRow
from tests.gateway.core_engine import DEVICE_BLOCKS, HOST_BLOCKS, CoreEngine, small_hello
from tests.gateway.harness import CHAT, Gateway, chat_body, events, eventually, gateway, text_of

pytestmark = pytest.mark.anyio

OUTPUT = 100  # tokens the request may generate
MOMENTS = ("waiting", "prefill", "running", "swapped")
every_moment = pytest.mark.parametrize("moment", MOMENTS)
streaming_or_not = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
TIER = replace(DEFAULT_TIERS[2], max_queue_seconds=5)


@contextlib.asynccontextmanager
async def overloaded(moment: str = "") -> AsyncIterator[tuple[Gateway, CoreEngine]]:
    """A gateway before an engine with room for a few requests; everything is accounted for at the end."""
    async with gateway(tcp=True, greeting=small_hello(), make_engine=CoreEngine, tier=TIER) as g:
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


def body(stream: bool) -> dict[str, Any]:
    return chat_body("hello there", stream=stream, max_tokens=OUTPUT, min_tokens=OUTPUT, ignore_eos=True)


@contextlib.asynccontextmanager
async def impatient_client(g: Gateway, stream: bool) -> AsyncIterator[None]:
    """One request from a bare socket; leaving the block hangs up."""
    _, writer = await asyncio.open_connection("127.0.0.1", g.port)
    sent = json.dumps(body(stream)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {g.key}\r\ncontent-length: {len(sent)}\r\n\r\n"
    writer.write(head.encode() + sent)
    await writer.drain()
    try:
        yield
    finally:
        writer.transport.abort()


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
    """Tokens of the row and of the settlement, by the rules of `gateway.booking`."""
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
        num_plans = len(engine.plans)
        engine.advance()
        assert sequence.is_finished and sequence.finish_reason == "abort"
        row = await g.ledger.next_row()
        engine.run_dry()
        assert len(engine.plans) > num_plans
        for plan in engine.plans[num_plans:]:
            touched = {row.seq_id for row in plan.rows}
            touched |= {copy.seq_id for copy in (*plan.copies_out, *plan.copies_in)}
            assert sequence.seq_id not in touched, "planned after its abort"
        assert free_blocks(engine) == (DEVICE_BLOCKS, HOST_BLOCKS)
        assert (row.outcome, row.error_code, row.finish_reason) == ("client_closed", "client_closed", None)
        assert (row.device_us, row.num_swaps > 0) == (sequence.device_us, moment == "swapped")
        check_booked(g, row, moment, len(sequence.output_token_ids))


@every_moment
@streaming_or_not
async def test_an_engine_that_is_killed(moment: str, stream: bool) -> None:
    async with overloaded(moment) as (g, engine), patient_client(g, stream) as task:
        submit = await engine.next_submit()
        sequence = engine.bring(submit.request_id, moment)
        num_output = len(sequence.output_token_ids)
        engine.die()
        row = await g.ledger.next_row()
        check_error(await task, stream, num_output > 0, "engine_unavailable", 503)
        assert (row.outcome, row.error_code, row.finish_reason) == ("error", "engine_unavailable", None)
        assert row.device_us == sequence.device_us, "what was received of it"
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
        assert (row.outcome, row.error_code, row.finish_reason) == ("shutdown", "draining", None)
        assert (row.device_us, row.num_swaps > 0) == (sequence.device_us, moment == "swapped")
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
        assert engine.find(submit.request_id) is None and engine.plans == []


async def test_a_request_that_starts_in_the_last_microsecond_of_its_queue_time() -> None:
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

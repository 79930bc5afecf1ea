"""What a request used is one number: for its quota, its row, the report, the metrics and the start after a restart."""

import asyncio
from collections import Counter
from itertools import product

import pytest
from sqlalchemy import select

from engine.wire.messages import Finished
from gateway.errors import BadRequest, EngineDied, EngineFailed, Overloaded
from gateway.link.client import RequestStream
from gateway.openai import booking
from gateway.openai.booking import CLIENT_CLOSED, SHUTDOWN, UNEXPECTED, Ending, Use, ledger_row, use_of
from gateway.openai.state import HttpSettings
from tenants import reports, tables
from tenants.leases import Leases
from tenants.ledger import recent_use
from tenants.quotas import Limits
from tenants.reports.periods import Period
from tenants.reports.queries import IS_REQUEST
from tenants.rows import GIVEN_BACK
from tests.support.gateway.harness import WAIT, Gateway, eventually, gateway
from tests.support.gateway.metrics import Shown
from tests.support.tenants import histories
from tests.support.tenants.stores import Clock, Store, open_entry

pytestmark = pytest.mark.anyio
LIMITS = Limits(requests_per_minute=1000, tokens_per_minute=100_000)


async def refuse(g: Gateway, how: str) -> None:
    """One request that never runs."""
    request = asyncio.create_task(g.chat("please " * 20))
    submit = await g.engine.next_submit()
    if how == "timeout":
        g.engine.finish(submit.request_id, "timeout")
    else:
        g.engine.refuse(submit.request_id, how)
    assert (await request).status_code in (429, 503)


@pytest.mark.case("T07")
async def test_when_54_are_refused_only_the_7_served_count(store: Store) -> None:
    async with gateway(limits=LIMITS) as g:
        shown = Shown(g)
        for how in ("queue_full",) * 54 + ("timeout",) * 3 + ("draining",) * 2:
            await refuse(g, how)
        g.engine.script = g.engine.saying("hello")
        for _ in range(7):
            answer = await g.chat("hi")
            assert answer.status_code == 200
        usage = answer.json()["usage"]["total_tokens"]
        rows = g.ledger.rows
        assert len(rows) == 66, "every admitted request has its row"
        assert Counter(row.outcome for row in rows) == {"ok": 7, "refused": 56, "timeout": 3}
        # The headers, and the limits behind them.
        assert answer.headers["x-ratelimit-remaining-requests"] == "993"
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(100_000 - 7 * usage)
        # The metrics.
        by_outcome = shown.values("terazi_requests_total", "outcome")
        assert by_outcome == {"ok": 7, "refused": 56, "timeout": 3}
        assert sum(shown.values("terazi_tokens_total", "type").values()) == 7 * usage
        assert shown.value("terazi_ledger_imbalance") == 0
        now_us, who = g.clock.now_us(), g.holder.identity_of("team-a")
    # The report.
    await store.team("team-a")
    await histories.book(store, rows)
    async with store.database.session() as connection:
        total = (await reports.usage_report(connection, Period(0, now_us + 1)))["total"]
        fairness = await reports.fairness_report(connection, Period(0, now_us + 1))
        history = await recent_use(connection, now_us)
    assert (total["requests"], total["ok"], total["refused"], total["timeout"]) == (7, 7, 56, 3)
    assert total["error"] == 0
    assert total["prompt_tokens"] + total["output_tokens"] == 7 * usage
    assert [tier["requests"] for tier in fairness["tiers"]] == [7]
    assert [size["requests"] for size in fairness["size_classes"]] == [7]
    # The minute after a restart.
    leases = Leases(Clock())
    leases.seed(history)
    view = leases.view(who)
    assert (view.requests.remaining, view.tokens.remaining) == (993, 100_000 - 7 * usage)


@pytest.mark.case("T07")
async def test_when_only_refusals_are_booked_they_are_shown(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    from gateway.cli.report_text import write_usage

    async with gateway() as g:
        await refuse(g, "queue_full")
        rows, now_us = g.ledger.rows, g.clock.now_us()
    await store.team("team-a")
    await histories.book(store, rows)
    async with store.database.session() as connection:
        report = await reports.usage_report(connection, Period(0, now_us + 1))
    write_usage(report)
    printed = capsys.readouterr().out
    assert "refused" in printed and "no request ended" not in printed


@pytest.mark.case("T07")
async def test_when_the_count_comes_late_the_quota_follows_the_row() -> None:
    settings = HttpSettings(settle_wait=0, close_wait=WAIT)
    for num_tokens in (0, 7):
        async with gateway(limits=LIMITS, settings=settings, tcp=True) as g:
            g.engine.is_hung = True
            leaving = asyncio.create_task(g.chat("hi", stream=True))
            submit = await g.engine.next_submit()
            leaving.cancel()
            await g.engine.next_abort()
            await eventually(lambda g=g: not g.outstanding())  # type: ignore[misc]
            prompt = len(submit.prompt_token_ids)
            who = g.holder.identity_of("team-a")
            assert g.state.leases.view(who).tokens.remaining == 100_000 - prompt, "it may have been computed"
            if num_tokens:
                g.engine.say(submit.request_id, "x" * num_tokens)
            g.engine.finish(submit.request_id, "abort")
            row = await g.ledger.next_row()
            used = prompt + num_tokens if num_tokens else 0
            assert row.prompt_tokens + row.output_tokens == used
            assert g.state.leases.view(who).tokens.remaining == 100_000 - used
            assert g.state.leases.view(who).requests.remaining == 999, "leaving has been a request"
            assert g.state.leases.imbalance() == 0


ENDINGS = {
    "ok": Ending("ok", "stop"),
    "left": CLIENT_CLOSED,
    "bug": UNEXPECTED,
    "shutdown": SHUTDOWN,
    "timeout": booking.ending_of(Overloaded("", code="queue_timeout")),
    "full": booking.ending_of(Overloaded("")),
    "died": booking.ending_of(EngineDied("")),
    "failed": booking.ending_of(EngineFailed("")),
    "bad": booking.ending_of(BadRequest("")),
}


def stream_of(num_tokens: int, device_us: int, is_finished: bool) -> RequestStream:
    stream = RequestStream("r")
    if num_tokens or device_us:
        stream.push([5] * num_tokens, device_us, 0)
    if is_finished:
        stream.finish(
            Finished(
                request_id="r",
                reason="abort",
                prompt_tokens=10,
                output_tokens=num_tokens,
                device_us=device_us,
                queued_us=0,
                first_token_us=0,
                total_us=0,
                level_path=(),
            )
        )
    return stream


@pytest.mark.case("T07")
async def test_whatever_the_end_row_and_quota_say_the_same(store: Store) -> None:
    """Every ending at every stage: the row alone tells what was settled, and SQL tells it as Python does."""
    stages = {"queued": (0, 0), "half a prompt": (0, 700), "answering": (3, 900)}
    expected: dict[str, Use | None] = {}
    rows = []
    for (name, ending), (stage, (tokens, device_us)), is_finished in product(
        ENDINGS.items(), stages.items(), (True, False)
    ):
        entry = open_entry(f"{name} {stage} {is_finished}")
        stream = stream_of(tokens, device_us, is_finished)
        use = use_of(entry, stream, ending)
        row = ledger_row(entry, stream, ending, finished_at_us=entry.admitted_at_us, first_token_at_us=None)
        assert row.prompt_tokens + row.output_tokens == (use.tokens if use else 0)
        assert use is not None or row.outcome in GIVEN_BACK
        if stage != "queued":
            assert use == Use(10, tokens), "a half computed prompt counts whole"
        elif name in ("shutdown", "timeout", "full", "died", "bad"):
            assert use is None
        elif is_finished or name != "left":
            assert use == Use(0, 0)
        expected[row.request_id] = use
        rows.append(row)
    await histories.book(store, rows)
    t = tables.ledger.c
    async with store.database.session() as connection:
        counted = (await connection.execute(select(t.request_id).where(IS_REQUEST))).scalars().all()
    assert set(counted) == {name for name, use in expected.items() if use is not None}

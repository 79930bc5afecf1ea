"""The admin API's reports: usage as JSON or CSV, fairness as JSON.

The ledger is flushed before the database is read.
"""

import asyncio
import contextlib
import io
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from gateway.admin.answers import json_response
from gateway.admin.state import AdminState, query_of
from gateway.errors import BadRequest
from gateway.reports.csv_export import write_usage_csv
from tenants import reports, teams
from tenants.key_format import redact
from tenants.reports.periods import DEFAULT_TIME_ZONE, Period, parse_period

FLUSH_TIMEOUT_SECONDS = 2.0


class ReportCalls:
    """The handlers of /admin/v1/reports."""

    def __init__(self, state: AdminState) -> None:
        self._state = state

    async def usage(self, request: Request) -> Response:
        query = query_of(request, "from", "to", "tz", "by", "team", "format")
        period = self._period(query)
        answer_format = query.get("format", "json")
        if answer_format not in ("json", "csv"):
            shown = redact(answer_format[:80])
            raise BadRequest(f"format must be json or csv, not {shown!r}.", code="invalid_value", param="format")
        by = [name for name in query.get("by", "team").split(",") if name]
        await self._flush()
        async with self._state.database.session() as connection:
            team = query.get("team")
            if team is not None:
                await teams.get_team(connection, team)
            report = await reports.usage_report(connection, period, by, team=team)
        return json_response(report) if answer_format == "json" else _usage_csv(report)

    async def fairness(self, request: Request) -> Response:
        period = self._period(query_of(request, "from", "to", "tz"))
        await self._flush()
        async with self._state.database.session() as connection:
            return json_response(await reports.fairness_report(connection, period))

    def _period(self, query: Mapping[str, str]) -> Period:
        time_zone = query.get("tz", DEFAULT_TIME_ZONE)
        return parse_period(query.get("from"), query.get("to"), self._state.now_us(), time_zone)

    async def _flush(self) -> None:
        if self._state.flush is not None:
            with contextlib.suppress(TimeoutError):  # the database is slow or away; if it is away, the query raises
                async with asyncio.timeout(FLUSH_TIMEOUT_SECONDS):
                    await self._state.flush()


def _usage_csv(report: dict[str, Any]) -> Response:
    """The report's lines as CSV.

    The total is left out, so that a column can be summed; a report without dimensions is only the total.
    """
    text = io.StringIO(newline="")
    write_usage_csv(text, report)
    headers = {"x-request-id": uuid4().hex, "cache-control": "no-store"}
    return Response(text.getvalue(), 200, headers, "text/csv; charset=utf-8; header=present")

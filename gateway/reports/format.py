"""How a report's numbers, verdicts and teams are shown."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, tzinfo
from typing import Any

from gateway.reports import svg
from gateway.reports.page import Cell

Report = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]


def team_name(row: Mapping[str, Any]) -> str:
    """A team as a line of a report names it, with what became of it."""
    status = row.get("team_status", "active")
    return str(row["team"]) if status == "active" else f"{row['team']} ({status})"


def simulated_note(report: Report) -> str:
    """That figures of this period are of the simulated engine, "" if they are of a real one."""
    figures = report.get("total", report)
    simulated, requests = figures.get("simulated_requests", 0), figures.get("requests", 0)
    if not simulated:
        return ""
    return (
        f"SIMULATED: {simulated} of {requests} requests ran on the simulated engine. No model computed their answers, "
        "and their device time is modelled."
    )


def number(value: float | None, places: int, factor: float = 1.0) -> str:
    """With thousands separators; an en dash for None."""
    return "–" if value is None else f"{value * factor:,.{places}f}"


def count(value: float | None) -> str:
    """A whole number."""
    return number(value, 0)


def percent(value: float | None) -> str:
    """0.413 is 41.3 %."""
    return "–" if value is None else f"{value * 100:.1f} %"


def part_of(value: float | None, whole: float | None) -> str:
    """How much of a bound is used."""
    return percent(value / whole) if value is not None and whole else "–"


def seconds(value: float | None) -> str:
    """With the unit, and as many digits as one reads."""
    if value is None:
        return "–"
    if value < 0.1:
        return f"{value * 1000:.1f} ms"
    if value < 120:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    if value < 7200:
        return f"{value / 60:.1f} min"
    return f"{value / 3600:.1f} h" if value < 172_800 else f"{value / 86400:.1f} days"


def span(value: float) -> str:
    """A whole length of time, as an axis says it."""
    for unit, length in (("day", 86400), ("h", 3600), ("min", 60)):
        if value >= length and value % length == 0:
            return f"{value / length:g} {unit}"
    return f"{value:g} s"


def bound_text(report: Report, tier: Mapping[str, Any]) -> str:
    """A tier's bound as a tile says it."""
    return f"bound {seconds(tier['pause_bound_seconds'])}" if tier["pause_bound_seconds"] else why_unbound(report, tier)


def why_unbound(report: Report, tier: Mapping[str, Any]) -> str:
    """Why no bound is printed for a tier: none of its requests starved, or the order and its settings promise none."""
    is_promised = any(row["tier"] == tier["tier"] and row["pause_bound_seconds"] for row in report["data"])
    return "never starved" if is_promised else "no bound"


def missing_samples(report: Report) -> list[str]:
    """Sentences on what the report does not know of its period; none when it knows all."""
    notes = []
    deleted, by_hour = report.get("samples_deleted_before"), report.get("samples_by_the_hour_before")
    if deleted is not None:
        notes.append(
            f"The samples before {deleted} have been deleted: device seconds, shares, promotions and interference "
            "of the time before are missing here. Requests and waits come from the ledger and are complete."
        )
    if by_hour is not None and any(_cuts_an_hour(report[end], by_hour) for end in ("from", "to")):
        notes.append(
            f"Before {by_hour} the samples are kept by the hour (of UTC): an hour that the period cuts counts whole if "
            "it starts in the period, else not at all."
        )
    return notes


def _cuts_an_hour(moment_text: str, by_hour_before: str) -> bool:
    at, edge = (datetime.fromisoformat(text).astimezone(UTC) for text in (moment_text, by_hour_before))
    return at <= edge and at.replace(minute=0, second=0, microsecond=0) != at


def was_short(report: Report, series: Report) -> bool:
    """Was KV memory short in the period: something was moved or dropped, or the lag's bound was at its wide value?"""
    sums = report["totals"]
    return bool(sums["swaps_out"] or sums["recomputes"] or has_wide_bound(series["lag_bound"]))


def has_wide_bound(bounds: Sequence[float | None]) -> bool:
    """Does the lag's bound have its wide value at times? That is twice the narrow one."""
    known = [bound for bound in bounds if bound]
    return bool(known) and max(known) > 1.5 * min(known)


def size(num_bytes: float) -> str:
    """Binary units."""
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:,.1f} {units[0]}"


def moment(text: str | None, zone: tzinfo) -> str:
    """A report's ISO moment, to the minute, in `zone`."""
    if text is None:
        return "–"
    return datetime.fromisoformat(text).astimezone(zone).strftime("%-d %B %Y %H:%M")


def is_broken(measured: float | None, bound: float | None) -> bool:
    """Is there a bound, and is it passed?"""
    return bool(bound) and measured is not None and measured > float(bound or 0)


def mark(measured: float | None, bound: float | None) -> Cell:
    """The verdict on one promise."""
    if measured is None:
        return Cell("– nothing measured", "quiet", is_text=True)
    if not bound:
        return Cell("– no bound", "quiet", is_text=True)
    return Cell("✗ violated", "bad", is_text=True) if measured > bound else Cell("✓ ok", "good", is_text=True)


def tier_order(report: Report) -> list[str]:
    """The tiers of a report, the weightiest first."""
    weights = {row["tier"]: row["weight"] for row in report["data"]}
    names = {row["tier"] for part in ("tiers", "size_classes") for row in report[part]}
    return sorted(names, key=lambda name: (-weights.get(name, 0), name))


def shown_teams(report: Report) -> list[str]:
    """The teams with a colour of their own: those with the most device seconds, in the report's order."""
    if len(report["data"]) <= svg.NUM_COLOURS:
        return [row["team"] for row in report["data"]]
    largest = sorted(report["data"], key=lambda row: (-row["device_seconds"], str(row["team"])))[: svg.NUM_COLOURS - 1]
    names = {row["team"] for row in largest}
    return [row["team"] for row in report["data"] if row["team"] in names]


def tone(team: str, teams: Sequence[str]) -> str:
    """The colour class of a team, the same in every figure of a page."""
    return svg.colour(list(teams).index(team)) if team in teams else svg.colour(-1)


def sum_of(rows: Rows, name: str) -> int:
    return sum(row[name] or 0 for row in rows)


def alt(what: str, bars: Sequence[svg.Bar]) -> str:
    return f"{what}. " + ("; ".join(f"{bar.label}: {bar.text}" for bar in bars) or "Nothing to show") + "."

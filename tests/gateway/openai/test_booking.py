"""What the engine says, as the rows it is booked in: every field of a message has its column, or a reason."""

from dataclasses import fields

import msgspec

from engine.wire.messages import Finished, Interference, ServiceSamples, TeamSample
from gateway.link.client import RequestStream
from gateway.openai.booking import Ending, ledger_row, sample_rows
from tenants.rows import InterferenceRow, ServiceSampleRow, StepSampleRow
from tests.support.tenants.stores import open_entry

AT_US = 1_780_000_000_000_000


def numbered(kind: type, start: int, **given: object) -> dict[str, object]:
    """A different number for each numeric field."""
    names = [field.name for field in msgspec.inspect.type_info(kind).fields if field.name not in given]
    return {name: start + i for i, name in enumerate(names)} | given


def test_samples_become_rows_field_by_field() -> None:
    team = numbered(TeamSample, 100, waiting_levels=(1, 2))
    pair = numbered(Interference, 200)
    whole = {"interval_ms": 1000, "lag_bound_us": 7.5, "stall_us": 8, "replayed_tokens": 9}
    samples = ServiceSamples(teams=(TeamSample(**team),), interference=(Interference(**pair),), **whole)
    service, interference, step = sample_rows(samples, AT_US)
    assert isinstance(service, ServiceSampleRow)
    del team["waiting_levels"]
    common = {"at_us": AT_US, "interval_ms": 1000}
    assert {field.name: getattr(service, field.name) for field in fields(service)} == team | common | {
        "lag_bound_us": 7.5
    }
    assert isinstance(interference, InterferenceRow)
    assert {field.name: getattr(interference, field.name) for field in fields(interference)} == pair | {"at_us": AT_US}
    assert step == StepSampleRow(**common, stall_us=8, replayed_tokens=9)


def test_samples_without_teams_still_say_that_the_device_stood_still() -> None:
    (step,) = sample_rows(ServiceSamples(interval_ms=900, teams=(), stall_us=5), AT_US)
    assert step == StepSampleRow(at_us=AT_US, interval_ms=900, stall_us=5)


def test_the_engines_figures_of_an_end_are_the_rows() -> None:
    entry = open_entry("r")
    figures = numbered(Finished, 10, request_id="r", reason="length", message="", level_path=(0, 1, 3))
    stream = RequestStream("r")
    stream.push([1, 2], 1, 0)
    stream.finished = Finished(**figures)
    row = ledger_row(entry, stream, Ending("ok", "length"), finished_at_us=AT_US, first_token_at_us=None)
    same = [
        "cached_tokens",
        "output_tokens",
        "device_us",
        "num_preemptions",
        "num_swaps",
        "num_recomputes",
        "num_promotions",
        "work_us",
        "overhead_us",
        "longest_pause_us",
        "pause_bound_us",
    ]
    assert {name: getattr(row, name) for name in same} == {name: getattr(stream.finished, name) for name in same}
    assert row.level_path == "0>1>3"
    assert row.started_at_us == entry.admitted_at_us + stream.finished.queued_us

"""The journal's files: bounded, replayable, never glued together."""

import os
from pathlib import Path

import pytest

from tenants.errors import StoreUnavailable
from tenants.journal import CLOSE_LINE_BYTES, Journal, _line, sync_and_close
from tenants.rows import Progress
from tests.support.tenants.stores import closed_row, open_entry


def journal(directory: Path, *, bytes_max: int = 10**6, segment_bytes: int = 10**6) -> Journal:
    made = Journal(directory, bytes_max=bytes_max, segment_bytes=segment_bytes)
    for _ in made.replay().rows():
        pass
    made.begin()
    return made


def sync(one: Journal) -> None:
    """What the ledger's task does every `journal_fsync_interval`."""
    dirty = one.take_dirty()
    if dirty is not None:
        for fd in dirty[0]:
            sync_and_close(fd)
        one.synced(dirty[1])


def replayed(directory: Path) -> tuple[list[str], list[str], int]:
    """Ids of closed rows and of unfinished requests, and how many lines were damaged."""
    replay = Journal(directory, bytes_max=1, segment_bytes=1).replay()
    closed = [row.request_id for row in replay.rows()]
    return closed, list(replay.unfinished), replay.num_damaged


def test_what_was_written_reads_back(tmp_path: Path) -> None:
    one = journal(tmp_path)
    entries = [open_entry(name, stream=False, model="org/Näme \u2028") for name in ("a", "b")]
    for entry in entries:
        one.append_open(entry)
    row = closed_row(entries[0], outcome="client_closed", error_code=None)
    one.append_close(row)
    one.append_progress(Progress(request_id="b", output_tokens=3, device_us=9, started_at_us=5, level_path="0"))
    replay = Journal(tmp_path, bytes_max=1, segment_bytes=1).replay()
    assert list(replay.rows()) == [row]
    assert replay.unfinished == {"b": entries[1]}
    assert replay.progress["b"].output_tokens == 3
    one.close()


@pytest.mark.parametrize("cut", [1, 10, 100, 300])
def test_a_torn_last_line_is_left_out_and_the_rest_stays(tmp_path: Path, cut: int) -> None:
    one = journal(tmp_path)
    for name in ("a", "b"):
        one.append_open(open_entry(name))
    one.append_close(closed_row(open_entry("a")))
    (path,) = one.segments()
    os.truncate(path, path.stat().st_size - cut)
    assert replayed(tmp_path) == ([], ["a", "b"], 0)
    one.close()


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe\x00",
        b"",
        b"null",
        b"{}",
        b'["close"]',
        b'{"close": 5}',
        b'{"open": {"request_id": "r"}}',
        b'{"weird": {}}',
        b"[" * 100_000,
        b"1" * 100_000,
    ],
)
def test_no_damage_of_a_line_keeps_the_journal_from_being_replayed(tmp_path: Path, damage: bytes) -> None:
    one = journal(tmp_path)
    one.append_open(open_entry("before"))
    one.append_open(open_entry("after"))
    one.close()
    segment = one.segments()[0]
    first, second, end = segment.read_bytes().split(b"\n")
    segment.write_bytes(b"\n".join([first, damage, second, end]))
    assert replayed(tmp_path) == ([], ["before", "after"], 1)


def test_a_damaged_line_is_counted_and_the_others_stay(tmp_path: Path) -> None:
    one = journal(tmp_path)
    for name in ("a", "b", "c"):
        one.append_open(open_entry(name))
    (path,) = one.segments()
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], b'{"open":{"request_id":3}}', b"\x00\x00", b"[]", b"{}", lines[2], b""]))
    assert replayed(tmp_path) == ([], ["a", "c"], 4)
    one.close()


def test_a_long_request_does_not_pin_old_segments(tmp_path: Path) -> None:
    one = journal(tmp_path, segment_bytes=8_000)
    one.append_open(open_entry("long"))
    for i in range(200):
        entry = open_entry(f"r{i}")
        one.append_open(entry)
        one.append_close(closed_row(entry))
        one.committed([entry.request_id])
        sync(one)
        assert len(one.segments()) <= 2
        assert one.num_bytes < 20_000
    assert replayed(tmp_path)[1] == ["long"]
    assert one.segments()[0].stem > "0000000010"  # it has rotated many times
    one.append_close(closed_row(open_entry("long")))
    one.close()


def test_a_segment_stays_until_its_rows_are_committed(tmp_path: Path) -> None:
    one = journal(tmp_path, segment_bytes=3_000)
    entries = [open_entry(f"r{i}") for i in range(10)]
    for entry in entries:
        one.append_open(entry)
    for entry in entries[:9]:
        one.append_close(closed_row(entry))
    many = len(one.segments())
    assert many > 2
    one.committed([entry.request_id for entry in entries[:9]])
    assert len(one.segments()) == many  # the carried open of r9 may not be on disk yet
    sync(one)
    assert len(one.segments()) == 1
    assert replayed(tmp_path)[1] == ["r9"]
    one.close()


def test_when_every_close_is_as_long_as_can_be_they_all_fit(tmp_path: Path) -> None:
    """An open keeps room for its own close too, and not only for those of the requests before it."""
    bytes_max = 50_000
    for spare in range(0, CLOSE_LINE_BYTES, 97):  # wherever the limit cuts
        one = journal(tmp_path / str(spare), bytes_max=bytes_max + spare)
        admitted = []
        with pytest.raises(StoreUnavailable):
            for i in range(10_000):
                one.append_open(open_entry(f"r{i}"))
                admitted.append(f"r{i}")
        for name in admitted:
            row = closed_row(open_entry(name), level_path="")
            padding = CLOSE_LINE_BYTES - len(_line("close", row))
            one.append_close(closed_row(open_entry(name), level_path="x" * padding))
        assert one.num_bytes <= bytes_max + spare
        one.close()


def test_when_a_segment_is_full_it_is_synced_before_the_next(tmp_path: Path) -> None:
    """Its closes are acknowledged: they must outlive a power failure like those of the present segment."""
    one = journal(tmp_path, segment_bytes=2_000)
    one.append_open(open_entry("a"))
    (first,) = one.segments()
    while len(one.segments()) == 1:
        one.append_open(open_entry(f"r{one.num_open}"))
    dirty = one.take_dirty()
    assert dirty is not None
    inodes = [os.fstat(fd).st_ino for fd in dirty[0]]
    assert inodes == [path.stat().st_ino for path in one.segments()] and inodes[0] == first.stat().st_ino
    one.unsynced(dirty[0])  # a stop came in between: they are synced as the journal closes
    again = one.take_dirty()
    assert again is not None and [os.fstat(fd).st_ino for fd in again[0]] == inodes
    for fd in again[0]:
        sync_and_close(fd)
    one.synced(again[1])
    one.close()


def test_an_idle_journal_is_empty(tmp_path: Path) -> None:
    one = journal(tmp_path)
    for i in range(50):
        entry = open_entry(f"r{i}")
        one.append_open(entry)
        one.append_close(closed_row(entry))
        assert one.num_bytes > 0
        one.committed([entry.request_id])
        assert one.num_bytes == 0
        assert [path.stat().st_size for path in one.segments()] == [0]
    one.append_open(open_entry("next"))
    assert replayed(tmp_path) == ([], ["next"], 0)  # the line stands at the start, no hole before it
    one.append_close(closed_row(open_entry("next")))
    one.committed(["next"])
    one.close()
    assert one.segments() == []


@pytest.mark.case("D02")
def test_what_was_admitted_can_always_be_booked(tmp_path: Path) -> None:
    one = journal(tmp_path, bytes_max=50_000)
    admitted = []
    with pytest.raises(StoreUnavailable, match="full"):
        for i in range(10_000):
            one.append_open(open_entry(f"r{i}"))
            admitted.append(f"r{i}")
    assert len(admitted) > 10
    assert not one.has_room
    for name in admitted:
        one.append_close(closed_row(open_entry(name), level_path=">".join(map(str, range(50)))))
    assert one.num_bytes <= 50_000
    assert replayed(tmp_path)[0] == admitted
    one.committed(admitted)
    sync(one)
    assert one.has_room
    one.append_open(open_entry("after"))
    one.close()


def test_a_close_line_fits_the_room_kept_for_it() -> None:
    entry = open_entry("r" * 128, project="p" * 63, team="t" * 63, tier="g" * 63, model="m" * 255, endpoint="e" * 64)
    row = closed_row(entry, level_path=">".join(["7"] * 100), error_code="c" * 64, finish_reason="f" * 16)
    assert len(_line("close", row)) <= CLOSE_LINE_BYTES


@pytest.mark.case("D02")
def test_a_full_disk_refuses_the_line_and_leaves_no_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = journal(tmp_path)
    one.append_open(open_entry("a"))
    really = os.write

    def half(fd: int, data: bytes) -> int:
        return really(fd, data[: len(data) // 2])

    monkeypatch.setattr("tenants.journal.os.write", half)
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        one.append_open(open_entry("b"))
    monkeypatch.undo()
    assert one.probe()
    one.append_open(open_entry("c"))
    assert replayed(tmp_path) == ([], ["a", "c"], 0)
    assert one.num_open == 2
    one.close()


def test_no_new_segment_means_going_on_with_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = journal(tmp_path, segment_bytes=2_000)

    def no_space(path: Path) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tenants.journal._create", no_space)
    for i in range(20):
        one.append_open(open_entry(f"r{i}"))
    assert len(one.segments()) == 1
    assert len(replayed(tmp_path)[1]) == 20
    one.close()


def test_the_same_id_cannot_be_open_twice(tmp_path: Path) -> None:
    one = journal(tmp_path)
    one.append_open(open_entry("a"))
    with pytest.raises(AssertionError, match="already open"):
        one.append_open(open_entry("a"))
    one.close()


def test_a_directory_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file")
    with pytest.raises(StoreUnavailable, match="journal"):
        Journal(tmp_path / "journal", bytes_max=1, segment_bytes=1).replay()

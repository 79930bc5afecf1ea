"""Limits held and given back, on a clock moved by hand."""

import asyncio
import random

import pytest

from tenants.errors import LimitExceeded
from tenants.leases import WINDOW_SECONDS, Leases, RollingWindow
from tests.support.tenants.stores import Clock, identity


def admit(leases: Leases, who: object, tokens: int = 0) -> bool:
    """Reserve and settle at once with nothing used beyond the reservation; False when refused."""
    try:
        reservation = leases.reserve_request(who)  # type: ignore[arg-type]
        leases.reserve_tokens(reservation, tokens)
    except LimitExceeded:
        return False
    leases.settle(reservation, tokens)
    return True


@pytest.mark.anyio
@pytest.mark.case("G01")
async def test_fifty_concurrent_callers_share_one_unit() -> None:
    leases = Leases(Clock())
    who = identity(tokens_per_minute=1)
    refused: list[LimitExceeded] = []

    async def call() -> int:
        await asyncio.sleep(0)
        reservation = leases.reserve_request(who)
        await asyncio.sleep(0)
        try:
            leases.reserve_tokens(reservation, 1)
        except LimitExceeded as error:
            refused.append(error)
            return 0
        await asyncio.sleep(0)
        leases.settle(reservation, 1)
        return 1

    admitted = await asyncio.gather(*(call() for _ in range(50)))
    assert sum(admitted) == 1
    assert len(refused) == 49
    assert {error.code for error in refused} == {"tokens"}
    assert leases.outstanding() == 0


@pytest.mark.case("G06")
def test_a_call_refused_for_want_of_a_slot_leaves_the_minute_alone() -> None:
    leases = Leases(Clock())
    who = identity(requests_per_minute=2, concurrent=1)
    first = leases.reserve_request(who)
    with pytest.raises(LimitExceeded) as refused:
        leases.reserve_request(who)
    assert (refused.value.code, refused.value.hard, refused.value.used) == ("concurrent_limit", 1, 1)
    leases.settle(first, 0)
    leases.reserve_request(who)


@pytest.mark.case("G06")
def test_a_call_refused_for_its_tokens_gives_back_request_and_slot() -> None:
    leases = Leases(Clock())
    who = identity(requests_per_minute=1, concurrent=1, tokens_per_minute=100)
    reservation = leases.reserve_request(who)
    with pytest.raises(LimitExceeded) as refused:
        leases.reserve_tokens(reservation, 101)
    assert refused.value.never_fits
    assert leases.outstanding() == 0
    assert leases.view(who).requests.remaining == 1
    leases.reserve_tokens(leases.reserve_request(who), 100)


@pytest.mark.case("B06")
def test_refused_calls_use_up_nothing() -> None:
    leases = Leases(Clock())
    who = identity(requests_per_minute=10, tokens_per_minute=100)
    results = [admit(leases, who, 1) for _ in range(200)]
    assert (results.count(True), results.count(False)) == (10, 190)
    assert leases.view(who).tokens.remaining == 90
    totals = leases.totals(1)
    assert (totals.settled_requests, totals.settled_tokens, totals.released_requests) == (10, 10, 0)


@pytest.mark.case("G25")
@pytest.mark.parametrize("seed", range(5))
def test_no_rolling_minute_holds_more_than_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    clock = Clock()
    leases = Leases(clock)
    who = identity(requests_per_minute=100)
    admitted: list[float] = []
    for _ in range(3_000):
        # bursts at a boundary second, then gaps of any size
        clock.now += rng.choice([0.0, 0.0, 0.0, 0.001, 0.01, 0.5, 7.0])
        if admit(leases, who):
            admitted.append(clock.now)
    assert len(admitted) > 1_000
    for i, at in enumerate(admitted):
        within = sum(1 for other in admitted[i:] if other < at + WINDOW_SECONDS)
        assert within <= 100


@pytest.mark.case("G25")
def test_a_thousand_at_the_boundary_second_admit_the_limit_once() -> None:
    clock = Clock()
    leases = Leases(clock)
    who = identity(requests_per_minute=100)
    clock.now = 1019.9  # 0.1 s before a minute of its own ends
    before = sum(admit(leases, who) for _ in range(500))
    clock.now = 1020.0
    after = sum(admit(leases, who) for _ in range(500))
    assert (before, after) == (100, 0)
    clock.now = 1019.9 + 60
    assert sum(admit(leases, who) for _ in range(500)) == 100


def test_a_refusal_says_when_the_next_one_fits() -> None:
    clock = Clock()
    leases = Leases(clock)
    who = identity(requests_per_minute=2)
    admit(leases, who)
    clock.now += 10
    admit(leases, who)
    clock.now += 5
    with pytest.raises(LimitExceeded) as refused:
        leases.reserve_request(who)
    assert refused.value.retry_after_seconds == pytest.approx(45)
    clock.now += refused.value.retry_after_seconds
    assert admit(leases, who)
    assert not admit(leases, who)


@pytest.mark.case("G12", "G48")
def test_what_remains_falls_by_the_tokens_really_used() -> None:
    clock = Clock()
    leases = Leases(clock)
    who = identity(tokens_per_minute=1000)
    seen = []
    for used in (150, 200):
        reservation = leases.reserve_request(who)
        leases.reserve_tokens(reservation, 400)
        leases.settle(reservation, used)
        seen.append(leases.view(who).tokens.remaining)
        clock.now += 1
    assert seen == [850, 650]
    assert leases.view(who).tokens.reset_seconds == pytest.approx(59)


def test_while_a_request_runs_its_whole_reservation_counts() -> None:
    leases = Leases(Clock())
    who = identity(tokens_per_minute=1000)
    reservation = leases.reserve_request(who)
    leases.reserve_tokens(reservation, 900)
    assert leases.view(who).tokens.remaining == 100
    assert not admit(leases, who, 101)
    leases.settle(reservation, 10)
    assert admit(leases, who, 990)


@pytest.mark.case("G20")
def test_zero_denies_and_none_does_not_limit() -> None:
    for name in ("requests_per_minute", "tokens_per_minute", "concurrent"):
        assert not admit(Leases(Clock()), identity(**{name: 0}), 1)
    leases = Leases(Clock())
    assert all(admit(leases, identity(), 10**6) for _ in range(1_000))
    assert leases.view(identity()).requests.limit is None


@pytest.mark.case("B03", "B16")
def test_a_negative_number_never_gives_quota_back() -> None:
    leases = Leases(Clock())
    who = identity(tokens_per_minute=100)
    reservation = leases.reserve_request(who)
    with pytest.raises(AssertionError):
        leases.reserve_tokens(reservation, -5)
    leases.reserve_tokens(reservation, 60)
    with pytest.raises(ValueError, match="-1000000"):
        leases.settle(reservation, -1_000_000)
    assert leases.view(who).tokens.remaining == 40
    leases.settle(reservation, 0)
    assert leases.view(who).tokens.remaining == 100


def test_more_than_was_reserved_is_a_debt() -> None:
    leases = Leases(Clock())
    who = identity(tokens_per_minute=100)
    reservation = leases.reserve_request(who)
    leases.reserve_tokens(reservation, 50)
    leases.settle(reservation, 130)
    assert leases.view(who).tokens.remaining == 0
    assert not admit(leases, who, 1)
    assert leases.totals(1).is_balanced


def test_a_reservation_ends_exactly_once() -> None:
    leases = Leases(Clock())
    reservation = leases.reserve_request(identity())
    leases.reserve_tokens(reservation, 5)
    with pytest.raises(AssertionError, match="already holds"):
        leases.reserve_tokens(reservation, 5)
    leases.settle(reservation, 5)
    for end in (lambda: leases.settle(reservation, 5), lambda: leases.release(reservation)):
        with pytest.raises(AssertionError, match="already ended"):
            end()
    assert leases.totals(1).settled_tokens == 5


@pytest.mark.anyio
@pytest.mark.parametrize("steps", range(5))
async def test_whatever_await_a_request_is_cancelled_at_nothing_stays_held(steps: int) -> None:
    leases = Leases(Clock())
    who = identity(concurrent=1, requests_per_minute=10, tokens_per_minute=100)

    async def handle() -> None:
        reservation = leases.reserve_request(who)
        has_run = False
        try:
            await asyncio.sleep(0)  # the body
            leases.reserve_tokens(reservation, 50)
            await asyncio.sleep(0)  # submitted
            has_run = True
            await asyncio.get_running_loop().create_future()  # a hanging engine
        finally:
            if has_run:
                leases.settle(reservation, 20)
            else:
                leases.release(reservation)

    task = asyncio.create_task(handle())
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert leases.outstanding() == 0
    assert leases.totals(1).is_balanced
    leases.reserve_request(who)


@pytest.mark.case("G22")
def test_six_requests_one_after_the_other_pass_a_limit_of_five() -> None:
    leases = Leases(Clock())
    who = identity(concurrent=5)
    for end in ("settle", "release") * 3:
        reservation = leases.reserve_request(who)
        leases.reserve_tokens(reservation, 10)
        if end == "settle":
            leases.settle(reservation, 10)
        else:
            leases.release(reservation)
    held = [leases.reserve_request(who) for _ in range(5)]
    assert leases.outstanding(1) == len(held) == 5


@pytest.mark.case("G62")
def test_a_silent_request_is_still_held_after_ten_minutes() -> None:
    clock = Clock()
    leases = Leases(clock)
    who = identity(concurrent=1, requests_per_minute=5)
    reservation = leases.reserve_request(who)
    leases.reserve_tokens(reservation, 10)
    clock.now += 600
    assert leases.outstanding() == 1
    assert not admit(leases, who)
    leases.settle(reservation, 3)  # its minute is long over: nothing to correct
    assert leases.totals(1).is_balanced
    assert leases.view(who).requests.remaining == 5


@pytest.mark.case("B12")
def test_the_wall_clock_plays_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    leases = Leases(clock)
    who = identity(requests_per_minute=4)
    for step in (0.0, -11.0, -86_400.0, 86_400.0):
        monkeypatch.setattr("time.time", lambda step=step: 1.8e9 + step)
        monkeypatch.setattr("time.time_ns", lambda step=step: int((1.8e9 + step) * 1e9))
        clock.now += 1
        assert admit(leases, who)  # neither a step back nor one forward refuses or refills
    with pytest.raises(LimitExceeded) as refused:
        leases.reserve_request(who)
    assert refused.value.retry_after_seconds == pytest.approx(57)


@pytest.mark.case("G66")
def test_many_keys_of_one_team_share_its_limits_and_its_state() -> None:
    from dataclasses import replace

    leases = Leases(Clock())
    who = identity(requests_per_minute=3)
    results = [admit(leases, replace(who, key_id=i, key_public_id=f"{i:012d}")) for i in range(1_000)]
    assert results.count(True) == 3
    assert len(leases._teams) == 1


def test_teams_do_not_share() -> None:
    leases = Leases(Clock())
    assert admit(leases, identity(1, requests_per_minute=1))
    assert admit(leases, identity(2, requests_per_minute=1))
    assert not admit(leases, identity(1, requests_per_minute=1))


def test_a_restart_is_not_a_fresh_minute() -> None:
    clock = Clock()
    leases = Leases(clock)
    leases.seed([(1, 59.0, 100), (1, 10.0, 300), (1, 60.0, 999), (2, 1.0, 5)])
    who = identity(requests_per_minute=3, tokens_per_minute=1000)
    view = leases.view(who)
    assert (view.requests.remaining, view.tokens.remaining) == (1, 600)
    assert leases.outstanding() == 0
    clock.now += 1.5
    assert leases.view(who).tokens.remaining == 700
    assert leases.totals(1).is_balanced


def test_a_limit_set_late_counts_what_was_admitted_before() -> None:
    leases = Leases(Clock())
    for _ in range(5):
        admit(leases, identity())
    assert not admit(leases, identity(requests_per_minute=5))
    assert leases.view(identity(requests_per_minute=3)).requests.remaining == 0


def test_a_window_is_bounded_whatever_the_rate() -> None:
    window = RollingWindow()
    now = 0.0
    for _ in range(200_000):
        now += 0.0007
        window.add(1, now)
        window.sum(now)
    assert len(window._entries) <= 6_001
    assert window.sum(now) >= 60 / 0.0007 - 1  # never less than exact counting


def test_when_nothing_counts_the_minute_is_free_at_once() -> None:
    """A request that was given back, or used nothing, leaves an entry that holds nothing."""
    clock = Clock()
    leases, who = Leases(clock), identity(requests_per_minute=10, tokens_per_minute=100)

    def resets() -> tuple[float | None, float | None]:
        view = leases.view(who)
        return view.requests.reset_seconds, view.tokens.reset_seconds

    for end in ("release", "settle"):
        reservation = leases.reserve_request(who)
        leases.reserve_tokens(reservation, 50)
        assert resets() == (60.0, 60.0)
        leases.release(reservation) if end == "release" else leases.settle(reservation, 0)
        assert resets() == ((0.0, 0.0) if end == "release" else (60.0, 0.0))
    clock.now += 20
    used = leases.reserve_request(who)
    leases.reserve_tokens(used, 50)
    leases.settle(used, 7)
    clock.now += 10
    given_back = leases.reserve_request(who)
    leases.reserve_tokens(given_back, 50)
    leases.release(given_back)
    assert resets() == (50.0, 50.0), "that of the older one, which counts"


def test_when_a_request_takes_the_whole_minute_it_fits_later() -> None:
    clock = Clock()
    leases, who = Leases(clock), identity(tokens_per_minute=100)
    assert admit(leases, who, 40)
    reservation = leases.reserve_request(who)
    with pytest.raises(LimitExceeded) as refused:
        leases.reserve_tokens(reservation, 100)
    assert not refused.value.never_fits, "waiting helps"
    assert refused.value.retry_after_seconds == 60.0
    clock.now += 60
    assert admit(leases, who, 100)
    reservation = leases.reserve_request(who)
    with pytest.raises(LimitExceeded) as refused:
        leases.reserve_tokens(reservation, 101)
    assert refused.value.never_fits

"""The clients of `engine.sim.clients`: when they send and leave, and what is counted for whom."""

import pytest

from engine.config import EngineConfig
from engine.sim.clients import Ask, Client, Contest, Loop, NoProgress, Open, Tally, at_once, every, percentile
from policies.cost import StepProfile
from policies.tiers import Tier

# A step takes 1 ms, and 1 ms more for each token of prompt and each decode row.
PROFILE = StepProfile(
    fixed_us=1000.0, prefill_token_us=1000.0, prefill_attention_us=0.0, decode_row_us=1000.0, decode_context_us=0.0
)
TIER = Tier("plain", weight=1, start_level=0, starving_after_ms=1000, promotion_burst_grants=4, max_queue_seconds=60)
MS = 1000


def contest(*clients: Client, **settings: int) -> Contest:
    teams = dict.fromkeys((client.team for client in clients), TIER)
    return Contest(teams, clients, profile=PROFILE, config=EngineConfig(kind="sim", **settings))


def play(*clients: Client, until_ms: int | None = None, from_ms: int = 0) -> dict[str, Tally]:
    return contest(*clients).run(None if until_ms is None else until_ms * MS, from_us=from_ms * MS)


def sent_ms(tally: Tally) -> list[float]:
    return [record.sent_us / MS for record in tally.records]


def test_when_an_answer_ends_its_stream_sends_the_next() -> None:
    """One request takes a prompt step of 3 ms and a decode step of 2 ms."""
    tally = play(Loop("a", Ask(2, 2), 1, from_us=4 * MS, think_us=1 * MS), until_ms=20)["a"]
    assert sent_ms(tally) == [4, 10, 16]
    assert tally.jcts_us() == [5 * MS] * 3 and tally.ttfts_us() == [3 * MS, 3 * MS, 3 * MS]


def test_when_a_client_leaves_its_request_ends_at_the_next_step() -> None:
    """Steps end at 3, 5, 7, 9, ... ms; the client leaves at 6."""
    tally = play(at_once("a", 1, Ask(2, 100, leave_after_us=6 * MS)))["a"]
    (record,) = tally.records
    assert record.finished is not None and record.finished.reason == "abort"
    assert record.ended_us == 7 * MS and record.output_tokens == 3 and record.jct_us is None


def test_when_a_client_leaves_in_time_or_late_both_are_counted() -> None:
    tallies = play(
        Open("a", [(0, Ask(2, 1, leave_after_us=10 * MS)), (40 * MS, Ask(2, 1, leave_after_us=0))]),
        Open("b", [(100 * MS, Ask(2, 1))]),
    )
    assert [record.finished and record.finished.reason for record in tallies["a"].records] == ["length", "abort"]
    assert tallies["b"].jcts_us() == [3 * MS], "the clock has skipped what lay between"


def test_when_requests_come_periodically_they_stop_in_time() -> None:
    burst = every("a", 50 * MS, Ask(1, 1), num=2, from_us=10 * MS, to_us=110 * MS)
    tally = play(burst)["a"]
    assert sent_ms(tally) == [10, 10, 60, 60]
    assert sent_ms(play(burst)["a"]) == sent_ms(tally), "a client can be played again"


def test_when_a_window_is_given_only_its_steps_count() -> None:
    """Tokens come at 3, 5, 7, 9, 11 ms; a step counts where it ends, the window's end excluded."""
    tally = play(at_once("a", 1, Ask(2, 5)), from_ms=5, until_ms=11)["a"]
    assert tally.token_times_us == [5 * MS, 7 * MS, 9 * MS]
    assert tally.device_us == 6 * MS and tally.output_tokens == 3 and tally.prompt_tokens == 0
    assert tally.gaps_us == [2 * MS] * 3


def test_when_prompts_are_cut_or_left_their_tokens_count_once() -> None:
    tallies = contest(
        at_once("a", 3, Ask(500, 1)), at_once("b", 1, Ask(40, 3, leave_after_us=90 * MS)), max_batch_tokens=64
    ).run()
    assert tallies["a"].prompt_tokens == 1500
    assert tallies["b"].prompt_tokens == 40
    assert sum(record.prompt_tokens for record in tallies["a"].records) == 1500


def test_when_kv_is_computed_again_its_tokens_count_once() -> None:
    """Two answers outgrow the pool, and there is no host pool to move one to."""
    blocks = 8
    tight = contest(
        at_once("a", 2, Ask(30, 60)),
        kv_memory_bytes=blocks * 16 * 23_040,
        host_kv_memory_bytes=0,
        memory_preemption="recompute",
    )
    tally = tight.run()["a"]
    assert sum(r.finished.num_recomputes for r in tally.records if r.finished) > 0
    assert tally.prompt_tokens == 60 and tally.output_tokens == 120


def test_when_all_is_over_the_charges_are_the_time_of_the_steps() -> None:
    tallies = play(at_once("a", 3, Ask(50, 9)), Loop("b", Ask(7, 5), 2), until_ms=2000)
    charged_us = sum(tally.device_us for tally in tallies.values())
    assert abs(charged_us - 2000 * MS) <= 100 * MS
    for tally in tallies.values():
        assert abs(tally.device_us - tally.served_us) <= 100 * MS
        assert all(record.finished is None or record.finished.device_us == record.device_us for record in tally.records)


def test_when_a_team_has_ended_the_run_can_end_with_it() -> None:
    made = contest(at_once("a", 1, Ask(2, 2)), at_once("b", 1, Ask(2, 500)))
    tallies = made.run(until_ended="a")
    assert tallies["a"].jcts_us() and tallies["b"].num_unanswered == 0 and not tallies["b"].jcts_us()


def test_when_a_request_is_refused_it_is_counted() -> None:
    tally = play(at_once("a", 1, Ask(9000, 1)), at_once("a", 1, Ask(2, 1)))["a"]
    assert tally.num_refused == 1 and len(tally.records) == 1


def test_when_nothing_can_ever_run_it_says_so() -> None:
    made = contest(at_once("a", 1, Ask(2, 2)))
    made.core.scheduler.schedule = lambda now_us: None  # type: ignore[method-assign]
    with pytest.raises(NoProgress, match="nothing can run for a"):
        made.run()


def test_when_played_twice_the_figures_are_the_same() -> None:
    def figures() -> list[tuple[int, int, int]]:
        tallies = play(Loop("a", Ask(30, 20), 5), every("b", 40 * MS, Ask(100, 3, 90 * MS)), until_ms=3000)
        return [(t.device_us, t.tokens, sum(t.gaps_us)) for t in tallies.values()]

    assert figures() == figures()


def test_when_a_percentile_is_asked_it_is_by_nearest_rank() -> None:
    assert [percentile([1, 2, 3, 4], percent) for percent in (0, 25, 50, 51, 100)] == [1, 1, 2, 3, 4]
    assert percentile([], 50) == 0

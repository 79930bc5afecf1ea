"""Fairness in time: what each team gets of the device's seconds, on the production scheduler and a virtual clock.

The unit of fairness is a second of device time, charged; step times are those of the shipped profile (a decode step of
one row 11 ms, a prompt of 4,000 tokens 8 s). Limits are those of the plan's oracles O18 to O24. The control of most of
them is FCFS or the load without its rival, and is in `test_when_first_come_is_served_first_the_oracles_fail`.
"""

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product

import pytest

from benchmarks.attacks import ATTACKS, DEVICE_LIMIT, KV_MEMORY, SLOTS, TOKENS_LIMIT, Loss, measure, setting_for
from benchmarks.long_prompts import play, t1, t2, t3
from engine.config import EngineConfig
from engine.sim.clients import SECOND_US, Ask, Client, Contest, Loop, Tally, at_once, every, percentile
from engine.sim.parts import fixed_profile
from policies.tiers import DEFAULT_TIERS
from tests.support.policies.driver import UNIT, Driver, config

MIB = 2**20
TIERS = {tier.name: tier for tier in DEFAULT_TIERS}
SILVER = TIERS["silver"]


def contest(clients: list[Client], *, tiers: dict[str, str] | None = None, **settings: int) -> Contest:
    """Teams are silver unless `tiers` says otherwise."""
    names = dict.fromkeys(client.team for client in clients)
    teams = {name: TIERS[(tiers or {}).get(name, "silver")] for name in names}
    return Contest(teams, clients, profile=fixed_profile(), config=EngineConfig(kind="sim", **settings))


def seconds(us: float) -> float:
    return us / SECOND_US


# -- O18: chat streams beside long prompts ----------------------------------------------------------------------------

DOCS_COME_US = 3 * SECOND_US
ALONE_US = 20 * SECOND_US  # how long chat's rate alone is measured
SHARE = 0.5
RATE_LEAST = 0.95 * SHARE


@lru_cache
def tokens_alone(streams: int, budget: int, slots: int) -> int:
    """Chat's output tokens in the time that is measured."""
    chat = at_once("chat", streams, Ask(200, 4000))
    alone = contest([chat], max_batch_size=slots, max_batch_tokens=budget)
    return alone.run(DOCS_COME_US + ALONE_US, from_us=DOCS_COME_US)["chat"].output_tokens


def relative_rate(streams: int, prompt: int, budget: int, slots: int) -> float:
    """Chat's tokens a second beside a team that always has 24 prompts inside, over its rate alone.

    Measured for as long as chat may take for the tokens that it had alone, so that contexts are alike.
    """
    with_docs_us = round(ALONE_US / RATE_LEAST)
    clients = [at_once("chat", streams, Ask(200, 4000)), Loop("docs", Ask(prompt, 1), 24, from_us=DOCS_COME_US)]
    both = contest(clients, max_batch_size=slots, max_batch_tokens=budget)
    tokens = both.run(DOCS_COME_US + with_docs_us, from_us=DOCS_COME_US)["chat"].output_tokens
    return (tokens / with_docs_us) / (tokens_alone(streams, budget, slots) / ALONE_US)


@pytest.mark.case("O18")
def test_when_long_prompts_come_chat_takes_at_most_twice_as_long() -> None:
    alone, beside = (play(t1(with_docs=with_docs)).jcts_us() for with_docs in (False, True))
    assert len(alone) == len(beside) == 8
    assert sum(beside) <= 2.0 * sum(alone)


@pytest.mark.case("O18")
@pytest.mark.parametrize(
    ("streams", "prompt", "budget", "slots"),
    [(8, 4000, 2048, 64), (1, 8000, 2048, 64), (16, 256, 256, 64), (4, 1000, 512, 16), (16, 8000, 2048, 16)],
)
def test_when_a_team_sends_prompts_chat_keeps_its_half(streams: int, prompt: int, budget: int, slots: int) -> None:
    assert relative_rate(streams, prompt, budget, slots) >= RATE_LEAST


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.case("O18")
@pytest.mark.parametrize("slots", [16, 64])
def test_when_any_prompts_meet_any_streams_chat_keeps_its_half(slots: int) -> None:
    grid = product((1, 4, 16), (256, 1000, 4000, 8000), (256, 512, 1024, 2048))
    rates = {(*cell, slots): relative_rate(*cell, slots) for cell in grid}
    assert {cell: round(rate, 3) for cell, rate in rates.items() if rate < RATE_LEAST} == {}


# -- O19: a short question beside prompts that fill the context -------------------------------------------------------


@pytest.mark.case("O19")
@pytest.mark.parametrize("kv_memory_bytes", [1440 * MIB, None], ids=["1440MiB", "default"])
@pytest.mark.parametrize(
    ("prompt", "docs_teams", "p50_s", "max_s"),
    [(100, 1, 1.0, 2.5), (300, 1, 1.5, 4.0), (100, 5, 1.0, None), (300, 5, 10.0, None)],
)
def test_when_prompts_fill_the_context_a_question_starts_soon(
    prompt: int, docs_teams: int, p50_s: float, max_s: float | None, kv_memory_bytes: int | None
) -> None:
    ttfts_us = play(t2(prompt, docs_teams, kv_memory_bytes)).ttfts_us()
    assert len(ttfts_us) == 60
    assert seconds(percentile(ttfts_us, 50)) <= p50_s
    assert max_s is None or seconds(ttfts_us[-1]) <= max_s


# -- O20: short questions behind long answers of their own team -------------------------------------------------------


@pytest.mark.case("O20")
@pytest.mark.parametrize("coast", [True, False])
def test_when_a_team_sends_both_its_short_ones_pass(coast: bool) -> None:
    ttfts_us = play(t3(coast=coast)).ttfts_us()
    assert len(ttfts_us) == 600
    assert seconds(percentile(ttfts_us, 95)) <= 0.3


# -- O21: a team with one connection ----------------------------------------------------------------------------------


def one_beside_fifty(slots: int, tiers: tuple[str, str], answer: int, others: Ask | None = None) -> Tally:
    """What a team gets that sends one request after the other, beside fifty keys of another."""
    clients: list[Client] = [Loop("one", Ask(20, answer), 1), Loop("keys", others or Ask(20, answer), 50)]
    made = contest(clients, tiers=dict(zip(("one", "keys"), tiers, strict=True)), max_batch_size=slots)
    return made.run(65 * SECOND_US, from_us=5 * SECOND_US)["one"]


EQUAL, UNEQUAL = ("silver", "silver"), ("gold", "bronze")


@pytest.mark.case("O21")
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("tiers", "answer"), [(EQUAL, 100), (UNEQUAL, 100), (EQUAL, 300)])
def test_when_a_team_has_one_connection_it_is_satisfied(slots: int, tiers: tuple[str, str], answer: int) -> None:
    assert one_beside_fifty(slots, tiers, answer).satisfaction >= 0.95


@pytest.mark.case("O21")
def test_when_the_other_cuts_its_work_small_it_gains_nothing() -> None:
    assert one_beside_fifty(2, EQUAL, 100, others=Ask(20, 10)).satisfaction >= 0.95


@pytest.mark.case("O21")
def test_when_a_team_was_idle_for_two_windows_it_has_no_credit() -> None:
    """A and C are busy. B leaves behind them, is away for two windows of virtual time, and starts level with the least
    served of them."""
    window = 4
    constants = replace(config(theta=0), theta_us=None, fairness_window_us=window * UNIT)
    driver = Driver(constants, {0: 1, 1: 1, 2: 1})
    for team in (0, 2):
        driver.add(team, 0, 1000)
    b = driver.add(1, 0, 50, level=2)
    driver.run(until=5)
    lags = driver.policy.lags()
    assert lags[1] < min(lags[0], lags[2]), "B is behind when it leaves"
    driver.abort(b)
    driver.run(until=driver.now + 2 * window * 2)  # V moves by half a unit in each step: two teams are active
    driver.add(1, 0, 50, level=2)
    lags = driver.policy.lags()
    assert lags[1] == min(lags[0], lags[2])


# -- O22: a grant that cannot run -------------------------------------------------------------------------------------


@pytest.mark.case("O22")
def test_when_a_granted_one_finds_no_blocks_the_next_one_runs() -> None:
    """One slot; a short request each unit; X and Y starve from 10 on, X first in line, and X never finds blocks.

    The bucket holds one grant of 2 units. X is granted at 10 and refused, the grant goes back, and Y has it in the same
    step or the next. The bucket is full again 10 units after Y has used it up. Y's maximum pause is 10 + 2 * 2 / 0.2 +
    (2 + 1) / 0.8 = 33.75 units.
    """
    driver = Driver(config(promotion_percent=20, grant_us=2 * UNIT), {0: 1}, alpha=10, burst=1, has_room=has_room)
    for label in ("X", "Y"):
        driver.add(0, 0, 20, level=2, label=label)
    for unit in range(200):
        driver.at(unit, lambda: driver.add(0, 0, 1, label="short"))
    driver.run(until=100)
    starts = driver.starts("Y")
    assert starts and starts[0] in (10, 11, 12)
    assert max(after - before for before, after in pairwise(starts)) <= 33
    assert len(starts) >= 12, "a fifth of the device's time, from 10 on, less what the last burst waits for"


def has_room(job: object) -> bool:
    return getattr(job, "label", "") != "X"


# -- O23: a pool of about one context ---------------------------------------------------------------------------------


@pytest.mark.case("O23")
@pytest.mark.parametrize("host_mib", [4096, 0])
def test_when_one_answer_holds_the_pool_chat_still_starts(host_mib: int) -> None:
    chat = every("chat", 15 * SECOND_US, Ask(2000, 20), from_us=40 * SECOND_US, to_us=130 * SECOND_US)
    clients: list[Client] = [at_once("hog", 1, Ask(4000, 4190)), chat]
    tight = contest(clients, kv_memory_bytes=180 * MIB, host_kv_memory_bytes=host_mib * MIB)
    ttfts_us = tight.run(until_ended="chat")["chat"].ttfts_us()
    assert len(ttfts_us) == 6
    assert seconds(ttfts_us[-1]) <= 10


@pytest.mark.case("O23")
def test_when_a_giant_waits_for_the_whole_pool_chat_still_starts() -> None:
    clients: list[Client] = [
        at_once("batch", 1, Ask(50, 3000)),
        every("chat", SECOND_US, Ask(100, 20), to_us=60 * SECOND_US),
        at_once("giant", 1, Ask(8100, 1), at_us=5 * SECOND_US),
    ]
    ttfts_us = contest(clients, kv_memory_bytes=180 * MIB).run(until_ended="chat")["chat"].ttfts_us()
    assert len(ttfts_us) == 60
    assert seconds(percentile(ttfts_us, 95)) <= 5


# -- O24: attacks -----------------------------------------------------------------------------------------------------

PROMISED = [name for name, attack in ATTACKS.items() if attack.is_promised]
CROWDING = ["full-contexts", "decode-flood"]  # what only strict isolation holds
FAST = [  # attack, honest team, slots, KV memory
    ("split", "streams", 64, "2GiB"),
    ("half-prompts", "streams", 64, "2GiB"),
    ("abandons", "streams", 16, "360MiB"),
    ("promotion-storm", "streams", 16, "2GiB"),
    ("half-prompts", "queue", 64, "360MiB"),
]


def over_limits(losses: list[Loss]) -> dict[str, tuple[float, float]]:
    """Attacks that cost more than the limits: device time and weighed tokens."""
    return {loss.attack: (round(loss.device, 3), round(loss.work, 3)) for loss in losses if not loss.is_within}


@pytest.mark.case("O24")
@pytest.mark.parametrize(("attack", "honest", "slots", "kv_memory"), FAST)
def test_when_a_team_attacks_the_honest_one_keeps_its_part(
    attack: str, honest: str, slots: int, kv_memory: str
) -> None:
    assert over_limits(measure([attack], [setting_for(honest, slots, kv_memory)])) == {}


@pytest.mark.case("O24")
@pytest.mark.parametrize("attack", ["split", "from-bronze"])
def test_when_the_honest_team_queues_small_requests_gain_nothing(attack: str) -> None:
    assert over_limits(measure([attack], [setting_for("queue", 16, "2GiB")])) == {}


EVERYWHERE = list(product(TOKENS_LIMIT, SLOTS, KV_MEMORY))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.case("O24")
@pytest.mark.parametrize(("honest", "slots", "kv_memory"), EVERYWHERE)
def test_when_any_attack_is_tried_the_honest_one_keeps_its_part(honest: str, slots: int, kv_memory: str) -> None:
    assert over_limits(measure(PROMISED, [setting_for(honest, slots, kv_memory)])) == {}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.case("O24")
@pytest.mark.parametrize(("honest", "slots", "kv_memory"), EVERYWHERE)
def test_when_isolation_is_strict_crowding_gains_nothing(honest: str, slots: int, kv_memory: str) -> None:
    strict = setting_for(honest, slots, kv_memory, isolation="strict")
    assert over_limits(measure([*PROMISED, *CROWDING], [strict])) == {}


@pytest.mark.case("O24")
def test_when_isolation_is_strict_a_decode_flood_gains_nothing() -> None:
    strict = setting_for("streams", 64, "2GiB", isolation="strict")
    assert over_limits(measure(["decode-flood"], [strict])) == {}


@pytest.mark.case("O24")
def test_when_a_team_is_four_it_gets_four_shares_and_no_more() -> None:
    """By design; the honest team keeps its fifth, where beside one team it has a half."""
    (loss,) = measure(["four-teams"], [setting_for("streams", 16, "2GiB", seconds=30)])
    assert loss.device <= 2.5 * DEVICE_LIMIT


# -- controls ---------------------------------------------------------------------------------------------------------


@pytest.mark.case("O18", "O19")
def test_when_first_come_is_served_first_the_oracles_fail() -> None:
    alone, beside = (play(t1(with_docs=with_docs), policy="fcfs").jcts_us() for with_docs in (False, True))
    assert sum(beside) > 10 * sum(alone)
    assert seconds(percentile(play(t2(), policy="fcfs").ttfts_us(), 50)) > 50


@pytest.mark.case("O24")
def test_when_first_come_is_served_first_an_attack_pays() -> None:
    (loss,) = measure(["half-prompts"], [setting_for("streams", 64, "2GiB", seconds=20, policy="fcfs")])
    assert loss.device > 1.5 and loss.tokens > 1.5

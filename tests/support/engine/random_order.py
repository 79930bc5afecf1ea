"""A policy that ranks at random, anew in every step: every sequence loses its slot and its blocks again and again."""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence

from policies.sequences import (
    AS_SERVED,
    Overhead,
    SequenceTerms,
    Served,
    Starving,
    StepTime,
    TeamService,
    TeamTerms,
    Turn,
)


class RandomOrder:
    """Keeps to the protocol of `policies.policy`; turns come in the order of the next ranking, far apart (G1 holds)."""

    name = "random-order"

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._live: dict[int, SequenceTerms] = {}
        self._taken: set[int] = set()  # ever
        self._begun: set[int] = set()  # with a token
        self._rank: dict[int, float] = {}
        self._tried: set[int] = set()
        self._away: set[int] = set()

    def configure(self, teams: Iterable[TeamTerms], now_us: int) -> None:
        pass

    def arrive(self, sequence: SequenceTerms, now_us: int) -> int:
        self._live[sequence.seq_id] = sequence
        self._rank[sequence.seq_id] = self._rng.random()
        return 0

    def fits_again(self, seq_id: int) -> None:
        pass

    def begin(self, now_us: int) -> list[Starving]:
        self._tried = set()
        if self._rng.random() < 0.3:  # a ranking lasts a few steps, so that an upload comes in time for its turn
            self._rank = {seq_id: self._rng.random() for seq_id in self._live}
        return []

    def best(self) -> int | None:
        return min((i for i in self._live if i not in self._tried), key=self._rank.__getitem__, default=None)

    def take(self, seq_id: int, work_us: int, cost_us: int | None = None) -> None:
        self._tried.add(seq_id)
        self._taken.add(seq_id)

    def refuse(self, seq_id: int) -> None:
        self._tried.add(seq_id)

    def refuse_new(self) -> None:
        self._tried |= self._live.keys() - self._taken

    def prompt_time_us(self, team_id: int, others: Mapping[int, int], step_us: int) -> int | None:
        return None if self._rng.random() < 0.7 else self._rng.randrange(2 * step_us)

    def leave_prompts(self, team_id: int) -> None:
        self._leave(team_id, self._begun)

    def leave_new(self, team_id: int) -> None:
        self._leave(team_id, self._taken)

    def leave_team(self, team_id: int) -> None:
        self._leave(team_id, set())

    def _leave(self, team_id: int, stay: set[int]) -> None:
        self._tried |= {i for i, terms in self._live.items() if terms.team_id == team_id and i not in stay}

    def set_away(self, seq_id: int, is_away: bool) -> None:
        (self._away.add if is_away else self._away.discard)(seq_id)

    def refuse_away(self) -> None:
        self._tried |= self._away

    def claimant(self, team_ids: Iterable[int], holder: int | None) -> int | None:
        return None

    def settle(
        self, served: Sequence[Served], now_us: int, overheads: Sequence[Overhead] = (), time: StepTime = AS_SERVED
    ) -> None:
        self._begun |= {row.seq_id for row in served if row.has_generated}

    def protect(self, seq_id: int, num_steps: int) -> None:
        pass

    def turns(self, seq_ids: Collection[int], slots: int, now_us: int) -> list[Turn]:
        ordered = sorted(seq_ids, key=self._rank.__getitem__)
        return [Turn(seq_id, place * 1_000_000) for place, seq_id in enumerate(ordered)]

    def over_served(self, team_ids: Iterable[int]) -> list[int]:
        return sorted(team_ids)

    def ahead_of(self, team_ids: Iterable[int], team_id: int) -> set[int]:
        return set()

    def is_band_wide(self) -> bool:
        return False

    def num_promotions(self, seq_id: int) -> int:
        return 0

    def leave(self, seq_id: int, now_us: int) -> None:
        del self._live[seq_id], self._rank[seq_id]
        self._taken.discard(seq_id)
        self._begun.discard(seq_id)

    def level(self, seq_id: int) -> int:
        return 0

    def team_service(self) -> list[TeamService]:
        return []

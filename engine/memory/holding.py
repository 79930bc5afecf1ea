"""What the KV memory keeps for each sequence: where its KV is, what it claims, and why it was displaced.

A `Holding` is written by `engine.memory` only; everybody may read it. The place changes along `TRANSITIONS` and no
other way. A sequence's status (`engine.request`) follows from the place and from whether the sequence is in the newest
step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from engine.blocks import BlockTable


class Place(StrEnum):
    """Where a sequence's KV is."""

    NOWHERE = "nowhere"  # the sequence has not started
    DEVICE = "device"
    GOING_OUT = "going_out"  # on its way to the host
    HOST = "host"
    COMING_BACK = "coming_back"  # on its way from the host to the device
    LOST = "lost"  # dropped; the sequence will compute it again
    RELEASED = "released"  # the sequence has ended


TRANSITIONS: Mapping[Place, tuple[Place, ...]] = {
    Place.NOWHERE: (Place.DEVICE, Place.RELEASED),
    Place.DEVICE: (Place.GOING_OUT, Place.LOST, Place.RELEASED),
    Place.GOING_OUT: (Place.HOST, Place.LOST, Place.RELEASED),
    Place.HOST: (Place.COMING_BACK, Place.LOST, Place.RELEASED),
    Place.COMING_BACK: (Place.DEVICE, Place.LOST, Place.RELEASED),
    Place.LOST: (Place.DEVICE, Place.RELEASED),
    Place.RELEASED: (),
}


@dataclass(slots=True, eq=False)
class Holding:
    """One sequence's part of the KV memory. Counts are blocks unless the name says otherwise."""

    table: BlockTable
    num_blocks_max: int  # what prompt and clamped max tokens will occupy
    place: Place = Place.NOWHERE
    num_computed: int = 0  # tokens whose KV is in the blocks, wherever these are
    num_claim: int = 0  # must be available before the sequence starts (engine.memory.starts)
    num_claimed: int = 0  # counted for the sequence while it is started
    num_promised: int = 0  # of a half-computed prompt on the device: what the rest of the prompt will take
    num_wanted: int = 0  # device blocks that the sequence wanted when it was last refused
    num_refusals: int = 0  # steps since it last ran in which its own blocks did not fit
    num_held: int = 0  # times that it lost the reservation because its time was up, since it last started
    num_closed_before: int = 0  # steps that were closed to newcomers before the sequence came
    replay_to: int = 0  # tokens that had KV when it was dropped; they are computed again without sampling
    num_cuts: int = 0  # times that the KV was lost before it was whole, since it was last whole
    displaced_by: int | None = None  # the team that pays for the way back, while the KV is away or computed again
    displaced_for: int = -1  # the sequence that room was made for
    num_swaps: int = 0  # moves to the host
    num_recomputes: int = 0  # times that the KV was dropped
    min_run_left: int = 0  # steps of the sequence's own in which it keeps slot and KV (engine.memory.min_runs)
    uploaded_step: int | None = None  # the step before which the latest upload or replay ended

    def move_to(self, place: Place) -> None:
        """Change the place; anything outside `TRANSITIONS` is a bug."""
        assert place in TRANSITIONS[self.place], f"KV moves from {self.place} to {place}"
        self.place = place

    @property
    def is_started(self) -> bool:
        """There is KV, or blocks for it, on the device, on the host or in between."""
        return self.place not in _WITHOUT_KV

    @property
    def is_protected(self) -> bool:
        """G2: the sequence is in a minimum run, and its KV may not be taken."""
        return self.min_run_left > 0


_WITHOUT_KV = (Place.NOWHERE, Place.LOST, Place.RELEASED)

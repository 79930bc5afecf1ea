"""How much time the prompts of one team may add to a step that other teams get a token from.

A prompt lengthens the step of everybody in it. So the prompts of team F are bounded by what they take from the others:

    P_F = D * f / (1 - f)  +  (least lag of the others + Theta - lag of F) * weight of F

* D is the predicted time of the step without F's prompts, of which each other team's rows take a part;
* f is F's max-min part of D, by weight, when the others demand their parts and F demands all of it.

The first term is a step in which each team has its part. The second is what F is behind the others, and Theta on top;
once F is Theta ahead it is 0, and further ahead it is taken from the first. With two teams of one weight and F at the
others' lag + Theta, a step that takes 20 ms for the other's tokens may take 20 ms more for F's prompts.

Everything is a whole microsecond, so that schedules do not differ between machines.
"""

from collections.abc import Collection


def even_prompt_us(step_us: int, weight: int, others: Collection[tuple[int, int]]) -> int:
    """D * f / (1 - f) in microseconds, rounded down: how long prompts of a team of this weight may take so that it has
    its max-min part of a step that takes `step_us` (D) without them.

    `others` are (weight, microseconds) of the other teams' parts of D; at least one is positive.
    """
    rest, weights = step_us, weight + sum(part[0] for part in others)
    for other_weight, part_us in sorted(others, key=lambda part: part[1] / part[0]):
        if part_us * weights > other_weight * rest:
            break
        rest -= part_us
        weights -= other_weight
    return step_us * weight * rest // (step_us * weights - weight * rest)  # f is weight * rest / weights, of D

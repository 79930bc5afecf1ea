"""How the bounds on request bodies fit together. `gateway.prepare.preparation` says what they are for."""

SMALL_PART = 4  # a quarter of each bound is for small bodies alone


def body_bounds(*, max_body_bytes: int, small_bytes: int, team_bytes: int, total_bytes: int) -> tuple[int, int]:
    """The bounds on bytes in preparation: (of one team, of all teams). A bound given as 0 becomes a fitting default.

    Raises ValueError when the largest body, or SMALL_PART small bodies, would never fit, and when two teams at their
    bounds would not fit.
    """
    team_bytes = team_bytes or max(3 * max_body_bytes, SMALL_PART * small_bytes)
    total_bytes = total_bytes or 4 * team_bytes
    if team_bytes // SMALL_PART < small_bytes:
        raise ValueError(f"{team_bytes} bytes of one team are less than {SMALL_PART} bodies of {small_bytes} bytes")
    if team_bytes - team_bytes // SMALL_PART < max_body_bytes:
        raise ValueError(
            f"a body of {max_body_bytes} bytes never fits into three quarters of one team's {team_bytes} bytes"
        )
    if total_bytes < 2 * team_bytes:
        raise ValueError(f"{total_bytes} bytes in all are less than those of two teams, {team_bytes} bytes each")
    return team_bytes, total_bytes

"""Which ranks hold the others up."""

from __future__ import annotations

from collections.abc import Sequence

from common.processes.monitor import RankState

DOING_ORDER = ("reading data", "computing")
"""What a rank does within a step, in order. Validating and saving come after, in no fixed order."""


def stalled_ranks(states: Sequence[RankState]) -> list[RankState]:
    """Of ranks without progress, return those that the others wait for.

    They are the stopped ones, else the silent ones, else those behind, which may be all.
    """
    stopped = [state for state in states if state.is_stopped] or [state for state in states if state.is_silent]
    if stopped:
        return stopped
    first = min(map(_position, states))
    return [state for state in states if _position(state) == first]


def _position(state: RankState) -> tuple[int, int]:
    order = DOING_ORDER.index(state.doing) if state.doing in DOING_ORDER else len(DOING_ORDER)
    return state.step, order

"""Which tokens share a step, and which an expert leaves out. The engine's own: tests/test_engine_capacity.py."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibrid.model.steps import TokenLimit, beyond, steps_of


@pytest.mark.parametrize(
    ("lengths", "slots", "expected"),
    [
        ([3], 2, [0, 0, 0]),
        ([4, 4, 2], 3, [0] * 8 + [1] * 2),
        ([4, 4, 2], 1, [0] * 4 + [1] * 4 + [2] * 2),  # the second text waits though there is room
        ([6, 3, 1], 3, [0] * 6 + [1] * 4),  # 4 and 2 leave room for 2 of 3; what is younger waits, too
        ([18], 1, [0] * 8 + [1] * 8 + [2] * 2),
    ],
)
def test_chunks_fill_steps(lengths: list[int], slots: int, expected: list[int]) -> None:
    """In chunks of 4, at most 8 a step, the oldest text first; waves of as many texts as there are slots."""
    assert steps_of(lengths, TokenLimit(1, slots, 4, 8)).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=40), st.integers(1, 5))
def test_the_largest_weights_of_each_step_stay(assignments: list[tuple[int, int]], tokens: int) -> None:
    """Of equal ones the earlier; as sorting each step by itself finds them."""
    ordered = sorted(assignments)  # steps follow one another, as positions of a text do
    steps = np.array([step for step, _ in ordered], np.int64)
    weights = np.array([weight / 4 for _, weight in ordered], np.float32)
    gone = set(beyond(weights, steps, tokens).tolist())
    for step in set(steps.tolist()):
        places = [place for place in range(len(steps)) if steps[place] == step]
        best = sorted(places, key=lambda place: (-weights[place], place))
        assert gone & set(places) == set(best[tokens:])

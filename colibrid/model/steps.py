"""Which tokens of texts an engine computes in one step, and how many of a step one expert takes. Pure.

    TokenLimit(64, slots=8, chunk=64, most=512)  # experts.max_tokens_per_expert 64, in an engine of 8 slots

What that limit leaves out depends on who shares a step. Here texts come in waves: as many as there are slots begin at one
step, and the next ones when all of them have been read. A step takes chunks of the oldest text first, then of the next,
until one does not fit; that is clb_plan_prefill of engine_c/src/loop.c while nobody decodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.model.floats import Array


class TokenLimit(NamedTuple):
    """Most tokens that one expert takes from a step, and what shares one."""

    tokens: int
    slots: int  # texts that are read at once, if the memory holds them
    chunk: int  # texts are cut at multiples of so many tokens
    most: int  # tokens of a step, at least a chunk


def steps_of(lengths: Sequence[int], limit: TokenLimit) -> Array:
    """The number of the step that computes each token of texts of these lengths, one text after another."""
    found, step, room = [], -1, 0
    for place, length in enumerate(lengths):
        if place % limit.slots == 0:
            room = 0
        for begin in range(0, length, limit.chunk):
            rows = min(limit.chunk, length - begin)
            if rows > room:
                step, room = step + 1, limit.most
            room -= rows
            found.append(np.full(rows, step))
    return np.concatenate(found)


def beyond(weights: Array, steps: Array, tokens: int) -> Array:
    """Which of one expert's assignments are left out where it takes so many tokens from each step.

    weights, steps: of each assignment, in the order of the tokens. Of a step those of largest weight stay, of equal ones
    the earlier (engine_c/src/routing.c).
    """
    order = np.lexsort((-weights, steps))  # stable
    sorted_steps = steps[order]
    rank = np.arange(len(order)) - np.searchsorted(sorted_steps, sorted_steps)
    return order[rank >= tokens]

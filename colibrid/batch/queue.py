"""Requests that wait for slots: lower priority first, then first come first served.

A group is one request with those of its choices that have no slot yet; they are placed together.
"""

from __future__ import annotations

import bisect
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from colibrid.batch.generation import LiveGeneration
    from colibrid.batch.request import GenerateRequest


@dataclass(slots=True, eq=False)
class Group:
    """Choices of one request; changed by the queue only."""

    request: GenerateRequest
    members: list[LiveGeneration]
    order: tuple[int, float, int]  # priority, then time and number of its arrival
    prompt: bytes  # its ids as int32
    scope: Hashable | None  # who may share its prompt, see holdings.py


class Queue:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._arrivals = 0

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def choices(self) -> int:
        """Choices that wait, of all requests."""
        return sum(len(group.members) for group in self._groups)

    def add(self, members: list[LiveGeneration], scope: Hashable | None) -> None:
        """All choices of a request that has just arrived."""
        request = members[0].request
        self._arrivals += 1
        order = (request.priority, members[0].clock.submitted, self._arrivals)
        prompt = array("i", request.prompt_ids).tobytes()
        self.put_back(Group(request, members, order, prompt, scope))

    def put_back(self, group: Group) -> None:
        """A group goes to its place in the order."""
        for member in group.members:
            member.group = group
        bisect.insort(self._groups, group, key=lambda one: one.order)

    def take(self, group: Group) -> None:
        """A group has got its slots."""
        self._groups.remove(group)

    def remove(self, generation: LiveGeneration) -> None:
        """One choice wants no slot any more."""
        assert generation.group is not None, "it was queued"
        generation.group.members.remove(generation)
        if not generation.group.members:
            self._groups.remove(generation.group)

    def clear(self) -> list[LiveGeneration]:
        """Empty it. Returns who waited."""
        members = [member for group in self._groups for member in group.members]
        self._groups.clear()
        return members

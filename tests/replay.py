"""What a stream must have got while experts were replaced: the same request alone, switched at the same positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibrid.batch.slots import SlotMemory
from colibrid.batch.translate import slot_request
from colibrid.engine import abi
from colibrid.engine.channel import Command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from in_process import InProcessEngine

    from colibrid.batch.request import ExpertUsage, GenerateRequest
    from colibrid.engine.channel import Event

TURNS = 10_000


def replay(
    engine: InProcessEngine,
    request: GenerateRequest,
    usage: ExpertUsage,
    bring: Callable[[InProcessEngine, int], list[Event]],
) -> list[int]:
    """The tokens of `request` on the CPU.

    bring(engine, generation) gives the engine that generation's experts within one turn, and returns what happened in it.
    """
    prompt = len(request.prompt_ids)
    experts = [layer.experts_per_token for layer in engine.manifest.layers]
    switches = {one.position: one.weights_generation for one in usage.switches}  # of several at one place the last
    bring(engine, usage.weights_generation)
    asked = min([prompt, *switches])
    generation = engine.start(0, slot_request(request, 0, 0, SlotMemory(), experts), asked)
    tokens: list[int] = []
    events = turn(engine)
    while not take(engine, events, tokens):
        computed = asked if not tokens else prompt + len(tokens) - 1
        events = bring(engine, switches.pop(computed)) if computed in switches else []
        if asked < prompt:
            until = min([prompt, *switches])
            engine.channel.push([Command(abi.CommandKind.PREFILL, 0, generation, asked, until - asked)])
            asked = until
        events = events or turn(engine)
    return tokens


def turn(engine: InProcessEngine) -> list[Event]:
    """What happens in one turn."""
    engine.turn()
    return engine.channel.pop()


def take(engine: InProcessEngine, events: Iterable[Event], tokens: list[int]) -> bool:
    """Adds the events' tokens; True if the only request has ended."""
    ended = False
    for event in events:
        assert event.kind != abi.EventKind.FAILED, f"status {event.status}"
        if event.kind == abi.EventKind.TOKEN:
            tokens.append(event.token)
            engine.channel.advance(event.slot, event.record, event.record + 1)
            ended = ended or event.flags != 0
    return ended

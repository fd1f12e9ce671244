"""Replies taken apart, and their thinking counted."""

from __future__ import annotations

from colibrid.text import tools
from colibrid.text.reasoning import HARMONY, THINK
from colibrid.text.reply import Reply, ReplyOptions
from colibrid.text.tools_reader import CallArguments, CallStart, Content, Reasoning

NAMES = frozenset({"f"})
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def test_thinking_tokens_are_those_up_to_its_end() -> None:
    """A token counts if it begins before the closing tag ends, also when the tag comes in pieces."""
    reply = Reply(ReplyOptions(reasoning=THINK))
    pieces = ["<think>", "\n", "hm", "</th", "ink>", "\n\n", "Hello", ""]
    offset, events = 0, []
    for piece in pieces:
        events += reply.push(piece, [offset])
        offset += len(piece)
    events += reply.finish()
    assert events == [Reasoning("hm"), Content("Hello")]
    assert reply.reasoning_tokens == 5


def test_thinking_that_does_not_end_is_all() -> None:
    """A reply cut while it thinks is thinking to its last token."""
    reply = Reply(ReplyOptions(reasoning=THINK, inside=True))
    reply.push("hm", [0])
    reply.push(" ok", [2])
    reply.finish()
    assert reply.reasoning_tokens == 2


def test_without_thinking_none_is_counted() -> None:
    """A model that could think but does not, and one that cannot."""
    for options in (ReplyOptions(reasoning=THINK), ReplyOptions(reasoning=HARMONY), ReplyOptions()):
        reply = Reply(options)
        reply.push("Hello", [0])
        reply.finish()
        assert reply.reasoning_tokens == 0


def test_calls_are_counted() -> None:
    """Free or forced, behind thinking or not."""
    for options in (
        ReplyOptions(form=tools.HERMES, names=NAMES),
        ReplyOptions(form=tools.HERMES, names=NAMES, forced=True),
        ReplyOptions(form=tools.HERMES, names=NAMES, reasoning=THINK),
    ):
        reply = Reply(options)
        assert reply.push(CALL) + reply.finish() == [CallStart("f"), CallArguments("{}")]
        assert reply.calls == 1


def test_readers_see_their_special_tokens() -> None:
    """Special tokens that are part of a format, or of thinking, are shown; others stay hidden."""
    specials = {"[TOOL_CALLS]": 5, "[ARGS]": 6, "<think>": 7, "</think>": 8, "<|im_end|>": 9, "<|channel|>": 10}
    assert ReplyOptions(form=tools.MISTRAL).shown_ids(specials) == {5, 6}
    assert ReplyOptions(reasoning=THINK).shown_ids(specials) == {7, 8}
    assert ReplyOptions(reasoning=HARMONY).shown_ids(specials) == {10}
    assert ReplyOptions().shown_ids(specials) == set()


def test_a_reply_may_end_with_its_first_call() -> None:
    """Without parallel calls nothing more is wanted then; of several in one section the first counts."""
    reply = Reply(ReplyOptions(form=tools.HERMES, names=NAMES, single=True))
    reply.push("Hm")
    assert not reply.over
    reply.push(CALL)
    assert reply.over
    both = Reply(ReplyOptions(form=tools.MISTRAL, names=NAMES, single=True))
    call = '{"name": "f", "arguments": {}}'
    both.push(f"[TOOL_CALLS][{call}, {call}]")
    assert len(both.finish()) == 2
    forced = Reply(ReplyOptions(form=tools.HERMES, names=NAMES, single=True, forced=True))
    forced.push(CALL[:60])
    assert not forced.over

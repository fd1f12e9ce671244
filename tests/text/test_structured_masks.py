"""Masks of running requests."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import TYPE_CHECKING

import llguidance
import pytest
from mask_walk import MASK_BYTES, allowed, walk

from colibrid.errors import RequestError
from colibrid.text import structured, structured_limits, structured_masks
from colibrid.text.structured_masks import StructuredOutput, Vocabulary

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from colibrid.text.tokenizer import Tokenizer

END, TOOL_CALL = 4093, 4094


@pytest.fixture(scope="session")
def vocabulary(byte_level: Tokenizer) -> Vocabulary:
    return Vocabulary(byte_level, (END, 4091))


@pytest.fixture
async def output(vocabulary: Vocabulary) -> AsyncIterator[StructuredOutput]:
    output = StructuredOutput(vocabulary, MASK_BYTES)
    yield output
    await output.close()


async def test_answers_are_what_was_asked_for(output: StructuredOutput, byte_level: Tokenizer) -> None:
    """Texts of special tokens are spelled as text; all of several choices come up."""
    rng = random.Random(1)
    choices = ["Oslo", "<|im_end|>", "<tool_call>x", 'a "quote"\n', "日本"]
    found = {await walk(output, byte_level, structured.choice(choices, "p"), rng) for _ in range(60)}
    assert found == set(choices)


async def test_special_tokens_by_id(output: StructuredOutput) -> None:
    """Grammars of ours name special tokens by id; nothing else is allowed there."""
    masker = await output.masker(structured.Grammar(param="p", lark=f'start: <[{TOOL_CALL}]> "x"'))
    assert allowed(masker.first) == [TOOL_CALL]


async def test_each_request_has_its_own_place(output: StructuredOutput, byte_level: Tokenizer) -> None:
    """Two requests of one grammar do not move each other; several tokens may come at once."""
    grammar = structured.regex("abc|xyz", "p")
    one, two = await output.masker(grammar), await output.masker(grammar)
    assert one.first == two.first
    await one.after(byte_level.encode("abc", add_special_tokens=False))
    assert allowed(await two.after(byte_level.encode("x", add_special_tokens=False))) != [4091, END]


async def test_compiled_once(output: StructuredOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal grammars are compiled once, also bad ones and those asked for at the same time."""
    seen: list[str] = []
    check = output._checker.check

    async def counted(text: str) -> str:
        seen.append(text)
        return await check(text)

    monkeypatch.setattr(output._checker, "check", counted)
    good, bad = structured.regex("a+", "p"), structured.regex("(", "p")
    await asyncio.gather(*(output.masker(good) for _ in range(5)))
    for _ in range(3):
        with pytest.raises(RequestError, match="p cannot be used"):
            await output.masker(bad)
    assert len(seen) == 2


async def turns() -> None:
    """As many turns of the loop as anything takes that waits for nothing else."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_nobody_waits_for_is_given_up(output: StructuredOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar whose clients have all left is not compiled; one that stays is enough, and so is one that comes anew."""
    started, go = [], asyncio.Event()
    check = output._checker.check

    async def slow(text: str) -> str:
        started.append(text)
        await go.wait()
        return await check(text)

    monkeypatch.setattr(output._checker, "check", slow)
    asked = structured.regex("a+", "p")
    first, second = (asyncio.ensure_future(output.masker(asked)) for _ in range(2))
    await turns()
    assert len(started) == 1
    first.cancel()
    await turns()
    assert len(output._cache) == 1
    second.cancel()
    third = asyncio.ensure_future(output.masker(asked))  # in the same turn of the loop
    await turns()
    assert len(started) == 2
    go.set()
    assert (await third).first
    assert not output._waiting
    await asyncio.gather(first, second, return_exceptions=True)
    assert first.cancelled()
    assert second.cancelled()


async def test_the_cache_is_bounded(output: StructuredOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest grammars make room, by number and by length."""
    monkeypatch.setattr(structured_masks, "CACHED_GRAMMARS", 3)
    for count in range(1, 6):
        await output.masker(structured.regex("a" * count, "p"))
    assert len(output._cache) == 3
    monkeypatch.setattr(structured_masks, "CACHED_CHARS", 10)
    await output.masker(structured.regex("b", "p"))
    assert len(output._cache) == 1


async def test_masks_are_made_off_the_loop(output: StructuredOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling and masking have threads of their own."""
    threads = []
    compiling = StructuredOutput._matcher
    monkeypatch.setattr(
        StructuredOutput, "_matcher", lambda *given: threads.append(threading.current_thread()) or compiling(*given)
    )
    masking = structured_masks.Masker._after
    monkeypatch.setattr(
        structured_masks.Masker, "_after", lambda *given: threads.append(threading.current_thread()) or masking(*given)
    )
    await (await output.masker(structured.regex("a+", "p"))).after([64])
    assert [thread.name.split("_")[0] for thread in threads] == ["grammar", "mask"]


async def test_a_lexer_that_is_full_is_renewed(
    vocabulary: Vocabulary, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of one grammar share the lexer's states; when these are too many, running requests go on afresh."""
    few = structured_limits.parser_limits()
    made = llguidance.LLParserLimits(max_lexer_states=400, precompute_large_lexemes=False, verbose_errors=False)
    assert few.max_lexer_states > made.max_lexer_states
    monkeypatch.setattr(structured_masks, "parser_limits", lambda: made)
    output = StructuredOutput(vocabulary, MASK_BYTES)
    renewals = []
    renew = structured_masks._Compiled.renew
    monkeypatch.setattr(structured_masks._Compiled, "renew", lambda one: renewals.append(one) or renew(one))
    grammar = structured.regex("(.|\n)*a(.|\n){12}b(.|\n)*", "p")
    rng = random.Random(4)
    maskers = [await output.masker(grammar) for _ in range(6)]
    for masker in maskers:
        for _ in range(40):
            mask = await masker.after(byte_level.encode(rng.choice("abcd"), add_special_tokens=False))
            assert allowed(mask)
    assert renewals
    await output.close()


async def test_slow_masks_end_their_request(output: StructuredOutput, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that takes too long is an error of that request."""
    masker = await output.masker(structured.regex("[a-z]+", "p"))
    monkeypatch.setattr(structured_masks, "MASK_CPU_S", 0.0)
    with pytest.raises(RequestError, match="too complex"):
        await masker.after([64])


async def test_steps_that_are_slow_together_end_their_request(
    output: StructuredOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema without end starts over at each step, none of which is long: the request ends after some of them."""
    masker = await output.masker(structured.regex("[a-z]+", "p"))
    monkeypatch.setattr(structured_masks, "MASK_CPU_S", 0.2)
    for clock in (iter((0.0, 0.1)), iter((0.1, 0.2))):
        monkeypatch.setattr(structured_masks.time, "thread_time", clock.__next__)
        await masker.after([64])
    monkeypatch.setattr(structured_masks.time, "thread_time", iter((0.2, 0.3)).__next__)
    with pytest.raises(RequestError, match=r"0.3 s for 3 tokens"):
        await masker.after([64])


async def test_tokenizers_that_cannot_be_used(own_decoder: Tokenizer) -> None:
    """A model without an end token, or without a vocabulary, refuses by name."""
    with pytest.raises(ValueError, match="end token"):
        Vocabulary(own_decoder, ())
    with pytest.raises(RequestError, match="tokenizer"):
        await StructuredOutput(None, MASK_BYTES).masker(structured.regex("a", "p"))


async def test_other_kinds_of_tokenizers(byte_fallback: Tokenizer, own_decoder: Tokenizer) -> None:
    """Byte fallback and decoders of their own can be followed, too."""
    for tokenizer in (byte_fallback, own_decoder):
        output = StructuredOutput(Vocabulary(tokenizer, (2,)), MASK_BYTES)
        masker = await output.masker(structured.regex("[ab]{2}", "p"))
        texts = {tokenizer.token_bytes(token) for token in allowed(masker.first)}
        assert {b"a", b"b"} <= texts
        await output.close()

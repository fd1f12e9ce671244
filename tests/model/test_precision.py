"""The grammar of --precision: which rule decides for which matrix, and what is refused."""

from __future__ import annotations

import pytest

from colibrid.errors import ConfigError
from colibrid.model.formats import FORMATS
from colibrid.model.layout import Tensor
from colibrid.model.manifest import Layer
from colibrid.model.precision import Plan, check_plan, parse_plan

LAYERS = (
    Layer(ffn="dense", shared_width=64),
    Layer(ffn="moe", experts=4, experts_per_token=2, expert_width=32),
    Layer(ffn="moe", experts=8, experts_per_token=2, expert_width=32, shared_width=32),
)


def expert(layer: int, number: int) -> Tensor:
    return Tensor("gate", layer, number, (32, 64))


def other(role: str, layer: int | None) -> Tensor:
    return Tensor(role, layer, None, (64, 64))  # type: ignore[arg-type]


def chosen(text: str, tensor: Tensor) -> str:
    return parse_plan(text).format_of(tensor, "bf16")


def test_the_issue_s_own_example() -> None:
    """Experts, a layer, one expert and the rest each get what they were given."""
    text = "experts=int4, layer 0=int8, expert 3:17=fp16, dense=int8"
    assert chosen(text, expert(1, 2)) == "int4-g64"
    assert chosen(text, expert(0, 2)) == "int8"
    assert chosen(text, expert(3, 17)) == "fp16"
    assert chosen(text, expert(3, 16)) == "int4-g64"
    assert chosen(text, other("qkv", 5)) == "int8"
    assert chosen(text, other("up", 5)) == "int8"
    assert chosen(text, other("embedding", None)) == "bf16"


@pytest.mark.parametrize("name", [*FORMATS, "int4", "int4-z"])
def test_a_format_alone_is_for_all_but_what_stays_precise(name: str) -> None:
    """Embedding, head, router and vectors are not among all."""
    written = {"int4": "int4-g64", "int4-z": "int4-g64-z"}.get(name, name)
    assert chosen(name, expert(0, 0)) == written
    assert chosen(name, other("out", 0)) == written
    for role, layer in (("embedding", None), ("head", None), ("final_norm", None), ("router", 1), ("attn_norm", 1)):
        assert parse_plan(name).format_of(other(role, layer), "kept") == "kept"


@pytest.mark.parametrize(
    ("text", "tensor", "found"),
    [
        ("expert 1:2=int8, all=int4", expert(1, 2), "int8"),
        ("shared=fp16, dense=int8", other("gate", 1), "fp16"),
        ("attention=fp16, dense=int8", other("out", 1), "fp16"),
        ("attention=fp16, dense=int8", other("gate", 1), "int8"),
        ("layer 1=int8, attention=fp16", other("qkv", 1), "int8"),
        ("layer 1 attention=fp32, layer 1=int8", other("qkv", 1), "fp32"),
        ("layer 1 experts=fp32, expert 1:0=int8", expert(1, 0), "int8"),
        ("layer 0-2=int8", expert(2, 0), "int8"),
        ("layer 0-2=int8", expert(3, 0), "bf16"),
        ("expert *:3=int8", expert(7, 3), "int8"),
        ("expert 2:1-3=int8, expert 2:3-5=fp16", expert(2, 3), "fp16"),
        ("embedding=int8", other("embedding", None), "int8"),
        ("head=int8", other("head", None), "int8"),
        ("head=int8", other("embedding", None), "bf16"),
        ("  Experts = INT4-G128-Z ", expert(0, 0), "int4-g128-z"),
    ],
)
def test_the_most_specific_rule_decides(text: str, tensor: Tensor, found: str) -> None:
    """Whatever stands before or after it."""
    assert chosen(text, tensor) == found


def test_equal_plans_have_one_text() -> None:
    """Spelling, order of kinds and short names do not matter; the text can be read back."""
    one = parse_plan("expert 3:*=fp16,  dense=int8,experts=int4")
    two = parse_plan("Experts=int4-g64, dense = int8, experts 3:*=fp16")
    assert str(one) == str(two) == "dense=int8, experts=int4-g64, expert 3:*=fp16"
    assert parse_plan(str(one)) == one
    assert str(Plan()) == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("experts=int5", ["--precision", "'experts=int5'", "int5", "int8-g128", "fp8-b128"]),
        ("expert=int4", ["'expert'", "did you mean 'experts'?"]),
        ("router=int8", ["'router'", "embedding", "layer N"]),
        ("layer 1 embedding=int8", ["'layer 1 embedding'"]),
        ("layer x=int8", ["'layer x'"]),
        ("expert 5-3:1=int8", ["5-3", "FIRST-LAST"]),
        ("experts=int4,,dense=int8", ["empty rule"]),
        ("", ["empty rule"]),
        ("experts=int4, experts=int8", ["'experts'", "twice"]),
        ("=int8", ["target ''"]),
    ],
)
def test_a_wrong_rule_is_named(text: str, words: list[str]) -> None:
    """The message has the field, the rule as it was written, and what may be written."""
    with pytest.raises(ConfigError) as caught:
        parse_plan(text)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layer 3=int8", ["model.precision", "layer 3", "0 to 2"]),
        ("layer 1-9=int8", ["layer 9", "0 to 2"]),
        ("expert 1:4=int8", ["expert 4", "0 to 3"]),
        ("expert 0:0=int8", ["layer 0 has no routed experts"]),
        ("layer 1 shared=int8", ["no shared expert"]),
        ("layer 0 experts=int8", ["no routed experts"]),
        ("head=int8", ["embedding=..."]),
    ],
)
def test_a_rule_for_nothing_is_refused(text: str, words: list[str]) -> None:
    """A layer, expert or part that the model does not have is a mistake, not a wish."""
    with pytest.raises(ConfigError) as caught:
        check_plan(parse_plan(text, "model.precision"), LAYERS, tied_head=True)
    assert all(word in str(caught.value) for word in words)


def test_rules_for_what_is_there_pass() -> None:
    """Ranges and stars too."""
    text = (
        "int4, shared=int8, layer 0-2=int8, layer *=fp16, expert *:*=int8, expert 2:0-7=fp16, embedding=fp16, head=fp16"
    )
    check_plan(parse_plan(text), LAYERS, tied_head=False)

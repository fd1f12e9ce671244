"""Which weights get which format: the grammar of --precision and model.precision. Pure, and without numpy.

    experts=int4, layer 0=int8, expert 3:17=fp16, dense=int8

Rules with commas between, each TARGET=FORMAT; FORMAT alone means all=FORMAT. The most specific rule that fits a matrix
decides, in whatever order they stand; of two of one kind (overlapping ranges) the later one.

    rank  target                                what it fits
    0     all                                   every matrix but embedding, head and router
    1     experts | dense                       routed experts | the other matrices: attention, shared, dense FFN
    2     attention | shared | embedding | head qkv and out | shared experts and dense FFN | by name only
    3     layer 3 | layer 0-5                   every matrix of these layers
    4     layer 3 experts (dense, ...)          those of one layer
    5     expert 3:17 | 3:0-7 | 0-5:17 | 3:*    these routed experts

What no rule fits stays as it would be without rules (--dtype). Norms, biases, routers and the shared expert's gate are
fp32 always.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING

import msgspec

from colibrid.errors import ConfigError, ModelError
from colibrid.model.formats import format_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.model.layout import Tensor
    from colibrid.model.manifest import Layer

MAX_RULES = 4096
MAX_NUMBER = 1 << 20
_PARTS = ("experts", "dense", "attention", "shared")  # what may follow `layer N`
_NAMED = ("all", *_PARTS, "embedding", "head")
_TARGETS = "all, experts, dense, attention, shared, embedding, head, layer N, layer N PART or expert LAYER:EXPERT"
_RANK = {"all": 0, "experts": 1, "dense": 1, "attention": 2, "shared": 2, "embedding": 2, "head": 2}
_RANGE = r"(?:\*|\d{1,7}(?:-\d{1,7})?)"
_LAYER = re.compile(rf"layers? ({_RANGE})(?: (\w+))?")
_EXPERT = re.compile(rf"experts? ({_RANGE}):({_RANGE})")


class Span(msgspec.Struct, frozen=True):
    """Numbers `first` to `last`; last None: to the end."""

    first: int = 0
    last: int | None = None

    def holds(self, number: int) -> bool:
        return self.first <= number and (self.last is None or number <= self.last)

    def __str__(self) -> str:
        if self.last is None:
            return "*"
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class Rule(msgspec.Struct, frozen=True):
    """One TARGET=FORMAT."""

    part: str  # of _NAMED
    format: str  # of formats.FORMATS, short names written out
    layers: Span | None = None
    experts: Span | None = None

    @property
    def rank(self) -> int:
        if self.experts is not None:
            return 5
        if self.layers is not None:
            return 3 if self.part == "all" else 4
        return _RANK[self.part]

    @property
    def target(self) -> str:
        if self.experts is not None:
            return f"expert {self.layers}:{self.experts}"
        if self.layers is not None:
            return f"layer {self.layers}" + ("" if self.part == "all" else f" {self.part}")
        return self.part

    def fits(self, tensor: Tensor) -> bool:
        """Whether the rule speaks of this matrix."""
        if tensor.layer is None:
            return self.part == tensor.role
        if self.layers is not None and not self.layers.holds(tensor.layer):
            return False
        if self.experts is not None and (tensor.expert is None or not self.experts.holds(tensor.expert)):
            return False
        return self.part in _parts_of(tensor)


class Plan(msgspec.Struct, frozen=True):
    """All rules, in the order in which later ones win."""

    rules: tuple[Rule, ...] = ()
    field: str = "--precision"  # where they stand, for messages

    def format_of(self, tensor: Tensor, otherwise: str) -> str:
        """The format of a matrix; `otherwise` where no rule fits."""
        found = otherwise
        for rule in self.rules:
            if rule.fits(tensor):
                found = rule.format
        return found

    def __str__(self) -> str:
        """The rules in one spelling: equal plans give equal texts."""
        return ", ".join(f"{rule.target}={rule.format}" for rule in self.rules)


AS_IT_IS = Plan()


def parse_plan(text: str, field: str = "--precision") -> Plan:
    """ConfigError naming the field, the rule and what may be written."""
    rules: dict[str, Rule] = {}
    pieces = [piece.strip() for piece in text.split(",")]
    if len(pieces) > MAX_RULES:
        raise ConfigError(f"{field}: {len(pieces)} rules, expected at most {MAX_RULES}")
    for piece in pieces:
        if not piece:
            raise ConfigError(f"{field}: {text!r} has an empty rule; write TARGET=FORMAT with commas between")
        target, equals, name = (part.strip() for part in piece.rpartition("="))
        rule = _rule(target if equals else "all", _format(name, piece, field), piece, field)
        if rule.target in rules:
            raise ConfigError(f"{field}: {rule.target!r} is named twice; leave one of the two out")
        rules[rule.target] = rule
    # Only rules with ranges can overlap, and keep their order.
    order = sorted(rules.values(), key=lambda rule: (rule.rank, rule.part if rule.layers is None else ""))
    return Plan(tuple(order), field)


def check_plan(plan: Plan, layers: Sequence[Layer], *, tied_head: bool) -> None:
    """ConfigError iff a rule speaks of a layer, an expert or a part that the model does not have."""
    field = plan.field
    for rule in plan.rules:
        reached = _reached(rule, layers, field)
        if rule.part == "head" and tied_head:
            raise ConfigError(f"{field}: {rule.target!r}: this model's head is its embedding; write embedding=...")
        if rule.part == "shared" and not any(layer.shared_width for layer in reached):
            raise ConfigError(f"{field}: {rule.target!r}: there is no shared expert and no dense FFN; leave it out")
        if rule.part == "experts" and not any(layer.experts for layer in reached):
            raise ConfigError(f"{field}: {rule.target!r}: there are no routed experts; leave it out")


def _reached(rule: Rule, layers: Sequence[Layer], field: str) -> Sequence[Layer]:
    if rule.layers is None:
        return layers
    last = rule.layers.first if rule.layers.last is None else rule.layers.last
    if last >= len(layers):
        raise ConfigError(f"{field}: {rule.target!r}: layer {last} given, the model has layers 0 to {len(layers) - 1}")
    reached = [layer for index, layer in enumerate(layers) if rule.layers.holds(index)]
    if rule.experts is not None:
        most = max(layer.experts for layer in reached)
        wanted = rule.experts.first if rule.experts.last is None else rule.experts.last
        if not most:
            raise ConfigError(f"{field}: {rule.target!r}: layer {rule.layers} has no routed experts")
        if wanted >= most:
            raise ConfigError(f"{field}: {rule.target!r}: expert {wanted} given, the layer has experts 0 to {most - 1}")
    return reached


def _rule(target: str, name: str, piece: str, field: str) -> Rule:
    words = " ".join(target.lower().split())
    if words in _NAMED:
        return Rule(words, name)
    if found := _EXPERT.fullmatch(words):
        return Rule("experts", name, _span(found[1], piece, field), _span(found[2], piece, field))
    found = _LAYER.fullmatch(words)
    if found and (found[2] or "all") in ("all", *_PARTS):
        return Rule(found[2] or "all", name, _span(found[1], piece, field))
    near = difflib.get_close_matches(words, _NAMED, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{field}: {piece!r}: target {target!r} is not one of {_TARGETS}{hint}")


def _span(text: str, piece: str, field: str) -> Span:
    if text == "*":
        return Span()
    first, _, last = text.partition("-")
    span = Span(int(first), int(last or first))
    if span.last is not None and not span.first <= span.last <= MAX_NUMBER:
        raise ConfigError(f"{field}: {piece!r}: {text} is not a range; write FIRST-LAST with FIRST <= LAST")
    return span


def _format(name: str, piece: str, field: str) -> str:
    try:
        return format_of(name.lower()).name
    except ModelError as error:
        raise ConfigError(f"{field}: {piece!r}: {error}") from None


def _parts_of(tensor: Tensor) -> tuple[str, ...]:
    """The names under which rules reach a matrix of a layer."""
    if tensor.expert is not None:
        return ("all", "experts")
    if tensor.role in ("qkv", "out"):
        return ("all", "dense", "attention")
    if tensor.role in ("gate", "up", "down"):
        return ("all", "dense", "shared")
    return ()  # router, norms, biases

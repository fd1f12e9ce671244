"""colibrid.tune.cold: which experts are cold, the rules for them, and what they save."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest

from colibrid.errors import ConfigError
from colibrid.model import layout
from colibrid.model.formats import FORMATS
from colibrid.model.precision import AS_IT_IS, parse_plan
from colibrid.tune.cold import Expert, by_use, cold, cold_plan, expert_bytes, savings
from colibrid.tune.usage import LayerUse

if TYPE_CHECKING:
    from colibrid.model.pack import Pack

NONE = Fraction(0)


def use(layer: int, *tasks: tuple[int, ...], size: int = 1000) -> LayerUse:
    """A layer whose experts did so much in each task."""
    return LayerUse(layer=layer, per_token=2, bytes=(size,) * len(tasks[0]), assignments=tasks)


def test_an_expert_costs_its_share_of_the_task_that_needs_it_most() -> None:
    """One that a small task leans on is not cold, however much larger the other task is."""
    layers = [use(0, (500, 490, 10, 0), (1, 1, 8, 0))]
    assert by_use(layers) == [
        Expert(NONE, 0, 3, 0), Expert(Fraction(49, 100), 0, 1, 491), Expert(Fraction(1, 2), 0, 0, 501),
        Expert(Fraction(4, 5), 0, 2, 18),
    ]  # fmt: skip


def test_a_task_without_assignments_costs_nothing() -> None:
    """As of a model whose data were only read for other tasks; experts that nobody used are taken by number."""
    assert by_use([use(0, (0, 0), (3, 1)), use(2, (0, 0), (0, 0))]) == [
        Expert(NONE, 2, 0, 0), Expert(NONE, 2, 1, 0), Expert(Fraction(1, 4), 0, 1, 1), Expert(Fraction(3, 4), 0, 0, 3),
    ]  # fmt: skip


def test_cold_ones_keep_within_the_share_together() -> None:
    """The least used first, until the next would be too much; none for a share below the first."""
    order = by_use([use(0, (70, 2, 3, 25)), use(1, (99, 1, 0, 0))])
    pairs = [(each.layer, each.expert) for each in order]
    assert pairs[:5] == [(1, 2), (1, 3), (1, 1), (0, 1), (0, 2)]
    assert len(cold(order, 0.0)) == 2
    assert len(cold(order, 0.0149)) == 3
    assert len(cold(order, 0.015)) == 4
    assert cold(order, 1.0) == order
    assert cold(order[2:], 0.001) == []


def test_rules_are_ranges_and_the_users_own_win() -> None:
    """Neighbours share a rule; what --precision says of single experts stays, and its wider rules lose."""
    chosen = [Expert(NONE, layer, expert, 0) for layer, expert in ((1, 5), (0, 2), (1, 3), (1, 4), (1, 7))]
    base = parse_plan("experts=int8, expert 0:2=bf16, expert 1:4-5=fp16")
    plan = cold_plan(chosen, FORMATS["int4-g64"], base, "--precision-from")
    assert str(plan) == ("experts=int8, expert 1:3-5=int4-g64, expert 1:7=int4-g64, expert 0:2=bf16, expert 1:4-5=fp16")
    formats = [
        plan.format_of(layout.Tensor("gate", layer, expert, (64, 64)), "fp32")
        for layer, expert in ((0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7))
    ]
    assert formats == ["int8", "bf16", "int4-g64", "fp16", "fp16", "int8", "int4-g64"]


def test_too_many_rules_are_an_error() -> None:
    """Rules are looked through for each matrix, so there is a most of them."""
    chosen = [Expert(NONE, layer, expert, 0) for layer in range(70) for expert in range(0, 256, 2)]
    with pytest.raises(ConfigError, match=r"--precision-from: 8960 runs of cold experts .* lower --cold-share"):
        cold_plan(chosen, FORMATS["int8"], AS_IT_IS, "--precision-from")


def test_what_is_saved_is_what_the_pack_will_be_smaller(bundled_pack: Pack) -> None:
    """Bytes are those of the pack's own layout: moved experts weigh what a conversion would make of them."""
    manifest = bundled_pack.manifest
    sizes = expert_bytes(manifest)
    layers = [
        LayerUse(
            layer=index, per_token=2, bytes=tuple(sizes[index, expert] for expert in range(8)),
            assignments=((0, 1, 99, 100, 100, 100, 100, 100),),
        )
        for index in range(6)
    ]  # fmt: skip
    none, some, most = savings(manifest, layers, FORMATS["int4-g64"], (0.0, 0.01, 1.0))
    values = 3 * 256 * 256
    each = 2 * values - (values // 2 + 2 * values // 64)
    assert (none.experts, none.bytes, none.touched) == (6, 6 * each, 0.0)
    assert (some.experts, some.bytes) == (12, 12 * each)
    assert some.touched == pytest.approx(6 / 3600)
    assert (most.experts, most.touched) == (48, 1.0)
    assert savings(manifest, layers, FORMATS["bf16"], (1.0,))[0].experts == 0

"""colibrid.tune.slo."""

from __future__ import annotations

import math

import pytest
from tune_results import cost, tried

from colibrid.errors import ConfigError
from colibrid.tune.result import Point, Quality, Task, Tried
from colibrid.tune.slo import Limit, excess, figures, misses, parse_slo, quality_misses, read_figure


def test_limits_are_read() -> None:
    """Names, operators with and without spaces, numbers in any form."""
    assert parse_slo("p99_itl_ms<30, kl <= 2e-2,top1> 0.9 ,tokens_per_s>=100", "generate") == (
        Limit("p99_itl_ms", "<", 30.0),
        Limit("kl", "<=", 0.02),
        Limit("top1", ">", 0.9),
        Limit("tokens_per_s", ">=", 100.0),
    )


@pytest.mark.parametrize(
    ("text", "task", "said"),
    [
        ("p99_itl<30", "generate", "did you mean p99_itl_ms?"),
        ("itl_ms<30", "generate", "did you mean p50_itl_ms or p99_itl_ms?"),
        ("cosine>0.9", "generate", "no figure 'cosine'"),
        ("kl<0.1", "embed", "there are cosine"),
        ("p99_ttft_ms<9", "score", "no figure 'p99_ttft_ms'"),
        ("kl=0.1", "generate", "'kl=0.1' is no limit"),
        ("kl<", "generate", "is no limit"),
        ("kl<30ms", "generate", "without a unit (given: '30ms')"),
        ("kl<nan", "generate", "compared with a number"),
        ("", "generate", "no limit in it"),
        (" , ", "generate", "no limit in it"),
        (",".join(["kl<1"] * 33), "generate", "33 limits, at most 32"),
    ],
)
def test_mistakes_are_named(text: str, task: Task, said: str) -> None:
    """With the nearest figure that the task has, or all of them."""
    with pytest.raises(ConfigError) as caught:
        parse_slo(text, task)
    assert said in str(caught.value)
    assert str(caught.value).startswith("--slo")


@pytest.mark.parametrize("task", ["generate", "score", "embed"])
def test_every_name_reads_a_figure(task: Task) -> None:
    """Each name that a task has stands for a field of its results."""
    names = dict.fromkeys(("loss", "kl", "top1", "divergence", "same", "exact", "cosine", "neighbours"), 0.5)
    quality = Quality(tokens=1, **names)
    for name in figures(task):
        assert read_figure(name, quality, cost()) is not None, name
        assert parse_slo(f"{name}<1", task)[0].name == name


def test_figures_come_from_where_their_names_say() -> None:
    """A spread is read at its quantile."""
    one = tried(loss=0.25, speed=200.0)
    assert read_figure("loss", one.quality, one.cost) == 0.25
    assert read_figure("p99_itl_ms", one.quality, one.cost) == 80.0
    assert read_figure("p50_ttft_ms", one.quality, one.cost) == 20.0
    assert read_figure("tokens_per_s", one.quality, one.cost) == 200.0
    assert read_figure("p50_itl_ms", one.quality, cost(itl_ms=None)) is None
    assert read_figure("tokens_per_s", one.quality, None) is None


def test_misses_say_what_and_by_how_much() -> None:
    """A limit that is kept is not among them; the bound itself is kept by <= and not by <."""
    one = tried(loss=0.25, kl=0.02)
    limits = parse_slo("loss<0.25,kl<=0.02,exact>0.5", "generate")
    assert misses(limits, one) == ["loss<0.25: loss is 0.25", "exact>0.5: not measured"]
    assert quality_misses(limits, one.quality) == ["loss<0.25: loss is 0.25"]
    assert quality_misses(parse_slo("tokens_per_s>1e9", "generate"), one.quality) == []


def test_distance_from_keeping_all() -> None:
    """What each is beyond its bound, as a share; infinite where something was not measured."""
    limits = parse_slo("loss<0.2,tokens_per_s>200", "generate")
    assert excess(limits, tried(loss=0.3, speed=100.0)) == pytest.approx(0.5 + 0.5)
    assert excess(limits, tried(loss=0.1, speed=300.0)) == 0
    assert excess(limits, Tried(point=Point(), quality=Quality(tokens=1, loss=0.1))) == math.inf

"""Lengths, arrivals and traces of `colibrid bench http`."""

from __future__ import annotations

import itertools
import random
from statistics import fmean, median
from typing import TYPE_CHECKING

import pytest
from bench_runs import make_load

from colibrid.cli.bench_load import (
    Lengths,
    Lognormal,
    Planned,
    Uniform,
    arrivals,
    draw,
    parse_lengths,
    plan,
    read_trace,
)
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "lengths", "words"),
    [
        ("128", 128, "128"),
        ("uniform:16-512", Uniform(16, 512), "16 to 512"),
        ("uniform:3-3", Uniform(3, 3), "3 to 3"),
        ("lognormal:128,0.8,2048", Lognormal(128, 0.8, 2048), "about 128 (lognormal, sigma 0.8, at most 2048)"),
        ("lognormal:90.5,1", Lognormal(90.5, 1, 4096), "about 90.5 (lognormal, sigma 1, at most 4096)"),
    ],
)
def test_lengths_are_read_and_said(text: str, lengths: Lengths, words: str) -> None:
    """Each form gives its value, which people can read."""
    assert parse_lengths("--o", text, 4096) == lengths
    assert str(lengths) == words


@pytest.mark.parametrize(
    "text",
    ["", "0", "-3", "4097", "1.5", "uniform:9-3", "uniform:0-3", "uniform:3-5000", "uniform:3", "lognormal:128",
     "lognormal:128,0", "lognormal:9,1,8", "lognormal:0.5,1", "lognormal:1.2.3,1", "normal:3,1"],
)  # fmt: skip
def test_other_lengths_are_refused(text: str) -> None:
    """The message has the option, the value and the forms."""
    with pytest.raises(ConfigError, match=r"--o '.*': write a number, uniform:LOW-HIGH, or lognormal:.* 1 to 4096"):
        parse_lengths("--o", text, 4096)


def test_lognormal_lengths_have_their_median_and_end() -> None:
    """The median is near; the limit cuts the tail off and does not heap it up; a single token is the least."""
    source = random.Random(3)
    wide = [draw(Lognormal(100, 0.5, 100_000), source) for _ in range(4000)]
    assert 95 <= median(wide) <= 105
    cut = [draw(Lognormal(100, 2.0, 150), source) for _ in range(4000)]
    assert max(cut) <= 150
    assert cut.count(150) < 100
    assert min(draw(Lognormal(1, 3.0, 9), source) for _ in range(100)) == 1


def test_uniform_lengths_have_all_values() -> None:
    """Both ends among them."""
    source = random.Random(1)
    assert {draw(Uniform(4, 9), source) for _ in range(200)} == set(range(4, 10))


def test_poisson_arrivals_have_their_rate_and_repeat() -> None:
    """Gaps are random with the mean of the rate; the seed gives them again."""
    load = make_load(rate=50.0, requests=4000)
    times = list(arrivals(load, None))
    assert times == list(arrivals(load, None))
    assert times != list(arrivals(make_load(rate=50.0, requests=4000, seed=1), None))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    # A constant gap would have a deviation of 0, and an exponential one that of its mean.
    assert fmean((gap - 1 / 50) ** 2 for gap in gaps) ** 0.5 == pytest.approx(1 / 50, rel=0.1)


def test_even_arrivals_and_their_ends() -> None:
    """The first at once; --seconds and --requests end them."""
    assert list(arrivals(make_load(rate=4.0, arrivals="fixed"), None)) == [0, 0.25, 0.5, 0.75]
    assert list(arrivals(make_load(rate=2.0, arrivals="fixed", requests=None, seconds=1.1), None)) == [0, 0.5, 1]


def test_plans_repeat_with_their_seed() -> None:
    """Lengths of two runs are the same, and others with another seed."""
    load = make_load(prompt_tokens=Uniform(1, 1000), max_tokens=Uniform(1, 1000))
    first, again, other = (list(itertools.islice(plan(load, None, seed), 20)) for seed in (1, 1, 2))
    assert first == again != other


def test_a_trace_is_read(tmp_path: Path) -> None:
    """Lines become requests; what they leave out is drawn; the report can say which file it was."""
    path = tmp_path / "t.jsonl"
    path.write_text('\ufeff{"at": 0.5, "prompt_tokens": 3}\n\n{"at": 0.5, "prompt": "Hi", "max_tokens": 7}\n')
    trace = read_trace(path)
    load = make_load(trace=trace.name, requests=None)
    assert load.open
    assert list(arrivals(load, trace)) == [0.5, 0.5]
    assert list(itertools.islice(plan(load, trace, 0), 3)) == [
        Planned(3, None, 2),
        Planned(0, "Hi", 7),
        Planned(3, None, 2),
    ]
    assert (trace.name.file, trace.name.lines, trace.name.timed, len(trace.name.sha256)) == ("t.jsonl", 2, True, 64)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "truncated"),
        ('{"at": 2}', "one of prompt and prompt_tokens is needed"),
        ('{"at": 2, "prompt": "a", "prompt_tokens": 3}', "one of prompt and prompt_tokens is needed"),
        ('{"at": 2, "prompt_tokens": 0}', "prompt_tokens is 0, and may be 1 to 1048576"),
        ('{"at": 2, "prompt": "a", "max_tokens": 9999999}', "max_tokens is 9999999"),
        ('{"at": -1, "prompt": "a"}', "at is -1"),
        ('{"at": 1e300, "prompt": "a"}', "at is 1e+300, and is seconds from the beginning, 0 to 1e+06"),
        (f'{{"at": {"[" * 100_000}', "`array`"),
        ('{"at": 0.5, "prompt": "a"}', "at is 0.5, before that of the line above, 1.0; sort the file"),
        ('{"prompt": "a"}', "either all lines have at, or none"),
        ('{"at": 2, "prompt": "a", "tokens": 3}', "unknown field `tokens`"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(line: str, problem: str, tmp_path: Path) -> None:
    """File, number of the line, what is wrong with it, and how lines are written."""
    path = tmp_path / "t.jsonl"
    path.write_text(f'{{"at": 1, "prompt_tokens": 3}}\n\n{line}\n')
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert f"--trace {path}, line 3: " in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(("text", "problem"), [("\n \n", "has no lines"), (None, "No such file")])
def test_a_trace_that_is_none(text: str | None, problem: str, tmp_path: Path) -> None:
    """An empty or missing file is one clear line."""
    path = tmp_path / "t.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_trace(path)

"""colibrid.config.load and tree, where keys are lists and maps: on a tree that has all kinds of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import pytest
from msgspec import Meta, field

from colibrid.config import tree
from colibrid.config.live import compare, with_live
from colibrid.config.load import Override, load
from colibrid.config.settings import About, Live, Restart, Section, Settings
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Worker(Section, frozen=True, kw_only=True):
    """One of several."""

    name: Annotated[str, About("required")]
    weight: Annotated[int, Meta(ge=1, le=9), About("share")] = 1


class Job(Section, frozen=True, kw_only=True):
    """By name."""

    level: Annotated[int, Meta(ge=0, le=3), About("how")] = 0
    hosts: Annotated[tuple[str, ...], Meta(max_length=2), About("where")] = ()


class Trial(Settings, frozen=True, kw_only=True):
    """The real tree and one key of each kind."""

    workers: Annotated[tuple[Worker, ...], Meta(max_length=3), Restart("list of sections")] = ()
    jobs: Annotated[dict[str, Job], Meta(max_length=2), Live("map of sections")] = field(default_factory=dict)
    numbers: Annotated[dict[str, Annotated[int, Meta(le=5)]], Meta(max_length=2), Live("map of numbers")] = field(
        default_factory=dict
    )
    plugins: Annotated[
        dict[str, Annotated[dict[str, Any], Meta(max_length=4)]], Meta(max_length=2), Live("map of anything")
    ] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def trial(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tree under test in place of the real one."""

    def forget() -> None:
        for cached in (tree.tree, tree.keys, tree.sections):
            cached.cache_clear()

    monkeypatch.setattr(tree, "Settings", Trial)
    forget()
    yield
    forget()


def _load(folder: Path, text: str, environment: dict[str, str] | None = None, *overrides: Override) -> Any:
    path = folder / "c.yaml"
    path.write_text(text)
    return load(path, environment, overrides)


def _errors(folder: Path, text: str, environment: dict[str, str] | None = None, *overrides: Override) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        _load(folder, text, environment, *overrides)
    return [line.replace(f"{folder}/", "") for line in str(caught.value).splitlines()]


TEXT = "text (in quotes if it looks like a number)"
GOOD = """\
workers:
  - name: a
    weight: 2
  - {name: b}
jobs:
  one: {level: 3, hosts: [x, y]}
  two:
numbers: {a: 1, b: 2e0}
plugins:
  p1: {deep: {list: [1, two, {three: 3}]}, on: true}
"""


def test_file(tmp_path: Path) -> None:
    """Lists, maps, and maps of anything become tuples, dicts and plain values, each with its origin."""
    loaded = _load(tmp_path, GOOD)
    settings = loaded.settings
    assert settings.workers == (Worker(name="a", weight=2), Worker(name="b"))
    assert settings.jobs == {"one": Job(level=3, hosts=("x", "y")), "two": Job()}
    assert settings.numbers == {"a": 1, "b": 2}
    assert settings.plugins == {"p1": {"deep": {"list": [1, "two", {"three": 3}]}, "on": True}}
    assert loaded.origins["jobs.one.level"].endswith("c.yaml:6:16")
    assert loaded.origins["workers.1.name"].endswith("c.yaml:4:12")
    assert loaded.origins["plugins.p1.on"].endswith("c.yaml:10:48")


def test_environment_and_command_line(tmp_path: Path) -> None:
    """Variables add names and change items; --set replaces a list; both take YAML in brackets."""
    environment = {
        "COLIBRID_JOBS__TWO__LEVEL": "2",
        "COLIBRID_NUMBERS__A": "5",
        "COLIBRID_WORKERS__1__WEIGHT": "7",
        "COLIBRID_PLUGINS__P2__KEY": "[1, 2]",
        "COLIBRID_JOBS__ONE__HOSTS": "z",
    }
    settings = _load(tmp_path, GOOD, environment).settings
    assert [worker.weight for worker in settings.workers] == [2, 7]
    assert settings.jobs == {"one": Job(level=3, hosts=("z",)), "two": Job(level=2)}
    assert settings.numbers == {"a": 5, "b": 2}
    assert settings.plugins["p2"] == {"key": [1, 2]}
    only = _load(tmp_path, GOOD, None, Override("workers", "[{name: c}]", "--set")).settings.workers
    assert only == (Worker(name="c"),)


def test_errors_have_places(tmp_path: Path) -> None:
    """Wrong items, unknown and missing keys, too many and bad names are all told at once."""
    text = """\
workers:
  - weight: 10
  - {name: b, wieght: 1}
jobs:
  one: {level: 3, hosts: [x, [y]]}
  "a b": {}
  c: 5
  d: {}
numbers: [1]
plugins: {p: {a: 1, b: 2, c: 3, d: 4, e: 5}}
"""
    assert _errors(tmp_path, text) == [
        "c.yaml:2:13: workers.0.weight must be a whole number from 1 to 9 (given: '10')",
        "c.yaml:3:15: unknown key 'workers.1.wieght' (given: '1'); did you mean workers.1.weight?",
        f"c.yaml:5:30: jobs.one.hosts must be a list of at most 2 items, each {TEXT} (given: a list in it)",
        "c.yaml:6:3: a name in jobs must be 1 to 64 letters, digits, - and _ (given: 'a b')",
        "c.yaml:7:6: jobs.c is a section; its keys go into indented lines below it",
        "c.yaml:5:3: jobs has 3 names; at most 2 are allowed",
        "c.yaml:9:10: numbers is a map; its names go into indented lines below it",
        "c.yaml:10:14: plugins.p has 5 names; at most 4 are allowed",
        f"c.yaml:2:5: workers.0.name is missing; it must be {TEXT}",
    ]
    assert _errors(tmp_path, "workers: {}\n") == [
        "c.yaml:1:10: workers is a list; its items go into lines below it that begin with -"
    ]
    gap = _errors(tmp_path, "", {"COLIBRID_WORKERS__1__NAME": "b"})
    assert gap == ["environment COLIBRID_WORKERS__1__NAME: there is no workers.0 before it"]


def test_marker_of_the_whole_counts(tmp_path: Path) -> None:
    """A changed item of a live map is taken over; a changed list that needs a restart is named."""
    before = _load(tmp_path, GOOD).settings
    after = _load(tmp_path, GOOD.replace("level: 3", "level: 1").replace("weight: 2", "weight: 3")).settings
    change = compare(before, after)
    assert (change.live, change.restart) == (("jobs",), ("workers",))
    merged = with_live(before, after)
    assert (merged.jobs["one"].level, merged.workers[0].weight) == (1, 2)

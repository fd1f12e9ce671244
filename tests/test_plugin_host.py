"""colibrid.plugin_host: what is loaded, and how a bad plugin is named."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import plugin_package
import pytest

from colibrid.config.load import load
from colibrid.errors import ConfigError, RequestError
from colibrid.model.families import mixtral
from colibrid.plugin_host import Health, Hook, PluginFaultError, Plugins, collect, installed, load_plugins, package_of
from colibrid.plugins import API_VERSION, Parts
from colibrid.text.tools import Layout, ToolFormat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Loads = Callable[[str], Plugins]


@pytest.fixture
def loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    """The plugins of a configuration's text, with the example installed."""
    monkeypatch.syspath_prepend(plugin_package.metadata(tmp_path / "site"))
    monkeypatch.syspath_prepend(plugin_package.SOURCE)

    def make(text: str) -> Plugins:
        file = tmp_path / "c.yaml"
        file.write_text(text)
        loaded = load(file)
        return load_plugins(loaded.settings.plugins, loaded.origins)

    return make


def refused(loads: Loads, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loads(text)
    return [line.rpartition("/")[2] for line in str(caught.value).splitlines()]


def other(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str = "PLUGIN") -> None:
    """Installs one more package, whose plugin is `bad`."""
    (folder / "bad_plugin.py").write_text(source)
    monkeypatch.syspath_prepend(plugin_package.metadata(folder, name="bad", points={"bad": f"bad_plugin:{target}"}))
    monkeypatch.delitem(sys.modules, "bad_plugin", raising=False)


HEAD = "import msgspec\nfrom colibrid.plugins import *\nclass S(msgspec.Struct): pass\n"


def test_only_what_is_named_is_imported(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed plugin is seen, but its code runs only when the configuration names it."""
    monkeypatch.delitem(sys.modules, "colibrid_example", raising=False)
    assert loads("plugins:\n").names == ()
    assert [package_of(entry) for entry in installed() if entry.name == "example"] == ["colibrid-example 1.0"]
    assert "colibrid_example" not in sys.modules
    found = loads("plugins:\n  example: {people: {alice: her-own-key}}\n")
    assert "colibrid_example" in sys.modules
    assert (found.names, len(found.filters), len(found.policies), len(found.authenticators)) == (("example",), 1, 1, 1)
    assert (found.observers, found.sinks) == ((), ())
    assert [family.architecture for family in found.families] == ["ExampleForCausalLM"]


def test_settings_are_told_with_their_places(loads: Loads) -> None:
    """Every wrong setting has file, line and column, also inside lists and maps."""
    text = """\
plugins:
  example:
    most_tokens: 0
    people:
      alice: her-own-key
      bob: short
    allowed_ids: [1, two]
    word: x
"""
    assert refused(loads, text) == [
        "c.yaml:3:18: plugins.example.most_tokens: expected int >= 1",
        "c.yaml:6:12: plugins.example.people.bob: expected str of length >= 8",
        "c.yaml:7:22: plugins.example.allowed_ids.1: expected int, got str",
        (
            "c.yaml:8:11: plugins.example.word: unknown key; known: forbidden, most_tokens, bias, allowed_ids, pattern, stop, "
            "people, journal, samples, interval_s"
        ),
    ]


def test_a_plugin_that_cannot_be_made(loads: Loads) -> None:
    """What its make raises is told with its name and place."""
    assert refused(loads, "plugins:\n  example: {bias: {x: 1}}\n") == [
        (
            "c.yaml:2:12: plugins.example: it cannot be made: ValueError: invalid literal for int() with base 10: 'x'; correct "
            "its settings, or remove it"
        )
    ]


def test_names_that_nobody_has(loads: Loads) -> None:
    """An unknown name is told with those that are installed; all of them at once."""
    lines = refused(loads, "plugins:\n  exampel: {}\n  more:\n")
    assert [line.partition(" (")[0] for line in lines] == [
        "c.yaml:2:12: plugins.exampel: no installed package has a plugin of this name",
        "c.yaml:3:3: plugins.more: no installed package has a plugin of this name",
    ]
    assert "example" in lines[0]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nowhere_at_all\n", "bad 1.0 cannot be loaded: ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("raise SystemExit(3)\n", "bad 1.0 cannot be loaded: SystemExit: 3"),
        ("PLUGIN = 1\n", "bad 1.0: bad_plugin:PLUGIN is no colibrid.plugins.Plugin"),
        (HEAD + "PLUGIN = Plugin(api=99, settings=S, make=lambda s: Parts())\n",
         f"bad 1.0 was written for version 99 of the plugin API, this is {API_VERSION}"),
        (HEAD + "PLUGIN = Plugin(api=1, settings=S, make=lambda s: None)\n", "its make returns no colibrid.plugins.Parts"),
        (HEAD + "class Sink:\n    interval_s = 0.5\nPLUGIN = Plugin(api=1, settings=S, make=lambda s: Parts(metrics_sink=Sink()))\n",
         "interval_s of its metrics sink is 0.5"),
        (HEAD + "class S(msgspec.Struct):\n    a: int\nPLUGIN = Plugin(api=1, settings=S, make=lambda s: Parts())\n", "it is missing"),
    ],
)  # fmt: skip
def test_bad_plugins_are_named(
    loads: Loads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    """A plugin that cannot be loaded is a configuration error with its name, package and reason."""
    other(tmp_path, monkeypatch, source)
    (line,) = refused(loads, "plugins:\n  bad: {}\n")
    assert line.startswith("c.yaml:2:8: plugins.bad")
    assert reason in line


def test_two_packages_of_one_name(loads: Loads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of two plugins is meant is not guessed."""
    point = {"example": "colibrid_example:PLUGIN"}
    monkeypatch.syspath_prepend(plugin_package.metadata(tmp_path / "twice", name="twice", points=point))
    (line,) = refused(loads, "plugins: {example: {}}\n")
    assert "several packages have it: " in line
    assert "twice 1.0" in line


def test_one_format_of_a_kind(loads: Loads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plugins with a tool format, or with a reasoning format, contradict each other."""
    other(tmp_path, monkeypatch, "from colibrid_example import PLUGIN\n")
    assert refused(loads, "plugins:\n  example: {}\n  bad: {}\n") == [
        "c.yaml:3:8: plugins.bad: example has a tool format already; name one",
        "c.yaml:3:8: plugins.bad: example has a reasoning format already; name one",
    ]


def test_hook() -> None:
    """Refusals pass, mistakes become a 500 with the plugin's name, slow calls are counted."""
    health = Health()
    hook = Hook("mine", "request_filter", object(), health)
    with pytest.raises(RequestError, match="no") as meant, hook.call():
        raise RequestError("no")
    assert (type(meant.value), health.failures) == (RequestError, 0)
    with pytest.raises(PluginFaultError, match="plugin mine failed \\(request_filter\\)") as caught, hook.call():
        raise KeyError("x")
    assert (caught.value.status, caught.value.code, health.failures, health.slow) == (500, "plugin_failed", 1, 0)
    health.took("mine", "request_filter", 0.5)
    assert health.slow == 1


def test_reader_of_tools_that_fails() -> None:
    """A section on which a plugin's reader fails is no call; a reader that says so is no failure."""

    def read(section: str) -> Any:
        if "odd" in section:
            raise KeyError(section)
        raise ValueError("no call")

    form = ToolFormat(name="x", begins=("<",), layout=Layout(opening="<{}"), read=read)
    plugins = collect({"mine": Parts(tool_format=form, families=(mixtral.FAMILY,))})
    assert plugins.tool_format is not None
    assert plugins.tool_format.parse("<plain", frozenset({"f"})) is None
    assert plugins.health.failures == 0
    assert plugins.tool_format.parse("<odd", frozenset({"f"})) is None
    assert plugins.health.failures == 1


def test_settings_with_rules_of_their_own(loads: Loads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What __post_init__ of the settings refuses is told at the plugin's place."""
    source = HEAD + (
        "class Own(msgspec.Struct):\n    low: int = 0\n    high: int = 1\n    def __post_init__(self):\n"
        "        if self.low > self.high:\n            raise ValueError('low is above high')\n"
        "PLUGIN = Plugin(api=1, settings=Own, make=lambda s: Parts())\n"
    )
    other(tmp_path, monkeypatch, source)
    assert refused(loads, "plugins:\n  bad: {low: 5}\n") == ["c.yaml:2:8: plugins.bad: low is above high"]
    assert loads("plugins:\n  bad: {low: 1}\n").names == ("bad",)

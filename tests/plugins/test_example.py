"""The example plugin in a real daemon, and the page on writing one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import plugin_package
from daemon_process import DaemonProcess

from colibrid.plugins import API_VERSION, Plugin

if TYPE_CHECKING:
    import pytest

    from colibrid.model.pack import Pack

PAGE = Path(__file__).parents[2] / "docs" / "PLUGINS.md"
CONFIG = """\
engine: {threads: 1, device: cpu}
plugins:
  example:
    forbidden: [secret]
    people: {alice: her-own-key}
    pattern: "(yes|no)"
    journal: %s
"""


def environment(folder: Path) -> dict[str, str]:
    """With the example installed."""
    paths = [
        str(plugin_package.metadata(folder / "site")),
        str(plugin_package.SOURCE),
        os.environ.get("PYTHONPATH", ""),
    ]
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*paths, str(PAGE.parents[1])]))}


def test_daemon_with_the_example(bundled_pack: Pack, tmp_path: Path) -> None:
    """Key, filter, form of the answer and journal of one daemon are the plugin's; the engine follows its masks."""
    config, journal = tmp_path / "c.yaml", tmp_path / "journal"
    config.write_text(CONFIG % journal)
    arguments = (str(bundled_pack.path), "--config", str(config))
    key = {"Authorization": "Bearer her-own-key"}
    ask = {"prompt": "Is Oslo in Norway?", "max_tokens": 8}
    with DaemonProcess(tmp_path, *arguments, environment=environment(tmp_path)) as daemon:
        daemon.wait_ready()
        assert daemon.request("POST", "/v1/completions", ask)[0] == 401
        status, answer = daemon.request("POST", "/v1/completions", ask, key)
        assert (status, answer["choices"][0]["text"] in {"yes", "no"}) == (200, True)
        assert daemon.request("POST", "/v1/completions", ask | {"prompt": "a secret"}, key)[0] == 400
        assert daemon.wait_event("plugins")["names"] == ["example"]
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [(line["key"], line["status"]) for line in lines if line["path"] == "/v1/completions"] == [
        (None, 401),
        ("alice", 200),
        ("alice", 400),
    ]


def test_daemon_refuses_a_plugin_that_cannot_be_loaded(tmp_path: Path) -> None:
    """Exit code 78 with name and place; nothing of the model is looked at."""
    config = tmp_path / "c.yaml"
    config.write_text("plugins:\n  example: {most_tokens: many}\n  nobody: {}\n")
    done = subprocess.run(
        [sys.executable, "-m", "colibrid.cli", "serve", "/nonexistent/model", "--config", str(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **environment(tmp_path)},
    )
    assert done.returncode == 78
    assert done.stderr.splitlines()[0] == (
        f"colibrid: {config}:2:26: plugins.example.most_tokens: expected int | null, got str"
    )
    assert f"{config}:3:11: plugins.nobody: no installed package has a plugin of this name" in done.stderr


def test_page_shows_a_plugin_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of docs/PLUGINS.md is a plugin of this interface, and does what it says."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "plugin_of_the_page.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import plugin_of_the_page as page

    assert isinstance(page.PLUGIN, Plugin)
    assert page.PLUGIN.api == API_VERSION
    part = page.PLUGIN.make(page.Settings(most=5)).request_filter
    assert part.filter(None, {"max_tokens": 9}) == {"max_tokens": 5}
    assert part.filter(None, {"max_tokens": 3}) is None

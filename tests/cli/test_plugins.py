"""`colibrid plugins`, and plugins in other verbs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import msgspec
import plugin_package
import pytest
from random_cases import CASES
from random_checkpoints import write_checkpoint

from colibrid.cli.main import run
from colibrid.model import families

if TYPE_CHECKING:
    from pathlib import Path

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs the example plugin; families that it adds are forgotten."""
    monkeypatch.syspath_prepend(plugin_package.metadata(tmp_path / "site"))
    monkeypatch.syspath_prepend(plugin_package.SOURCE)
    monkeypatch.setattr(families, "_plugged", [])


def test_list(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each installed plugin is listed with its package, and whether it is named; nothing is imported."""
    monkeypatch.delitem(sys.modules, "colibrid_example", raising=False)
    assert run(["plugins", "list"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("example "))
    assert line.split(maxsplit=1)[1] == "not named  colibrid-example 1.0, colibrid_example:PLUGIN"
    config = tmp_path / "c.yaml"
    config.write_text("plugins: {example: {}, other: {}}\n")
    assert run(["plugins", "list", "--config", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if line.startswith(("example ", "other "))] == [
        ["example", "named"],
        ["other", "named"],
    ]
    assert lines[-1].endswith("is not installed")
    assert "colibrid_example" not in sys.modules


def test_config_check_loads_plugins(tmp_path: Path, capsys: Capture) -> None:
    """Mistakes of a plugin's settings are found by `config check`."""
    config = tmp_path / "c.yaml"
    config.write_text("engine: {device: cpu}\nplugins: {example: {interval_s: 0}}\n")
    assert run(["config", "check", str(config)]) == 78
    assert f"{config}:2:33: plugins.example.interval_s: expected float >= 1.0" in capsys.readouterr().err
    config.write_text("engine: {device: cpu}\nplugins: {example: {interval_s: 5}}\n")
    assert run(["config", "check", str(config)]) == 0


def test_convert_with_a_family_of_a_plugin(tmp_path: Path, capsys: Capture) -> None:
    """A checkpoint of a plugin's architecture is converted where the configuration names the plugin, else refused."""
    case = next(case for case in CASES if case.family == "mixtral")
    source = write_checkpoint(case, tmp_path / "source")
    described = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(described | {"architectures": ["ExampleForCausalLM"]}))
    convert = ["convert", "-q", str(source), str(tmp_path / "pack")]
    assert run(convert) == 78
    assert "architecture ExampleForCausalLM is not supported" in capsys.readouterr().err
    config = tmp_path / "c.yaml"
    config.write_text("plugins: {example: {}}\n")
    assert run([*convert, "--config", str(config)]) == 0
    assert json.loads((tmp_path / "pack" / "colibri.json").read_text())["family"] == "ExampleForCausalLM"


def test_doctor_loads_plugins(tmp_path: Path, capsys: Capture) -> None:
    """A plugin's mistake is a finding of the doctor."""
    config = tmp_path / "c.yaml"
    config.write_text("plugins: {example: {interval_s: 0}}\n")
    assert run(["doctor", "--config", str(config)]) == 78
    assert "plugins.example.interval_s: expected float >= 1.0" in capsys.readouterr().out


def test_a_family_known_already(tmp_path: Path, capsys: Capture) -> None:
    """Two families of one architecture are a configuration error."""
    config = tmp_path / "c.yaml"
    config.write_text("plugins: {example: {}}\n")
    families.add_families([msgspec.structs.replace(families.FAMILIES[0], architecture="ExampleForCausalLM")])
    assert run(["config", "check", str(config)]) == 78
    assert "ExampleForCausalLM is a family that is known already" in capsys.readouterr().err

"""colibrid.cli.options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from colibrid.cli.options import load_settings
from colibrid.config.environment import read_environment

if TYPE_CHECKING:
    from pathlib import Path


def test_named_options_beat_set_beats_environment(tmp_path: Path) -> None:
    """--port wins over --set, which wins over COLIBRID_SERVER__PORT, which wins over the file of COLIBRID_CONFIG."""
    file = tmp_path / "c.yaml"
    file.write_text("server: {port: 1}\nlimits: {queue: 5}\n")
    environment = read_environment({"COLIBRID_CONFIG": str(file), "COLIBRID_SERVER__PORT": "2"})
    assert load_settings(environment, None, (), {}).settings.server.port == 2
    assert load_settings(environment, None, ("server.port=3",), {"port": None}).settings.server.port == 3
    loaded = load_settings(environment, None, ("server.port=3",), {"port": "4"})
    assert (loaded.settings.server.port, loaded.settings.limits.queue) == (4, 5)


def test_config_option_beats_the_environment(tmp_path: Path) -> None:
    """--config replaces the file that COLIBRID_CONFIG names."""
    one, two = tmp_path / "1.yaml", tmp_path / "2.yaml"
    one.write_text("limits: {queue: 1}\n")
    two.write_text("limits: {queue: 2}\n")
    environment = read_environment({"COLIBRID_CONFIG": str(one)})
    assert load_settings(environment, str(two), (), {}).settings.limits.queue == 2

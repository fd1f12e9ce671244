"""`colibrid plugins list`."""

from __future__ import annotations

import click

from colibrid.cli.options import load_settings
from colibrid.config.environment import read_environment
from colibrid.plugin_host import installed, package_of


@click.group()
def plugins() -> None:
    """Plugins of this installation; the configuration's `plugins:` names those that are loaded (docs/PLUGINS.md)."""


@plugins.command("list", short_help="What is installed, and which of it the configuration names.")
@click.option("--config", "config_file", metavar="FILE", help="YAML with plugins:.")
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Any setting, over the file's.")
def list_plugins(config_file: str | None, sets: tuple[str, ...]) -> None:
    """Name, package and place of each installed plugin, and whether the configuration names it. None is imported.

    `colibrid config check` loads those that are named, and tells what is wrong with them.
    """
    named = load_settings(read_environment(), config_file, sets, {}).settings.plugins
    entries = installed()
    if not entries:
        print("no plugins are installed")
    for entry in entries:
        use = "named" if entry.name in named else "not named"
        print(f"{entry.name:<24} {use:<10} {package_of(entry)}, {entry.value}")
    for name in named:
        if all(entry.name != name for entry in entries):
            print(f"{name:<24} {'named':<10} is not installed")

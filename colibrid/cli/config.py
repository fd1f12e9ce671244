"""`colibrid config check|show|schema|init|reload`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from colibrid.cli.admin_client import admin_client, admin_options
from colibrid.cli.options import engine_options, load_settings, profile_option, use_plugins
from colibrid.cli.shapes import SHAPES
from colibrid.config.environment import read_environment
from colibrid.config.load import BUILT_IN
from colibrid.errors import ColibridError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from colibrid.cli.plan import Found
    from colibrid.config.settings import Settings
    from colibrid.config.tree import Node


@click.group()
def config() -> None:
    """Check, show and describe configurations. The reference is docs/reference/configuration.md."""


@config.command(short_help="Tell all mistakes of a file, and what its model takes of memory.")
@click.argument("file", metavar="FILE")
@click.option("--model", metavar="MODEL", help="In place of model.path.")
@click.option(
    "--shape", type=click.Choice(list(SHAPES)), help="In place of MODEL: a published model that need not be here."
)
@click.option(
    "--device-memory",
    "memory",
    metavar="SIZE",
    help="Free memory of the device, as 80GiB: one that is not this host's.",
)
@click.option("--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Any setting, over the file's.")
def check(file: str, model: str | None, shape: str | None, memory: str | None, sets: tuple[str, ...]) -> None:
    """Tell all mistakes of FILE at once, with line and column, and plan the memory of its model on this host.

    With --device-memory for a GPU (engine.device: cpu: a host) of which so much is free. The environment counts as it does
    for `colibrid serve`. Nothing is converted, loaded or bound. Exit code 78: something is wrong.
    """
    environment = read_environment()
    loaded = load_settings(environment, file, sets, {})
    plugins = use_plugins(loaded)

    # Only now: mistakes of the file are told without all that.
    from colibrid.cli.access import check_access, check_hosts, has_keys  # noqa: PLC0415
    from colibrid.cli.plan import find_model, find_shape, make_plan, plan_lines, settle  # noqa: PLC0415
    from colibrid.cli.profiles import read_profiles  # noqa: PLC0415
    from colibrid.config.sizes import parse_bytes  # noqa: PLC0415
    from colibrid.engine.library import Library  # noqa: PLC0415
    from colibrid.model.pack import is_pack  # noqa: PLC0415

    if shape is not None and model is not None:
        raise click.UsageError("--shape takes the place of --model; leave one of them out")
    device_memory = None if memory is None else _device_memory(memory, parse_bytes)
    library = Library()
    absent_gpu = device_memory is not None
    settings = settle(loaded.settings, model, environment, library, absent_gpu=absent_gpu)
    found = find_model(settings, model, environment) if shape is None else find_shape(settings, shape)
    read_profiles(settings, found.manifest, same_pack=is_pack(found.folder))
    plan = make_plan(settings, found, library, device_memory)
    count = sum(origin != BUILT_IN for origin in loaded.origins.values())
    print(f"{file}: no mistakes, {count} {'key is' if count == 1 else 'keys are'} set")
    for line in plan_lines(plan, found.manifest):
        print(line)
    try:
        check_access(settings, environment, ())
        if settings.server.listen is None:
            check_hosts(
                [settings.server.host], with_keys=has_keys(settings, environment, ()) or bool(plugins.authenticators)
            )
    except ConfigError as error:  # the file may be for another host
        for line in str(error).splitlines():
            print(f"  warning  here it would not start: {line}")


def _device_memory(text: str, parse: Any) -> int:
    try:
        return int(parse(text))
    except ConfigError as error:
        raise ConfigError(f"--device-memory: {error}") from error


@config.command(short_help="Print the settings that are in force.")
@engine_options
@profile_option
@click.option("--model", metavar="MODEL", help="In place of model.path.")
@click.option("--origin", is_flag=True, help="Say beside each value where it comes from.")
def show(
    config_file: str | None, sets: tuple[str, ...], model: str | None, *, origin: bool, **given: str | None
) -> None:
    """Print all settings as YAML, as `colibrid serve` with the same options would have them.

    Where a setting leaves it to the model, the model's own value is shown.
    """
    environment = read_environment()
    loaded = load_settings(environment, config_file, sets, given)

    from colibrid.cli.model_values import model_values, with_values  # noqa: PLC0415 (only for this)
    from colibrid.cli.plan import find_model  # noqa: PLC0415
    from colibrid.config.render import yaml_text  # noqa: PLC0415

    origins = dict(loaded.origins)
    settings = loaded.settings
    try:
        on_cpu = settings if settings.engine.device != "auto" else _on_cpu(settings)  # descriptions are the same
        found: Found | None = find_model(on_cpu, model, environment)
    except ColibridError as error:
        found = None
        click.echo(f"colibrid: the model's own values are left out: {str(error).splitlines()[0]}", err=True)
    if found is not None:
        values = {path: value for path, value in model_values(found).items() if origins[path] == BUILT_IN}
        settings = with_values(settings, values)
        origins.update(dict.fromkeys(values, f"model {found.manifest.name}"))
    print(yaml_text(settings, _origin_remark(origins) if origin else _no_remark), end="")


def _on_cpu(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, engine=msgspec.structs.replace(settings.engine, device="cpu"))


def _origin_remark(origins: Mapping[str, str]) -> Any:
    return lambda _node, path: origins.get(path, "")


def _no_remark(_node: Node, _path: str) -> str:
    return ""


@config.command(short_help="Print the JSON Schema of the file, for editors.")
def schema() -> None:
    """Print the JSON Schema of the configuration file. x-live marks the keys that SIGHUP reloads."""
    from colibrid.config import documents  # noqa: PLC0415 (only for this)

    print(documents.schema(), end="")


@config.command(short_help="Write a file with every key, its default and its meaning.")
@click.argument("file", metavar="[FILE]", required=False)
def init(file: str | None) -> None:
    """Write FILE with every key, its default and its meaning, and the schema for editors beside it.

    Without FILE: print it. A file that exists is left alone.
    """
    from colibrid.config import documents  # noqa: PLC0415 (only for this)

    if file is None:
        print(documents.default_file(), end="")
        return
    path = Path(file)
    try:
        with path.open("x", encoding="utf-8") as out:
            out.write(documents.default_file())
        path.with_name(documents.SCHEMA_FILE).write_text(documents.schema(), encoding="utf-8")
    except FileExistsError as error:
        raise ConfigError(f"{file} exists; name another file, or remove it first") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; choose another folder") from error
    print(f"{file}: every key with its default; {documents.SCHEMA_FILE} beside it is for editors")


@config.command(short_help="Have a running daemon take the changed settings over.")
@admin_options
def reload(config_file: str | None, sets: tuple[str, ...], admin_socket: str | None) -> None:
    """Have the running daemon read its configuration again, as SIGHUP does, and say what came of it.

    The live keys are taken over, all or none; changed keys that need a restart are named. Exit code 1: it was refused.
    """
    change = admin_client(config_file, sets, admin_socket).post("/admin/reload", {})
    print(f"changed: {', '.join(change['changed']) or 'nothing'}")
    if change["needs_restart"]:
        print(f"after a restart only: {', '.join(change['needs_restart'])}")

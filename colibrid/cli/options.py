"""Options that several verbs share, and how they become settings.

Values stay text here: bounds and types are declared once, in config/settings, and checked by config/load.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from colibrid.config.load import BUILT_IN, Override, load
from colibrid.config.profile import read_profile
from colibrid.errors import ConfigError
from colibrid.paths import user_path
from colibrid.plugin_host import Plugins, load_plugins

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from colibrid.config.environment import Environment
    from colibrid.config.load import Loaded
    from colibrid.config.settings import Settings

_F = TypeVar("_F", bound="Callable[..., Any]")

# parameter -> (setting, option names, metavar, help)
_SERVER = {
    "host": ("server.host", ("--host",), "ADDRESS", "Address to bind."),
    "port": ("server.port", ("--port",), "PORT", "Port to bind; 0: any free one."),
    "api_key_file": (
        "auth.keys_file",
        ("--api-key-file",),
        "FILE",
        "Keys that clients must send: see `colibrid keys add`.",
    ),
    "served_name": ("model.served_name", ("--served-model-name",), "NAME", "Model id in the API."),
    "slots": ("batch.slots", ("--max-batch-size",), "N", "Requests computed together, at most 64."),
}
_ENGINE = {
    "device": ("engine.device", ("--device",), "DEVICE", "auto, cpu or cuda; auto: the GPU if it can serve."),
    "experts": ("experts.per_token", ("--expert-capacity",), "K", "Experts that a token may use."),
    "seq_len": ("model.max_seq_len", ("--max-seq-len", "--max-model-len"), "TOKENS", "Prompt + output of a request."),
    "fraction": (
        "memory.gpu_fraction",
        ("--gpu-memory-utilization",),
        "FRACTION",
        "The most of the device's memory to use (CPU: of the available RAM).",
    ),
}


def engine_options(function: _F) -> _F:
    """--config, --set and the options of the engine."""
    function = click.option(
        "--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Any setting of the configuration file."
    )(function)
    for parameter in reversed(_ENGINE):
        function = _option(parameter, *_ENGINE[parameter])(function)
    return click.option("--config", "config_file", metavar="FILE", help="YAML; see conf/colibrid.yaml for all keys.")(
        function
    )


def server_options(function: _F) -> _F:
    """The options of the daemon, beyond the engine's."""
    for parameter in reversed(_SERVER):
        function = _option(parameter, *_SERVER[parameter])(function)
    return function


def profile_option(function: _F) -> _F:
    """--profile."""
    return click.option(
        "--profile", metavar="FILE", help="What `colibrid tune` has chosen; other options come before it."
    )(function)


def load_settings(
    environment: Environment, config_file: str | None, sets: Sequence[str], given: Mapping[str, str | None]
) -> Loaded:
    """Settings from all sources; `given` holds option parameters by name, None where absent."""
    overrides = []
    for assignment in sets:  # named options come later and win
        key, equals, text = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment!r}: write it as section.key=value")
        overrides.append(Override(key.strip(), text, "--set"))
    known = _ENGINE | _SERVER
    profile_file = given.get("profile")
    profile = None if profile_file is None else read_profile(user_path(profile_file))
    for parameter, value in given.items():
        if value is not None and parameter != "profile":
            setting, names, _, _ = known[parameter]
            overrides.append(Override(setting, value, ", ".join(names)))
    path = Path(config_file) if config_file is not None else environment.config_file
    return load(
        path,
        environment.settings,
        overrides,
        profile=None if profile is None else (profile.source, profile.root),
    )


def use_plugins(loaded: Loaded) -> Plugins:
    """The plugins that the settings name, their families known from now on. ConfigError tells all that is wrong."""
    if not loaded.settings.plugins:
        return Plugins()
    from colibrid.model.families import add_families  # noqa: PLC0415 (only for these)

    plugins = load_plugins(loaded.settings.plugins, loaded.origins)
    add_families(plugins.families)
    return plugins


def quietly(loaded: Loaded) -> Settings:
    """Of a verb whose output is its result: without a level in the configuration only warnings are logged."""
    from colibrid.ops.logging import configure  # noqa: PLC0415 (not for verbs that log nothing)

    settings = loaded.settings
    if loaded.origins["logging.level"] == BUILT_IN:
        logging = msgspec.structs.replace(settings.logging, level="warning")
        settings = msgspec.structs.replace(settings, logging=logging)
    configure(settings.logging)
    return settings


def _option(parameter: str, _setting: str, names: tuple[str, ...], metavar: str, text: str) -> Callable[[_F], _F]:
    return click.option(*names, parameter, metavar=metavar, help=text)

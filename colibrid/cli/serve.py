"""`colibrid serve [MODEL]`: gathers the settings, then hands over to cli/daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from colibrid.cli.elsewhere import instead_of
from colibrid.cli.options import engine_options, load_settings, profile_option, server_options, use_plugins
from colibrid.config.environment import read_environment
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from colibrid.config.load import Loaded
    from colibrid.model.manifest import Manifest


class _Serve(click.Command):
    """A command that knows what other servers call its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)  # the parser takes words away
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            message = instead_of(error.option_name, given)
            if message is None:
                raise
            raise click.UsageError(message, ctx) from None


@click.command(cls=_Serve, short_help="Serve a model over the OpenAI API.")
@click.argument("model", metavar="[MODEL]", required=False)
@engine_options
@server_options
@profile_option
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    metavar="KEY",
    help="A key that clients must send; others on this machine can see it, prefer --api-key-file.",
)
@click.option("--model-path", metavar="MODEL", help="The same as MODEL.")
@click.option("--num-layers", type=click.IntRange(min=1), metavar="N", help="Checked against the model.")
@click.option("--num-experts", type=click.IntRange(min=0), metavar="N", help="Checked against the model.")
def serve(
    model: str | None,
    config_file: str | None,
    sets: tuple[str, ...],
    api_keys: tuple[str, ...],
    model_path: str | None,
    num_layers: int | None,
    num_experts: int | None,
    **given: str | None,
) -> int:
    """Serve MODEL over the OpenAI API: a pack, a Hugging Face checkpoint folder, or org/name from the local Hugging
    Face cache. Without MODEL: model.path of the configuration, else the small model that comes with the package.

    A checkpoint is converted into the cache folder on first use.
    """
    if model is not None and model_path is not None and model != model_path:
        raise ConfigError(f"MODEL is {model!r} and --model-path is {model_path!r}; give one of them")
    environment = read_environment()

    def read() -> Loaded:
        return load_settings(environment, config_file, sets, given)

    loaded = read()
    plugins = use_plugins(loaded)

    # Only now: reading settings and their errors need none of this.
    from colibrid.cli.daemon import Order, run_daemon  # noqa: PLC0415

    return run_daemon(
        Order(
            settings=loaded.settings,
            reload=lambda: read().settings,
            plugins=plugins,
            environment=environment,
            profile=given["profile"],
            model=model if model is not None else model_path,
            api_keys=api_keys,
            num_layers=num_layers,
            num_experts=num_experts,
        )
    )


def check_shape(manifest: Manifest, num_layers: int | None, num_experts: int | None) -> None:
    """The older style names layers and experts: a ConfigError if the model has others."""
    layers = len(manifest.layers)
    if num_layers is not None and num_layers != layers:
        raise ConfigError(f"--num-layers is {num_layers}, but {manifest.name} has {layers}; leave it out or correct it")
    experts = max((layer.experts for layer in manifest.layers), default=0)
    if num_experts is not None and num_experts != experts:
        raise ConfigError(
            f"--num-experts is {num_experts}, but {manifest.name} has {experts}; leave it out or correct it"
        )

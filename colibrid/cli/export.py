"""`colibrid export PACK DST`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from colibrid.cli.options import load_settings, use_plugins
from colibrid.cli.progress import Progress
from colibrid.config.environment import read_environment
from colibrid.model.pack import open_pack
from colibrid.paths import user_path

if TYPE_CHECKING:
    from colibrid.model.export import Kind
    from colibrid.model.manifest import FloatPrecision


@click.command(short_help="Write a pack back as a Hugging Face checkpoint.")
@click.argument("pack", metavar="PACK")
@click.argument("dst", metavar="DST")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "awq", "gptq"]),
    default="safetensors",
    show_default=True,
    help="safetensors: every matrix in --dtype; awq, gptq: int4 matrices keep their numbers.",
)
@click.option("--dtype", type=click.Choice(["fp32", "fp16", "bf16"]), help="Of float tensors; else the pack's own.")
@click.option("--config", "config_file", metavar="FILE", help="YAML whose plugins bring the pack's family.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
def export(
    pack: str, dst: str, kind: Kind, dtype: FloatPrecision | None, config_file: str | None, *, quiet: bool
) -> None:
    """Write the pack in the folder PACK as the Hugging Face checkpoint DST: safetensors, config.json and the texts."""
    # Imported here: `--help` does without numpy.
    from colibrid.model import export as exporting  # noqa: PLC0415

    use_plugins(load_settings(read_environment(), config_file, (), {}))
    bar = None if quiet else Progress("exporting")
    try:
        exporting.export(
            open_pack(user_path(pack)),
            user_path(dst),
            kind,
            bar or (lambda *_: None),
            precision=dtype,
        )
    finally:
        if bar is not None:
            bar.close()
    print(f"{dst}: {kind}")

"""`colibrid convert SRC DST`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from colibrid.cli.models import checksum
from colibrid.cli.progress import Progress
from colibrid.config.sizes import format_bytes
from colibrid.engine.library import Library
from colibrid.errors import ModelError
from colibrid.model import convert as conversion
from colibrid.model.pack import is_pack


@click.command(short_help="Make a pack from a Hugging Face checkpoint.")
@click.argument("src", metavar="SRC")
@click.argument("dst", metavar="DST")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "fp32", "fp16", "bf16"]),
    default="auto",
    show_default=True,
    help="Precision of the weights; auto: as in the checkpoint.",
)
@click.option(
    "--backend",
    type=click.Choice(["cpu", "cuda", "any"]),
    default="cpu",
    show_default=True,
    help="Whose kernels read it; any: row-major, to exchange, repacked at every start.",
)
@click.option("--name", metavar="NAME", help="Default model id; else the name of the folder SRC.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
def convert(
    src: str,
    dst: str,
    dtype: Literal["auto", "fp32", "fp16", "bf16"],
    backend: Literal["cpu", "cuda", "any"],
    name: str | None,
    quiet: bool,
) -> None:
    """Make the pack DST from the Hugging Face checkpoint in the folder SRC.

    An interrupted conversion is resumed by the same command; DST appears only when it is complete.
    """
    source = Path(src).expanduser()
    if not (source / "config.json").is_file():
        what = "a pack already" if is_pack(source) else "no config.json in it" if source.is_dir() else "no such folder"
        raise ModelError(f"{src}: {what}; SRC is a Hugging Face checkpoint's folder with config.json and safetensors")
    progress = Progress("converting")
    try:
        manifest = conversion.convert(
            source,
            Path(dst).expanduser(),
            dtype,
            None if quiet else progress,
            crc32c=checksum(Library()),
            backend=backend,
            name=name,
        )
    finally:
        progress.close()
    size = sum(file.bytes for file in manifest.files)
    print(f"{dst}: {manifest.family}, {manifest.precision}, {format_bytes(size)} in {len(manifest.files)} files")

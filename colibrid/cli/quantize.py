"""`colibrid quantize SRC DST`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from colibrid.cli.convert import checkpoint_folder, summary
from colibrid.cli.models import checksum
from colibrid.cli.options import load_settings, use_plugins
from colibrid.cli.progress import Progress
from colibrid.config.environment import read_environment
from colibrid.engine.library import Library
from colibrid.model.checkpoint import read_json, text_files
from colibrid.model.precision import parse_plan
from colibrid.paths import user_path
from colibrid.text.lines import load_model_text, read_lines, token_ids

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.fingerprint import Dtype
    from colibrid.model.manifest import Backend, Manifest
    from colibrid.model.precision import Plan

LONGEST = 2048  # tokens of one text


@click.command(short_help="Make a pack of small weights, by your own texts.")
@click.argument("src", metavar="SRC")
@click.argument("dst", metavar="DST")
@click.option(
    "--precision",
    metavar="RULES",
    default="int4",
    show_default=True,
    help="Formats of parts, layers and experts: 'experts=int4, layer 0=int8, expert 3:17=fp16, dense=int8'.",
)
@click.option(
    "--method",
    type=click.Choice(["rtn", "awq"]),
    help="rtn: rounding alone; awq: also scales that keep what matters to --data. Default: awq with --data, else rtn.",
)
@click.option("--data", metavar="FILE", help='JSON lines with "text" or "messages", like what the model will read.')
@click.option(
    "--tokens", type=click.IntRange(64, 1 << 20), default=16384, show_default=True, help="Most tokens of --data used."
)
@click.option("--dtype", type=click.Choice(["auto", "fp32", "fp16", "bf16"]), default="auto", help="Of the rest.")
@click.option(
    "--backend", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Whose kernels read it."
)
@click.option("--config", "config_file", metavar="FILE", help="YAML whose plugins bring the checkpoint's family.")
@click.option("--name", metavar="NAME", help="Default model id; else the name of the folder SRC.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
def quantize(
    *,
    src: str,
    dst: str,
    precision: str,
    method: str | None,
    data: str | None,
    tokens: int,
    dtype: Dtype,
    backend: Backend,
    config_file: str | None,
    name: str | None,
    quiet: bool,
) -> None:
    """Make the pack DST from the Hugging Face checkpoint in the folder SRC, in small formats.

    With --data the texts run through the model once, layer by layer, and each layer's inputs are scaled so that rounding
    changes its outputs least. An interrupted run is resumed by the same command; DST appears only when it is complete.
    docs/PRECISION.md says which format to take.
    """
    chosen = method or ("awq" if data is not None else "rtn")
    if (chosen == "awq") != (data is not None):
        raise click.UsageError("--method awq needs --data FILE; --method rtn uses none")
    use_plugins(load_settings(read_environment(), config_file, (), {}))
    source, target = checkpoint_folder(src), user_path(dst)
    plan = parse_plan(precision)
    texts = [] if data is None else _texts(source, data, tokens)
    print(summary(dst, _quantize(source, target, plan, texts, dtype, backend, name, quiet=quiet)))


def _texts(source: Path, data: str, tokens: int) -> list[list[int]]:
    lines = read_lines(data, "--data")
    config = read_json(source, "config.json")
    text = load_model_text(source, text_files(source, config))
    try:
        longest = config.get("max_position_embeddings")
        return token_ids(lines, text, min(LONGEST, longest) if isinstance(longest, int) else LONGEST, tokens)
    finally:
        text.tokenizer.close()


def _quantize(
    source: Path,
    target: Path,
    plan: Plan,
    texts: list[list[int]],
    dtype: Dtype,
    backend: Backend,
    name: str | None,
    *,
    quiet: bool,
) -> Manifest:
    # Imported here: `--help` does without numpy.
    from colibrid.model.convert import convert  # noqa: PLC0415
    from colibrid.model.quantize import quantize as scaled  # noqa: PLC0415

    layers = None if quiet else Progress("calibrating", show=lambda count: f"{count} layers")
    files = None if quiet else Progress("rounding")
    crc32c = checksum(Library())
    try:
        if not texts:
            return convert(source, target, dtype, files, crc32c=crc32c, backend=backend, name=name, plan=plan)
        return scaled(
            source,
            target,
            plan,
            texts,
            crc32c=crc32c,
            dtype=dtype,
            backend=backend,
            name=name,
            on_layer=lambda done, total: None if layers is None else layers(done, total, ""),
            progress=files or (lambda *_: None),
        )
    finally:
        for bar in (layers, files):
            if bar is not None:
                bar.close()

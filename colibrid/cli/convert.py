"""`colibrid convert SRC DST`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from colibrid.cli.models import checksum
from colibrid.cli.numbers import NumberRange
from colibrid.cli.options import load_settings, use_plugins
from colibrid.cli.progress import Progress
from colibrid.cli.shapes import SHAPES, write_shape
from colibrid.config.environment import read_environment
from colibrid.config.sizes import format_bytes
from colibrid.engine.library import Library
from colibrid.errors import ConfigError, ModelError
from colibrid.model import convert as conversion
from colibrid.model.checkpoint import Checkpoint
from colibrid.model.formats import format_of, format_of_section
from colibrid.model.layout import FP32_ROLES
from colibrid.model.pack import is_pack, open_pack
from colibrid.model.precision import AS_IT_IS, Plan, check_plan, parse_plan
from colibrid.model.source import CheckpointModel
from colibrid.paths import user_path
from colibrid.tune.cold import COLD_FORMAT, COLD_SHARE, by_use, cold, cold_plan
from colibrid.tune.usage import check_fits, read_report

if TYPE_CHECKING:
    from colibrid.model.fingerprint import Dtype
    from colibrid.model.manifest import Backend, Manifest


@click.command(short_help="Make a pack from a Hugging Face checkpoint.")
@click.argument("paths", metavar="[SRC] DST", nargs=-1)
@click.option(
    "--dummy",
    metavar="SHAPE",
    help="Instead of SRC: random weights of a published model's shape (see `bench engine --help`), or of the "
    "config.json in a folder.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of random weights.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "fp32", "fp16", "bf16"]),
    default="auto",
    show_default=True,
    help="Precision of the weights; auto: as in the checkpoint.",
)
@click.option(
    "--precision",
    metavar="RULES",
    help="Formats of parts, layers and experts: 'experts=int4, layer 0=int8, expert 3:17=fp16, dense=int8'; the rest is "
    "as --dtype says. See docs/PRECISION.md.",
)
@click.option(
    "--precision-from",
    metavar="REPORT",
    help="Give the experts that your data uses least a smaller format: a file of `colibrid experts report`.",
)
@click.option(
    "--cold-format", metavar="FORMAT", help=f"With --precision-from: the smaller format.  [default: {COLD_FORMAT}]"
)
@click.option(
    "--cold-share",
    type=NumberRange(0, 1),
    metavar="SHARE",
    help="With --precision-from: the share of any task's assignments that these experts may have.  "
    f"[default: {COLD_SHARE}]",
)
@click.option(
    "--backend",
    type=click.Choice(["cpu", "cuda", "any"]),
    default="cpu",
    show_default=True,
    help="Whose kernels read it; any: row-major, to exchange.",
)
@click.option("--config", "config_file", metavar="FILE", help="YAML whose plugins bring the checkpoint's family.")
@click.option("--name", metavar="NAME", help="Default model id; else the name of the folder SRC.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
def convert(
    *,
    paths: tuple[str, ...],
    dummy: str | None,
    seed: int,
    dtype: Dtype,
    precision: str | None,
    precision_from: str | None,
    cold_format: str | None,
    cold_share: float | None,
    backend: Backend,
    config_file: str | None,
    name: str | None,
    quiet: bool,
) -> None:
    """Make the pack DST from the Hugging Face checkpoint in the folder SRC, or with --dummy from nothing. SRC may be a
    flat pack, too.

    An interrupted conversion is resumed by the same command; DST appears only when it is complete.
    """
    if len(paths) != (2 if dummy is None else 1):
        raise click.UsageError("give SRC and DST, or with --dummy SHAPE only DST")
    if precision_from is None and (cold_format is not None or cold_share is not None):
        raise click.UsageError("--cold-format and --cold-share go with --precision-from REPORT")
    if precision_from is not None and dummy is not None:
        raise click.UsageError("--precision-from is about a checkpoint's experts; it goes with SRC, not with --dummy")
    use_plugins(load_settings(read_environment(), config_file, (), {}))
    target = user_path(paths[-1])
    plan = AS_IT_IS if precision is None else parse_plan(precision)
    told = ""
    if precision_from is not None:
        plan, told = _by_use(
            paths[0],
            plan,
            precision_from,
            COLD_FORMAT if cold_format is None else cold_format,
            COLD_SHARE if cold_share is None else cold_share,
        )
    progress = None if quiet else Progress("converting")
    report = (lambda *_: None) if progress is None else progress
    try:
        if dummy is None and is_pack(user_path(paths[0])):
            if plan.rules:
                raise ConfigError(
                    f"--precision: {str(plan)!r} given, but {paths[0]} is a pack, which keeps its formats; convert or quantize "
                    "the checkpoint"
                )
            manifest = _relay(paths[0], target, dtype, report, backend, name)
        elif dummy is None:
            manifest = conversion.convert(
                checkpoint_folder(paths[0]),
                target,
                dtype,
                report,
                crc32c=checksum(Library()),
                backend=backend,
                name=name,
                plan=plan,
            )
        else:
            manifest = _write_random(dummy, target, dtype, report, backend, name, seed, plan)
    finally:
        if progress is not None:
            progress.close()
    print(summary(paths[-1], manifest) + told)


def summary(where: str, manifest: Manifest) -> str:
    """One line about a pack that was written."""
    size = sum(file.bytes for file in manifest.files)
    names = Counter(
        format_of_section(section).name
        for file in manifest.files
        for section in file.sections
        if section.role not in FP32_ROLES
    )
    return f"{where}: {manifest.family}, {', '.join(names)}, {format_bytes(size)} in {len(manifest.files)} files"


def _by_use(src: str, plan: Plan, report_file: str, name: str, share: float) -> tuple[Plan, str]:
    """The plan with a rule for cold experts, and what is said of it. ConfigError: report, format or share do not fit."""
    try:
        form = format_of(name.lower())
    except ModelError as error:
        raise ConfigError(f"--cold-format: {error}") from None
    report = read_report(report_file, "--precision-from")
    source = user_path(src)
    if is_pack(source):
        raise ConfigError(f"--precision-from: {src} is a pack, which keeps its formats; convert the checkpoint")
    with Checkpoint(checkpoint_folder(src)) as checkpoint:
        model = CheckpointModel(checkpoint)
        family, description = model.family.architecture, model.description
    check_plan(plan, description.layers, tied_head=description.hyperparameters.tied_head)
    check_fits(report, family, description.layers, "--precision-from", src)
    order = by_use(report.layers)
    chosen = cold(order, share)
    if not chosen:
        raise ConfigError(
            f"--cold-share is {share:g}, but the least used expert has {float(order[0].cost):.2g} of a task's assignments; raise it"
        )
    total = sum(each.assignments for each in order)
    touched = sum(each.assignments for each in chosen) / total if total else 0.0
    said = f"; {len(chosen)} of {len(order)} experts, with {100 * touched:.2f} % of the assignments, are {form.name}"
    return cold_plan(chosen, form, plan, "--precision-from"), said


def checkpoint_folder(src: str) -> Path:
    """SRC as a folder. ModelError: it is not a checkpoint."""
    source = user_path(src)
    if not (source / "config.json").is_file():
        what = "no config.json in it" if source.is_dir() else "no such folder"
        raise ModelError(f"{src}: {what}; SRC is a Hugging Face checkpoint's folder with config.json and safetensors")
    return source


def _relay(
    src: str, target: Path, dtype: Dtype, report: conversion.Progress, backend: Backend, name: str | None
) -> Manifest:
    # Imported here: other conversions do without.
    from colibrid.model.relay import relay  # noqa: PLC0415

    pack = open_pack(user_path(src))
    if backend == "any" or dtype not in ("auto", pack.manifest.precision):
        raise ConfigError(f"{src} is a pack: it can be laid out for --backend cpu or cuda, and keeps its precision")
    return relay(pack, target, report, crc32c=checksum(Library()), backend=backend, name=name)


def _write_random(
    shape: str,
    target: Path,
    dtype: Dtype,
    report: conversion.Progress,
    backend: Backend,
    name: str | None,
    seed: int,
    plan: Plan,
) -> Manifest:
    # Imported here: other conversions do without.
    from colibrid.model.random_pack import write_random_pack  # noqa: PLC0415

    with TemporaryDirectory() as folder:
        source = user_path(shape)
        if shape in SHAPES:
            source = write_shape(shape, Path(folder))
        elif not (source / "config.json").is_file():
            raise ConfigError(f"--dummy {shape}: write one of {', '.join(SHAPES)}, or a folder with a config.json")
        return write_random_pack(
            source,
            target,
            dtype,
            report,
            crc32c=checksum(Library()),
            backend=backend,
            name=name,
            seed=seed,
            plan=plan,
        )

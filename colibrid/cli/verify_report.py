"""What `colibrid verify` found, as lines, as JSON and as a plot."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from colibrid.config.sizes import format_bytes
from colibrid.errors import ConfigError
from colibrid.model.compare import Distance
from colibrid.model.golden import GoldenDistance
from colibrid.model.verify import Finding
from colibrid.paths import user_path
from colibrid.report.table import table_lines

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Exact(msgspec.Struct, frozen=True):
    """Greedy answers that are the right ones, letter by letter."""

    right: int
    asked: int


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one pack."""

    pack: str
    name: str
    formats: tuple[str, ...]
    bytes: int
    damages: tuple[Finding, ...]
    against: str | None = None
    distance: Distance | None = None
    golden: GoldenDistance | None = None
    exact: Exact | None = None
    engine_loss: float | None = None
    failures: tuple[str, ...] = ()  # limits that were not kept


_COLUMNS = ("pack", "formats", "size", "files", "KL", "top-1", "loss", "perplexity", "exact match")


def table(found: Sequence[Verified]) -> Iterator[str]:
    """One line a pack, in Markdown; columns that nothing was measured for are left out."""
    rows = [_cells(each) for each in found]
    used = [index for index in range(len(_COLUMNS)) if index < 4 or any(row[index] for row in rows)]
    head, *shown = ([row[index] for index in used] for row in (_COLUMNS, *rows))
    yield from table_lines(head, shown)


def _cells(found: Verified) -> tuple[str, ...]:
    near = found.distance or found.golden
    loss, perplexity = "", ""
    if found.distance is not None:
        loss, perplexity = f"{found.distance.loss:.4f}", f"{found.distance.perplexity:.3f}"
    exact = ""
    if found.exact is not None:
        exact = f"{100 * found.exact.right / found.exact.asked:.1f} % ({found.exact.right} of {found.exact.asked})"
    return (
        found.pack,
        ", ".join(found.formats),
        format_bytes(found.bytes),
        "damaged" if found.damages else "sound",
        "" if near is None else f"{near.kl:.5f}",
        "" if near is None else f"{100 * near.top1:.2f} %",
        loss,
        perplexity,
        exact,
    )


def details(found: Verified) -> Iterator[str]:
    """What the table has no place for."""
    for damage in found.damages:
        yield f"{found.pack}: {damage.file}: {damage.problem}"
    for failure in found.failures:
        yield f"{found.pack}: {failure}"
    if found.distance is not None:
        engine = "" if found.engine_loss is None else f", by the engine {found.engine_loss:.4f}"
        yield (
            f"{found.pack}: {found.distance.tokens} tokens against {found.against}: loss {found.distance.loss:.4f}"
            f"{engine}, its own {found.distance.reference_loss:.4f}"
        )
    elif found.golden is not None:
        yield f"{found.pack}: {found.golden.tokens} tokens against the predictions of {found.golden.source} kept in it"


def write_json(path: str, found: Sequence[Verified]) -> None:
    """All of it to a file, or to standard output as `-`."""
    text = msgspec.json.format(msgspec.json.encode(found), indent=1).decode()
    if path == "-":
        print(text)
        return
    try:
        user_path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error.strerror}") from None


def plot(path: str, found: Sequence[Verified]) -> None:
    """A picture: divergence, and exact matches if there are any, by the size of the pack."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 (optional)

        mpl.use("Agg")
        from matplotlib import pyplot as plt  # noqa: PLC0415
    except ImportError:
        raise ConfigError("--plot: matplotlib is not installed; pip install 'colibrid[bench]'") from None
    panels = [
        (title, axis, [(each, value) for each in found if (value := read(each)) is not None])
        for title, axis, read in (
            ("divergence from the source", "KL, nats", _divergence),
            ("exact answers", "%", _exact_share),
        )
    ]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        raise ConfigError("--plot: nothing was compared; give --against, or --questions")
    figure, axes = plt.subplots(1, len(panels), figsize=(6.4 * len(panels), 4.8), squeeze=False)
    for axis, (title, unit, points) in zip(axes[0], panels, strict=True):
        spread = max(value for _, value in points) - min(value for _, value in points)
        labels: dict[tuple[int, int], list[tuple[Verified, float]]] = {}  # packs in nearly one place share a label
        for each, value in points:
            place = (round(8 * math.log2(each.bytes)), round(40 * value / (spread or 1.0)))
            labels.setdefault(place, []).append((each, value))
        for together in labels.values():
            for each, value in together:
                axis.plot(each.bytes / (1 << 20), value, "o", color="tab:blue")
            names = ", ".join(Path(each.pack).name for each, _ in together)
            last = max(together, key=lambda point: point[0].bytes)
            where = (last[0].bytes / (1 << 20), last[1])
            axis.annotate(names, where, textcoords="offset points", xytext=(6, -2), fontsize=7)
        axis.set(title=title, xlabel="size, MiB", ylabel=unit, xscale="log")
        axis.margins(x=0.25)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("{x:g}")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    try:
        figure.savefig(user_path(path), dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error}") from None
    finally:
        plt.close(figure)


def _divergence(found: Verified) -> float | None:
    near = found.distance or found.golden
    return None if near is None else near.kl


def _exact_share(found: Verified) -> float | None:
    return None if found.exact is None else 100 * found.exact.right / found.exact.asked

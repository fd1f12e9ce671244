"""report.html and its pictures of a run of `colibrid tune`.

The page is one file: it holds its pictures, asks nobody for anything and runs no script.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.tune.result import Result

PAGE = "report.html"


def write_report(result: Result, folder: Path) -> list[Path]:
    """Writes the page and its pictures, and returns their paths. ConfigError where something is missing or in the way."""
    if find_spec("matplotlib") is None:
        raise ConfigError(f"no {PAGE} and no pictures: matplotlib is not installed; pip install 'colibrid[bench]'")
    from colibrid.tune import plots_layers, plots_points  # noqa: PLC0415 (they draw with what is optional)
    from colibrid.tune.drawing import LIGHT, to_png  # noqa: PLC0415
    from colibrid.tune.page import report_page  # noqa: PLC0415

    drawn = (
        plots_points.front_picture(result),
        plots_points.experts_picture(result),
        plots_layers.load_picture(result),
        plots_layers.entropy_picture(result),
        plots_layers.cut_picture(result),
    )
    pictures = [picture for picture in drawn if picture is not None]
    files = {f"{picture.name}.png": to_png(picture, LIGHT) for picture in pictures}
    files[PAGE] = report_page(result, pictures).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{folder}: the report cannot be written: {error.strerror}") from None
    return [folder / name for name in files]

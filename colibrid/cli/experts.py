"""`colibrid experts`: looks at a running daemon's experts, replaces one, and tells which ones data use."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

import click

from colibrid.cli.admin_client import admin_client, admin_options
from colibrid.cli.experts_report import report


@click.group(short_help="Look at and replace experts, and see which ones your data uses.")
def experts() -> None:
    """See which experts your data uses (docs/EXPERTS.md); look at and replace those of a running daemon, over its admin
    socket (docs/HOT_SWAP.md).
    """


experts.add_command(report)


@experts.command(name="list", short_help="Show which experts were replaced.")
@admin_options
def list_experts(config_file: str | None, sets: tuple[str, ...], admin_socket: str | None) -> None:
    """Show every expert that was replaced since the daemon was started."""
    answer = admin_client(config_file, sets, admin_socket).get("/admin/experts")
    print(f"weights generation {answer['weights_generation']}, swap slots {answer['swap_slots']}")
    for one in answer["replaced"]:
        print(_line(one))


@experts.command(short_help="Replace one expert while serving.")
@click.argument("layer", type=click.IntRange(min=0))
@click.argument("expert", type=click.IntRange(min=0))
@click.argument("file", required=False)
@click.option("--module", metavar="NAME", help="The kernel of modules.load that shall compute it; auto: the package's.")
@admin_options
def swap(
    layer: int,
    expert: int,
    file: str | None,
    module: str | None,
    config_file: str | None,
    sets: tuple[str, ...],
    admin_socket: str | None,
) -> None:
    """Put the expert in FILE in the place of expert EXPERT of layer LAYER, while the daemon serves.

    FILE lies below a folder of experts.swap_folders, in a pack or with FILE.json beside it. With --module alone only the
    kernel changes. Returns when the new expert serves.
    """
    body = {"module": module}
    if file is not None:
        body["file"] = os.path.abspath(file)  # noqa: PTH100 - links are for the daemon to refuse, not to follow here
    answer = admin_client(config_file, sets, admin_socket).post(f"/admin/experts/{layer}/{expert}", body)
    print(_line(answer))
    print(
        f"replaced in {answer['milliseconds']:.0f} ms, under {answer['streams']} streams that went on; "
        f"free swap slots: {answer['free_slots']}"
    )


def _line(one: dict[str, Any]) -> str:
    since = datetime.fromtimestamp(one["since"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    what = f"{one['file']} ({one['precision']}, sha256 {one['sha256'][:12]})" if one["file"] else "the pack's weights"
    kernel = f", kernel {one['module']}" if one["module"] else ""
    return (
        f"layer {one['layer']} expert {one['expert']}: version {one['version']}, {what}{kernel}, "
        f"weights generation {one['weights_generation']}, since {since}"
    )

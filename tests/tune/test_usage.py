"""colibrid.tune.usage: a report's file, and whether it is about a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from colibrid.errors import ConfigError
from colibrid.model.manifest import Layer
from colibrid.tune.usage import ExpertReport, LayerUse, TaskUse, check_fits, read_report

if TYPE_CHECKING:
    from pathlib import Path

REPORT = ExpertReport(
    version="0.1.0", model="m", family="F", device="cpu", data="d.jsonl", data_sha256="00", made="2026-01-01T00:00:00Z",
    pack_bytes=300, cold_format="int4-g64", savings=(),
    tasks=(TaskUse(task="score", requests=1, tokens=4), TaskUse(task="embed", requests=2, tokens=1)),
    layers=(LayerUse(layer=1, per_token=1, bytes=(100, 100), assignments=((4, 0), (1, 0))),),
)  # fmt: skip


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    """What was written is what is read."""
    path = tmp_path / "r.json"
    path.write_bytes(msgspec.json.encode(REPORT))
    assert read_report(str(path), "--x") == REPORT
    assert (REPORT.layers[0].totals, REPORT.layers[0].never) == ([5, 0], [1])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "tune"}, "Invalid enum value 'tune'"),
        ({"format": 2}, "Invalid enum value 2"),
        ({"more": 1}, "unknown field `more`"),
        ({"tasks": []}, "length >= 1"),
        (
            {"layers": [{"layer": 1, "per_token": 1, "bytes": [1, 1], "assignments": [[4], [1, 0]]}]},
            "counts of layer 1",
        ),
        ({"layers": [{"layer": 1, "per_token": 1, "bytes": [1, 1], "assignments": [[1, 0]]}]}, "counts of layer 1"),
        ({"layers": [{"layer": 1, "per_token": 1, "bytes": [1], "assignments": [[-1], [1]]}]}, ">= 0"),
        ({"layers": [{"layer": 1, "per_token": 1, "bytes": [], "assignments": [[], []]}]}, "counts of layer 1"),
        (
            {"layers": [{"layer": 1, "per_token": 1, "bytes": [1], "assignments": [[4], [1]]}] * 2},
            "a layer is there twice",
        ),
        (
            {"layers": [{"layer": 1, "per_token": 1, "bytes": [1], "assignments": [[0], [0]]}]},
            "no expert was used at all",
        ),
    ],
)
def test_a_file_that_is_no_report(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    """The option, the file, what is wrong and the command that writes one."""
    path = tmp_path / "r.json"
    path.write_bytes(msgspec.json.encode(msgspec.to_builtins(REPORT) | change))
    with pytest.raises(ConfigError, match=text) as caught:
        read_report(str(path), "--x")
    assert str(caught.value).startswith(f"--x {path}: ")
    assert str(caught.value).endswith("write one with `colibrid experts report`")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """As any other wrong path."""
    with pytest.raises(ConfigError, match=r"--x .*: cannot be read: No such file"):
        read_report(str(tmp_path / "none.json"), "--x")


def test_a_report_of_another_model() -> None:
    """Refused by family, by a layer that has more experts, and by one that has none."""
    dense, two, three = Layer(ffn="dense"), Layer(ffn="moe", experts=2), Layer(ffn="moe", experts=3)
    check_fits(REPORT, "F", [dense, two], "--x", "src")
    with pytest.raises(ConfigError, match=r"--x: the report is about a F, src is a G; make a report of src"):
        check_fits(REPORT, "G", [dense, two], "--x", "src")
    with pytest.raises(ConfigError, match=r"layer 1 has 2 experts in the report \(m\) and 3 in src"):
        check_fits(REPORT, "F", [dense, three], "--x", "src")
    with pytest.raises(ConfigError, match="layer 0 has 0 experts in the report .* and 2 in src"):
        check_fits(REPORT, "F", [two, two], "--x", "src")

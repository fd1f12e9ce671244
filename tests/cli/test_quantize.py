"""`colibrid quantize` on the command line; the work itself is tested in tests/model."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibrid.cli.main import run
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.pack import open_pack

TEXTS = Path(__file__).resolve().parents[1] / "data" / "hummingbird-13m.text.jsonl"


def test_by_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--data scales by the user's texts: two progress bars, one line about the pack, int4 without a word."""
    target = tmp_path / "x.colibri"
    rules = "layer 0 attention=int4-g32"
    arguments = [
        "quantize",
        str(BUNDLED_MODEL),
        str(target),
        "--precision",
        rules,
        "--data",
        str(TEXTS),
        "--tokens",
        "300",
    ]
    assert run(arguments) == 0
    output = capsys.readouterr()
    assert output.out == f"{target}: Qwen2MoeForCausalLM, bf16, int4-g32, 24.4 MiB in 49 files\n"
    assert "calibrating: 100% of 6 layers\n" in output.err
    assert output.err.endswith("rounding: 100% of 24.4 MiB\n")
    assert open_pack(target).manifest.name == "hummingbird-13m"


def test_rounding_alone_is_the_conversion(tmp_path: Path) -> None:
    """Without --data: the bytes of `convert --precision`, int4 by default."""
    assert run(["quantize", "-q", str(BUNDLED_MODEL), str(tmp_path / "one")]) == 0
    assert run(["convert", "-q", str(BUNDLED_MODEL), str(tmp_path / "two"), "--precision", "int4"]) == 0
    one, two = (open_pack(tmp_path / name).manifest.files for name in ("one", "two"))
    assert [file.sha256 for file in one] == [file.sha256 for file in two]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--method", "awq"], 2, "needs --data"),
        (["--method", "rtn", "--data", str(TEXTS)], 2, "uses none"),
        (["--precision", "experts=int3"], 78, "--precision: 'experts=int3': format 'int3'"),
        (["--data", "missing.jsonl"], 78, "--data missing.jsonl: cannot be read: No such file"),
    ],
)
def test_wrong_use(
    arguments: list[str], code: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is told by the option's name, and nothing is written."""
    assert run(["quantize", str(BUNDLED_MODEL), str(tmp_path / "x"), *arguments]) == code
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

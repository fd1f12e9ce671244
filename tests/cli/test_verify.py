"""`colibrid verify`: tables, JSON, a plot and exit codes, on the bundled model and its engine."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from colibrid.cli.main import run
from colibrid.cli.verify_report import Exact, Verified, details, plot, table
from colibrid.errors import ConfigError
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.compare import Distance
from colibrid.model.verify import Finding

DATA = Path(__file__).resolve().parents[1] / "data"
TEXTS = str(DATA / "hummingbird-13m.text.jsonl")


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `bf16` and `int4`. Not to be changed."""
    folder = tmp_path_factory.mktemp("packs")
    assert run(["convert", "-q", str(BUNDLED_MODEL), str(folder / "bf16")]) == 0
    assert run(["convert", "-q", str(BUNDLED_MODEL), str(folder / "int4"), "--precision", "int4"]) == 0
    return folder


def test_bytes_alone(packs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a source: sizes, formats and that every file is sound; a limit that cannot be looked at is not kept."""
    assert run(["verify", "-q", str(packs / "bf16"), str(packs / "int4")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [cell.strip() for cell in lines[0].split("|")[1:-1]] == ["pack", "formats", "size", "files"]
    assert [line.split("|")[4].strip() for line in lines[2:]] == ["sound", "sound"]
    assert run(["verify", "-q", str(packs / "int4"), "--max-kl", "0.1"]) == 1
    assert "--max-kl is given, and nothing to measure it by: give --against" in capsys.readouterr().out


@pytest.mark.slow
def test_against_the_source(packs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same weights predict the same, int4 nearly; the engine answers questions and has nearly the same loss."""
    questions = tmp_path / "some.jsonl"
    lines = (DATA / "hummingbird-13m.eval.jsonl").read_text().splitlines()
    questions.write_text("\n".join(lines[:8]))
    arguments = ["verify", str(packs / "bf16"), str(packs / "int4"), "--against", str(BUNDLED_MODEL), "--data", TEXTS]
    arguments += ["--tokens", "300", "--questions", str(questions), "--device", "cpu", "--min-exact", "50"]
    assert run([*arguments, "--json", str(tmp_path / "found.json")]) == 0
    output = capsys.readouterr()
    assert "answering: 100% of " in output.err
    own, small = json.loads((tmp_path / "found.json").read_text())
    assert own["distance"]["kl"] < 1e-6
    assert own["distance"]["top1"] == 1.0
    assert 1e-4 < small["distance"]["kl"] < 0.2
    for found in (own, small):
        assert found["exact"]["asked"] == 8
        assert found["exact"]["right"] >= 6
        assert abs(found["engine_loss"] - found["distance"]["loss"]) < 0.05
    assert f"({own['exact']['right']} of 8)" in output.out
    assert run([*arguments[:-4], "--device", "cpu", "--max-kl", "1e-5", "-q"]) == 1
    assert "at most 1e-05 allowed by --max-kl" in capsys.readouterr().out


def test_kept_predictions(packs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--store keeps some of the source's predictions, against which the pack is checked later without it."""
    pack = shutil.copytree(packs / "int4", tmp_path / "int4")
    assert run(["verify", "-q", str(pack), "--against", str(packs / "bf16"), "--store"]) == 0
    capsys.readouterr()
    assert run(["verify", "-q", str(pack), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)[0]
    assert found["golden"]["source"] == "bf16"
    assert 0 < found["golden"]["kl"] < 0.5
    assert found["distance"] is None


def test_damage(packs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A changed byte is exit code 1, a file that is too short 78."""
    pack = shutil.copytree(packs / "int4", tmp_path / "int4")
    file = pack / "expert_2_3.bin"
    data = bytearray(file.read_bytes())
    data[7] ^= 4
    file.write_bytes(data)
    assert run(["verify", "-q", str(pack), "--against", str(BUNDLED_MODEL)]) == 1
    output = capsys.readouterr().out
    assert "damaged" in output
    assert "expert_2_3.bin: sha256 is" in output
    file.write_bytes(data[:-1])
    assert run(["verify", "-q", str(pack)]) == 78


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--store"], 2, "--against SOURCE"),
        (["--data", TEXTS], 2, "--data are texts to compare a pack and its source on: give --against SOURCE"),
        (["--min-exact", "90"], 2, "give --questions FILE"),
        (["--against", "nowhere"], 78, "--against nowhere: neither a checkpoint"),
        (["--questions", TEXTS], 78, 'every line needs "messages" and "answer"'),
    ],
)
def test_wrong_use(arguments: list[str], code: int, text: str, packs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Told by the option's name."""
    assert run(["verify", "-q", str(packs / "bf16"), *arguments]) == code
    assert text in capsys.readouterr().err


SMALL = Verified(
    pack="a/int4", name="m", formats=("int4-g64", "bf16"), bytes=8 << 20, damages=(), against="src",
    distance=Distance(100, 0.02, 0.95, 0.3, 0.25), exact=Exact(9, 12), engine_loss=0.31,
)  # fmt: skip
BROKEN = Verified(pack="b", name="m", formats=("bf16",), bytes=1 << 20, damages=(Finding("dense.bin", "is wrong"),))


def test_the_table_and_what_it_has_no_place_for() -> None:
    """Columns that nothing was measured for are left out; each damage has a line."""
    lines = list(table([SMALL, BROKEN]))
    assert [len(set(map(len, lines))), len(lines)] == [1, 4]
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        "a/int4", "int4-g64, bf16", "8.00 MiB", "sound", "0.02000", "95.00 %", "0.3000", "1.350", "75.0 % (9 of 12)",
    ]  # fmt: skip
    assert "KL" not in next(table([BROKEN]))
    assert list(details(BROKEN)) == ["b: dense.bin: is wrong"]
    assert "by the engine 0.3100" in next(details(SMALL))


def test_a_plot_is_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With matplotlib a PNG, without it or without figures a message."""
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="nothing was compared"):
        plot(str(tmp_path / "a.png"), [BROKEN])
    plot(str(tmp_path / "a.png"), [SMALL])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install"):
        plot(str(tmp_path / "b.png"), [SMALL])

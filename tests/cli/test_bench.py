"""`colibrid bench engine`: what it measures, not how fast it is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from colibrid.cli.engine_bench import read_bandwidth
from colibrid.cli.main import run

if TYPE_CHECKING:
    from colibrid.model.pack import Pack

SHORT = ["--slots", "1,3", "--prompt-tokens", "5", "--steps", "2"]


def test_rows_agree_with_the_model(bundled_pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    """One slot runs k experts a layer; bytes are dense weights, these experts and KV; rates are 1 / times."""
    assert run(["bench", "engine", str(bundled_pack.path), *SHORT, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    one, three = document["rows"]
    assert (one["slots"], three["slots"]) == (1, 3)
    assert one["expert_runs_per_step"] == 6 * 2
    assert 6 * 2 <= three["expert_runs_per_step"] <= 6 * 3 * 2
    dense, expert, kv = 6 * 1024 * 1024, 384 * 1024, 6144
    assert one["bytes_per_step"] > dense + 12 * expert + 6 * kv
    for row in document["rows"]:
        assert row["decode_tokens_per_s"] == pytest.approx(row["slots"] / row["step_ms"] * 1e3)
        assert row["layer_us"] == pytest.approx(row["step_ms"] * 1e3 / 6)
        floor_ms = row["bytes_per_step"] / document["read_bandwidth"] * 1e3
        assert row["floor_share"] == pytest.approx(floor_ms / row["step_ms"], rel=1e-3)


def test_table_says_what_was_measured(bundled_pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    """Model, precision, device and bandwidth stand above one line a number of slots."""
    assert run(["bench", "engine", str(bundled_pack.path), *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = "\n".join(lines[:-2])
    for part in ("hummingbird-13m", "bf16", "cpu", "GB/s", "of floor", "tok/s"):
        assert part in head
    assert [line.split()[0] for line in lines[-2:]] == ["1", "3"]


def test_dummy_weights_can_be_measured(bundled_pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    """model.weights=dummy needs no weight files to be read."""
    arguments = ["--slots", "1", "--prompt-tokens", "4", "--steps", "1", "--set", "model.weights=dummy", "--json"]
    assert run(["bench", "engine", str(bundled_pack.path), *arguments]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--slots", "0"], "numbers from 1 to 64"), (["--slots", "x"], "numbers from 1 to 64"),
     (["--prompt-tokens", "2040"], "do not fit 2048")],
)  # fmt: skip
def test_impossible_measurements(
    bundled_pack: Pack, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers that do not fit are refused with the limit."""
    assert run(["bench", "engine", str(bundled_pack.path), *arguments]) == 78
    assert text in capsys.readouterr().err


def test_bandwidth_is_plausible() -> None:
    """A core reads between 100 MB and 10 TB a second."""
    assert 1e8 < read_bandwidth(1) < 1e13

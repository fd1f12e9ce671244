"""`colibrid inspect`."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING

from random_cases import CASES
from random_checkpoints import write_checkpoint

from colibrid.cli.main import run
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.convert import convert
from colibrid.model.precision import parse_plan

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from colibrid.model.pack import Pack


def test_text_names_what_a_reader_wants(bundled_pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    """Family, precision, shapes, experts, context, bytes by part and the memory bill are printed."""
    assert run(["inspect", str(bundled_pack.path)]) == 0
    output = capsys.readouterr().out
    for part in (
        "Qwen2MoeForCausalLM", "bf16", "12.9 M", "hidden 256, 6 layers, 4 heads of 64, 2 KV heads, tied head",
        "layers 0-5  8 experts of width 256, 2 a token", "2048 tokens", "48 of 384.0 KiB each", "weights      26.0 MiB",
        "for 32 slots of 2048 tokens",
    ):  # fmt: skip
        assert part in output


def test_norms_and_windows_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is special about a family's attention is in the text; its norms and biases are in the parts."""
    wanted = {
        "qwen3-window": "own head, norm of each q and k head\n  layers 0-1  8 experts of width 24, 2 a token, "
        "softmax weights renormalised, window of 9 tokens\n",
        "olmoe-gqa-biases": "own head, norm of q and of k\n  layers 0-2  16 experts of width 24, 4 a token, "
        "softmax weights renormalised\n",
        "qwen-window-below-third-layer": "  layer 2     dense, width 48, window of 7 tokens\n",
    }
    for case in (case for case in CASES if case.name in wanted):
        convert(write_checkpoint(case, tmp_path / "src" / case.name), tmp_path / case.name, crc32c=zlib.crc32)
        assert run(["inspect", str(tmp_path / case.name)]) == 0
        assert wanted[case.name] in capsys.readouterr().out
    assert run(["inspect", str(tmp_path / "olmoe-gqa-biases"), "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["bytes_by_part"]
    assert parts["norms"] == 4 * (64 + 3 * (64 + 64 + 64 + 32))
    assert parts["attention"] == 3 * (2 * (128 * 64 + 64 * 64) + 4 * (128 + 64))


def test_json_adds_up(bundled_pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts sum to the bytes, and the bill to its total."""
    assert run(["inspect", str(bundled_pack.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sum(document["bytes_by_part"].values()) == document["bytes"]
    memory = document["memory"]
    assert sum(memory[name] for name in ("weights", "swap", "kv", "temp", "graphs", "host")) == memory["total"]
    assert (document["experts"], document["hyperparameters"]["vocab_size"]) == (48, 4096)
    assert [layer["experts"] for layer in document["layers"]] == [8] * 6


def test_bill_follows_the_settings(bundled_pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer slots, a shorter context and fp16 KV take less memory."""
    bills = []
    for arguments in ([], ["--max-batch-size", "4"], ["--max-seq-len", "256"], ["--set", "kv.precision=fp16"]):
        assert run(["inspect", str(bundled_pack.path), "--json", *arguments]) == 0
        bills.append(json.loads(capsys.readouterr().out)["memory"]["kv"])
    assert all(bill < bills[0] for bill in bills[1:])


def test_no_such_model(capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that is not there is one line and 78."""
    assert run(["inspect", "/no/such/folder"]) == 78
    assert "no such folder" in capsys.readouterr().err


def test_formats_of_parts_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part says its formats, and a mixture of experts how many are in which."""
    rules = "experts=int4, layer 0=int8, expert 3:5=fp16, dense=int8-g128"
    convert(BUNDLED_MODEL, tmp_path / "pack", crc32c=zlib.crc32, plan=parse_plan(rules))
    assert run(["inspect", str(tmp_path / "pack")]) == 0
    output = capsys.readouterr().out
    assert "%  int4-g64, int8, fp16\n" in output
    assert "  precision   int4-g64, bf16, int8-g128, int8, fp16, backend" in output
    assert " in the mean: 39 int4-g64, 8 int8, 1 fp16\n" in output
    assert run(["inspect", str(tmp_path / "pack"), "--json"]) == 0
    formats = json.loads(capsys.readouterr().out)["formats_by_part"]
    assert formats["attention"] == {"int8-g128": 10, "int8": 2}
    assert formats["embedding"] == {"bf16": 1}
    assert "norms" not in formats

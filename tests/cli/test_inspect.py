"""`colibrid inspect`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from colibrid.cli.main import run

if TYPE_CHECKING:
    import pytest

    from colibrid.model.pack import Pack


def test_text_names_what_a_reader_wants(bundled_pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    """Family, precision, shapes, experts, context, bytes by part and the memory bill are printed."""
    assert run(["inspect", str(bundled_pack.path)]) == 0
    output = capsys.readouterr().out
    for part in (
        "Qwen2MoeForCausalLM", "bf16", "12.9 M", "hidden 256, 6 layers, 4 heads of 64, 2 KV heads, tied head",
        "layers 0-5  8 experts of width 256, 2 a token", "2048 tokens", "48 of 384.0 KiB each", "weights 26.0 MiB",
        "for 32 slots of 2048 tokens",
    ):  # fmt: skip
        assert part in output


def test_json_adds_up(bundled_pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts sum to the bytes, and the bill to its total."""
    assert run(["inspect", str(bundled_pack.path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sum(document["bytes_by_part"].values()) == document["bytes"]
    memory = document["memory"]
    assert memory["weights"] + memory["kv"] + memory["temp"] + memory["host"] == memory["total"]
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

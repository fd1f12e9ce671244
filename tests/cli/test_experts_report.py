"""`colibrid experts report`, the pack that `convert --precision-from` makes of it, and what `verify` says of that."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tune_models import LAYERS, TYPES, WORDS, words, write_model, write_texts

from colibrid.cli.experts_report import lines
from colibrid.cli.main import run
from colibrid.model.formats import format_of_section
from colibrid.model.pack import open_pack
from colibrid.tune.usage import ExpertReport, LayerUse, Saving, TaskUse

if TYPE_CHECKING:
    from pathlib import Path

ENGINE = ("--device", "cpu", "--set", "batch.slots=4", "--set", "engine.threads=2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack whose experts are chosen by a word's type, beside the checkpoint `source`. Not to be changed."""
    folder = tmp_path_factory.mktemp("types")
    write_model(folder / "source", needed=range(LAYERS))
    assert run(["convert", "-q", str(folder / "source"), str(folder / "pack")]) == 0
    return folder / "pack"


def texts(types: tuple[int, ...], count: int, length: int = 40) -> list[list[int]]:
    """Words of these types alone, in no order."""
    own = [word for word in range(WORDS) if word % TYPES in types]
    return [[own[(text + 1) * (7 * at + 3) % len(own)] for at in range(length)] for text in range(count)]


def make_report(model: Path, folder: Path, *more: str) -> dict[str, Any]:
    assert run(["experts", "report", "-q", str(model), "--out", str(folder / "r.json"), *more, *ENGINE]) == 0
    found: dict[str, Any] = json.loads((folder / "r.json").read_text())
    return found


def test_counts_are_those_of_the_words(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each token is counted for the two experts that its word chooses, for its own task; the fourth type's are never
    used; what they would save is told; and the figures are the same again."""
    left, right = texts((0, 1), 6), texts((2,), 3, 25)
    data = tmp_path / "d.jsonl"
    named = [json.dumps({"text": words(ids), "task": "left"}) for ids in left]
    data.write_text("\n".join([*named[:3], *(json.dumps({"text": words(ids)}) for ids in right), *named[3:]]))
    found = make_report(model, tmp_path, "--data", str(data))
    assert found["tasks"] == [
        {"task": "left", "requests": 6, "tokens": 240}, {"task": "score", "requests": 3, "tokens": 75},
    ]  # fmt: skip
    per_type = [sum(word % TYPES == kind for ids in left for word in ids) for kind in range(TYPES)]
    assert sum(per_type) == 240
    for use in found["layers"]:
        assert use["assignments"] == [[*per_type, *per_type], [0, 0, 75, 0] * 2]
    assert found["savings"][0]["experts"] == 2 * LAYERS
    shown = capsys.readouterr().out
    assert "9 requests, 315 tokens of d.jsonl" in shown
    assert shown.count("| 3, 7 ") == LAYERS
    again = make_report(model, tmp_path, "--data", str(data))
    assert {**again, "made": ""} == {**found, "made": ""}


def test_answers_count_and_vectors_have_a_task(model: Path, tmp_path: Path) -> None:
    """Prompts are answered, unless they are only read; texts to embed are embedded."""
    data = tmp_path / "d.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": words(ids)}) for ids in texts((0,), 4, 10)))
    answered = make_report(model, tmp_path, "--data", str(data), "--answer-tokens", "9")
    assert answered["tasks"] == [{"task": "generate", "requests": 4, "tokens": 4 * 19}]
    computed = 4 * (10 + 8)  # the last token is not put in again
    assert [sum(use["assignments"][0]) for use in answered["layers"]] == [2 * computed] * LAYERS
    read = make_report(model, tmp_path, "--data", str(data), "--task", "score")
    assert read["tasks"] == [{"task": "score", "requests": 4, "tokens": 40}]
    data.write_text(json.dumps({"input": words(range(0, 40, 4))}))
    embedded = make_report(model, tmp_path, "--data", str(data), "--task", "embed")
    assert embedded["tasks"] == [{"task": "embed", "requests": 1, "tokens": 10}]
    assert embedded["layers"][0]["assignments"] == [[10, 0, 0, 0] * 2]


def test_the_whole_way_to_a_mixed_pack(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts that the data never use become int4 and the rest stays; on that data the pack predicts what its source
    does, on other data it does not, and `verify` tells both."""
    source = model.parent / "source"
    used = write_texts(tmp_path / "used.jsonl", texts((0, 1, 2), 8))
    other = write_texts(tmp_path / "other.jsonl", texts((3,), 8))
    make_report(model, tmp_path, "--data", str(used))
    mixed = tmp_path / "mixed"
    arguments = ["convert", "-q", str(source), str(mixed), "--precision-from", str(tmp_path / "r.json")]
    assert run([*arguments, "--cold-share", "0"]) == 0
    assert (
        f"{2 * LAYERS} of {8 * LAYERS} experts, with 0.00 % of the assignments, are int4-g64" in capsys.readouterr().out
    )
    manifest = open_pack(mixed).manifest
    formats = {file.name: {format_of_section(section).name for section in file.sections} for file in manifest.files}
    for layer in manifest.layers:
        for expert, name in enumerate(layer.expert_files):
            assert formats[name] == ({"int4-g64"} if expert % TYPES == 3 else {"fp32"})
    whole, less = (sum(file.bytes for file in open_pack(path).manifest.files) for path in (model, mixed))
    assert json.loads((tmp_path / "r.json").read_text())["savings"][0]["bytes"] == whole - less
    verify = [
        "verify",
        "-q",
        str(mixed),
        "--against",
        str(source),
        "--json",
        str(tmp_path / "v.json"),
        "--max-kl",
        "1e-6",
    ]
    assert run([*verify, "--data", str(used)]) == 0
    assert json.loads((tmp_path / "v.json").read_text())[0]["distance"]["kl"] < 1e-9
    assert run([*verify, "--data", str(other)]) == 1
    assert json.loads((tmp_path / "v.json").read_text())[0]["distance"]["kl"] > 1e-5


def test_the_share_is_kept_and_own_rules_win(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A larger share takes experts that are used a little; what --precision says of an expert stays."""
    source = model.parent / "source"
    data = write_texts(tmp_path / "d.jsonl", [[0, 1, 2] * 25 + [3]])
    make_report(model, tmp_path, "--data", str(data))
    arguments = ["convert", "-q", str(source), str(tmp_path / "mixed"), "--precision-from", str(tmp_path / "r.json")]
    assert run([*arguments, "--cold-share", "0.001"]) == 78
    assert "the least used expert has 0.0022 of a task's assignments; raise it" in capsys.readouterr().err
    rules = ["--cold-share", "0.02", "--cold-format", "int8", "--precision", "experts=bf16, expert 1:3=fp16"]
    assert run([*arguments, *rules]) == 0
    capsys.readouterr()
    manifest = open_pack(tmp_path / "mixed").manifest
    formats = {file.name: format_of_section(file.sections[0]).name for file in manifest.files}
    found = [[formats[name] for name in layer.expert_files] for layer in manifest.layers]
    row = ["bf16", "bf16", "bf16", "int8"]
    assert found == [row * 2, ["bf16", "bf16", "bf16", "fp16", *row], row * 2]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--cold-share", "0.1"], 2, "go with --precision-from REPORT"),
        (["--cold-format", "int8"], 2, "go with --precision-from REPORT"),
        (["--precision-from", "nowhere.json"], 78, "--precision-from nowhere.json: cannot be read"),
        (["--precision-from", "R", "--cold-format", "int5"], 78, "--cold-format: format 'int5' is not known"),
        (["--precision-from", "R", "--cold-share", "2"], 2, "Invalid value for '--cold-share'"),
        (["--precision-from", "R"], 78, "layer 1 has 2 experts in the report (other) and 8 in"),
    ],
)
def test_wrong_use_of_a_report(
    arguments: list[str], code: int, text: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told by the option's name, before anything is written."""
    report = tmp_path / "R"
    use = LayerUse(layer=0, per_token=2, bytes=(1,) * 8, assignments=((1,) * 8,))
    small = msgspec.structs.replace(use, layer=1, bytes=(1, 1), assignments=((1, 1),))
    other = msgspec.structs.replace(REPORT, model="other", tasks=REPORT.tasks[:1], layers=(use, small))
    report.write_bytes(msgspec.json.encode(other))
    given = [str(report) if argument == "R" else argument for argument in arguments]
    assert run(["convert", "-q", str(model.parent / "source"), str(tmp_path / "x"), *given]) == code
    assert text in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_packs_and_random_weights_have_no_cold_experts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pack keeps its formats, and weights that are made up were used by nobody."""
    report = tmp_path / "R"
    report.write_bytes(msgspec.json.encode(REPORT))
    assert run(["convert", str(model), str(tmp_path / "x"), "--precision-from", str(report)]) == 78
    assert "is a pack, which keeps its formats; convert the checkpoint" in capsys.readouterr().err
    assert run(["convert", "--dummy", "olmoe", str(tmp_path / "x"), "--precision-from", str(report)]) == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--cold-format", "int5"], "--cold-format: format 'int5' is not known"),
        (
            ["--out", "no/such/folder/r.json"],
            "no/such/folder/r.json cannot be written: there is no folder no/such/folder",
        ),
        (["--data", "nowhere.jsonl"], "--data nowhere.jsonl: cannot be read"),
        (["--out", "/dev"], "/dev cannot be written: it is a folder; name a file in it"),
    ],
)
def test_wrong_use(
    arguments: list[str], text: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, by the option's name."""
    data = write_texts(tmp_path / "d.jsonl", texts((0,), 1))
    given = arguments if "--data" in arguments else ["--data", str(data), *arguments]
    assert run(["experts", "report", "-q", str(model), *given, *ENGINE]) == 78
    assert text in capsys.readouterr().err


REPORT = ExpertReport(
    version="0.1.0", model="m", family="Qwen3MoeForCausalLM", device="cpu", data="d.jsonl", data_sha256="00",
    made="2026-01-01T00:00:00Z", pack_bytes=1 << 20, cold_format="int4-g64",
    savings=(Saving(share=0.0, experts=10, bytes=0, touched=0.0), Saving(share=0.01, experts=11, bytes=1 << 18, touched=0.005)),
    tasks=(TaskUse(task="chat", requests=1200, tokens=4000), TaskUse(task="code", requests=2, tokens=20)),
    layers=(
        LayerUse(layer=1, per_token=2, bytes=(9,) * 12, assignments=((0,) * 10 + (30, 60), (0,) * 9 + (5, 5, 0))),
        LayerUse(layer=2, per_token=1, bytes=(9,) * 2, assignments=((0, 0), (0, 0))),
    ),
)  # fmt: skip


def test_the_tables() -> None:
    """Never used experts by number, the least used of the others, and those that do half of the work."""
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines(REPORT)]
    assert next(lines(REPORT)) == "m on cpu: 1,202 requests, 4,020 tokens of d.jsonl"
    assert rows[4:6] == [
        ("1", "12", "0, 1, 2, 3, 4, 5, 6, 7 and 1 more", "9: 5.0 %", "11: 60.0 %", "1"),
        ("2", "2", "0, 1", "", "", "0"),
    ]
    assert rows[9:11] == [("chat", "1,200", "4,000", "12 of 14"), ("code", "2", "20", "12 of 14")]
    assert rows[14:] == [
        ("nothing", "10 of 14", "0 B", "0.0 %", "0.00 %"),
        ("1 % of any task", "11 of 14", "256.0 KiB", "25.0 %", "0.50 %"),
    ]

"""colibrid.cli.tune, tune_table and colibrid.tune.lab: whole runs on the bundled model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tune_results import result, tried

from colibrid.cli.main import run
from colibrid.cli.tune_table import table
from colibrid.config.profile import read_profile
from colibrid.model.identity import pack_identity
from colibrid.tune import report
from colibrid.tune.result import Point, Result

if TYPE_CHECKING:
    from colibrid.model.pack import Pack

DATA = Path(__file__).parents[1] / "data"
SMALL = ("--device", "cpu", "--concurrency", "2", "--requests", "4", "--output-tokens", "8", "--kl-tokens", "256",
         "--answer-tokens", "16", "--quiet")  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight questions and four texts."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines: list[str] = []
    for name, count in (("eval", 8), ("text", 4)):
        lines += (DATA / f"hummingbird-13m.{name}.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's own configuration does not count."""
    monkeypatch.delenv("COLIBRID_CONFIG", raising=False)


def tuned(pack: Pack, data: str, folder: Path, *options: str) -> tuple[int, Result]:
    """Exit code and result.json."""
    code = run(["tune", str(pack.path), "--data", data, "--out", str(folder), *SMALL, *options])
    return code, read_result(folder)


def read_result(folder: Path) -> Result:
    return msgspec.json.decode((folder / "result.json").read_bytes(), type=Result)


@pytest.fixture(scope="module")
def whole(bundled_pack: Pack, data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with layers and without limits."""
    folder = tmp_path_factory.mktemp("tuned") / "run"
    code, _ = tuned(bundled_pack, data, folder, "--grid", "per_token=1,2,3")
    assert code == 0
    return folder


def test_a_run_leaves_result_and_profile(bundled_pack: Pack, whole: Path) -> None:
    """Points with quality and cost, the model's own first; layers; a profile of the choice, for this pack."""
    found = read_result(whole)
    assert found.tried[0].point == Point()
    assert {Point(per_token=1), Point(per_token=3)} <= {one.point for one in found.tried}
    assert all(
        one.cost is not None and one.quality.loss is not None and one.quality.kl is not None for one in found.tried
    )
    assert [layer.layer for layer in found.layers] == list(range(len(bundled_pack.manifest.layers)))
    assert found.pack == pack_identity(bundled_pack.manifest)
    assert found.chosen is not None
    profile = read_profile(whole / "profile.yaml")
    assert profile.pack == found.pack
    point = found.tried[found.chosen].point
    wanted = list(point.per_token) if isinstance(point.per_token, tuple) else point.per_token
    assert (profile.experts.per_token, profile.experts.threshold) == (wanted, point.threshold)


def test_one_expert_is_worse_and_three_are_no_better(whole: Path) -> None:
    """On a few lines already."""
    losses = {one.point: one.quality.loss for one in read_result(whole).tried}
    one, own = losses[Point(per_token=1)], losses[Point()]
    assert one is not None
    assert own is not None
    assert one > own


def test_a_second_run_finds_the_same_quality_to_the_last_digit(
    bundled_pack: Pack, data: str, whole: Path, tmp_path: Path
) -> None:
    """Other costs, and nothing else; with other slots, too."""
    _, again = tuned(
        bundled_pack, data, tmp_path / "again", "--grid", "per_token=1,3", "--no-layers", "--set", "batch.slots=3"
    )
    before = {one.point: one.quality for one in read_result(whole).tried}
    assert len(again.tried) == 3
    for one in again.tried:
        assert one.quality == before[one.point]


def test_a_finished_run_is_told_again(
    bundled_pack: Pack, data: str, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--resume measures nothing: the same figures, also of time. Without it the folder is refused."""
    before = read_result(whole)
    _, after = tuned(bundled_pack, data, whole, "--grid", "per_token=1,2,3", "--resume")
    assert msgspec.structs.replace(after, made=before.made) == before
    assert "| point" in capsys.readouterr().out
    assert run(["tune", str(bundled_pack.path), "--data", data, "--out", str(whole), *SMALL]) == 78
    assert "holds an earlier run; add --resume" in capsys.readouterr().err


def test_without_matplotlib_only_pictures_are_missing(
    bundled_pack: Pack, data: str, whole: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Table, result and profile are there, one line says what to install, and the exit code is 0."""
    monkeypatch.setattr(report, "find_spec", lambda _name: None)
    code, _ = tuned(bundled_pack, data, whole, "--grid", "per_token=1,2,3", "--resume")
    assert code == 0
    printed = capsys.readouterr()
    assert "profile.yaml" in printed.out
    assert "report.html" not in printed.out
    assert printed.err.startswith("colibrid: no report.html")
    assert "pip install 'colibrid[bench]'" in printed.err


def test_limits_decide(bundled_pack: Pack, data: str, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Between the KL of one expert and that of three one expert is out; what nobody keeps is exit code 1 and no profile."""
    known = {one.point: one.quality.kl or 0.0 for one in read_result(whole).tried}
    bound = (known[Point(per_token=1)] + known[Point(per_token=3)]) / 2
    assert known[Point(per_token=3)] < bound
    options = ("--grid", "per_token=1,2,3", "--no-layers", "--resume")
    code, found = tuned(bundled_pack, data, whole, *options, "--slo", f"kl<{bound}")
    assert code == 0
    assert found.chosen is not None
    assert found.tried[found.chosen].point != Point(per_token=1)
    assert (whole / "profile.yaml").is_file()
    code, found = tuned(bundled_pack, data, whole, *options, "--slo", "loss<0.0001")
    assert (code, found.chosen) == (1, None)
    assert not (whole / "profile.yaml").exists()
    assert "No point keeps loss<0.0001" in capsys.readouterr().out


def test_hopeless_points_are_marked(
    bundled_pack: Pack, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One expert cannot keep this limit: its cost is not measured, and the table says why."""
    code, found = tuned(
        bundled_pack, data, tmp_path / "run", "--grid", "per_token=1", "--no-layers", "--slo", "kl<1e-6"
    )
    assert code == 0
    own, one = found.tried
    assert own.hopeless is None
    assert one.cost is None
    assert "kl<1e-06: kl is" in (one.hopeless or "")
    assert "given up: per_token 1: kl<1e-06" in capsys.readouterr().out


def test_texts_to_embed(bundled_pack: Pack, tmp_path: Path) -> None:
    """Cosines and neighbours stand for quality, and the own setting is the best of them."""
    path = tmp_path / "texts.jsonl"
    words = (
        "Oslo",
        "Paris",
        "a bird",
        "the sea",
        "red",
        "green",
        "seven",
        "nine",
        "to run",
        "to sleep",
        "rain",
        "snow",
    )
    path.write_text("".join(json.dumps({"input": f"{word} and more"}) + "\n" for word in words))
    code, found = tuned(bundled_pack, str(path), tmp_path / "run", "--task", "embed", "--grid", "per_token=1")
    assert code == 0
    own, one = found.tried[:2]
    assert own.quality.cosine == pytest.approx(1.0)
    assert one.quality.cosine is not None
    assert 0 < one.quality.cosine < 1
    assert one.quality.neighbours is not None
    assert found.chosen == 0
    assert found.layers


def test_limits_on_what_experts_take_and_slots(bundled_pack: Pack, data: str, tmp_path: Path) -> None:
    """Each point opens the service that it needs; quality of a point that drops tokens is its own, KL as well."""
    grid = "max_tokens_per_expert=none,4;slots=2,4"
    code, found = tuned(bundled_pack, data, tmp_path / "run", "--grid", grid, "--no-layers", "--slo", "kl<0.01")
    assert code == 0
    assert len(found.tried) == 5
    by_point: dict[Point, Any] = {one.point: one.quality for one in found.tried}
    own = by_point[Point()]
    assert by_point[Point(slots=2)] == by_point[Point(slots=4)] == own
    assert by_point[Point(max_tokens_per_expert=4, slots=4)].loss > own.loss
    assert (
        by_point[Point(max_tokens_per_expert=4, slots=4)].kl > by_point[Point(max_tokens_per_expert=4, slots=2)].kl > 0
    )
    given_up = {one.point.max_tokens_per_expert: one.hopeless or "" for one in found.tried}
    assert "kl<0.01: kl is" in given_up[4]
    assert given_up[None] == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--slo", "kl<"), "--slo"),
        (("--slo", "cosine>0.5"), "no figure 'cosine'"),
        (("--grid", "per_token=99"), "--grid"),
        (("--data", "/nonexistent.jsonl"), "No such file"),
        (("--output-tokens", "2048"), "--output-tokens is 2048, and the context of 2048 leaves no room for a prompt"),
        (
            ("--grid", "max_tokens_per_expert=4", "--answer-tokens", "200"),
            "--answer-tokens is 200, and at most 128 where --grid has max_tokens_per_expert",
        ),
    ],
)
def test_mistakes_are_told_before_anything_is_made(
    bundled_pack: Pack,
    data: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    said: str,
) -> None:
    """Exit code 78 and no folder."""
    folder = tmp_path / "run"
    assert run(["tune", str(bundled_pack.path), "--data", data, "--out", str(folder), *SMALL, *options]) == 78
    assert said in capsys.readouterr().err
    assert not folder.exists()


def test_prompts_of_a_token_and_a_name_that_is_no_text(bundled_pack: Pack, tmp_path: Path) -> None:
    """Nothing has a likelihood then, so answers decide; and what a file is called breaks nothing."""
    place = tmp_path / os.fsdecode(b"\xff\x1b[31m<s>.jsonl")
    place.write_text('{"prompt": "a"}\n{"prompt": "b", "answer": ""}\n', encoding="utf-8")
    code, found = tuned(bundled_pack, str(place), tmp_path / "run", "--grid", "per_token=1,2,3")
    assert code == 0
    assert found.chosen is not None
    assert found.data == "\\xff\x1b[31m<s>.jsonl"
    assert "<s>" not in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert read_profile(tmp_path / "run" / "profile.yaml").pack == pack_identity(bundled_pack.manifest)


def test_what_was_found_is_told_though_it_cannot_be_written(
    bundled_pack: Pack, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of a finished run is not lost for a file that is in the way."""
    (tmp_path / "run" / "result.json").mkdir(parents=True)
    options = (*SMALL, "--grid", "per_token=2", "--no-layers")
    assert run(["tune", str(bundled_pack.path), "--data", data, "--out", str(tmp_path / "run"), *options]) == 78
    shown = capsys.readouterr()
    assert "the model's own setting has the best" in shown.out
    assert "result.json cannot be written: Is a directory" in shown.err


def test_table_shows_what_was_measured() -> None:
    """A line a point, the choice and the front marked, columns without any figure left out."""
    own, one = tried(kl=0.0), tried(0.3, 150, 1.0, Point(per_token=1), kl=0.07)
    lost = msgspec.structs.replace(one, point=Point(threshold=0.9), cost=None, hopeless="kl<0.02: kl is 0.07")
    head, rule, first, second, third, given_up = table(result(own, one, lost, chosen=1, front=(0, 1)))
    assert head.split("|")[1:4] == [" point                     ", " loss   ", " KL      "]
    assert "exact" not in head
    assert set(rule) == {"|", "-", " "}
    assert first.startswith("| + the model's own setting |")
    assert second.startswith("| * per_token 1 ")
    assert "| 1.00          | 150 " in second
    assert third.startswith("|   threshold 0.9 ")
    assert given_up == "given up: threshold 0.9: kl<0.02: kl is 0.07"

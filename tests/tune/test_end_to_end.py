"""`colibrid tune` from the command line to its result, and on to the daemon that serves what was chosen."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest
from daemon_process import DaemonProcess
from tune_models import LAYERS, own_texts, write_model, write_texts

from colibrid.cli.main import run
from colibrid.tune.result import Result, Tried

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from colibrid.model.pack import Pack

DATA = Path(__file__).resolve().parents[1] / "data"
GRID = ("--grid", "per_token=1,2,3,4", "--no-layers")
SMALL = (
    "--quiet", "--device", "cpu", "--concurrency", "4", "--requests", "8", "--output-tokens", "8",
    "--answer-tokens", "48", "--kl-tokens", "4096",
)  # fmt: skip


class Tuned(NamedTuple):
    """What one run left."""

    result: Result
    folder: Path

    def of(self, per_token: int | tuple[int, ...] | None) -> Tried:
        """The point that has so many experts; None: the model's own."""
        found = [one for one in self.result.tried if one.point.per_token == per_token]
        assert len(found) == 1, f"{per_token}: {[one.point for one in self.result.tried]}"
        return found[0]

    @property
    def chosen(self) -> Tried:
        assert self.result.chosen is not None, self.result.reason
        return self.result.tried[self.result.chosen]


def arguments(folder: Path, model: Path, data: Iterable[Path], *more: str) -> list[str]:
    files = [word for path in data for word in ("--data", str(path))]
    return ["tune", str(model), *files, "--out", str(folder), *SMALL, *more]


def tune(folder: Path, model: Path, data: Iterable[Path], *more: str) -> Tuned:
    """Runs the command and reads what it wrote."""
    assert run(arguments(folder, model, data, *more)) == 0
    return Tuned(msgspec.json.decode((folder / "result.json").read_bytes(), type=Result), folder)


def synthetic(folder: Path, needed: Collection[int]) -> tuple[Path, Path]:
    """A pack of three layers of which `needed` need their second experts, and texts that it has written itself."""
    checkpoint = write_model(folder / "checkpoint", needed)
    texts = own_texts(checkpoint, folder / "pack", 24, 48)
    return folder / "pack", write_texts(folder / "texts.jsonl", texts)


def test_a_useless_second_expert_is_left_out(tmp_path: Path) -> None:
    """Where second experts add nothing, one expert predicts to the last digit what two do, and is chosen for less work."""
    pack, data = synthetic(tmp_path, needed=())
    found = tune(tmp_path / "out", pack, [data], "--grid", "per_token=1,2,3")
    own, one = found.result.tried[0], found.of(1)
    assert own.point.per_token is None
    assert (one.quality.kl, one.quality.top1, one.quality.loss) == (0.0, 1.0, own.quality.loss)
    assert found.chosen == one
    profile = found.folder / "profile.yaml"
    assert "per_token: 1\n" in profile.read_text()


def test_one_layer_needs_two_and_the_others_do_not(
    bundled_pack: Pack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The search by layer finds the only layer whose second experts matter, and gives one expert to all others; a daemon
    serves just that by the profile, and refuses it for another pack.
    """
    needed = 1
    pack, data = synthetic(tmp_path, needed=[needed])
    found = tune(tmp_path / "out", pack, [data], "--grid", "per_token=1,2")
    wanted = tuple(2 if layer == needed else 1 for layer in range(LAYERS))
    assert (found.of(1).quality.kl or 0.0) > 0.05
    assert found.of(wanted).quality.kl == 0.0
    assert found.chosen.point.per_token == wanted
    cuts = [layer.cut.kl for layer in found.result.layers if layer.cut is not None]
    assert [kl == 0.0 for kl in cuts] == [layer != needed for layer in range(LAYERS)]
    profile = str(found.folder / "profile.yaml")
    with DaemonProcess(tmp_path, str(pack), "--profile", profile, "--device", "cpu") as daemon:
        daemon.wait_ready()
        asked = {"prompt": "w1 w2 w3", "max_tokens": 5, "temperature": 0}
        usage = daemon.request("POST", "/v1/completions", asked)[1]["usage"]
    computed = 3 + 4  # the last token is not put in again
    assert usage["experts"]["assignments"] == sum(wanted) * computed
    assert usage["experts"]["trimmed"] == (2 * LAYERS - sum(wanted)) * computed
    capsys.readouterr()
    assert run(["serve", str(bundled_pack.path), "--profile", profile, "--port", "0", "--device", "cpu"]) == 78
    assert "made for the pack checkpoint@" in capsys.readouterr().err


class Bundled(NamedTuple):
    """A run over a part of the data, without limits, from which others go on."""

    model: Path
    data: tuple[Path, ...]
    tuned: Tuned


@pytest.fixture(scope="module")
def bundled(bundled_pack: Pack, tmp_path_factory: pytest.TempPathFactory) -> Bundled:
    """The bundled model with one to four experts, on the first questions and texts. Its folder is not to be changed."""
    folder = tmp_path_factory.mktemp("bundled-tune")
    data = []
    for name, count in (("eval", 40), ("text", 24)):
        lines = (DATA / f"hummingbird-13m.{name}.jsonl").read_text(encoding="utf-8").splitlines()
        data.append(folder / f"{name}.jsonl")
        data[-1].write_text("\n".join(lines[:count]), encoding="utf-8")
    return Bundled(bundled_pack.path, tuple(data), tune(folder / "out", bundled_pack.path, data, *GRID))


@pytest.mark.slow
def test_two_experts_are_best_for_the_bundled_model(bundled: Bundled) -> None:
    """Its own k = 2 has the least loss and is chosen; one expert costs loss, answers and agreement; more than two gain
    nothing and drift away, the more the further.
    """
    own, one, three, four = (bundled.tuned.of(count) for count in (None, 1, 3, 4))
    assert bundled.tuned.chosen == own
    assert own.quality.kl == 0.0
    loss = {count: each.quality.loss or 0.0 for count, each in ((1, one), (2, own), (3, three), (4, four))}
    assert min(loss, key=lambda count: loss[count]) == 2
    assert loss[1] > 1.2 * loss[2]
    assert loss[2] < loss[3] < loss[4]
    kl = [each.quality.kl or 0.0 for each in (own, three, four, one)]
    assert kl == sorted(kl)
    assert kl[1] > 0.0
    assert (one.quality.exact or 0.0) < (own.quality.exact or 0.0)
    assert (one.quality.top1 or 0.0) < (three.quality.top1 or 0.0) < 1.0
    work = [each.cost.experts_per_token for each in (one, own, three, four) if each.cost is not None]
    assert work == pytest.approx([1.0, 2.0, 3.0, 4.0])
    profile = (bundled.tuned.folder / "profile.yaml").read_text(encoding="utf-8")
    assert f"Quality: loss {loss[2]:.6g}, kl 0, top1 1," in profile.replace("\n# ", " ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slo", "per_token"),
    [
        # One point keeps each: which of several is the fastest is for a clock to say.
        ("p99_itl_ms<60000, kl<0.002", None),
        ("kl<0.3, experts_per_token<1.5", 1),
        ("kl<0.3, kl>0, experts_per_token>1, experts_per_token<3.5, tokens_per_s>0", 3),
    ],
)
def test_limits_decide(slo: str, per_token: int | None, bundled: Bundled, tmp_path: Path) -> None:
    """The same points under other limits: nothing is measured anew, and the choice keeps them."""
    folder = shutil.copytree(bundled.tuned.folder, tmp_path / "out")
    found = tune(folder, bundled.model, bundled.data, *GRID, "--slo", slo, "--resume")
    assert found.chosen == bundled.tuned.of(per_token)
    assert [one.quality for one in found.result.tried] == [one.quality for one in bundled.tuned.result.tried]


@pytest.mark.slow
def test_no_point_keeps_the_limits(bundled: Bundled, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, the nearest point by name, and no profile that would be served by mistake."""
    folder = shutil.copytree(bundled.tuned.folder, tmp_path / "out")
    slo = "kl<0.0001, experts_per_token<1.5"
    assert run(arguments(folder, bundled.model, bundled.data, *GRID, "--slo", slo, "--resume")) == 1
    assert "No point keeps kl<0.0001 and experts_per_token<1.5" in capsys.readouterr().out
    assert not (folder / "profile.yaml").exists()


@pytest.mark.slow
def test_quality_is_the_same_to_the_last_digit(bundled: Bundled, tmp_path: Path) -> None:
    """Another run, with other slots, other points and another load, gives the same numbers."""
    other = ("--grid", "per_token=1", "--no-layers", "--concurrency", "2", "--set", "batch.slots=5")
    found = tune(tmp_path / "out", bundled.model, bundled.data, *other)
    assert len(found.result.tried) == 2
    for one in found.result.tried:
        assert one.quality == bundled.tuned.of(one.point.per_token).quality

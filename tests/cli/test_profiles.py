"""colibrid.cli.profiles: profiles as a daemon serves with them."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest
from daemon_process import DEADLINE_S, DaemonProcess, wait_for
from tune_results import EIGHT, manifest, result, tried

from colibrid.batch.request import ExpertPolicy
from colibrid.cli.main import run
from colibrid.cli.profiles import check_pack, read_profiles, request_policy
from colibrid.config.load import Override, load
from colibrid.config.profile import read_profile
from colibrid.errors import ConfigError
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.identity import pack_identity
from colibrid.tune.points import shape_of
from colibrid.tune.profile import write_profile
from colibrid.tune.result import Point

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.pack import Pack

PROMPT = {"prompt": "The capital of Norway is", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def written(path: Path, pack: Pack, point: Point, *, other: bool = False) -> str:
    """A profile of this point, for the pack or for another one."""
    name = "other@0123456789abcdef" if other else pack_identity(pack.manifest)
    write_profile(result(tried(point=point), pack=name), shape_of(pack.manifest), path)
    return str(path)


def test_profiles_of_the_settings_are_read(bundled_pack: Pack, tmp_path: Path) -> None:
    """By their names, as what requests will use."""
    layers = len(bundled_pack.manifest.layers)
    files = {
        "one": written(tmp_path / "a.yaml", bundled_pack, Point(per_token=1, threshold=0.1)),
        "own": written(tmp_path / "b.yaml", bundled_pack, Point()),
    }
    settings = load(
        None, {}, [Override(f"experts.profiles.{name}", file, "--set") for name, file in files.items()]
    ).settings
    assert read_profiles(settings, bundled_pack.manifest) == {
        "one": ExpertPolicy(per_token=1, threshold=0.1),
        "own": ExpertPolicy(per_token=(2,) * layers, threshold=0.0),
    }


def test_every_profile_that_does_not_fit_is_told(bundled_pack: Pack, tmp_path: Path) -> None:
    """A missing file, one for another pack, and one with more experts than are allowed, each with its key."""
    files = {
        "absent": str(tmp_path / "none.yaml"),
        "other": written(tmp_path / "a.yaml", bundled_pack, Point(), other=True),
        "more": written(tmp_path / "b.yaml", bundled_pack, Point(per_token=3)),
    }
    overrides = [Override(f"experts.profiles.{name}", file, "--set") for name, file in files.items()]
    with pytest.raises(ConfigError) as caught:
        read_profiles(load(None, {}, overrides).settings, bundled_pack.manifest)
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [f"experts.profiles.{name}" for name in files]
    assert "No such file" in lines[0]
    assert "other@0123456789abcdef" in lines[1]
    assert "allow more by experts.max_per_token" in lines[2]
    allowing = [*overrides[2:], Override("experts.max_per_token", "3", "--set")]
    found = read_profiles(load(None, {}, allowing).settings, bundled_pack.manifest)
    assert found == {"more": ExpertPolicy(per_token=3, threshold=0.0)}


def test_a_daemon_serves_with_profiles(bundled_pack: Pack, tmp_path: Path) -> None:
    """--profile is what requests get that say nothing, a named one what those get that name it; SIGHUP reads it again."""
    one = written(tmp_path / "one.yaml", bundled_pack, Point(per_token=1, slots=3))
    own = written(tmp_path / "own.yaml", bundled_pack, Point())
    arguments = (str(bundled_pack.path), "--profile", one, "--set", f"experts.profiles.own={own}")
    with DaemonProcess(tmp_path, *arguments) as daemon:
        daemon.wait_ready()
        assert daemon.request("GET", "/health")[1]["engines"][0]["slots"] == 3

        def used(**more: str) -> int:
            status, answer = daemon.request("POST", "/v1/completions", PROMPT | more)
            assert status == 200, answer
            found: int = answer["usage"]["experts"]["per_token"]
            return found

        assert used() == 1
        assert used(profile="own") == 2
        status, answer = daemon.request("POST", "/v1/completions", PROMPT | {"profile": "no"})
        assert (status, answer["error"]["message"]) == (400, 'profile "no" does not exist; there are own.')
        written(tmp_path / "own.yaml", bundled_pack, Point(per_token=1))
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: used(profile="own") == 1)
        written(tmp_path / "own.yaml", bundled_pack, Point(), other=True)
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "reload_refused" in daemon.stderr)
        assert used(profile="own") == 1


@pytest.mark.parametrize("where", ["--profile", "experts.profiles"])
def test_a_daemon_refuses_a_profile_for_another_pack(bundled_pack: Pack, tmp_path: Path, where: str) -> None:
    """Exit code 78, both packs in one line, and no engine."""
    file = written(tmp_path / "p.yaml", bundled_pack, Point(per_token=(1,) * 9), other=True)
    options = ("--profile", file) if where == "--profile" else ("--set", f"experts.profiles.fast={file}")
    done = subprocess.run(
        [sys.executable, "-m", "colibrid.cli", "serve", "--port", "0", str(bundled_pack.path), *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 78
    lines = [line for line in done.stderr.splitlines() if line.startswith("colibrid: ")]
    assert len(lines) == 1, done.stderr
    assert "other@0123456789abcdef" in lines[0]
    assert pack_identity(bundled_pack.manifest) in lines[0]


@pytest.mark.parametrize("model", ["pack", "checkpoint"])
def test_a_configuration_is_checked_with_its_profiles(
    bundled_pack: Pack,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
) -> None:
    """`config check` tells what is wrong with them; whether they are for this pack only where the model is one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = written(tmp_path / "other.yaml", bundled_pack, Point(per_token=1), other=True)
    path = tmp_path / "c.yaml"
    head = f"engine: {{device: cpu}}\nmodel: {{path: {bundled_pack.path if model == 'pack' else BUNDLED_MODEL}}}\n"
    path.write_text(f"{head}experts: {{profiles: {{a: {other}}}}}\n")
    assert run(["config", "check", str(path)]) == (78 if model == "pack" else 0)
    assert ("other@0123456789abcdef" in capsys.readouterr().err) == (model == "pack")
    path.write_text(f"{head}experts: {{profiles: {{a: {tmp_path}/none.yaml}}}}\n")
    assert run(["config", "check", str(path)]) == 78
    assert "experts.profiles.a: " in capsys.readouterr().err


def test_origins_name_the_profile(
    bundled_pack: Pack, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`config show --origin` tells which values are a profile's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = written(tmp_path / "p.yaml", bundled_pack, Point(per_token=1, slots=8))
    assert run(["config", "show", "--model", str(bundled_pack.path), "--profile", file, "--origin"]) == 0
    shown = capsys.readouterr().out.splitlines()
    (experts,) = [line for line in shown if line.startswith("  per_token: 1")]
    (slots,) = [line for line in shown if line.startswith("  slots: 8")]
    assert f"# {file}:" in experts
    assert f"# {file}:" in slots


def test_another_pack_is_refused_with_both_names(tmp_path: Path) -> None:
    """A renamed pack is the same one."""
    path = tmp_path / "p.yaml"
    own = manifest()
    write_profile(result(tried(), pack=pack_identity(own)), EIGHT, path)
    check_pack(read_profile(path), msgspec.structs.replace(own, name="renamed"))
    other = msgspec.structs.replace(own, backend="cuda", name="other")
    with pytest.raises(ConfigError) as caught:
        check_pack(read_profile(path), other)
    assert pack_identity(own) in str(caught.value)
    assert pack_identity(other) in str(caught.value)


def test_requests_get_all_of_a_profile(tmp_path: Path) -> None:
    """The model's own numbers are said, too, so that settings do not take their place."""
    path = tmp_path / "p.yaml"
    write_profile(result(tried(point=Point(threshold=0.2))), EIGHT, path)
    policy = request_policy(read_profile(path), manifest())
    assert (policy.per_token, policy.threshold) == ((2, 2, 2, 2), 0.2)
    write_profile(result(tried(point=Point(per_token=1))), EIGHT, path)
    policy = request_policy(read_profile(path), manifest())
    assert (policy.per_token, policy.threshold) == (1, 0.0)

"""colibrid.config.profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from colibrid.config.load import Override, load
from colibrid.config.profile import read_profile
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "profile: 1\npack: small@00ff\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "p.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_profile_is_read(tmp_path: Path) -> None:
    """Its pack, and experts with their types; comments are for people."""
    path = written(tmp_path, f"# why\n{HEAD}experts: {{per_token: [1, 2, 0], threshold: 0.2}}\nbatch: {{slots: 8}}\n")
    profile = read_profile(path)
    assert (profile.source, profile.pack) == (str(path), "small@00ff")
    assert (profile.experts.per_token, profile.experts.threshold) == ([1, 2, 0], 0.2)


def test_a_profile_stands_between_environment_and_options(tmp_path: Path) -> None:
    """It wins over file and environment, an option wins over it, and each value says where it came from."""
    config = tmp_path / "c.yaml"
    config.write_text("experts: {per_token: 2, swap_slots: 3}\nbatch: {slots: 4}\n")
    path = written(tmp_path, f"{HEAD}experts: {{per_token: 1, threshold: 0.5}}\nbatch: {{slots: 8, window_ms: 2}}\n")
    profile = read_profile(path)
    environment = {"COLIBRID_EXPERTS__THRESHOLD": "0.1"}
    override = Override("batch.window_ms", "3", "--set")
    loaded = load(config, environment, [override], profile=(profile.source, profile.root))
    experts, batch = loaded.settings.experts, loaded.settings.batch
    assert (experts.per_token, experts.threshold, experts.swap_slots) == (1, 0.5, 3)
    assert (batch.slots, batch.window_ms) == (8, 3.0)
    assert loaded.origins["experts.per_token"] == f"{path}:3:22"
    assert loaded.origins["batch.window_ms"] == "--set"
    assert loaded.origins["experts.swap_slots"].startswith(f"{config}:")


def test_what_a_file_says_of_single_tasks_does_not_hide_a_profile(tmp_path: Path) -> None:
    """They are as if nobody had said them, unless the command line does."""
    config = tmp_path / "c.yaml"
    config.write_text("experts: {generate: {per_token: 2}, embed: {threshold: 0.9}, score: {threshold: 0.8}}\n")
    profile = read_profile(written(tmp_path, f"{HEAD}experts: {{per_token: 1}}\n"))
    override = Override("experts.score.threshold", "0.7", "--set")
    loaded = load(config, {}, [override], profile=(profile.source, profile.root))
    experts = loaded.settings.experts
    assert (experts.generate.per_token, experts.embed.threshold, experts.score.threshold) == (None, None, 0.7)
    assert loaded.origins["experts.generate.per_token"] == profile.source


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "nothing in it"),
        ("# only this\n", "nothing in it"),
        ("- a\n", "not a profile"),
        ("experts: {per_token: 1}\n", "no profile: line, expected profile: 1"),
        ("profile: 2\npack: a\n", "profile: '2', expected profile: 1"),
        ("profile: true\npack: a\n", "profile: 'true', expected profile: 1"),
        ("profile: 1.0\npack: a\n", "profile: '1.0', expected profile: 1"),
        ("profile: 1\n", "no pack: line"),
        ("profile: 1\npack: 5\n", "no pack: line"),
        ("profile: 1\npack: [a]\n", "no pack: line"),
        (f"{HEAD}experts: {{per_token: 17}}\n", "p.yaml:3:22: experts.per_token must be a whole number from 1 to 16"),
        (f"{HEAD}experts: {{per_tokens: 1}}\n", "did you mean experts.per_token?"),
        (
            f"{HEAD}server: {{port: 1}}\n",
            "p.yaml:3:16: server.port is no key of a profile; it may hold experts.per_token",
        ),
        (f"{HEAD}experts: {{profiles: {{a: b}}}}\n", "experts.profiles is no key of a profile"),
        (f"{HEAD}experts: {{per_token: &a 1}}\n", "anchor &a is not allowed"),
        (f"{HEAD}profile: 1\n", "key 'profile' is already set in line 1"),
        (f"{HEAD}more: 1\n", "unknown key 'more'"),
    ],
)
def test_mistakes_are_named_with_their_places(tmp_path: Path, text: str, said: str) -> None:
    """As strictly as the configuration."""
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_profile(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    """Says so."""
    with pytest.raises(ConfigError, match="No such file"):
        read_profile(tmp_path / "none.yaml")

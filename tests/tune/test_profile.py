"""colibrid.tune.profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from tune_results import EIGHT, cost, result, tried

from colibrid.config.profile import read_profile
from colibrid.errors import ConfigError
from colibrid.tune.profile import profile_text, write_profile
from colibrid.tune.result import Point

if TYPE_CHECKING:
    from pathlib import Path


replace = msgspec.structs.replace
POINT = Point(per_token=(1, 2, 2, 1), threshold=0.2, max_tokens_per_expert=64, window_ms=2.0, slots=8)


def test_a_chosen_point_reads_back_as_itself(tmp_path: Path) -> None:
    """What was written is what a daemon would use, with the evidence above it as comments."""
    made = result(tried(), tried(0.21, 120, 1.5, POINT, kl=0.01), chosen=1, slo="kl<0.02", reason="It is the fastest.")
    path = tmp_path / "profile.yaml"
    write_profile(made, EIGHT, path)
    profile = read_profile(path)
    assert profile.pack == made.pack
    assert profile.experts.per_token == [1, 2, 2, 1]
    assert (profile.experts.threshold, profile.experts.max_tokens_per_expert) == (0.2, 64)
    text = path.read_text()
    assert "batch:\n  window_ms: 2.0\n  slots: 8\n" in text
    comments = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    for part in ("It is the fastest.", "prompts.jsonl", "ab" * 32, "kl<0.02", "loss 0.21, kl 0.01", "120 tokens/s"):
        assert part in comments
    assert "setting: loss 0.2, of 1000 tokens" in comments
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.yaml"]


def test_the_own_setting_is_written_as_such() -> None:
    """null, so that a configuration that says something else does not show through; what was not tried is left out."""
    assert profile_text(result(tried()), EIGHT).partition("profile: 1\n")[2] == (
        'pack: "small@0123456789abcdef"\nexperts:\n  per_token: null\n  threshold: 0.0\n  max_tokens_per_expert: null\n'
    )


def test_more_experts_than_the_models_own_are_allowed_by_the_profile(tmp_path: Path) -> None:
    """Else the daemon would refuse them."""
    path = tmp_path / "p.yaml"
    write_profile(result(tried(point=Point(per_token=3))), EIGHT, path)
    assert read_profile(path).experts.max_per_token == 3


def test_names_with_line_ends_do_not_leave_their_comment(tmp_path: Path) -> None:
    """A file's name may hold anything; what is behind it stays a comment."""
    path = tmp_path / "p.yaml"
    made = result(tried(), data="a\nserver:\x85 {port: 1}\u2028profile: 7", machine="m\r\nx: 1")
    write_profile(made, EIGHT, path)
    assert read_profile(path).pack == made.pack


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """With what to do."""
    with pytest.raises(ConfigError, match="cannot be written: .*--out"):
        write_profile(result(tried()), EIGHT, tmp_path / "none" / "p.yaml")


def test_costs_and_own_costs_are_evidence() -> None:
    """Both can be compared in the file."""
    chosen = replace(tried(point=Point(per_token=1)), cost=cost(150, 1.0, ttft_ms=None))
    text = " ".join(profile_text(result(tried(), chosen, chosen=1), EIGHT).replace("\n# ", " ").split())
    assert "Cost: 150 tokens/s at 8 requests under way, itl p50" in text
    assert "Cost of the model's own setting: 100 tokens/s at 8 requests under way, ttft p50 20 ms p99 40 ms" in text

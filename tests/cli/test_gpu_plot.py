"""bench/gpu_plot.py: results of the GPU check as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")

import gpu_plot

if TYPE_CHECKING:
    from pathlib import Path


def test_a_gpus_results_are_drawn_as_a_roofline(tmp_path: Path) -> None:
    """Steps of decode beside the peer's, prompts where there are several lengths; bytes of a row are its operations."""
    row = {"slots": 1, "prompt_tokens": 480, "context": 496, "bytes_per_step": 6e9, "read_bandwidth": 4.6e12}
    rows = [
        {**row, "step_ms": 2.5, "prefill_tokens_per_s": 2e4},
        {**row, "slots": 8, "bytes_per_step": 28e9, "step_ms": 7.5, "prefill_tokens_per_s": 2e4},
    ]
    decode, peer = gpu_plot.decode_points({"rows": rows}), 9.23e-3
    assert [point.intensity for point in decode] == [1, pytest.approx(8 * 6 / 28)]
    assert decode[1].rate == pytest.approx(8 * 6e9 / 7.5e-3)
    assert gpu_plot.peer_points("qwen3-30b-a3b", decode)[1].seconds == peer
    assert gpu_plot.peer_points("another", decode) == []
    prompts = [{**rows[0], "prompt_tokens": tokens} for tokens in (128, 512)]
    assert [point.seconds for point in gpu_plot.prompt_points({"rows": prompts, "memory": {"weights": 60e9}})] == [
        pytest.approx(128 / 2e4), pytest.approx(512 / 2e4)
    ]  # fmt: skip
    engines = [{"model": "qwen3-30b-a3b", "rows": made, "memory": {"weights": 60e9}} for made in (rows, prompts)]
    picture = tmp_path / "roof.png"
    gpu_plot.draw({"device": "a GPU", "commit": "c", "date": "d", "engine": engines}).savefig(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")

"""Numbers on the command line."""

from __future__ import annotations

import pytest

from colibrid.cli.main import run


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "http", "--rate", "nan"],
        ["bench", "http", "--seconds", "nan"],
        ["bench", "http", "--timeout", "nan"],
        ["convert", "src", "dst", "--cold-share", "nan"],
        ["verify", "pack", "--max-kl", "nan"],
        ["complete", "hello", "--temperature", "nan"],
    ],
)
def test_what_is_no_number_is_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """No bound keeps `nan` out by itself: it is neither below nor above."""
    assert run(arguments) == 2
    assert "'nan' is not a number" in capsys.readouterr().err

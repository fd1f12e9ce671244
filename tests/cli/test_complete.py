"""`colibrid complete`."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from colibrid.model.pack import Pack

QUESTION = "What is the capital of Norway?"


def complete(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "colibrid.cli", "complete", *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=300,
        check=False,
    )


def test_chat_prints_the_answer_only(bundled_pack: Pack) -> None:
    """The answer is on stdout with a line end, and stderr is empty."""
    done = complete(str(bundled_pack.path), QUESTION, "--chat", "--temperature", "0")
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital of Norway is Oslo.\n", "")


def test_prompt_from_stdin_and_bound(bundled_pack: Pack) -> None:
    """PROMPT - is read from standard input, and --max-tokens bounds the text."""
    done = complete(
        str(bundled_pack.path), "-", "--max-tokens", "1", "--temperature", "0", stdin="In the beginning God"
    )
    assert done.returncode == 0
    assert 1 <= len(done.stdout.strip()) <= 20


def test_equal_seeds_give_equal_texts(bundled_pack: Pack) -> None:
    """A sampled text is repeated by its seed and changed by another."""
    arguments = (str(bundled_pack.path), "Tell me a story.", "--chat", "--max-tokens", "40", "--temperature", "1.5")
    one, two, other = (complete(*arguments, "--seed", seed).stdout for seed in ("7", "7", "8"))
    assert one == two != other


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [(["", "--max-tokens", "1"], 1, "the prompt is empty"),
     (["x", "--max-tokens", "2048"], 1, "more than the context of 2048"),
     (["x", "--device", "cuda"], 78, "engine.device is cuda, but"),
     (["x", "y"], 2, "[MODEL] PROMPT"),
     (["x", "--temperature", "3"], 2, "--temperature")],
)  # fmt: skip
def test_mistakes_are_told(bundled_pack: Pack, arguments: list[str], code: int, text: str) -> None:
    """Empty and too long prompts, devices and options that do not work end with one clear message."""
    done = complete(str(bundled_pack.path), *arguments)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr

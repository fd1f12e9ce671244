"""colibrid.cli.elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from colibrid.cli import elsewhere
from colibrid.cli import main as front
from colibrid.cli.serve import serve
from colibrid.config.load import keys

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-vllm-and-llama-server.md"
OURS = {option for parameter in serve.params for option in parameter.opts}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--max-num-seqs", "4"], "No such option '--max-num-seqs': use --max-batch-size."),
     (["--tensor-parallel-size=2"], "No such option '--tensor-parallel-size': leave it out; a model lies on one device"),
     (["model", "-ngl", "99"], "No such option '-ngl': use --device;"),
     (["-m", "file.gguf", "-c", "4096"], "No such option '-m': give the model as MODEL"),
     (["-ctk", "f16"], "No such option '-ctk': use --set kv.precision")],
)  # fmt: skip
def test_options_of_other_servers_name_ours(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An option of another server is wrong usage that says what to use, with its whole name."""
    assert front.run(["serve", *arguments]) == 2
    assert text in capsys.readouterr().err


def test_other_options_are_refused_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    """What no server has is left to click, which names the nearest of our options."""
    assert front.run(["serve", "--prot", "1"]) == 2
    assert "--port" in capsys.readouterr().err


def test_the_page_for_newcomers_and_the_command_agree() -> None:
    """Every option that the page lists for other servers is ours too, or is answered with what to use."""
    table = PAGE.read_text().partition("## Starting")[2].partition("\n## ")[0]
    theirs = [cell for row in table.splitlines() for cell in row.split("|")[1:3]]
    named = {option for cell in theirs for option in re.findall(r"`(-[\w-]+)", cell)} - {"-hf"}  # -h is help
    assert len(named) > 30
    assert [option for option in sorted(named - OURS) if elsewhere.instead_of(option, [option]) is None] == []


def test_what_is_named_exists() -> None:
    """Options and settings that the answers name are those of the program, and none of ours is refused."""
    answers = " ".join(elsewhere._INSTEAD.values())
    assert set(re.findall(r"--[a-z-]+", answers)) <= OURS
    assert set(re.findall(r"--set ([\w.]+)=", answers)) <= set(keys())
    assert OURS & elsewhere._INSTEAD.keys() == set()

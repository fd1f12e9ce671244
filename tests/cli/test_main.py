"""colibrid.cli.main: the front door, its errors and its exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import click
import pytest

from colibrid import __version__
from colibrid.cli import main as front
from colibrid.errors import ConfigError, EngineError, ModelError

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = ("aiohttp", "asyncio", "ctypes", "msgspec", "numpy", "structlog", "tokenizers", "uvloop", "yaml")


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    """`colibrid --help` lists the verbs with a line each and exits with 0."""
    assert front.run(["--help"]) == 0
    output = capsys.readouterr().out
    for verb in ("serve", "complete", "convert", "inspect", "bench"):
        assert f"\n  {verb} " in output


def test_help_imports_nothing_heavy() -> None:
    """Help must be quick, so it loads none of the libraries that serving needs."""
    code = "import sys; from colibrid.cli.main import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stderr.split()) & set(HEAVY) == set()


@pytest.mark.parametrize("verb", ["serve", "complete", "convert", "inspect", "bench"])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each verb explains itself, and its own first line is the one that the list shows."""
    assert front.run([verb, "--help"]) == 0
    assert f"Usage: colibrid {verb}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints name and version."""
    assert front.run(["--version"]) == 0
    assert capsys.readouterr().out == f"colibrid {__version__}\n"


@pytest.mark.parametrize(("arguments", "code"), [(["nonsense"], 2), (["--nonsense"], 2), (["convert"], 2)])
def test_wrong_usage_exits_with_2(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown verbs, unknown options and missing arguments are usage errors."""
    assert front.run(arguments) == code
    assert "Error" in capsys.readouterr().err


def test_a_mistyped_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """A verb that is nearly right is answered with the right one."""
    assert front.run(["serv"]) == 2
    assert "No such command 'serv'. Did you mean 'serve'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("a\nb"), 78), (ModelError("a\nb"), 78), (EngineError("a\nb"), 1), (KeyboardInterrupt(), 130),
     (click.Abort(), 130)],
)  # fmt: skip
def test_errors_become_lines_and_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Configuration and model errors exit with 78, others with 1, each line marked as ours, without a traceback."""

    def fail(**_arguments: object) -> None:
        raise error

    monkeypatch.setattr(front.cli, "main", fail)
    assert front.run([]) == code
    assert capsys.readouterr().err == ("colibrid: a\ncolibrid: b\n" if code in (1, 78) else "")


def test_a_reader_that_left_is_not_a_traceback() -> None:
    """Output into a closed pipe ends quietly."""
    process = subprocess.Popen(
        [sys.executable, "-m", "colibrid.cli", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    process.wait()
    assert b"Traceback" not in error


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_a_full_disk_is_one_line(arguments: list[str], unbuffered: str) -> None:
    """Output that cannot be written is told, with code 1, whether it fails at once or only at the end."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "colibrid.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "colibrid: the output cannot be written: No space left on device; make room, or send it elsewhere\n"
    )


def test_too_little_memory_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory is short a verb ends with a line and code 1."""

    def fail(**_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(front.cli, "main", fail)
    assert front.run(["inspect"]) == 1
    assert capsys.readouterr().err.startswith("colibrid: not enough memory")


def test_unreadable_configuration_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing or broken file names itself and its place, and exits with 78."""
    assert front.run(["serve", "--config", str(tmp_path / "none.yaml")]) == 78
    broken = tmp_path / "broken.yaml"
    broken.write_text("server:\n  port: 99999\n")
    assert front.run(["serve", "--config", str(broken)]) == 78
    missing, bound = capsys.readouterr().err.splitlines()
    assert missing.startswith(f"colibrid: {tmp_path / 'none.yaml'}: cannot read")
    assert bound.startswith(f"colibrid: {broken}:2:9: server.port must be")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--port", "x"], "--port: server.port must be a whole number from 0 to 65535 (given: 'x')"),
     (["--max-model-len", "0"], "--max-seq-len, --max-model-len: model.max_seq_len must be"),
     (["--expert-capacity", "99"], "--expert-capacity: experts.per_token must be"),
     (["--max-batch-size", "65"], "--max-batch-size: batch.slots must be"),
     (["--gpu-memory-utilization", "2"], "memory.gpu_fraction must be"),
     (["--device", "tpu"], "engine.device must be auto, cpu or cuda"),
     (["--set", "batch.slot=3"], "did you mean batch.slots?"),
     (["--set", "nonsense"], "section.key=value"),
     (["a", "--model-path", "b"], "give one of them")],
)  # fmt: skip
def test_wrong_options_say_what_is_allowed(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each option is checked by the same rules as the file, and names itself."""
    assert front.run(["serve", *arguments]) == 78
    assert text in capsys.readouterr().err

"""colibrid.config.environment."""

from __future__ import annotations

import site
from pathlib import Path

import pytest

from colibrid.config.environment import child_environment, read_environment


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({"CACHE_DIRECTORY": "/var/cache/a:/var/cache/b", "XDG_CACHE_HOME": "/x"}, "/var/cache/a"),
     ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/colibrid"),
     ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/colibrid"),
     ({"HOME": "/h"}, "/h/.cache/colibrid")],
)  # fmt: skip
def test_cache_folder(environ: dict[str, str], expected: str) -> None:
    """systemd's folder comes first, then XDG's when absolute, then the home folder's."""
    assert read_environment(environ).cache_dir == Path(expected)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({"HF_HUB_CACHE": "/hub", "HF_HOME": "/hf"}, "/hub"),
     ({"HF_HOME": "/hf"}, "/hf/hub"),
     ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
     ({"HOME": "/h"}, "/h/.cache/huggingface/hub")],
)  # fmt: skip
def test_hugging_face_folder(environ: dict[str, str], expected: str) -> None:
    """The local Hugging Face cache is found as its own tools find it."""
    assert read_environment(environ).hugging_face_hub == Path(expected)


def test_settings_are_collected() -> None:
    """COLIBRID_* are settings, COLIBRID_CONFIG is the file, everything else is ignored."""
    environment = read_environment({"COLIBRID_CONFIG": "/c.yaml", "COLIBRID_SERVER__PORT": "1", "PATH": "/bin"})
    assert environment.config_file == Path("/c.yaml")
    assert environment.settings == {"COLIBRID_SERVER__PORT": "1"}


def test_no_home_is_not_an_error() -> None:
    """A process without HOME still gets a folder name."""
    assert read_environment({}).cache_dir.is_absolute()


def test_a_child_imports_the_same_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From a source tree the child gets its folder first on the path; an installed package needs nothing."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert child_environment(tmp_path)["PYTHONPATH"] == f"{tmp_path}:/elsewhere"
    assert child_environment(Path(site.getsitepackages()[0]))["PYTHONPATH"] == "/elsewhere"
    monkeypatch.delenv("PYTHONPATH")
    assert child_environment(tmp_path)["PYTHONPATH"] == str(tmp_path)
    assert "PYTHONPATH" not in child_environment(Path(site.getsitepackages()[0]))

"""requirements.lock: every dependency of an installation is pinned and hashed, and fits what pyproject.toml asks for."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ENTRY = re.compile(r"^(\S.*?)((?: \\\n    --hash=sha256:[0-9a-f]{64})*)$", re.MULTILINE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ASKED = {
    "requirements.lock": PROJECT["dependencies"],
    "requirements-cuda.lock": PROJECT["dependencies"] + PROJECT["optional-dependencies"]["cuda"],
}


def pins(name: str) -> dict[str, Requirement]:
    """What is pinned for this Python on this system."""
    found = [Requirement(entry) for entry, _ in entries(name)]
    here = [one for one in found if one.marker is None or one.marker.evaluate()]
    assert len({canonicalize_name(one.name) for one in here}) == len(here)
    return {canonicalize_name(one.name): one for one in here}


def entries(name: str) -> list[tuple[str, str]]:
    text = (ROOT / name).read_text()
    found = ENTRY.findall(text)
    assert "".join(f"{entry}{hashes}\n" for entry, hashes in found) == text  # nothing else is in the file
    return found


@pytest.mark.parametrize("name", ASKED)
def test_everything_is_pinned_and_hashed(name: str) -> None:
    """One version and at least one SHA-256 each; no place that packages would come from."""
    for entry, hashes in entries(name):
        specifiers = list(Requirement(entry).specifier)
        assert [one.operator for one in specifiers] == ["=="], entry
        assert hashes, entry
        assert Requirement(entry).url is None


@pytest.mark.parametrize("name", ASKED)
def test_pins_are_what_is_asked_for(name: str) -> None:
    """Each dependency of the project is pinned to a version that it allows."""
    pinned = pins(name)
    for text in ASKED[name]:
        asked = Requirement(text)
        (pin,) = pinned[canonicalize_name(asked.name)].specifier
        assert asked.specifier.contains(pin.version), f"{text} is pinned to {pin}; run make lock"


@pytest.mark.parametrize("name", ASKED)
def test_dependencies_of_dependencies_are_pinned(name: str) -> None:
    """Whatever an installed dependency needs here is in the file, too."""
    pinned = pins(name)
    for package in pinned:
        try:
            needed = requires(package) or []
        except PackageNotFoundError:
            continue  # of another kind of host
        for text in needed:
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": ""}):
                assert canonicalize_name(one.name) in pinned, f"{package} needs {text}; run make lock"

"""Units of systemd/ as data, for tests; expands the groups of system calls as the systemd of this machine defines them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "systemd"
_SPAN = re.compile(r"([0-9]+)(min|s|)")


class Unit:
    """Sections, keys and values in the order in which they stand; of a repeated key, all values."""

    def __init__(self, *paths: Path) -> None:
        self.values: dict[str, list[str]] = {}
        for path in paths:
            for line in path.read_text().splitlines():
                if "=" in line and not line.startswith("#"):
                    key, _, value = line.partition("=")
                    self.values.setdefault(key, []).append(value)

    def last(self, key: str) -> str:
        """The value that holds of a key that is not a list; empty where there is none."""
        return self.values.get(key, [""])[-1]

    def on(self, key: str) -> bool:
        return self.last(key) in {"yes", "true", "1"}

    def words(self, key: str) -> list[str]:
        return [word for value in self.values.get(key, []) for word in value.split()]

    def seconds(self, key: str) -> float:
        found = _SPAN.fullmatch(self.last(key))
        assert found is not None, f"{key}={self.last(key)!r} is no time span that this reads"
        return float(found[1]) * (60 if found[2] == "min" else 1)


def allowed_calls(unit: Unit) -> set[str]:
    """Names of the system calls that SystemCallFilter= leaves; its first line must be a list of allowed ones."""
    groups = _groups()
    allowed = _expand("@default", groups)
    for line in unit.values["SystemCallFilter"]:
        named = {call for word in line.removeprefix("~").split() for call in _expand(word, groups)}
        allowed = allowed - named if line.startswith("~") else allowed | named
    return allowed


def _expand(word: str, groups: dict[str, list[str]]) -> set[str]:
    return {call for each in groups[word] for call in _expand(each, groups)} if word.startswith("@") else {word}


def _groups() -> dict[str, list[str]]:
    command = ["systemd-analyze", "--no-pager", "syscall-filter"]
    groups: dict[str, list[str]] = {}
    name = ""
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        word = line.strip()
        if line.startswith("@"):
            name = word
            groups[name] = []
        elif line.startswith(" ") and word and not word.startswith("#"):
            groups[name].append(word)
    return groups

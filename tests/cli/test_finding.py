"""colibrid.cli.finding."""

from __future__ import annotations

from colibrid.cli.finding import Finding, refused
from colibrid.errors import ColibridError, ConfigError


def test_messages_become_text_and_fix() -> None:
    """What stands after the first semicolon is the fix; several lines become one; wrong settings are told apart."""
    assert refused("x", ConfigError("a is\n  there; correct it; or remove it")) == Finding(
        check="x", level="error", text="a is there", fix="correct it; or remove it", configuration=True
    )
    plain = refused("x", ColibridError("it broke"))
    assert (plain.text, plain.configuration) == ("it broke", False)
    assert plain.fix

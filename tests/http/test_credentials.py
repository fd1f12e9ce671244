"""colibrid.http.credentials."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibrid.config.settings import KeyLimits
from colibrid.errors import ConfigError
from colibrid.http.credentials import (
    MAX_KEYS,
    SCOPES,
    Key,
    digest_of,
    new_key,
    read_keys,
    read_time,
    show_time,
    write_line,
)

HASH = "sha256:" + "0" * 64
COUNT = st.none() | st.integers(1, 1 << 40)
KEYS = st.builds(
    Key,
    id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True),
    digest=st.binary(min_size=32, max_size=32),
    scopes=st.frozensets(st.sampled_from(SCOPES), min_size=1),
    limits=st.builds(
        KeyLimits, requests_per_minute=COUNT, tokens_per_day=COUNT, priority=st.none() | st.integers(-1000, 1000)
    ),
    expires=st.none() | st.integers(0, 1 << 33).map(float),
    comment=st.text(st.characters(categories=["L", "N", "P"])).map(lambda text: text.lstrip("#")),
)


@given(KEYS)
def test_lines_read_back(key: Key) -> None:
    """What write_line has written is what read_keys reads."""
    assert read_keys(write_line(key), "x") == (key,)


@given(st.text())
def test_any_text_is_keys_or_one_error(text: str) -> None:
    """Whatever a file holds, it is keys or a ConfigError whose every line names the file."""
    try:
        read_keys(text, "the file")
    except ConfigError as error:
        assert all(line.startswith("the file") for line in str(error).split("\n"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("short", "shorter than 8"),
        (HASH, "a hash without an id"),
        ("two words", "second word is not sha256:"),
        (f"al/ice {HASH}", "is no id"),
        (f"alice {HASH} rpm=5", "'rpm=5' is not known"),
        (f"alice {HASH} requests_per_minute", "is not known"),
        (f"alice {HASH} requests_per_minute=0", "a whole number from 1 on"),
        (f"alice {HASH} tokens_per_day=1e3", "a whole number from 1 on"),
        (f"alice {HASH} priority=2000", "from -1000 to 1000"),
        (f"alice {HASH} scopes=all", "scope 'all' is not known"),
        (f"alice {HASH} scopes=", "scope '' is not known"),
        (f"alice {HASH} scopes=admin scopes=admin", "given twice"),
        (f"alice {HASH} expires=tomorrow", "is no day"),
        (f"alice {HASH} expires=2027-01-31T12:00", "is no day"),
        (f"alice {HASH.upper()}", "second word is not sha256:"),
    ],
)
def test_wrong_lines(line: str, message: str) -> None:
    """A wrong line is told with its number and what is wrong."""
    with pytest.raises(ConfigError, match=rf"f:2: .*{re.escape(message)}"):
        read_keys(f"# first\n{line}\n", "f")


def test_all_that_is_wrong_is_told() -> None:
    """Two wrong lines are two lines of the error."""
    with pytest.raises(ConfigError, match=r"f:1: .*\nf:3: "):
        read_keys("short\nlong-enough\ntwo words\n", "f")


def test_keys_that_exclude_each_other() -> None:
    """The same id or the same key twice, and too many keys, are refused."""
    other = "sha256:" + "1" * 64
    with pytest.raises(ConfigError, match="the id of a is that of a, too"):
        read_keys(f"a {HASH}\na {other}", "f")
    with pytest.raises(ConfigError, match="the key of b is that of a, too"):
        read_keys(f"a {HASH}\nb {HASH}", "f")
    with pytest.raises(ConfigError, match=f"more than {MAX_KEYS}"):
        read_keys("\n".join(f"key-number-{number}" for number in range(MAX_KEYS + 1)), "f")


def test_times() -> None:
    """A day begins at midnight in UTC; a time needs its zone; both are shown as they are read."""
    assert read_time("1970-01-02") == 86400.0
    assert read_time("1970-01-01T02:00:00+01:00") == 3600.0
    assert show_time(86400.0) == "1970-01-02"
    assert show_time(3600.0) == "1970-01-01T01:00:00Z"


def test_new_keys() -> None:
    """Keys differ, are one word, and digests are SHA-256."""
    first, second = new_key(), new_key()
    assert first != second
    assert re.fullmatch(r"clb_[A-Za-z0-9_-]{43}", first)
    assert digest_of("abc").hex().startswith("ba7816bf")
    assert len(digest_of("\udc80")) == 32

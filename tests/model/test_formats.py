"""Names of formats, groups that fit, and the bytes of sections."""

from __future__ import annotations

import pytest

from colibrid.errors import ModelError
from colibrid.model.formats import FORMATS, check_groups, format_of, padded, parts


def test_int4_is_a_short_name_for_groups_of_64() -> None:
    """The names without a group size are those of groups of 64."""
    assert format_of("int4") is FORMATS["int4-g64"]
    assert format_of("int4-z") is FORMATS["int4-g64-z"]


def test_an_unknown_format_is_named_with_those_that_exist() -> None:
    """The message lists what may be written."""
    with pytest.raises(ModelError, match=r"'int5' is not known; expected one of int4, fp32, .*fp8-b128"):
        format_of("int5")


@pytest.mark.parametrize(
    ("name", "shape", "groups"),
    [
        ("bf16", (3, 5), (0, 0)),
        ("int8", (3, 50), (1, 50)),
        ("int8-g128", (3, 256), (1, 128)),
        ("int8-g128", (3, 64), (1, 64)),
        ("int4-g32-z", (3, 96), (1, 32)),
        ("fp8", (3, 50), (1, 50)),
        ("fp8-b128", (300, 200), (128, 128)),
    ],
)
def test_groups_of_a_format(name: str, shape: tuple[int, int], groups: tuple[int, int]) -> None:
    """A group is as the name says, a whole row where it says nothing, and such groups pass the check."""
    assert format_of(name).groups_of(shape) == groups
    check_groups("w", format_of(name).precision, shape, groups)


@pytest.mark.parametrize(
    ("precision", "cols", "groups", "message"),
    [
        ("bf16", 64, (1, 64), "bf16 has none"),
        ("int4", 96, (1, 64), "w: int4 in groups of 1 x 64 does not fit 96 columns; groups of 32 would"),
        ("int4", 40, (1, 32), "no group does, so choose another format"),
        ("int4", 64, (2, 32), "does not fit"),
        ("int8", 64, (1, 48), "int8 in groups of 1 x 48 found"),
        ("fp8", 256, (1, 128), "fp8 in groups of 1 x 128 found"),
    ],
)
def test_groups_that_do_not_fit(precision: str, cols: int, groups: tuple[int, int], message: str) -> None:
    """The message names the matrix, the groups and what would do."""
    with pytest.raises(ModelError, match=message):
        check_groups("w", precision, (16, cols), groups)  # type: ignore[arg-type]


def test_parts_of_a_section_follow_each_other_at_multiples_of_256() -> None:
    """int4 of 20 x 64 with zero points: 32 padded rows of 32 bytes, then two scales and two zero points a row."""
    found = parts("int4", "rows16", (20, 64), (1, 32), zero_points=True)
    assert (found.values, found.scales_at, found.scales) == (32 * 32, 1024, 32 * 2 * 2)
    assert (found.zeros_at, found.zeros, found.bytes) == (1280, 64, 1344)


def test_int8_pads_its_columns_to_four() -> None:
    """Four columns lie side by side."""
    assert padded((20, 50), "rows16", "int8") == (32, 52)
    assert parts("int8", "rows16", (20, 50), (1, 50), zero_points=False).values == 32 * 52


def test_scales_of_blocks_are_not_padded() -> None:
    """A matrix of 300 x 200 has three times two blocks of 128 x 128."""
    assert parts("fp8", "rows16", (300, 200), (128, 128), zero_points=False).scales == 6 * 4


def test_flat_matrices_are_never_quantised() -> None:
    """The form to exchange has floats only."""
    with pytest.raises(ModelError, match="cannot lie in layout flat"):
        parts("int8", "flat", (16, 32), (1, 32), zero_points=False)

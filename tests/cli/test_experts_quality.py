"""bench/experts_quality.py measures what it says, and the same every time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import experts_quality
from experts_quality import Row, Variant, measure, table

if TYPE_CHECKING:
    import pytest


def test_figures_follow_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts a token are those asked for, only a limit drops, and the model itself diverges from nothing, every time."""
    variants = (Variant(), Variant(per_token=1), Variant(threshold=0.5), Variant(limit=16))
    monkeypatch.setattr(experts_quality, "VARIANTS", variants)
    rows = [row for _, row in measure(questions=6, texts=1, divergence_texts=1)]
    own, one, share, limited = rows
    assert (own.experts, one.experts) == (2.0, 1.0)
    assert 1.0 < share.experts < 2.0
    assert [row.dropped > 0 for row in rows] == [False, False, False, True]
    assert own.divergence == 0
    assert 0 < share.divergence < one.divergence
    assert limited.divergence > 0
    assert own.exact >= 0.8
    assert [row for _, row in measure(questions=6, texts=1, divergence_texts=1)] == rows


def test_a_table_says_what_was_asked() -> None:
    """One line a variant, with its setting in words."""
    rows = [
        (Variant(), Row(0.5, 1.25, 2.0, 0.0, 0.0)),
        (Variant(per_token=3, threshold=0.2), Row(1, 1, 2.5, 0, 0.5)),
        (Variant(limit=8), Row(0.25, 2, 1.5, 0.125, 0.75)),
    ]
    assert table(rows).splitlines()[2:] == [
        "| the model's own: per_token 2 | 50.0 % | 1.2500 | 0.0000 | 2.00 |  |",
        "| per_token 3, threshold 0.2 | 100.0 % | 1.0000 | 0.5000 | 2.50 |  |",
        "| max_tokens_per_expert 8 | 25.0 % | 2.0000 | 0.7500 | 1.50 | 12.5 % |",
    ]

"""How figures of points are shown."""

from __future__ import annotations

from made_result import made_result

from colibrid.tune import columns
from colibrid.tune.slo import figures


def test_every_figure_has_a_column() -> None:
    """What can be limited can be seen, under the same name."""
    names = [column.name for column in (*columns.QUALITY, *columns.COST)]
    assert len(set(names)) == len(names)
    assert {*figures("generate"), *figures("embed"), *figures("score")} == set(names)


def test_measured_leaves_out_what_nobody_has() -> None:
    """Embeddings have no loss and no time between tokens, and columns stay in their order."""
    found = [column.name for column in columns.measured((*columns.QUALITY, *columns.COST), made_result("embed"))]
    assert found[:2] == ["cosine", "neighbours"]
    assert "p99_e2e_ms" in found
    assert not {"loss", "kl", "p50_itl_ms", "p50_ttft_ms"} & set(found)


def test_figures_are_written_for_people() -> None:
    """Shares as per cent, bytes with a unit, rates with separators."""
    by_name = {column.name: column for column in (*columns.QUALITY, *columns.COST)}
    assert by_name["exact"].write(0.9375) == "93.8 %"
    assert by_name["bytes_per_token"].write(3 * 2**19) == "1.50 MiB"
    assert by_name["tokens_per_s"].write(12345.6) == "12,346"
    assert by_name["p99_itl_ms"].write(0.4561) == "0.456"
    assert by_name["p99_e2e_ms"].write(1234.5) == "1,234"
    assert by_name["kl"].rises is False
    assert by_name["exact"].rises is True
    assert {name for name, column in by_name.items() if column.share} == {"exact", "top1", "same", "neighbours"}

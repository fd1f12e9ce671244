"""Prints docs/reference/metrics.md from the table: python -m colibrid.http.metrics_reference > docs/reference/metrics.md"""

from __future__ import annotations

import sys

from colibrid.http.metrics_table import METRICS

_INTRODUCTION = """\
# Metrics reference

Printed from `colibrid/http/metrics_table.py` by `python -m colibrid.http.metrics_reference`; do not edit. How to use them:
[Observability](../OBSERVABILITY.md).

`GET /metrics` answers in Prometheus' text format, with the metrics of the daemon's process (`process_*`) at the end.
`engine` is the number of an engine, 0 for the first. Counters of engines begin anew when an engine is restarted.
No label holds anything that a client has sent: the number of series depends on the model's layers and the number of
engines only.

| metric | kind | labels | meaning | vLLM's name |
|---|---|---|---|---|
"""


def render() -> str:
    """The whole page."""
    rows = (
        f"| `{one.family}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | {one.about} | "
        f"{f'`{one.vllm}`' if one.vllm else ''} |\n"
        for one in METRICS
    )
    return _INTRODUCTION + "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(render())

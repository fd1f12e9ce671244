"""Which experts a user's data uses: what `colibrid experts report` found, as it is kept in report.json.

Counts are the engine's, one for each token that an expert computed; they are the same on every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from colibrid.errors import ConfigError
from colibrid.paths import read_bounded, user_path
from colibrid.tune.result import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.model.manifest import Layer

MAX_REPORT_BYTES = 256 << 20
_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class TaskUse(Struct, frozen=True, kw_only=True):
    """Lines of the data that belong together: what they say as "task", else what is done with them."""

    task: str
    requests: _Count
    tokens: _Count  # of prompts and answers


class LayerUse(Struct, frozen=True, kw_only=True):
    """One MoE layer."""

    layer: _Count
    per_token: _Count  # the model's own
    bytes: tuple[_Count, ...]  # of each expert in the pack
    assignments: tuple[tuple[_Count, ...], ...]  # of each task, in the order of `tasks`: of each expert

    @property
    def experts(self) -> int:
        return len(self.bytes)

    @property
    def totals(self) -> list[int]:
        """Assignments of each expert over all tasks."""
        return [sum(counts) for counts in zip(*self.assignments, strict=True)]

    @property
    def never(self) -> list[int]:
        """Experts that no token chose."""
        return [expert for expert, count in enumerate(self.totals) if not count]


class Saving(Struct, frozen=True, kw_only=True):
    """What moving the least used experts to another format would save."""

    share: float  # of the assignments of any task, at most
    experts: _Count
    bytes: _Count
    touched: float  # share of all assignments that these experts have


class ExpertReport(Struct, frozen=True, kw_only=True):
    """A whole report."""

    kind: Literal["experts"] = "experts"
    format: Literal[1] = 1
    version: str  # colibrid's
    model: str
    family: str
    device: str
    data: str  # file name
    data_sha256: str
    made: str  # ISO date and time, UTC
    pack_bytes: _Count
    tasks: Annotated[tuple[TaskUse, ...], Meta(min_length=1)]
    layers: Annotated[tuple[LayerUse, ...], Meta(min_length=1)]
    cold_format: str  # that `savings` are for
    savings: tuple[Saving, ...]


def read_report(path: str, option: str) -> ExpertReport:
    """ConfigError naming the option, the file and what is wrong with it."""
    remedy = "write one with `colibrid experts report`"
    data = read_bounded(user_path(path), MAX_REPORT_BYTES, f"{option} {path}", remedy)
    try:
        report = msgspec.json.decode(data, type=ExpertReport)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} {path}: {error}; {remedy}") from None
    if len({use.layer for use in report.layers}) != len(report.layers):
        raise ConfigError(f"{option} {path}: a layer is there twice; {remedy}")
    for use in report.layers:
        sizes = {len(use.bytes), *map(len, use.assignments)}
        if len(sizes) != 1 or not use.bytes or len(use.assignments) != len(report.tasks):
            raise ConfigError(
                f"{option} {path}: counts of layer {use.layer} are not one for each task and expert; {remedy}"
            )
    if not any(any(use.totals) for use in report.layers):
        raise ConfigError(f"{option} {path}: no expert was used at all, so none is colder than others; {remedy}")
    return report


def check_fits(report: ExpertReport, family: str, layers: Sequence[Layer], option: str, model: str) -> None:
    """ConfigError: the report is about a model of another shape."""
    remedy = f"make a report of {model}"
    if report.family != family:
        raise ConfigError(f"{option}: the report is about a {report.family}, {model} is a {family}; {remedy}")
    there = {use.layer: use.experts for use in report.layers}
    here = {index: layer.experts for index, layer in enumerate(layers) if layer.experts}
    for index in sorted(there.keys() | here.keys()):
        if there.get(index, 0) != here.get(index, 0):
            raise ConfigError(
                f"{option}: layer {index} has {there.get(index, 0)} experts in the report ({report.model}) and "
                f"{here.get(index, 0)} in {model}; {remedy}"
            )

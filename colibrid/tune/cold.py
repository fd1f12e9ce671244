"""Which experts are cold, and what a pack saves if they get a smaller format. Pure, and without numpy.

An expert costs the largest share of a task's assignments that it has in any task. The cheapest ones are cold, as many as
together cost at most the share that was allowed: so no task has more than that share of its work done by them, however
little of the data is of that task (docs/decisions/0038-cold-experts.md).
"""

from __future__ import annotations

from fractions import Fraction
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from colibrid.errors import ConfigError
from colibrid.model import layout
from colibrid.model.precision import MAX_RULES, Plan, Rule, Span
from colibrid.tune.usage import Saving

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from colibrid.model.formats import Format
    from colibrid.model.manifest import Manifest
    from colibrid.tune.usage import LayerUse

COLD_FORMAT = "int4"  # and share, where none are asked for
COLD_SHARE = 0.01
SHARES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5)  # that a report tells of


class Expert(NamedTuple):
    """One routed expert and what it does."""

    cost: Fraction  # the largest share of a task's assignments that it has; exact, for sums of them are compared
    layer: int
    expert: int
    assignments: int


def by_use(layers: Sequence[LayerUse]) -> list[Expert]:
    """All experts, the least used first; of equal ones the lower layer and number."""
    tasks = [sum(map(sum, counts)) for counts in zip(*(use.assignments for use in layers), strict=True)]
    found = [
        Expert(
            max(
                (
                    Fraction(counts[expert], total)
                    for counts, total in zip(use.assignments, tasks, strict=True)
                    if total
                ),
                default=Fraction(0),
            ),
            use.layer,
            expert,
            assignments,
        )
        for use in layers
        for expert, assignments in enumerate(use.totals)
    ]
    return sorted(found)


def cold(experts: Iterable[Expert], share: float) -> list[Expert]:
    """Of experts in the order of `by_use`, as many as cost at most `share` together."""
    found = []
    spent = Fraction(0)
    for each in experts:
        spent += each.cost
        if float(spent) > share:
            break
        found.append(each)
    return found


def cold_plan(chosen: Iterable[Expert], form: Format, base: Plan, option: str) -> Plan:
    """`base`, and `form` for the chosen experts that it does not name itself. ConfigError: too many rules."""
    named = {rule.target for rule in base.rules}
    rules = [
        rule
        for layer, found in groupby(sorted((each.layer, each.expert) for each in chosen), key=lambda pair: pair[0])
        for span in _runs([expert for _, expert in found])
        if (rule := Rule("experts", form.name, Span(layer, layer), span)).target not in named
    ]
    if len(rules) + len(base.rules) > MAX_RULES:
        raise ConfigError(
            f"{option}: {len(rules)} runs of cold experts with hot ones between them, at most {MAX_RULES} rules are kept; "
            "lower --cold-share"
        )
    # Rules of experts are the last; of these, the ones that a user wrote win.
    order = sorted([*rules, *base.rules], key=lambda rule: rule.rank)
    return Plan(tuple(order), option)


def savings(
    manifest: Manifest, layers: Sequence[LayerUse], form: Format, shares: Sequence[float] = SHARES
) -> tuple[Saving, ...]:
    """For each share that cold experts may have. Experts that are as small already stay. ModelError: the format's groups
    do not fit.
    """
    saved = _saved(manifest, layers, form)
    order = [each for each in by_use(layers) if saved[each.layer, each.expert] > 0]
    total = sum(sum(use.totals) for use in layers)
    found = []
    for share in shares:
        chosen = cold(order, share)
        found.append(
            Saving(
                share=share,
                experts=len(chosen),
                bytes=sum(saved[each.layer, each.expert] for each in chosen),
                touched=sum(each.assignments for each in chosen) / total if total else 0.0,
            )
        )
    return tuple(found)


def expert_bytes(manifest: Manifest) -> dict[tuple[int, int], int]:
    """What each (layer, expert) takes in the pack."""
    sizes = {file.name: file.bytes for file in manifest.files}
    return {
        (index, expert): sizes[name]
        for index, layer in enumerate(manifest.layers)
        for expert, name in enumerate(layer.expert_files)
    }


def _saved(manifest: Manifest, layers: Sequence[LayerUse], form: Format) -> dict[tuple[int, int], int]:
    """Bytes of each expert beyond what it would have in the format."""
    matrices = layout.LAYOUT_OF[manifest.backend]
    found = {}
    for use in layers:
        width = manifest.layers[use.layer].expert_width
        tensors = layout.expert_tensors(manifest.hyperparameters.hidden, use.layer, 0, width)
        last = layout.place(tensors, lambda _tensor: form, matrices)[-1]
        for expert, size in enumerate(use.bytes):
            found[use.layer, expert] = size - (last.offset + last.bytes)
    return found


def _runs(numbers: Sequence[int]) -> Iterator[Span]:
    """Rising numbers as ranges."""
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield Span(first, last)
            first = number
        last = number
    yield Span(first, last)

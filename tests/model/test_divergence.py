"""KL of a model from its own routings, against the plain float64 pass of tests/reference.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from reference import Reference

from colibrid.model import divergence
from colibrid.model.checkpoint import Checkpoint
from colibrid.model.divergence import Divergences, Text, divergences
from colibrid.model.forward import OWN, Forward, Routing
from colibrid.model.source import CheckpointModel
from colibrid.model.steps import TokenLimit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TEXTS = [Text([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], 4), Text([2, 7, 1])]
ROUTINGS = [Routing(1), Routing(threshold=0.7), Routing(3), OWN]


def measure(source: Path, routings: Sequence[Routing]) -> Divergences:
    with Checkpoint(source) as checkpoint:
        return divergences(CheckpointModel(checkpoint), TEXTS, routings)


def test_figures_follow_their_definitions(converted: Path) -> None:
    """Means over the positions that count, over the whole vocabulary; the model is at 0 from itself."""
    found = measure(converted / "src", ROUTINGS)
    reference = Reference(converted / "flat")
    assert found.positions == 13
    for routing, kl in zip(ROUTINGS, found.kl, strict=True):
        total = 0.0
        for text in TEXTS:
            rows = slice(text.first - 1, len(text.ids) - 1)
            reference.per_token, reference.threshold = None, 0.0
            own = reference.log_softmax(list(text.ids))[rows]
            assert isinstance(routing.per_token, int)
            reference.per_token, reference.threshold = routing.per_token or None, routing.threshold
            total += float((np.exp(own) * (own - reference.log_softmax(list(text.ids))[rows])).sum())
        assert kl == pytest.approx(total / found.positions, rel=1e-3, abs=1e-6)
    assert found.kl[-1] == 0.0
    assert min(found.kl[:3]) > 0


def test_entropy_is_of_the_whole_softmax(converted: Path) -> None:
    """In units of log(experts), over all tokens; nothing for layers without experts."""
    found = measure(converted / "src", [])
    reference = Reference(converted / "flat")
    assert found.kl == ()
    for index, layer in enumerate(reference.manifest.layers):
        if layer.ffn != "moe":
            assert found.entropy[index] is None
            continue
        each = []
        for text in TEXTS:
            logits = reference.forward(list(text.ids))[f"{index}.router_logits"]
            shares = np.exp(logits - logits.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
            each += list(-(shares * np.log(shares)).sum(axis=1))
        assert found.entropy[index] == pytest.approx(np.mean(each) / np.log(layer.experts), abs=1e-4)


def test_company_changes_no_digit(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A routing alone, with others, or in passes of one each gives the same number."""
    layers = len(Reference(converted / "flat").manifest.layers)
    limits = [Routing(limit=TokenLimit(tokens, 2, 4, 8)) for tokens in (1, 3)]
    some = [
        *ROUTINGS,
        *limits,
        *(Routing(tuple(1 + (place == layer) for place in range(layers))) for layer in range(layers)),
    ]
    together = measure(converted / "src", some)
    alone = [measure(converted / "src", [routing]).kl[0] for routing in some]
    assert list(together.kl) == alone
    monkeypatch.setattr(divergence, "MOST_BYTES", 1)
    assert measure(converted / "src", some) == together


def test_a_limit_counts_in_each_step_alone(converted: Path) -> None:
    """One that no step reaches changes nothing; a tighter one changes more; texts that share no step do not compete."""
    room = [TokenLimit(tokens, 1, 16, 16) for tokens in (16, 8, 2)]
    none, some, more = measure(converted / "src", [Routing(limit=limit) for limit in room]).kl
    assert none == 0
    assert 0 < some < more
    with Checkpoint(converted / "src") as checkpoint:
        model = CheckpointModel(checkpoint)
        texts = [text.ids for text in TEXTS]
        apart, together = Routing(limit=TokenLimit(2, 1, 16, 32)), Routing(limit=TokenLimit(2, 2, 16, 32))
        both = Forward(model, texts, [apart, together])
        both.run()
        first, second = both.x.reshape(2, len(both.ids), -1)
        alone = Forward(model, texts[:1], [apart])
        alone.run()
    assert np.allclose(first[: len(texts[0])], alone.x, atol=1e-5)
    assert not np.allclose(first, second, atol=1e-3)


def test_routings_part_where_they_differ(converted: Path) -> None:
    """Until then they are one branch; a list gives each layer its own number."""
    with Checkpoint(converted / "src") as checkpoint:
        model = CheckpointModel(checkpoint)
        layers = len(model.description.layers)
        cut = Routing((*[0] * (layers - 1), 1))
        texts = Forward(model, [text.ids for text in TEXTS], [OWN, Routing(2), cut, Routing(1)])
        texts.embed()
        texts.layer(0)
        assert texts.branches == [[0, 1, 2], [3]]
        for layer in range(1, layers):
            texts.layer(layer)
        assert texts.branches == [[0, 1], [2], [3]]
        alone = Forward(model, [text.ids for text in TEXTS], [cut])
        alone.run()
        count = len(texts.ids)
        assert np.array_equal(texts.x[count : 2 * count], alone.x)
        assert not np.array_equal(texts.x[:count], alone.x)

"""The forward pass in float32 numpy, a layer at a time over many texts: for calibration and comparison, not for serving.

Every matrix is asked for once, used for all texts and dropped; so a model larger than memory can be run, at
    hidden states   tokens x hidden
    one matrix, and the intermediate values of one layer
Several routings are taken through together, so that they share the matrices: routings that were alike so far are one
branch, whose rows lie together in x. A branch is computed by products of its own, so that its values do not depend on
what else is computed. Of the texts of one branch, those that share a step of an engine compete for an expert that takes only
so many tokens from each step (steps.py).

The formulas are the engine's: RMSNorm, RoPE, grouped-query attention with windows, SwiGLU, softmax routing with ties to
the lowest expert. RoPE's positions begin at 0 in every text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from colibrid.errors import ModelError
from colibrid.model import layout
from colibrid.model.steps import beyond, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from colibrid.model.families.base import Description
    from colibrid.model.floats import Array
    from colibrid.model.layout import Tensor
    from colibrid.model.manifest import Layer, Role
    from colibrid.model.steps import TokenLimit

QUERIES = 256  # of one text whose attention is computed at once
POSITIONS = 256  # whose logits are computed at once
# Called before a matrix is used: its role, its expert if it has one, and what it is about to multiply, (tokens, inputs).
Probe = Callable[["Role", int | None, "Array"], None]


class Weights(Protocol):
    """A model's description, and its tensors as float32: (outputs, inputs), vectors as (1, n)."""

    @property
    def description(self) -> Description: ...

    def matrix(self, tensor: Tensor) -> Array: ...


class Routing(NamedTuple):
    """How many experts a token uses."""

    per_token: int | tuple[int, ...] = 0  # one number for each layer, or for all; 0: the model's own
    threshold: float = 0.0  # leave out experts whose share is below this part of the token's largest
    limit: TokenLimit | None = None  # of an expert, whoever chose it

    def at(self, index: int, layer: Layer) -> Route:
        """In one layer."""
        asked = self.per_token if isinstance(self.per_token, int) else self.per_token[index]
        return Route(min(asked, layer.experts) or layer.experts_per_token, self.threshold, self.limit)


class Route(NamedTuple):
    """A routing in one layer."""

    wanted: int
    threshold: float
    limit: TokenLimit | None


OWN = Routing()


class Forward:
    """Texts on their way through the layers. `run` takes them to the end; `log_softmax` is what they predict.

    branches: the routings, by their numbers, that each block of len(ids) rows of x stands for.
    """

    def __init__(self, weights: Weights, texts: Sequence[Sequence[int]], routings: Sequence[Routing] = (OWN,)) -> None:
        self._weights = weights
        self._routings = routings
        self.branches = [list(range(len(routings)))]
        self._routes: list[Route] = []  # of each branch, in the present layer
        self.hyper = weights.description.hyperparameters
        self.layers = weights.description.layers
        self.tensors = {(t.role, t.layer, t.expert): t for t in _all_tensors(weights.description)}
        self.ids = np.concatenate([np.asarray(text, np.int64) for text in texts])
        ends = np.cumsum([len(text) for text in texts])
        self.bounds = [(int(end) - len(text), int(end)) for text, end in zip(texts, ends, strict=True)]
        if self.ids.min() < 0 or self.ids.max() >= self.hyper.vocab_size:
            raise ModelError(f"token {self.ids.max()} is outside the vocabulary of {self.hyper.vocab_size}")
        longest = max(len(text) for text in texts)
        if longest > self.hyper.max_positions:
            raise ModelError(f"a text has {longest} tokens, the model reads at most {self.hyper.max_positions}")
        lengths = [len(text) for text in texts]
        self._steps = {limit: steps_of(lengths, limit) for limit in dict.fromkeys(r.limit for r in routings) if limit}
        angle = np.arange(longest)[:, None] * np.array(self.hyper.rope_inv_freq)
        self._cos, self._sin = ((f(angle) * self.hyper.rope_scale).astype(np.float32) for f in (np.cos, np.sin))
        # (branches x tokens, hidden) after the layers done so far
        self.x: Array = np.zeros((0, self.hyper.hidden), np.float32)

    def run(self, progress: Callable[[int, int], None] = lambda _done, _total: None) -> None:
        """From the embedding through every layer."""
        self.embed()
        for index in range(len(self.layers)):
            self.layer(index)
            progress(index + 1, len(self.layers))

    def embed(self) -> None:
        self.x = self.weight("embedding")[self.ids]

    def layer(self, index: int, probe: Probe = lambda _role, _expert, _x: None) -> None:
        """One layer for all texts."""
        self._attention(index, probe)
        layer = self.layers[index]
        if layer.ffn == "moe":
            self._part(index, layer)
        normed = self.normed(self.x, "ffn_norm", index)
        total = np.zeros_like(self.x)
        if layer.ffn == "moe":
            self._routed(index, layer, normed, total, probe)
        if layer.shared_width:
            shared = self._swiglu(index, None, normed, self._edges, probe)
            if layer.shared_gated:
                shared *= _sigmoid(_times(normed, self.weight("shared_gate", index), self._edges))
            total += shared
        self.x = self.x + total

    def log_softmax(self) -> Iterator[tuple[slice, Array]]:
        """Blocks of positions, and (positions, vocabulary) of each: the prediction of the token after it.

        Of the first branch.
        """
        head = self.head()
        for begin in range(0, len(self.ids), POSITIONS):
            where = slice(begin, min(begin + POSITIONS, len(self.ids)))
            yield where, self.predict(self.x[where], head)

    def head(self) -> Array:
        """The matrix that `predict` takes."""
        return self.weight("embedding" if self.hyper.tied_head else "head")

    def predict(self, rows: Array, head: Array) -> Array:
        """(rows, vocabulary): the logarithm of the prediction that follows from each row of x."""
        logits = self.normed(rows, "final_norm", None) @ head.T
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits, dtype=np.float32).sum(axis=1, keepdims=True))
        return np.asarray(logits)

    def weight(self, role: Role, layer: int | None = None, expert: int | None = None) -> Array:
        """One tensor."""
        return self._weights.matrix(self.tensors[role, layer, expert])

    def normed(self, x: Array, role: Role, layer: int | None) -> Array:
        """RMSNorm over the last axis."""
        scale = 1.0 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(self.hyper.rms_norm_eps))
        return np.asarray(x * scale * self.weight(role, layer), np.float32)

    @property
    def _edges(self) -> list[int]:
        """Where blocks of x begin and end."""
        return [len(self.ids) * branch for branch in range(len(self.branches) + 1)]

    def _part(self, index: int, layer: Layer) -> None:
        """Branches whose routings are not alike in this layer become several."""
        alike: dict[tuple[int, Route], list[int]] = {}
        for block, members in enumerate(self.branches):
            for number in members:
                alike.setdefault((block, self._routings[number].at(index, layer)), []).append(number)
        if len(alike) > len(self.branches):
            edges = self._edges
            self.x = np.concatenate([self.x[edges[block] : edges[block + 1]] for block, _ in alike])
        self.branches = list(alike.values())
        self._routes = [route for _, route in alike]

    def _attention(self, index: int, probe: Probe) -> None:
        hyper = self.hyper
        normed = self.normed(self.x, "attn_norm", index)
        probe("qkv", None, normed)
        qkv = _times(normed, self.weight("qkv", index), self._edges)
        if hyper.qkv_bias:
            qkv += self.weight("qkv_bias", index)
        q, k, v = np.split(qkv.reshape(len(qkv), -1, hyper.head_dim), [hyper.heads, hyper.heads + hyper.kv_heads], 1)
        q, k = self._norm_heads(q, "q_norm", index), self._norm_heads(k, "k_norm", index)
        mixed = np.empty_like(q)
        for block, (begin, end) in itertools.product(self._edges[:-1], self.bounds):
            where = slice(block + begin, block + end)
            mixed[where] = self._mix(self._rope(q[where]), self._rope(k[where]), v[where], self.layers[index].window)
        flat = mixed.reshape(len(qkv), -1)
        probe("out", None, flat)
        self.x = self.x + _times(flat, self.weight("out", index), self._edges)
        if hyper.out_bias:
            self.x += self.weight("out_bias", index)

    def _norm_heads(self, x: Array, role: Role, layer: int) -> Array:
        """Of (T, heads, head_dim): each head by itself, all of a token together, or nothing."""
        if self.hyper.qk_norm == "none":
            return x
        rows = x if self.hyper.qk_norm == "head" else x.reshape(len(x), -1)
        return self.normed(rows, role, layer).reshape(x.shape)

    def _rope(self, x: Array) -> Array:
        cos, sin = self._cos[: len(x), None, :], self._sin[: len(x), None, :]
        low, high = np.split(x, 2, axis=2)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)

    def _mix(self, q: Array, k: Array, v: Array, window: int) -> Array:
        """Causal attention of one text: q (T, heads, dim), k and v (T, kv_heads, dim)."""
        group = self.hyper.heads // self.hyper.kv_heads
        mixed = np.empty_like(q)
        place = np.arange(len(q))
        for begin in range(0, len(q), QUERIES):
            rows = slice(begin, begin + QUERIES)
            back = place[rows, None] - place[None, : begin + QUERIES]  # how far a key lies before its query
            hidden = (back < 0) | (back >= (window or len(q)))
            keys = slice(0, begin + QUERIES)
            for head in range(self.hyper.heads):
                scores = q[rows, head] @ k[keys, head // group].T * np.float32(self.hyper.attention_scale)
                scores[hidden] = -np.inf
                shares = np.exp(scores - scores.max(axis=1, keepdims=True))
                mixed[rows, head] = shares @ v[keys, head // group] / shares.sum(axis=1, keepdims=True)
        return mixed

    def _routed(self, index: int, layer: Layer, normed: Array, total: Array, probe: Probe) -> None:
        """Adds every routed expert's share to `total`."""
        scores = self.scores(index, normed)
        most = max(route.wanted for route in self._routes)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :most]  # ties to the lowest index
        shares = np.take_along_axis(scores, best, axis=1)
        kept = np.zeros(best.shape, bool)
        for (begin, end), route in zip(itertools.pairwise(self._edges), self._routes, strict=True):
            where = (slice(begin, end), slice(route.wanted))
            mine = shares[where].copy()
            kept[where] = mine >= np.float32(route.threshold) * mine[:, :1]
            mine[~kept[where]] = 0
            if layer.renormalise:
                mine /= mine.sum(axis=1, keepdims=True)
            shares[where] = mine * np.float32(layer.routed_scale)
            if route.limit is not None:
                self._drop(best[where], shares[where], kept[where], route.limit)
        for expert in range(layer.experts):
            tokens, places = np.nonzero((best == expert) & kept)
            if len(tokens):
                edges = list(np.searchsorted(tokens, self._edges))
                found = self._swiglu(index, expert, normed[tokens], edges, probe)
                total[tokens] += shares[tokens, places, None] * found

    def _drop(self, best: Array, shares: Array, kept: Array, limit: TokenLimit) -> None:
        """Takes out of `kept` what is too much for an expert in a step; of one branch."""
        steps = self._steps[limit]
        for expert in np.unique(best):
            tokens, places = np.nonzero((best == expert) & kept)
            over = beyond(shares[tokens, places], steps[tokens], limit.tokens)
            kept[tokens[over], places[over]] = False

    def scores(self, index: int, normed: Array) -> Array:
        """(rows, experts): the router's softmax of one layer."""
        scores = _times(normed, self.weight("router", index), self._edges)
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(scores / scores.sum(axis=1, keepdims=True))

    def _swiglu(self, index: int, expert: int | None, x: Array, edges: Sequence[int], probe: Probe) -> Array:
        probe("gate", expert, x)
        gate = _times(x, self.weight("gate", index, expert), edges)
        middle = gate * _sigmoid(gate) * _times(x, self.weight("up", index, expert), edges)
        probe("down", expert, middle)
        return _times(middle, self.weight("down", index, expert), edges)


def _times(x: Array, matrix: Array, edges: Sequence[int]) -> Array:
    """X times the matrix, the rows between two edges by a product of their own."""
    if len(edges) == 2:
        return np.asarray(x @ matrix.T)
    return np.concatenate([x[begin:end] @ matrix.T for begin, end in itertools.pairwise(edges)])


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp of a large number is infinite, its inverse 0: right
        return np.asarray(np.float32(1.0) / (np.float32(1.0) + np.exp(-x)))


def _all_tensors(description: Description) -> Iterator[Tensor]:
    hyper, layers = description.hyperparameters, description.layers
    yield from layout.dense_tensors(hyper, layers)
    for index, layer in enumerate(layers):
        for expert in range(layer.experts):
            yield from layout.expert_tensors(hyper.hidden, index, expert, layer.expert_width)

"""The forward pass in float32 numpy, a layer at a time over many texts: for calibration and comparison, not for serving.

Every matrix is asked for once, used for all texts and dropped; so a model larger than memory can be run, at
    hidden states   tokens x hidden
    one matrix, and the intermediate values of one layer
The formulas are the engine's: RMSNorm, RoPE, grouped-query attention with windows, SwiGLU, softmax routing with ties to
the lowest expert. RoPE's positions begin at 0 in every text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from colibrid.errors import ModelError
from colibrid.model import layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from colibrid.model.families.base import Description
    from colibrid.model.floats import Array
    from colibrid.model.layout import Tensor
    from colibrid.model.manifest import Layer, Role

QUERIES = 256  # of one text whose attention is computed at once
POSITIONS = 256  # whose logits are computed at once
# Called before a matrix is used: its role, its expert if it has one, and what it is about to multiply, (tokens, inputs).
Probe = Callable[["Role", int | None, "Array"], None]


class Weights(Protocol):
    """A model's description, and its tensors as float32: (outputs, inputs), vectors as (1, n)."""

    @property
    def description(self) -> Description: ...

    def matrix(self, tensor: Tensor) -> Array: ...


class Forward:
    """Texts on their way through the layers. `run` takes them to the end; `log_softmax` is what they predict."""

    def __init__(self, weights: Weights, texts: Sequence[Sequence[int]]) -> None:
        self._weights = weights
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
        angle = np.arange(longest)[:, None] * np.array(self.hyper.rope_inv_freq)
        self._cos, self._sin = ((f(angle) * self.hyper.rope_scale).astype(np.float32) for f in (np.cos, np.sin))
        self.x: Array = np.zeros((0, self.hyper.hidden), np.float32)  # (tokens, hidden) after the layers done so far

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
        normed = self.normed(self.x, "ffn_norm", index)
        layer = self.layers[index]
        total = np.zeros_like(self.x)
        if layer.ffn == "moe":
            self._routed(index, layer, normed, total, probe)
        if layer.shared_width:
            shared = self._swiglu(index, None, normed, probe)
            if layer.shared_gated:
                shared *= _sigmoid(normed @ self.weight("shared_gate", index).T)
            total += shared
        self.x = self.x + total

    def log_softmax(self) -> Iterator[tuple[slice, Array]]:
        """Blocks of positions, and (positions, vocabulary) of each: the prediction of the token after it."""
        head = self.weight("embedding" if self.hyper.tied_head else "head")
        for begin in range(0, len(self.x), POSITIONS):
            where = slice(begin, begin + POSITIONS)
            logits = self.normed(self.x[where], "final_norm", None) @ head.T
            logits -= logits.max(axis=1, keepdims=True)
            logits -= np.log(np.exp(logits, dtype=np.float32).sum(axis=1, keepdims=True))
            yield where, logits

    def weight(self, role: Role, layer: int | None = None, expert: int | None = None) -> Array:
        """One tensor."""
        return self._weights.matrix(self.tensors[role, layer, expert])

    def normed(self, x: Array, role: Role, layer: int | None) -> Array:
        """RMSNorm over the last axis."""
        scale = 1.0 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(self.hyper.rms_norm_eps))
        return np.asarray(x * scale * self.weight(role, layer), np.float32)

    def _attention(self, index: int, probe: Probe) -> None:
        hyper = self.hyper
        normed = self.normed(self.x, "attn_norm", index)
        probe("qkv", None, normed)
        qkv = normed @ self.weight("qkv", index).T
        if hyper.qkv_bias:
            qkv += self.weight("qkv_bias", index)
        q, k, v = np.split(qkv.reshape(len(qkv), -1, hyper.head_dim), [hyper.heads, hyper.heads + hyper.kv_heads], 1)
        q, k = self._norm_heads(q, "q_norm", index), self._norm_heads(k, "k_norm", index)
        mixed = np.empty_like(q)
        for begin, end in self.bounds:
            where = slice(begin, end)
            mixed[where] = self._mix(self._rope(q[where]), self._rope(k[where]), v[where], self.layers[index].window)
        flat = mixed.reshape(len(qkv), -1)
        probe("out", None, flat)
        self.x = self.x + flat @ self.weight("out", index).T
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
        scores = normed @ self.weight("router", index).T
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        best = np.argsort(-scores, axis=1, kind="stable")[:, : layer.experts_per_token]  # ties to the lowest index
        shares = np.take_along_axis(scores, best, axis=1)
        if layer.renormalise:
            shares /= shares.sum(axis=1, keepdims=True)
        shares *= np.float32(layer.routed_scale)
        for expert in range(layer.experts):
            tokens, places = np.nonzero(best == expert)
            if len(tokens):
                total[tokens] += shares[tokens, places, None] * self._swiglu(index, expert, normed[tokens], probe)

    def _swiglu(self, index: int, expert: int | None, x: Array, probe: Probe) -> Array:
        probe("gate", expert, x)
        gate = x @ self.weight("gate", index, expert).T
        middle = gate * _sigmoid(gate) * (x @ self.weight("up", index, expert).T)
        probe("down", expert, middle)
        return np.asarray(middle @ self.weight("down", index, expert).T)


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp of a large number is infinite, its inverse 0: right
        return np.asarray(np.float32(1.0) / (np.float32(1.0) + np.exp(-x)))


def _all_tensors(description: Description) -> Iterator[Tensor]:
    hyper, layers = description.hyperparameters, description.layers
    yield from layout.dense_tensors(hyper, layers)
    for index, layer in enumerate(layers):
        for expert in range(layer.experts):
            yield from layout.expert_tensors(hyper.hidden, index, expert, layer.expert_width)

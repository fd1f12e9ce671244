"""The whole forward pass in float64 numpy, read straight from a pack. Slow, and as plain as the formulas.

    python tests/reference.py PACK 1,2,3        prints the shape, mean and first values of every buffer

Buffers of one prompt of T tokens, per layer L (all (T, ...) unless said):
    L.input  L.attn_norm  L.q (T, heads, head_dim, after norm and RoPE)  L.k  L.v  L.attention  L.after_attention
    L.ffn_norm  L.router_logits (T, experts)  L.experts (T, k, best first)  L.weights (T, k)  L.routed  L.shared
    L.output; and final_norm, logits (T, vocab)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from colibrid.model.floats import STORAGE, widen
from colibrid.model.formats import float_of
from colibrid.model.pack import open_pack
from colibrid.model.quantised import read_section

if TYPE_CHECKING:
    from colibrid.model.manifest import Layer, Manifest, Section

Array = np.ndarray[Any, np.dtype[np.float64]]


class Reference:
    """A pack's weights as float64, and the forward pass over them."""

    def __init__(self, pack: Path) -> None:
        self.per_token: int | None = None  # experts of every token in MoE layers; None: the model's own
        self.threshold = 0.0  # share of a token's largest weight below which experts are left out
        self.manifest: Manifest = open_pack(pack).manifest
        experts = {name for layer in self.manifest.layers for name in layer.expert_files}
        self._weights: dict[tuple[str | None, int | None, str], Array] = {}
        for file in self.manifest.files:
            data = (pack / file.name).read_bytes()
            owner = file.name if file.name in experts else None
            for section in file.sections:
                self._weights[owner, section.layer, section.role] = _tensor(data, section)

    def weight(self, role: str, layer: int | None = None, file: str | None = None) -> Array:
        """A routed expert's matrix by its file, any other tensor by its layer."""
        return self._weights[file, layer, role]

    def forward(self, ids: list[int]) -> dict[str, Array]:
        """All buffers of one prompt."""
        hyper = self.manifest.hyperparameters
        buffers: dict[str, Array] = {}
        x = self.weight("embedding")[np.array(ids)]
        for index, layer in enumerate(self.manifest.layers):
            mine = {"input": x}
            x = x + self._attention(index, layer, x, mine)
            mine["after_attention"] = x
            x = x + self._ffn(index, layer, x, mine)
            mine["output"] = x
            buffers.update({f"{index}.{name}": value for name, value in mine.items()})
        buffers["final_norm"] = self._norm(x, "final_norm", None)
        buffers["logits"] = buffers["final_norm"] @ self.weight("embedding" if hyper.tied_head else "head").T
        return buffers

    def log_softmax(self, ids: list[int]) -> Array:
        """(T, vocab): row t predicts token t + 1."""
        logits = self.forward(ids)["logits"]
        shifted = logits - logits.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))

    def _norm(self, x: Array, role: str, layer: int | None) -> Array:
        """Over the last axis."""
        scale = 1.0 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.manifest.hyperparameters.rms_norm_eps)
        return x * scale * self.weight(role, layer)

    def _attention(self, index: int, layer: Layer, x: Array, buffers: dict[str, Array]) -> Array:
        hyper = self.manifest.hyperparameters
        count, heads, kv, dim = len(x), hyper.heads, hyper.kv_heads, hyper.head_dim
        normed = self._norm(x, "attn_norm", index)
        qkv = normed @ self.weight("qkv", index).T
        if hyper.qkv_bias:
            qkv = qkv + self.weight("qkv_bias", index)
        q, k, v = np.split(qkv.reshape(count, heads + 2 * kv, dim), [heads, heads + kv], axis=1)
        q, k = (self._rope(self._norm_heads(part, role, index)) for part, role in ((q, "q_norm"), (k, "k_norm")))
        keys, values = (np.repeat(part, heads // kv, axis=1) for part in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, keys) * hyper.attention_scale
        back = np.arange(count)[:, None] - np.arange(count)  # how far position j lies before position i
        scores[:, (back < 0) | (back >= (layer.window or count))] = -np.inf
        probabilities = np.exp(scores - scores.max(axis=2, keepdims=True))
        probabilities /= probabilities.sum(axis=2, keepdims=True)
        mixed = np.einsum("hij,jhd->ihd", probabilities, values).reshape(count, heads * dim)
        buffers.update({"attn_norm": normed, "q": q, "k": k, "v": v, "attention": mixed})
        return mixed @ self.weight("out", index).T + (self.weight("out_bias", index) if hyper.out_bias else 0.0)

    def _norm_heads(self, x: Array, role: str, layer: int) -> Array:
        """x (T, heads, head_dim): each head by itself, all of a token together, or nothing."""
        kind = self.manifest.hyperparameters.qk_norm
        if kind == "none":
            return x
        rows = x if kind == "head" else x.reshape(len(x), -1)
        return self._norm(rows, role, layer).reshape(x.shape)

    def _rope(self, x: Array) -> Array:
        hyper = self.manifest.hyperparameters
        angle = np.arange(len(x))[:, None] * np.array(hyper.rope_inv_freq)
        cos, sin = (f(angle)[:, None, :] * hyper.rope_scale for f in (np.cos, np.sin))
        low, high = np.split(x, 2, axis=2)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=2)

    def _ffn(self, index: int, layer: Layer, x: Array, buffers: dict[str, Array]) -> Array:
        normed = self._norm(x, "ffn_norm", index)
        buffers["ffn_norm"] = normed
        total = np.zeros_like(x)
        if layer.ffn == "moe":
            total += self._routed(index, layer, normed, buffers)
        if layer.shared_width:
            shared = _swiglu(normed, *(self.weight(role, index) for role in ("gate", "up", "down")))
            if layer.shared_gated:
                shared = shared / (1.0 + np.exp(-normed @ self.weight("shared_gate", index).T))
            buffers["shared"] = shared
            total += shared
        return total

    def _routed(self, index: int, layer: Layer, normed: Array, buffers: dict[str, Array]) -> Array:
        logits = normed @ self.weight("router", index).T
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        wanted = self.per_token or layer.experts_per_token
        best = np.argsort(-scores, axis=1, kind="stable")[:, :wanted]  # ties to the lowest index
        weights = np.take_along_axis(scores, best, axis=1)
        weights = np.where(weights >= self.threshold * weights[:, :1], weights, 0.0)
        if layer.renormalise:
            weights = weights / weights.sum(axis=1, keepdims=True)
        weights = weights * layer.routed_scale
        out = np.zeros_like(normed)
        for token, (experts, shares) in enumerate(zip(best, weights, strict=True)):
            for expert, share in zip(experts, shares, strict=True):
                file = layer.expert_files[expert]
                parts = (self.weight(role, file=file) for role in ("gate", "up", "down"))
                out[token] += share * _swiglu(normed[token : token + 1], *parts)[0]
        buffers.update({"router_logits": logits, "experts": best, "weights": weights, "routed": out})
        return out


def _tensor(data: bytes, section: Section) -> Array:
    """The tensor as flat has it, from either layout: `down` is (width, hidden)."""
    if section.group_rows:
        found = read_section(section, data[section.offset : section.offset + section.bytes]).dequantise()
        return found.astype(np.float64).T if section.role == "down" else found.astype(np.float64)
    rows, cols = section.padded_shape or section.shape
    values = np.frombuffer(data, STORAGE[float_of(section)], rows * cols, section.offset)
    wide = widen(values, float_of(section)).astype(np.float64)
    if section.layout == "flat":
        return wide.reshape(section.shape)
    matrix = wide.reshape(-1, cols, 16).transpose(0, 2, 1).reshape(rows, cols)[: section.shape[0]]
    return matrix.T if section.role == "down" else matrix


def _swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
    """gate, up and transposed down are (width, hidden)."""
    g = x @ gate.T
    return (g / (1.0 + np.exp(-g)) * (x @ up.T)) @ down


def main() -> None:
    ids = [int(part) for part in sys.argv[2].split(",")]
    for name, value in Reference(Path(sys.argv[1])).forward(ids).items():
        flat = value.reshape(-1)
        print(f"{name:24} {value.shape!s:18} mean {flat.mean():+.6e}  {np.array2string(flat[:4], precision=6)}")  # noqa: T201


if __name__ == "__main__":
    main()

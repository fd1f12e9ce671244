"""Small random checkpoints in Hugging Face form, the same bytes everywhere and always.

Values come from the raw 64-bit stream of PCG64, which numpy promises never to change, and from exact arithmetic; so
the repository holds only the reference's answers (tests/data/random/*.json) and not the weights.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from random_cases import Case, config_of

from colibrid.model import floats
from colibrid.model.checkpoint import PRECISION_BY_DTYPE

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.manifest import FloatPrecision


def write_checkpoint(case: Case, folder: Path) -> Path:
    """A Hugging Face folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(case)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tensors(folder, tensors_of(case, config), case.precision, case.shards)
    return folder


def write_tensors(folder: Path, tensors: dict[str, floats.Array], precision: FloatPrecision, shards: int = 1) -> None:
    """float32 tensors as safetensors of `precision`: one file, or shards with an index."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, precision)
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        write_safetensors(folder / file, {name: tensors[name] for name in part}, precision)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_safetensors(path: Path, tensors: dict[str, floats.Array], precision: FloatPrecision) -> None:
    """The format by hand: 8 bytes of header length, JSON, data. The library cannot write bf16 from numpy."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs = []
    offset = 0
    for name, values in tensors.items():
        blob = floats.narrow(np.ascontiguousarray(values, np.float32), precision).tobytes()
        dtype = next(dtype for dtype, kind in PRECISION_BY_DTYPE.items() if kind == precision)
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": (offset, offset + len(blob))}
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def tensors_of(case: Case, config: dict[str, Any]) -> dict[str, floats.Array]:
    """All tensors in float32, before rounding to the checkpoint's precision."""
    return _Maker(case, config).tensors


class _Maker:
    """Fills `tensors` with uniform values whose scale keeps activations near one."""

    def __init__(self, case: Case, config: dict[str, Any]) -> None:
        self._case = case
        self._config = config
        self._raw = np.random.PCG64(case.seed)
        self.tensors: dict[str, floats.Array] = {}
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        self._matrix("model.embed_tokens.weight", (vocabulary, hidden), 1.0)
        self._norm("model.norm.weight")
        if not config["tie_word_embeddings"]:
            self._matrix("lm_head.weight", (vocabulary, hidden))
        for layer in range(config["num_hidden_layers"]):
            self._layer(layer)

    def _uniform(self, shape: tuple[int, ...], scale: float) -> floats.Array:
        bits = self._raw.random_raw(int(np.prod(shape))).reshape(shape) >> np.uint64(40)
        unit = bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)  # exact, [-1, 1)
        return unit * np.float32(scale)

    def _matrix(self, name: str, shape: tuple[int, ...], scale: float | None = None) -> None:
        self.tensors[name] = self._uniform(shape, scale or 2.0 / shape[-1] ** 0.5)

    def _norm(self, name: str, width: int | None = None) -> None:
        self.tensors[name] = np.float32(1.0) + self._uniform((width or self._config["hidden_size"],), 0.5)

    def _layer(self, layer: int) -> None:
        config, prefix = self._config, f"model.layers.{layer}."
        self._norm(f"{prefix}input_layernorm.weight")
        self._norm(f"{prefix}post_attention_layernorm.weight")
        self._attention(f"{prefix}self_attn.")
        names = ("gate_proj", "up_proj", "down_proj")
        if self._case.family == "mixtral":
            self._moe(prefix, "block_sparse_moe", ("w1", "w3", "w2"), config["num_local_experts"])
        elif layer in config.get("mlp_only_layers", ()) or (layer + 1) % config.get("decoder_sparse_step", 1):
            self._ffn(f"{prefix}mlp.", names, config["intermediate_size"])
        else:
            self._moe(prefix, "mlp", names, config["num_experts"])
            if self._case.family == "qwen2_moe":
                self._ffn(f"{prefix}mlp.shared_expert.", names, config["shared_expert_intermediate_size"])
                self._matrix(f"{prefix}mlp.shared_expert_gate.weight", (1, config["hidden_size"]))

    def _attention(self, prefix: str) -> None:
        config = self._config
        hidden, heads, kv_heads = (
            config[field] for field in ("hidden_size", "num_attention_heads", "num_key_value_heads")
        )
        dim = config.get("head_dim", hidden // heads)
        bias = config.get("qkv_bias") or config.get("attention_bias")
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            self._matrix(f"{prefix}{name}_proj.weight", (count * dim, hidden))
            if bias:
                self._matrix(f"{prefix}{name}_proj.bias", (count * dim,), 0.25)
        self._matrix(f"{prefix}o_proj.weight", (hidden, heads * dim))
        if config.get("attention_bias"):
            self._matrix(f"{prefix}o_proj.bias", (hidden,), 0.25)
        if self._case.family in ("qwen3_moe", "olmoe"):
            per_head = self._case.family == "qwen3_moe"
            self._norm(f"{prefix}q_norm.weight", dim if per_head else heads * dim)
            self._norm(f"{prefix}k_norm.weight", dim if per_head else kv_heads * dim)

    def _moe(self, prefix: str, block: str, names: tuple[str, str, str], experts: int) -> None:
        config = self._config
        block = "mlp" if self._case.fused else block
        hidden, width = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
        self._matrix(f"{prefix}{block}.gate.weight", (experts, hidden), 4.0 / hidden**0.5)
        if self._case.fused:
            self._matrix(f"{prefix}{block}.experts.gate_up_proj", (experts, 2 * width, hidden))
            self._matrix(f"{prefix}{block}.experts.down_proj", (experts, hidden, width))
            return
        for expert in range(experts):
            self._ffn(f"{prefix}{block}.experts.{expert}.", names, width)

    def _ffn(self, prefix: str, names: tuple[str, str, str], width: int) -> None:
        hidden = self._config["hidden_size"]
        for name in names[:2]:
            self._matrix(f"{prefix}{name}.weight", (width, hidden))
        self._matrix(f"{prefix}{names[2]}.weight", (hidden, width), 2.0 / max(width, 1) ** 0.5)

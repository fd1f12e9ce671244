"""Write a Hugging Face checkpoint with seeded random weights: a shape to measure, not a model to talk to.

    python bench/random_checkpoint.py FOLDER [--shape qwen2-moe-240m] [--seed 0] [--dtype bf16]

The same seed gives the same bytes everywhere: values come from the raw stream of PCG64, by exact arithmetic. The
tokenizer is the bundled model's, so that a server can be asked in text. Needs numpy and colibrid.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from colibrid.model import floats
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.checkpoint import INDEX_FILE, PRECISION_BY_DTYPE, SINGLE_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.model.manifest import FloatPrecision

# Beyond the bundled model's config.json (Qwen2-MoE, heads of 64, 2 of K and V, 4,096 ids, head tied to the embedding).
SHAPES: dict[str, dict[str, Any]] = {
    # 240 M weights; 244 M where the head is counted beside the embedding.
    "qwen2-moe-240m": {
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 2048,
        "intermediate_size": 2048,
    },
    # For tests of the benches.
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "intermediate_size": 48,
    },
}
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
DTYPE_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

Shape = tuple[int, ...]
Kind = Literal["matrix", "norm", "bias"]


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, Shape, Kind]]:
    """Name and shape of every tensor of a Qwen2-MoE checkpoint whose layers all have experts."""
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden), "matrix"
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,), "norm"
        yield prefix + "post_attention_layernorm.weight", (hidden,), "norm"
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"{prefix}self_attn.{name}_proj.weight", (count * dim, hidden), "matrix"
            yield f"{prefix}self_attn.{name}_proj.bias", (count * dim,), "bias"
        yield prefix + "self_attn.o_proj.weight", (hidden, heads * dim), "matrix"
        yield prefix + "mlp.gate.weight", (config["num_experts"], hidden), "matrix"
        for expert in range(config["num_experts"]):
            yield from _ffn(f"{prefix}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"])
        yield from _ffn(prefix + "mlp.shared_expert.", hidden, config["shared_expert_intermediate_size"])
        yield prefix + "mlp.shared_expert_gate.weight", (1, hidden), "matrix"
    yield "model.norm.weight", (hidden,), "norm"


def _ffn(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, Shape, Kind]]:
    yield prefix + "gate_proj.weight", (width, hidden), "matrix"
    yield prefix + "up_proj.weight", (width, hidden), "matrix"
    yield prefix + "down_proj.weight", (hidden, width), "matrix"


def write_checkpoint(folder: Path, shape: str, seed: int = 0, precision: FloatPrecision = "bf16") -> None:
    """Fills `folder`, which may exist. About a second for 100 M weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((BUNDLED_MODEL / "config.json").read_text()) | SHAPES[shape]
    config["torch_dtype"] = DTYPE_NAMES[precision]
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in TEXT_FILES:
        shutil.copyfile(BUNDLED_MODEL / name, folder / name)
    entries = list(tensors(config))
    dtype = next(dtype for dtype, known in PRECISION_BY_DTYPE.items() if known == precision)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, size, _ in entries:
        end = offset + math.prod(size) * floats.STORAGE[precision].itemsize
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    raw = np.random.PCG64(seed)
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, size, kind in entries:
            file.write(floats.narrow(_values(raw, size, kind), precision).tobytes())
    index = {"metadata": {"total_size": offset}, "weight_map": {name: SINGLE_FILE for name, _, _ in entries}}
    (folder / INDEX_FILE).write_text(json.dumps(index))


def _values(raw: np.random.PCG64, size: Shape, kind: Kind) -> floats.Array:
    """Uniform, with a spread that keeps activations near one."""
    count = math.prod(size)
    bits = raw.random_raw(-(-count // 2)).view(np.uint32)[:count] >> np.uint32(8)
    unit = (bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)).reshape(size)
    if kind == "norm":
        return np.float32(1.0) + unit * np.float32(0.25)
    return unit * np.float32(0.1 if kind == "bias" else (3.0 / size[-1]) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint with seeded random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2-moe-240m")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=sorted(DTYPE_NAMES), default="bf16")
    arguments = parser.parse_args()
    write_checkpoint(arguments.folder, arguments.shape, arguments.seed, arguments.dtype)


if __name__ == "__main__":
    main()

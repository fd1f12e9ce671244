"""AWQ and GPTQ checkpoints made without the product's code: words packed element by element, by the published layouts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from random_cases import Case, config_of
from random_checkpoints import tensors_of, write_tensors
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from pathlib import Path

Array = np.ndarray[Any, np.dtype[Any]]


def awq_words(numbers: Array) -> Array:
    """(n, out) numbers 0 .. 15 -> (n, out / 8) int32: nibble i of a word is output 8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for col in range(words.shape[1]):
        for nibble, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words[:, col] += numbers[:, 8 * col + output] * np.uint32(16**nibble)
    return words.view(np.int32)


def gptq_words(numbers: Array) -> Array:
    """(in, out) numbers -> (in / 8, out) int32: nibble i of a word is input 8 r + i."""
    words = np.zeros((numbers.shape[0] // 8, numbers.shape[1]), np.uint32)
    for row in range(words.shape[0]):
        for nibble in range(8):
            words[row] += numbers[8 * row + nibble] * np.uint32(16**nibble)
    return words.view(np.int32)


def gptq_zero_words(numbers: Array) -> Array:
    """(groups, out) numbers as stored -> (groups, out / 8) int32: nibble i of a word is output 8 c + i."""
    words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for col in range(words.shape[1]):
        for nibble in range(8):
            words[:, col] += numbers[:, 8 * col + nibble] * np.uint32(16**nibble)
    return words.view(np.int32)


@dataclass(frozen=True)
class Int4:
    """A kind of int4 checkpoint."""

    method: str  # "awq" or "gptq"
    group: int = 32
    version: int = 1  # of GPTQ's zeros
    symmetric: bool = False
    g_idx: bool = False
    attention: bool = True  # q, k, v and o are int4 too

    @property
    def label(self) -> str:
        parts = (self.method, f"g{self.group}", f"v{self.version}", "sym" if self.symmetric else "zeros")
        return "-".join((*parts, "g_idx" if self.g_idx else "", "" if self.attention else "experts"))


@dataclass(frozen=True)
class Matrix:
    """The numbers of one linear layer, (out, in) and (out, groups)."""

    values: Array
    scales: Array
    zeros: Array

    def weight(self, group: int) -> Array:
        """What they stand for, in float32; exact."""
        spread = [part.repeat(group, axis=1).astype(np.float32) for part in (self.scales, self.zeros)]
        return (self.values.astype(np.float32) - spread[1]) * spread[0]


CASES = (
    Case(name="qwen2", family="qwen2_moe", seed=21, precision="fp16", config={
        "hidden_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 128,
    }),
    Case(name="qwen3", family="qwen3_moe", seed=22, precision="bf16", config={
        "hidden_size": 64, "moe_intermediate_size": 32, "mlp_only_layers": [1], "intermediate_size": 96,
    }),
    Case(name="mixtral", family="mixtral", seed=23, precision="fp16", config={"hidden_size": 64, "intermediate_size": 96}),
    Case(name="olmoe", family="olmoe", seed=24, precision="fp32", config={"intermediate_size": 32}),
)  # fmt: skip


KINDS = (
    Int4("awq"),
    Int4("awq", symmetric=True, attention=False),
    Int4("gptq", symmetric=True, g_idx=True),
    Int4("gptq", attention=False),
    Int4("gptq", version=2, g_idx=True),
)


def write_int4(case: Case, kind: Int4, folder: Path) -> dict[str, Matrix]:
    """A checkpoint whose experts (and attention) are int4; returns the numbers of each such layer by its name."""
    config = config_of(case)
    draw = np.random.default_rng(case.seed)
    plain, matrices = {}, {}
    for name, values in tensors_of(case, config).items():
        linear = "proj.weight" in name or ".w" in name.removesuffix(".weight")
        if linear and (kind.attention or "self_attn" not in name):
            matrices[name.removesuffix(".weight")] = _random_matrix(values, kind, draw)
        else:
            plain[name] = values
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": _settings(kind)}))
    write_tensors(folder, plain, case.precision)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    packed = {}
    for base, matrix in matrices.items():
        packed.update(_packed(base, matrix, kind))
    save_file(packed, folder / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(plain, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(packed, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return matrices


def write_loud(folder: Path) -> None:
    """A checkpoint whose norms have a few very large channels, as large models do, and weights that answer to them."""
    case = CASES[0]
    tensors = tensors_of(case, config_of(case))
    loud = np.arange(128) % 37 == 3
    for name, values in tensors.items():
        if "layernorm" in name:
            values[loud] *= 30
        elif (
            values.ndim == 2
            and values.shape[1] == 128
            and "embed" not in name
            and "o_proj" not in name
            and "lm_head" not in name
        ):
            values[:, loud] *= np.float32(1 / 10)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(case)))
    write_tensors(folder, tensors, "fp32")


def read_tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor of a checkpoint, by its name."""
    found = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                begin, end = (8 + size + offset for offset in entry["data_offsets"])
                found[name] = (entry["dtype"], tuple(entry["shape"]), data[begin:end])
    return found


def _random_matrix(like: Array, kind: Int4, draw: np.random.Generator) -> Matrix:
    """Numbers that stand for weights of about the size of those given."""
    out, inputs = like.shape
    groups = inputs // kind.group
    scales = (draw.uniform(0.5, 1.0, (out, groups)) * float(np.abs(like).max()) / 8).astype(np.float16)
    low = 1 if kind.method == "gptq" and kind.version == 1 else 0
    zeros = np.full((out, groups), 8) if kind.symmetric else draw.integers(low, 16, (out, groups))
    return Matrix(draw.integers(0, 16, (out, inputs)).astype(np.uint8), scales, zeros.astype(np.uint8))


def _packed(base: str, matrix: Matrix, kind: Int4) -> dict[str, Array]:
    scales = {f"{base}.scales": np.ascontiguousarray(matrix.scales.T)}
    if kind.method == "awq":
        return {f"{base}.qweight": awq_words(matrix.values.T), f"{base}.qzeros": awq_words(matrix.zeros.T), **scales}
    stored = matrix.zeros.T - (1 if kind.version == 1 else 0)
    found = {f"{base}.qweight": gptq_words(matrix.values.T), f"{base}.qzeros": gptq_zero_words(stored), **scales}
    if kind.g_idx:
        found[f"{base}.g_idx"] = (np.arange(matrix.values.shape[1]) // kind.group).astype(np.int32)
    return found


def _settings(kind: Int4) -> dict[str, Any]:
    if kind.method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": kind.group, "zero_point": True, "version": "gemm"}
    return {
        "quant_method": "gptq", "bits": 4, "group_size": kind.group, "desc_act": False, "sym": kind.symmetric,
        "checkpoint_format": "gptq" if kind.version == 1 else "gptq_v2",
    }  # fmt: skip

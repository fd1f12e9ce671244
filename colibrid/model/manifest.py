"""The typed form of colibri.json, the description of a model folder ("pack"). No I/O.

The names of roles, precisions and layouts are the lower-case names of engine_c/include/colibri.h.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

# Rises when an old pack would be misread: a field that must be there, or another meaning. A new field with a default
# changes nothing in old packs, and a version that does not know it refuses the pack by the field's name.
PACK_VERSION = 1
FloatPrecision = Literal["fp32", "fp16", "bf16"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4", "fp8"]  # the last three are quantised: formats.py
Layout = Literal["flat", "rows16", "mma"]  # how a matrix lies in its file: docs/PACK.md
Backend = Literal["any", "cpu", "cuda"]
QkNorm = Literal["none", "head", "row"]
Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
Size = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Role = Literal[
    "embedding", "head", "final_norm", "attn_norm", "qkv", "qkv_bias", "out", "ffn_norm", "router", "shared_gate",
    "out_bias", "q_norm", "k_norm", "gate", "up", "down",
]  # fmt: skip


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Section(_Value, frozen=True, kw_only=True):
    """One tensor inside a file. `shape` is what the model means, `padded_shape` what the bytes hold."""

    role: Role
    offset: Size  # bytes from the start of the file, 256-aligned when written by convert
    bytes: Size
    precision: Precision
    shape: tuple[Count, Count]  # rows, cols; flat `down` is transposed: (width, hidden)
    padded_shape: tuple[Count, Count] | None = (
        None  # none: as shape; rows16: rows padded to a multiple of 16, columns of int8 to 4; mma: both to 16
    )
    layout: Layout = "flat"
    layer: Count | None = None
    group_rows: Count = 0  # rows and columns that share a scale; 0: not quantised
    group_cols: Count = 0
    scales_offset: Size = 0  # bytes from the start of the file; a section is values, scales, zero points
    zeros_offset: Size = 0  # 0: none


class PackFile(_Value, frozen=True, kw_only=True):
    """One file of the folder."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
    bytes: Size
    sections: tuple[Section, ...]
    sha256: str | None = None  # none: not checked, a warning
    crc32c: tuple[Count, ...] | None = None  # one per started MiB


class Layer(_Value, frozen=True, kw_only=True):
    """One row of the layer table. `expert_files[e]` names the file of routed expert e."""

    ffn: Literal["dense", "moe"]
    kv: Literal["full"] = "full"
    window: Count = 0  # positions that a token sees, its own the last; 0: all
    experts: Count = 0
    experts_per_token: Count = 0
    expert_width: Count = 0
    shared_width: Count = 0  # shared expert, or the whole FFN of a dense layer
    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = False
    shared_gated: bool = False
    routed_scale: float = 1.0
    expert_files: tuple[str, ...] = ()


class Hyperparameters(_Value, frozen=True, kw_only=True):
    vocab_size: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    max_positions: Count
    rms_norm_eps: float
    tied_head: bool
    qkv_bias: bool
    out_bias: bool = False
    qk_norm: QkNorm = "none"  # RMSNorm of q and k before RoPE: per head, or over all heads
    rope_inv_freq: tuple[float, ...]  # head_dim / 2 values, radians per position
    rope_scale: float = 1.0
    attention_scale: float  # usually head_dim ** -0.5


class TextFiles(_Value, frozen=True, kw_only=True):
    """Names of the text files in the folder, none where the checkpoint has no such file."""

    tokenizer: str | None = None
    tokenizer_config: str | None = None
    chat_template: str | None = None
    generation_config: str | None = None
    eos_token_ids: tuple[Count, ...] = ()
    bos_token_id: Count | None = None
    tool_parser: Literal["none", "hermes", "mistral", "deepseek", "llama3_json"] | None = None  # none: as the template
    reasoning_parser: Literal["none", "think", "harmony"] | None = None


class Manifest(_Value, frozen=True, kw_only=True):
    """colibri.json."""

    version: int
    backend: Backend  # flat packs are for any, rows16 packs for the CPU, mma packs for CUDA
    family: str  # the checkpoint's architecture, e.g. Qwen2MoeForCausalLM
    name: str  # default model id
    precision: FloatPrecision  # of most weights that are not quantised; sections are authoritative
    created_by: str = ""
    hyperparameters: Hyperparameters
    layers: tuple[Layer, ...]
    files: tuple[PackFile, ...]  # dense.bin first, then experts; a file may be named by several layers
    text: TextFiles = TextFiles()

"""Which tensors a model of given hyperparameters has, and where they lie in a pack's files. Pure.

convert writes by these tables, pack checks by them, dummy needs nothing else; so they live in one place.

dense.bin, every section 256-aligned:
    embedding  [head]  final_norm  | per layer: attn_norm qkv [qkv_bias] [q_norm k_norm] out [out_bias]
                                                ffn_norm [router] [shared_gate]
                                                [gate up down of the shared expert or of the dense FFN] |
expert_{layer}_{expert}.bin, the same:
    gate (width, hidden)   up (width, hidden)   down (hidden, width); flat: transposed, (width, hidden)

Matrices lie in the layout of the pack's backend (docs/PACK.md), vectors are flat in all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from colibrid.model.formats import FORMATS, Format, align, check_groups, check_mma, padded, parts
from colibrid.model.manifest import (
    Backend,
    FloatPrecision,
    Hyperparameters,
    Layer,
    Layout,
    PackFile,
    Role,
    Section,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    # What a tensor is to be written as; FP32_ROLES are fp32.
    FormatOf = Callable[["Tensor"], Format]

DENSE_FILE = "dense.bin"
SECTION_ALIGNMENT = 256  # bytes
# Small, and precision matters: always fp32 in a pack, whatever the checkpoint has.
FP32_ROLES: frozenset[Role] = frozenset(
    ("final_norm", "attn_norm", "qkv_bias", "q_norm", "k_norm", "out_bias", "ffn_norm", "router", "shared_gate"),
)
EXPERT_ROLES: tuple[Role, Role, Role] = ("gate", "up", "down")
MATRIX_ROLES: frozenset[Role] = frozenset(("embedding", "head", "qkv", "out", "router", *EXPERT_ROLES))
LAYOUT_OF: dict[Backend, Layout] = {"any": "flat", "cpu": "rows16", "cuda": "mma"}  # of the matrices of a pack


class Tensor(msgspec.Struct, frozen=True):
    """One tensor of a model: what a section will hold."""

    role: Role
    layer: int | None  # None: embedding, head and final norm
    expert: int | None  # None: not a routed expert
    shape: tuple[int, int]  # rows, cols as flat has them: `down` is transposed

    def label(self) -> str:
        """For messages: "layer 3 expert 5 gate"."""
        layer = "" if self.layer is None else f"layer {self.layer} "
        expert = "" if self.expert is None else f"expert {self.expert} "
        return f"{layer}{expert}{self.role}"


def expert_file_name(layer: int, expert: int) -> str:
    return f"expert_{layer}_{expert}.bin"


def precision_of(role: Role, precision: FloatPrecision) -> FloatPrecision:
    """The precision that a section of this role has in a pack of `precision`."""
    return "fp32" if role in FP32_ROLES else precision


def alike(precision: FloatPrecision) -> FormatOf:
    """All tensors in one precision, but for those that are always fp32."""
    return lambda tensor: FORMATS[precision_of(tensor.role, precision)]


def dense_tensors(hyper: Hyperparameters, layers: Iterable[Layer]) -> Iterator[Tensor]:
    """Everything that is not a routed expert, in the order of dense.bin."""
    d = hyper.hidden
    yield Tensor("embedding", None, None, (hyper.vocab_size, d))
    if not hyper.tied_head:
        yield Tensor("head", None, None, (hyper.vocab_size, d))
    yield Tensor("final_norm", None, None, (1, d))
    for index, layer in enumerate(layers):
        yield from _layer_tensors(hyper, index, layer)


def _layer_tensors(hyper: Hyperparameters, index: int, layer: Layer) -> Iterator[Tensor]:
    d = hyper.hidden
    q = hyper.heads * hyper.head_dim
    kv = hyper.kv_heads * hyper.head_dim
    yield Tensor("attn_norm", index, None, (1, d))
    yield Tensor("qkv", index, None, (q + 2 * kv, d))
    if hyper.qkv_bias:
        yield Tensor("qkv_bias", index, None, (1, q + 2 * kv))
    if hyper.qk_norm != "none":
        per_head = hyper.qk_norm == "head"
        yield Tensor("q_norm", index, None, (1, hyper.head_dim if per_head else q))
        yield Tensor("k_norm", index, None, (1, hyper.head_dim if per_head else kv))
    yield Tensor("out", index, None, (d, q))
    if hyper.out_bias:
        yield Tensor("out_bias", index, None, (1, d))
    yield Tensor("ffn_norm", index, None, (1, d))
    if layer.ffn == "moe":
        yield Tensor("router", index, None, (layer.experts, d))
        if layer.shared_gated:
            yield Tensor("shared_gate", index, None, (1, d))
    if layer.shared_width:
        for role in EXPERT_ROLES:
            yield Tensor(role, index, None, (layer.shared_width, d))


def expert_tensors(hidden: int, layer: int, expert: int, width: int) -> tuple[Tensor, ...]:
    """The three matrices of one routed expert, in the order of its file."""
    return tuple(Tensor(role, layer, expert, (width, hidden)) for role in EXPERT_ROLES)


def layout_of(role: Role, matrices: Layout) -> Layout:
    """The layout that a section of this role has in a pack whose matrices have `matrices`."""
    if role not in MATRIX_ROLES or (matrices == "mma" and role == "router"):
        return "flat"  # a GPU computes the router in fp32, without tiles
    return matrices


def shape_of(tensor: Tensor, kind: Layout) -> tuple[int, int]:
    """rows, cols of a section that holds the tensor."""
    rows, cols = tensor.shape
    return (cols, rows) if tensor.role == "down" and kind != "flat" else (rows, cols)


def place(tensors: Iterable[Tensor], format_of: FormatOf, matrices: Layout) -> tuple[Section, ...]:
    """Sections for the tensors of one file, each 256-aligned, in the given order. ModelError: groups do not fit."""
    sections = []
    offset = 0
    for tensor in tensors:
        section = place_one(tensor, format_of(tensor), layout_of(tensor.role, matrices), offset)
        sections.append(section)
        offset = align(offset + section.bytes, SECTION_ALIGNMENT)
    return tuple(sections)


def place_one(tensor: Tensor, form: Format, kind: Layout, offset: int) -> Section:
    """The section of a tensor that begins at `offset`."""
    shape = shape_of(tensor, kind)
    groups = form.groups_of(shape)
    check_groups(tensor.label(), form.precision, shape, groups)
    if kind == "mma":
        check_mma(tensor.label(), form.precision, shape, groups)
    held = padded(shape, kind, form.precision)
    found = parts(form.precision, kind, shape, groups, zero_points=form.zero_points)
    return Section(
        role=tensor.role,
        offset=offset,
        bytes=found.bytes,
        precision=form.precision,
        shape=shape,
        padded_shape=None if held == shape else held,
        layout=kind,
        layer=tensor.layer if tensor.expert is None else None,
        group_rows=groups[0],
        group_cols=groups[1],
        scales_offset=offset + found.scales_at if found.scales else 0,
        zeros_offset=offset + found.zeros_at if found.zeros else 0,
    )


def planned_files(
    hyper: Hyperparameters,
    layers: Iterable[Layer],
    precision: FloatPrecision,
    matrices: Layout,
    format_of: FormatOf | None = None,
) -> tuple[PackFile, ...]:
    """dense.bin and one file per routed expert, with sections and sizes but without checksums.

    format_of: of each tensor; else all are in `precision`. ModelError: groups of a format do not fit a matrix.
    """
    table = tuple(layers)
    chosen = format_of or alike(precision)
    files = [_file(DENSE_FILE, place(dense_tensors(hyper, table), chosen, matrices))]
    seen: set[str] = set()
    for index, layer in enumerate(table):
        for expert, name in enumerate(layer.expert_files):
            if name not in seen:
                seen.add(name)
                tensors = expert_tensors(hyper.hidden, index, expert, layer.expert_width)
                files.append(_file(name, place(tensors, chosen, matrices)))
    return tuple(files)


def _file(name: str, sections: tuple[Section, ...]) -> PackFile:
    return PackFile(name=name, bytes=sections[-1].offset + sections[-1].bytes, sections=sections)


def packed(file: PackFile) -> PackFile:
    """The same file, of sections that are not quantised, with no gaps between them."""
    sections = []
    offset = 0
    for section in file.sections:
        sections.append(msgspec.structs.replace(section, offset=offset))
        offset += section.bytes
    return msgspec.structs.replace(file, bytes=offset, sections=tuple(sections))

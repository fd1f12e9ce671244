"""Where a model's bytes and parameters are. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from colibrid.model.formats import format_of_section
from colibrid.model.layout import FP32_ROLES

if TYPE_CHECKING:
    from colibrid.model.manifest import Manifest, Role, Section

_PARTS: dict[Role, str] = {
    "embedding": "embedding", "head": "head", "final_norm": "norms", "attn_norm": "norms", "ffn_norm": "norms",
    "q_norm": "norms", "k_norm": "norms",
    "qkv": "attention", "qkv_bias": "attention", "out": "attention", "out_bias": "attention",
    "router": "routers", "shared_gate": "routers",
    "gate": "shared", "up": "shared", "down": "shared",
}  # fmt: skip
PART_NAMES = ("embedding", "head", "attention", "norms", "routers", "dense ffn", "shared experts", "experts")


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes unless the name says parameters. Padding between sections is not counted."""

    parts: dict[str, int]  # PART_NAMES -> bytes, each file once
    total: int
    parameters: int  # experts of all layers, those that share a file counted for each
    active_parameters: int  # used by one token
    expert_count: int  # (layer, expert) pairs
    mean_expert: float  # bytes of one routed expert, 0 without any
    dense_read: int  # read by every decode step whatever the routing
    formats: dict[str, dict[str, int]]  # PART_NAMES -> format of matrices -> how many; of experts how many experts


def footprint(manifest: Manifest) -> Footprint:
    """Adds up the sections of all files."""
    experts = {name for layer in manifest.layers for name in layer.expert_files}
    sizes = {file.name: sum(section.bytes for section in file.sections) for file in manifest.files}
    values = {file.name: sum(map(_values, file.sections)) for file in manifest.files}
    parts = dict.fromkeys(PART_NAMES, 0)
    formats: dict[str, Counter[str]] = {name: Counter() for name in PART_NAMES}
    for file in manifest.files:
        for section in file.sections:
            part = "experts" if file.name in experts else _part(manifest, section)
            parts[part] += section.bytes
            if section.role not in FP32_ROLES and (part != "experts" or section.role == "gate"):
                formats[part][format_of_section(section).name] += 1
    dense_values = sum(count for name, count in values.items() if name not in experts)
    dense_bytes = sum(parts.values()) - parts["experts"]
    uses = [name for layer in manifest.layers for name in layer.expert_files]
    active = sum(
        layer.experts_per_token * values[layer.expert_files[0]] for layer in manifest.layers if layer.expert_files
    )
    lookup_only = 0 if manifest.hyperparameters.tied_head else parts["embedding"]  # one row a token
    return Footprint(
        parts=parts,
        total=sum(parts.values()),
        parameters=dense_values + sum(values[name] for name in uses),
        active_parameters=dense_values + active,
        expert_count=len(uses),
        mean_expert=sum(sizes[name] for name in uses) / len(uses) if uses else 0.0,
        dense_read=dense_bytes - lookup_only,
        formats={name: dict(counts.most_common()) for name, counts in formats.items()},
    )


def format_names(manifest: Manifest) -> list[str]:
    """The formats of the matrices but the routers, those of most bytes first."""
    sizes: Counter[str] = Counter()
    names: dict[tuple[object, ...], str] = {}  # thousands of experts are alike
    for file in manifest.files:
        for section in file.sections:
            if section.role in FP32_ROLES:
                continue
            groups = (section.group_rows, section.group_cols, bool(section.zeros_offset))
            kind = (section.precision, section.shape, *groups)
            if kind not in names:
                names[kind] = format_of_section(section).name
            sizes[names[kind]] += section.bytes
    return [name for name, _ in sizes.most_common()]


def _part(manifest: Manifest, section: Section) -> str:
    part = _PARTS[section.role]
    if part == "shared":
        assert section.layer is not None, "only layers have an FFN"
        return "dense ffn" if manifest.layers[section.layer].ffn == "dense" else "shared experts"
    return part


def _values(section: Section) -> int:
    return section.shape[0] * section.shape[1]

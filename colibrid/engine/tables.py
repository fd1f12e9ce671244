"""A pack's manifest as the flat tables that C reads. Pure.

C copies what it keeps, so a ModelTables must live until clb_engine_plan or clb_engine_open has returned.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

from colibrid.engine import abi
from colibrid.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from colibrid.model.manifest import Hyperparameters, Layer, Manifest, PackFile, Section

EXPERT_ALIGNMENT = 4096
DENSE_ALIGNMENT = 2 << 20
NO_EXPERT = -1
NO_LAYER = -1


class _Row(NamedTuple):
    section: Section
    layer: int
    expert: int
    file: int


class ModelTables:
    """Owns a `clb_model_desc` and everything that it points to."""

    def __init__(self, manifest: Manifest) -> None:
        shapes = manifest.hyperparameters
        rows = list(_section_rows(manifest))
        experts = _expert_files(manifest)
        self._layers = (abi.LayerDesc * len(manifest.layers))(*(_layer(layer, shapes) for layer in manifest.layers))
        self._sections = (abi.SectionDesc * len(rows))(*(_section(row) for row in rows))
        self._crcs = [_crc_table(file) for file in manifest.files]
        self._files = (abi.FileDesc * len(manifest.files))(
            *(_file(file, crcs, file.name in experts) for file, crcs in zip(manifest.files, self._crcs, strict=True))
        )
        self._inv_freq = (ctypes.c_float * len(shapes.rope_inv_freq))(*shapes.rope_inv_freq)
        self.desc = abi.ModelDesc(
            abi_version=abi.ABI_VERSION,
            struct_bytes=ctypes.sizeof(abi.ModelDesc),
            vocab_size=shapes.vocab_size,
            layers=len(manifest.layers),
            hidden=shapes.hidden,
            heads=shapes.heads,
            kv_heads=shapes.kv_heads,
            head_dim=shapes.head_dim,
            max_positions=shapes.max_positions,
            tied_head=shapes.tied_head,
            rms_norm_eps=shapes.rms_norm_eps,
            attention_scale=shapes.attention_scale,
            rope_scale=shapes.rope_scale,
            section_count=len(rows),
            file_count=len(manifest.files),
            rope_inv_freq=self._inv_freq,
            layer_table=self._layers,
            section_table=self._sections,
            file_table=self._files,
        )


class ExpertTables:
    """Owns a `clb_file_desc` and three `clb_section_desc` of one expert's file, for clb_engine_swap_stage."""

    def __init__(self, file: PackFile, layer: int, expert: int) -> None:
        self._crcs = _crc_table(file)
        self.file = _file(file, self._crcs, is_expert=True)
        self.sections = (abi.SectionDesc * len(file.sections))(
            *(_section(_Row(section, layer, expert, 0)) for section in file.sections)
        )


def max_experts(manifest: Manifest) -> int:
    """The most routed experts of any layer; 0 without a MoE layer."""
    return max((layer.experts for layer in manifest.layers), default=0)


def experts_per_token(manifest: Manifest) -> int:
    """The checkpoint's own k, the largest of its layers; 0 without a MoE layer."""
    return max((layer.experts_per_token for layer in manifest.layers), default=0)


def _expert_files(manifest: Manifest) -> frozenset[str]:
    return frozenset(name for layer in manifest.layers for name in layer.expert_files)


def _section_rows(manifest: Manifest) -> Iterator[_Row]:
    """One row per section and use: a file that k (layer, expert) pairs name gives k rows a section."""
    experts = _expert_files(manifest)
    places = {file.name: (index, file) for index, file in enumerate(manifest.files)}
    for index, file in enumerate(manifest.files):
        if file.name not in experts:
            for section in file.sections:
                yield _Row(section, NO_LAYER if section.layer is None else section.layer, NO_EXPERT, index)
    for number, layer in enumerate(manifest.layers):
        for expert, name in enumerate(layer.expert_files):
            if name not in places:
                raise ModelError(
                    f"layer {number} names the expert file {name!r}, which is not in `files` of colibri.json; "
                    "convert the model again"
                )
            index, file = places[name]
            for section in file.sections:
                yield _Row(section, number, expert, index)


def _section(row: _Row) -> abi.SectionDesc:
    section = row.section
    rows, cols = section.shape
    return abi.SectionDesc(
        role=abi.Role[section.role.upper()],
        layer=row.layer,
        expert=row.expert,
        file=row.file,
        offset=section.offset,
        bytes=section.bytes,
        precision=abi.Precision[section.precision.upper()],
        layout=abi.Layout[section.layout.upper()],
        rows=rows,
        cols=cols,
        group_rows=section.group_rows,
        group_cols=section.group_cols,
        scales_offset=section.scales_offset,
        zeros_offset=section.zeros_offset,
    )


def _layer(layer: Layer, shapes: Hyperparameters) -> abi.LayerDesc:
    return abi.LayerDesc(
        ffn_kind=abi.FfnKind[layer.ffn.upper()],
        kv_kind=abi.KV_FULL,
        kv_values_per_token=2 * shapes.kv_heads * shapes.head_dim,
        window=layer.window,
        experts=layer.experts,
        experts_per_token=layer.experts_per_token,
        expert_width=layer.expert_width,
        shared_width=layer.shared_width,
        score=abi.Score[layer.score.upper()],
        renormalise=layer.renormalise,
        shared_gated=layer.shared_gated,
        qk_norm=abi.QkNorm[shapes.qk_norm.upper()],
        routed_scale=layer.routed_scale,
    )


def _crc_table(file: PackFile) -> ctypes.Array[ctypes.c_uint32] | None:
    return None if file.crc32c is None else (ctypes.c_uint32 * len(file.crc32c))(*file.crc32c)


def _file(file: PackFile, crcs: ctypes.Array[ctypes.c_uint32] | None, is_expert: bool) -> abi.FileDesc:
    return abi.FileDesc(
        name=file.name.encode("ascii"),
        bytes=file.bytes,
        crc32c=crcs,
        crc_count=0 if crcs is None else len(crcs),
        alignment=EXPERT_ALIGNMENT if is_expert else DENSE_ALIGNMENT,
    )

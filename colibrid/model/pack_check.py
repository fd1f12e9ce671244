"""Whether a Manifest makes sense by itself: limits, shapes, bounds, and exactly the tensors that the model needs. Pure.

The limits are those of engine_c/include/colibri.h. The engine checks every number again.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

from colibrid.errors import ModelError
from colibrid.model import formats, layout
from colibrid.model.families.base import (
    MAX_EXPERTS,
    MAX_EXPERTS_PER_TOKEN,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
)

if TYPE_CHECKING:
    from colibrid.model.layout import Tensor
    from colibrid.model.manifest import Hyperparameters, Layer, Manifest, PackFile, Section

CRC_BLOCK = 1 << 20
MAX_END_IDS = 64  # CLB_MAX_STOP_IDS
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def check_manifest(manifest: Manifest) -> None:
    """ModelError naming the field or file, what was expected and what was found."""
    _check_hyperparameters(manifest.hyperparameters)
    if not 1 <= len(manifest.layers) <= MAX_LAYERS:
        raise ModelError(f"layers has {len(manifest.layers)} rows, expected 1 to {MAX_LAYERS}")
    for index, layer in enumerate(manifest.layers):
        _check_layer(index, layer)
    files = {file.name: file for file in manifest.files}
    if len(files) != len(manifest.files):
        twice = next(name for name, count in Counter(file.name for file in manifest.files).items() if count > 1)
        raise ModelError(f"files names {twice} twice")
    for file in manifest.files:
        _check_file(file)
    _check_experts(manifest, files)
    _check_dense(manifest)
    _check_texts(manifest)


def _check_texts(manifest: Manifest) -> None:
    text = manifest.text
    for field in ("tokenizer", "tokenizer_config", "chat_template", "generation_config"):
        name = getattr(text, field)
        if name is not None and not _PLAIN_NAME.fullmatch(name):
            raise ModelError(f"text.{field} {name!r} is not a plain file name")
    vocabulary = manifest.hyperparameters.vocab_size
    ends = text.eos_token_ids
    if len(ends) > MAX_END_IDS:
        raise ModelError(f"text.eos_token_ids has {len(ends)} ids, expected at most {MAX_END_IDS}")
    if any(token >= vocabulary for token in ends):
        raise ModelError(f"text.eos_token_ids {list(ends)}: expected ids below {vocabulary}")


def _bounded(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ModelError(f"{field} is {value}, expected {low} to {high}")


def _check_hyperparameters(hyper: Hyperparameters) -> None:
    for field, value, high in (
        ("vocab_size", hyper.vocab_size, MAX_VOCAB),
        ("hidden", hyper.hidden, MAX_WIDTH),
        ("heads", hyper.heads, 4096),
        ("kv_heads", hyper.kv_heads, hyper.heads),
        ("head_dim", hyper.head_dim, 256),
        ("max_positions", hyper.max_positions, MAX_POSITIONS),
    ):
        _bounded(f"hyperparameters.{field}", value, 1, high)
    if hyper.heads % hyper.kv_heads:
        raise ModelError(f"hyperparameters.heads {hyper.heads} is not a multiple of kv_heads {hyper.kv_heads}")
    if hyper.head_dim % 2:
        raise ModelError(f"hyperparameters.head_dim is {hyper.head_dim}, expected an even number")
    if len(hyper.rope_inv_freq) != hyper.head_dim // 2:
        raise ModelError(
            f"hyperparameters.rope_inv_freq has {len(hyper.rope_inv_freq)} values, expected {hyper.head_dim // 2}"
        )
    positive = (hyper.rms_norm_eps, hyper.rope_scale, hyper.attention_scale, *hyper.rope_inv_freq)
    if not all(math.isfinite(value) and 0 < value < 1e9 for value in positive):
        raise ModelError(
            "hyperparameters: rms_norm_eps, rope_scale, attention_scale and rope_inv_freq must be positive"
        )


def _check_layer(index: int, layer: Layer) -> None:
    where = f"layers[{index}]"
    _bounded(f"{where}.shared_width", layer.shared_width, 1 if layer.ffn == "dense" else 0, MAX_WIDTH)
    if not math.isfinite(layer.routed_scale):
        raise ModelError(f"{where}.routed_scale is not finite")
    if layer.ffn == "dense":
        if layer.experts or layer.experts_per_token or layer.expert_width or layer.expert_files or layer.shared_gated:
            raise ModelError(f"{where} is dense, so experts, expert_files and shared_gated do not belong there")
        return
    _bounded(f"{where}.experts", layer.experts, 1, MAX_EXPERTS)
    _bounded(f"{where}.experts_per_token", layer.experts_per_token, 1, min(layer.experts, MAX_EXPERTS_PER_TOKEN))
    _bounded(f"{where}.expert_width", layer.expert_width, 1, MAX_WIDTH)
    if layer.shared_gated and not layer.shared_width:
        raise ModelError(f"{where}.shared_gated is true without a shared_width")
    if len(layer.expert_files) != layer.experts:
        raise ModelError(f"{where}.expert_files names {len(layer.expert_files)} files, expected {layer.experts}")


def _check_file(file: PackFile) -> None:
    """Sections inside the file, of the right size, aligned to their elements, without overlap."""
    if not file.sections:
        raise ModelError(f"{file.name}: has no sections")
    end_of_last = 0
    for section in sorted(file.sections, key=lambda s: s.offset):
        where = f"{file.name}: section {_label(section)}"
        rows, cols = section.padded_shape or section.shape
        if section.layout != layout.layout_of(section.role, section.layout):
            raise ModelError(f"{where}: layout {section.layout} is for matrices, expected flat")
        wanted = formats.padded(section.shape, section.layout, section.precision)
        if (rows, cols) != wanted:
            raise ModelError(
                f"{where}: padded_shape is ({rows}, {cols}), but layout {section.layout} pads {section.shape} to {wanted}"
            )
        _check_numbers(where, section, (rows, cols))
        if section.offset < end_of_last:
            raise ModelError(f"{where}: overlaps the section before it")
        end_of_last = section.offset + section.bytes
        if end_of_last > file.bytes:
            raise ModelError(f"{where}: ends at byte {end_of_last}, but the file has {file.bytes}")
    blocks = -(-file.bytes // CRC_BLOCK)
    if file.crc32c is not None and len(file.crc32c) != blocks:
        raise ModelError(f"{file.name}: {len(file.crc32c)} crc32c values found, {blocks} expected, one per started MiB")
    if file.sha256 is not None and (len(file.sha256) != 64 or not set(file.sha256) <= set("0123456789abcdef")):
        raise ModelError(f"{file.name}: sha256 is not 64 hexadecimal digits")


def _check_numbers(where: str, section: Section, held: tuple[int, int]) -> None:
    """Groups, bytes, and where scales and zero points lie."""
    quantised = section.precision in formats.SCALE_BYTES
    if quantised and section.role in layout.FP32_ROLES:
        raise ModelError(f"{where}: {section.precision} found, expected fp32")
    formats.check_groups(where, section.precision, section.shape, (section.group_rows, section.group_cols))
    if section.zeros_offset and section.precision != "int4":
        raise ModelError(f"{where}: zero points are for int4, not for {section.precision}")
    parts = formats.parts_of_section(section)
    if section.bytes != parts.bytes or not section.bytes:
        raise ModelError(f"{where}: {parts.bytes} bytes expected for {held}, {section.bytes} found")
    element = formats.PART_ALIGNMENT if quantised else formats.ELEMENT_BYTES[formats.float_of(section)]
    if section.offset % element:
        raise ModelError(f"{where}: offset {section.offset} is not a multiple of {element}")
    for name, found, there, at in (
        ("scales_offset", section.scales_offset, quantised, parts.scales_at),
        ("zeros_offset", section.zeros_offset, bool(section.zeros_offset), parts.zeros_at),
    ):
        expected = section.offset + at if there else 0
        if found != expected:
            raise ModelError(f"{where}: {name} is {found}, expected {expected}")


def _label(section: Section) -> str:
    return section.role if section.layer is None else f"{section.role} of layer {section.layer}"


def _check_experts(manifest: Manifest, files: dict[str, PackFile]) -> None:
    """Every expert's file holds gate, up and down of the layer's width."""
    for index, layer in enumerate(manifest.layers):
        for expert, name in enumerate(layer.expert_files):
            file = files.get(name)
            if file is None:
                raise ModelError(f"layers[{index}].expert_files names {name}, which is not in files")
            wanted = layout.expert_tensors(manifest.hyperparameters.hidden, index, expert, layer.expert_width)
            if tuple(section.role for section in file.sections) != layout.EXPERT_ROLES:
                raise ModelError(f"{name}: sections must be gate, up and down, in this order")
            for tensor, section in zip(wanted, file.sections, strict=True):
                _same_shape(name, tensor, section)


def _check_dense(manifest: Manifest) -> None:
    """The other files hold each remaining tensor once, and nothing else."""
    experts = {name for layer in manifest.layers for name in layer.expert_files}
    wanted = {(t.role, t.layer): t for t in layout.dense_tensors(manifest.hyperparameters, manifest.layers)}
    for file in manifest.files:
        if file.name in experts:
            continue
        for section in file.sections:
            tensor = wanted.pop((section.role, section.layer), None)
            if tensor is None:
                raise ModelError(f"{file.name}: section {_label(section)} is there twice or not part of the model")
            _same_shape(file.name, tensor, section)
    if wanted:
        raise ModelError(f"section {next(iter(wanted.values())).label()} is in no file ({len(wanted)} missing)")


def _same_shape(file: str, tensor: Tensor, section: Section) -> None:
    shape = layout.shape_of(tensor, section.layout)
    if section.shape != shape:
        raise ModelError(
            f"{file}: {tensor.label()} has shape {list(section.shape)}, expected {list(shape)} by hyperparameters"
        )
    if tensor.role in layout.FP32_ROLES and section.precision != "fp32":
        raise ModelError(f"{file}: {tensor.label()} is {section.precision}, expected fp32")

"""What config.json says of an AWQ or GPTQ checkpoint. Pure, and without numpy: the daemon plans with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from colibrid.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

GROUPS = (32, 64, 128)


class Scheme(msgspec.Struct, frozen=True):
    """What config.json's quantization_config says."""

    method: Literal["awq", "gptq"]
    group: int
    version: int = 1  # of GPTQ's zero points
    desc_act: bool = False
    kept: tuple[str, ...] = ()  # parts of names of tensors that are not int4

    def format_of(self, names: Iterable[str]) -> str | None:
        """The format that matrices made of these tensors probably have; None: not int4."""
        plain = any(part in name for name in names for part in self.kept)
        return None if plain else f"int4-g{self.group}-z"


class _Config(msgspec.Struct, frozen=True):
    """Fields of quantization_config that matter here; others are about how it was made."""

    quant_method: str
    bits: int = 0
    group_size: int = 0
    version: str = "gemm"
    checkpoint_format: str = "gptq"
    desc_act: bool = False
    modules_to_not_convert: tuple[str, ...] | None = None


def read_scheme(config: Mapping[str, object]) -> Scheme | None:
    """None: the checkpoint is not quantised. ModelError: in a way that is not read."""
    raw = config.get("quantization_config")
    if raw is None:
        return None
    where = "config.json: quantization_config"
    try:
        found = msgspec.convert(raw, _Config)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {error}") from None
    if found.quant_method not in ("awq", "gptq"):
        raise ModelError(f"{where}.quant_method is {found.quant_method!r}; supported: awq, gptq, or none of it")
    method: Literal["awq", "gptq"] = "awq" if found.quant_method == "awq" else "gptq"
    if found.bits != 4:
        raise ModelError(f"{where}.bits is {found.bits}, only 4 is read; convert the original checkpoint")
    if found.group_size not in GROUPS:
        raise ModelError(
            f"{where}.group_size is {found.group_size}; supported: {', '.join(map(str, GROUPS))}; convert the original "
            "checkpoint"
        )
    if method == "awq" and found.version.lower() != "gemm":
        raise ModelError(f"{where}.version is {found.version!r}, only 'gemm' is read; convert the original checkpoint")
    if method == "gptq" and found.checkpoint_format not in ("gptq", "gptq_v2"):
        raise ModelError(f"{where}.checkpoint_format is {found.checkpoint_format!r}; supported: gptq, gptq_v2")
    return Scheme(
        method,
        found.group_size,
        2 if found.checkpoint_format == "gptq_v2" else 1,
        found.desc_act,
        found.modules_to_not_convert or (),
    )

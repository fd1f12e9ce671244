"""What a model says where settings leave it to the model: the level of precedence between file and built-in default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.engine.tables import experts_per_token
from colibrid.text.model_text import load_sampling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from colibrid.cli.plan import Found
    from colibrid.config.settings import Settings


def model_values(found: Found) -> dict[str, Any]:
    """The model's own values by the paths of the settings that they stand for."""
    manifest, text = found.manifest, found.manifest.text
    counts = [layer.experts_per_token for layer in manifest.layers]
    alike = len(set(counts)) == 1
    values: dict[str, Any] = {
        "model.served_name": manifest.name,
        "model.max_seq_len": manifest.hyperparameters.max_positions,
        "model.dtype": manifest.precision,
        "model.tool_parser": text.tool_parser,
        "model.reasoning_parser": text.reasoning_parser,
        "experts.per_token": counts[0] if alike else counts,
        "experts.max_per_token": experts_per_token(manifest) or None,
    }
    if text.generation_config is not None:
        sampling = load_sampling(found.folder / text.generation_config)
        values |= {f"sampling.{name}": value for name, value in msgspec.structs.asdict(sampling).items()}
    return {path: value for path, value in values.items() if value is not None}


def with_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """`settings` with the values of these paths, all of the form section.key."""
    for path, value in values.items():
        section, _, key = path.partition(".")
        changed = msgspec.structs.replace(getattr(settings, section), **{key: value})
        settings = msgspec.structs.replace(settings, **{section: changed})
    return settings

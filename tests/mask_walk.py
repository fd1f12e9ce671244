"""Answers drawn at random from the masks of the bundled model's vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from colibrid.text.structured import Grammar
    from colibrid.text.structured_masks import StructuredOutput
    from colibrid.text.tokenizer import Tokenizer

MASK_BYTES = 520  # more than the vocabulary needs
_ENDS = (4093, 4091)


def allowed(mask: bytes) -> list[int]:
    if len(mask) != MASK_BYTES:
        raise AssertionError(f"a mask of {len(mask)} bytes")
    return [token for token in range(8 * MASK_BYTES) if mask[token // 8] >> token % 8 & 1]


async def walk(output: StructuredOutput, tokenizer: Tokenizer, grammar: Grammar, rng: random.Random) -> str:
    """An answer drawn at random from the masks, to its end."""
    masker = await output.masker(grammar)
    ids: list[int] = []
    mask = masker.first
    for _ in range(5000):
        token = rng.choice(allowed(mask))
        if token in _ENDS:
            return tokenizer.decode(ids, skip_special_tokens=False)
        ids.append(token)
        mask = await masker.after([token])
    raise AssertionError("no end")

"""Tokenizers of three kinds: byte-level (the bundled model's), byte fallback, and one with a decoder of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import colibrid
from colibrid.text.tokenizer import Tokenizer

MODEL_DIR = Path(colibrid.__file__).parent / "models" / "hummingbird-13m"


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer.load(MODEL_DIR / "tokenizer.json")


def _pieces() -> list[str]:
    words = [
        "\u2581",
        "\u2581the",
        "\u2581Oslo",
        "a",
        "b",
        "c",
        "é",
        "\u2581é",
        "日",
        "\u2581日本",
        ".",
        "\u2581\u2581",
    ]
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]


def _source(decoder: dict[str, object]) -> str:
    """A small Unigram tokenizer as Llama and Mixtral have it."""
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [
                {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False}
                for i, text in enumerate(["<unk>", "<s>", "</s>"])
            ],
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "\u2581"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
                ],
            },
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": decoder,
            "model": {
                "type": "Unigram",
                "unk_id": 0,
                "byte_fallback": True,
                "vocab": [[piece, -float(len(piece) == 1) - 1] for piece in _pieces()],
            },
        }
    )  # fmt: skip


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    return Tokenizer(
        _source(
            {
                "type": "Sequence",
                "decoders": [
                    {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                    {"type": "ByteFallback"},
                    {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
                ],
            }
        )
    )


@pytest.fixture(scope="session")
def own_decoder() -> Tokenizer:
    return Tokenizer(_source({"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}))

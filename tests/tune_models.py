"""Checkpoints whose experts are known, and texts of their own.

A token's word is of one of four types, its number modulo 4. Each type has a place in the hidden state that no layer
writes to, and the router reads nothing else: a token of type t chooses expert t first and expert 4 + t second, in every
layer. Second experts add nothing, but in the layers that `needed` names.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from in_process import InProcessEngine, ask, crc32c
from random_cases import Case, config_of
from random_checkpoints import tensors_of, write_tensors

from colibrid.model.convert import convert

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

TYPES = 4
WORDS = 64
LAYERS = 3
_MARK = 6.0  # of a token's type in its embedding
_FIRST, _SECOND = 2.0, 1.5  # of the router, on a mark that is normed

_CASE = Case(
    name="types", family="qwen3_moe", seed=77,
    config={
        "hidden_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": LAYERS, "norm_topk_prob": False,
        "num_experts": 2 * TYPES, "vocab_size": WORDS, "max_position_embeddings": 256, "eos_token_id": None,
    },
)  # fmt: skip


def write_model(folder: Path, needed: Collection[int] = ()) -> Path:
    """The checkpoint, in which second experts matter in the layers `needed`. Returns the folder."""
    folder.mkdir(parents=True)
    config = config_of(_CASE)
    tensors = tensors_of(_CASE, config)
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, :TYPES] = 0.0
    embedding[np.arange(WORDS), np.arange(WORDS) % TYPES] = _MARK
    tensors["lm_head.weight"] *= 3.0  # what is predicted is predicted with some certainty
    tensors["lm_head.weight"][:, :TYPES] = 0.0
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}self_attn.o_proj.weight"][:TYPES] = 0.0
        router = tensors[f"{prefix}mlp.gate.weight"]
        router[:] = 0.0
        for kind in range(TYPES):
            router[kind, kind], router[TYPES + kind, kind] = _FIRST, _SECOND
        for expert in range(2 * TYPES):
            down = tensors[f"{prefix}mlp.experts.{expert}.down_proj.weight"]
            down[:TYPES] = 0.0
            if expert >= TYPES:
                down *= 8.0 if layer in needed else 0.0
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    write_tensors(folder, tensors, _CASE.precision)
    return folder


def write_texts(path: Path, texts: Collection[Collection[int]]) -> Path:
    """Token ids as lines of {"text"}. Returns the file."""
    path.write_text("".join(json.dumps({"text": words(ids)}) + "\n" for ids in texts))
    return path


def words(ids: Collection[int]) -> str:
    """What the tokenizer reads as these ids."""
    return " ".join(f"w{number}" for number in ids)


def own_texts(checkpoint: Path, pack: Path, count: int, length: int) -> list[list[int]]:
    """Texts that the model itself writes, so that no other setting predicts them better. `pack`: a new folder."""
    convert(checkpoint, pack, crc32c=crc32c)
    asked = [
        msgspec.structs.replace(ask([number % WORDS], length - 1, top=0, temperature=1.0), seed=number)
        for number in range(count)
    ]
    with InProcessEngine(pack, slots=16, max_seq_len=length) as engine:
        return [[*request.prompt_ids, *answer.tokens] for request, answer in zip(asked, engine.run(asked), strict=True)]


def _tokenizer() -> dict[str, object]:
    vocabulary = {f"w{number}": number for number in range(WORDS)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"},
    }

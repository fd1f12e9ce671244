"""Experts and embeddings the whole way, with the real engine: what the settings and the request say is what is used."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from in_process import crc32c
from live_server import serving
from reference import Reference

from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.convert import convert

if TYPE_CHECKING:
    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack

GOLDEN = json.loads((Path(__file__).parent / "data" / "hummingbird-13m.golden.json").read_text())["cases"]
PROMPTS = [case["prompt_ids"] for case in GOLDEN[:12]]
LAYERS, OWN = 6, 2  # of the bundled model
ROUTE = "/v1/embeddings"


async def test_embeddings_are_those_of_the_reference(library: Library, bundled_pack: Pack, tmp_path: Path) -> None:
    """Lists beside generating requests: float64's vectors within 1e-4, the same bits alone, exact usage."""
    convert(BUNDLED_MODEL, tmp_path / "flat", crc32c=crc32c, backend="any")
    reference = Reference(tmp_path / "flat")
    async with serving(library, bundled_pack, batch={"slots": 8}) as live:
        others = [live.post("/v1/completions", {"prompt": ids, "max_tokens": 8}) for ids in PROMPTS[:4]]
        answer, *_ = await asyncio.gather(live.post(ROUTE, {"input": PROMPTS}), *others)
        alone = [await live.post(ROUTE, {"input": ids}) for ids in PROMPTS[:3]]
    got = [entry["embedding"] for entry in answer["data"]]
    for ids, vector in zip(PROMPTS, got, strict=True):
        states = reference.forward(ids)["final_norm"].mean(axis=0)
        np.testing.assert_allclose(vector, states / np.linalg.norm(states), rtol=0, atol=1e-4)
    assert [one["data"][0]["embedding"] for one in alone] == got[:3]
    tokens = sum(map(len, PROMPTS))
    assert answer["usage"] == {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "experts": {"per_token": OWN, "assignments": tokens * LAYERS * OWN, "trimmed": 0, "dropped": 0},
    }


async def test_tasks_have_their_own_experts(library: Library, bundled_pack: Pack) -> None:
    """embed, score and generate follow their settings, layer by layer; a request's own word comes first."""
    experts = {
        "max_per_token": 4,
        "generate": {"per_token": 3},
        "score": {"per_token": [2, 1, 2, 1, 2, 1]},
        "embed": {"per_token": 1},
    }
    ids = PROMPTS[0]

    async def used(route: str, body: dict[str, Any]) -> tuple[int, int, int]:
        usage = (await live.post(route, body))["usage"]["experts"]
        return usage["per_token"], usage["assignments"], usage["trimmed"]

    count = len(ids)
    async with serving(library, bundled_pack, experts=experts) as live:
        prompt = {"prompt": ids, "temperature": 0}
        assert await used(ROUTE, {"input": ids}) == (1, count * LAYERS, count * LAYERS)
        assert await used("/v1/completions", prompt | {"max_tokens": 0}) == (2, count * 9, count * 3)
        assert await used("/v1/completions", prompt | {"max_tokens": 1}) == (3, count * LAYERS * 3, 0)
        more = {"experts": {"per_token": 4}}
        assert await used("/v1/completions", prompt | {"max_tokens": 1} | more) == (4, count * LAYERS * 4, 0)
        assert await used(ROUTE, {"input": ids} | more) == (4, count * LAYERS * 4, 0)


async def test_a_limit_is_told(library: Library, bundled_pack: Pack) -> None:
    """With max_tokens_per_expert every answer says that it depends on its batch, and how much was dropped."""
    async with serving(library, bundled_pack, experts={"max_tokens_per_expert": 4}) as live:
        answer = await live.post(ROUTE, {"input": PROMPTS[:4]})
        text = await live.post("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 2})
    tokens = sum(map(len, PROMPTS[:4]))
    used = answer["usage"]["experts"]
    assert used["batch_dependent"] is True
    assert used["dropped"] > 0
    assert used["assignments"] + used["dropped"] == tokens * LAYERS * OWN
    assert text["usage"]["experts"]["batch_dependent"] is True

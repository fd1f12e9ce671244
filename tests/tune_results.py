"""Made-up results for tests of what is done with them."""

from __future__ import annotations

from typing import Any

from colibrid.model.manifest import Hyperparameters, Layer, Manifest, PackFile, Section
from colibrid.tune.points import Shape
from colibrid.tune.result import Cost, Point, Quality, Result, Spread, Tried
from colibrid.tune.store import Key

EIGHT = Shape(own=(2, 2, 2, 2), experts=(8, 8, 8, 8))
KEY = Key(
    version="1",
    pack="small@00",
    data_sha256="ab",
    task="generate",
    device="cpu",
    machine="a CPU",
    tokens=None,
    kl_tokens=2048,
    answer_tokens=128,
    concurrency=8,
    requests=64,
    output_tokens=64,
    ids_sha256="ef",
    service={"batch.slots": "8"},
)


def cost(speed: float = 100.0, experts: float = 2.0, **changed: Any) -> Cost:
    """Of `speed` tokens a second; the times fit to it."""
    values: dict[str, Any] = {
        "concurrency": 8,
        "requests": 64,
        "seconds": 1.0,
        "tokens_per_s": speed,
        "ttft_ms": Spread(p50=20.0, p99=40.0),
        "itl_ms": Spread(p50=8000 / speed, p99=16000 / speed),
        "e2e_ms": Spread(p50=100.0, p99=200.0),
        "bytes_per_token": 1e6 * experts,
        "distinct_experts": 4.0,
        "experts_per_token": experts,
    }
    return Cost(**{**values, **changed})


def tried(
    loss: float | None = 0.2, speed: float = 100.0, experts: float = 2.0, point: Point | None = None, **quality: Any
) -> Tried:
    """A point that was measured to the end."""
    return Tried(point=point or Point(), quality=Quality(tokens=1000, loss=loss, **quality), cost=cost(speed, experts))


def result(*points: Tried, **changed: Any) -> Result:
    """A run that tried these."""
    values: dict[str, Any] = {
        "version": "0.8.0",
        "model": "small",
        "pack": "small@0123456789abcdef",
        "device": "cpu, 2 threads",
        "machine": "a machine",
        "data": "prompts.jsonl",
        "data_sha256": "ab" * 32,
        "task": "generate",
        "slo": None,
        "made": "2026-11-30T12:00:00Z",
        "tried": points,
        "front": (0,),
        "chosen": 0,
        "reason": "It is the only one.",
        "layers": (),
    }
    return Result(**{**values, **changed})


def manifest(**changed: Any) -> Manifest:
    """Four layers of eight experts, two a token; files without weights."""
    layer = Layer(ffn="moe", experts=8, experts_per_token=2, expert_width=4)
    section = Section(role="embedding", offset=0, bytes=64, precision="bf16", shape=(4, 8))
    values: dict[str, Any] = {
        "version": 1,
        "backend": "cpu",
        "family": "Qwen2MoeForCausalLM",
        "name": "small",
        "precision": "bf16",
        "hyperparameters": Hyperparameters(
            vocab_size=4,
            hidden=8,
            heads=1,
            kv_heads=1,
            head_dim=8,
            max_positions=16,
            rms_norm_eps=1e-6,
            tied_head=True,
            qkv_bias=False,
            rope_inv_freq=(1.0,) * 4,
            attention_scale=1.0,
        ),
        "layers": (layer,) * 4,
        "files": (PackFile(name="dense.bin", bytes=64, sections=(section,), sha256="cd" * 32),),
    }
    return Manifest(**{**values, **changed})

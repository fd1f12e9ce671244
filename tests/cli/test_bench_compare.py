"""The scripts that measure colibrid beside llama.cpp: real runs of ours, with tools in llama.cpp's place."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import compare_llama_cpp as script
import measure
import mixed_packs
import msgspec
import peers
import pytest
import random_checkpoint
from llama_stand_ins import make_setup
from report import EngineResult, Pair, Results, ServerResult, WrkResult, markdown

from colibrid.model.checkpoint import Checkpoint
from colibrid.model.layout import Tensor
from colibrid.model.precision import parse_plan

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_a_whole_comparison(tmp_path: Path) -> None:
    """Both sides are run in every round, and the results hold rates, floor and requests of both."""
    setup = make_setup(tmp_path)
    engine = script.EnginePlan(model="tiny", precision="fp32", rounds=1, repeat=1, prompts=(4, 9), steps=3)
    server = script.ServerPlan(model="tiny", precision="fp32", rounds=1, seconds=0.2, slots=(2,), clients=(1, 3))
    said: list[str] = []
    results = script.compare(setup, "test", "a machine", [engine], [server], said.append)
    (alone,) = results.engine
    assert list(alone.rates) == ["decode 3", "prefill 4", "prefill 9"]
    assert [pair.theirs for pair in alone.rates.values()] == [[7.0], [100.0], [100.0]]
    assert all(pair.ours[0] > 0 for pair in alone.rates.values())
    assert alone.floor_share[0] > 0
    assert [(row.slots, row.clients) for row in results.server] == [(2, 1), (2, 3)]
    for row in results.server:
        assert row.requests_per_s.ours[0] > 0
        assert row.requests_per_s.theirs[0] > 0
        assert row.p99_ms.ours[0] >= row.p50_ms.ours[0]
    assert results.same_text == {"tiny fp32": True}
    assert results.peer == "version: 1"
    assert [line for line in said if line.startswith("tiny fp32, ")] == [
        "tiny fp32, engine, round 1 of 1",
        "tiny fp32, server with 2 slots, round 1 of 1",
    ]
    path = script.write(results, tmp_path / "out", "name")
    assert msgspec.json.decode(path.read_bytes(), type=Results) == results
    assert "| tiny | fp32 | decode 3 |" in path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_quantised_weights_meet_a_type_of_as_many_bytes(tmp_path: Path) -> None:
    """llama.cpp's file is quantised from the fp16 one; ours has every matrix in the format, and both sizes are compared."""
    setup = make_setup(tmp_path)
    plan = script.EnginePlan(model="tiny", precision="int8-g128", rounds=1, repeat=1, prompts=(4,), steps=3)
    result = script.compare_engine(setup, plan, lambda _: None)
    assert sorted(path.name for path in setup.work.glob("*.gguf")) == ["tiny-Q8_0.gguf", "tiny-f16.gguf"]
    assert all(pair.ours[0] > 0 for pair in result.rates.values())
    weights = sum(path.stat().st_size for path in setup.work.glob("packs/*/*.bin"))
    gguf = (setup.work / "tiny-Q8_0.gguf").stat().st_size
    assert result.bytes_ratio == pytest.approx(weights / gguf, rel=0.1)  # but for padding between sections


@pytest.mark.parametrize(("tied", "names", "copies"), [(True, 2, 1), (True, 1, 0), (False, 2, 0)])
def test_a_tied_head_is_counted_once(tmp_path: Path, tied: bool, names: int, copies: int) -> None:
    """A gguf file's head is left out of its bytes if it is a copy of the embedding, and only then."""
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": tied, "vocab_size": 4, "hidden_size": 64}))
    header = b"".join(
        len(name).to_bytes(8, "little") + name
        for name in (b"blk.0.attn_output.weight", b"token_embd.weight", b"output.weight")[: 1 + names]
    )
    gguf = tmp_path / "a.gguf"
    gguf.write_bytes(header + bytes(names * 4 * 2 * 34))
    weights = peers.Weights(model="a", precision="int8-g128", checkpoint=tmp_path, gguf=gguf)
    assert peers.gguf_bytes(weights) == len(header) + (names - copies) * 4 * 2 * 34


def test_sides_take_turns() -> None:
    """Who comes second profits from a warm machine; so each side is second every other round."""
    assert [script.order(index) for index in range(3)] == [("ours", "theirs"), ("theirs", "ours"), ("ours", "theirs")]


def test_a_failing_tool_says_what_it_was(tmp_path: Path) -> None:
    """The command and its last words are in the error; nothing half-made is left."""
    setup = make_setup(tmp_path)
    (tmp_path / "convert.py").write_text("import sys; open(sys.argv[2], 'w').write('x'); sys.exit('no such tensor')")
    with pytest.raises(peers.BenchError, match="no such tensor"):
        peers.prepare(setup, "tiny", "fp32")
    assert not list(setup.work.glob("*.gguf"))


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    """The error lists what there is."""
    with pytest.raises(peers.BenchError, match="qwen2-moe-240m"):
        peers.prepare(make_setup(tmp_path), "gpt", "fp32")


def test_full_plans_ask_for_what_the_goals_name() -> None:
    """Both models in both float precisions alone, the large one in int8 and int4, and 4 and 8 slots with 8 and 16 clients over HTTP."""
    assert {(plan.model, plan.precision) for plan in script.FULL_ENGINE} == {
        *((model, precision) for model in ("hummingbird-13m", "qwen2-moe-240m") for precision in ("fp32", "fp16")),
        ("qwen2-moe-240m", "int8-g128"),
        ("qwen2-moe-240m", "int4-g32"),
    }
    assert all(plan.prompts == (128, 512) and plan.steps == 128 and plan.rounds >= 5 for plan in script.FULL_ENGINE)
    assert all(plan.slots == (4, 8) and plan.clients == (8, 16) for plan in script.FULL_SERVER)


def test_the_random_checkpoint_is_one(tmp_path: Path) -> None:
    """The same seed gives the same bytes, another one others; every tensor is there with values near one."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        random_checkpoint.write_checkpoint(tmp_path / name, "tiny", seed)
    one, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert one == same
    assert one != other
    with Checkpoint(tmp_path / "a") as checkpoint:
        assert checkpoint.tensors["model.layers.1.mlp.experts.3.down_proj.weight"].shape == (64, 32)
        norm = checkpoint.tensors["model.norm.weight"]
        bits = checkpoint.read(norm, 0, norm.bytes)
    values = memoryview(bits).cast("H")
    assert all(0x3F40 <= value <= 0x3FA0 for value in values)  # 0.75 to 1.25 in bf16


def test_the_large_shape_has_240_million_weights() -> None:
    """The name says how many it has; the head is the embedding."""
    config = json.loads((random_checkpoint.BUNDLED_MODEL / "config.json").read_text())
    config |= random_checkpoint.SHAPES["qwen2-moe-240m"]
    total = 0
    for _, shape, _ in random_checkpoint.tensors(config):
        product = 1
        for size in shape:
            product *= size
        total += product
    assert round(total / 1e6) == 240


def example(**changes: Any) -> Results:
    """Results with one row of each kind."""
    pair = Pair(ours=[200.0, 300.0, 220.0], theirs=[100.0, 300.0, 100.0])
    results = Results(
        date="2026-01-02", commit="abc", machine="box", mode="full", threads=2, busy=0.0, peer="llama", prompt_tokens=24,
        max_tokens=32,
        engine=[
            EngineResult(
                model="m", precision="fp16", rates={"decode 128": pair, "prefill 512": pair},
                floor_share=[0.5, 0.8, 0.7], layer_us_above_floor=[9.0, 5.0, 7.0], read_bandwidth=[1e10] * 3,
                bytes_ratio=0.941,
            )
        ],
        server=[
            ServerResult(
                model="m", precision="fp16", slots=4, clients=8, requests_per_s=pair, p50_ms=pair,
                p99_ms=Pair(ours=[50.0], theirs=[100.0]),
            )
        ],
        same_text={"m fp16": True},
        sweep=[
            {"model": "m", "precision": "fp16", "rows": [
                {"slots": 8, "context": 160, "prefill_tokens_per_s": 5000.0, "decode_tokens_per_s": 99.5,
                 "layer_us_above_floor": 3.2, "floor_share": 0.91, "expert_calls_saved_per_step": 40.0,
                 "expert_runs_per_step": 24.0}
            ]}
        ],
        wrk=WrkResult(
            connections=400, seconds=60.0, ok=6000, refused=11, failed=0, ok_per_s=100.0, memory_first_kib=102400,
            memory_last_kib=102404,
        ),
    )  # fmt: skip
    return msgspec.structs.replace(results, **changes)


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """A round in which the machine was slow for both sides counts like any other."""
    pair = Pair(ours=[200.0, 20.0, 220.0], theirs=[100.0, 10.0, 100.0])
    assert pair.ratios == [2.0, 2.0, 2.2]
    assert pair.ratio == 2.0


def test_tables_hold_medians_spreads_and_ratios() -> None:
    """Every kind of result has its line; decode rows say how far from the floor they are."""
    lines = list(markdown(example()))
    assert lines[0].startswith("box; commit abc, 2026-01-02, full run; 2 threads on both sides")
    assert "| m | fp16 | decode 128 | 220 (200 to 300) | 100 (100 to 300) | **2.00** | 70% | 7 | 0.941 |" in lines
    assert "| m | fp16 | prefill 512 | 220 (200 to 300) | 100 (100 to 300) | **2.00** |  |  | 0.941 |" in lines
    assert "| m | fp16 | 4 | 8 | 220 (200 to 300) | 100 (100 to 300) | **2.00** | 50.0 | 100 | **0.50** |" in lines
    assert "| m | fp16 | 8 | 160 | 5,000 | 99.5 | 3 | 91% | 40 of 64 a step |" in lines
    assert lines[-1].startswith("`wrk` with 400 connections for 60 s against `/generate`: 6000 answered (100 a second)")
    assert "11 refused with Retry-After, 0 failed; memory 100 MiB, +4 KiB" in lines[-1]


def test_a_busy_machine_is_reported() -> None:
    """Numbers that were taken beside other work carry a warning; an idle machine's do not."""
    assert "40% busy" in "\n".join(markdown(example(busy=0.4)))
    assert "busy" not in "\n".join(markdown(example(busy=0.01)))


def test_busy_is_a_share() -> None:
    """Between all idle and all used."""
    assert 0 <= script.busy_share(0.05) <= 1


def test_tables_of_what_was_not_measured_are_left_out() -> None:
    """A run of the comparison alone has no sweep and no wrk."""
    text = "\n".join(markdown(example(server=[], sweep=[], wrk=None)))
    assert "wrk" not in text
    assert "clients" not in text
    assert "context" not in text


def test_publishing_replaces_the_measured_part_only(tmp_path: Path) -> None:
    """What stands around the marks stays; publishing twice is publishing once."""
    pytest.importorskip("matplotlib")
    page, picture = tmp_path / "PERFORMANCE.md", tmp_path / "performance.png"
    page.write_text(f"before\n{measure.BEGIN}\nold\n{measure.END}\nafter\n")
    for _ in range(2):
        measure.publish(example(), page, picture)
    text = page.read_text()
    assert text.startswith(f"before\n{measure.BEGIN}\n![Ratios beside llama.cpp](performance.png)\n")
    assert text.endswith(f"{measure.END}\nafter\n")
    assert "old" not in text
    assert text.count("decode 128") == 1
    assert "bench/results/2026-01-02-llama-cpp.json" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 150_000


def test_the_page_has_the_marks() -> None:
    """The document that publishing rewrites can be rewritten."""
    text = measure.PAGE.read_text()
    assert text.index(measure.BEGIN) < text.index(measure.END)


def test_a_mixed_pack_is_weighed_by_its_parts() -> None:
    """16 experts, 5 in fp16, 5 in int8 and 6 in int4: the mean of the pure packs' times by these shares."""
    times = {"fp16": 4.0, "int8": 2.0, "int4": 1.0, "mixed": 2.25}
    found = mixed_packs.Round({(name, slots): time for name, time in times.items() for slots in mixed_packs.SLOTS})
    assert found.ratio(1) == pytest.approx(1.0)
    assert mixed_packs.rules("int8") == "experts=int8, dense=int8"
    plan = parse_plan(mixed_packs.rules("mixed"))
    chosen = [plan.format_of(Tensor("up", 0, expert, (64, 64)), "fp32") for expert in range(mixed_packs.EXPERTS)]
    assert chosen == ["fp16"] * 5 + ["int8"] * 5 + ["int4-g64"] * 6

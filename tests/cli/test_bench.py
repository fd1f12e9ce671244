"""`colibrid bench engine`: what it measures, not how fast it is."""

from __future__ import annotations

import json
import os
import statistics
from typing import TYPE_CHECKING, Any

import pytest

from colibrid.cli import bench_bandwidth
from colibrid.cli.engine_bench import EngineBench, Load
from colibrid.cli.main import run
from colibrid.cli.shapes import SHAPES, write_shape
from colibrid.config.settings import BatchSettings, EngineSettings, ModelSettings, Settings
from colibrid.engine import gpu
from colibrid.engine.configure import plan_memory
from colibrid.engine.cubins import DeviceError
from colibrid.engine.library import Library
from colibrid.engine.spec import make_spec
from colibrid.model.dummy import dummy_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.model.pack import Pack

SHORT = ["--slots", "1,3", "--prompt-tokens", "5", "--steps", "2", "--repeat", "2"]


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real probe takes a second and a gigabyte."""
    monkeypatch.setattr(bench_bandwidth, "PROBE_BYTES", 16 << 20)


def measure(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON document of one run."""
    assert run(["bench", "engine", *arguments, "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_rows_agree_with_the_model(bundled_pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    """One slot runs k experts a layer; bytes are dense weights, these experts and KV; the rest follows from times."""
    document = measure(capsys, str(bundled_pack.path), *SHORT)
    one, three = document["rows"]
    assert (one["slots"], three["slots"]) == (1, 3)
    assert one["expert_runs_per_step"] == 6 * 2
    assert 6 * 2 <= three["expert_runs_per_step"] <= 6 * 3 * 2
    for row in document["rows"]:
        assert row["expert_runs_per_step"] + row["expert_calls_saved_per_step"] == pytest.approx(row["slots"] * 6 * 2)
        assert row["decode_tokens_per_s"] == pytest.approx(row["slots"] / row["step_ms"] * 1e3)
        assert len(row["decode_samples"]) == len(row["prefill_samples"]) == 2
        step_s = statistics.median(row["slots"] / sample for sample in row["decode_samples"])
        assert row["decode_tokens_per_s"] == pytest.approx(row["slots"] / step_s)
        assert row["layer_us"] == pytest.approx(row["step_ms"] * 1e3 / 6)
        assert row["floor_ms"] == pytest.approx(row["bytes_per_step"] / row["read_bandwidth"] * 1e3, rel=1e-3)
        assert row["floor_share"] == pytest.approx(row["floor_ms"] / row["step_ms"])
        assert row["layer_us_above_floor"] == pytest.approx((row["step_ms"] - row["floor_ms"]) * 1e3 / 6)
    assert document["read_bandwidth"] == max(row["read_bandwidth"] for row in document["rows"])


def test_bytes_are_those_of_the_experts_hit(bundled_pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    """Another slot adds the experts that it alone hits, and its own KV, but no dense bytes."""
    one, three = measure(capsys, str(bundled_pack.path), *SHORT)["rows"]
    expert = 3 * 256 * 256 * 2
    kv = 6 * (2 * 2 * 64 * 4)  # layers, bytes of one token in fp32
    more = (three["expert_runs_per_step"] - one["expert_runs_per_step"]) * expert + 2 * 6 * kv
    assert three["bytes_per_step"] - one["bytes_per_step"] == pytest.approx(more, abs=2)


def test_a_sweep_has_every_pair(bundled_pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    """Each prompt length is measured at each number of slots; the context counts half of the steps."""
    arguments = ["--slots", "1,2", "--prompt-tokens", "3,9", "--steps", "4", "--repeat", "1"]
    rows = measure(capsys, str(bundled_pack.path), *arguments)["rows"]
    assert [(row["slots"], row["prompt_tokens"], row["context"]) for row in rows] == [
        (1, 3, 5), (2, 3, 5), (1, 9, 11), (2, 9, 11),
    ]  # fmt: skip


def test_the_document_says_what_was_measured(bundled_pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    """Model, weights, precision, threads and machine stand beside the rows."""
    document = measure(capsys, str(bundled_pack.path), *SHORT)
    assert (document["model"], document["weights"], document["precision"]) == ("hummingbird-13m", "files", "bf16")
    assert (document["device"], document["kv_precision"], document["layers"]) == ("cpu", "fp32", 6)
    assert document["threads"] >= 1
    assert document["probe_threads"] >= document["threads"]
    assert document["machine"].endswith((f", {len(os.sched_getaffinity(0))} CPUs", ", 1 CPU"))


def test_table_says_what_was_measured(bundled_pack: Pack, capsys: pytest.CaptureFixture[str]) -> None:
    """Model, precision, device, threads and bandwidth stand above one line a number of slots."""
    assert run(["bench", "engine", str(bundled_pack.path), "--device", "cpu", *SHORT]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = "\n".join(lines[:-2])
    for part in ("hummingbird-13m", "weights bf16", "cpu", "thread", "GB/s", "kv runs", "above floor", "tok/s"):
        assert part in head
    assert "random" not in head
    assert [line.split()[0] for line in lines[-2:]] == ["1", "3"]


def test_random_weights_need_only_a_configuration_and_say_so(
    tmp_path: Path, bundled_pack: Pack, capsys: pytest.CaptureFixture[str]
) -> None:
    """--dummy measures any shape from its config.json, in any precision, and calls its weights random."""
    shape = {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 64, "vocab_size": 100,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "max_position_embeddings": 64, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(shape))
    arguments = [str(folder), "--dummy", "--slots", "1", "--prompt-tokens", "4", "--steps", "1"]
    sets = ["--set", "model.dtype=fp32", "--set", f"model.cache_dir={tmp_path / 'cache'}"]
    document = measure(capsys, *arguments, *sets)
    assert (document["weights"], document["precision"], document["layers"]) == ("random", "fp32", 2)
    assert run(["bench", "engine", "--device", "cpu", *arguments, *sets]) == 0
    assert "random weights, fp32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--slots", "0"], "numbers from 1 to 64"), (["--slots", "x"], "numbers from 1 to 64"),
     (["--prompt-tokens", "5,0"], "--prompt-tokens"), (["--prompt-tokens", "5,2030"], "do not fit 2048")],
)  # fmt: skip
def test_impossible_measurements(
    bundled_pack: Pack, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers that do not fit are refused with the limit."""
    assert run(["bench", "engine", "--device", "cpu", str(bundled_pack.path), *arguments]) == 78
    assert text in capsys.readouterr().err


def test_slots_that_start_first_have_room_until_the_last_has_started() -> None:
    """32 prompts of 128 tokens take 8 steps of 512, so the first slot decodes that many steps more; and a few are counted."""
    load = Load(slots=32, prompt_tokens=128, steps=64, repeat=1)
    assert load.slack(512) == 8 + 4 + 8
    assert load.context(512) == 128 + 64 + 20


def test_nothing_but_the_document_is_printed(
    bundled_pack: Pack, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why the CPU was taken is said only if the configuration asks for such events, and never on stdout."""

    def none(_index: int = 0) -> None:
        raise DeviceError("no GPU")

    monkeypatch.setattr(gpu, "find_gpu", none)
    arguments = ["bench", "engine", str(bundled_pack.path), "--slots", "1", "--prompt-tokens", "2", "--steps", "1"]
    for sets, said in (((), False), (("--set", "logging.level=info"), True)):
        assert run([*arguments, "--json", *sets]) == 0
        out, err = capfd.readouterr()
        assert json.loads(out)["device"] == "cpu"
        assert ("device_cpu" in err) == said


def test_counted_experts_are_those_that_ran(bundled_pack: Pack) -> None:
    """What the counts of single steps say, which a GPU goes by, is what the CPU's engine counts as it runs them."""
    load = Load(slots=3, prompt_tokens=5, steps=1, repeat=1)
    spec = make_spec(Settings(batch=BatchSettings(slots=3)), str(bundled_pack.path), bundled_pack.manifest)
    with EngineBench(Library(), spec, bundled_pack.manifest) as opened:
        opened.start_decoding(load)
        before = opened.stats()
        counted = opened.count_runs(3)
        after = opened.stats()
    steps = after.steps_decode - before.steps_decode
    assert steps > 1
    assert counted == pytest.approx((after.expert_launches - before.expert_launches) / steps)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_measured_without_its_files(name: str, tmp_path: Path) -> None:
    """Every named shape is a model that a GPU's kernels can compute, with random weights."""
    manifest = dummy_manifest(write_shape(name, tmp_path), backend="cuda")
    settings = Settings(
        engine=EngineSettings(device="cuda"),
        model=ModelSettings(weights="dummy", max_seq_len=1024),
        batch=BatchSettings(slots=1),
    )
    plan = plan_memory(Library(), make_spec(settings, "", manifest), manifest)
    assert manifest.name == name
    assert 12 << 30 < plan.weights < 96 << 30


def test_the_machine_is_named_before_the_engine_pins_a_thread(
    bundled_pack: Pack, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name counts the CPUs that the process was given."""
    cpus = len(os.sched_getaffinity(0))
    arguments = ["--slots", "1", "--prompt-tokens", "2", "--steps", "1", "--set", "engine.threads=2"]
    document = measure(capsys, str(bundled_pack.path), *arguments)
    assert document["machine"].endswith(f", {cpus} CPU" + ("s" if cpus > 1 else ""))
    assert document["probe_threads"] == 2

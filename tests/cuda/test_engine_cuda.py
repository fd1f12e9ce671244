"""The whole CUDA engine: on the emulator with tiny models, on a GPU also with the bundled one.

Random checkpoints are compared with the CPU engine over the same 16-bit weights, which tests/test_golden_c.py compares
with transformers. The bundled model is compared with transformers' own answers.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engine_device
import msgspec
import numpy as np
import pytest
from in_process import Answer, InProcessEngine, ask, crc32c, is_first
from random_cases import Case, prompts_of
from random_checkpoints import write_checkpoint

from colibrid.engine import abi, device_cuda
from colibrid.errors import ColibridError, EngineError, ModelError
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.convert import convert
from colibrid.model.dummy import write_dummy_pack

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable

    from numpy.typing import NDArray

    from colibrid.engine.channel import SlotRecord, SlotRequest

Device = engine_device.EmulatedDevice | engine_device.Gpu
DATA = Path(__file__).resolve().parents[1] / "data"
ALL = 20  # ids of the vocabulary: their list is the whole distribution
LENGTHS = (6, 21)
NEW_TOKENS = 4
SMALL = {"prefill_tokens": 64, "prefill_chunk": 16}

CASES = (
    Case(
        name="qwen2", family="qwen2_moe", precision="bf16", seed=31,
        config={
            "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1],
        },
    ),
    Case(
        name="mixtral-fp16-window", family="mixtral", precision="fp16", seed=32,
        config={"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": 9},
    ),
    Case(
        name="qwen3", family="qwen3_moe", precision="bf16", seed=33,
        config={
            "hidden_size": 48, "head_dim": 32, "num_attention_heads": 4, "moe_intermediate_size": 16,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        name="olmoe-k4", family="olmoe", precision="bf16", seed=34,
        config={"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32},
    ),
)  # fmt: skip


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    built = engine_device.build_fake(tmp_path_factory.mktemp("enginefake"))
    if built is None:
        pytest.skip("no C compiler")
    return built


@pytest.fixture(scope="session")
def emulated(fake: ctypes.CDLL, emulator: ctypes.CDLL) -> engine_device.EmulatedDevice:
    return engine_device.EmulatedDevice(fake, emulator)


@pytest.fixture(scope="session")
def gpu(request: pytest.FixtureRequest) -> engine_device.Gpu:
    try:
        device_cuda.probe(0)
    except device_cuda.DeviceError as error:
        pytest.skip(str(error))
    return engine_device.Gpu(request.getfixturevalue("cubins"))


@pytest.fixture(params=["emulated", "cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    """The same test on the CPU and on a GPU."""
    name = {"emulated": "emulated", "cuda": "gpu"}[request.param]
    return request.getfixturevalue(name)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first case as a pack for CUDA. Not to be changed."""
    folder = tmp_path_factory.mktemp("tiny")
    convert(write_checkpoint(CASES[0], folder / "src"), folder / "pack", crc32c=crc32c, backend="cuda")
    return folder / "pack"


def _prompts(case: Case) -> list[list[int]]:
    return [prompts_of(case)[1][:length] for length in LENGTHS]


def _serve(pack: Path, device: Device | None, requests: list[SlotRequest], **changes: Any) -> list[Answer]:
    kv = "fp32" if device is None else "fp16"
    with InProcessEngine(pack, slots=2, kv=kv, max_seq_len=64, device=device, **{**SMALL, **changes}) as engine:
        answers = engine.run(requests)
        assert engine.stats().allocations_after_open == 0
    assert all(answer.status is None for answer in answers)
    return answers


def _centred(records: list[SlotRecord]) -> NDArray[np.float64]:
    """(positions, vocabulary) log-probabilities without their mean."""
    rows = np.full((len(records), ALL), np.nan)
    for row, record in zip(rows, records, strict=True):
        for token, logprob in record.top:
            row[token] = logprob
    return rows - rows.mean(axis=1, keepdims=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_random_checkpoints_compute_what_the_cpu_does(case: Case, device: Device, tmp_path: Path) -> None:
    """Relative error of a position's logits at most 1e-2; one in ten may differ more, where an expert is a near tie."""
    source = write_checkpoint(case, tmp_path / "src")
    convert(source, tmp_path / "cpu", crc32c=crc32c, backend="cpu")
    convert(source, tmp_path / "cuda", crc32c=crc32c, backend="cuda")
    requests = [ask(prompt, NEW_TOKENS, top=ALL, prompt_top=ALL) for prompt in _prompts(case)]
    expected = _serve(tmp_path / "cpu", None, requests)
    got = _serve(tmp_path / "cuda", device, requests)
    errors: list[float] = []
    for mine, theirs in zip(got, expected, strict=True):
        assert is_first(mine.prompt[0])
        same = next(
            (i for i, (a, b) in enumerate(zip(mine.tokens, theirs.tokens, strict=True)) if a != b), NEW_TOKENS - 1
        )
        ours = _centred([*mine.prompt[1:], *mine.records[: same + 1]])
        reference = _centred([*theirs.prompt[1:], *theirs.records[: same + 1]])
        errors += list(np.linalg.norm(ours - reference, axis=1) / np.linalg.norm(reference, axis=1))
        assert mine.usage is not None
        assert theirs.usage is not None
        assert mine.usage.assignments == theirs.usage.assignments or mine.tokens != theirs.tokens
    assert np.isfinite(errors).all()
    assert np.mean(np.array(errors) <= 1e-2) >= 0.9


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_company_changes_nothing(device: Device, tiny: Path, sampled: bool) -> None:
    """A request's records are the same to the bit alone and among others, in every bucket that they fill."""
    asked = ask(_prompts(CASES[0])[1], NEW_TOKENS, top=5, prompt_top=5)
    if sampled:
        asked = msgspec.structs.replace(asked, temperature=1.2, top_p=0.9, seed=7)
    alone: Answer | None = None
    for company in (0, 2) if device.name == "emulated" else (0, 1, 3, 7, 15, 23, 31, 47, 63):
        others = [ask([(3 * i + j) % ALL for j in range(1 + i % 9)], NEW_TOKENS + i % 3) for i in range(company)]
        slots = company + 1
        with InProcessEngine(tiny, slots=slots, kv="fp16", max_seq_len=64, device=device, **SMALL) as engine:
            answer = engine.run([*others, asked])[-1]
        alone = alone or answer
        assert answer.records == alone.records
        assert answer.prompt[1:] == alone.prompt[1:]


def test_masks_are_waited_for_by_their_slot_alone(device: Device, tiny: Path) -> None:
    """Each token of a masked slot is the likeliest that its mask allows, when the mask is there; others go on."""
    prompt = _prompts(CASES[0])[1]
    free, masked = ask(prompt, NEW_TOKENS), ask(prompt, 3, top=ALL)
    masked = msgspec.structs.replace(masked, flags=masked.flags | abi.RequestFlag.MASKED)
    with InProcessEngine(tiny, slots=2, kv="fp16", max_seq_len=64, device=device, **SMALL) as engine:
        generation = engine.start(0, masked)
        engine.start(1, free)
        tokens = [event for event in engine.settle() if event.kind == abi.EventKind.TOKEN]
        assert [event.slot for event in tokens] == [1] * NEW_TOKENS
        for position, allowed in enumerate(([3, 17, 9], [5], [0, 1, 2, 19])):
            engine.allow(0, generation, position, allowed)
            (event,) = engine.settle()
            likeliest = dict(engine.channel.record(0, event.record).top)
            assert (event.slot, event.position) == (0, position)
            assert event.token == max(allowed, key=lambda token: likeliest[token])
        engine.check()


def test_prefix_runs_change_no_bit(device: Device, tiny: Path) -> None:
    """A prompt gets the same records alone, behind a prefix of any length, and when that is copied into a new run."""
    prompt = _prompts(CASES[0])[1]
    plain = ask(prompt, NEW_TOKENS, top=ALL)
    plain = msgspec.structs.replace(plain, flags=abi.RequestFlag.LOGPROBS)
    with InProcessEngine(tiny, slots=2, kv="fp16", max_seq_len=64, device=device, **SMALL) as engine:
        (alone,) = engine.run([plain])
        (first,) = engine.run([msgspec.structs.replace(plain, publish_run=1)])
        answers = [first]
        for length in (1, 15, 16, 17, len(prompt) - 1):
            shared = msgspec.structs.replace(plain, prefix_run=1, prefix_tokens=length)
            copied = msgspec.structs.replace(shared, publish_run=2)
            again = msgspec.structs.replace(plain, prefix_run=2, prefix_tokens=len(prompt) - 1)
            for request in (shared, copied, again):
                (answer,) = engine.run([request])
                assert answer.usage is not None
                assert answer.usage.cached_tokens == request.prefix_tokens
                answers.append(answer)
            engine.release_run(2)
        assert all(answer.records == alone.records for answer in answers)
        longer = msgspec.structs.replace(
            plain, prompt_ids=[*prompt, *alone.tokens[:-1], 3], prefix_run=1, prefix_tokens=len(prompt) + 1
        )
        (answer,) = engine.run([longer])
        assert answer.usage is not None
        assert answer.usage.cached_tokens == 0  # the output was not computed as a prompt is
        engine.release_run(1)
        engine.settle()
        assert engine.stats().kv_bytes_used == 0
        assert engine.stats().allocations_after_open == 0


def test_dummy_weights_are_those_of_the_cpu(device: Device, tmp_path: Path) -> None:
    """The same seed gives the same model on both: the same tokens and nearly the same log-probabilities."""
    source = write_checkpoint(CASES[0], tmp_path / "src")
    write_dummy_pack(source, tmp_path / "cpu", backend="cpu")
    write_dummy_pack(source, tmp_path / "cuda", backend="cuda")
    requests = [ask(prompt, 2, top=ALL) for prompt in _prompts(CASES[0])]
    dummy = {"weights": "dummy", "dummy_seed": 5}
    expected = _serve(tmp_path / "cpu", None, requests, **dummy)
    for mine, theirs in zip(_serve(tmp_path / "cuda", device, requests, **dummy), expected, strict=True):
        ours, reference = _centred(mine.records[:1]), _centred(theirs.records[:1])
        assert np.linalg.norm(ours - reference) <= 2e-2 * np.linalg.norm(reference)


@pytest.mark.parametrize("name", ["dense.bin", "expert_0_0.bin"])
def test_a_damaged_file_is_refused(emulated: Device, tiny: Path, tmp_path: Path, name: str) -> None:
    """One flipped bit is found while the file is on its way to the device, and the file is named."""
    pack = shutil.copytree(tiny, tmp_path / "pack")
    data = bytearray((pack / name).read_bytes())
    data[-1] ^= 1
    (pack / name).write_bytes(data)
    with pytest.raises(ModelError, match=rf"{name}.*crc32c.*CHECKSUM"):
        InProcessEngine(pack, slots=1, max_seq_len=32, device=emulated)


def test_a_weight_that_is_not_finite_is_refused(emulated: Device, tiny: Path, tmp_path: Path) -> None:
    """Without checksums a NaN is still found; the file and the place are named."""
    pack = shutil.copytree(tiny, tmp_path / "pack")
    described = json.loads((pack / "colibri.json").read_text())
    for file in described["files"]:
        file["crc32c"] = None
    (pack / "colibri.json").write_text(json.dumps(described))
    data = bytearray((pack / "expert_2_1.bin").read_bytes())
    data[400:402] = (0x7FC0).to_bytes(2, "little")
    (pack / "expert_2_1.bin").write_bytes(data)
    with pytest.raises(ModelError, match=r"expert_2_1.bin: gate of layer 2, expert 1: the value at byte 400 .*NOT_FIN"):
        InProcessEngine(pack, slots=1, max_seq_len=32, device=emulated)


def test_whatever_fails_while_loading_is_told(
    emulated: engine_device.EmulatedDevice, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th driver call of an open fails, for every n: the engine is not there, and nothing is left behind."""
    opened = failed = 0
    for number in range(1, 10_000):
        monkeypatch.setattr(emulated, "fail_at", number)
        try:
            engine = InProcessEngine(tiny, slots=1, max_seq_len=32, device=emulated)
        except EngineError as error:
            assert "the driver says CUDA_ERROR_LAUNCH_FAILED" in str(error)
            failed += 1
        else:
            engine.__exit__()
            opened += 1
        assert emulated.live() == 0
        if opened:
            break
    assert failed > 50


def test_a_pack_for_the_cpu_is_refused(emulated: Device, tmp_path: Path) -> None:
    """The message names the command that makes the right one."""
    convert(write_checkpoint(CASES[0], tmp_path / "src"), tmp_path / "pack", crc32c=crc32c, backend="cpu")
    with pytest.raises(ColibridError, match="convert --backend cuda"):
        InProcessEngine(tmp_path / "pack", slots=1, max_seq_len=32, device=emulated)


# ------------------------------------------------------------------ the bundled model, on a GPU


@pytest.fixture(scope="module")
def golden(gpu: engine_device.Gpu, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], Answer]]:
    """All 39 cases and what the GPU answered, 32 at a time."""
    pack = tmp_path_factory.mktemp("hummingbird") / "pack"
    convert(BUNDLED_MODEL, pack, crc32c=crc32c, backend="cuda")
    cases = json.loads((DATA / "hummingbird-13m.golden.json").read_text())["cases"]
    with InProcessEngine(pack, slots=32, kv="fp16", max_seq_len=256, device=gpu) as engine:
        answers = engine.run([ask(case["prompt_ids"], len(case["greedy_ids"])) for case in cases])
        assert engine.stats().allocations_after_open == 0
    return list(zip(cases, answers, strict=True))


def test_cuda_logprobs_are_those_of_the_reference(
    golden: list[tuple[dict[str, Any], Answer]], record_property: Callable[[str, object], None]
) -> None:
    """At least 97 % of prompt and top-8 log-probabilities lie within 2e-2, and their mean KL is at most 5e-4."""
    differences: list[float] = []
    divergences: list[float] = []
    for case, answer in golden:
        got = [record.logprob for record in answer.prompt[1:]]
        differences += list(np.abs(np.array(got) - np.array(case["prompt_logprobs"][1:])))
        by_id = dict(answer.records[0].top)
        reference = np.array(case["next_top8_logprobs"])
        ours = np.array([by_id.get(token, answer.records[0].top[-1][1]) for token in case["next_top8_ids"]])
        differences += list(np.abs(ours - reference))
        divergences.append(float(np.sum(np.exp(reference) * (reference - ours))))
    share, divergence = float(np.mean(np.array(differences) <= 2e-2)), float(np.mean(divergences))
    record_property("golden_within_2e-2", share)
    record_property("golden_largest", float(max(differences)))
    record_property("golden_mean_kl", divergence)
    assert share >= 0.97
    assert abs(divergence) <= 5e-4


def test_cuda_greedy_ids_are_those_of_the_reference(
    golden: list[tuple[dict[str, Any], Answer]], record_property: Callable[[str, object], None]
) -> None:
    """Greedy ids agree up to the first step whose two best logits are within 0.25."""
    whole = 0
    for case, answer in golden:
        clear = next((i for i, gap in enumerate(case["top2_gaps"]) if gap <= 0.25), len(case["greedy_ids"]))
        assert answer.tokens[:clear] == case["greedy_ids"][:clear]
        whole += answer.tokens == case["greedy_ids"]
    record_property("golden_whole_continuations", whole)

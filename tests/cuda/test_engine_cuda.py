"""What is special to the CUDA engine: its packs, its weights, and a driver that fails. On the emulator, and on a GPU.

What a request may ask is tested on all backends alike by tests/test_engine_*.py and tests/test_golden_c.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engine_device
import numpy as np
import pytest
from in_process import Answer, InProcessEngine, ask, crc32c
from random_cases import CUDA_CASES, Case, prompts_of
from random_checkpoints import write_checkpoint

from colibrid.errors import ColibridError, EngineError, ModelError
from colibrid.model.convert import convert
from colibrid.model.dummy import write_dummy_pack

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from colibrid.engine.channel import SlotRecord, SlotRequest

Device = engine_device.EmulatedDevice | engine_device.Gpu
DATA = Path(__file__).resolve().parents[1] / "data"
ALL = 20  # ids of the vocabulary: their list is the whole distribution
LENGTHS = (6, 21)
NEW_TOKENS = 4
SMALL = {"prefill_tokens": 64, "prefill_chunk": 16}


@pytest.fixture(params=["emulated", "cuda"])
def device(request: pytest.FixtureRequest) -> Device:
    """The same test on the CPU and on a GPU."""
    name = {"emulated": "emulated_device", "cuda": "gpu_device"}[request.param]
    return request.getfixturevalue(name)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first case as a pack for CUDA. Not to be changed."""
    folder = tmp_path_factory.mktemp("tiny")
    convert(write_checkpoint(CUDA_CASES[0], folder / "src"), folder / "pack", crc32c=crc32c, backend="cuda")
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


def test_dummy_weights_are_those_of_the_cpu(device: Device, tmp_path: Path) -> None:
    """The same seed gives the same model on both: the same tokens and nearly the same log-probabilities."""
    source = write_checkpoint(CUDA_CASES[0], tmp_path / "src")
    write_dummy_pack(source, tmp_path / "cpu", backend="cpu")
    write_dummy_pack(source, tmp_path / "cuda", backend="cuda")
    requests = [ask(prompt, 2, top=ALL) for prompt in _prompts(CUDA_CASES[0])]
    dummy = {"weights": "dummy", "dummy_seed": 5}
    expected = _serve(tmp_path / "cpu", None, requests, **dummy)
    for mine, theirs in zip(_serve(tmp_path / "cuda", device, requests, **dummy), expected, strict=True):
        ours, reference = _centred(mine.records[:1]), _centred(theirs.records[:1])
        assert np.linalg.norm(ours - reference) <= 2e-2 * np.linalg.norm(reference)


@pytest.mark.parametrize("threads", [2, 3, 64])
def test_threads_load_the_same_weights(emulated_device: Device, tiny: Path, threads: int) -> None:
    """Files that several threads read, more than there are files among them, give the same answers to the bit."""
    request = ask(_prompts(CUDA_CASES[0])[0], 2, top=ALL)
    alone, together = (
        _serve(tiny, emulated_device, [request], threads=count, cpus=())[0].records for count in (1, threads)
    )
    assert alone == together


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", ["dense.bin", "expert_0_0.bin", "expert_2_3.bin"])
def test_a_damaged_file_is_refused(
    emulated_device: Device, tiny: Path, tmp_path: Path, name: str, threads: int
) -> None:
    """One flipped bit is found while the file is on its way to the device, and the file is named."""
    pack = shutil.copytree(tiny, tmp_path / "pack")
    data = bytearray((pack / name).read_bytes())
    data[-1] ^= 1
    (pack / name).write_bytes(data)
    with pytest.raises(ModelError, match=rf"{name}.*crc32c.*CHECKSUM"):
        InProcessEngine(pack, slots=1, max_seq_len=32, device=emulated_device, threads=threads, cpus=())


def test_a_weight_that_is_not_finite_is_refused(emulated_device: Device, tiny: Path, tmp_path: Path) -> None:
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
        InProcessEngine(pack, slots=1, max_seq_len=32, device=emulated_device)


@pytest.mark.parametrize("threads", [1, 3])
def test_whatever_fails_while_loading_is_told(
    emulated_device: engine_device.EmulatedDevice, tiny: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """The n-th driver call of an open fails, for every n: the engine is not there, and nothing is left behind."""
    opened = failed = 0
    for number in range(1, 10_000):
        monkeypatch.setattr(emulated_device, "fail_at", number)
        try:
            engine = InProcessEngine(tiny, slots=1, max_seq_len=32, device=emulated_device, threads=threads, cpus=())
        except EngineError as error:
            assert "the driver says CUDA_ERROR_LAUNCH_FAILED" in str(error)
            failed += 1
        else:
            engine.__exit__()
            opened += 1
        assert emulated_device.live() == 0
        if opened:
            break
    assert failed > 50


def test_a_pack_for_the_cpu_is_refused(emulated_device: Device, tmp_path: Path) -> None:
    """The message names the command that makes the right one."""
    convert(write_checkpoint(CUDA_CASES[0], tmp_path / "src"), tmp_path / "pack", crc32c=crc32c, backend="cpu")
    with pytest.raises(ColibridError, match="convert --backend cuda"):
        InProcessEngine(tmp_path / "pack", slots=1, max_seq_len=32, device=emulated_device)

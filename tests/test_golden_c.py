"""The C engine against float32 transformers, in one process, without worker and HTTP.

The bundled model: "correct" on the CPU means every prompt log-probability and the eight likeliest next tokens within
2e-2, and the same greedy ids as long as the two best logits of each step are more than 0.05 apart; on CUDA 97 % of them,
and 0.25. Other numbers of a backend are in engine_backends.py.

Random checkpoints: the engine reports log-probabilities and not logits. A log-softmax is the logits less one number
per position, so over the whole vocabulary logits and log-probabilities are the same once each has its mean removed.
Vocabularies of at most 20 ids make the top-20 list the whole distribution; there the relative error (norm of the
difference over norm of the reference, both without their means) is that of the logits, and stricter, because the mean
adds to the norm of the reference only. The larger vocabulary is compared on its twenty likeliest ids.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from engine_backends import Backend, accelerated, cpu
from in_process import Answer, InProcessEngine, ask, crc32c, is_first
from random_cases import CASES, Case, config_of, prompts_of
from random_checkpoints import write_checkpoint

from colibrid.engine.spec import TierSpec
from colibrid.model.cache import BUNDLED_MODEL
from colibrid.model.convert import convert
from colibrid.model.layout import align

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.engine.channel import SlotRecord

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "hummingbird-13m.golden.json").read_text())["cases"]
TOLERANCE = 2e-2
ALL = 20
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def hummingbird(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model as a pack."""
    path = tmp_path_factory.mktemp("packs") / "hummingbird"
    convert(BUNDLED_MODEL, path, crc32c=crc32c)
    return path


class Answered(NamedTuple):
    """What one backend says to all 39 cases, 32 at a time."""

    backend: Backend
    answers: list[Answer]


@pytest.fixture(scope="module", params=["cpu-fp32", "cpu-fp16", "cuda-fp16"])
def answered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """The emulator is left out: it would take hours."""
    name, kv = request.param.split("-")
    backend = cpu() if name == "cpu" else accelerated("cuda", request.getfixturevalue("gpu_device"))
    pack = tmp_path_factory.mktemp(request.param) / "hummingbird"
    convert(BUNDLED_MODEL, pack, crc32c=crc32c, backend=backend.layout)
    with backend.open(pack, slots=32, kv=kv, max_seq_len=256) as engine:
        answers = engine.run([ask(case["prompt_ids"], len(case["greedy_ids"])) for case in GOLDEN])
        stats = engine.stats()
        assert stats.allocations_after_open == 0
        assert stats.expert_relaunches == 0
    return Answered(backend, answers)


def test_there_are_39_cases() -> None:
    """The golden file is whole."""
    assert len(GOLDEN) == 39


def test_logprobs_are_those_of_the_reference(
    answered: Answered, record_property: Callable[[str, object], None]
) -> None:
    """Prompt and top-8 log-probabilities lie within 2e-2: all on the CPU, 97 % on CUDA; their mean KL is at most 5e-4."""
    differences: list[float] = []
    divergences: list[float] = []
    for case, answer in zip(GOLDEN, answered.answers, strict=True):
        assert is_first(answer.prompt[0])
        got = [record.logprob for record in answer.prompt[1:]]
        differences += list(np.abs(np.array(got) - np.array(case["prompt_logprobs"][1:])))
        top = answer.records[0].top
        reference = np.array(case["next_top8_logprobs"])
        differences += list(np.abs(np.array([logprob for _, logprob in top]) - reference))
        by_id = dict(top)
        ours = np.array([by_id.get(token, top[-1][1]) for token in case["next_top8_ids"]])
        assert np.abs(ours - reference).max() <= 2 * TOLERANCE or answered.backend.within < 1
        divergences.append(float(np.sum(np.exp(reference) * (reference - ours))))
    share, divergence = float(np.mean(np.array(differences) <= TOLERANCE)), float(np.mean(divergences))
    record_property("figure", f"golden {answered.backend.name}: {100 * share:.2f} % within {TOLERANCE}, largest "
                    f"{max(differences):.4f}, mean KL {divergence:.1e}")  # fmt: skip
    assert share >= answered.backend.within
    assert abs(divergence) <= 5e-4


def test_greedy_ids_are_those_of_the_reference(
    answered: Answered, record_property: Callable[[str, object], None]
) -> None:
    """Greedy ids agree while the two best logits are clearly apart, in at least 33 cases to the end."""
    whole = 0
    for case, answer in zip(GOLDEN, answered.answers, strict=True):
        close = (i for i, gap in enumerate(case["top2_gaps"]) if gap <= answered.backend.clear_gap)
        clear = next(close, len(case["greedy_ids"]))
        assert answer.tokens[:clear] == case["greedy_ids"][:clear]
        whole += answer.tokens == case["greedy_ids"]
    record_property("figure", f"golden {answered.backend.name}: {whole} of {len(GOLDEN)} continuations whole")
    assert whole >= 33


# ------------------------------------------------------------------ random checkpoints


def test_threads_and_slots_do_not_change_a_bit(hummingbird: Path) -> None:
    """Every record, prompt's and generated, is the same with one, two and three threads, alone and in company."""
    requests = [ask(case["prompt_ids"], 12, prompt_top=3) for case in GOLDEN[::4]]
    got = []
    for threads, slots in ((1, 1), (1, 8), (2, 8), (3, 3)):
        with InProcessEngine(hummingbird, slots=slots, max_seq_len=256, threads=threads, cpus=()) as engine:
            answers = engine.run(requests)
        got.append([(repr(answer.prompt[1:]), repr(answer.records)) for answer in answers])
    assert got[1:] == got[:1] * 3


def _logits(records: list[SlotRecord], vocabulary: int) -> np.ndarray[Any, Any]:
    """(positions, vocabulary): log-probabilities without their mean, from lists that hold the whole vocabulary."""
    rows = np.full((len(records), vocabulary), np.nan)
    for row, record in zip(rows, records, strict=True):
        for token, logprob in record.top:
            row[token] = logprob
    return rows - rows.mean(axis=1, keepdims=True)


def _convert(case: Case, folder: Path, dtype: Any = "auto") -> Path:
    convert(write_checkpoint(case, folder / "src"), folder / "pack", dtype, crc32c=crc32c)
    return folder / "pack"


def _golden_logits(case: Case) -> list[np.ndarray[Any, Any]]:
    return [np.array(rows) for rows in json.loads((DATA / "random" / f"{case.name}.json").read_text())["logits"]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_random_checkpoints_compute_the_reference_logits(case: Case, tmp_path: Path) -> None:
    """Relative error of logits at most 1e-4 with fp32 weights and 1e-3 with 16-bit weights, for every position."""
    bound = 1e-4 if case.precision == "fp32" else 1e-3
    vocabulary = config_of(case)["vocab_size"]
    prompts = prompts_of(case)
    with InProcessEngine(_convert(case, tmp_path), slots=2, max_seq_len=128) as engine:
        answers = engine.run([ask(prompt, 1, top=ALL, prompt_top=ALL) for prompt in prompts])
    for answer, expected in zip(answers, _golden_logits(case), strict=True):
        records = [*answer.prompt[1:], answer.records[0]]
        if vocabulary <= ALL:
            centred = expected - expected.mean(axis=1, keepdims=True)
            error = np.linalg.norm(_logits(records, vocabulary) - centred) / np.linalg.norm(centred)
            assert error <= bound
        else:
            shifted = expected - expected.max(axis=1, keepdims=True)
            logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
            for record, row in zip(records, logprobs, strict=True):
                assert len(record.top) == ALL
                got = np.array([logprob for _, logprob in record.top])
                same = np.array([row[token] for token, _ in record.top])
                assert np.linalg.norm(got - same) <= bound * np.linalg.norm(same)
                assert got[-1] >= np.sort(row)[-ALL] - bound * abs(got[-1])


def test_chunks_of_prefill_do_not_change_the_logits(tmp_path: Path) -> None:
    """A prompt cut into chunks of 16 tokens gives the reference's logits as well."""
    case = BY_NAME["qwen-dense-first-renormalised"]
    with InProcessEngine(_convert(case, tmp_path), slots=2, max_seq_len=128, chunk=16) as engine:
        answers = engine.run([ask(prompt, 1, top=ALL, prompt_top=ALL) for prompt in prompts_of(case)])
    for answer, expected in zip(answers, _golden_logits(case), strict=True):
        centred = expected - expected.mean(axis=1, keepdims=True)
        got = _logits([*answer.prompt[1:], answer.records[0]], 20)
        assert np.linalg.norm(got - centred) <= 1e-4 * np.linalg.norm(centred)


def test_decode_computes_what_prefill_computes(tmp_path: Path) -> None:
    """Generated tokens' distributions are those that the reference gives when they are part of the prompt."""
    case = BY_NAME["mixtral-gqa-sharded"]
    prompt = prompts_of(case)[1]
    expected = _golden_logits(case)[1]
    forced = [ask(prompt[:40], 30, top=ALL, prompt_top=ALL, bias=[])]
    with InProcessEngine(_convert(case, tmp_path), slots=2, max_seq_len=128) as engine:
        (free,) = engine.run(forced)
        again = [*prompt[:40], *free.tokens]
        (whole,) = engine.run([ask(again, 0, prompt_top=ALL)])
    decoded = _logits(free.records, 20)
    prefilled = _logits(whole.prompt[40:], 20)
    assert np.linalg.norm(decoded - prefilled) <= 1e-4 * np.linalg.norm(prefilled)
    first = expected[39] - expected[39].mean()
    assert np.linalg.norm(decoded[0] - first) <= 1e-4 * np.linalg.norm(first)


# ------------------------------------------------------------------ shared expert files


def test_two_layers_naming_one_expert_file_share_one_copy(tmp_path: Path) -> None:
    """Weights take the bytes of one expert less, and every output is bit-identical to a model with two equal files."""
    case = BY_NAME["qwen-tied-gqa"]
    copies = _convert(case, tmp_path)
    described = json.loads((copies / "colibri.json").read_text())
    files = {file["name"]: file for file in described["files"]}
    shutil.copyfile(copies / "expert_0_1.bin", copies / "expert_1_2.bin")
    files["expert_1_2.bin"].update({key: files["expert_0_1.bin"][key] for key in ("sha256", "crc32c")})
    (copies / "colibri.json").write_text(json.dumps(described))
    shared = shutil.copytree(copies, tmp_path / "shared")
    described["layers"][1]["expert_files"][2] = "expert_0_1.bin"
    described["files"].remove(files["expert_1_2.bin"])
    (shared / "colibri.json").write_text(json.dumps(described))
    (shared / "expert_1_2.bin").unlink()
    answers, held, read = [], [], []
    for pack in (copies, shared):
        small_pages = TierSpec(bytes=0, page_bytes=4096, huge_pages="off")
        with InProcessEngine(pack, slots=2, max_seq_len=128, tier_weights=small_pages) as engine:
            answers.append(engine.run([ask(prompt, 20, top=ALL, prompt_top=ALL) for prompt in prompts_of(case)]))
            held.append(engine.stats().weights_bytes)
            read.append(engine.stats().loaded_bytes)
    for one, other in zip(*answers, strict=True):
        assert (one.records, one.prompt[1:]) == (other.records, other.prompt[1:])
        assert one.usage == other.usage
    file_bytes = files["expert_0_1.bin"]["bytes"]
    assert read[0] - read[1] == file_bytes
    assert held[0] - held[1] == align(file_bytes, 4096)

"""AWQ and GPTQ checkpoints through the engine: it says what the numbers of the checkpoint say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from in_process import InProcessEngine, ask, crc32c
from int4_checkpoints import CASES, KINDS, Int4, write_int4

from colibrid.model.convert import convert
from colibrid.model.forward import Forward
from colibrid.model.pack import open_pack
from colibrid.model.pack_model import PackModel

if TYPE_CHECKING:
    from pathlib import Path

    from random_cases import Case

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2, 8], [1, 6, 1, 8]]
CODED = 0.15  # of a log-probability: the CPU rounds inputs of int4 to 8 bits, and a router may then choose otherwise


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_prompts_are_scored_by_the_checkpoint_s_numbers(case: Case, kind: Int4, tmp_path: Path) -> None:
    """Log-probabilities of texts, against a float32 forward pass over exactly these numbers."""
    write_int4(case, kind, tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "pack", crc32c=crc32c)
    forward = Forward(PackModel(open_pack(tmp_path / "pack")), TEXTS)
    forward.run()
    wanted = np.concatenate([block for _, block in forward.log_softmax()])
    with InProcessEngine(tmp_path / "pack") as engine:
        answers = engine.run([ask(text, 0) for text in TEXTS])
    errors = []
    for (begin, _), text, answer in zip(forward.bounds, TEXTS, answers, strict=True):
        for place, (token, record) in enumerate(zip(text[1:], answer.prompt[1:], strict=True)):
            errors.append(abs(record.logprob - wanted[begin + place, token]))
    assert np.median(errors) < CODED / 5
    assert np.mean(errors) < CODED


def test_the_tolerance_can_fail(tmp_path: Path) -> None:
    """Numbers in another order are far outside it."""
    write_int4(CASES[1], KINDS[0], tmp_path / "src")
    convert(tmp_path / "src", tmp_path / "pack", crc32c=crc32c)
    forward = Forward(PackModel(open_pack(tmp_path / "pack")), [TEXTS[0][::-1]])
    forward.run()
    other = np.concatenate([block for _, block in forward.log_softmax()])
    with InProcessEngine(tmp_path / "pack") as engine:
        (answer,) = engine.run([ask(TEXTS[0], 0)])
    pairs = zip(TEXTS[0][1:], answer.prompt[1:], strict=True)
    errors = [abs(record.logprob - other[place, token]) for place, (token, record) in enumerate(pairs)]
    assert np.mean(errors) > 2 * CODED

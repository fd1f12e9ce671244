"""Loading all text files of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import structlog

import colibrid
from colibrid.errors import ModelError
from colibrid.text.model_text import ModelText, SamplingDefaults

MODEL_DIR = Path(colibrid.__file__).parent / "models" / "hummingbird-13m"


def test_bundled_model() -> None:
    """The bundled model has a tokenizer, a template and its sampling defaults."""
    text = ModelText.load(
        tokenizer=MODEL_DIR / "tokenizer.json",
        tokenizer_config=MODEL_DIR / "tokenizer_config.json",
        generation_config=MODEL_DIR / "generation_config.json",
        eos_token_ids=(4093, 4091),
    )
    assert text.template is not None
    assert (text.sampling.temperature, text.sampling.top_p) == (0.7, 0.9)
    assert text.eos_token_ids == (4093, 4091)


def test_nothing_is_needed() -> None:
    """A model without any text file can be loaded."""
    text = ModelText.load(tokenizer=None)
    assert text.template is None
    assert text.sampling == SamplingDefaults()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1e-300},
        {"top_k": -2},
        {"top_k": 1 << 31},
        {"min_p": 2},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1000},
        {"top_p": "a"},
    ],
)
def test_bad_defaults_are_named(tmp_path: Path, values: dict[str, Any]) -> None:
    """A generation_config.json with values out of range is a ModelError that names the file."""
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        ModelText.load(tokenizer=None, generation_config=path)


def test_a_tokenizer_that_cannot_be_constrained_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where llguidance refuses the vocabulary, structured output is all that is missing, and the log says why."""

    def refuse(*_given: object) -> None:
        raise RuntimeError("no such luck")

    files: Any = {"tokenizer": MODEL_DIR / "tokenizer.json", "eos_token_ids": (4093,)}
    assert ModelText.load(**files).vocabulary is not None
    monkeypatch.setattr("colibrid.text.model_text.Vocabulary", refuse)
    with structlog.testing.capture_logs() as logs:
        assert ModelText.load(**files).vocabulary is None
    assert logs == [{"event": "structured_output_off", "log_level": "warning", "reason": "no such luck"}]
    assert ModelText.load(tokenizer=None).vocabulary is None

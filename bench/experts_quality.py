"""What fewer, more or limited experts do to the bundled model's answers; deterministic, no clock.

    python bench/experts_quality.py [--questions N] [--texts N] [--divergence-texts N] > table.md

Exact match    greedy answers to the questions of hummingbird-13m.eval.jsonl, all policies mixed in one batch
Loss           mean negative log-likelihood of a token of hummingbird-13m.text.jsonl, natural logarithm
KL             of the model with its own number of experts from each variant, mean over the positions that loss counts,
               whole vocabulary: from the float32 pass of colibrid/model/forward.py, over the first texts
Experts        a token of an MoE layer, as the engine counted them (usage.experts)

The rows with max_tokens_per_expert run alone, 32 requests at a time in the order of the file: there, neighbours matter. So
they do for KL, where so many texts begin at one step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import msgspec  # noqa: E402 - found through the path above
import numpy as np  # noqa: E402 - found through the path above
from in_process import Answer, InProcessEngine, ask, crc32c  # noqa: E402

from colibrid.engine.abi import RequestFlag  # noqa: E402
from colibrid.model.cache import BUNDLED_MODEL  # noqa: E402
from colibrid.model.convert import convert  # noqa: E402
from colibrid.model.divergence import Text, divergences  # noqa: E402
from colibrid.model.forward import Routing  # noqa: E402
from colibrid.model.pack import open_pack  # noqa: E402
from colibrid.model.pack_model import PackModel  # noqa: E402
from colibrid.model.steps import TokenLimit  # noqa: E402
from colibrid.text.model_text import ModelText  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.engine.spec import EngineSpec

DATA = ROOT / "tests" / "data"
SLOTS = 32
ANSWER_TOKENS = 48
MOST = 4  # experts a token that are allowed by name; the model's own are 2


@dataclass(frozen=True)
class Variant:
    """One row of the table."""

    per_token: int = 0  # 0: the model's own
    threshold: float = 0.0
    limit: int = 0  # max_tokens_per_expert

    def __str__(self) -> str:
        parts = [f"per_token {self.per_token}" if self.per_token else ""]
        parts += [f"threshold {self.threshold}" if self.threshold else ""]
        parts += [f"max_tokens_per_expert {self.limit}" if self.limit else ""]
        return ", ".join(filter(None, parts)) or "the model's own: per_token 2"


VARIANTS = (
    Variant(), Variant(per_token=1), Variant(per_token=3), Variant(per_token=4),
    *(Variant(threshold=share) for share in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9)),
    *(Variant(limit=tokens) for tokens in (256, 192, 128, 64)),
)  # fmt: skip


@dataclass
class Row:
    """What was found of a variant."""

    exact: float
    loss: float
    experts: float
    dropped: float
    divergence: float = 0.0


def load_text() -> ModelText:
    """The bundled model's tokenizer and template."""
    return ModelText.load(
        tokenizer=BUNDLED_MODEL / "tokenizer.json",
        tokenizer_config=BUNDLED_MODEL / "tokenizer_config.json",
        generation_config=BUNDLED_MODEL / "generation_config.json",
        eos_token_ids=tuple(json.loads((BUNDLED_MODEL / "generation_config.json").read_text())["eos_token_id"]),
    )


def lines(name: str, count: int) -> list[Any]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()[:count]]


class Trial:
    """Prompts of both files, and how answers are judged."""

    def __init__(self, text: ModelText, questions: int, texts: int) -> None:
        self.text = text
        self.questions = lines("hummingbird-13m.eval.jsonl", questions)
        assert text.template is not None, "the bundled model has a chat template"
        self.prompts = [
            text.tokenizer.encode(
                text.template.render(entry["messages"], add_generation_prompt=True), add_special_tokens=False
            )
            for entry in self.questions
        ]
        self.texts = [
            text.tokenizer.encode(entry["text"], add_special_tokens=False)
            for entry in lines("hummingbird-13m.text.jsonl", texts)
        ]

    def requests(self, variant: Variant, layers: int) -> list[Any]:
        """Questions, then texts."""
        policy = [(variant.per_token, variant.threshold)] * layers
        stops = self.text.eos_token_ids
        asked = [ask(prompt, ANSWER_TOKENS, policy=policy, stop_ids=stops, top=0) for prompt in self.prompts]
        asked = [msgspec.structs.replace(request, flags=RequestFlag(0)) for request in asked]
        return asked + [ask(ids, 0, policy=policy) for ids in self.texts]

    def judge(self, answers: Sequence[Answer], layers: int) -> Row:
        """Of the answers to `requests`."""
        asked = answers[: len(self.prompts)]
        right = sum(
            self._said(answer) == entry["answer"].strip() for answer, entry in zip(asked, self.questions, strict=True)
        )
        scores = [record.logprob for answer in answers[len(asked) :] for record in answer.prompt[1:]]
        used = [answer.usage for answer in answers]
        assert all(usage is not None for usage in used), "every request ended"
        rows = [*map(len, self.prompts), *map(len, self.texts)]
        tokens = sum(count + max(len(answer.tokens) - 1, 0) for count, answer in zip(rows, answers, strict=True))
        assignments = sum(usage.assignments for usage in used if usage)
        dropped = sum(usage.dropped for usage in used if usage)
        return Row(
            exact=right / len(asked),
            loss=-float(np.mean(scores)),
            experts=assignments / tokens / layers,
            dropped=dropped / (assignments + dropped),
        )

    def _said(self, answer: Answer) -> str:
        ids = [token for token in answer.tokens if token not in self.text.eos_token_ids]
        return self.text.tokenizer.decode(ids, skip_special_tokens=False).strip()

    def divergence(self, pack: Path, spec: EngineSpec, texts: int) -> tuple[float, ...]:
        """Of the model itself from each variant; spec: of the engine that the others' figures are from."""

        def routing(variant: Variant) -> Routing:
            limit = TokenLimit(variant.limit, spec.slots, spec.prefill_chunk, spec.prefill_tokens)
            return Routing(variant.per_token, variant.threshold, limit if variant.limit else None)

        read = [Text(ids) for ids in self.texts[:texts]]
        return divergences(PackModel(open_pack(pack)), read, list(map(routing, VARIANTS))).kl


def measure(questions: int, texts: int, divergence_texts: int) -> list[tuple[Variant, Row]]:
    """All rows."""
    trial = Trial(load_text(), questions, texts)
    free = [variant for variant in VARIANTS if not variant.limit]
    rows: dict[Variant, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        pack = Path(folder) / "pack"
        convert(BUNDLED_MODEL, pack, crc32c=crc32c, backend="cpu")
        options: dict[str, Any] = {"slots": SLOTS, "max_seq_len": 1024, "experts_most": MOST}
        with InProcessEngine(pack, **options) as engine:
            layers, spec = len(engine.manifest.layers), engine.spec
            requests = [request for variant in free for request in trial.requests(variant, layers)]
            answers = engine.run(requests)
            size = len(requests) // len(free)
            for number, variant in enumerate(free):
                rows[variant] = trial.judge(answers[number * size : (number + 1) * size], layers)
        for variant in VARIANTS:
            if variant.limit:
                with InProcessEngine(pack, max_tokens_per_expert=variant.limit, **options) as engine:
                    rows[variant] = trial.judge(engine.run(trial.requests(variant, layers)), layers)
        for variant, value in zip(VARIANTS, trial.divergence(pack, spec, divergence_texts), strict=True):
            rows[variant].divergence = value
    return [(variant, rows[variant]) for variant in VARIANTS]


def table(rows: Sequence[tuple[Variant, Row]]) -> str:
    """In Markdown."""
    found = ["| experts | exact match | loss | KL | experts a token | dropped |", "|---|---|---|---|---|---|"]
    for variant, row in rows:
        dropped = f"{100 * row.dropped:.1f} %" if variant.limit else ""
        found.append(
            f"| {variant} | {100 * row.exact:.1f} % | {row.loss:.4f} | {row.divergence:.4f} | {row.experts:.2f} | {dropped} |"
        )
    return "\n".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description="Quality of the bundled model by expert policy.")
    parser.add_argument("--questions", type=int, default=1200)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--divergence-texts", type=int, default=30)
    options = parser.parse_args()
    print(table(measure(options.questions, options.texts, options.divergence_texts)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

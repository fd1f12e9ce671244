"""One pack under `colibrid verify`: what is measured, in which order, and against which limits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from colibrid.cli.engine_answers import answers
from colibrid.cli.progress import Progress
from colibrid.cli.verify_report import Exact, Verified
from colibrid.config.sizes import format_bytes
from colibrid.model.compare import Reference
from colibrid.model.footprint import format_names
from colibrid.model.golden import golden_distance, make_golden, read_golden, write_golden
from colibrid.model.pack import open_pack
from colibrid.model.pack_model import PackModel
from colibrid.model.verify import damages
from colibrid.paths import user_path
from colibrid.text.lines import load_model_text, prompt_ids, token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.config.settings import Settings
    from colibrid.engine.library import Library
    from colibrid.model.forward import Weights
    from colibrid.text.lines import Line
    from colibrid.text.model_text import ModelText

MADE_TEXTS = 4  # of token ids by rule, where no texts are given
MADE_TOKENS = 48
LONGEST = 2048  # tokens of one text
ANSWER_TOKENS = 256
MAX_KL = 0.5  # nats, where no limit is given


class Trial:
    """Owns what is found of one pack: `found`. ModelError: it cannot be opened."""

    def __init__(self, name: str, lines: Sequence[Line] | None, tokens: int, *, quiet: bool) -> None:
        self._lines = lines
        self._tokens = tokens
        self._quiet = quiet
        self._pack = open_pack(user_path(name))
        manifest = self._pack.manifest
        self.found = Verified(
            pack=name,
            name=manifest.name,
            formats=tuple(format_names(manifest)),
            bytes=sum(file.bytes for file in manifest.files),
            damages=(),
        )

    def check_bytes(self) -> bool:
        """Whether every file is what colibri.json says."""
        with _Bar("checking", None, quiet=self._quiet) as bar:
            self._note(damages=tuple(damages(self._pack, bar)))
        return not self.found.damages

    def compare(self, against: str, source: Weights, read: Reference | None, *, store: bool) -> Reference:
        """Predictions against those of the source, of which `store` keeps some. `read`: the source as an earlier trial
        returned it; it is read again if the texts are others.
        """
        texts = self._texts()
        if store:
            write_golden(self._pack.path, make_golden(Path(against).resolve().name, source, texts))
        reference = read
        if reference is None or reference.texts != texts:
            with _Bar("reading the source", "layers", quiet=self._quiet) as bar:
                reference = Reference(source, texts, lambda done, total: bar(done, total, ""))
        with _Bar("comparing", "layers", quiet=self._quiet) as bar:
            found = reference.distance(PackModel(self._pack), lambda done, total: bar(done, total, ""))
        self._note(against=against, distance=found)
        return reference

    def compare_golden(self) -> None:
        """Against the predictions kept in the pack, if there are any."""
        golden = read_golden(self._pack.path)
        if golden is not None:
            self._note(golden=golden_distance(golden, PackModel(self._pack)))

    def ask(self, questions: Sequence[Line], settings: Settings, library: Library) -> None:
        """The engine's greedy answers, and its own loss on the texts if there are any."""
        manifest = self._pack.manifest
        text = load_model_text(self._pack.path, manifest.text)
        try:
            prompts = [prompt_ids(line, text) for line in questions]
            texts = [] if self._lines is None else [ids for ids in self._ids(text) if len(ids) > 1]
            with _Bar("answering", "requests", quiet=self._quiet) as bar:
                said = answers(
                    settings,
                    self._pack,
                    library,
                    prompts,
                    texts,
                    max_tokens=ANSWER_TOKENS,
                    stop=manifest.text.eos_token_ids,
                    progress=lambda done, total: bar(done, total, ""),
                )
            right = sum(
                text.tokenizer.decode(tokens, skip_special_tokens=False).strip() == (line.answer or "").strip()
                for tokens, line in zip(said.tokens, questions, strict=True)
            )
        finally:
            text.tokenizer.close()
        scores = [score for each in said.logprobs for score in each]
        self._note(exact=Exact(right, len(questions)), engine_loss=-sum(scores) / len(scores) if scores else None)

    def judge(self, max_kl: float | None, min_exact: float | None) -> None:
        """Notes limits that were not kept, or could not be looked at."""
        failures = []
        near = self.found.distance or self.found.golden
        if near is None and max_kl is not None:
            failures.append(
                "--max-kl is given, and nothing to measure it by: give --against, or keep predictions by --store"
            )
        max_kl = MAX_KL if max_kl is None else max_kl
        if near is not None and not near.kl <= max_kl:
            failures.append(f"divergence {near.kl:.5f}, at most {max_kl:g} allowed by --max-kl")
        exact = self.found.exact
        if exact is not None and min_exact is not None and 100 * exact.right < min_exact * exact.asked:
            failures.append(f"{100 * exact.right / exact.asked:.1f} % right, --min-exact asks for {min_exact:g} %")
        self._note(failures=tuple(failures))

    def _note(self, **changes: object) -> None:
        self.found = msgspec.structs.replace(self.found, **changes)

    def _texts(self) -> list[list[int]]:
        if self._lines is None:
            size, most = self._sizes()
            length = min(MADE_TOKENS, most)
            return [
                [(7919 * (text * length + at) + 31 * at * at) % size for at in range(length)]
                for text in range(MADE_TEXTS)
            ]
        text = load_model_text(self._pack.path, self._pack.manifest.text)
        try:
            return self._ids(text)
        finally:
            text.tokenizer.close()

    def _ids(self, text: ModelText) -> list[list[int]]:
        return token_ids(self._lines or (), text, min(LONGEST, self._sizes()[1]), self._tokens)

    def _sizes(self) -> tuple[int, int]:
        hyper = self._pack.manifest.hyperparameters
        return hyper.vocab_size, hyper.max_positions


class _Bar:
    """A progress bar, or none."""

    def __init__(self, label: str, what: str | None, *, quiet: bool) -> None:
        show = format_bytes if what is None else lambda count: f"{count} {what}"
        self._bar = None if quiet else Progress(label, show=show)

    def __call__(self, done: int, total: int, what: str) -> None:
        if self._bar is not None:
            self._bar(done, total, what)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

"""Random histories of many sequences at once: each gives the text that it would give alone, whatever the others do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colibrid.text.detokenizer import detokenizer
from colibrid.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from colibrid.text.detokenizer import Detokenizer

REPLACE = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
FALLBACK, FUSE = {"type": "ByteFallback"}, {"type": "Fuse"}
DECODERS = {
    "byte-level": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "byte fallback": {
        "type": "Sequence",
        "decoders": [REPLACE, FALLBACK, FUSE, {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
    },
    "window": {"type": "WordPiece", "prefix": "##", "cleanup": True},
}
BYTES = [f"<0x{byte:02X}>" for byte in (0x41, 0xE6, 0x97, 0xA5, 0xF0, 0x9F, 0x98, 0x80, 0xFF)]
PIECES = [
    "<s>",
    "</s>",
    "<unk>",
    *BYTES,
    "\u2581the",
    "the",
    "Oslo",
    "日",
    "##ing",
    ".",
    "n't",
    "\u0120the",
    "\u00e6",
    "\u0139",
]


def tokenizer_with(decoder: object) -> Tokenizer:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": index, "content": content, "special": True, **flags} for index, content in enumerate(PIECES[:3])]
    model = {"type": "WordLevel", "vocab": {piece: index for index, piece in enumerate(PIECES)}, "unk_token": "<unk>"}
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return Tokenizer(json.dumps({"version": "1.0", **empty, "added_tokens": added, "decoder": decoder, "model": model}))


TOKENIZERS = {name: tokenizer_with(decoder) for name, decoder in DECODERS.items()}


class Sequence:
    """One sequence, what it was given and what it gave."""

    def __init__(self, name: str, *, skip: bool) -> None:
        self.tokenizer = TOKENIZERS[name]
        self.skip = skip
        self.machine: Detokenizer = detokenizer(self.tokenizer, skip_special_tokens=skip)
        self.ids: list[int] = []
        self.text = ""
        self.ended = False

    @property
    def whole(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=self.skip)


class DetokenizerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sequences: list[Sequence] = []

    def pick(self, data: st.DataObject) -> Sequence:
        found = data.draw(st.sampled_from([one for one in self.sequences if not one.ended]))
        assert isinstance(found, Sequence)
        return found

    def any_open(self) -> bool:
        return any(not one.ended for one in self.sequences)

    @rule(name=st.sampled_from(sorted(DECODERS)), skip=st.booleans())
    def begin(self, name: str, skip: bool) -> None:
        self.sequences.append(Sequence(name, skip=skip))

    @precondition(lambda self: self.any_open())
    @rule(data=st.data(), ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=6))
    def push(self, data: st.DataObject, ids: list[int]) -> None:
        one = self.pick(data)
        for token in ids:
            one.ids.append(token)
            one.text += one.machine.push(token)

    @precondition(lambda self: self.any_open())
    @rule(data=st.data(), ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=6))
    def push_all(self, data: st.DataObject, ids: list[int]) -> None:
        one = self.pick(data)
        one.ids += ids
        one.text += one.machine.push_all(ids)

    @precondition(lambda self: self.any_open())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        one = self.pick(data)
        one.text += one.machine.flush()
        one.ended = True
        assert one.text == one.whole

    @invariant()
    def what_was_given_stays_true(self) -> None:
        """Nothing that went out is taken back by what comes later."""
        for one in self.sequences:
            assert one.whole.startswith(one.text)

    def teardown(self) -> None:
        for one in self.sequences:
            if not one.ended:
                assert one.text + one.machine.flush() == one.whole


DetokenizerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestDetokenizerMachine = DetokenizerMachine.TestCase

"""Everything about one model that turns text into ids and back, loaded together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
import structlog

from colibrid.errors import ModelError
from colibrid.text.guard import SpecialGuard
from colibrid.text.structured_masks import Vocabulary
from colibrid.text.template import ChatTemplate, load_tokenizer_config
from colibrid.text.tokenizer import IdsOnly, Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from colibrid.config.settings import SamplingSettings

Number = TypeVar("Number", int, float)


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Sampling values of generation_config.json: they apply where a request names none, as in vLLM."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def under(self, settings: SamplingSettings) -> SamplingDefaults:
        """The same where `settings` leave it to the model."""
        given = {name: value for name in self.__struct_fields__ if (value := getattr(settings, name)) is not None}
        return msgspec.structs.replace(self, **given)


def first_given(asked: Number | None, model: Number | None, default: Number) -> Number:
    """What the request says, else what the model's file says, else the default."""
    if asked is not None:
        return asked
    return default if model is None else model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """One model's tokenizer, chat template and defaults."""

    tokenizer: Tokenizer
    guard: SpecialGuard
    template: ChatTemplate | None  # none: the model has no chat template
    sampling: SamplingDefaults
    eos_token_ids: tuple[int, ...]
    tool_parser: str | None = None  # named in the pack
    reasoning_parser: str | None = None
    vocabulary: Vocabulary | None = None  # for structured output; none: the tokenizer cannot be used for it

    @classmethod
    def load(
        cls,
        *,
        tokenizer: Path | None,
        tokenizer_config: Path | None = None,
        chat_template: Path | None = None,
        generation_config: Path | None = None,
        eos_token_ids: tuple[int, ...] = (),
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
    ) -> ModelText:
        """Reads the files. Without a tokenizer only token ids can be served. Raises ModelError naming the file."""
        loaded = IdsOnly() if tokenizer is None else Tokenizer.load(tokenizer)
        return cls(
            tokenizer=loaded,
            guard=SpecialGuard(loaded.special_strings, loaded.mark),
            template=ChatTemplate.load(load_tokenizer_config(tokenizer_config), chat_template),
            sampling=load_sampling(generation_config),
            eos_token_ids=eos_token_ids,
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            vocabulary=None if tokenizer is None else _load_vocabulary(loaded, eos_token_ids),
        )


class TextFileNames(Protocol):
    """Names of a model's text files in its folder, None where there is no such file: TextFiles of a manifest."""

    @property
    def tokenizer(self) -> str | None: ...

    @property
    def tokenizer_config(self) -> str | None: ...

    @property
    def chat_template(self) -> str | None: ...

    @property
    def generation_config(self) -> str | None: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def tool_parser(self) -> str | None: ...

    @property
    def reasoning_parser(self) -> str | None: ...


def load_text(folder: Path, files: TextFileNames) -> ModelText:
    """Reads the named files of a pack or a checkpoint. Raises ModelError naming the file."""

    def place(name: str | None) -> Path | None:
        return None if name is None else folder / name

    return ModelText.load(
        tokenizer=place(files.tokenizer),
        tokenizer_config=place(files.tokenizer_config),
        chat_template=place(files.chat_template),
        generation_config=place(files.generation_config),
        eos_token_ids=files.eos_token_ids,
        tool_parser=files.tool_parser,
        reasoning_parser=files.reasoning_parser,
    )


def _load_vocabulary(tokenizer: Tokenizer, eos_token_ids: tuple[int, ...]) -> Vocabulary | None:
    try:
        return Vocabulary(tokenizer, eos_token_ids)
    except Exception as error:  # noqa: BLE001 - whatever llguidance says of it, all else can be served
        structlog.get_logger().warning("structured_output_off", reason=str(error))
        return None


def load_sampling(path: Path | None) -> SamplingDefaults:
    """What a generation_config.json says; nothing without one. ModelError names the file."""
    if path is None:
        return SamplingDefaults()
    try:
        found = msgspec.json.decode(path.read_bytes(), type=SamplingDefaults)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path} cannot be used: {error}; correct it or remove it") from error
    checks = {
        "temperature": found.temperature is None or 0 <= found.temperature <= 2,
        "top_p": found.top_p is None or 1e-30 <= found.top_p <= 1,
        "top_k": found.top_k is None or -1 <= found.top_k < 1 << 31,
        "min_p": found.min_p is None or 0 <= found.min_p <= 1,
        "repetition_penalty": found.repetition_penalty is None or 0.01 <= found.repetition_penalty <= 100,
    }
    wrong = [name for name, good in checks.items() if not good]
    if wrong:
        raise ModelError(f"{path}: {', '.join(wrong)} out of range; correct the file or remove the value")
    return found

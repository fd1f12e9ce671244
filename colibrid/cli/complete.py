"""`colibrid complete [MODEL] PROMPT`: one generation, without a server."""

from __future__ import annotations

import asyncio
import secrets
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from colibrid.batch.request import GenerateRequest, Sampling
from colibrid.cli.assembly import assemble
from colibrid.cli.device import settled
from colibrid.cli.models import resolve_model
from colibrid.cli.numbers import NumberRange
from colibrid.cli.options import engine_options, load_settings, quietly, use_plugins
from colibrid.config.environment import read_environment
from colibrid.engine.library import Library
from colibrid.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from colibrid.batch.interfaces import EngineInfo, GenerationService
    from colibrid.config.settings import Settings
    from colibrid.model.cache import Resolved
    from colibrid.text.model_text import ModelText


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    prompt: str
    chat: bool
    max_tokens: int | None
    temperature: float | None
    seed: int | None


@click.command(short_help="Continue a prompt once, without a server.")
@click.argument("words", metavar="[MODEL] PROMPT", nargs=-1, required=True)
@engine_options
@click.option("--chat", is_flag=True, help="PROMPT is a user's message: use the model's chat template.")
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="Most tokens to generate.")
@click.option("--temperature", type=NumberRange(0, 2), metavar="T", help="0: always the likeliest token.")
@click.option("--seed", type=click.IntRange(0, (1 << 64) - 1), metavar="N", help="Equal seeds give equal texts.")
def complete(
    words: tuple[str, ...],
    config_file: str | None,
    sets: tuple[str, ...],
    chat: bool,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    **given: str | None,
) -> None:
    """Continue PROMPT and print the text as it comes. PROMPT - reads standard input. MODEL is as in serve."""
    if len(words) > 2:
        raise click.UsageError("expected [MODEL] PROMPT; put the prompt into quotes")
    prompt = sys.stdin.read() if words[-1] == "-" else words[-1]
    environment = read_environment()
    loaded = load_settings(environment, config_file, ("batch.slots=1", *sets), given)
    use_plugins(loaded)
    library = Library()
    model = words[0] if len(words) == 2 else None
    settings = settled(quietly(loaded), model, environment, library)
    resolved = resolve_model(model, settings, environment, library)
    question = _Question(prompt=prompt, chat=chat, max_tokens=max_tokens, temperature=temperature, seed=seed)
    asyncio.run(_complete(settings, resolved, library, question))


async def _complete(settings: Settings, resolved: Resolved, library: Library, question: _Question) -> None:
    async with AsyncExitStack() as stack:
        parts = assemble(settings, resolved, library)
        stack.callback(parts.pool.stop)
        stack.push_async_callback(parts.fleet.stop)
        parts.fleet.start()
        # Imported here: meanwhile the engine process loads.
        from colibrid.text.model_text import load_text  # noqa: PLC0415

        text = load_text(parts.pack.path, parts.pack.manifest.text)
        stack.callback(text.tokenizer.close)
        request = _request(question, text, parts.pool.info, settings)
        await parts.fleet.wait_ready()
        await _print_text(parts.pool, request, text)


def _request(question: _Question, text: ModelText, info: EngineInfo, settings: Settings) -> GenerateRequest:
    from colibrid.text.model_text import first_given  # noqa: PLC0415 (as above)

    ids = _prompt_ids(question, text)
    room = info.max_seq_len - len(ids)
    if room < (question.max_tokens or 1):
        raise RequestError(
            f"the prompt has {len(ids)} tokens and --max-tokens is {question.max_tokens or 1}: more than the context "
            f"of {info.max_seq_len}; shorten the prompt or lower --max-tokens"
        )
    defaults = text.sampling.under(settings.sampling)
    return GenerateRequest(
        request_id="complete",
        prompt_ids=tuple(ids),
        max_tokens=question.max_tokens or min(settings.limits.max_tokens_default, room),
        sampling=Sampling(
            seed=secrets.randbits(64) if question.seed is None else question.seed,
            temperature=first_given(question.temperature, defaults.temperature, 1.0),
            top_p=first_given(defaults.top_p, None, 1.0),
            top_k=max(defaults.top_k or 0, 0),
            min_p=first_given(defaults.min_p, None, 0.0),
            repetition_penalty=first_given(defaults.repetition_penalty, None, 1.0),
        ),
        stop_token_ids=text.eos_token_ids,
    )


def _prompt_ids(question: _Question, text: ModelText) -> list[int]:
    if not question.chat:
        ids = text.tokenizer.encode(question.prompt, add_special_tokens=True)
    elif text.template is None:
        raise ConfigError("--chat: the model has no chat template; leave --chat out")
    else:
        messages = [{"role": "user", "content": text.guard.guard_text(question.prompt)}]
        ids = text.tokenizer.encode_guarded(text.template.render(messages, add_generation_prompt=True))
    if not ids:
        raise RequestError("the prompt is empty; give at least one token")
    return ids


async def _print_text(scheduler: GenerationService, request: GenerateRequest, text: ModelText) -> None:
    from colibrid.text.output import OutputOptions, OutputText  # noqa: PLC0415 (as above)

    output = OutputText(text.tokenizer, OutputOptions(stop_token_ids=frozenset(request.stop_token_ids)))
    async with scheduler.submit(request) as generation:
        async for records in generation:
            _write("".join(output.push(record.token) for record in records))
    _write(output.finish() + "\n")


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()

"""From a typed body to requests for the scheduler: every bound that needs the model is checked here."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from colibrid.batch.request import ExpertPolicy, GenerateRequest, Sampling
from colibrid.errors import RequestError
from colibrid.http.errors import NotFoundError, shown
from colibrid.http.limits import MAX_ANSWER_LOGPROBS, MAX_STOP_IDS
from colibrid.http.prompts import check_ids, encode_prompts, prompt_entries, truncated, usable_tokens, with_gap
from colibrid.text.model_text import first_given
from colibrid.text.output import OutputOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.http.prompts import Prompt
    from colibrid.http.state import AppState
    from colibrid.http.types import ChatBody, CompletionBody, Experts, SamplingBody
    from colibrid.text.reply import ReplyOptions
    from colibrid.text.structured_masks import Masker

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One accepted HTTP request: a sequence for each choice of each prompt, and how its ids become text."""

    prompts: tuple[Prompt, ...]
    requests: tuple[GenerateRequest, ...]  # of each prompt
    output: OutputOptions
    n: int = 1  # choices to give for each prompt
    best_of: int = 1  # choices to generate for each prompt
    timeout_s: float | None = None  # for the whole answer, from the head of the request on
    reply: ReplyOptions | None = None  # how a chat's reply is taken apart; none: it is all content
    maskers: tuple[Masker, ...] = ()  # of each choice, where a grammar says what the answer may be
    profile: str | None = None  # that the request named

    @property
    def experts(self) -> ExpertPolicy:
        """That all of its requests use."""
        return self.requests[0].experts


def check_model(name: str | None, state: AppState) -> None:
    """Raises NotFoundError unless `name` is absent, the served model or one of its aliases."""
    served = state.scheduler.info.model_id
    if name is not None and name != served and name not in state.aliases:
        raise NotFoundError(
            f"The model {shown(name)} does not exist; use {shown(served)}, or leave model out.",
            param="model",
            code="model_not_found",
        )


async def completion_job(body: CompletionBody, state: AppState, request_id: str) -> Job:
    """Checks a completion against the model and builds its requests."""
    check_model(body.model, state)
    _check_common(body)
    entries = prompt_entries(body.prompt)
    if body.suffix:
        entries = await with_gap(entries, body, state)
    most = usable_tokens(body, state)
    prompts = await encode_prompts(entries, state, add_special=body.add_special_tokens is not False, most=most)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return _job(
        body,
        state,
        request_id,
        prompts=prompts,
        best_of=_best_of(body),
        asked=("max_tokens", body.max_tokens),
        default_tokens=COMPLETION_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def chat_job(body: ChatBody, state: AppState, request_id: str, prompt: Prompt) -> Job:
    """Checks a chat request, whose prompt is rendered already, against the model and builds its request."""
    _check_common(body)
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs goes with stream only in /v1/completions; leave one out.", param="prompt_logprobs"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true; add it.", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError(
            f"max_tokens = {body.max_tokens} and max_completion_tokens = {body.max_completion_tokens} differ;"
            " send one of them.",
            param="max_tokens",
        )
    asked: tuple[str, int | None]
    if body.max_completion_tokens is not None:
        asked = ("max_completion_tokens", body.max_completion_tokens)
    else:
        asked = ("max_tokens", body.max_tokens)
    return _job(
        body,
        state,
        request_id,
        prompts=[prompt],
        best_of=body.n or 1,
        asked=asked,
        default_tokens=state.settings.limits.max_tokens_default,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def _check_common(body: SamplingBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true; add it.", param="stream_options")
    if body.truncate_prompt_tokens == 0:
        raise RequestError("truncate_prompt_tokens = 0 would leave no prompt; send -1 or 1 and more.",
                           param="truncate_prompt_tokens")  # fmt: skip


def _best_of(body: CompletionBody) -> int:
    """How many choices to generate for each prompt."""
    n = body.n or 1
    if not body.best_of:
        return n
    if body.best_of < n:
        raise RequestError(
            f"best_of = {body.best_of} is less than n = {n}; raise it, or leave it out.", param="best_of"
        )
    if body.best_of > n and body.stream:
        raise RequestError("best_of does not work with stream: the best is known at the end; leave one out.",
                           param="best_of")  # fmt: skip
    return body.best_of


def _job(
    body: SamplingBody,
    state: AppState,
    request_id: str,
    *,
    prompts: Sequence[Prompt],
    best_of: int,
    asked: tuple[str, int | None],
    default_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> Job:
    slots = state.scheduler.info.slots
    if best_of > slots:
        name = "n" if best_of == body.n else "best_of"
        raise RequestError(f"{name} = {best_of} is more than the {slots} slots of this server; lower it.", param=name)
    ranked = best_of > (body.n or 1)
    sampling = sampling_of(body, state)
    stops = stop_ids(body.stop_token_ids, state, ignore_eos=bool(body.ignore_eos))
    experts = expert_policy(body.experts, body.profile, state)
    room = state.scheduler.info.max_seq_len - max(1, first_given(asked[1], None, COMPLETION_TOKENS))
    cut = [truncated(prompt, body.truncate_prompt_tokens, room) for prompt in prompts]
    requests = []
    for index, prompt in enumerate(cut):
        max_tokens = token_limit(len(prompt.ids), asked, default_tokens, state.scheduler.info.max_seq_len)
        if (body.min_tokens or 0) > max_tokens:
            raise RequestError(
                f"min_tokens = {body.min_tokens} is more than the {max_tokens} of max_tokens; lower it.",
                param="min_tokens",
            )
        requests.append(
            GenerateRequest(
                request_id=request_id if len(cut) == 1 else f"{request_id}-{index}",
                prompt_ids=prompt.ids,
                max_tokens=max_tokens,
                sampling=sampling,
                min_tokens=body.min_tokens or 0,
                stop_token_ids=stops,
                logprobs=0 if ranked and logprobs is None else logprobs,
                prompt_logprobs=prompt_logprobs,
                experts=experts,
                n=best_of,
                priority=body.priority or 0,
            )
        )
    _check_logprobs(requests, stream=bool(body.stream))
    return Job(
        prompts=tuple(cut),
        requests=tuple(requests),
        output=OutputOptions(
            stops=_stop_strings(body.stop),
            stop_token_ids=frozenset(stops),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=body.min_tokens or 0,
        ),
        n=body.n or 1,
        best_of=best_of,
        timeout_s=body.timeout_s,
        profile=body.profile,
    )


def _check_logprobs(requests: Sequence[GenerateRequest], *, stream: bool) -> None:
    """Raises RequestError for more log-probabilities than one answer may hold: each takes about 150 bytes meanwhile.

    Those of a stream's text are gone when they are sent.
    """
    of_text = of_prompts = 0
    for request in requests:
        if request.logprobs is not None and not stream:
            of_text += request.n * request.max_tokens * (request.logprobs + 1)
        if request.prompt_logprobs is not None:
            of_prompts += request.n * len(request.prompt_ids) * (request.prompt_logprobs + 1)
    if of_text + of_prompts > MAX_ANSWER_LOGPROBS:
        raise RequestError(
            f"The answer could hold {of_text + of_prompts} log-probabilities, more than {MAX_ANSWER_LOGPROBS}; ask for"
            " fewer of them, or send fewer prompts, choices or tokens at a time.",
            param="logprobs" if of_text >= of_prompts else "prompt_logprobs",
            code="invalid_value",
        )


def sampling_of(body: SamplingBody, state: AppState) -> Sampling:
    """Sampling values: the request's, else the settings', else those of generation_config.json, else OpenAI's."""
    defaults = state.text.sampling.under(state.settings.sampling)
    top_k = first_given(body.top_k, defaults.top_k, 0)
    return Sampling(
        seed=secrets.randbits(64) if body.seed is None else body.seed % (1 << 64),
        temperature=first_given(body.temperature, defaults.temperature, 1.0),
        top_p=first_given(body.top_p, defaults.top_p, 1.0),
        top_k=max(top_k, 0),
        min_p=first_given(body.min_p, defaults.min_p, 0.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=first_given(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=_bias(body.logit_bias or {}, state.scheduler.info.vocab_size),
    )


def stop_ids(asked: list[int] | None, state: AppState, *, ignore_eos: bool) -> tuple[int, ...]:
    """End ids: the request's, and the model's own unless they are ignored. Raises RequestError for wrong ones."""
    if asked:
        check_ids(asked, state.scheduler.info.vocab_size, "stop_token_ids")
    own = () if ignore_eos else state.text.eos_token_ids
    found = tuple(dict.fromkeys([*own, *(asked or ())]))
    if len(found) > MAX_STOP_IDS:
        raise RequestError(
            f"stop_token_ids: with the model's own, {len(found)} ids are more than {MAX_STOP_IDS}; send fewer.",
            param="stop_token_ids",
        )
    return found


def expert_policy(asked: Experts | None, profile: str | None, state: AppState) -> ExpertPolicy:
    """The request's experts. Raises RequestError beyond what the model uses and experts.max_per_token allows."""
    if profile is not None:
        if asked is not None:
            raise RequestError(
                "profile and experts both say how many experts to use; send one of them.", param="profile"
            )
        return _profile(profile, state)
    if asked is None:
        return ExpertPolicy()
    most = state.scheduler.info.experts_most
    if asked.per_token is not None and asked.per_token > most:
        limit = (
            f"the {most} that are allowed; send 1 to {most}" if most else "0: the model has no experts; leave it out"
        )
        raise RequestError(f"experts.per_token = {asked.per_token} is more than {limit}.", param="experts.per_token")
    return ExpertPolicy(per_token=asked.per_token, threshold=asked.threshold)


def _profile(name: str, state: AppState) -> ExpertPolicy:
    policy = state.profiles.get(name)
    if policy is None:
        known = ", ".join(sorted(state.profiles))
        what = f"there are {known}" if known else "this server has none (experts.profiles)"
        raise RequestError(f"profile {shown(name)} does not exist; {what}.", param="profile", code="invalid_value")
    return policy


def token_limit(prompt: int, asked: tuple[str, int | None], default: int, max_seq_len: int) -> int:
    """max_tokens of a prompt of so many tokens. Raises RequestError when it does not fit the context."""
    name, value = asked
    room = max_seq_len - prompt
    if room < (1 if value is None else value):
        wanted = "1" if value is None else str(value)
        raise RequestError(
            f"The prompt has {prompt} tokens and {name} is {wanted}: together {prompt + int(wanted)}, more than the"
            f" context of {max_seq_len} tokens. Shorten the prompt or lower {name}.",
            param=name if prompt <= max_seq_len and value is not None else "prompt",
            code="context_length_exceeded",
        )
    return min(default, room) if value is None else value


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _bias(asked: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    entries: dict[int, float] = {}
    for key, value in asked.items():
        # int() would also take "1_0", " 1", other scripts' digits and "01", which could stand beside "1".
        if not (_TOKEN_ID.fullmatch(key) and int(key) < vocab_size):
            raise RequestError(
                f"logit_bias: {shown(key)} is no token id; keys are 0 to {vocab_size - 1}.",
                param="logit_bias",
                code="invalid_token_id",
            )
        entries[int(key)] = value
    return tuple(sorted(entries.items()))

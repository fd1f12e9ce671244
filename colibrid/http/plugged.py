"""Where plugins take part in a request. Each function is called only if a plugin of its kind is named."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import queue
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from colibrid.errors import RequestError
from colibrid.http.auth import scope_error
from colibrid.http.context import current
from colibrid.http.credentials import Key, digest_of
from colibrid.http.errors import InvalidKeyError
from colibrid.http.limits import MAX_BIAS, MAX_STOP_IDS, MAX_STOPS
from colibrid.plugins import Asked, Call, Identity, Observed, Policy
from colibrid.text import structured

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from aiohttp import web

    from colibrid.http.context import RequestContext
    from colibrid.http.credentials import Scope
    from colibrid.http.params import Job
    from colibrid.http.state import AppState
    from colibrid.plugin_host import Hook
    from colibrid.plugins import MetricsSink, RequestFilter, Sample
    from colibrid.text.structured import Grammar

_AUTHENTICATE_S = 5.0
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


def call_of(request: web.Request, context: RequestContext | None = None) -> Call:
    """The request as plugins know it."""
    known = current(request) if context is None else context
    return Call(request_id=known.id, path=request.path, key=None if known.key is None else known.key.id)


# ------------------------------------------------------------------ who asks


async def authenticated(headers: Mapping[str, str], scope: Scope, state: AppState) -> tuple[Key, bool]:
    """Whose key it is, as the credential file or the first authenticator that knows it says, and whether it is of the file.

    Raises as KeyRing.check.
    """
    refused = InvalidKeyError()
    if state.keys:
        try:
            known = state.keys.check(headers, scope)
            assert known is not None, "there are keys"
        except InvalidKeyError as error:
            refused = error
        else:
            return known, True
    for hook in state.plugins.authenticators:
        with hook.call(timed=False) as authenticator:
            async with asyncio.timeout(_AUTHENTICATE_S):
                found = await authenticator.authenticate(headers)
            if found is not None and not (isinstance(found, Identity) and _ID.fullmatch(found.id)):
                raise TypeError(f"no Identity with an id of letters, digits and ._@-, but {type(found).__name__}")
        if found is not None:
            if scope not in found.scopes:
                raise scope_error(found.scopes, scope)
            digest = digest_of(f"plugin {hook.plugin}: {found.id}")
            return Key(id=found.id, digest=digest, scopes=found.scopes), False
    raise refused


# ------------------------------------------------------------------ what is asked


def filtered(call: Call, body: dict[str, Any], filters: Sequence[Hook[RequestFilter]]) -> dict[str, Any]:
    """The body as the filters leave it. May run in another thread."""
    for hook in filters:
        with hook.call() as part:
            found = part.filter(call, body)
            if found is not None and not isinstance(found, dict):
                raise TypeError(f"a body is a dict, not {type(found).__name__}")
        body = body if found is None else found
    return body


def admitted(request: web.Request, job: Job, grammar: Grammar | None, state: AppState) -> tuple[Job, Grammar | None]:
    """The job and what its answer must be, as the sampling policies want them.

    Raises RequestError where both the request and a policy say what the answer may be.
    """
    if not state.plugins.policies:
        return job, grammar
    vocab = state.scheduler.info.vocab_size
    asked = Asked(call=call_of(request), prompts=tuple(one.prompt_ids for one in job.requests), vocab_size=vocab)
    for hook in state.plugins.policies:
        with hook.call() as part:
            policy = part.admit(asked)
            if policy is None:
                continue
            form = _form(_checked(policy, vocab), f"plugins.{hook.plugin}")
        if form is not None and grammar is not None:
            raise RequestError(
                f"The server's plugin {hook.plugin} says what answers may be, and {grammar.param} does, too; leave that out.",
                param=grammar.param,
                code="unsupported_value",
            )
        grammar = form or grammar
        job = _with_policy(job, policy)
    return job, grammar


def _checked(policy: Policy, vocab: int) -> Policy:
    """Raises for what the engine would refuse: it is the plugin's mistake."""
    if not isinstance(policy, Policy):
        raise TypeError(f"no Policy, but {type(policy).__name__}")
    for name in ("bias", "stop_token_ids", "allowed_ids"):
        ids: Collection[int] = getattr(policy, name) or ()
        wrong = [token for token in ids if not (type(token) is int and 0 <= token < vocab)]
        if wrong:
            raise ValueError(f"{name} has {wrong[0]!r}; token ids are 0 to {vocab - 1}")
    if policy.allowed_ids is not None and not policy.allowed_ids:
        raise ValueError("allowed_ids is empty")
    if any(not (math.isfinite(value) and -100 <= value <= 100) for value in policy.bias.values()):
        raise ValueError("bias has a value outside of -100 to 100")
    if any(not isinstance(stop, str) or not stop for stop in policy.stops):
        raise ValueError("stops has something that is no text, or an empty one")
    if policy.grammar is not None and policy.allowed_ids is not None:
        raise ValueError("grammar and allowed_ids both say what the answer may be")
    return policy


def _form(policy: Policy, param: str) -> Grammar | None:
    if policy.allowed_ids is None:
        return policy.grammar
    ranges: list[list[int]] = []
    for token in sorted(set(policy.allowed_ids)):
        if ranges and token == ranges[-1][1] + 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    ids = ",".join(f"{first}-{last}" if last > first else str(first) for first, last in ranges)
    try:
        return structured.grammar(f"start: allowed*\nallowed: <[{ids}]>\n", param)
    except RequestError as error:
        raise ValueError(f"allowed_ids: {error.message}") from error


def _with_policy(job: Job, policy: Policy) -> Job:
    requests = []
    for one in job.requests:
        bias = dict(one.sampling.logit_bias) | dict(policy.bias)
        ids = tuple(dict.fromkeys((*one.stop_token_ids, *policy.stop_token_ids)))
        _bound("logit_bias", len(bias), MAX_BIAS)
        _bound("stop_token_ids", len(ids), MAX_STOP_IDS)
        sampling = msgspec.structs.replace(one.sampling, logit_bias=tuple(sorted(bias.items())))
        requests.append(msgspec.structs.replace(one, sampling=sampling, stop_token_ids=ids))
    stops = tuple(dict.fromkeys((*job.output.stops, *policy.stops)))
    _bound("stop", len(stops), MAX_STOPS)
    stop_ids = frozenset({*job.output.stop_token_ids, *policy.stop_token_ids})
    output = msgspec.structs.replace(job.output, stops=stops, stop_token_ids=stop_ids)
    return dataclasses.replace(job, requests=tuple(requests), output=output)


def _bound(param: str, count: int, most: int) -> None:
    if count > most:
        raise RequestError(
            f"{param}: with those of the server's plugins, {count} are more than {most}; send fewer.", param=param
        )


# ------------------------------------------------------------------ what became of it


def observed(request: web.Request, context: RequestContext, state: AppState, status: int) -> None:
    """Tells the observers. What they raise is counted and logged, and nobody else hears of it."""
    call = call_of(request, context)
    for hook in state.plugins.observers:
        began = time.perf_counter()
        try:
            hook.part.observe(Observed(call=call, status=status, ms=context.elapsed_ms, facts=dict(context.facts)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the request has its answer
            hook.health.failed(hook.plugin, hook.kind, error)
        hook.health.took(hook.plugin, hook.kind, time.perf_counter() - began)


class SinkThread:
    """Hands samples to one metrics sink, which may be as slow as it likes."""

    def __init__(self, hook: Hook[MetricsSink]) -> None:
        self._hook = hook
        self._next: queue.SimpleQueue[list[Sample] | None] = queue.SimpleQueue()
        self._busy = False
        # A daemon thread: a sink that hangs must not keep the process from ending.
        threading.Thread(target=self._run, name=f"sink-{hook.plugin}"[:15], daemon=True).start()

    async def push(self, take: Any) -> None:
        """Samples that `take()` gives, every interval_s; runs until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._hook.part.interval_s)
                if self._busy:
                    self._hook.health.failed(self._hook.plugin, self._hook.kind, "still busy; samples are left out")
                else:
                    self._busy = True
                    self._next.put(take())
        finally:
            self._next.put(None)

    def _run(self) -> None:
        while (samples := self._next.get()) is not None:
            try:
                self._hook.part.send(samples)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next samples are sent
                self._hook.health.failed(self._hook.plugin, self._hook.kind, error)
            self._busy = False

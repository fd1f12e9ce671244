"""Random histories of the scheduler: whatever happens, nothing is lost, mixed up, or left behind."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from fake_client import Client
from fake_engine import KV_TOKENS, ROW, SLOTS, TENANT_SEEDS, VOCAB, FakeEngine, expected_tokens
from fake_service import INFO, call_on
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colibrid.batch.measures import ExpertLoad, Measures
from colibrid.batch.plan import reserved_tokens
from colibrid.batch.request import ExpertPolicy, GenerateRequest, Sampling
from colibrid.batch.scheduler import _RETRY_PUSH_S, Scheduler
from colibrid.config.settings import BatchSettings, ExpertsSettings, LimitsSettings
from colibrid.engine.abi import Status
from colibrid.errors import OverloadedError, RequestError

QUEUE = 5
BASES = tuple(tuple(range(start, start + 24)) for start in (0, 300))  # prompts begin alike, for what that is worth
TENANTS = ("a", "b")
EXPERTS = (ExpertPolicy(), ExpertPolicy(per_token=1))


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.engine = FakeEngine()
        self.clients: list[Client] = []
        info = msgspec.structs.replace(INFO, output_is_prompt=True)

        async def make() -> Scheduler:
            return Scheduler(
                self.engine,
                info,
                (4,),
                batch=BatchSettings(slots=SLOTS),
                limits=LimitsSettings(queue=QUEUE),
                experts=ExpertsSettings(),
                measures=Measures(ExpertLoad((4, 0, 3), ROW, 1000)),
            )

        self.scheduler = self.loop.run_until_complete(make())
        self.call(self.engine.become_ready)

    def call(self, function: object, *arguments: object) -> object:
        return call_on(self.loop, 6, function, *arguments)

    @rule(
        base=st.sampled_from([(), *BASES]),
        turns=st.integers(0, 2),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4),
        max_tokens=st.one_of(st.integers(0, 12), st.integers(KV_TOKENS // 3, KV_TOKENS // 2)),
        seed=st.integers(0, 3),
        tenant=st.integers(0, 1),
        more=st.fixed_dictionaries(
            {
                "n": st.sampled_from([1, 1, 1, 2, 3]),
                "priority": st.integers(-1, 1),
                "experts": st.sampled_from(EXPERTS),
                "prompt_logprobs": st.sampled_from([None, None, 0]),
            }
        ),
        reads=st.booleans(),
    )
    def submit(
        self,
        base: tuple[int, ...],
        turns: int,
        tail: list[int],
        max_tokens: int,
        seed: int,
        tenant: int,
        more: dict[str, Any],
        reads: bool,
    ) -> None:
        seed += tenant * TENANT_SEEDS
        prompt = base
        for _ in range(turns if base else 0):  # a conversation that went on from here
            prompt = (*prompt, *expected_tokens(prompt, seed, 6))
        request = GenerateRequest(
            request_id="r",
            prompt_ids=(*prompt, *tail),
            max_tokens=max_tokens,
            sampling=Sampling(seed=seed),
            tenant=TENANTS[tenant],
            **more,
        )
        counts = self.scheduler.counts

        def run() -> str | None:
            try:
                self.clients += [Client(one, reads) for one in self.scheduler.submit_all([request])]
            except OverloadedError as error:
                return error.code
            except RequestError as error:
                return error.code
            return None

        code = self.call(run)
        if self.engine.session is None:
            assert code == "model_loading"
        elif reserved_tokens(len(request.prompt_ids), max_tokens, request.n) > KV_TOKENS:
            assert code == "context_length_exceeded"
        else:
            full = counts.queued + counts.running + request.n > SLOTS + QUEUE
            assert code == ("server_is_overloaded" if full else None)

    @precondition(lambda self: self.engine.session is not None)
    @rule(tokens=st.integers(0, KV_TOKENS // 4))
    def fragment(self, tokens: int) -> None:
        """Some memory is in pieces that are too small."""
        assert self.engine.session is not None
        self.engine.session.channel.unusable = tokens

    @precondition(lambda self: self.engine.session is not None)
    @rule(full=st.booleans())
    def fill_the_command_ring(self, full: bool) -> None:
        assert self.engine.session is not None
        if self.engine.session.channel.full and not full:
            self.engine.session.channel.full = False
            self.wait_for_the_next_push()
        self.engine.session.channel.full = full

    def wait_for_the_next_push(self) -> None:
        """A push that found the ring full is tried again after a while."""
        self.call(time.sleep, 2 * _RETRY_PUSH_S)

    @precondition(lambda self: self.engine.session is not None)
    @rule()
    def fail_the_next_opening(self) -> None:
        assert self.engine.session is not None
        self.engine.session.channel.fail_status = Status.NOT_FINITE

    @precondition(lambda self: self.engine.session is not None)
    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.call(self.engine.session.step)  # type: ignore[union-attr]

    @precondition(lambda self: self.engine.session is not None)
    @rule()
    def step_unseen(self) -> None:
        """The engine works, and the daemon has not looked yet."""
        assert self.engine.session is not None
        self.engine.session.channel.step()

    @precondition(lambda self: self.engine.session is not None)
    @rule()
    def replace_an_expert(self) -> None:
        """Nothing that was computed before is taken over after, whether the daemon has looked or not."""
        assert self.engine.session is not None
        self.call(self.engine.session.switch, self.engine.session.channel.weights_generation + 1)

    @precondition(lambda self: bool(self.clients))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        if not client.generation.ended:
            client.cancelled = True
        self.call(client.generation.cancel)

    @precondition(lambda self: bool(self.clients))
    @rule(data=st.data())
    def start_reading(self, data: st.DataObject) -> None:
        self.call(data.draw(st.sampled_from(self.clients)).read_now)

    @precondition(lambda self: self.engine.session is not None)
    @rule()
    def die(self) -> None:
        self.call(self.engine.die)

    @precondition(lambda self: self.engine.session is None)
    @rule()
    def restart(self) -> None:
        self.call(self.engine.become_ready)

    @invariant()
    def nothing_is_mixed_up(self) -> None:
        for client in self.clients:
            client.check()
        self.scheduler._placer.check()
        if self.engine.session is not None:
            assert self.engine.session.channel.used <= KV_TOKENS
        counts = self.scheduler.counts
        assert counts.submitted == len(self.clients)
        live = sum(not client.generation.ended for client in self.clients)
        assert counts.finished + counts.failed + counts.cancelled + live == counts.submitted
        assert counts.queued <= QUEUE + SLOTS

    def teardown(self) -> None:
        """With an engine and readers everything ends: no slot stays taken and no client waits."""
        if self.engine.session is None:
            self.call(self.engine.become_ready)
        assert self.engine.session is not None
        channel = self.engine.session.channel
        channel.full, channel.unusable, channel.fail_status = False, 0, None
        self.wait_for_the_next_push()
        for client in self.clients:
            self.call(client.read_now)
        for _ in range(KV_TOKENS * (SLOTS + QUEUE)):
            counts = self.scheduler.counts
            if counts.queued + counts.running == 0:
                break
            self.step(1)
        assert (self.scheduler.counts.queued, self.scheduler.counts.running) == (0, 0)
        for client in self.clients:
            assert client.task is not None
            assert client.task.done()
            client.check()
        self.step(1)
        held = {holding.run: holding.tokens for holding in self.scheduler._placer.holdings}
        assert held.keys() == channel.runs.keys()
        assert all(tokens <= channel.runs[run].tokens for run, tokens in held.items())
        assert self.loop.run_until_complete(self.scheduler.drain(1))
        self.call(self.engine.die)
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


SchedulerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestSchedulerMachine = SchedulerMachine.TestCase

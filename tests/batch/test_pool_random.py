"""Random histories of several engines: whatever dies, returns or is given up, nothing is lost, mixed up or left behind."""

from __future__ import annotations

import asyncio

from fake_client import Client
from fake_engine import KV_TOKENS, SLOTS, VOCAB, FakeEngine, expected_tokens
from fake_service import call_on, make_request, make_scheduler
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from colibrid.batch.plan import reserved_tokens
from colibrid.batch.pool import EnginePool
from colibrid.errors import RequestError

ENGINES = 3
QUEUE = 3  # of each engine
BASES = tuple(tuple(range(start, start + 24)) for start in (0, 300))


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.engines = [FakeEngine() for _ in range(ENGINES)]
        self.clients: list[Client] = []

        async def make() -> EnginePool:
            return EnginePool(self.engines, lambda engine, _: make_scheduler(engine, queue=QUEUE))

        self.pool = self.loop.run_until_complete(make())
        for engine in self.engines:
            self.call(engine.become_ready)

    def call(self, function: object, *arguments: object) -> object:
        return call_on(self.loop, 8, function, *arguments)

    def those(self, data: st.DataObject, *, ready: bool) -> FakeEngine:
        picked = data.draw(st.sampled_from([one for one in self.engines if self.is_ready(one) == ready]))
        assert isinstance(picked, FakeEngine)
        return picked

    @staticmethod
    def is_ready(engine: FakeEngine) -> bool:
        return engine.session is not None

    @rule(
        base=st.sampled_from([(), *BASES]),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
        max_tokens=st.one_of(st.integers(0, 12), st.integers(KV_TOKENS // 3, KV_TOKENS // 2)),
        seed=st.integers(0, 3),
        n=st.sampled_from([1, 1, 2]),
    )
    def submit(self, base: tuple[int, ...], tail: list[int], max_tokens: int, seed: int, n: int) -> None:
        request = make_request((*base, *tail), max_tokens, seed, n=n)

        def run() -> str | None:
            try:
                self.clients += [Client(one, True) for one in self.pool.submit_all([request])]
            except RequestError as error:
                return error.code
            return None

        code = self.call(run)
        if not any(map(self.is_ready, self.engines)):
            assert code == "model_loading"
        elif reserved_tokens(len(request.prompt_ids), max_tokens, n) > KV_TOKENS:
            assert code == "context_length_exceeded"
        else:
            assert code in (None, "server_is_overloaded")

    @precondition(lambda self: any(map(self.is_ready, self.engines)))
    @rule(data=st.data(), times=st.integers(1, 4))
    def step(self, data: st.DataObject, times: int) -> None:
        engine = self.those(data, ready=True)
        for _ in range(times):
            self.call(engine.session.step)  # type: ignore[union-attr]

    @precondition(lambda self: any(map(self.is_ready, self.engines)))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        self.call(self.those(data, ready=True).die)

    @precondition(lambda self: not all(map(self.is_ready, self.engines)))
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        self.call(self.those(data, ready=False).become_ready)

    @precondition(lambda self: bool(self.clients))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(self.clients))
        if not client.generation.ended:
            client.cancelled = True
        self.call(client.generation.cancel)

    @invariant()
    def nothing_is_mixed_up(self) -> None:
        for client in self.clients:
            client.check()
        for lane, engine in zip(self.pool.lanes, self.engines, strict=True):
            lane.scheduler.placer.check()
            if engine.session is not None:
                assert engine.session.channel.used <= KV_TOKENS
        counts = self.pool.counts
        assert counts.submitted == len(self.clients)
        live = sum(not client.generation.ended for client in self.clients)
        assert counts.finished + counts.failed + counts.cancelled + live == counts.submitted

    @invariant()
    def nobody_waits_while_an_engine_has_nothing_to_do(self) -> None:
        if self.pool.counts.queued:
            assert not any(lane.readiness.ready and lane.load == 0 for lane in self.pool.lanes)

    def teardown(self) -> None:
        """With engines everything ends: no slot stays taken, and no client waits."""
        for engine in self.engines:
            if engine.session is None:
                self.call(engine.become_ready)
        for _ in range(KV_TOKENS * (SLOTS + QUEUE)):
            counts = self.pool.counts
            if counts.queued + counts.running == 0:
                break
            for engine in self.engines:
                self.call(engine.session.step)  # type: ignore[union-attr]
        for client in self.clients:
            assert client.task is not None
            assert client.task.done()
            client.check()
        assert self.pool.idle
        assert self.loop.run_until_complete(self.pool.drain(1))
        for engine in self.engines:
            self.call(engine.die)
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_expected_tokens_tell_requests_apart() -> None:
    """What the machine compares with depends on prompt, seed and choice."""
    assert len({tuple(expected_tokens((1, p), s, 3, c)) for p in (1, 9) for s in (0, 50) for c in (0, 100)}) == 8

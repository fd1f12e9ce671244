"""Shared KV runs and masks of the C engine, on every backend: what is taken over, and waited for, changes no bit."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest
from in_process import Answer, InProcessEngine, ask
from random_cases import CUDA_CASES, prompts_of

from colibrid.engine import abi

if TYPE_CHECKING:
    from pathlib import Path

    from engine_backends import Backend

    from colibrid.engine.channel import SlotRequest

CASE = CUDA_CASES[0]
ALL = 20
NEW_TOKENS = 4
SMALL = {"max_seq_len": 64, "prefill_chunk": 16, "prefill_tokens": 64}
PROMPT = prompts_of(CASE)[1][:21]


@pytest.fixture(scope="session")
def pack(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of all tests here. Not to be changed."""
    return backend.pack(CASE, tmp_path_factory.mktemp(f"runs-{backend.name}"))


def plain(prompt: list[int], max_tokens: int = NEW_TOKENS) -> SlotRequest:
    """Without records of the prompt, which come only of computing it."""
    return msgspec.structs.replace(ask(prompt, max_tokens, top=ALL), flags=abi.RequestFlag.LOGPROBS)


def run(engine: InProcessEngine, request: SlotRequest) -> Answer:
    (answer,) = engine.run([request])
    assert answer.usage is not None
    assert answer.usage.cached_tokens == request.prefix_tokens
    return answer


def test_prefix_runs_change_no_bit(backend: Backend, pack: Path) -> None:
    """A prompt gets the same records alone, behind a prefix of any length, and when that is copied into a new run."""
    request = plain(PROMPT)
    with backend.open(pack, slots=2, **SMALL) as engine:
        alone = run(engine, request)
        answers = [run(engine, msgspec.structs.replace(request, publish_run=1))]
        for length in (15, 17) if backend.slow else (1, 15, 16, 17, len(PROMPT) - 1):
            shared = msgspec.structs.replace(request, prefix_run=1, prefix_tokens=length)
            copied = msgspec.structs.replace(shared, publish_run=2)
            again = msgspec.structs.replace(request, prefix_run=2, prefix_tokens=len(PROMPT) - 1)
            answers += [run(engine, one) for one in (shared, copied, again)]
            engine.release_run(2)
        assert all(answer.records == alone.records for answer in answers)
        engine.release_run(1)
        engine.settle()
        stats = engine.stats()
        assert (stats.kv_bytes_used, stats.allocations_after_open) == (0, 0)


def test_output_is_a_prefix_where_its_bits_are_those_of_a_prompt(backend: Backend, pack: Path) -> None:
    """On the CPU a second turn takes prompt and answer; elsewhere the engine gives the prompt, and computes the rest."""
    with backend.open(pack, slots=2, **SMALL) as engine:
        first = run(engine, msgspec.structs.replace(plain(PROMPT, 9), publish_run=1))
        turn = plain([*PROMPT, *first.tokens, 7, 8])
        alone = run(engine, turn)
        held = len(PROMPT) + (8 if backend.name == "cpu" else 0)
        second = msgspec.structs.replace(turn, prefix_run=1, prefix_tokens=held)
        assert run(engine, second).records == alone.records
        (beyond,) = engine.run([msgspec.structs.replace(second, prefix_tokens=held + 1)])
        assert beyond.usage is not None
        assert beyond.usage.cached_tokens == 0
        assert beyond.records == alone.records


def test_a_closed_request_leaves_what_it_has_published(backend: Backend, pack: Path) -> None:
    """Closed in mid-sentence, its prompt serves others as before; closed in the prompt, it leaves nothing."""
    with backend.open(pack, slots=2, **SMALL) as engine:
        alone = run(engine, plain(PROMPT))
        writer = msgspec.structs.replace(plain(PROMPT, 40), publish_run=1)
        engine.run([writer], cancel={0: 3})
        again = msgspec.structs.replace(plain(PROMPT), prefix_run=1, prefix_tokens=len(PROMPT) - 1)
        assert run(engine, again).records == alone.records
        engine.release_run(1)
        engine.run([writer], cancel={0: 0})
        engine.release_run(1)  # in case it was there
        engine.settle()
        assert engine.stats().kv_bytes_used == 0


def test_choices_of_one_prompt_are_those_of_requests_alone(backend: Backend, pack: Path) -> None:
    """Sampled side by side over one read-only prompt, each choice has the records that it has by itself."""
    request = msgspec.structs.replace(plain(PROMPT, 6), temperature=1.3, seed=11)
    choices = [msgspec.structs.replace(request, choice=choice) for choice in range(4)]
    with backend.open(pack, slots=4, **SMALL) as engine:
        alone = [run(engine, choice) for choice in choices]
        assert len({tuple(answer.tokens) for answer in alone}) > 1
        run(engine, msgspec.structs.replace(plain(PROMPT, 0), publish_run=3))
        shared = [msgspec.structs.replace(choice, prefix_run=3, prefix_tokens=len(PROMPT) - 1) for choice in choices]
        before = engine.stats().tokens_prefill
        answers = engine.run(shared)
        assert engine.stats().tokens_prefill - before == len(choices)
        assert [answer.records for answer in answers] == [answer.records for answer in alone]


def test_random_mixes_of_runs_change_no_bit(backend: Backend, pack: Path) -> None:
    """Whatever is published, shared, copied and released, in whatever company: the records are those without it."""
    dice = random.Random(5)
    bases = [PROMPT, [3, 1, *PROMPT[2:]]]
    with backend.open(pack, slots=8, **SMALL) as engine:
        held: dict[int, list[int]] = {}
        for _ in range(2 if backend.slow else 30):
            mix = []
            for run_id in dice.sample(range(1, 7), 3):
                prompt = [*dice.choice(bases)[: dice.randint(2, 21)], *(dice.randrange(ALL) for _ in range(5))]
                request = plain(prompt, dice.randint(1, 6))
                if dice.random() < 0.5:
                    request = msgspec.structs.replace(request, temperature=1.0, seed=dice.randrange(99))
                source, tokens = longest(held, prompt)
                if tokens:
                    request = msgspec.structs.replace(request, prefix_run=source, prefix_tokens=tokens)
                if run_id not in held and dice.random() < 0.7:
                    request = msgspec.structs.replace(request, publish_run=run_id)
                mix.append(request)
            answers = engine.run(mix)
            without = [msgspec.structs.replace(one, prefix_run=0, prefix_tokens=0, publish_run=0) for one in mix]
            for one, answer, alone in zip(mix, answers, [engine.run([one])[0] for one in without], strict=True):
                assert answer.records == alone.records
                assert answer.usage is not None
                assert answer.usage.cached_tokens == one.prefix_tokens
                if one.publish_run:
                    held[one.publish_run] = list(one.prompt_ids)
            for gone in dice.sample(sorted(held), max(0, len(held) - 3)):
                engine.release_run(gone)
                del held[gone]
        assert engine.stats().allocations_after_open == 0


def longest(held: dict[int, list[int]], prompt: list[int]) -> tuple[int, int]:
    """The run that shares most with `prompt`, and how much, but for the last token."""
    best = (0, 0)
    for run_id, ids in held.items():
        alike = 0
        while alike < min(len(ids), len(prompt) - 1) and ids[alike] == prompt[alike]:
            alike += 1
        best = max(best, (run_id, alike), key=lambda found: found[1])
    return best


def test_masks_are_waited_for_by_their_slot_alone(backend: Backend, pack: Path) -> None:
    """Each token of a masked slot is the likeliest that its mask allows, when the mask is there; others go on."""
    free, masked = plain(PROMPT), plain(PROMPT, 3)
    masked = msgspec.structs.replace(masked, flags=masked.flags | abi.RequestFlag.MASKED)
    with backend.open(pack, slots=2, **SMALL) as engine:
        generation = engine.start(0, masked)
        engine.start(1, free)
        tokens = [event for event in engine.settle() if event.kind == abi.EventKind.TOKEN]
        assert [event.slot for event in tokens] == [1] * NEW_TOKENS
        for position, allowed in enumerate(([3, 17, 9], [5], [0, 1, 2, 19])):
            engine.allow(0, generation, position, allowed)
            (event,) = engine.settle()
            likeliest = dict(engine.channel.record(0, event.record).top)
            assert (event.slot, event.position) == (0, position)
            assert event.token == max(allowed, key=lambda token: likeliest[token])
        engine.check()

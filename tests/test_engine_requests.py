"""What a request may ask of the C engine, and what its neighbours must not notice: on every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from in_process import Answer, ask, is_first
from random_cases import CUDA_CASES, prompts_of

from colibrid.engine import abi

if TYPE_CHECKING:
    from pathlib import Path

    from engine_backends import Backend

    from colibrid.engine.channel import SlotRequest

CASE = CUDA_CASES[0]  # two of four experts in layers 0 and 2, layer 1 dense; 20 ids
ALL = 20
SMALL = {"max_seq_len": 64, "prefill_chunk": 16, "prefill_tokens": 64}
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)  # of a GPU's decode steps
PROMPT = prompts_of(CASE)[1][:21]


@pytest.fixture(scope="session")
def pack(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of all tests here. Not to be changed."""
    return backend.pack(CASE, tmp_path_factory.mktemp(f"requests-{backend.name}"))


def serve(
    backend: Backend, pack: Path, requests: list[SlotRequest], *, cancel: dict[int, int] | None = None, slots: int = 2
) -> list[Answer]:
    """All answers; nothing was allocated, no expert ran twice, pools and slots are whole."""
    with backend.open(pack, slots=slots, **SMALL) as engine:
        answers = engine.run(requests, cancel)
        stats = engine.stats()
        assert (stats.allocations_after_open, stats.expert_relaunches, stats.slots_open) == (0, 0, 0)
        assert stats.kv_bytes_used == 0
    return answers


def seen(answer: Answer) -> tuple[str, str]:
    """All that a client can see, to the bit."""
    return repr(answer.records), repr(answer.prompt[1:])


def company(count: int) -> list[SlotRequest]:
    """Requests of many lengths."""
    return [ask([(3 * i + j) % ALL for j in range(1 + i % 9)], 4 + i % 3) for i in range(count)]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_company_changes_nothing(backend: Backend, pack: Path, sampled: bool) -> None:
    """A request's records are the same to the bit alone and among others, in every bucket that they fill."""
    asked = ask(PROMPT, 4, top=5, prompt_top=5)
    if sampled:
        asked = msgspec.structs.replace(asked, temperature=1.2, top_p=0.9, seed=7)
    alone = None
    for slots in (1, 3) if backend.slow else BUCKETS:
        answer = serve(backend, pack, [*company(slots - 1), asked], slots=slots)[-1]
        alone = alone or seen(answer)
        assert seen(answer) == alone


def test_a_closed_request_changes_nothing_for_others(backend: Backend, pack: Path) -> None:
    """Requests that are closed at any time leave no trace: neighbours and successors have the bits that they have alone."""
    requests = [ask(PROMPT[: 5 + 3 * i], 6, top=5) for i in range(3 if backend.slow else 8)]
    alone = [seen(answer) for answer in serve(backend, pack, requests, slots=1)]
    mixed = [request for kept in requests for request in (msgspec.structs.replace(kept, max_tokens=12), kept)]
    cancel = {2 * i: i % 4 for i in range(len(requests))}  # some before they have a token
    answers = serve(backend, pack, mixed, cancel=cancel, slots=3)
    assert [seen(answer) for answer in answers[1::2]] == alone
    for index, tokens in cancel.items():
        assert tokens <= len(answers[index].records) < 12
        assert answers[index].finish == 0


def test_a_stop_id_ends_the_request(backend: Backend, pack: Path) -> None:
    """The token is in the records, the flag says why; before min_tokens a stop id is not sampled at all."""
    free, *_ = serve(backend, pack, [ask(PROMPT, 8)])
    stop = free.tokens[3]
    first = free.tokens.index(stop)
    stopped, late, length = serve(
        backend, pack, [ask(PROMPT, 8, stop_ids=[stop]), ask(PROMPT, 8, stop_ids=[stop], min_tokens=8), ask(PROMPT, 3)]
    )
    assert (stopped.tokens, stopped.finish) == (free.tokens[: first + 1], abi.Finish.STOP)
    assert len(late.tokens) == 8
    assert stop not in late.tokens[:7]
    assert (length.tokens, length.finish) == (free.tokens[:3], abi.Finish.LENGTH)


def test_prompt_logprobs_are_those_of_generated_tokens(backend: Backend, pack: Path) -> None:
    """A continuation that becomes a prompt has the distributions that it had when it was generated."""
    (free,) = serve(backend, pack, [ask(PROMPT, 8, top=ALL)])
    (whole,) = serve(backend, pack, [ask([*PROMPT, *free.tokens], 0, prompt_top=ALL)])
    assert is_first(whole.prompt[0])
    assert not whole.records
    for generated, prompted in zip(free.records, whole.prompt[len(PROMPT) :], strict=True):
        got, again = (np.array([dict(record.top)[token] for token in range(ALL)]) for record in (generated, prompted))
        assert np.linalg.norm(got - again) <= backend.relative_error * np.linalg.norm(again)
        assert prompted.logprob == pytest.approx(generated.logprob, abs=2e-2)


def test_a_list_is_the_distribution(backend: Backend, pack: Path) -> None:
    """Probabilities sum to 1, the likeliest come first, and the chosen token's is in its record."""
    (answer,) = serve(backend, pack, [ask(PROMPT, 4, top=ALL, prompt_top=ALL)])
    for record in [*answer.prompt[1:], *answer.records]:
        values = [logprob for _, logprob in record.top]
        assert values == sorted(values, reverse=True)
        assert np.exp(values).sum() == pytest.approx(1.0, abs=1e-4)
    for record in answer.records:
        assert record.top[0] == (record.token, record.logprob)


SAMPLED = {"temperature": 1.5, "top": ALL}


def test_seeds_decide(backend: Backend, pack: Path) -> None:
    """One seed and choice index, one text, in whichever slot; others give other texts."""
    requests = [
        ask(PROMPT, 8, seed=seed, choice=choice, **SAMPLED) for seed, choice in ((1, 0), (2, 0), (1, 1), (1, 0))
    ]
    answers = serve(backend, pack, requests, slots=3)
    texts = [tuple(answer.tokens) for answer in answers]
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    "values",
    [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}],
    ids=lambda values: next(iter(values)),
)
def test_what_leaves_one_token_is_greedy(backend: Backend, pack: Path, values: dict[str, Any]) -> None:
    """Limits that only the likeliest token passes give the greedy text."""
    greedy, limited = serve(backend, pack, [ask(PROMPT, 6, top=ALL), ask(PROMPT, 6, seed=3, **{**SAMPLED, **values})])
    assert limited.records == greedy.records


def test_limits_keep_to_their_set(backend: Backend, pack: Path) -> None:
    """With top_k 3 every token is among the three likeliest, with top_p in the smallest set that reaches it."""
    three, nucleus = serve(
        backend, pack, [ask(PROMPT, 12, seed=5, top_k=3, **SAMPLED), ask(PROMPT, 12, seed=6, top_p=0.6, **SAMPLED)]
    )
    for record in three.records:
        assert record.token in [token for token, _ in record.top[:3]]
    for record in nucleus.records:
        shares = np.exp(np.array([logprob for _, logprob in record.top]) / SAMPLED["temperature"])
        before = np.concatenate([[0.0], np.cumsum(shares / shares.sum())[:-1]])
        place = [token for token, _ in record.top].index(record.token)
        assert before[place] <= 0.6 + 1e-3


def test_bias_and_penalties(backend: Backend, pack: Path) -> None:
    """A bias forces or forbids a token and a penalty keeps it from repeating; log-probabilities are still the model's."""
    free, forced, never, varied = serve(
        backend,
        pack,
        [
            ask(PROMPT, 6, top=ALL),
            ask(PROMPT, 6, top=ALL, bias=[(11, 100.0)]),
            ask(PROMPT, 6, top=ALL, bias=[(token, -100.0) for token in range(10)]),
            ask(PROMPT, 6, top=ALL, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=50.0),
        ],
    )
    assert forced.tokens == [11] * 6
    assert forced.records[0].top == free.records[0].top
    assert forced.records[0].logprob == dict(free.records[0].top)[11]
    assert all(token >= 10 for token in never.tokens)
    assert len(set(varied.tokens)) > len(set(free.tokens))


def test_experts_are_counted_and_limited(backend: Backend, pack: Path) -> None:
    """Each row uses k experts in each of two MoE layers; a policy of fewer is kept, and what it left out is counted."""
    rows = len(PROMPT) + 3  # the last token is not computed
    policy = [(1, 0.0), (0, 0.0), (1, 0.0)]
    own, one = serve(backend, pack, [ask(PROMPT, 4), ask(PROMPT, 4, policy=policy)])
    assert own.usage is not None
    assert one.usage is not None
    assert (own.usage.assignments, own.usage.trimmed) == (rows * 2 * 2, 0)
    assert (one.usage.assignments, one.usage.trimmed) == (rows * 2, rows * 2)
    assert np.reshape(own.experts, (3, -1)).sum(axis=1).tolist() == [2 * rows, 0, 2 * rows]
    assert np.reshape(one.experts, (3, -1)).sum(axis=1).tolist() == [rows, 0, rows]


def test_a_request_without_tokens_to_generate(backend: Backend, pack: Path) -> None:
    """Only the prompt is computed: its records and its counts come, and no token."""
    (answer,) = serve(backend, pack, [ask(PROMPT, 0, prompt_top=3)])
    assert len(answer.prompt) == len(PROMPT)
    assert not answer.records
    assert answer.usage is not None
    assert answer.usage.assignments == len(PROMPT) * 4

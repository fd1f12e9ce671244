"""A service without HTTP, asked for many things at once: the bundled model on the CPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import pytest

from colibrid.batch.request import ExpertPolicy
from colibrid.config.settings import BatchSettings, EngineSettings, Settings, TaskExpertsSettings
from colibrid.errors import ConfigError, RequestError
from colibrid.tune.result import Point
from colibrid.tune.runner import Runner, answer_request, embed_request, policy_of, score_request, serving

if TYPE_CHECKING:
    from colibrid.engine.library import Library
    from colibrid.model.pack import Pack

PROMPT = (4092, 366, 198, 336, 339, 438)
OWN = ExpertPolicy()
SETTINGS = Settings(engine=EngineSettings(device="cpu"), batch=BatchSettings(slots=8))


def test_answers_come_in_the_order_of_the_requests(runner: Runner) -> None:
    """Each with what it asked for; equal requests get the same; progress counts all."""
    stop = runner.manifest.text.eos_token_ids
    steps: list[tuple[int, int]] = []
    requests = [
        answer_request(PROMPT, OWN, 5, stop),
        score_request(PROMPT, OWN),
        embed_request(PROMPT, OWN, "mean"),
        answer_request(PROMPT, OWN, 5, stop),
    ]
    answer, score, vector, again = runner.ask(requests, lambda done, total: steps.append((done, total)))
    assert answer.tokens == again.tokens
    assert 0 < len(answer.tokens) <= 5
    assert not set(answer.tokens) & set(stop)
    assert len(score.prompt_logprobs) == len(score.prompt_best) == len(PROMPT)
    assert math.isnan(score.prompt_logprobs[0])
    assert all(value <= 0 for value in score.prompt_logprobs[1:])
    assert math.isclose(sum(value * value for value in vector.pooled), 1.0, rel_tol=1e-5)
    assert len(vector.pooled) == runner.manifest.hyperparameters.hidden
    assert sorted(steps) == [(done, 4) for done in range(1, 5)]


def test_more_requests_than_slots_and_queue(runner: Runner) -> None:
    """They wait for their turn."""
    found = runner.ask([score_request(PROMPT, OWN)] * (3 * runner.slots + 1))
    assert len({one.prompt_logprobs.tobytes() for one in found}) == 1


def test_a_layer_may_have_its_own_number(runner: Runner) -> None:
    """per_token of a point goes to the engine layer by layer, and is counted there."""
    layers = len(runner.manifest.layers)
    before = runner.loads()
    ks = (1, *[2] * (layers - 2), 3)
    one = runner.ask([score_request(PROMPT, policy_of(Point(per_token=ks)))])[0]
    added = [sum(after) - sum(load) for after, load in zip(runner.loads(), before, strict=True)]
    assert added == [k * len(PROMPT) for k in ks]
    assert one.result.experts.assignments == sum(added)
    share = runner.ask([score_request(PROMPT, policy_of(Point(threshold=1.0)))])[0]
    assert share.result.experts.assignments == layers * len(PROMPT)


def test_a_service_is_opened_only_for_other_settings(runner: Runner) -> None:
    """per_token and threshold go with requests; slots, window and the limit of an expert are the service's."""
    first = runner.service
    runner.use(Point(per_token=1, threshold=0.5))
    assert runner.service is first
    runner.use(Point(slots=3, window_ms=1.0, max_tokens_per_expert=7))
    assert runner.service is not first
    assert (runner.slots, runner.service.info.batch_dependent) == (3, True)
    runner.use(Point())
    assert (runner.slots, runner.service.info.batch_dependent) == (8, False)


def test_company_is_the_same_every_time(runner: Runner) -> None:
    """Where an expert's tokens are limited answers depend on the batch, and so requests run in equal batches."""
    stop = runner.manifest.text.eos_token_ids
    requests = [
        *(answer_request((*PROMPT, 11 + place), OWN, 3 + 2 * place, stop) for place in range(7)),
        *(score_request((*PROMPT * 20, 11 + place), OWN) for place in range(5)),
    ]
    try:
        runner.use(Point(max_tokens_per_expert=8, slots=4))
        runs = []
        for _ in range(3):
            found = runner.ask(requests)
            runs.append([(one.tokens, one.prompt_logprobs[1:].tobytes(), one.result.experts) for one in found])
        assert runs[0] == runs[1] == runs[2]
        assert sum(one.result.experts.dropped for one in found) > 0
        with pytest.raises(RequestError, match="at most 128"):
            runner.ask([answer_request(PROMPT, OWN, 129, stop)])
    finally:
        runner.use(Point())


def test_one_refusal_ends_all(runner: Runner) -> None:
    """A request that can never be served is named, and the service goes on with the next question."""
    with pytest.raises(RequestError, match="per_token is 5"):
        runner.ask([*[score_request(PROMPT, OWN)] * 20, score_request(PROMPT, ExpertPolicy(per_token=5))])
    assert len(runner.ask([score_request(PROMPT, OWN)])) == 1


def test_settings_of_a_point() -> None:
    """The point's and nothing else decides about experts; what does not depend on it stays."""
    experts = msgspec.structs.replace(
        Settings().experts, per_token=1, threshold=0.5, max_per_token=3, score=TaskExpertsSettings(per_token=1)
    )
    settings = msgspec.structs.replace(SETTINGS, experts=experts)
    found = serving(settings, Point(per_token=2, slots=5, window_ms=2.0, max_tokens_per_expert=64), most=2)
    assert (found.experts.per_token, found.experts.threshold, found.experts.score.per_token) == (None, 0.0, None)
    assert (found.experts.max_per_token, found.experts.max_tokens_per_expert) == (3, 64)
    assert (found.batch.slots, found.batch.window_ms, found.batch.prefix_reuse) == (5, 2.0, "off")
    assert found.model == settings.model
    assert serving(settings, Point(), most=4).experts.max_per_token == 4
    assert serving(SETTINGS, Point()).batch.slots == 8


def test_a_service_that_cannot_be(library: Library, bundled_pack: Pack) -> None:
    """More experts than the model has are refused as from serving, and nothing stays open."""
    with Runner(library, SETTINGS, bundled_pack, most=9) as runner, pytest.raises(ConfigError, match="max_per_token"):
        runner.use(Point())

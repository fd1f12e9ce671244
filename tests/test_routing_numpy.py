"""Routing in C against the same rules in numpy: every bit of choice, weights, counters and buckets.

numpy rounds each fp32 operation as C does, so exact_math.h and sums in a fixed order can be repeated to the bit.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibrid.engine import abi
from colibrid.model.steps import beyond

ENGINE = Path(__file__).parents[1] / "engine_c"
NONE = 2**32 - 1
F = np.float32
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45, 80.0]


class Arguments(ctypes.Structure):
    """clb_routing_args of engine_c/src/routing.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "layer", "policies", "indices", "weights", "kept", "trimmed")),
        *((name, ctypes.c_void_p) for name in ("dropped", "status", "counts", "offsets", "token_list", "place_list")),
        ("logits_stride", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("tokens", "k_max", "max_tokens_per_expert", "reserved")),
    )


@dataclass(frozen=True)
class Case:
    """One call. logits (tokens, experts), k and threshold (tokens): the requests' policies, 0 = the layer's own."""

    logits: Any
    k: Any
    threshold: Any
    k_max: int
    layer_k: int
    sigmoid: bool
    renormalise: bool
    scale: float
    limit: int


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("cc") or shutil.which("gcc")
    source = ENGINE / "src" / "routing.c"
    if compiler is None or not source.is_file():
        pytest.skip("needs a C compiler and the source tree")
    target = tmp_path_factory.mktemp("routing") / "routing.so"
    flags = ["-std=c11", "-O3", "-shared", "-fPIC", "-o", str(target)]
    subprocess.run([compiler, *flags, str(source), "-lm"], check=True)
    return ctypes.CDLL(str(target))


def route_in_c(library: ctypes.CDLL, case: Case) -> dict[str, Any]:
    """Outputs as arrays, the lists cut to what is used; filled with rubbish before the call."""
    tokens, experts = case.logits.shape
    layer = abi.LayerDesc(
        experts=experts,
        experts_per_token=case.layer_k,
        score=abi.Score.SIGMOID if case.sigmoid else abi.Score.SOFTMAX,
        renormalise=int(case.renormalise),
        routed_scale=case.scale,
    )
    policies = np.zeros((tokens, 2), np.uint32)
    policies[:, 0] = case.k
    policies[:, 1] = case.threshold.view(np.uint32)
    shapes = {"indices": (tokens, case.k_max), "weights": (tokens, case.k_max), "kept": tokens, "trimmed": tokens}
    shapes |= {"dropped": tokens, "status": tokens, "counts": experts, "offsets": experts + 1}
    shapes |= {"token_list": tokens * case.k_max, "place_list": tokens * case.k_max}
    out: dict[str, Any] = {name: np.full(shape, 0xEEEEEEEE, np.uint32) for name, shape in shapes.items()}
    arguments = Arguments(
        logits=case.logits.ctypes.data,
        layer=ctypes.addressof(layer),
        policies=policies.ctypes.data,
        logits_stride=experts,
        tokens=tokens,
        k_max=case.k_max,
        max_tokens_per_expert=case.limit,
        **{name: array.ctypes.data for name, array in out.items()},
    )
    library.clb_routing_run(ctypes.byref(arguments))
    used = int(out["offsets"][experts])
    return {name: array[:used] if name.endswith("_list") else array for name, array in out.items()}


def exact_exp(x: Any) -> Any:
    """exact_math.h, operation by operation."""
    with np.errstate(all="ignore"):
        short = np.minimum(x, F(87))
        n = (short * F(1.44269504) + F(12582912)) - F(12582912)
        r = (short + n * F(-0.693359375)) + n * F(2.12194440e-4)
        p = r * F(1.98412698e-4) + F(1.38888889e-3)
        for coefficient in (8.33333333e-3, 4.16666667e-2, 1.66666667e-1, 0.5, 1.0, 1.0):
            p = p * r + F(coefficient)
        power = ((n.astype(np.int32) + 127) << 23).astype(np.int32).view(F)
        return np.where(x < F(-87), F(0), p * power)


def tree_sum(values: Any, count: int) -> Any:
    """By halves, as the lanes of a warp add: value i and value i + count / 2 first."""
    lanes = np.concatenate([values, np.zeros(count - len(values), F)])
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return lanes[0]


def sum_of_all(values: Any) -> Any:
    """Lane l of 32 adds the experts l, l + 32, ... in order of index; then the lanes."""
    parts = [np.add.accumulate(values[lane::32], dtype=F)[-1] for lane in range(min(32, len(values)))]
    return tree_sum(np.array(parts, F), 32)


def select_token(case: Case, token: int) -> tuple[Any, Any]:
    """The kept experts by rank and their weights; both empty for a token that is not finite."""
    logits = case.logits[token]
    if not np.isfinite(logits).all():
        return np.zeros(0, np.uint32), np.zeros(0, F)
    order = np.argsort(-logits, kind="stable")[: case.k[token] or case.layer_k]
    with np.errstate(over="ignore"):  # to minus infinity, whose exponential is 0
        below_best = logits - logits[order[0]]
    scores = F(1) / (F(1) + exact_exp(-logits[order])) if case.sigmoid else exact_exp(below_best[order])
    passes = (scores >= case.threshold[token] * scores[0]) | (case.threshold[token] <= 0)
    passes[0] = True
    kept = len(passes) if passes.all() else int(np.argmin(passes))
    if case.renormalise:
        total = tree_sum(scores[:kept], 16)
    else:
        total = F(1) if case.sigmoid else sum_of_all(exact_exp(below_best))
    return order[:kept].astype(np.uint32), scores[:kept] / total * F(case.scale)


def route_in_numpy(case: Case) -> dict[str, Any]:
    tokens, experts = case.logits.shape
    indices = np.full((tokens, case.k_max), NONE, np.uint32)
    weights = np.zeros((tokens, case.k_max), F)
    kept = np.zeros(tokens, np.uint32)
    for token in range(tokens):
        chosen, chosen_weights = select_token(case, token)
        kept[token] = len(chosen)
        indices[token, : len(chosen)] = chosen
        weights[token, : len(chosen)] = chosen_weights
    dropped = np.zeros(tokens, np.uint32)
    for expert in range(experts if case.limit else 0):
        places = np.flatnonzero(indices.ravel() == expert)
        leaving = places[np.argsort(-weights.ravel()[places], kind="stable")][case.limit :]
        indices.ravel()[leaving] = NONE
        weights.ravel()[leaving] = 0
        np.add.at(dropped, leaving // case.k_max, 1)
    places = np.flatnonzero(indices.ravel() != NONE)
    places = places[np.argsort(indices.ravel()[places], kind="stable")]
    counts = np.bincount(indices.ravel()[places], minlength=experts)
    finite = np.isfinite(case.logits).all(axis=1)
    return {
        "indices": indices,
        "weights": weights.view(np.uint32),
        "kept": kept,
        "trimmed": np.where(finite, np.maximum(case.layer_k - kept.astype(np.int64), 0), 0),
        "dropped": dropped,
        "status": np.where(finite, abi.Status.OK, abi.Status.NOT_FINITE),
        "counts": counts,
        "offsets": np.concatenate([[0], np.cumsum(counts)]),
        "token_list": places // case.k_max,
        "place_list": places,
    }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Layers of all sizes; logits from a seed, plain or full of ties, with special values put in by hand."""
    experts = draw(st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 128, 160, 255, 256, 384, 511, 512])))
    k_max = draw(st.integers(1, 16))
    most = min(k_max, experts)
    tokens = draw(st.integers(0, 40))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = random.normal(0, draw(st.sampled_from([1e-3, 1.0, 4.0, 100.0])), (tokens, experts)).astype(F)
    if draw(st.booleans()):
        logits = np.rint(logits)
    if tokens:
        place = st.tuples(st.integers(0, tokens - 1), st.integers(0, experts - 1), st.sampled_from(SPECIAL))
        for token, expert, value in draw(st.lists(place, max_size=8)):
            logits[token, expert] = value
    thresholds = random.choice(np.array([0, 0, 1e-3, 0.2, 0.9, 1], F), tokens)
    return Case(
        logits=logits,
        k=random.integers(0, most + 1, tokens),
        threshold=thresholds.astype(F),
        k_max=k_max,
        layer_k=draw(st.integers(1, most)),
        sigmoid=draw(st.booleans()),
        renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        limit=draw(st.sampled_from([0, 0, 1, 2, 7])),
    )


@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_c_and_numpy_agree_to_the_bit(routing: ctypes.CDLL, case: Case) -> None:
    """Every output of clb_routing_run equals the rules of routing.h written in numpy, weights as bit patterns."""
    expected = route_in_numpy(case)
    actual = route_in_c(routing, case)
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name)


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_the_float32_pass_leaves_out_the_same(routing: ctypes.CDLL, case: Case) -> None:
    """model/steps.py drops from an expert what C drops, ties as well, when all tokens are of one step."""
    limit = case.limit or 3
    free, limited = (route_in_c(routing, replace(case, limit=most)) for most in (0, limit))
    for expert in range(case.logits.shape[1]):
        tokens, ranks = np.nonzero(free["indices"] == expert)
        over = beyond(free["weights"].view(F)[tokens, ranks], np.zeros(len(tokens), np.int64), limit)
        kept = limited["indices"][tokens, ranks] == expert
        assert np.flatnonzero(~kept).tolist() == sorted(over.tolist())


@pytest.mark.parametrize("score", [False, True], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (60, 4), (64, 8), (128, 8), (256, 8), (512, 16)])
def test_many_tokens_of_real_layers(routing: ctypes.CDLL, experts: int, k: int, score: bool) -> None:
    """The layers of real models, 1,000 tokens each, with and without a limit for each expert."""
    random = np.random.default_rng(experts)
    for limit in (0, 1000 * k // experts):
        case = Case(
            logits=random.normal(0, 2, (1000, experts)).astype(F),
            k=np.zeros(1000, np.int64),
            threshold=np.zeros(1000, F),
            k_max=k,
            layer_k=k,
            sigmoid=score,
            renormalise=score,
            scale=1.0,
            limit=limit,
        )
        expected = route_in_numpy(case)
        actual = route_in_c(routing, case)
        for name, values in expected.items():
            np.testing.assert_array_equal(actual[name], values, err_msg=name)

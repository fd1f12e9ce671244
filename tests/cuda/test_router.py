"""The router and bucket kernels against their host twin: indices, counts, offsets and lists equal, weights within 1e-6."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cuda_harness as harness
import numpy as np
import pytest

if TYPE_CHECKING:
    import ctypes

Backend = harness.Fake | harness.Gpu
# tokens of the step, experts, the layer's k, k_max
SHAPES = [
    (1, 4, 2, 2), (1, 60, 4, 4), (7, 8, 2, 2), (32, 64, 6, 8), (64, 128, 8, 8), (63, 512, 16, 16), (64, 33, 1, 16),
    (0, 8, 2, 2), (3, 1, 1, 1),
]  # fmt: skip
LARGE_SHAPES = [(65, 128, 8, 8), (129, 300, 12, 16), (2048, 60, 4, 4), (8192, 128, 8, 8), (5000, 512, 16, 16)]


def make_case(rng: np.random.Generator, tokens: int, experts: int, k_max: int) -> tuple[Any, Any]:
    """Biased inputs: normal, many ties, huge and tiny spreads, zeros of both signs, rows that are not finite."""
    logits = rng.normal(0, 3, (tokens, experts)).astype(np.float32)
    kind = rng.integers(0, 6, tokens)
    logits[kind == 1] = np.round(logits[kind == 1])
    logits[kind == 2] *= np.float32(1e4)
    logits[kind == 3] = 0.0
    logits[kind == 4] *= np.float32(1e-3)
    if tokens > 3:
        zeros = logits[kind == 3]
        zeros[:, ::2] = -0.0
        logits[kind == 3] = zeros
        logits[1, experts // 2] = np.nan
        logits[2, 0] = -np.inf
    policies = np.zeros((tokens, 2), np.uint32)
    policies[:, 0] = rng.integers(0, min(k_max, experts) + 1, tokens)
    threshold = rng.choice(np.array([0.0, 0.0, 0.01, 0.3, 1.0], np.float32), tokens)
    policies[:, 1] = threshold.astype(np.float32).view(np.uint32)
    return logits, policies


def compare(library: ctypes.CDLL, backend: Backend, shape: tuple[int, int, int, int], score: int, renorm: int) -> None:
    tokens, experts, k, k_max = shape
    logits, policies = make_case(np.random.default_rng(hash((shape, score, renorm)) % 2**32), tokens, experts, k_max)
    scale = 2.5 if score else 1.0
    expected = harness.route_on_host(
        library, logits, policies, k=k, k_max=k_max, score=score, renormalise=renorm, scale=scale
    )
    driver = harness.make_driver(library, backend)
    run = harness.RouterRun(
        backend, max_tokens=max(tokens, 1), experts=experts, k=k, k_max=k_max, score=score, renormalise=renorm,
        scale=scale,
    )  # fmt: skip
    run.upload(driver, logits, policies)
    run.run(driver)
    used = int(expected["offsets"][-1])
    names = {"token_list": "tokens", "place_list": "places"}
    for name in ("indices", "kept", "counts", "offsets", "token_list", "place_list"):
        actual = run.download(driver, names.get(name, name), np.zeros_like(expected[name]))
        want = expected[name]
        if name in names:
            actual, want = actual[:used], want[:used]
        np.testing.assert_array_equal(actual, want, err_msg=f"{name} of {shape} score {score} renormalise {renorm}")
    weights = run.download(driver, "weights", np.zeros_like(expected["weights"]))
    np.testing.assert_allclose(weights, expected["weights"], rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("renorm", [0, 1])
@pytest.mark.parametrize("score", [0, 1])
def test_router_equals_host_twin(
    library: ctypes.CDLL, backend: Backend, shape: tuple[int, int, int, int], score: int, renorm: int
) -> None:
    """Every shape, score function, ties, thresholds and non-finite rows: the same choice and the same lists."""
    compare(library, backend, shape, score, renorm)


@pytest.mark.parametrize("shape", LARGE_SHAPES)
@pytest.mark.parametrize("score", [0, 1])
def test_router_of_many_blocks_equals_host_twin(
    library: ctypes.CDLL, backend: Backend, shape: tuple[int, int, int, int], score: int
) -> None:
    """Lists stay ordered by token when a step spans many blocks."""
    if backend.name == "fake":
        pytest.skip("the host twin is compared with itself only at decode sizes")
    compare(library, backend, shape, score, 1)


def test_a_token_does_not_depend_on_its_neighbours(library: ctypes.CDLL, backend: Backend) -> None:
    """The bits of a token's weights are the same alone and among 63 others."""
    rng = np.random.default_rng(11)
    logits = rng.normal(0, 2, (64, 128)).astype(np.float32)
    policies = np.zeros((64, 2), np.uint32)
    driver = harness.make_driver(library, backend)
    run = harness.RouterRun(backend, max_tokens=64, experts=128, k=8, k_max=8)
    run.upload(driver, logits, policies)
    run.run(driver)
    together = run.download(driver, "weights", np.zeros((64, 8), np.float32))
    for token in (0, 17, 63):
        run.upload(driver, logits[token : token + 1].copy(), policies[:1])
        run.run(driver)
        alone = run.download(driver, "weights", np.zeros((1, 8), np.float32))
        assert alone[0].tobytes() == together[token].tobytes()

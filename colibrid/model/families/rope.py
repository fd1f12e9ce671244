"""RoPE: the frequencies that a configuration asks for, and the factor on cosines and sines. Pure.

Kinds: default, linear, llama3, yarn; all fixed when a model is converted, so the engine knows tables only. Kinds that
depend on a request's length (dynamic, longrope) and every other are refused by name.

Newer checkpoints say everything in `rope_parameters`; older ones have `rope_scaling` beside `rope_theta`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from colibrid.model.families.config import Config

MAX_FACTOR = 1e6
MAX_THETA = 1e12
MAX_ORIGINAL = 1 << 30  # tokens


class Rope(NamedTuple):
    inv_freq: tuple[float, ...]  # (head_dim / 2) radians per position
    scale: float = 1.0  # on cosines and sines


def read_rope(config: Config, head_dim: int, default_theta: float, max_positions: int) -> Rope:
    """ModelError: a kind or a value that is not supported. max_positions: the checkpoint's own context in tokens."""
    field = "rope_scaling" if config.inner("rope_scaling") is not None else "rope_parameters"
    parameters = config.inner(field)
    for source in (parameters, config):
        if source is not None and source.raw("partial_rotary_factor") not in (None, 1, 1.0):
            raise source.error("partial_rotary_factor", "is not 1, which is not supported")
    theta = config.number("rope_theta", 1.0, MAX_THETA, default_theta)
    if parameters is None:
        return Rope(inverse_frequencies(theta, head_dim))
    if parameters.has_objects():
        raise config.error(field, "differs by kind of layer, which is not supported")
    kind = parameters.raw("rope_type") or parameters.raw("type") or "default"
    theta = parameters.number("rope_theta", 1.0, MAX_THETA, theta)
    plain = inverse_frequencies(theta, head_dim)
    if kind == "default":
        return Rope(plain)
    if kind == "linear":
        factor = parameters.number("factor", 1.0, MAX_FACTOR)
        return Rope(tuple(frequency / factor for frequency in plain))
    if kind == "llama3":
        return Rope(_llama3(parameters, plain, _original_positions(config, parameters, max_positions)))
    if kind == "yarn":
        return _yarn(parameters, theta, plain, max_positions, _original_positions(config, parameters, max_positions))
    raise config.error(field, f"asks for RoPE scaling {kind!r}; supported: default, linear, llama3, yarn")


def inverse_frequencies(theta: float, head_dim: int) -> tuple[float, ...]:
    """Default RoPE: radians per position of each pair of a head."""
    return tuple(theta ** (-2.0 * i / head_dim) for i in range(head_dim // 2))


def _original_positions(config: Config, parameters: Config, max_positions: int) -> int:
    """The context before scaling, in tokens; some checkpoints have it beside the object."""
    inside = parameters.integer("original_max_position_embeddings", 1, MAX_ORIGINAL, max_positions)
    return config.integer("original_max_position_embeddings", 1, MAX_ORIGINAL, inside)


def _llama3(parameters: Config, plain: tuple[float, ...], original: int) -> tuple[float, ...]:
    """Long waves are stretched by the factor, short ones kept; between the two bounds the weight moves linearly."""
    factor = parameters.number("factor", 1.0, MAX_FACTOR)
    low = parameters.number("low_freq_factor", 1e-6, MAX_FACTOR)
    high = parameters.number("high_freq_factor", 1e-6, MAX_FACTOR)
    if high <= low:
        raise parameters.error("high_freq_factor", f"is {high:g}, expected more than low_freq_factor, {low:g}")
    scaled = []
    for frequency in plain:
        turns = original * frequency / (2.0 * math.pi)  # over the original context
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        scaled.append((1.0 - kept) * frequency / factor + kept * frequency)
    return tuple(scaled)


def _yarn(parameters: Config, theta: float, plain: tuple[float, ...], max_positions: int, original: int) -> Rope:
    """Pairs that turn often are kept, those that turn seldom stretched, a linear ramp over the pairs between."""
    factor = parameters.number("factor", 1.0, MAX_FACTOR, max_positions / original)
    fast = parameters.number("beta_fast", 0.0, MAX_FACTOR, 32.0) or 32.0
    slow = parameters.number("beta_slow", 0.0, MAX_FACTOR, 1.0) or 1.0
    if theta <= 1.0:
        raise parameters.error("rope_theta", "is 1, yarn needs more")
    low, high = (_pair_that_turns(times, theta, 2 * len(plain), original) for times in (fast, slow))
    if parameters.flag("truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(plain) - 1)
    if low == high:
        high += 0.001  # as the reference does
    scaled = []
    for pair, frequency in enumerate(plain):
        stretched = min(max((pair - low) / (high - low), 0.0), 1.0)
        scaled.append(frequency / factor * stretched + frequency * (1.0 - stretched))
    return Rope(tuple(scaled), _yarn_scale(parameters, factor))


def _pair_that_turns(times: float, theta: float, head_dim: int, original: int) -> float:
    """The pair, as a real number, that turns so often over the original context."""
    return head_dim * math.log(original / (times * 2.0 * math.pi)) / (2.0 * math.log(theta))


def _yarn_scale(parameters: Config, factor: float) -> float:
    """The factor on cosines and sines: as given, else from the stretching factor."""
    if parameters.raw("attention_factor") is not None:
        return parameters.number("attention_factor", 1e-6, MAX_FACTOR)
    over, under = (parameters.number(field, 0.0, MAX_FACTOR, 0.0) for field in ("mscale", "mscale_all_dim"))
    if not over or not under:
        over, under = 1.0, 0.0
    grown = math.log(factor)  # factor >= 1
    return (0.1 * over * grown + 1.0) / (0.1 * under * grown + 1.0)

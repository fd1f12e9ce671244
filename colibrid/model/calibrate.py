"""Activation-aware scaling: for each input of a matrix that will be rounded, a factor found on the user's own texts.

A large input channel makes the rounding errors of its column count. So the column is multiplied by s before rounding,
and what produces the channel is divided by s; the model stays the same, only where rounding hurts moves:

    produced by                      read by                                             s has
    attn_norm                        qkv                                                 hidden values
    rows of V in qkv, their bias     out; all heads that share a KV head share its s     kv_heads x head_dim values
    ffn_norm                         gate and up of all experts, router, shared_gate     hidden values
    rows of up                       down, each expert for itself                        width values

s = mean|x| ^ a, and a is the one of ALPHAS whose rounded matrices change their outputs least on the texts: a = 0 is no
scaling at all. The mean squares of the scaled inputs (`energy`) then weigh the errors of single weights (rounding.py).

The texts run through the unrounded model a layer at a time; a finished layer is kept in a folder, so that an
interrupted calibration goes on where it was.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from colibrid.model.forward import Forward
from colibrid.model.rounding import rounded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from colibrid.model.floats import Array
    from colibrid.model.forward import Weights
    from colibrid.model.layout import Tensor
    from colibrid.model.manifest import Role
    from colibrid.model.quantised import Format

ALPHAS = tuple(step / 10 for step in range(11))
SAMPLE = 256  # inputs of a matrix that are kept to measure its outputs
SMALLEST = 1e-4  # of the largest mean: channels below it are scaled as if they had it
MOST_THREADS = 16
_STATE_FILE = "state.npz"


class Calibration:
    """The factors of all tensors. `of` names those of one."""

    def __init__(self) -> None:
        self._layers: dict[int, dict[str, Array]] = {}

    def add(self, layer: int, found: dict[str, Array]) -> None:
        self._layers[layer] = found

    def fold(self, tensor: Tensor, matrix: Array) -> Array:
        """The tensor as (outputs, inputs) or (1, n), with its factors in it."""
        cols, rows = self._factors(tensor)
        scaled = matrix if cols is None else matrix * cols
        return np.asarray(scaled if rows is None else scaled / rows[:, None], np.float32)

    def energy(self, tensor: Tensor) -> Array | None:
        """The mean square of each input of a matrix once the factors are in; None: not measured."""
        if tensor.layer is None:
            return None
        name = "gate" if tensor.role == "up" else tensor.role
        return self._layers[tensor.layer].get(_key(f"{name}_energy", tensor.expert))

    def _factors(self, tensor: Tensor) -> tuple[Array | None, Array | None]:
        """What multiplies columns and what divides rows."""
        if tensor.layer is None:
            return None, None
        found = self._layers[tensor.layer]
        role = tensor.role
        if role in ("attn_norm", "ffn_norm"):
            return 1 / found["qkv" if role == "attn_norm" else "gate"], None
        if role == "qkv":
            return found["qkv"], found["v"]
        if role == "qkv_bias":
            return 1 / found["v"], None
        if role in ("out", "router", "shared_gate", "gate"):
            return found["out" if role == "out" else "gate"], None
        if role in ("up", "down"):
            own = found.get(_key("down", tensor.expert))
            return (found["gate"], own) if role == "up" else (own, None)
        return None, None


def calibrate(
    weights: Weights,
    texts: Sequence[Sequence[int]],
    format_of: Callable[[Tensor], Format | None],
    progress: Callable[[int, int], None],
    store: Store,
) -> Calibration:
    """Factors for the matrices that `format_of` rounds (None: it does not), from the token ids of some texts.

    progress is called with the layers done, and all.
    """
    forward = Forward(weights, texts)
    found = Calibration()
    first, state = store.resume()
    for layer in range(first):
        found.add(layer, store.load(layer))
    if state is None:
        forward.embed()
    else:
        forward.x = state
    progress(first, len(forward.layers))
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for index in range(first, len(forward.layers)):
            seen: dict[tuple[Role, int | None], _Inputs] = {}
            forward.layer(index, lambda role, expert, x, seen=seen: seen.__setitem__((role, expert), _inputs(x)))  # type: ignore[misc]
            factors = _Layer(forward, index, format_of, seen, pool).search()
            found.add(index, factors)
            store.save(index, factors, forward.x)
            progress(index + 1, len(forward.layers))
    return found


class _Inputs(NamedTuple):
    """What is known of the inputs of one matrix."""

    tokens: int
    mean: Array  # of |x|, by channel
    square: Array  # mean of x x, by channel
    sample: Array  # (up to SAMPLE, channels)


def _inputs(x: Array) -> _Inputs:
    step = max(1, len(x) // SAMPLE)
    return _Inputs(len(x), np.abs(x).mean(axis=0), np.square(x).mean(axis=0), x[::step][:SAMPLE].copy())


class _Part(NamedTuple):
    """One matrix that a factor multiplies: made when it is needed, so that few are in memory."""

    make: Callable[[], Array]
    format: Format
    inputs: _Inputs


class _Layer:
    """The search of one layer."""

    def __init__(
        self,
        forward: Forward,
        index: int,
        format_of: Callable[[Tensor], Format | None],
        seen: dict[tuple[Role, int | None], _Inputs],
        pool: ThreadPoolExecutor,
    ) -> None:
        self._forward = forward
        self._index = index
        self._format_of = format_of
        self._seen = seen
        self._pool = pool
        self.found: dict[str, Array] = {}

    def search(self) -> dict[str, Array]:
        """Factors and energies, by _key."""
        hyper = self._forward.hyper
        group, dim = hyper.heads // hyper.kv_heads, hyper.head_dim

        def shared_by_heads(values: Array) -> Array:
            heads = values.reshape(hyper.kv_heads, group, dim).mean(axis=1, keepdims=True)
            return np.repeat(heads, group, axis=1).reshape(-1)

        out = self._best([("out", None)], "out", shared_by_heads)
        value = out.reshape(hyper.kv_heads, group, dim)[:, 0].reshape(-1)
        self.found["out"] = out
        self.found["v"] = np.concatenate([np.ones((hyper.heads + hyper.kv_heads) * dim, np.float32), value])
        self.found["qkv"] = self._best([("qkv", None)], "qkv")
        users = [expert for role, expert in self._seen if role == "gate"]
        self.found["gate"] = self._best([(role, expert) for expert in users for role in ("gate", "up")], "gate")
        for expert in users:
            self.found[_key("down", expert)] = self._best([("down", expert)], "down")
        for (role, expert), inputs in self._seen.items():
            factors = self.found[_key(role, expert) if role == "down" else role]
            self.found[_key(f"{role}_energy", expert)] = inputs.square / np.square(factors)
        return self.found

    def _best(
        self,
        users: Iterable[tuple[Role, int | None]],
        role: Role,
        shared: Callable[[Array], Array] = lambda values: values,
    ) -> Array:
        """The factors under which the users' rounded matrices change their outputs least."""
        tensors = self._forward.tensors
        parts = []
        for name, expert in users:
            kind = self._format_of(tensors[name, self._index, expert])
            inputs = self._seen[role, expert]
            if kind is not None:
                parts.append(_Part(self._maker(name, expert), kind, inputs))
        known = [self._seen[role, expert] for _, expert in users]
        total = sum(inputs.tokens for inputs in known)
        mean = shared(np.sum([inputs.mean * np.float32(inputs.tokens / total) for inputs in known], axis=0))
        choices = [_factors(mean, alpha) for alpha in ALPHAS]
        if not parts:
            return choices[0]
        errors = sum(self._pool.map(lambda part: _errors(part, choices), parts))
        return choices[int(np.argmin(errors))]

    def _maker(self, role: Role, expert: int | None) -> Callable[[], Array]:
        return lambda: self._forward.weight(role, self._index, expert)


def _factors(mean: Array, alpha: float) -> Array:
    """The mean ^ alpha, with its largest and its smallest value as far above as below 1."""
    top = float(mean.max())
    if top == 0.0:
        return np.ones_like(mean)
    powers = np.maximum(mean, np.float32(SMALLEST * top)) ** np.float32(alpha)
    return np.asarray(powers / np.sqrt(powers.max() * powers.min()), np.float32)


def _errors(part: _Part, choices: Sequence[Array]) -> Array:
    """The sum of squared changes of a matrix's outputs, over all its inputs, for each choice of factors."""
    matrix = part.make()
    found = np.zeros(len(choices))
    for number, factors in enumerate(choices):
        scaled = matrix * factors
        change = rounded(scaled, part.format, search=False).dequantise() - scaled
        found[number] = np.square((part.inputs.sample / factors) @ change.T, dtype=np.float64).sum()
    return found * (part.inputs.tokens / len(part.inputs.sample))


def _key(name: str, expert: int | None) -> str:
    return name if expert is None else f"{name}.{expert}"


class Store:
    """Finished layers in a folder of their own, kept as long as the key is the same."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._key = key

    def resume(self) -> tuple[int, Array | None]:
        """How many layers are finished, and the hidden states after them; begins anew unless all is there."""
        try:
            with np.load(self._folder / _STATE_FILE, allow_pickle=False) as state:
                done = int(state["done"])
                if str(state["key"]) == self._key and all(self._layer(layer).is_file() for layer in range(done)):
                    return done, state["hidden"]
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            pass
        self.clear()
        self._folder.mkdir(parents=True)
        return 0, None

    def load(self, layer: int) -> dict[str, Array]:
        with np.load(self._layer(layer), allow_pickle=False) as found:
            return dict(found)

    def save(self, layer: int, found: dict[str, Array], hidden: Array) -> None:
        """A layer, then the state that says so; each appears whole or not at all."""
        self._write(self._layer(layer), found)
        state = {"key": np.array(self._key), "done": np.array(layer + 1), "hidden": hidden}
        self._write(self._folder / _STATE_FILE, state)

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _layer(self, layer: int) -> Path:
        return self._folder / f"layer_{layer}.npz"

    def _write(self, path: Path, arrays: dict[str, Array]) -> None:
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        partial.rename(path)

"""Both sides of a comparison as child processes: llama.cpp's tools and our own, over the same weights.

Every call here runs one side alone and waits for its end; who measures decides the order.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from random_checkpoint import SHAPES, write_checkpoint

from colibrid.cli.bench_result import HttpReport
from colibrid.model.cache import BUNDLED_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

Precision = Literal["fp32", "fp16", "int8-g128", "int4-g32"]
# llama.cpp's type for all matrices, embedding and head among them, of nearly as many bytes.
PEER_TYPES: dict[Precision, str] = {"int8-g128": "Q8_0", "int4-g32": "Q4_0"}
# Bytes of 32 numbers in a gguf file: of Q8_0 and Q4_0 a block with an fp16 scale.
BYTES_OF_32: dict[Precision, int] = {"fp32": 128, "fp16": 64, "int8-g128": 34, "int4-g32": 18}
HEAD_NAME = (13).to_bytes(8, "little") + b"output.weight"  # as a gguf header has the name of a tensor

COLIBRID = (sys.executable, "-m", "colibrid.cli")
READY_S = 120.0
CONTEXT = 1024  # tokens of each slot, prompt and answer; both sides


class BenchError(Exception):
    """A tool failed or said something unexpected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where the tools are. `converter` is the start of a command that is given HF_DIR OUT.gguf f32|f16."""

    llama_bin: Path  # folder of llama-bench and llama-server, and of their libraries
    converter: str
    work: Path
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One model in one precision, as both sides want it."""

    model: str
    precision: Precision
    checkpoint: Path
    gguf: Path


def prepare(setup: Setup, model: str, precision: Precision) -> Weights:
    """The model's files, made if they are not there: `hummingbird-13m`, or a shape of random_checkpoint.py."""
    setup.work.mkdir(parents=True, exist_ok=True)
    checkpoint = BUNDLED_MODEL if model == BUNDLED_MODEL.name else setup.work / model
    if not (checkpoint / "config.json").exists():
        if model not in SHAPES:
            raise BenchError(f"{model}: neither {BUNDLED_MODEL.name} nor one of {', '.join(SHAPES)}")
        partial = setup.work / f"{model}.partial"
        write_checkpoint(partial, model)
        partial.rename(checkpoint)
    return Weights(model=model, precision=precision, checkpoint=checkpoint, gguf=_gguf(setup, checkpoint, precision))


def _gguf(setup: Setup, checkpoint: Path, precision: Precision) -> Path:
    """llama.cpp's file, made if it is not there: converted, or quantised from the fp16 one."""
    kind = PEER_TYPES.get(precision, precision.replace("fp", "f"))
    gguf = setup.work / f"{checkpoint.name}-{kind}.gguf"
    if not gguf.exists():
        partial = gguf.with_suffix(".partial")
        if precision in PEER_TYPES:
            source = _gguf(setup, checkpoint, "fp16")
            command = [str(setup.llama_bin / "llama-quantize"), "--pure", str(source), str(partial), kind]
            _run(command, _llama_environment(setup))
        else:
            _run([*shlex.split(setup.converter), str(checkpoint), str(partial), kind])
        partial.rename(gguf)
    return gguf


def gguf_bytes(weights: Weights) -> int:
    """Of llama.cpp's file, without its head if that is a copy of the embedding: ours lies there once."""
    config = json.loads((weights.checkpoint / "config.json").read_text())
    size = weights.gguf.stat().st_size
    with weights.gguf.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        copied = config["tie_word_embeddings"] and data.find(HEAD_NAME) >= 0
    head = config["vocab_size"] * config["hidden_size"] // 32 * BYTES_OF_32[weights.precision]
    return size - head if copied else size


def _kinds(formats: Sequence[str]) -> set[str]:
    """Formats without their groups: of int8-g128 a row of less than 128 columns is one group, as in int8."""
    return {name.partition("-")[0] for name in formats}


def llama_bench(setup: Setup, weights: Weights, prompts: Sequence[int], steps: int, repeat: int) -> dict[str, float]:
    """Tokens a second: `prefill N` of each prompt and `decode N`, the median of `repeat`."""
    text = _run(
        [str(setup.llama_bin / "llama-bench"), "-m", str(weights.gguf), "-t", str(setup.threads), "-o", "json",
         "-r", str(repeat), "-p", ",".join(map(str, prompts)), "-n", str(steps)],
        _llama_environment(setup),
    )  # fmt: skip
    return read_llama_bench(text)


def read_llama_bench(text: str) -> dict[str, float]:
    """The same, from what llama-bench -o json prints."""
    rates: dict[str, float] = {}
    for row in json.loads(text):
        name = f"prefill {row['n_prompt']}" if row["n_prompt"] else f"decode {row['n_gen']}"
        samples = sorted(row["samples_ts"])
        rates[name] = samples[len(samples) // 2]
    return rates


def llama_version(setup: Setup) -> str:
    """Build number and compiler in its own words."""
    done = subprocess.run(
        [setup.llama_bin / "llama-server", "--version"],
        env=_llama_environment(setup), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return " ".join((done.stdout + done.stderr).split())


def colibrid_bench(setup: Setup, weights: Weights, prompts: Sequence[int], steps: int, repeat: int) -> dict[str, Any]:
    """`rates` as llama_bench gives them, the decode row of `colibrid bench engine` as `decode`, and `weights_bytes`."""
    base = ["bench", "engine", str(weights.checkpoint), *_settings(setup, weights), "--slots", "1", "--json"]
    options = ["--repeat", str(repeat)]
    # llama-bench decodes from an empty context.
    decode = json.loads(_run([*COLIBRID, *base, *options, "--prompt-tokens", "1", "--steps", str(steps)]))
    lengths = ",".join(map(str, prompts))
    prefill = json.loads(_run([*COLIBRID, *base, *options, "--prompt-tokens", lengths, "--steps", "1"]))
    for document in (decode, prefill):
        if document["threads"] != setup.threads or _kinds(document["formats"]) != _kinds([weights.precision]):
            raise BenchError(f"colibrid ran {document['formats']} on {document['threads']} threads")
    rates = {f"prefill {row['prompt_tokens']}": row["prefill_tokens_per_s"] for row in prefill["rows"]}
    rates[f"decode {steps}"] = decode["rows"][0]["decode_tokens_per_s"]
    return {"rates": rates, "decode": decode["rows"][0], "weights_bytes": decode["weights_bytes"]}


def colibrid_sweep(setup: Setup, weights: Weights, slots: str, prompts: str) -> dict[str, Any]:
    """The document of `colibrid bench engine` over these numbers of slots and lengths of prompt."""
    command = ["bench", "engine", str(weights.checkpoint), *_settings(setup, weights), "--json"]
    document = json.loads(_run([*COLIBRID, *command, "--slots", slots, "--prompt-tokens", prompts, "--repeat", "2"]))
    assert isinstance(document, dict), "an object"
    return document


@contextlib.contextmanager
def llama_server(setup: Setup, weights: Weights, slots: int, clients: int) -> Iterator[str]:
    """The URL of a running llama-server. A thread for every client, and no copies of old prompts: its best settings."""
    port = free_port()
    command = [
        str(setup.llama_bin / "llama-server"), "-m", str(weights.gguf), "--host", "127.0.0.1", "--port", str(port),
        "-t", str(setup.threads), "-tb", str(setup.threads), "-np", str(slots), "-c", str(slots * CONTEXT),
        "--threads-http", str(clients + 4), "--cache-ram", "0",
    ]  # fmt: skip
    with _running(command, setup.work / "llama-server.log", _llama_environment(setup)) as process:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(process, f"{url}/health", setup.work / "llama-server.log")
        yield url


@contextlib.contextmanager
def colibrid_server(setup: Setup, weights: Weights, slots: int) -> Iterator[str]:
    """The URL of our own daemon."""
    port = free_port()
    command = [
        *COLIBRID, "serve", str(weights.checkpoint), *_settings(setup, weights), "--host", "127.0.0.1",
        "--port", str(port), "--max-batch-size", str(slots), "--max-seq-len", str(CONTEXT),
    ]  # fmt: skip
    with _running(command, setup.work / "colibrid.log", dict(os.environ)) as process:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(process, f"{url}/readyz", setup.work / "colibrid.log")
        yield url


def http_load(url: str, *, clients: int, seconds: float, prompt_tokens: int, max_tokens: int, seed: int) -> HttpReport:
    """What `colibrid bench http` sees of either server: whole answers, greedy, no end before max_tokens."""
    report = http_report(
        url, "--clients", str(clients), "--seconds", str(seconds), "--no-stream",
        "--prompt-tokens", str(prompt_tokens), "--max-tokens", str(max_tokens), "--seed", str(seed),
    )  # fmt: skip
    if report.refused or report.tokens_per_request != max_tokens:
        raise BenchError(
            f"{url}: {report.refused} requests refused, {report.tokens_per_request} tokens a request instead of "
            f"{max_tokens}: not the load that was meant"
        )
    return report


def http_report(url: str, *options: str) -> HttpReport:
    """`colibrid bench http` with these options; neither server may use what it kept of a prompt."""
    text = _run([*COLIBRID, "bench", "http", "--url", url, *options, "--field", "cache_prompt=false", "--json"])
    return msgspec.json.decode(text, type=HttpReport)


def complete(url: str, prompt: str, max_tokens: int) -> str:
    """The text that a server adds, greedily: equal weights give equal texts."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "cache_prompt": False}
    request = urllib.request.Request(  # noqa: S310  # a server that this file started
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=READY_S) as response:  # noqa: S310
        return str(json.load(response)["choices"][0]["text"])


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _settings(setup: Setup, weights: Weights) -> list[str]:
    formats = f"model.dtype={weights.precision}"
    if weights.precision in PEER_TYPES:
        tied = json.loads((weights.checkpoint / "config.json").read_text())["tie_word_embeddings"]
        ends = ("embedding",) if tied else ("embedding", "head")
        rules = [weights.precision, *(f"{end}={weights.precision}" for end in ends)]
        formats = f"model.precision={', '.join(rules)}"
    pairs = (
        "engine.device=cpu",
        formats,
        f"model.cache_dir={setup.work / 'packs'}",
        f"engine.threads={setup.threads}",
    )
    return [part for pair in pairs for part in ("--set", pair)]


def _llama_environment(setup: Setup) -> dict[str, str]:
    paths = [str(setup.llama_bin), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(paths)}


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(
            f"{shlex.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}{done.stdout[-500:]}"
        )
    return done.stdout


@contextlib.contextmanager
def _running(command: Sequence[str], log: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + READY_S
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(url, timeout=2).close()  # noqa: S310  # a server that this file started
            return
        time.sleep(0.05)
    raise BenchError(f"{url} is not ready: {log.read_text(errors='replace')[-2000:]}")

"""The whole serving path on a GPU: closed loops of HTTP clients, beside what vLLM took on the same card.

    python bench/serve_bench.py                            two shapes, 1, 8 and 32 clients, 8 s each
    python bench/serve_bench.py --device cpu --shape tiny --seconds 1     shows that everything is in place

Starts a daemon for each shape, with random weights and token-id prompts of 128, each different; 128 tokens out whatever
they are, greedy, streamed, clients on the same host. Inter-token times are those between events.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from served import Served, ServedError

from colibrid.cli.bench_http import measure_http
from colibrid.cli.bench_load import HttpLoad
from colibrid.cli.bench_result import HttpReport
from colibrid.cli.shapes import SHAPES, write_shape

PROMPT_TOKENS = MAX_TOKENS = 128
# vLLM 0.26.0 on one H200 (torch 2.11, full CUDA graphs), its OpenAI server, recorded, not run again: mean, P50 and P99
# of requests, tokens/s, P50 of the first token, P50 and P99 between tokens. None: not recorded.
VLLM: dict[tuple[str, int], tuple[float | None, ...]] = {
    ("qwen1.5-moe-a2.7b", 1): (346, 345, 367, 370, 18.6, 2.57, 3.80),
    ("qwen1.5-moe-a2.7b", 8): (None, 740, 1767, 1240, 176, 4.82, 6.28),
    ("qwen1.5-moe-a2.7b", 32): (1187, 1180, 1280, 3447, 163, 7.69, 12.99),
    ("qwen3-30b-a3b", 1): (547, 547, 548, 234, 26.5, 4.10, 4.59),
    ("qwen3-30b-a3b", 8): (1248, 1249, 1301, 820, 110, 8.89, 9.99),
    ("qwen3-30b-a3b", 32): (2148, 2169, 2226, 1905, 196, 15.5, 17.5),
}
TINY: dict[str, Any] = {  # for trying it without a GPU
    "architectures": ["Qwen2MoeForCausalLM"], "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1024,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "norm_topk_prob": False, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One number of clients."""

    shape: str
    clients: int
    report: HttpReport
    cpu_us_per_token: float  # of the daemon without its engine: event loop and helpers
    device_bytes: int  # in use on the whole device
    ready_line: str  # what the daemon said of its start
    vllm: tuple[float | None, ...] | None


def write_model(shape: str, folder: Path) -> Path:
    """A folder with no more than config.json."""
    if shape != "tiny":
        return write_shape(shape, folder)
    (folder / shape).mkdir()
    (folder / shape / "config.json").write_text(json.dumps(TINY))
    return folder / shape


def measure(shape: str, options: argparse.Namespace) -> list[Row]:
    """All numbers of clients, on one daemon."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(shape, Path(folder))
        sets = ["model.weights=dummy", f"model.cache_dir={folder}/cache", "model.max_seq_len=1024", *options.set]
        arguments = [str(model), "--max-batch-size", "32", *(part for text in sets for part in ("--set", text))]
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        with Served(arguments, device=options.device) as daemon:
            for clients in options.clients:
                load = HttpLoad(
                    url=daemon.url, clients=clients, requests=None, seconds=options.seconds, warmup=2 * clients,
                    prompt_tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS, vocab_size=vocabulary, fields={"return_token_ids": True},
                )  # fmt: skip
                busy = daemon.cpu_seconds()
                report = measure_http(load)
                busy = daemon.cpu_seconds() - busy
                tokens = report.tokens_per_request * (report.ok + load.warmup)
                rows.append(
                    Row(
                        shape=shape,
                        clients=clients,
                        report=msgspec.structs.replace(report, samples=[]),  # its numbers are enough
                        cpu_us_per_token=1e6 * busy / tokens if tokens else 0.0,
                        device_bytes=daemon.device_used(),
                        ready_line=daemon.banner.splitlines()[-1],
                        vllm=VLLM.get((shape, clients)),
                    )
                )
    return rows


def ours(row: Row) -> tuple[float | None, ...]:
    """The same numbers in the same order as VLLM."""
    report = row.report
    request, first, between = report.e2e_ms, report.ttft_ms, report.itl_ms
    if request is None or first is None or between is None:
        return (None,) * 7
    return (request.mean, request.p50, request.p99, report.output_tokens_per_s, first.p50, between.p50, between.p99)


def lines(rows: list[Row]) -> list[str]:
    """A table with vLLM's line below each of ours."""
    head = f"{'':34}{'request ms':^26}{'':>9}{'first':>9}{'between ms':>18}{'CPU us':>9}{'device':>10}"
    names = f"{'shape':18}{'clients':>8}{'':8}{'mean':>8}{'P50':>9}{'P99':>9}{'tok/s':>9}{'P50':>9}{'P50':>9}{'P99':>9}"
    table = [head, f"{names}{'a token':>9}{'GiB':>10}"]
    for row in rows:
        mine = f"{row.cpu_us_per_token:9.0f}{row.device_bytes / (1 << 30):10.1f}"
        table.append(f"{row.shape:18}{row.clients:8d}{'colibrid':>9}" + _numbers(ours(row)) + mine)
        if row.vllm is not None:
            table.append(f"{'':26}{'vLLM':>9}" + _numbers(row.vllm))
        problems = row.report.failed + row.report.refused
        if problems:
            table.append(f"  {row.report.failed} failed, {row.report.refused} refused: {row.report.problems}")
    return table


def _numbers(values: tuple[float | None, ...]) -> str:
    formats = ("8.0f", "9.0f", "9.0f", "9.0f", "9.1f", "9.2f", "9.2f")
    return "".join(
        "-".rjust(int(kind.partition(".")[0])) if value is None else format(value, kind)
        for value, kind in zip(values, formats, strict=True)
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--shape", action="append", choices=[*SHAPES, "tiny"], help="default: the two with peers")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=8.0, help="of each number of clients")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for the daemon")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything as one object")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    try:
        for shape in options.shape or ["qwen1.5-moe-a2.7b", "qwen3-30b-a3b"]:
            rows += measure(shape, options)
    except ServedError as error:
        print(f"serve_bench: {error}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps([msgspec.to_builtins(row) for row in rows], indent=1) + "\n")
    print("\n".join(lines(rows)))
    for shape in dict.fromkeys(row.shape for row in rows):
        print(next(f"{shape}: {row.ready_line}" for row in rows if row.shape == shape))
    return 1 if any(row.report.failed for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

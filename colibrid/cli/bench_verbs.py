"""`colibrid bench http` and `colibrid bench compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from colibrid.cli.main import EXIT_INTERRUPTED
from colibrid.cli.numbers import NumberRange
from colibrid.cli.output import check_outputs, write_output
from colibrid.cli.say import plain, say
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from colibrid.cli.bench_load import HttpLoad, Trace
    from colibrid.cli.bench_result import HttpReport

_OPEN_SECONDS = 30.0
_MOST_SECONDS = 1_000_000
_FILE = click.Path(dir_okay=False, path_type=Path)
_OLD_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command(short_help="Load on a server that speaks the OpenAI API.")
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="Where it listens; http or https.")
@click.option("--clients", type=click.IntRange(1, 4096), default=8, show_default=True,
              help="Closed loop: each sends its next request when it has the answer to the one before.")  # fmt: skip
@click.option("--rate", type=NumberRange(0, 100_000, min_open=True), metavar="PER_S",
              help="Open loop: requests arrive at this rate, whatever happens to those before.")  # fmt: skip
@click.option("--arrivals", type=click.Choice(["poisson", "fixed"]), default="poisson", show_default=True,
              help="Of --rate: at random, or at even times.")  # fmt: skip
@click.option("--max-in-flight", type=click.IntRange(1, 16384), default=1024, show_default=True,
              help="Open loop: later arrivals wait, and their wait is counted.")  # fmt: skip
@click.option("--trace", "trace_file", type=_OLD_FILE, metavar="FILE",
              help='Lengths, and times if it has "at", from lines like {"at": 0.5, "prompt_tokens": 128, "max_tokens": 64};'
              ' "prompt" in place of "prompt_tokens" is a text.')  # fmt: skip
@click.option("--requests", type=click.IntRange(1), help="Requests that are counted; default: 8 a client.")
@click.option("--seconds", type=NumberRange(0.1, _MOST_SECONDS),
              help="Instead of --requests: start new ones for that long; default of an open loop: 30.")  # fmt: skip
@click.option("--warmup", type=click.IntRange(0),
              help="Requests before, not counted, by --clients; the first finds out what the server takes. Default: 1 a client.")  # fmt: skip
@click.option("--prompt-tokens", default="128", show_default=True, metavar="LENGTHS",
              help="N, uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA[,MOST]; every prompt is different.")  # fmt: skip
@click.option("--max-tokens", default="128", show_default=True, metavar="LENGTHS", help="Tokens to generate, likewise.")
@click.option("--prompt-form", type=click.Choice(["auto", "ids", "text"]), default="auto", show_default=True,
              help="Random token ids, whose number is exact, or words; auto: ids, if the server takes them.")  # fmt: skip
@click.option("--vocab-size", type=click.IntRange(2), default=4000, show_default=True, help="Ids are drawn below it.")
@click.option(
    "--chat/--no-chat", default=False, show_default=True, help="Chats of one message in place of completions."
)
@click.option(
    "--slo",
    metavar="LIMITS",
    help="Count requests within limits of ttft_ms, tpot_ms, itl_ms, e2e_ms: 'ttft_ms<200, itl_ms<30'.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts, lengths and arrivals.")
@click.option("--stream/--no-stream", default=True, show_default=True, help="Streams have times of single tokens.")
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Go on to --max-tokens.")
@click.option("--model", metavar="NAME", help="Default: the first that the server lists.")
@click.option("--field", "fields", multiple=True, metavar="NAME=JSON", help="One more field of every request's body.")
@click.option("--api-key-file", type=_OLD_FILE, help="As the server's; its first key is sent.")
@click.option(
    "--timeout", type=NumberRange(0.1, _MOST_SECONDS), default=120.0, show_default=True, help="Seconds a request."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with every request, instead of a table.")
@click.option("--out", type=_FILE, metavar="FILE.json", help="The same object into a file, for `bench compare`.")
@click.option("--html", type=_FILE, metavar="FILE.html", help="A page with pictures, which needs no network.")
def http(
    *,
    fields: tuple[str, ...],
    api_key_file: Path | None,
    trace_file: Path | None,
    as_json: bool,
    out: Path | None,
    html: Path | None,
    **given: Any,
) -> int:
    """Load a server, by a fixed number of clients or by arrivals, and measure what its clients see.

    TTFT: until the first token; TPOT: a token after it, mean of a request; ITL: between two events; e2e: the whole
    request. In an open loop times count from a request's arrival, also when it could not be sent then. Refusals (503 and
    429 with Retry-After) are counted apart; a closed loop waits and sends again. Exit code 1: a request failed.

    Ctrl-C or SIGTERM ends the load; what finished is reported, marked as cut short, with exit code 130. A second one ends
    the program at once.
    """
    from colibrid.cli.bench_http import measure_http  # noqa: PLC0415
    from colibrid.cli.bench_interrupt import Interruption, NothingMeasuredError  # noqa: PLC0415
    from colibrid.cli.bench_page import report_page  # noqa: PLC0415
    from colibrid.cli.bench_report import http_lines  # noqa: PLC0415

    check_outputs(out, html)
    given["fields"] = _fields(fields)
    given["api_key"] = _first_key(api_key_file) if api_key_file else None
    load, trace = _load(trace_file, given)
    with Interruption() as interruption:  # also while results are written
        try:
            report = measure_http(load, trace, interruption)
        except NothingMeasuredError as error:
            say(f"colibrid: {error}\n", sys.stderr)
            raise click.Abort from None
        data = msgspec.json.encode(report)
        try:
            if out is not None:
                write_output(out, data + b"\n")
            if html is not None:
                write_output(html, report_page(report).encode())
        finally:  # what was measured is shown, whatever becomes of the files
            if as_json:
                print(msgspec.json.format(data, indent=1).decode())
            else:
                _print(http_lines(report))
    if interruption.at is not None:
        return EXIT_INTERRUPTED
    return 1 if report.failed else 0


@click.command("compare", short_help="Two runs of `bench http`, with confidence intervals.")
@click.argument("first", metavar="A.json[,A.json…]")
@click.argument("second", metavar="B.json[,B.json…]")
@click.option("--slo", metavar="LIMITS", help="Limits of goodput; default: those of the runs, if they are the same.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--html", type=_FILE, metavar="FILE.html", help="A page with pictures, which needs no network.")
def compare(*, first: str, second: str, slo: str | None, as_json: bool, html: Path | None) -> None:
    """Compare reports of `bench http --out`; a side may be several runs, with commas between the files.

    Each figure's ratio comes with the interval that holds it with 95 % confidence, from how ten parts of each side differ.
    Where that interval holds 1, the runs do not show a difference; where data are too few for an interval, the line says so.
    What differs between two machines, or two hours of one machine, is not in it: run both sides in turns, and more than once.
    """
    from colibrid.cli import bench_intervals  # noqa: PLC0415
    from colibrid.cli.bench_page import comparison_page  # noqa: PLC0415
    from colibrid.cli.bench_report import compare_lines  # noqa: PLC0415

    check_outputs(html)
    sides = _reports(first), _reports(second)
    found = bench_intervals.compare(*sides, slo=slo)
    if as_json:
        print(json.dumps(msgspec.to_builtins(found), indent=2))
    else:
        _print(compare_lines(found, (first, second)))
    if html is not None:
        write_output(html, comparison_page(found, (first, second), sides).encode())


def _load(trace_file: Path | None, given: dict[str, Any]) -> tuple[HttpLoad, Trace | None]:
    """The options as one value. UsageError, ConfigError."""
    from colibrid.cli.bench_load import HttpLoad, parse_lengths, read_trace  # noqa: PLC0415
    from colibrid.cli.bench_slo import parse_slo  # noqa: PLC0415

    if given["requests"] is not None and given["seconds"] is not None:
        raise click.UsageError("give --requests or --seconds, not both")
    for name in ("prompt_tokens", "max_tokens"):
        given[name] = parse_lengths(f"--{name.replace('_', '-')}", given[name])
    if given["slo"] is not None:
        parse_slo(given["slo"], stream=given["stream"])
    if given["chat"] and given["prompt_form"] == "ids":
        raise click.UsageError("chats are texts; leave --prompt-form ids or --chat out")
    if given["model"] is not None and not given["model"].isprintable():
        raise ConfigError(f"--model {given['model']!r}: not a name that JSON can hold; write it in UTF-8")
    if given["warmup"] is None:
        given["warmup"] = given["clients"]
    trace = None if trace_file is None else read_trace(trace_file)
    if trace is not None and trace.name.timed and given["rate"] is not None:
        raise click.UsageError('the lines of --trace have times of their own; leave out --rate, or "at"')
    load = HttpLoad(trace=None if trace is None else trace.name, **given)
    if load.requests is None and load.seconds is None:
        load = msgspec.structs.replace(load, **_size(load, trace))
    return load, trace


def _size(load: HttpLoad, trace: Trace | None) -> dict[str, Any]:
    """How much, if nobody says."""
    if trace is not None:
        return {"requests": trace.name.lines}
    return {"seconds": _OPEN_SECONDS} if load.open else {"requests": 8 * load.clients}


def _reports(names: str) -> list[HttpReport]:
    from colibrid.cli.bench_result import read_report  # noqa: PLC0415

    return [read_report(Path(name)) for name in names.split(",")]


def _first_key(path: Path) -> str:
    """Of a file like the server's: blank lines and comments are skipped."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"--api-key-file {path} cannot be read: {reason}; check the file") from error
    for line in lines:
        if line and not line.startswith("#"):
            if "sha256:" in line:
                raise ConfigError(f"--api-key-file {path} holds hashes, and a client needs a key; give a file with one")
            key = line.split()[0]
            if not (key.isascii() and key.isprintable()):
                raise ConfigError(f"--api-key-file {path}: a key is written in ASCII; give a file with such a key")
            return key
    raise ConfigError(f"--api-key-file {path} holds no key; write one a line")


def _fields(texts: Iterable[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            fields[name] = json.loads(value)
            msgspec.json.encode((name, fields[name]))  # half of a surrogate pair is no text
        except (ValueError, RecursionError):
            equals = ""
        if not equals or not name:
            raise ConfigError(f"--field {text!r}: write it as name=JSON, e.g. cache_prompt=false or user='\"me\"'")
    return fields


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(plain(line))

"""`colibrid experts report`: which experts the user's data uses, and what smaller cold ones would save."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from colibrid import __version__
from colibrid.cli.device import settled
from colibrid.cli.models import resolve_model
from colibrid.cli.options import engine_options, load_settings, quietly, use_plugins
from colibrid.cli.output import check_outputs, write_output
from colibrid.cli.progress import Progress
from colibrid.cli.say import plain
from colibrid.config.environment import read_environment
from colibrid.config.sizes import format_bytes
from colibrid.engine.library import Library
from colibrid.errors import ConfigError, ModelError
from colibrid.model.formats import format_of
from colibrid.model.pack import open_pack
from colibrid.paths import user_path
from colibrid.report.table import table_lines
from colibrid.text.lines import parse_lines, read_data
from colibrid.tune.cold import COLD_FORMAT, savings
from colibrid.tune.data import ANSWER_TOKENS, load_data
from colibrid.tune.result import Point
from colibrid.tune.runner import Runner
from colibrid.tune.survey import survey
from colibrid.tune.usage import ExpertReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from colibrid.config.settings import Settings
    from colibrid.model.formats import Format
    from colibrid.model.pack import Pack
    from colibrid.tune.result import Task
    from colibrid.tune.usage import LayerUse

_SHOWN = 8  # experts that are named one by one


class _Order(NamedTuple):
    """What was asked for."""

    data: tuple[str, ...]
    task: Task
    tokens: int | None
    answer_tokens: int
    cold: Format
    quiet: bool


@click.command(short_help="Show which experts your data uses.")
@click.argument("model", required=False)
@click.option(
    "--data",
    multiple=True,
    required=True,
    metavar="FILE",
    help="JSON lines to run (docs/EXPERTS.md); may be given again.",
)
@click.option(
    "--out", metavar="REPORT", help="Everything found, as JSON, for `colibrid convert --precision-from REPORT`."
)
@click.option(
    "--task",
    type=click.Choice(["generate", "score", "embed"]),
    default="generate",
    show_default=True,
    help="generate: prompts are answered, and the answers count, too; score: all is only read; embed: /v1/embeddings.",
)
@click.option("--tokens", type=click.IntRange(min=1), metavar="N", help="Most tokens of --data read.  [default: all]")
@click.option(
    "--answer-tokens",
    type=click.IntRange(1, 65536),
    default=ANSWER_TOKENS,
    show_default=True,
    metavar="N",
    help="Most tokens of an answer.",
)
@click.option(
    "--cold-format", default=COLD_FORMAT, show_default=True, metavar="FORMAT", help="What savings are computed for."
)
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
@engine_options
def report(
    *,
    model: str | None,
    data: tuple[str, ...],
    out: str | None,
    task: Task,
    tokens: int | None,
    answer_tokens: int,
    cold_format: str,
    quiet: bool,
    config_file: str | None,
    sets: tuple[str, ...],
    **given: str | None,
) -> None:
    """Run --data through MODEL and show which experts it uses in each layer, and which never; by the "task" that lines may
    name; and what a pack would save if the least used experts had a smaller format. MODEL is as in serve.

    Nothing is measured by a clock: the same data give the same figures.
    """
    try:
        cold = format_of(cold_format.lower())
    except ModelError as error:
        raise ConfigError(f"--cold-format: {error}") from None
    place = None if out is None else user_path(out)
    check_outputs(place)
    for path in data:  # told before the engine loads; what the model makes of it, later
        parse_lines(read_data(path, "--data"), path, "--data")
    environment = read_environment()
    loaded = load_settings(environment, config_file, sets, given)
    use_plugins(loaded)
    library = Library()
    settings = settled(quietly(loaded), model, environment, library)
    pack = open_pack(resolve_model(model, settings, environment, library).path)
    found = _survey(library, settings, pack, _Order(data, task, tokens, answer_tokens, cold, quiet))
    for line in lines(found):
        print(plain(line))
    if place is not None:
        write_output(place, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def _survey(library: Library, settings: Settings, pack: Pack, order: _Order) -> ExpertReport:
    bar = None if order.quiet else Progress("reading", show=lambda count: f"{count} requests")
    try:
        with Runner(library, settings, pack) as runner:
            runner.use(Point())
            data = load_data(
                order.data,
                runner.text,
                order.task,
                context=runner.context,
                most=order.tokens,
                longest_answer=order.answer_tokens,
            )
            tasks, layers = survey(runner, data, lambda done, total: None if bar is None else bar(done, total, ""))
            device = runner.service.info.device
    finally:
        if bar is not None:
            bar.close()
    return ExpertReport(
        version=__version__,
        model=pack.manifest.name,
        family=pack.manifest.family,
        device=device,
        data=data.name,
        data_sha256=data.sha256,
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        pack_bytes=sum(file.bytes for file in pack.manifest.files),
        tasks=tasks,
        layers=layers,
        cold_format=order.cold.name,
        savings=savings(pack.manifest, layers, order.cold),
    )


def lines(found: ExpertReport) -> Iterator[str]:
    """The report for people: three tables in Markdown."""
    requests = sum(task.requests for task in found.tasks)
    tokens = sum(task.tokens for task in found.tasks)
    yield f"{found.model} on {found.device}: {requests:,} requests, {tokens:,} tokens of {found.data}"
    yield ""
    yield from table_lines(
        ("layer", "experts", "never used", "least used", "most used", "do half"), map(_layer, found.layers)
    )
    yield ""
    yield from table_lines(
        ("task", "requests", "tokens", "experts never used"),
        (
            (
                task.task,
                f"{task.requests:,}",
                f"{task.tokens:,}",
                f"{sum(use.assignments[index].count(0) for use in found.layers)} of {_experts(found)}",
            )
            for index, task in enumerate(found.tasks)
        ),
    )
    yield ""
    yield from table_lines(
        ("cold experts do at most", f"in {found.cold_format}", "saved", "of the pack", "they do"),
        (
            (
                "nothing" if not saving.share else f"{100 * saving.share:g} % of any task",
                f"{saving.experts} of {_experts(found)}",
                format_bytes(saving.bytes),
                f"{100 * saving.bytes / found.pack_bytes:.1f} %",
                f"{100 * saving.touched:.2f} %",
            )
            for saving in found.savings
        ),
    )


def _experts(found: ExpertReport) -> int:
    return sum(use.experts for use in found.layers)


def _layer(use: LayerUse) -> tuple[str, ...]:
    totals = use.totals
    whole = sum(totals)
    order = sorted(range(use.experts), key=lambda expert: (totals[expert], expert))

    def shown(expert: int) -> str:
        return f"{expert}: {100 * totals[expert] / whole:.1f} %" if whole else ""

    used = next((expert for expert in order if totals[expert]), order[0])
    return (str(use.layer), str(use.experts), _names(use.never), shown(used), shown(order[-1]), str(_half(totals)))


def _half(totals: Sequence[int]) -> int:
    """How many experts do half of the work: the most used ones."""
    left = sum(totals)
    half = left / 2
    for count, done in enumerate(sorted(totals, reverse=True)):
        if left <= half:
            return count
        left -= done
    return len(totals)


def _names(experts: Sequence[int]) -> str:
    if not experts:
        return "none"
    shown = ", ".join(map(str, experts[:_SHOWN]))
    return shown if len(experts) <= _SHOWN else f"{shown} and {len(experts) - _SHOWN} more"

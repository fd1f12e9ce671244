"""`colibrid tune [MODEL] --data FILE`."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click
import msgspec

from colibrid import __version__
from colibrid.cli.device import settled
from colibrid.cli.options import engine_options, load_settings, quietly, use_plugins
from colibrid.cli.progress import Progress
from colibrid.cli.say import plain, say
from colibrid.config.environment import read_environment
from colibrid.engine.library import Library
from colibrid.errors import ConfigError
from colibrid.paths import user_path
from colibrid.tune.points import default_points, grid_points, most_per_token, shape_of
from colibrid.tune.slo import parse_slo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from colibrid.config.settings import Settings
    from colibrid.model.pack import Pack
    from colibrid.tune.cost import Load
    from colibrid.tune.data import Data
    from colibrid.tune.forecast import Forecast
    from colibrid.tune.lab import EngineLab
    from colibrid.tune.points import Shape
    from colibrid.tune.result import Point, Result, Task, Tried
    from colibrid.tune.slo import Limit
    from colibrid.tune.store import Key, Layers, Store
    from colibrid.tune.sweep import Sweep

EXIT_NOTHING = 1


class _Order(NamedTuple):
    """What the command line asks for."""

    data: tuple[str, ...]
    task: Task
    slo: str | None
    limits: tuple[Limit, ...]
    concurrency: int
    requests: int | None
    output_tokens: int
    tokens: int | None
    answer_tokens: int
    kl_tokens: int
    layers: bool
    to_the_end: bool
    folder: Path
    resume: bool
    quiet: bool


class _Ground(NamedTuple):
    """What all points have in common."""

    settings: Settings
    library: Library
    pack: Pack
    shape: Shape
    points: tuple[Point, ...]
    order: _Order


@click.command(short_help="Find how many experts your own data needs.")
@click.argument("model", metavar="[MODEL]", required=False)
@click.option("--data", multiple=True, required=True, metavar="FILE", help="JSON lines: docs/TUNE.md. May be repeated.")
@click.option("--task", type=click.Choice(["generate", "score", "embed"]), default="generate", show_default=True,
              help="What the model is used for.")  # fmt: skip
@click.option("--grid", metavar="AXES", help="As 'per_token=1,2,3;threshold=0,0.2;max_tokens_per_expert=none,256;"
              "window_ms=0,2;slots=4,8'; default: experts and thresholds around the model's own.")  # fmt: skip
@click.option("--slo", metavar="LIMITS", help="As 'p99_itl_ms<30, kl<0.02': the fastest point within them is chosen.")
@click.option("--concurrency", type=click.IntRange(1, 256), default=8, show_default=True,
              help="Requests under way while costs are measured.")  # fmt: skip
@click.option("--requests", type=click.IntRange(1, 100_000), metavar="N",
              help="That costs are measured with; default: 8 for each under way.")  # fmt: skip
@click.option("--output-tokens", type=click.IntRange(8, 4096), default=64, show_default=True,
              help="That each of them generates.")  # fmt: skip
@click.option("--tokens", type=click.IntRange(64), metavar="N", help="Most tokens of the data that are used.")
@click.option("--answer-tokens", type=click.IntRange(1, 4096), default=128, show_default=True,
              help="Most tokens of a greedy answer.")  # fmt: skip
@click.option("--kl-tokens", type=click.IntRange(16, 1 << 20), default=8192, show_default=True,
              help="Tokens of the data that KL is computed over: fewer are faster, and coarser.")  # fmt: skip
@click.option("--layers/--no-layers", default=True, help="Look at single layers, and try a number for each.")
@click.option("--all", "to_the_end", is_flag=True, help="Measure to the end what cannot keep the limits, too.")
@click.option("--out", metavar="FOLDER", help="For results; default: tune-NAME.")
@click.option("--resume", is_flag=True, help="Go on with the run that FOLDER holds.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
@engine_options
def tune(
    *,
    model: str | None,
    data: tuple[str, ...],
    task: Task,
    grid: str | None,
    slo: str | None,
    concurrency: int,
    requests: int | None,
    output_tokens: int,
    tokens: int | None,
    answer_tokens: int,
    kl_tokens: int,
    layers: bool,
    to_the_end: bool,
    out: str | None,
    resume: bool,
    quiet: bool,
    config_file: str | None,
    sets: tuple[str, ...],
    **given: str | None,
) -> int:
    """Try numbers of experts, thresholds and other settings on your own data, and choose one of them.

    Quality is compared with the model's own setting, and is the same in every run. Costs are measured with --concurrency
    requests under way. Without --slo the point of best quality is chosen, of equal ones that which computes least; with it
    the fastest that keeps all limits. FOLDER gets result.json, profile.yaml for `colibrid serve --profile`, report.html and
    its pictures, and all finished points: --resume goes on where a run was interrupted.

    In the table * is the choice; + no other point beats in both quality and latency. Figures of points that were given up
    are of a part of the data, and cannot be compared with the others'.

    Exit code: 0 a point was chosen; 1 none keeps the limits; 78 the model, the data or an option is wrong.
    """
    limits = () if slo is None else parse_slo(slo, task)
    environment = read_environment()
    loaded = load_settings(environment, config_file, sets, given)
    use_plugins(loaded)
    settings = quietly(loaded)

    # Only now: mistakes above are told without all that.
    from colibrid.cli.models import resolve_model  # noqa: PLC0415
    from colibrid.model.pack import open_pack  # noqa: PLC0415

    library = Library()
    settings = settled(settings, model, environment, library)
    resolved = resolve_model(model, settings, environment, library)
    pack = open_pack(resolved.path, check_files=settings.model.weights == "files")
    shape = shape_of(pack.manifest)
    points = default_points(shape) if grid is None else grid_points(grid, shape)
    folder = user_path(out) if out is not None else Path(_folder_name(pack.manifest.name))
    order = _Order(
        data=data,
        task=task,
        slo=slo,
        limits=limits,
        concurrency=concurrency,
        requests=requests,
        output_tokens=output_tokens,
        tokens=tokens,
        answer_tokens=answer_tokens,
        kl_tokens=kl_tokens,
        layers=layers,
        to_the_end=to_the_end,
        folder=folder,
        resume=resume,
        quiet=quiet,
    )
    result = _run(_Ground(settings, library, pack, shape, points, order))
    return _write(result, shape, folder)


def _folder_name(model: str) -> str:
    """Of any model's name, which may hold anything."""
    return f"tune-{''.join(one if one.isalnum() or one in '._-' else '-' for one in model[:100])}"


def _run(ground: _Ground) -> Result:
    # Imported here: they bring numpy along.
    from colibrid.tune.data import load_data  # noqa: PLC0415
    from colibrid.tune.forecast import Forecast, pieces  # noqa: PLC0415
    from colibrid.tune.lab import EngineLab  # noqa: PLC0415
    from colibrid.tune.runner import Runner  # noqa: PLC0415
    from colibrid.tune.store import Store  # noqa: PLC0415
    from colibrid.tune.sweep import Sweep  # noqa: PLC0415

    order, shape = ground.order, ground.shape
    bar = Progress("tuning", show=pieces)
    most = most_per_token(ground.points, shape) or 0
    with Runner(ground.library, ground.settings, ground.pack, most=most) as runner:
        context = ground.settings.model.max_seq_len or ground.pack.manifest.hyperparameters.max_positions
        data = load_data(
            order.data, runner.text, order.task, context=context, most=order.tokens, longest_answer=order.answer_tokens
        )
        _check_lengths(order, ground.points, context)
        forecast = Forecast((lambda *_: None) if order.quiet else bar)
        key = _key(ground, data)
        store = Store(order.folder, key, resume=order.resume)
        lab = EngineLab(runner, data, ground.points, _load(order, ground.settings), order.kl_tokens, forecast)
        sweep = Sweep(lab, store, forecast, order.limits, to_the_end=order.to_the_end)
        try:
            tried, layers = _search(ground, lab, store, sweep, forecast)
        finally:
            bar.close()
    return _result(ground, data.name, key, tried, layers)


def _check_lengths(order: _Order, points: Sequence[Point], context: int) -> None:
    """ConfigError: what is to be generated fits no context, or no reader, which would be found out after hours only."""
    from colibrid.engine.channel import RESULT_RECORDS  # noqa: PLC0415

    if order.task == "generate" and order.output_tokens >= context:
        raise ConfigError(
            f"--output-tokens is {order.output_tokens}, and the context of {context} leaves no room for a prompt; lower it, or "
            "raise model.max_seq_len"
        )
    limited = any(point.max_tokens_per_expert is not None for point in points)
    if limited and order.task == "generate" and min(order.answer_tokens, context) > RESULT_RECORDS:
        raise ConfigError(
            f"--answer-tokens is {order.answer_tokens}, and at most {RESULT_RECORDS} where --grid has max_tokens_per_expert, "
            "as answers depend on the batch there; lower it"
        )


def _search(
    ground: _Ground, lab: EngineLab, store: Store, sweep: Sweep, forecast: Forecast
) -> tuple[list[Tried], Layers]:
    """The grid, then single layers, then the points with a number for each layer."""
    from colibrid.tune.choose import uniform_best  # noqa: PLC0415
    from colibrid.tune.lab import LAYERS, SEARCH  # noqa: PLC0415
    from colibrid.tune.layers import CANDIDATES  # noqa: PLC0415
    from colibrid.tune.points import normal  # noqa: PLC0415
    from colibrid.tune.store import Layers  # noqa: PLC0415

    own = ground.points[0]
    layers = store.layers(ground.shape)
    looking = layers is None and ground.order.layers and ground.shape.own_most > 0
    if looking:
        forecast.plan(LAYERS, 1)
        forecast.plan(SEARCH, 1)
        sweep.expect(CANDIDATES)
    assessed = sweep.assess(ground.points, own)
    if looking:
        stats = lab.layers()
        start = uniform_best(assessed, ground.shape.own_most)
        proposed: Sequence[Point] = ()
        if start is None:
            forecast.drop(SEARCH)
        else:
            proposed = lab.search(start)
        layers = Layers(stats=stats, proposed=tuple(normal(point, ground.shape) for point in proposed))
        store.keep_layers(layers)
        sweep.expect(0)
    if layers is None or not ground.order.layers:
        layers = Layers(stats=(), proposed=())
    known = set(ground.points)
    more = [point for point in dict.fromkeys(layers.proposed) if point not in known]
    return sweep.measure([*assessed, *sweep.assess(more, own)]), layers


def _result(ground: _Ground, data: str, key: Key, tried: Sequence[Tried], layers: Layers) -> Result:
    """data: the files' names."""
    from colibrid.tune.choose import choose, front  # noqa: PLC0415
    from colibrid.tune.result import Result  # noqa: PLC0415

    order = ground.order
    choice = choose(tried, order.limits)
    return Result(
        version=key.version,
        model=ground.pack.manifest.name,
        pack=key.pack,
        device=key.device,
        machine=key.machine,
        data=data,
        data_sha256=key.data_sha256,
        task=key.task,
        slo=order.slo,
        made=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        tried=tuple(tried),
        front=front(tried),
        chosen=choice.chosen,
        reason=choice.reason,
        layers=layers.stats,
    )


def _key(ground: _Ground, data: Data) -> Key:
    from colibrid.model.identity import pack_identity  # noqa: PLC0415
    from colibrid.tune.result import Point  # noqa: PLC0415
    from colibrid.tune.runner import serving  # noqa: PLC0415
    from colibrid.tune.store import Key, service_settings  # noqa: PLC0415

    order = ground.order
    load = _load(order, ground.settings)
    return Key(
        version=__version__,
        pack=pack_identity(ground.pack.manifest),
        data_sha256=data.sha256,
        task=order.task,
        device=_device(ground),
        machine=_machine(),
        tokens=order.tokens,
        kl_tokens=order.kl_tokens,
        answer_tokens=order.answer_tokens,
        concurrency=load.concurrency,
        requests=load.requests,
        output_tokens=load.output_tokens,
        ids_sha256=data.ids_sha256,
        service=service_settings(serving(ground.settings, Point())),
    )


def _load(order: _Order, settings: Settings) -> Load:
    from colibrid.tune.cost import Load  # noqa: PLC0415

    return Load(
        concurrency=order.concurrency,
        requests=8 * order.concurrency if order.requests is None else order.requests,
        output_tokens=order.output_tokens,
        pooling=settings.embeddings.pooling,
    )


def _device(ground: _Ground) -> str:
    from colibrid.engine.spec import device_name, make_spec  # noqa: PLC0415

    return device_name(make_spec(ground.settings, str(ground.pack.path), ground.pack.manifest))


def _machine() -> str:
    from colibrid.cli.bench_report import machine_name  # noqa: PLC0415
    from colibrid.engine.host_cpus import host_cpus  # noqa: PLC0415

    return machine_name(host_cpus().auto_threads)


def _write(result: Result, shape: Shape, folder: Path) -> int:
    from colibrid.cli.tune_table import table  # noqa: PLC0415
    from colibrid.tune.files import remove_file, replace_file  # noqa: PLC0415
    from colibrid.tune.profile import write_profile  # noqa: PLC0415
    from colibrid.tune.report import write_report  # noqa: PLC0415

    profile = folder / "profile.yaml"
    try:
        replace_file(folder / "result.json", msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        if result.chosen is None:
            remove_file(profile)  # of an earlier run with other limits
        else:
            write_profile(result, shape, profile)
    finally:  # what was found is told, whatever becomes of the files
        for line in (*table(result), result.reason):
            print(plain(line))
    if result.chosen is not None:
        print(plain(f"{profile}: serve with `colibrid serve MODEL --profile {profile}`"))
    try:
        for path in write_report(result, folder):
            print(plain(str(path)))
    except ConfigError as error:  # a run is not lost for a picture
        say(f"colibrid: {plain(str(error))}\n", sys.stderr)
    return EXIT_NOTHING if result.chosen is None else 0

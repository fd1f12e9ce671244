"""`colibrid verify PACK...`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from colibrid.cli.device import settled
from colibrid.cli.numbers import NumberRange
from colibrid.cli.options import engine_options, load_settings, quietly, use_plugins
from colibrid.cli.verify_report import details, plot, table, write_json
from colibrid.cli.verify_trial import MAX_KL, Trial
from colibrid.config.environment import read_environment
from colibrid.engine.library import Library
from colibrid.errors import ConfigError, ModelError
from colibrid.model.checkpoint import Checkpoint
from colibrid.model.pack import is_pack, open_pack
from colibrid.model.pack_model import PackModel
from colibrid.model.source import CheckpointModel
from colibrid.paths import user_path
from colibrid.text.lines import read_lines

if TYPE_CHECKING:
    from colibrid.model.forward import Weights

EXIT_WRONG = 1


@click.command(short_help="Check a pack's bytes, and how far it is from its source.")
@click.argument("packs", metavar="PACK...", nargs=-1, required=True)
@click.option("--against", metavar="SOURCE", help="The checkpoint (or another pack) to compare predictions with.")
@click.option(
    "--data", metavar="FILE", help='With --against: JSON lines with "text" to compare on; else token ids by rule.'
)
@click.option(
    "--tokens", type=click.IntRange(64, 1 << 20), default=16384, show_default=True, help="Most tokens of --data used."
)
@click.option("--questions", metavar="FILE", help='JSON lines with "messages" and "answer": the engine answers them.')
@click.option("--store", is_flag=True, help="Keep a few of SOURCE's predictions in each pack, for later checks.")
@click.option("--max-kl", type=NumberRange(0), show_default=str(MAX_KL), help="Fail above this divergence, in nats.")
@click.option("--min-exact", type=NumberRange(0, 100), metavar="PERCENT", help="Fail below this share of answers.")
@click.option("--json", "json_file", metavar="FILE", help="Everything found, as JSON; - for standard output.")
@click.option("--plot", "plot_file", metavar="FILE.png", help="Divergence and answers by size; wants matplotlib.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
@engine_options
def verify(
    *,
    packs: tuple[str, ...],
    against: str | None,
    data: str | None,
    tokens: int,
    questions: str | None,
    store: bool,
    max_kl: float | None,
    min_exact: float | None,
    json_file: str | None,
    plot_file: str | None,
    quiet: bool,
    config_file: str | None,
    sets: tuple[str, ...],
    **given: str | None,
) -> int:
    """Check the bytes of each PACK: sizes, shapes, sha256, no number that is not finite.

    With --against also how far its predictions are from the source's, over --data: KL divergence, loss, perplexity, and
    how often the likeliest token is the same. Without it, against the predictions that --store kept in the pack. With
    --questions the engine answers each by its likeliest tokens. Several packs make one table.

    Exit code: 0 all is well; 1 a pack is damaged or beyond a limit; 78 a pack or a file cannot be read.
    """
    if store and against is None:
        raise click.UsageError("--store keeps predictions of a source: give --against SOURCE, too")
    if data is not None and against is None:
        raise click.UsageError("--data are texts to compare a pack and its source on: give --against SOURCE, too")
    if min_exact is not None and questions is None:
        raise click.UsageError("--min-exact is a share of answers: give --questions FILE, too")
    texts = None if data is None else read_lines(data, "--data")
    asked = None if questions is None else read_lines(questions, "--questions")
    if asked is not None and any(line.messages is None or line.answer is None for line in asked):
        raise ConfigError(f'--questions {questions}: every line needs "messages" and "answer"')
    environment = read_environment()
    loaded = load_settings(environment, config_file, sets, given)
    use_plugins(loaded)
    settings = quietly(loaded)
    found = []
    with ExitStack() as stack:
        source = None if against is None else _source(against, stack)
        reference = None
        for name in packs:
            trial = Trial(name, texts, tokens, quiet=quiet)
            if trial.check_bytes():
                if source is not None and against is not None:
                    reference = trial.compare(against, source, reference, store=store)
                else:
                    trial.compare_golden()
                if asked is not None:
                    library = Library()
                    trial.ask(asked, settled(settings, name, environment, library), library)
                trial.judge(max_kl, min_exact)
            found.append(trial.found)
    if json_file != "-":
        for line in table(found):
            print(line)
        for each in found:
            for line in details(each):
                print(line)
    if json_file is not None:
        write_json(json_file, found)
    if plot_file is not None:
        plot(plot_file, found)
    return EXIT_WRONG if any(each.damages or each.failures for each in found) else 0


def _source(against: str, stack: ExitStack) -> Weights:
    """The model to compare with."""
    folder = user_path(against)
    if is_pack(folder):
        return PackModel(open_pack(folder))
    if not (folder / "config.json").is_file():
        raise ModelError(f"--against {against}: neither a checkpoint (config.json) nor a pack (colibri.json)")
    model = CheckpointModel(stack.enter_context(Checkpoint(folder)))
    model.check()
    return model

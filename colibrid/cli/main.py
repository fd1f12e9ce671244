"""The command line's front door: finds the verb, and turns errors into one clear line and an exit code.

Exit codes: 0 done · 1 failed · 2 wrong usage · 78 configuration or model wrong (a service manager should not restart)
· 130 interrupted. Verbs are imported when called, so that `colibrid --help` stays fast.
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import click

from colibrid import __version__
from colibrid.cli.say import plain, say
from colibrid.errors import ColibridError, ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_FAILED = 1
EXIT_CONFIG = 78
EXIT_INTERRUPTED = 130
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# verb -> (module, one line of help)
_VERBS = {
    "serve": ("colibrid.cli.serve", "Serve a model over the OpenAI API."),
    "complete": ("colibrid.cli.complete", "Continue a prompt once, without a server."),
    "convert": ("colibrid.cli.convert", "Make a pack from a Hugging Face checkpoint."),
    "experts": ("colibrid.cli.experts", "Look at and replace experts, and see which ones your data uses."),
    "quantize": ("colibrid.cli.quantize", "Make a pack of small weights, by your own texts."),
    "tune": ("colibrid.cli.tune", "Find how many experts your own data needs."),
    "verify": ("colibrid.cli.verify", "Check a pack's bytes, and how far it is from its source."),
    "export": ("colibrid.cli.export", "Write a pack back as a Hugging Face checkpoint."),
    "inspect": ("colibrid.cli.inspect", "Show what a model is and what it needs."),
    "keys": ("colibrid.cli.keys", "Add, list and revoke the keys that clients must send."),
    "plugins": ("colibrid.cli.plugins", "List the plugins that are installed."),
    "config": ("colibrid.cli.config", "Check, show and describe configurations."),
    "doctor": ("colibrid.cli.doctor", "Check this host, with a fix for each finding."),
    "bench": ("colibrid.cli.bench", "Measure the speed of this machine, or of a server."),
}


class _LazyGroup(click.Group):
    """A group that imports a verb only when it is called."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, _ctx: click.Context, name: str) -> click.Command | None:
        if name not in _VERBS:
            return None
        command = getattr(import_module(_VERBS[name][0]), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:  # click itself suggests only commands that are already imported
            near = difflib.get_close_matches(args[0], _VERBS, n=1)
            if not near:
                raise
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near[0]!r}?", ctx) from None

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _VERBS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="colibrid", message="%(prog)s %(version)s")
def cli() -> None:
    """Colibrid serves Mixture-of-Experts language models over the OpenAI API.

    `colibrid serve` without a model serves the small one that comes with the package.
    """


def run(arguments: Sequence[str]) -> int:
    """The exit code of one command line. Errors that a user can cause become lines on stderr, never a traceback."""
    try:
        result = cli.main(args=list(arguments), prog_name="colibrid", standalone_mode=False)
        sys.stdout.flush()  # at exit nobody would handle its errors
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except ColibridError as error:
        for line in str(error).splitlines():
            say(f"colibrid: {plain(line)}\n", sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError | ModelError) else EXIT_FAILED
    except BrokenPipeError:  # `colibrid inspect | head`: the reader has seen enough
        _drop_output()
        return EXIT_FAILED
    except MemoryError:
        say("colibrid: not enough memory for this command; give it more (ulimit -v), or a smaller input\n", sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        _drop_output()
        say(f"colibrid: the output cannot be written: {error.strerror}; make room, or send it elsewhere\n", sys.stderr)
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


def _drop_output() -> None:
    """What is still in the buffer would fail again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """The `colibrid` script."""
    _hold_standard_descriptors()
    sys.exit(run(sys.argv[1:]))


def _hold_standard_descriptors() -> None:
    """A caller may have closed 0, 1 or 2; a socket that took such a number would get what is printed."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    # Python has None for a stream that was closed when it started.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)

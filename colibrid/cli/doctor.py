"""`colibrid doctor [MODEL]`: looks at a host with the eyes of `serve`, and says what to do about each finding."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from colibrid.cli.doctor_host import Host, host_findings
from colibrid.cli.doctor_service import service_findings
from colibrid.cli.finding import Finding, ok, refused
from colibrid.cli.main import EXIT_CONFIG, EXIT_FAILED
from colibrid.cli.options import engine_options, load_settings, server_options, use_plugins
from colibrid.config.environment import read_environment
from colibrid.config.load import BUILT_IN
from colibrid.config.settings import Settings
from colibrid.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from colibrid.config.environment import Environment


@click.command(short_help="Check this host, with a fix for each finding.")
@click.argument("model", metavar="[MODEL]", required=False)
@engine_options
@server_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def doctor(
    model: str | None, config_file: str | None, sets: tuple[str, ...], *, as_json: bool, **given: str | None
) -> int:
    """Check kernel, CPUs, huge pages, limits, clock, configuration, GPU and its kernels, model, memory, disk space,
    addresses and keys, with the options of `colibrid serve`. Nothing is changed, converted or loaded.

    Exit code 0: it can serve (warnings are advice), 1: something of the host is wrong, 78: the configuration or the model.
    """
    environment = read_environment()
    findings = list(_findings(model, environment, config_file, sets, given))
    if as_json:
        wrong = [finding for finding in findings if finding.level == "error"]
        document = {"ok": not wrong, "findings": findings}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document)).decode() + "\n")
    else:
        for line in _lines(findings):
            print(line)
    return _exit_code(findings)


def _findings(
    model: str | None,
    environment: Environment,
    config_file: str | None,
    sets: Sequence[str],
    given: Mapping[str, str | None],
) -> list[Finding]:
    host = Host()
    try:
        loaded = load_settings(environment, config_file, sets, given)
        use_plugins(loaded)
    except ConfigError as reason:  # the host itself can still be looked at
        errors = [refused("configuration", ConfigError(line)) for line in str(reason).splitlines()]
        return [*errors, *host_findings(Settings(), host)]
    count = sum(origin != BUILT_IN for origin in loaded.origins.values())
    settings = loaded.settings
    return [
        ok("configuration", f"{count} keys are set"),
        *host_findings(settings, host),
        *service_findings(settings, model, environment, host),
    ]


def _lines(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.check:<14} {finding.text}")
        if finding.fix is not None:
            lines.append(f"{'':<23} fix: {finding.fix}")
    errors, warnings = (sum(one.level == level for one in findings) for level in ("error", "warning"))
    parts = [f"{count} {word}{'' if count == 1 else 's'}" for count, word in ((errors, "error"), (warnings, "warning"))]
    lines.append(f"{len(findings)} checks: {', '.join(parts)}")
    return lines


def _exit_code(findings: Sequence[Finding]) -> int:
    errors = [finding for finding in findings if finding.level == "error"]
    if any(finding.configuration for finding in errors):
        return EXIT_CONFIG
    return EXIT_FAILED if errors else 0

"""What bench/gpu_check.sh asks: which GPU there is, and at the end one JSON file and one table of all its steps.

    python bench/gpu_report.py device | arch | report FOLDER

`report` exits 1 iff a step failed.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from colibrid.engine.device_cuda import DeviceError, probe

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
TIMED_OUT = 124
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def describe() -> dict[str, Any]:
    """GPU 0, the driver and this tree."""
    found = probe(0)
    major, minor = found.capability
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    note = ROOT / "COMMIT"  # of a copy without git, whoever made it
    named = note.read_text().strip() if note.is_file() else ""
    return {
        "device": found.name,
        "capability": f"{major}.{minor}",
        "multiprocessors": found.multiprocessors,
        "driver_api": found.driver_api,
        "commit": done.stdout.strip() or named or "not a git checkout",
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
    }


def arch() -> str:
    """What kernels_cu/build.py calls this GPU's machine code: with `a` where kernels use the features of one chip."""
    major, minor = probe(0).capability
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def steps_of(folder: Path) -> dict[str, dict[str, int]]:
    """Exit code and seconds of each step."""
    lines = (line.split() for line in (folder / "steps.txt").read_text().splitlines())
    return {name: {"code": int(code), "seconds": int(seconds)} for name, code, seconds in lines}


def tests_of(folder: Path) -> dict[str, Any]:
    """Counts, and the figures that tests have recorded, of all junit files; empty without any."""
    parts = [_junit(path) for path in sorted(folder.glob("tests-*.xml"))]
    whole: dict[str, Any] = {}
    for part in parts:
        whole = {name: whole[name] + value if whole else value for name, value in part.items()}
    return whole


def _junit(path: Path) -> dict[str, Any]:
    root = ET.parse(path).getroot()  # noqa: S314 (as above)
    suite = root if root.tag == "testsuite" else root[0]
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    figures = [found.get("value", "") for found in root.iter("property") if found.get("name") == "figure"]
    return {**counts, "figures": figures}


def sanitizer_of(folder: Path, tool: str, code: int) -> str:
    """Its own summary, or that it did not finish."""
    text = (folder / f"{tool}.txt").read_text(errors="replace")
    found = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)
    if code == TIMED_OUT:
        return f"not finished; {text.count('Invalid') + text.count('Race reported')} findings until then"
    return found[-1] if found else text.strip().splitlines()[-1] if text.strip() else "no output"


def gather(folder: Path) -> dict[str, Any]:
    """Everything of one check."""
    steps = steps_of(folder)

    def read(name: str) -> Any:
        try:
            return json.loads((folder / name).read_text())
        except (OSError, ValueError):
            return None

    engines = {name: read(f"{name}.txt") for name in steps if name.startswith("engine-")}
    return {
        **(read("device.json") or {}),
        "steps": steps,
        "tests": tests_of(folder),
        "sanitizer": {tool: sanitizer_of(folder, tool, steps[tool]["code"]) for tool in TOOLS if tool in steps},
        "soak": read("soak.json"),
        "serve": read("serve.json"),
        "engine": [found for found in engines.values() if found is not None],
        "seams": read("gpu_bench.json"),
    }


def failed(steps: dict[str, dict[str, int]]) -> list[str]:
    """Steps that did not pass. A sanitizer that was stopped by its limit did not fail: the table says so."""
    return [
        name for name, step in steps.items()
        if step["code"] not in ((0, TIMED_OUT) if name in TOOLS else (0,))
    ]  # fmt: skip


def table(result: dict[str, Any]) -> list[str]:
    """For people."""
    lines = [f"{result.get('device', '?')}, commit {result.get('commit', '?')}, {result.get('date', '?')}", ""]
    for name, step in result["steps"].items():
        word = {0: "passed", TIMED_OUT: "stopped by its limit"}.get(step["code"], "FAILED")
        lines.append(f"{name:26} {word:22} {step['seconds']:4d} s")
    tests = result["tests"]
    if tests:
        counts = f"{tests['tests']}, {tests['failures']} failed, {tests['errors']} errors, {tests['skipped']} skipped"
        lines += ["", f"tests: {counts}", *(f"  {figure}" for figure in tests["figures"])]
    lines += [f"{tool}: {summary}" for tool, summary in result["sanitizer"].items()]
    soak = result["soak"]
    if soak:
        lines.append(
            f"soak: {soak['requests']} requests, {soak['errors']} errors, {soak['requests_per_s']:.0f}/s, device memory "
            f"{-soak['device_drift_bytes']:+d} B, {soak['engine_totals']['allocations_after_open']} allocations after ready"
        )
    names = ("ms", 9), ("tok/s", 8), ("GB/s", 7), ("of floor", 9), ("us/layer", 9), ("experts", 9), ("prefill", 9)
    lines += ["", f"{'decode, context':24}{'batch':>6}" + "".join(name.rjust(width) for name, width in names)]
    for bench in result["engine"]:
        lines += [
            f"{bench['model'] + ', ' + str(row['context']):24}{row['slots']:6d}{row['step_ms']:9.3f}"
            f"{row['decode_tokens_per_s']:8.0f}{row['read_bandwidth'] / 1e9:7.0f}{100 * row['floor_share']:7.0f} %"
            f"{row['layer_us_above_floor']:9.1f}{row['expert_runs_per_step']:9.1f}{row['prefill_tokens_per_s']:9.0f}"
            for row in bench["rows"]
        ]
    if result["serve"]:
        lines += ["", f"{'over HTTP':24}{'clients':>8}{'mean':>8}{'P99 ms':>8}{'tok/s':>8}{'first':>8}{'between':>9}"]
    for row in result["serve"] or ():
        report = row["report"]
        request, first, between = (report[f"{name}_ms"] for name in ("request", "first_token", "between_events"))
        lines.append(
            f"{row['shape']:24}{row['clients']:8d}{request['mean']:8.0f}{request['p99']:8.0f}"
            f"{report['output_tokens_per_s']:8.0f}{first['p50']:8.1f}{between['p50']:9.2f}"
        )
    return lines


def report(folder: Path) -> int:
    """Writes the JSON file, prints the table."""
    result = gather(folder)
    device = re.sub(r"[^a-z0-9]+", "-", result.get("device", "gpu").lower()).strip("-")
    RESULTS.mkdir(parents=True, exist_ok=True)
    target = RESULTS / f"gpu-{result.get('date', 'undated')}-{device}.json"
    for path in (target, folder / "result.json"):
        path.write_text(json.dumps(result, indent=1) + "\n")
    bad = failed(result["steps"])
    print(
        "\n".join(
            [
                "",
                *table(result),
                "",
                f"{target.relative_to(ROOT)}: {'FAILED: ' + ', '.join(bad) if bad else 'all passed'}",
            ]
        )
    )
    return 1 if bad else 0


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["device"]:
                print(json.dumps(describe(), indent=1))
            case ["arch"]:
                print(arch())
            case ["report", folder]:
                return report(Path(folder))
            case _:
                print(__doc__)
                return 2
    except DeviceError as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

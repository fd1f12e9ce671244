"""What metrics cost the daemon: a token, a request, a reading.

    python bench/metrics_cost.py [--layers 48] [--experts 128] [--streams 32] [--repeat 15]

Each figure is the mean of many calls, the least of some repeats (what else the machine does only adds), in this process,
without an engine.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from colibrid.batch.measures import ExpertLoad, Gaps, Measures
from colibrid.batch.reports import EngineReport, Traffic
from colibrid.config.settings import LimitsSettings, Settings
from colibrid.engine import abi
from colibrid.engine.state import EngineStatus
from colibrid.http.gate import Gate
from colibrid.http.metrics import exposition
from colibrid.http.metrics_table import METRICS
from colibrid.http.routes import ROUTES
from colibrid.http.served import Served

if TYPE_CHECKING:
    from collections.abc import Callable

TURNS = 2000
BLOCKS = 100
STEP_S = 0.01


def per_call(work: Callable[[], object], calls: int, repeat: int) -> float:
    """Nanoseconds, at best."""
    found = []
    for _ in range(repeat):
        began = time.perf_counter_ns()
        work()
        found.append((time.perf_counter_ns() - began) / calls)
    return min(found)


def tokens(streams: int) -> None:
    """TURNS turns of the loop that bring a token to each of `streams`."""
    gaps, now = Gaps(Measures(ExpertLoad((), 0, 1))), 1.0
    receivers = [SimpleNamespace(last_token=0.0) for _ in range(streams)]
    for _ in range(TURNS):
        now += STEP_S
        gaps.begin_turn(now)
        for receiver in receivers:
            gaps.token(receiver)
        gaps.end_turn()


def state_of(load: ExpertLoad) -> Any:
    """As much of AppState as a reading looks at."""
    status = EngineStatus(
        index=0, device="cpu", phase="ready", percent=None, reason=None, last_step_age_s=0.0, restarts=0, slots=32,
        running=0, queued=0, memory=None,
    )  # fmt: skip
    counters = {field[0]: 1 for field in abi.Stats._fields_}
    report = EngineReport(status=status, measures=Measures(load), counters=counters, traffic=Traffic())
    served = Served()
    served.count_routes(route.path for route in ROUTES)
    scheduler = SimpleNamespace(reports=(report,), expert_swaps=0, info=SimpleNamespace(model_id="model"))
    return SimpleNamespace(
        scheduler=scheduler,
        settings=Settings(),
        served=served,
        incoming=SimpleNamespace(bytes=0),
        gate=Gate(LimitsSettings()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 48), ("experts", 128), ("streams", 32), ("repeat", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    picked = random.Random(0)  # noqa: S311 - counts, not secrets
    block = array("I", [picked.randrange(1000) for _ in range(args.layers * args.experts)]).tobytes()
    load = ExpertLoad([args.experts] * args.layers, args.experts, 1 << 15)
    state = state_of(load)

    def requests() -> None:
        for _ in range(BLOCKS):
            load.add(block)

    token = per_call(lambda: tokens(args.streams), TURNS * args.streams, args.repeat)
    request = per_call(requests, BLOCKS, args.repeat)
    reading = per_call(lambda: exposition(state), 1, args.repeat)
    text = exposition(state)
    samples = sum(not line.startswith(b"#") for line in text.splitlines())
    print(f"a token, of {args.streams} in a turn: {token:.0f} ns")
    print(f"a request's counts of {args.layers} x {args.experts} experts: {request / 1000:.1f} us")
    print(f"a reading of {len(METRICS)} metrics, {samples} samples, {len(text)} bytes: {reading / 1e6:.1f} ms")


if __name__ == "__main__":
    main()

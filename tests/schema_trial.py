"""Thousands of requests made from the server's own description, right and wrong ones, against a daemon.

    python tests/schema_trial.py --cases 20000 --seed 1        (starts a daemon of its own)
    python tests/schema_trial.py http://127.0.0.1:8080         (one that runs, best with --max-seq-len 128)

Exits 1 at the first answer that is a server error, or not as the description says, or that takes a wrong request, and
when a canary request, asked again and again in between, answers differently.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as with_seed
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))  # where daemon_process has a part of it

from daemon_process import DaemonProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
CANARY = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "seed": 7, "logprobs": 3}
CANARY_EVERY = 50
TOO_LARGE, SERVER_ERROR, TIMEOUT = 413, 500, 504  # the last is what timeout_s asks for


class Trial:
    """One daemon under trial. Not `assert`: this is no test module, so `python -O` would leave it out."""

    def __init__(self, url: str, seed: int) -> None:
        self._url = url
        self._seed = seed
        self._session = requests.Session()
        self._canary = self._ask_canary()
        self.statuses: Counter[int] = Counter()
        self.count = 0

    def run(self, cases: int) -> None:
        document = self._session.get(f"{self._url}/openapi.json", timeout=60).json()
        schema = schemathesis.openapi.from_dict(document)
        operations = [found.ok() for found in schema.get_all_operations()]
        with_body = [operation for operation in operations if operation.method == "post"]
        others = [operation for operation in operations if operation.method != "post"]
        few = max(2, cases // 200)
        for operation in others:
            self._explore(operation, few)
        each = max(2, (cases - self.count) // len(with_body))
        for operation in with_body:
            self._explore(operation, each)
        self._check_canary()

    def _explore(self, operation: Any, cases: int) -> None:
        for mode, count in ((GenerationMode.POSITIVE, cases - cases // 2), (GenerationMode.NEGATIVE, cases // 2)):
            if mode is GenerationMode.NEGATIVE and not operation.body:
                continue

            @with_seed(self._seed)
            @settings(
                max_examples=count,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def one(case: Any) -> None:
                self._try(case)

            one()

    def _try(self, case: Any) -> None:
        self.count += 1
        case.body = with_integers(case.body)
        response = case.call(base_url=self._url, session=self._session, timeout=60)
        self.statuses[response.status_code] += 1
        in_time = response.status_code != TIMEOUT or not isinstance(case.body, dict) or not case.body.get("timeout_s")
        if response.status_code >= SERVER_ERROR and in_time:
            raise AssertionError(f"{response.text}\n{case.as_curl_command()}")
        # Too large is refused as well, but no status that the last check knows.
        case.validate_response(response, checks=CHECKS[:-1] if response.status_code == TOO_LARGE else CHECKS)
        if self.count % CANARY_EVERY == 0:
            self._check_canary()

    def _ask_canary(self) -> Any:
        answer = self._session.post(f"{self._url}/v1/completions", json=CANARY, timeout=60)
        if answer.status_code != 200:
            raise AssertionError(answer.text)
        return answer.json()["choices"]

    def _check_canary(self) -> None:
        found = self._ask_canary()
        if found != self._canary:
            raise AssertionError(f"the canary changed after {self.count} cases: {found}")


def with_integers(value: Any) -> Any:
    """`value` with 5.0 as 5: to JSON schemas both are integers, to us only the second."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list):
        return [with_integers(entry) for entry in value]
    if isinstance(value, dict):
        return {key: with_integers(entry) for key, entry in value.items()}
    return value


@contextlib.contextmanager
def own_daemon() -> Iterator[str]:
    """The address of a daemon with a short context, so that little time goes into text that nobody reads."""
    with tempfile.TemporaryDirectory() as folder, DaemonProcess(Path(folder), "--max-seq-len", "128") as process:
        yield f"http://127.0.0.1:{process.wait_ready().port}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("url", nargs="?")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with contextlib.nullcontext(options.url) if options.url else own_daemon() as url:
        trial, start = Trial(url, options.seed), time.monotonic()
        trial.run(options.cases)
    sys.stdout.write(
        f"{trial.count} cases in {time.monotonic() - start:.0f} s, statuses {dict(sorted(trial.statuses.items()))}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

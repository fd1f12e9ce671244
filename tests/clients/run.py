"""Clients that people use, unchanged, against a real daemon; each in an environment of its own, made on first use.

    python tests/clients/run.py [--folder build-clients] [NAME ...]        make clients

Names: openai-3, openai-2, langchain, litellm, node, lm-eval. Versions are pinned, so that a new release of a client does
not turn a clean tree red. lm-evaluation-harness is compared with the float64 forward pass of tests/reference.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT / "bench")]

from daemon_process import DaemonProcess  # noqa: E402 - found through the path above
from in_process import crc32c  # noqa: E402
from reference import Reference  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from colibrid.model.cache import BUNDLED_MODEL  # noqa: E402
from colibrid.model.convert import convert  # noqa: E402

PYTHON = {  # name -> what pip installs, script, arguments behind the URL
    "openai-3": (["openai==3.57.0"], "openai_python.py", ["3"]),
    "openai-2": (["openai==2.54.0"], "openai_python.py", ["2"]),
    "langchain": (["langchain-openai==1.7.4"], "langchain_client.py", []),
    "litellm": (["litellm==1.110.2"], "litellm_client.py", []),
}
NODE = "openai@6.49.0"
HARNESS = ["lm_eval[api]==0.4.13", "transformers>=5,<6"]
NAMES = (*PYTHON, "node", "lm-eval")
DOCUMENTS = 40
LIMIT_S = 900  # of one client
NEAR = 1e-3  # of a log-likelihood
CLEAR_GAP = 1e-2  # between the two best logits: above it, greedy or not is no question
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def environment(folder: Path, name: str, packages: list[str]) -> Path:
    """The interpreter of a virtual environment with `packages`; made unless it is there already."""
    key = hashlib.sha256(f"{sys.version} {packages}".encode()).hexdigest()[:12]
    made = folder / f"{name}-{key}"
    if not (made / "complete").exists():
        shutil.rmtree(made, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
        pip = [str(made / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(pip, check=True)
        (made / "complete").touch()
    return made / "bin" / "python"


def node_environment(folder: Path) -> Path:
    """A folder with a node_modules that holds the SDK."""
    made = folder / f"node-{NODE.replace('@', '-')}"
    if not (made / "complete").exists():
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        command = ["npm", "install", "--silent", "--no-fund", "--no-audit", "--prefix", str(made), NODE]
        subprocess.run(command, check=True)
        (made / "complete").touch()
    return made


def run(command: list[str], folder: Path, *, quiet: bool = False) -> bool:
    """True iff it exits with 0. No settings of ours and none of the user's, but those that keep it off the network.

    Quiet: what it says is shown only when it fails.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("COLIBRID_", "OPENAI_", "PYTHON"))}
    output: dict[str, Any] = {} if not quiet else {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=folder, env={**kept, **OFFLINE}, timeout=LIMIT_S, check=False, **output)
    if quiet and done.returncode != 0:
        print(done.stdout.decode("utf-8", "replace")[-20_000:], flush=True)
    return done.returncode == 0


# ------------------------------------------------------------------ lm-evaluation-harness


def documents() -> list[dict[str, str]]:
    """Known questions as the model was taught them, and their answers."""
    lines = (HERE.parent / "data" / "hummingbird-13m.eval.jsonl").read_text().splitlines()[:DOCUMENTS]
    found = []
    for line in lines:
        entry = json.loads(line)
        (question,) = entry["messages"]
        context = f"<|im_start|>user\n{question['content']}<|im_end|>\n<|im_start|>assistant\n"
        found.append({"context": context, "continuation": entry["answer"]})
    return found


def harness(python: Path, url: str, folder: Path) -> bool:
    """Log-likelihoods through local-completions (token ids, echo, logprobs), then compared."""
    given = documents()
    task = folder / "task"
    shutil.copytree(HERE / "lm_eval_task", task)
    text = (task / "hummingbird_answers.yaml").read_text()
    (task / "hummingbird_answers.yaml").write_text(text.replace("documents.jsonl", str(task / "documents.jsonl")))
    (task / "documents.jsonl").write_text("".join(f"{json.dumps(document)}\n" for document in given))
    model = {
        "model": "hummingbird-13m", "base_url": f"{url}/v1/completions", "tokenizer": str(BUNDLED_MODEL),
        "tokenizer_backend": "huggingface", "tokenized_requests": "True", "num_concurrent": "4", "max_length": "2048",
    }  # fmt: skip
    command = [
        str(python), "-m", "lm_eval", "run", "--model", "local-completions",
        "--model_args", ",".join(f"{key}={value}" for key, value in model.items()), "--tasks", "hummingbird_answers",
        "--include_path", str(task), "--output_path", str(folder / "out"), "--log_samples", "--batch_size", "8",
    ]  # fmt: skip
    if not run(command, folder, quiet=True):
        return False
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    return compare(given, {row["doc_id"]: row["filtered_resps"][0] for row in rows}, folder)


def compare(given: list[dict[str, str]], answers: dict[int, Any], folder: Path) -> bool:
    """Each log-likelihood against the float64 reference over the same ids."""
    convert(BUNDLED_MODEL, folder / "flat", crc32c=crc32c, backend="any")
    reference, tokenizer = Reference(folder / "flat"), Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    worst = 0.0
    wrong = 0
    for number, document in enumerate(given):
        context = tokenizer.encode(document["context"], add_special_tokens=False).ids
        whole = tokenizer.encode(document["context"] + document["continuation"], add_special_tokens=False).ids
        table = reference.log_softmax(whole)[len(context) - 1 : -1]
        expected = float(sum(row[token] for row, token in zip(table, whole[len(context) :], strict=True)))
        best = [sorted(row)[-2:] for row in table]
        greedy = all(row.argmax() == token for row, token in zip(table, whole[len(context) :], strict=True))
        clear = all(largest - second > CLEAR_GAP for second, largest in best)
        value, is_greedy = answers[number]
        worst = max(worst, abs(float(value) - expected))
        wrong += clear and (str(is_greedy) == "True") != greedy
    good = worst <= NEAR and not wrong and len(answers) == len(given)
    print(f"  {'ok  ' if good else 'FAIL'} {len(answers)} log-likelihoods, largest difference {worst:.1e}; {wrong} of"
          " the greedy marks wrong", flush=True)  # fmt: skip
    return good


# ------------------------------------------------------------------ all of them


def prepare(folder: Path, name: str) -> Path | None:
    """What the client runs with; None where it cannot run here."""
    if name in PYTHON:
        return environment(folder, name, PYTHON[name][0])
    if name == "lm-eval":
        return environment(folder, name, HARNESS)
    if shutil.which("node") is None or shutil.which("npm") is None:
        return None
    return node_environment(folder)


def ask(name: str, prepared: Path, url: str, scratch: Path) -> bool:
    """Run one client."""
    if name in PYTHON:
        _, script, arguments = PYTHON[name]
        return run([str(prepared), str(HERE / script), url, *arguments], scratch)
    if name == "lm-eval":
        return harness(prepared, url, scratch)
    shutil.copy(HERE / "openai_node.mjs", prepared)
    return run(["node", str(prepared / "openai_node.mjs"), url], prepared)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run unchanged clients against a daemon.")
    parser.add_argument("--folder", type=Path, default=ROOT / "build-clients", help="where environments are kept")
    parser.add_argument("names", nargs="*", choices=[[], *NAMES], help="default: all")
    options = parser.parse_args()
    names = options.names or list(NAMES)
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        prepared = dict(zip(names, pool.map(lambda name: prepare(options.folder.resolve(), name), names), strict=True))
    print(f"environments: {time.monotonic() - started:.0f} s", flush=True)
    failed = []
    with (
        tempfile.TemporaryDirectory() as scratch,
        DaemonProcess(Path(scratch), "--set", "logging.level=info") as daemon,
    ):
        url = f"http://127.0.0.1:{daemon.wait_ready().port}"
        for name in names:
            began = time.monotonic()
            place = prepared[name]
            if place is None:
                print(f"{name}: skipped, node and npm are not installed", flush=True)
                continue
            print(f"{name}:", flush=True)
            (Path(scratch) / name).mkdir()
            if not ask(name, place, url, Path(scratch) / name):
                failed.append(name)
            print(f"  {time.monotonic() - began:.1f} s", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else f"{len(names)} clients: ok", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

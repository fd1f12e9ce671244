"""Writes tests/data/random/*.json: what float32 transformers answers on the random checkpoints.

    pip install '.[reference]' && python tests/make_goldens.py

Refuses a case in which two experts are nearly tied for the last place of some token: there, correct programs may
differ. Choose another seed for it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from random_cases import CASES, Case, config_of, prompts_of  # noqa: E402
from random_checkpoints import write_checkpoint  # noqa: E402

OUT = Path(__file__).parent / "data" / "random"
SMALLEST_GAP = 1e-4  # of router logits, between the last expert taken and the first one left out


def answer(case: Case, folder: Path) -> dict[str, Any]:
    """Logits of every position of every prompt."""
    write_checkpoint(case, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    rows, smallest = [], float("inf")
    with torch.no_grad():
        for prompt in prompts_of(case):
            out = model.eval()(torch.tensor([prompt]), output_router_logits=True)
            rows.append([[round(value, 6) for value in row] for row in out.logits[0].tolist()])
            for logits in out.router_logits or ():
                k = config_of(case)["num_experts_per_tok"]
                best = torch.sort(logits, dim=-1, descending=True).values
                if k < best.shape[-1]:
                    smallest = min(smallest, float((best[:, k - 1] - best[:, k]).min()))
    if smallest < SMALLEST_GAP:
        raise SystemExit(f"{case.name}: two experts are {smallest:.1e} apart; choose another seed")
    return {
        "case": case.name,
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__}, CPU, float32",
        "smallest_router_gap": round(smallest, 6),
        "logits": rows,
    }


def main() -> None:
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(1)
    OUT.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            golden = answer(case, Path(folder))
        (OUT / f"{case.name}.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
        print(f"{case.name}: router gap {golden['smallest_router_gap']}")  # noqa: T201


if __name__ == "__main__":
    main()

"""Tools in llama.cpp's place, for tests of the scripts that measure beside it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import peers

if TYPE_CHECKING:
    from pathlib import Path

# The converter's output holds the name of the checkpoint, which the stand-in for llama-server then serves.
CONVERTER = "import sys; open(sys.argv[2], 'w').write(sys.argv[1])"
LLAMA_BENCH = """#!{python}
import json, sys
value = lambda name: sys.argv[sys.argv.index(name) + 1]
rows = [dict(n_prompt=int(n), n_gen=0, samples_ts=[90.0, 110.0, 100.0]) for n in value("-p").split(",")]
print(json.dumps([*rows, dict(n_prompt=0, n_gen=int(value("-n")), samples_ts=[7.0])]))
"""
LLAMA_QUANTIZE = """#!{python}
import shutil, sys
_, pure, source, target, kind = sys.argv
assert (pure, kind) == ("--pure", "Q8_0") and source.endswith("-f16.gguf"), sys.argv
shutil.copyfile(source, target)
"""
LLAMA_SERVER = """#!{python}
import os, sys
if sys.argv[1:] == ["--version"]:
    sys.exit(print("version: 1", file=sys.stderr))
value = lambda name: sys.argv[sys.argv.index(name) + 1]
assert value("-c") == str(int(value("-np")) * 1024), "each slot has its own context"
os.execv(sys.executable, [sys.executable, "-m", "colibrid.cli", "serve", open(value("-m")).read(), "--port",
    value("--port"), "--max-batch-size", value("-np"), "--set", "model.cache_dir={cache}"])
"""


def make_setup(folder: Path) -> peers.Setup:
    """Tools that stand in for llama.cpp's."""
    tools = folder / "bin"
    tools.mkdir()
    tool_texts = {"llama-bench": LLAMA_BENCH, "llama-quantize": LLAMA_QUANTIZE, "llama-server": LLAMA_SERVER}
    for name, text in tool_texts.items():
        (tools / name).write_text(text.format(python=sys.executable, cache=folder / "theirs"))
        (tools / name).chmod(0o755)
    (folder / "convert.py").write_text(CONVERTER)
    return peers.Setup(
        llama_bin=tools, converter=f"{sys.executable} {folder / 'convert.py'}", work=folder / "work", threads=1
    )

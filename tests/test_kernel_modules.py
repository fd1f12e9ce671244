"""Kernel modules that do not come with the package: the example in tests/plugins, where modules may come from, and what
they compute."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from in_process import EngineRefusalError, InProcessEngine
from live_server import serving
from replay import replay

from colibrid.batch.request import ExpertUsage, GenerateRequest, Sampling
from colibrid.engine import abi
from colibrid.engine.library import CustomModule, KernelModules, Library
from colibrid.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from colibrid.engine.channel import Event
    from colibrid.model.pack import Pack

ROOT = Path(__file__).resolve().parent.parent
LAYER, EXPERT, OTHER = 0, 1, 2
MARKER = """
#include <fcntl.h>
__attribute__((constructor)) static void opened(void) { (void)open("%s", O_CREAT | O_WRONLY, 0600); }
"""


def compile_c(source: Path, target: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    flags = [
        "-std=c11",
        "-O2",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wconversion",
    ]
    subprocess.run(
        [compiler, *flags, f"-I{ROOT / 'engine_c' / 'include'}", "-o", str(target), str(source), "-lm"], check=True
    )
    return target


@pytest.fixture(scope="module")
def gelu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, compiled as its head says."""
    return compile_c(ROOT / "tests" / "plugins" / "gelu.c", tmp_path_factory.mktemp("modules") / "gelu.so")


def custom(path: Path, **changes: Any) -> CustomModule:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    module = CustomModule(name="gelu", file=str(path), folders=(str(path.parent),), sha256=digest)
    return msgspec.structs.replace(module, **changes)


class GatedArgs(ctypes.Structure):
    """clb_gated_linear_args."""

    _fields_ = (
        ("gate", ctypes.c_void_p * 4),
        ("up", ctypes.c_void_p * 4),
        ("input", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("input_stride", ctypes.c_uint64),
        ("output_stride", ctypes.c_uint64),
        ("tokens", ctypes.c_uint32),
        ("cols", ctypes.c_uint32),
        ("row_begin", ctypes.c_uint32),
        ("row_end", ctypes.c_uint32),
    )


def rows16(matrix: np.ndarray) -> np.ndarray:
    """bf16 bits of a matrix whose rows are a multiple of 16, in the order that modules read."""
    bits = (matrix.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    rows, cols = bits.shape
    return np.ascontiguousarray(bits.reshape(rows // 16, 16, cols).transpose(0, 2, 1))


def test_the_example_computes_gelu(gelu: Path) -> None:
    """Its gate_up is gelu(gate x) * (up x), to fp32's rounding, for a list of tokens and a range of rows."""
    numbers = np.random.default_rng(3)
    gate, up = (numbers.standard_normal((32, 300)).astype(np.float32) for _ in range(2))
    gate, up = ((one.view(np.uint32) & 0xFFFF0000).view(np.float32) for one in (gate, up))
    inputs = numbers.standard_normal((5, 300)).astype(np.float32)
    picked = np.array([4, 0, 2], np.uint32)
    output = np.zeros((3, 32), np.float32)
    gate_bits, up_bits = rows16(gate), rows16(up)
    args = GatedArgs(
        gate=(gate_bits.ctypes.data, None, None, None),
        up=(up_bits.ctypes.data, None, None, None),
        input=inputs.ctypes.data,
        output=output.ctypes.data,
        inputs=picked.ctypes.data,
        input_stride=300,
        output_stride=32,
        tokens=3,
        cols=300,
        row_begin=16,
        row_end=32,
    )
    library = ctypes.CDLL(str(gelu))
    library.clb_module_entry.restype = ctypes.POINTER(ctypes.c_void_p)
    table = (
        library.clb_module_entry()
    )  # abi, bytes | name | precision, layout | rank, codes | supported, linear, gate_up
    ctypes.CFUNCTYPE(None, ctypes.POINTER(GatedArgs))(table[6])(ctypes.byref(args))
    x = inputs[picked].astype(np.float64)
    gated = x @ gate.T.astype(np.float64)
    erf = np.vectorize(__import__("math").erf)
    expected = 0.5 * gated * (1 + erf(gated / np.sqrt(2))) * (x @ up.T.astype(np.float64))
    assert np.all(output[:, :16] == 0)
    np.testing.assert_allclose(output[:, 16:], expected[:, 16:], rtol=2e-4, atol=2e-3)


def request_of(number: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(number),
        prompt_ids=tuple((number * 37 + index * 101) % 4000 for index in range(20)),
        max_tokens=60,
        sampling=Sampling(seed=number, temperature=1.0),
    )


def alone(engine: InProcessEngine, request: GenerateRequest) -> list[int]:
    return replay(engine, request, ExpertUsage(2, 0, 0, 0), lambda *_: [])


def test_two_modules_in_one_layer(bundled_pack: Pack, gelu: Path) -> None:
    """Two experts of a layer computed by the example, the others by the package's, change the text; back, it is as before."""
    index = 1 + KernelModules().built_in
    with InProcessEngine(bundled_pack.path, slots=1, max_seq_len=128, modules=(custom(gelu),)) as engine:
        plain = [alone(engine, request_of(number)) for number in range(4)]
        engine.replace(LAYER, EXPERT, None, module=index)
        one = [alone(engine, request_of(number)) for number in range(4)]
        engine.replace(LAYER, OTHER, None, module=index)
        two = [alone(engine, request_of(number)) for number in range(4)]
        assert plain != one != two
        for expert in (EXPERT, OTHER):
            engine.replace(LAYER, expert, None)
        assert [alone(engine, request_of(number)) for number in range(4)] == plain
        assert engine.stats().allocations_after_open == 0


def test_a_module_of_another_precision_is_refused(bundled_pack: Pack, gelu: Path) -> None:
    """The kernel must read the expert's format."""
    with KernelModules() as modules:
        wrong = 1 + modules.names.index("cpu_generic_fp32")
    with InProcessEngine(bundled_pack.path, slots=1, max_seq_len=128) as engine:
        with pytest.raises(EngineRefusalError) as refused:
            engine.replace(LAYER, EXPERT, None, module=wrong)
        assert refused.value.status == abi.Status.MODULE


async def test_kernels_are_swapped_under_load(library: Library, bundled_pack: Pack, gelu: Path) -> None:
    """No stream fails while an expert goes from kernel to kernel; those across a switch are as their replays."""
    module = custom(gelu)
    settings = {
        "batch": {"slots": 4, "prefix_reuse": "off"},
        "model": {"max_seq_len": 128},
        "modules": {
            "folders": list(module.folders),
            "load": {"gelu": {"file": module.file, "sha256": module.sha256}},
        },
    }
    async with serving(library, bundled_pack, **settings) as live:
        pool = live.scheduler
        assert pool.swaps is not None

        async def stream(number: int) -> tuple[GenerateRequest, list[int], ExpertUsage]:
            request = request_of(number)
            async with pool.submit(request) as generation:
                tokens = [record.token async for records in generation for record in records]
            assert generation.result is not None
            return request, tokens, generation.result.experts

        streams = [asyncio.create_task(stream(number)) for number in range(16)]
        swaps = 0
        while not all(task.done() for task in streams):
            outcome = await pool.swaps.replace(LAYER, EXPERT, None, "gelu" if swaps % 2 == 0 else "auto")
            assert outcome.version.module == ("gelu" if swaps % 2 == 0 else None)
            swaps += 1
            await asyncio.sleep(0.02)
        served = await asyncio.gather(*streams)
        with pytest.raises(RequestError, match=r"modules\.load has: gelu"):
            await pool.swaps.replace(LAYER, EXPERT, None, "none")
        assert pool.counts.failed == 0
    assert any(usage.switches for _, _, usage in served)
    index = 1 + KernelModules().built_in
    now = 0

    def bring(engine: InProcessEngine, generation: int) -> list[Event]:
        nonlocal now
        if generation % 2 == now:
            return []
        now = generation % 2
        return engine.replace(LAYER, EXPERT, None, module=index if now else 0, turns=1)

    with InProcessEngine(bundled_pack.path, slots=1, max_seq_len=128, modules=(custom(gelu),)) as engine:
        for request, tokens, usage in served:
            assert replay(engine, request, usage, bring) == tokens


@pytest.mark.parametrize(
    ("bend", "text"),
    [
        (lambda path: custom(path, sha256="0" * 64), "sha256"),
        (lambda path: custom(path, folders=("/usr/lib",)), "modules.folders"),
        (lambda path: custom(path, folders=()), "modules.folders"),
        (lambda path: custom(path, file=str(path.parent / "none.so")), "cannot be opened"),
        (lambda path: custom(path, file=f"{path.parent}/./gelu.so"), "without links"),
        (lambda path: custom(path, file=str(linked(path))), "without following links"),
    ],
    ids=["another hash", "another folder", "no folder", "no file", "dots", "a link"],
)
def test_modules_come_from_named_folders_only(gelu: Path, bend: Callable[[Path], CustomModule], text: str) -> None:
    """A file with another hash, outside the folders or behind a link is refused, naming the setting."""
    with pytest.raises(ConfigError, match=text) as refused:
        KernelModules(custom=(bend(gelu),))
    assert str(refused.value).startswith("modules.load.gelu")


def linked(path: Path) -> Path:
    link = path.parent / "link.so"
    if not link.is_symlink():
        link.symlink_to(path)
    return link


def maps_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_shared_objects_beside_weights_are_never_opened(
    library: Library, bundled_pack: Pack, tmp_path: Path
) -> None:
    """Planted modules in a model folder, under any name that might be looked for, and beside an expert that is swapped in,
    are not loaded."""
    marker = tmp_path / "opened"
    source = tmp_path / "planted.c"
    source.write_text((ROOT / "tests" / "plugins" / "gelu.c").read_text() + MARKER % marker)
    planted = compile_c(source, tmp_path / "planted.so")
    assert ctypes.CDLL(str(planted))
    assert marker.exists(), "the trap works"
    marker.unlink()
    pack = tmp_path / "trap.colibri"
    shutil.copytree(bundled_pack.path, pack)
    name = bundled_pack.manifest.layers[LAYER].expert_files[EXPERT]
    for trap in ("expert_0.so", "expert_0_1.so", f"{name}.so", "clb_cpu_avx2_bf16.so", "gelu.so", "libcolibri.so"):
        shutil.copy(planted, pack / trap)
    digest = hashlib.sha256(planted.read_bytes()).hexdigest()
    listed = {"version": 1, "modules": [{"name": "cpu_generic_bf16", "file": "expert_0.so", "sha256": digest}]}
    (pack / "modules.json").write_bytes(msgspec.json.encode(listed))
    settings = {
        "batch": {"slots": 1},
        "model": {"max_seq_len": 128},
        "experts": {"swap_slots": 1, "swap_folders": [str(pack)]},
    }
    async with serving(library, msgspec.structs.replace(bundled_pack, path=pack), **settings) as live:
        assert live.scheduler.swaps is not None
        await live.scheduler.swaps.replace(LAYER, EXPERT, str(pack / name), None)
        async with live.scheduler.submit(request_of(1)) as generation:
            assert [records async for records in generation]
        assert str(pack) not in maps_of(live.fleet.supervisors[0].engine_pid)
    assert not marker.exists()

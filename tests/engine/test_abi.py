"""The ctypes mirrors agree with the C compiler about every size, offset, enumerator and limit."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from colibrid.engine import abi

if TYPE_CHECKING:
    from enum import IntEnum

    from colibrid.engine.library import Library

HEADER = Path(__file__).resolve().parents[2] / "engine_c" / "include" / "colibri.h"
STRUCTS: dict[str, type[ctypes.Structure]] = {
    "clb_error": abi.Error,
    "clb_layer_desc": abi.LayerDesc,
    "clb_section_desc": abi.SectionDesc,
    "clb_file_desc": abi.FileDesc,
    "clb_model_desc": abi.ModelDesc,
    "clb_channel_config": abi.ChannelConfig,
    "clb_channel_layout": abi.ChannelLayout,
    "clb_stats": abi.Stats,
    "clb_channel_header": abi.ChannelHeader,
    "clb_command": abi.Command,
    "clb_event": abi.Event,
    "clb_bias": abi.Bias,
    "clb_expert_policy": abi.ExpertPolicy,
    "clb_request": abi.Request,
    "clb_record": abi.Record,
    "clb_prompt_record": abi.PromptRecord,
    "clb_result": abi.Result,
    "clb_tier_config": abi.TierConfig,
    "clb_module_ref": abi.ModuleRef,
    "clb_device_kernel": abi.DeviceKernel,
    "clb_device_desc": abi.DeviceDesc,
    "clb_weight_format": abi.WeightFormat,
    "clb_engine_config": abi.EngineConfig,
    "clb_memory_plan": abi.MemoryPlan,
    "clb_swap_desc": abi.SwapDesc,
    "clb_swap_report": abi.SwapReport,
}
ENUMS: dict[str, type[IntEnum]] = {
    "CLB_ERR_": abi.Status,
    "CLB_ROLE_": abi.Role,
    "CLB_FFN_": abi.FfnKind,
    "CLB_SCORE_": abi.Score,
    "CLB_QK_NORM_": abi.QkNorm,
    "CLB_PHASE_": abi.Phase,
    "CLB_CMD_": abi.CommandKind,
    "CLB_EVENT_": abi.EventKind,
    "CLB_LAYOUT_": abi.Layout,
    "CLB_HUGE_": abi.HugePages,
    "CLB_WEIGHTS_": abi.Weights,
    "CLB_MAIL_": abi.Mail,
}
CONSTANTS = {
    "CLB_ABI_VERSION": abi.ABI_VERSION,
    "CLB_MAX_SLOTS": abi.MAX_SLOTS,
    "CLB_MAX_TOP_LOGPROBS": abi.MAX_TOP_LOGPROBS,
    "CLB_MAX_BIAS": abi.MAX_BIAS,
    "CLB_MAX_STOP_IDS": abi.MAX_STOP_IDS,
    "CLB_ERROR_BYTES": abi.ERROR_BYTES,
    "CLB_KV_FULL": abi.KV_FULL,
    "CLB_NO_SLOT": abi.NO_SLOT,
    "CLB_FP32": abi.Precision.FP32,
    "CLB_FP16": abi.Precision.FP16,
    "CLB_BF16": abi.Precision.BF16,
    "CLB_INT8": abi.Precision.INT8,
    "CLB_INT4": abi.Precision.INT4,
    "CLB_FP8": abi.Precision.FP8,
    "CLB_FINISH_STOP": abi.Finish.STOP,
    "CLB_FINISH_LENGTH": abi.Finish.LENGTH,
    "CLB_REQ_LOGPROBS": abi.RequestFlag.LOGPROBS,
    "CLB_REQ_PROMPT_LOGPROBS": abi.RequestFlag.PROMPT_LOGPROBS,
    "CLB_REQ_MASKED": abi.RequestFlag.MASKED,
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """What the C compiler says: name of struct, member or constant -> bytes or value."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not HEADER.is_file():
        pytest.skip("needs a C compiler and the source tree")
    lines = ["#include <stdio.h>", '#include "colibri.h"', "int main(void) {"]
    for name, mirror in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        members = [field[0] for field in mirror._fields_]
        lines.extend(f'printf("{name}.{member} %zu\\n", offsetof({name}, {member}));' for member in members)
    enumerators = [f"{prefix}{member.name}" for prefix, enum in ENUMS.items() for member in enum if member.name != "OK"]
    lines.extend(f'printf("{name} %lld\\n", (long long)({name}));' for name in [*CONSTANTS, *enumerators])
    folder = tmp_path_factory.mktemp("abi")
    source = folder / "measure.c"
    source.write_text("\n".join([*lines, "return 0;", "}"]))
    subprocess.run([compiler, "-std=c11", f"-I{HEADER.parent}", str(source), "-o", str(folder / "measure")], check=True)
    output = subprocess.run([folder / "measure"], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in (line.split() for line in output.splitlines())}


@pytest.mark.parametrize("name", STRUCTS)
def test_struct_has_the_compilers_size_and_offsets(name: str, measured: dict[str, int]) -> None:
    """Each mirror has the size of its struct, and each member its offset."""
    mirror = STRUCTS[name]
    expected = {member: value for member, value in measured.items() if member.split(".")[0] == name}
    found = {name: ctypes.sizeof(mirror)}
    found |= {f"{name}.{field[0]}": getattr(mirror, field[0]).offset for field in mirror._fields_}
    assert found == expected


def test_mirrors_have_every_member() -> None:
    """No member of a struct of the header is missing in its mirror."""
    if not HEADER.is_file():
        pytest.skip("needs the source tree")
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    for name, mirror in STRUCTS.items():
        match = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", text, re.DOTALL)
        assert match is not None, name
        members = [re.sub(r"\[.*", "", line.split()[-1]).strip("*") for line in match[1].split(";") if line.strip()]
        assert members == [field[0] for field in mirror._fields_], name


def test_constants_and_enumerators_are_those_of_the_header(measured: dict[str, int]) -> None:
    """Each constant and enumerator has the header's value."""
    for name, value in CONSTANTS.items():
        assert measured[name] == value, name
    for prefix, enum in ENUMS.items():
        for member in enum:
            if member.name != "OK":
                assert measured[f"{prefix}{member.name}"] == member, member


def test_enums_are_complete() -> None:
    """No enumerator of the header is missing in its mirror."""
    if not HEADER.is_file():
        pytest.skip("needs the source tree")
    text = HEADER.read_text()
    for prefix, enum in ENUMS.items():
        names = set(re.findall(rf"\b{prefix}(\w+) = \d+", text))
        assert names == {member.name for member in enum} - {"OK"}, prefix


def test_every_function_of_the_header_has_a_prototype(library: Library) -> None:
    """All exported functions can be called, with typed arguments."""
    if HEADER.is_file():
        assert set(re.findall(r"^CLB_API .*?(clb_\w+)\(", HEADER.read_text(), re.MULTILINE)) == set(abi.PROTOTYPES)
    for name in abi.PROTOTYPES:
        assert getattr(library.c, name).argtypes is not None

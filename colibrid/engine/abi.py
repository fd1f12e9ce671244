"""ctypes mirrors of engine_c/include/colibri.h: same names without the clb_ prefix, same order of members.

tests/engine/test_abi.py compares every size and offset with the C compiler's. Nothing here does I/O.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from enum import IntEnum, IntFlag
from typing import ClassVar

ABI_VERSION = 3
MAX_SLOTS = 64
NO_SLOT = 0xFFFFFFFF
MAX_TOP_LOGPROBS = 20
MAX_BIAS = 1024
MAX_STOP_IDS = 64
ERROR_BYTES = 512


class Status(IntEnum):
    OK = 0
    ARGUMENT = 1
    VERSION = 2
    MEMORY = 3
    IO = 4
    FORMAT = 5
    CHECKSUM = 6
    NOT_FINITE = 7
    MODULE = 8
    UNSUPPORTED = 9
    FULL = 10
    STATE = 11
    NO_TOKEN = 12
    DEVICE = 13
    INTERNAL = 14


class Precision(IntEnum):
    FP32 = 0
    FP16 = 1
    BF16 = 2
    INT8 = 3
    INT4 = 4
    FP8 = 5


class Role(IntEnum):
    EMBEDDING = 0
    HEAD = 1
    FINAL_NORM = 2
    ATTN_NORM = 3
    QKV = 4
    QKV_BIAS = 5
    OUT = 6
    FFN_NORM = 7
    ROUTER = 8
    SHARED_GATE = 9
    OUT_BIAS = 10
    Q_NORM = 11
    K_NORM = 12
    GATE = 13
    UP = 14
    DOWN = 15


class FfnKind(IntEnum):
    DENSE = 0
    MOE = 1


class QkNorm(IntEnum):
    NONE = 0
    HEAD = 1
    ROW = 2


class Score(IntEnum):
    SOFTMAX = 0
    SIGMOID = 1


class Phase(IntEnum):
    STARTING = 0
    LOADING = 1
    READY = 2
    STOPPED = 3
    FAILED = 4


class CommandKind(IntEnum):
    OPEN = 1
    PREFILL = 2
    SET = 3
    CLOSE = 4
    RELEASE_RUN = 5


class EventKind(IntEnum):
    OPENED = 1
    TOKEN = 2
    FINISHED = 3
    CLOSED = 4
    FAILED = 5
    WAITING = 6
    SWITCHED = 7


class Finish(IntFlag):
    STOP = 1
    LENGTH = 2


class RequestFlag(IntFlag):
    LOGPROBS = 1
    PROMPT_LOGPROBS = 2
    MASKED = 4
    POOL_MEAN = 8
    POOL_LAST = 16


class Layout(IntEnum):
    FLAT = 0
    ROWS16 = 1
    MMA = 2


class HugePages(IntEnum):
    OFF = 0
    TRY = 1
    REQUIRE = 2


class Weights(IntEnum):
    FILES = 0
    DUMMY = 1


class Mail(IntEnum):
    STOP = 1
    CHECK = 2


KV_FULL = 0


class Error(ctypes.Structure):
    _fields_: ClassVar = [("status", c_int32), ("message", c_char * ERROR_BYTES)]


class LayerDesc(ctypes.Structure):
    _fields_: ClassVar = [
        ("ffn_kind", c_uint32),
        ("kv_kind", c_uint32),
        ("kv_values_per_token", c_uint32),
        ("window", c_uint32),
        ("experts", c_uint32),
        ("experts_per_token", c_uint32),
        ("expert_width", c_uint32),
        ("shared_width", c_uint32),
        ("score", c_uint32),
        ("renormalise", c_uint32),
        ("shared_gated", c_uint32),
        ("qk_norm", c_uint32),
        ("routed_scale", c_float),
    ]


class SectionDesc(ctypes.Structure):
    _fields_: ClassVar = [
        ("role", c_uint32),
        ("layer", c_int32),
        ("expert", c_int32),
        ("file", c_uint32),
        ("offset", c_uint64),
        ("bytes", c_uint64),
        ("precision", c_uint32),
        ("layout", c_uint32),
        ("rows", c_uint32),
        ("cols", c_uint32),
        ("group_rows", c_uint32),
        ("group_cols", c_uint32),
        ("scales_offset", c_uint64),
        ("zeros_offset", c_uint64),
    ]


class FileDesc(ctypes.Structure):
    _fields_: ClassVar = [
        ("name", c_char_p),
        ("bytes", c_uint64),
        ("crc32c", POINTER(c_uint32)),
        ("crc_count", c_uint32),
        ("alignment", c_uint32),
    ]


class ModelDesc(ctypes.Structure):
    _fields_: ClassVar = [
        ("abi_version", c_uint32),
        ("struct_bytes", c_uint32),
        ("vocab_size", c_uint32),
        ("layers", c_uint32),
        ("hidden", c_uint32),
        ("heads", c_uint32),
        ("kv_heads", c_uint32),
        ("head_dim", c_uint32),
        ("max_positions", c_uint32),
        ("tied_head", c_uint32),
        ("rms_norm_eps", c_float),
        ("attention_scale", c_float),
        ("rope_scale", c_float),
        ("section_count", c_uint32),
        ("file_count", c_uint32),
        ("reserved", c_uint32),
        ("rope_inv_freq", POINTER(c_float)),
        ("layer_table", POINTER(LayerDesc)),
        ("section_table", POINTER(SectionDesc)),
        ("file_table", POINTER(FileDesc)),
    ]


class ChannelConfig(ctypes.Structure):
    _fields_: ClassVar = [
        ("abi_version", c_uint32),
        ("struct_bytes", c_uint32),
        ("slots", c_uint32),
        ("layers", c_uint32),
        ("vocab_size", c_uint32),
        ("hidden", c_uint32),
        ("max_experts", c_uint32),
        ("max_seq_len", c_uint32),
        ("result_records", c_uint32),
        ("reserved", c_uint32),
    ]


class ChannelLayout(ctypes.Structure):
    _fields_: ClassVar = [
        ("total_bytes", c_uint64),
        ("command_ring", c_uint64),
        ("event_ring", c_uint64),
        ("requests", c_uint64),
        ("request_stride", c_uint64),
        ("results", c_uint64),
        ("result_stride", c_uint64),
        ("request_tokens", c_uint64),
        ("request_bias", c_uint64),
        ("request_stops", c_uint64),
        ("request_policy", c_uint64),
        ("request_mask", c_uint64),
        ("result_records", c_uint64),
        ("result_prompt", c_uint64),
        ("result_pooled", c_uint64),
        ("result_counts", c_uint64),
        ("command_capacity", c_uint32),
        ("event_capacity", c_uint32),
    ]


class Stats(ctypes.Structure):
    _fields_: ClassVar = [
        (name, c_uint64)
        for name in (
            "progress",
            "steps_prefill",
            "steps_decode",
            "tokens_prefill",
            "tokens_decode",
            "expert_launches",
            "expert_relaunches",
            "expert_assignments",
            "expert_trimmed",
            "expert_dropped",
            "allocations_after_open",
            "slots_open",
            "kv_bytes",
            "kv_bytes_used",
            "weights_bytes",
            "temp_bytes",
            "loaded_bytes",
            "requests_done",
            "requests_failed",
            "weights_generation",
        )
    ]


class ChannelHeader(ctypes.Structure):
    _fields_: ClassVar = [
        ("magic", c_uint32),
        ("abi_version", c_uint32),
        ("total_bytes", c_uint64),
        ("config", ChannelConfig),
        ("phase", c_uint32),
        ("reserved", c_uint32),
        ("stats", Stats),
    ]


class Command(ctypes.Structure):
    _fields_: ClassVar = [
        ("kind", c_uint32),
        ("slot", c_uint32),
        ("generation", c_uint64),
        ("start", c_uint32),
        ("count", c_uint32),
    ]


class Event(ctypes.Structure):
    _fields_: ClassVar = [
        ("kind", c_uint32),
        ("slot", c_uint32),
        ("generation", c_uint64),
        ("record", c_uint64),
        ("position", c_uint32),
        ("token", c_int32),
        ("flags", c_uint32),
        ("status", c_int32),
    ]


class Bias(ctypes.Structure):
    _fields_: ClassVar = [("token", c_int32), ("bias", c_float)]


class ExpertPolicy(ctypes.Structure):
    _fields_: ClassVar = [("k", c_uint32), ("threshold", c_float)]


class Request(ctypes.Structure):
    _fields_: ClassVar = [
        ("generation", c_uint64),
        ("seed", c_uint64),
        ("flags", c_uint32),
        ("choice", c_uint32),
        ("prompt_tokens", c_uint32),
        ("max_tokens", c_uint32),
        ("min_tokens", c_uint32),
        ("top_logprobs", c_uint32),
        ("prompt_top_logprobs", c_uint32),
        ("bias_count", c_uint32),
        ("stop_count", c_uint32),
        ("prefix_run", c_uint32),
        ("prefix_tokens", c_uint32),
        ("publish_run", c_uint32),
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("top_k", c_uint32),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("repetition_penalty", c_float),
        ("reserved", c_uint32),
    ]


class Record(ctypes.Structure):
    _fields_: ClassVar = [
        ("position", c_uint32),
        ("token", c_int32),
        ("logprob", c_float),
        ("top_count", c_uint32),
        ("top_ids", c_int32 * MAX_TOP_LOGPROBS),
        ("top_logprobs", c_float * MAX_TOP_LOGPROBS),
    ]


class PromptRecord(ctypes.Structure):
    _fields_: ClassVar = [
        ("logprob", c_float),
        ("top_count", c_uint32),
        ("top_ids", c_int32 * MAX_TOP_LOGPROBS),
        ("top_logprobs", c_float * MAX_TOP_LOGPROBS),
    ]


class Result(ctypes.Structure):
    _fields_: ClassVar = [
        ("generation", c_uint64),
        ("head", c_uint64),
        ("pad0", c_uint64 * 6),
        ("tail", c_uint64),
        ("pad1", c_uint64 * 7),
        ("assignments", c_uint64),
        ("trimmed", c_uint64),
        ("dropped", c_uint64),
        ("prompt_records", c_uint32),
        ("cached_tokens", c_uint32),
        ("weights_generation", c_uint64),
    ]


class TierConfig(ctypes.Structure):
    _fields_: ClassVar = [("bytes", c_uint64), ("page_bytes", c_uint32), ("huge_pages", c_uint32)]


class ModuleRef(ctypes.Structure):
    _fields_: ClassVar = [("name", c_char_p), ("path", c_char_p), ("by_name", c_uint32), ("reserved", c_uint32)]


class DeviceKernel(ctypes.Structure):
    _fields_: ClassVar = [("name", c_char_p), ("function", c_void_p), ("parameter_bytes", c_uint64)]


class DeviceDesc(ctypes.Structure):
    _fields_: ClassVar = [
        ("abi_version", c_uint32),
        ("struct_bytes", c_uint32),
        ("kernels_abi", c_uint32),
        ("kernel_count", c_uint32),
        ("kernels", POINTER(DeviceKernel)),
        ("entries", c_void_p),
        ("stream", c_void_p),
        ("copy_stream", c_void_p),
        ("pinned", c_void_p),
        ("pinned_bytes", c_uint64),
        ("pinned_device", c_uint64),
        ("arena", c_uint64),
        ("arena_bytes", c_uint64),
        ("channel_device", c_uint64),
        ("multiprocessors", c_uint32),
        ("capability", c_uint32),
    ]


class WeightFormat(ctypes.Structure):
    _fields_: ClassVar = [
        ("precision", c_uint32),
        ("group_rows", c_uint32),
        ("group_cols", c_uint32),
        ("zeros", c_uint32),
    ]


class EngineConfig(ctypes.Structure):
    _fields_: ClassVar = [
        ("abi_version", c_uint32),
        ("struct_bytes", c_uint32),
        ("channel", ChannelConfig),
        ("prefill_chunk", c_uint32),
        ("prefill_tokens", c_uint32),
        ("kv_precision", c_uint32),
        ("max_tokens_per_expert", c_uint32),
        ("threads", c_uint32),
        ("weights", c_uint32),
        ("dummy_seed", c_uint64),
        ("swap_slots", c_uint32),
        ("experts_most", c_uint32),
        ("tier_weights", TierConfig),
        ("tier_kv", TierConfig),
        ("tier_temp", TierConfig),
        ("dir_fd", c_int32),
        ("command_fd", c_int32),
        ("event_fd", c_int32),
        ("module_count", c_uint32),
        ("modules", POINTER(ModuleRef)),
        ("model", POINTER(ModelDesc)),
        ("channel_base", c_void_p),
        ("channel_bytes", c_uint64),
        ("device", POINTER(DeviceDesc)),
        ("cpus", POINTER(c_uint32)),
        ("swap_formats", POINTER(WeightFormat)),
        ("swap_format_count", c_uint64),
    ]


class MemoryPlan(ctypes.Structure):
    _fields_: ClassVar = [
        (name, c_uint64)
        for name in (
            "weights",
            "kv",
            "kv_bytes_per_token",
            "kv_tokens",
            "temp",
            "dispatch",
            "host",
            "total",
            "arena",
            "pinned",
            "swap",
            "graphs",
        )
    ]


class SwapDesc(ctypes.Structure):
    _fields_: ClassVar = [
        ("abi_version", c_uint32),
        ("struct_bytes", c_uint32),
        ("layer", c_uint32),
        ("expert", c_uint32),
        ("fd", c_int32),
        ("module", c_uint32),
        ("file", POINTER(FileDesc)),
        ("sections", POINTER(SectionDesc)),
    ]


class SwapReport(ctypes.Structure):
    _fields_: ClassVar = [("weights_generation", c_uint64), ("streams", c_uint32), ("free_blocks", c_uint32)]


# name -> (result type, argument types); plain addresses (c_void_p) where the caller holds an address.
PROTOTYPES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "clb_channel_plan": (c_int32, (POINTER(ChannelConfig), POINTER(ChannelLayout))),
    "clb_channel_init": (c_int32, (c_void_p, c_uint64, POINTER(ChannelConfig))),
    "clb_channel_check": (c_int32, (c_void_p, c_uint64, POINTER(ChannelConfig))),
    "clb_command_push": (c_int32, (c_void_p, POINTER(Command), c_uint32)),
    "clb_event_pop": (c_uint32, (c_void_p, POINTER(Event), c_uint32)),
    "clb_result_advance": (c_int32, (c_void_p, c_uint32, c_uint64)),
    "clb_channel_stats": (c_uint32, (c_void_p, POINTER(Stats))),
    "clb_abi_version": (c_uint32, ()),
    "clb_status_name": (c_char_p, (c_int32,)),
    "clb_engine_plan": (c_int32, (POINTER(EngineConfig), POINTER(MemoryPlan), POINTER(Error))),
    "clb_engine_open": (c_int32, (POINTER(EngineConfig), POINTER(c_void_p), POINTER(Error))),
    "clb_engine_run": (c_int32, (c_void_p,)),
    "clb_engine_turn": (c_int32, (c_void_p, POINTER(c_uint32))),
    "clb_engine_post": (c_int32, (c_void_p, c_uint32)),
    "clb_engine_stats": (c_int32, (c_void_p, POINTER(Stats))),
    "clb_engine_count_experts": (c_int32, (c_void_p,)),
    "clb_engine_check": (c_int32, (c_void_p, POINTER(Error))),
    "clb_engine_close": (None, (c_void_p,)),
    "clb_engine_swap_stage": (c_int32, (c_void_p, POINTER(SwapDesc), POINTER(Error))),
    "clb_engine_swap_post": (c_int32, (c_void_p, c_uint64)),
    "clb_engine_swap_wait": (c_int32, (c_void_p, c_uint32, POINTER(SwapReport), POINTER(Error))),
    "clb_engine_swap_cancel": (None, (c_void_p,)),
    "clb_kernels_abi": (c_uint32, ()),
    "clb_crc32c": (c_uint32, (c_uint32, c_void_p, c_size_t)),
}

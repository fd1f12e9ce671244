"""ctypes mirrors of the C structs that the CUDA tests pass: kernels_cu/abi.h, driver.h, routing.h, seam_trial.h."""

from __future__ import annotations

import ctypes
from typing import Any

from colibrid.engine import abi


class RouterArgs(ctypes.Structure):
    """clb_router_args of kernels_cu/abi.h."""

    _fields_ = (
        *((n, ctypes.c_uint64) for n in ("logits", "policy", "rows", "token_count", "indices", "weights", "kept")),
        *((n, ctypes.c_uint64) for n in ("block_counts", "slots", "expert_counts")),
        *((n, ctypes.c_uint64) for n in ("logits_stride", "policy_stride", "counts_stride")),
        *((n, ctypes.c_uint32) for n in ("experts", "k", "k_max", "score", "renormalise")),
        ("routed_scale", ctypes.c_float),
        ("block_tokens", ctypes.c_uint32),
        ("not_finite", ctypes.c_int32),
    )


class BucketArgs(ctypes.Structure):
    """clb_bucket_args of kernels_cu/abi.h."""

    _fields_ = (
        *((n, ctypes.c_uint64) for n in ("indices", "block_counts", "token_count", "counts", "offsets", "tokens")),
        ("places", ctypes.c_uint64),
        ("experts", ctypes.c_uint32),
        ("k_max", ctypes.c_uint32),
    )


class HostRouting(ctypes.Structure):
    """clb_routing_args of engine_c/src/routing.h."""

    _fields_ = (
        *(
            (n, ctypes.c_void_p)
            for n in [
                "logits",
                "layer",
                "policies",
                "indices",
                "weights",
                "kept",
                "trimmed",
                "dropped",
                "status",
                "counts",
                "offsets",
                "token_list",
                "place_list",
            ]
        ),
        ("logits_stride", ctypes.c_uint64),
        *((n, ctypes.c_uint32) for n in ("tokens", "k_max", "max_tokens_per_expert", "reserved")),
    )


class Launch(ctypes.Structure):
    """clb_launch of engine_c/src/driver.h."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("edge", ctypes.c_uint32),
    )


_P = ctypes.c_void_p
_U64 = ctypes.c_uint64


def _method(*arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int32, _P, *arguments)


class Driver(ctypes.Structure):
    """clb_driver of engine_c/src/driver.h, as far as the tests call it."""

    _fields_ = (
        ("self_", _P),
        ("last_code", ctypes.c_int32),
        ("last_name", ctypes.c_char_p),
        ("made", _U64),
        ("bind", _method()),
        ("launch", _method(_P, ctypes.POINTER(Launch))),
        ("copy_in", _method(_P, _U64, _P, _U64)),
        ("copy_out", _method(_P, _P, _U64, _U64)),
        ("copy_rows", _method(_P, _P)),
        ("fill", _method(_P, _U64, ctypes.c_uint8, _U64)),
        ("stream_wait", _method(_P)),
        ("rest", _P * 12),
    )


class SeamConfig(ctypes.Structure):
    """seam_config of seam_trial.h."""

    _fields_ = (
        ("channel_base", _P),
        ("channel", ctypes.POINTER(abi.ChannelConfig)),
        ("device", ctypes.POINTER(abi.DeviceDesc)),
        ("channel_bytes", _U64),
        *((n, ctypes.c_uint32) for n in ("rows", "experts", "k", "k_max", "score", "renormalise")),
        ("routed_scale", ctypes.c_float),
        ("edge", ctypes.c_uint32),
    )

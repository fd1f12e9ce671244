"""The typed configuration tree: what conf/colibrid.yaml says, with built-in defaults. Imports nothing of ours.

Bounds are declared here once (msgspec.Meta) and enforced by config.load.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Device = Literal["auto", "cpu", "cuda"]
Names = Annotated[list[Annotated[str, Meta(min_length=1, max_length=255)]], Meta(max_length=64)]
HugePages = Literal["off", "try", "require"]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ServerSettings(_Section, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080
    listen: Names | None = None  # instead of host and port: "host:port", "[v6]:port", "unix:PATH"
    socket_mode: Literal["0600", "0660", "0666"] = "0660"  # of paths in listen
    tls_cert_file: str | None = None  # for the TCP addresses
    tls_key_file: str | None = None
    admin_socket: str | None = None  # path of a unix socket; none: no admin routes
    api_key_file: str | None = None  # the older name of auth.keys_file
    allowed_hosts: Names | None = None  # none: on loopback addresses their names, elsewhere any
    allowed_origins: Names | None = None  # web pages that may ask; none: only our own
    trusted_proxies: Names | None = None  # whose X-Forwarded-For and -Proto count
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 8 << 20
    drain_timeout_s: Seconds = 30.0
    sse_ping_s: Annotated[float, Meta(gt=0, le=3600)] = 15.0
    strict: bool = False  # true: fields unknown to the API are 400 instead of a header


class KeyLimits(_Section, frozen=True, kw_only=True):
    """What one key may do; None: no limit, or, of a key in the file, what auth.limits says."""

    requests_per_minute: PositiveInt | None = None
    requests_at_once: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None  # prompt and output
    tokens_per_day: PositiveInt | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None  # the lowest number that a request may say


class AuthSettings(_Section, frozen=True, kw_only=True):
    keys_file: str | None = None  # none: the credential colibrid-keys of the service manager, if there is one
    limits: KeyLimits = KeyLimits()


class LimitsSettings(_Section, frozen=True, kw_only=True):
    queue: Annotated[int, Meta(ge=0, le=100_000)] = 256  # requests waiting beyond the slots
    max_tokens_default: PositiveInt = 1024
    prompt_bytes: Annotated[int, Meta(ge=1, le=1 << 30)] = 4 << 20


class ModelSettings(_Section, frozen=True, kw_only=True):
    path: str | None = None  # pack, Hugging Face folder or org/name; none: the bundled model
    served_name: str | None = None
    aliases: str | None = None  # more names of the model in requests, with commas between
    max_seq_len: PositiveInt | None = None  # none: the checkpoint's own
    dtype: Literal["auto", "fp32", "fp16", "bf16"] = "auto"  # for conversion on first use; auto: as in the checkpoint
    weights: Literal["files", "dummy"] = "files"
    dummy_seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    tool_parser: Literal["auto", "none", "hermes", "mistral", "deepseek", "llama3_json"] = "auto"
    reasoning_parser: Literal["auto", "none", "think", "harmony"] = "auto"
    cache_dir: str | None = None  # none: $CACHE_DIRECTORY, $XDG_CACHE_HOME/colibrid, ~/.cache/colibrid


class EngineSettings(_Section, frozen=True, kw_only=True):
    device: Device = "auto"
    threads: Literal["auto"] | Annotated[int, Meta(ge=1, le=256)] = "auto"  # auto: one a core, within the quota
    # Several engines of the same model, each with slots and KV memory of its own.
    replicas: Literal["auto"] | Annotated[int, Meta(ge=1, le=16)] = "auto"  # auto: as devices or cpu_sets list, else 1
    devices: Annotated[list[Annotated[int, Meta(ge=0, le=63)]], Meta(min_length=1, max_length=16)] | None = None
    cpu_sets: Annotated[list[str], Meta(min_length=1, max_length=16)] | None = None  # "0-7,16-23"
    stall_timeout_s: Annotated[float, Meta(ge=2, le=3600)] = 5.0  # an idle engine shows progress once a second
    load_timeout_s: Annotated[float, Meta(ge=1, le=86400)] = 600.0


class BatchSettings(_Section, frozen=True, kw_only=True):
    slots: Annotated[int, Meta(ge=1, le=64)] = 32
    window_ms: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    window_requests: Annotated[int, Meta(ge=1, le=64)] = 8
    prefill_chunk: Literal["auto"] | Annotated[int, Meta(ge=1, le=4096)] = "auto"  # auto: 64 on the CPU, 512 on CUDA
    prefill_tokens: Literal["auto"] | Annotated[int, Meta(ge=1, le=65536)] = "auto"  # auto: 512, 1024 on CUDA
    prefix_reuse: Literal["key", "all", "off"] = "key"  # prompts that begin alike: of one API key, of all, never


# One number for all MoE layers, or one for each layer (0: a dense one).
PerToken = Annotated[int, Meta(ge=1, le=16)] | Annotated[list[Annotated[int, Meta(ge=0, le=16)]], Meta(max_length=256)]
Share = Annotated[float, Meta(ge=0, le=1)]


class TaskExpertsSettings(_Section, frozen=True, kw_only=True):
    per_token: PerToken | None = None  # none: as experts.per_token
    threshold: Share | None = None  # none: as experts.threshold


class ExpertsSettings(_Section, frozen=True, kw_only=True):
    per_token: PerToken | None = None  # none: the model's own k
    threshold: Share = 0.0
    max_per_token: Annotated[int, Meta(ge=1, le=16)] | None = None  # none: the model's own k
    max_tokens_per_expert: PositiveInt | None = None  # none: nothing is ever dropped
    swap_slots: Annotated[int, Meta(ge=0, le=64)] = 0  # room for experts that replace others while serving
    generate: TaskExpertsSettings = TaskExpertsSettings()
    score: TaskExpertsSettings = TaskExpertsSettings()
    embed: TaskExpertsSettings = TaskExpertsSettings()


class EmbeddingsSettings(_Section, frozen=True, kw_only=True):
    pooling: Literal["mean", "last"] = "mean"


class TierSettings(_Section, frozen=True, kw_only=True):
    page_size: str | int = "auto"  # bytes or "64KiB", "2MiB"; auto: 2 MiB weights, 64 KiB kv, 4 KiB temp
    huge_pages: HugePages = "try"
    bytes: str | int = "auto"  # "80GiB" …; auto: what the model and the slots need


class TiersSettings(_Section, frozen=True, kw_only=True):
    weights: TierSettings = TierSettings()
    kv: TierSettings = TierSettings()
    temp: TierSettings = TierSettings()


class MemorySettings(_Section, frozen=True, kw_only=True):
    tiers: TiersSettings = TiersSettings()
    gpu_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9  # --gpu-memory-utilization; CPU: of the available RAM
    kv_tokens: PositiveInt | None = None  # tokens of the KV cache; none: tiers.kv.bytes


class KvSettings(_Section, frozen=True, kw_only=True):
    precision: Literal["auto", "fp32", "fp16"] = "auto"  # auto: fp32 on the CPU, fp16 on CUDA


class LoggingSettings(_Section, frozen=True, kw_only=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"  # auto: console on a terminal


class Settings(_Section, frozen=True, kw_only=True):
    """The whole tree; one attribute a YAML section."""

    server: ServerSettings = ServerSettings()
    auth: AuthSettings = AuthSettings()
    limits: LimitsSettings = LimitsSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    batch: BatchSettings = BatchSettings()
    experts: ExpertsSettings = ExpertsSettings()
    embeddings: EmbeddingsSettings = EmbeddingsSettings()
    memory: MemorySettings = MemorySettings()
    kv: KvSettings = KvSettings()
    logging: LoggingSettings = LoggingSettings()

"""The typed configuration tree, with built-in defaults: the one place where a key is declared. Imports nothing of ours.

A key is one line: its type with bounds (msgspec.Meta), a marker, its default. The marker is

    Live("…")      SIGHUP takes a changed value over while serving: whoever uses it reads it anew, or subscribes to
                   ops/reload
    Restart("…")   a changed value needs a restart; SIGHUP names it
    About("…")     for keys of sections inside lists and maps, where the marker of the list or map counts

and its text says what the key means: `make config` prints conf/colibrid.yaml, conf/colibrid.schema.json and
docs/reference/configuration.md from here. Beside plain values a key may be a list (`tuple[str, ...]`,
`tuple[SomeSection, ...]`) or a map with free names (`dict[str, int]`, `dict[str, SomeSection]`, `dict[str, Any]`), each
bounded by Meta(max_length); their defaults are () and field(default_factory=dict). config/load enforces all of it,
config/rules what no single key can show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field


@dataclass(frozen=True, slots=True)
class About:
    """What a key means, for people."""

    text: str


@dataclass(frozen=True, slots=True)
class Live(About):
    """A key that SIGHUP reloads."""


@dataclass(frozen=True, slots=True)
class Restart(About):
    """A key that is read once."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes that may also be written as 64KiB or 80GiB."""

    least: int = 0
    most: int = (1 << 63) - 1
    power_of_two: bool = False


PositiveInt = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, le=86400)]
Device = Literal["auto", "cpu", "cuda"]
HugePages = Literal["off", "try", "require"]
Names = Annotated[list[Annotated[str, Meta(min_length=1, max_length=255)]], Meta(max_length=64)]
ModelName = Annotated[str, Meta(max_length=256)]
SwapFormat = Literal[
    "fp16", "bf16", "int8", "int8-g128", "int4", "int4-z", "int4-g32", "int4-g32-z", "int4-g64", "int4-g64-z", "int4-g128",
    "int4-g128-z", "fp8", "fp8-b128",
]  # fmt: skip
Folder = Annotated[str, Meta(pattern="^/", max_length=4096)]
ProfileName = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
ModuleName = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9_-]{0,63}$")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections."""


class ServerSettings(Section, frozen=True, kw_only=True):
    """Where and how the daemon answers."""

    host: Annotated[str, Restart("address to bind; one that is not loopback needs auth.keys_file")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), Restart("port to bind; 0: any free port, printed in the banner")] = 8080
    listen: Annotated[
        Names | None,
        Restart(
            'instead of host and port, a list: [127.0.0.1:8080, "[::1]:8080", unix:/run/colibrid/api]; null: the sockets '
            "that systemd passes (socket activation), else host and port"
        ),
    ] = None
    socket_mode: Annotated[
        Literal["0600", "0660", "0666"],
        Restart("rights of the paths in listen, in quotes; keys are asked for there, too"),
    ] = "0660"
    tls_cert_file: Annotated[
        str | None,
        Restart("PEM: certificate and intermediates; with it the TCP addresses speak TLS 1.2 or 1.3"),
    ] = None
    tls_key_file: Annotated[
        str | None, Restart("PEM: its key, without a password; what the files hold is read again on SIGHUP")
    ] = None
    admin_socket: Annotated[
        str | None,
        Restart(
            "path of a unix socket with the admin routes, which only the daemon's user may open; null: none. "
            "`colibrid experts` asks there"
        ),
    ] = None
    api_key_file: Annotated[str | None, Live("the older name of auth.keys_file")] = None
    allowed_hosts: Annotated[
        Names | None,
        Live(
            "names that requests may call this server by: [api.example.org]; null: on loopback addresses localhost and the "
            "like (against DNS rebinding), elsewhere any"
        ),
    ] = None
    allowed_origins: Annotated[
        Names | None,
        Live(
            'web pages that may ask from a browser (CORS): [https://app.example.org], or ["*"] where keys are set; null: '
            "none but the server's own"
        ),
    ] = None
    trusted_proxies: Annotated[
        Names | None,
        Live(
            "addresses, networks or unix (who connects to a socket's path) whose X-Forwarded-For and X-Forwarded-Proto are "
            "believed: [127.0.0.1, 10.0.0.0/8]; null: nobody's"
        ),
    ] = None
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30), Size(), Live("larger requests are refused with 413")] = (
        8 << 20
    )
    drain_timeout_s: Annotated[Seconds, Live("after SIGTERM: time that running requests get to finish")] = 30.0
    sse_ping_s: Annotated[
        float,
        Meta(gt=0, le=3600),
        Live("a comment line this often keeps idle streams open through proxies"),
    ] = 15.0
    stream_interval_ms: Annotated[
        float,
        Meta(ge=0, le=1000),
        Live(
            "while more than 8 streams are open, their tokens wait for a common beat, once in so many milliseconds: it "
            "halves the daemon's work; 0: each token as it comes"
        ),
    ] = 16.0
    ui: Annotated[
        bool,
        Live("the page /ui; it holds no data, and asks for a key of scopes inference and metrics where keys are set"),
    ] = True
    strict: Annotated[
        bool, Live("true: request fields unknown to the API are 400; false: listed in a response header")
    ] = False


class KeyLimits(Section, frozen=True, kw_only=True):
    """What one key may do; None: no limit, or, of a key in the file, what auth.limits says."""

    requests_per_minute: Annotated[PositiveInt | None, Live("null: no limit")] = None
    requests_at_once: Annotated[PositiveInt | None, Live("null: no limit")] = None
    tokens_per_minute: Annotated[PositiveInt | None, Live("of prompts and answers; null: no limit")] = None
    tokens_per_day: Annotated[PositiveInt | None, Live("of prompts and answers; null: no limit")] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-1000, le=1000)] | None,
        Live("the lowest number, which is served first, that a request may give as its priority; null: any"),
    ] = None


class AuthSettings(Section, frozen=True, kw_only=True):
    """Who may ask."""

    keys_file: Annotated[
        str | None,
        Live(
            'keys that clients must send as "Authorization: Bearer KEY", one a line; `colibrid keys add` writes it, SIGHUP '
            "reads it again. null: the credential colibrid-keys of systemd (LoadCredential=), if any"
        ),
    ] = None
    limits: Annotated[KeyLimits, About("of each key whose line says nothing of its own")] = KeyLimits()


class LimitsSettings(Section, frozen=True, kw_only=True):
    """What requests may take."""

    queue: Annotated[
        int,
        Meta(ge=0, le=100_000),
        Live("requests that may wait for a slot; beyond it 503 with Retry-After"),
    ] = 256
    queue_timeout_s: Annotated[
        Annotated[float, Meta(gt=0, le=36000)] | None,
        Live("a request that has waited so long for a slot is 503 with Retry-After; null: it waits on"),
    ] = 300.0
    connections: Annotated[
        int,
        Meta(ge=1, le=1_000_000),
        Restart("open at a time, within the process's limit of descriptors; one more is told 503 and closed"),
    ] = 4096
    connections_per_address: Annotated[
        PositiveInt | None, Restart("of them from one client address, else 429; null: no limit")
    ] = None
    max_tokens_default: Annotated[
        PositiveInt, Live("output bound of chat requests that name none; KV memory is reserved for it")
    ] = 1024
    prompt_bytes: Annotated[int, Meta(ge=1, le=1 << 30), Size(), Live("longest prompt text, before tokenization")] = (
        4 << 20
    )


class ModelSettings(Section, frozen=True, kw_only=True):
    """Which model is served, and how it is read."""

    path: Annotated[
        str | None,
        Restart("a pack, a Hugging Face folder or org/name in the local cache; null: the bundled model"),
    ] = None
    served_name: Annotated[str | None, Restart("the id in /v1/models; null: the pack's own name")] = None
    aliases: Annotated[
        tuple[ModelName, ...], Meta(max_length=64), Live("more names that requests may use: [gpt-4o, my/model]")
    ] = ()
    max_seq_len: Annotated[
        PositiveInt | None,
        Restart("prompt + output tokens of one request; null: the checkpoint's own context"),
    ] = None
    dtype: Annotated[
        Literal["auto", "fp32", "fp16", "bf16"],
        Restart(
            "conversion on first use: auto (as in the checkpoint), fp32, fp16 or bf16; a pack of another type is refused"
        ),
    ] = "auto"
    precision: Annotated[
        Annotated[str, Meta(max_length=65536)] | None,
        Restart(
            "conversion on first use: formats of parts, layers and experts, as in 'experts=int4, layer 0=int8, "
            "expert 3:17=fp16, dense=int8'; null: all as dtype says. docs/PRECISION.md"
        ),
    ] = None
    weights: Annotated[
        Literal["files", "dummy"],
        Restart("dummy: seeded random weights instead of reading the files, to measure and to test"),
    ] = "files"
    dummy_seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1), Restart("seed of dummy weights")] = 0
    tool_parser: Annotated[
        Literal["auto", "none", "hermes", "mistral", "deepseek", "llama3_json"],
        Restart("how the model writes tool calls; auto: as the pack says, else as its chat template does"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "think", "harmony"],
        Restart("how it thinks: think (in <think> tags), harmony (in channels) or none; auto: as with tool_parser"),
    ] = "auto"
    cache_dir: Annotated[
        str | None,
        Restart("converted packs; null: $CACHE_DIRECTORY, $XDG_CACHE_HOME/colibrid, ~/.cache/colibrid"),
    ] = None


class SamplingSettings(Section, frozen=True, kw_only=True):
    """For requests that say nothing of it. null: as the model's generation_config.json says."""

    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None,
        Live("0: always the likeliest token; null: as the model says, else 1"),
    ] = None
    top_p: Annotated[Annotated[float, Meta(ge=1e-30, le=1)] | None, Live("null: as the model says, else 1 (off)")] = (
        None
    )
    top_k: Annotated[
        Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] | None, Live("null: as the model says, else 0 (off)")
    ] = None
    min_p: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, Live("null: as the model says, else 0 (off)")] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(ge=0.01, le=100)] | None, Live("null: as the model says, else 1 (off)")
    ] = None


class EngineSettings(Section, frozen=True, kw_only=True):
    """What computes."""

    device: Annotated[Device, Restart("auto, cpu or cuda; auto: the GPU if there is one that can serve the model")] = (
        "auto"
    )
    threads: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=1, le=256)],
        Restart("that compute; auto: one a core of the affinity mask, at most the CPU quota"),
    ] = "auto"
    replicas: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=1, le=16)],
        Restart(
            "engines behind this daemon, each with its own process, slots and KV memory; auto: as many as devices or "
            "cpu_sets lists, else 1. Requests go where their beginning is held, else to the least loaded; one that dies "
            "leaves the others serving"
        ),
    ] = "auto"
    devices: Annotated[
        Annotated[list[Annotated[int, Meta(ge=0, le=63)]], Meta(min_length=1, max_length=16)] | None,
        Restart("GPUs, one engine each: [0, 1]; null: the first ones"),
    ] = None
    cpu_sets: Annotated[
        Annotated[list[str], Meta(min_length=1, max_length=16)] | None,
        Restart('CPUs of each engine, e.g. one set a NUMA node: ["0-7", "8-15"]; null: equal shares'),
    ] = None
    stall_timeout_s: Annotated[
        float,
        Meta(ge=2, le=3600),
        Live(
            "an engine whose progress counter stands still for so long is killed and restarted; an idle one shows "
            "progress once a second"
        ),
    ] = 5.0
    load_timeout_s: Annotated[float, Meta(ge=1, le=86400), Live("the longest that loading a model may take")] = 600.0


class BatchSettings(Section, frozen=True, kw_only=True):
    """How requests share a step."""

    slots: Annotated[
        int,
        Meta(ge=1, le=64),
        Restart("requests computed together; each reserves KV memory while it runs"),
    ] = 32
    window_ms: Annotated[
        float,
        Meta(ge=0, le=1000),
        Live("an idle engine waits so long for company of a first request; 0: starts at once"),
    ] = 0.0
    window_requests: Annotated[int, Meta(ge=1, le=64), Live("the window closes early when so many have come")] = 8
    prefill_chunk: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=1, le=4096)],
        Restart(
            "prompts are computed in chunks cut at multiples of this many tokens; auto: 64 on the CPU, 512 on a GPU"
        ),
    ] = "auto"
    prefill_tokens: Annotated[
        Literal["auto"] | Annotated[int, Meta(ge=1, le=65536)],
        Restart("most prompt tokens of one step over all slots, at least prefill_chunk; auto: 512, on a GPU 1024"),
    ] = "auto"
    prefix_reuse: Annotated[
        Literal["key", "all", "off"],
        Live(
            "what prompts that begin alike share with earlier ones, as long as the KV memory is not needed: key (those "
            "of the same API key), all, off. Results are the same; only timing can tell, which is why keys are kept "
            "apart"
        ),
    ] = "key"


# One number for all MoE layers, or one for each layer (0: a dense one).
PerToken = Annotated[int, Meta(ge=1, le=16)] | Annotated[list[Annotated[int, Meta(ge=0, le=16)]], Meta(max_length=256)]
Share = Annotated[float, Meta(ge=0, le=1)]


class TaskExpertsSettings(Section, frozen=True, kw_only=True):
    """For one kind of request."""

    per_token: Annotated[PerToken | None, Live("null: as experts.per_token")] = None
    threshold: Annotated[Share | None, Live("null: as experts.threshold")] = None


class ExpertsSettings(Section, frozen=True, kw_only=True):
    """How many experts a token may use."""

    per_token: Annotated[
        PerToken | None,
        Live(
            "experts a token may use (k) in each MoE layer: a number, or a list of one number for each layer (0: a layer "
            "without experts); null: the model's own"
        ),
    ] = None
    threshold: Annotated[
        Share, Live("leave out experts whose weight is below this share of the token's largest; 0: off")
    ] = 0.0
    max_per_token: Annotated[
        Annotated[int, Meta(ge=1, le=16)] | None,
        Restart("the most that per_token, here or in a request, may say; null: the model's own"),
    ] = None
    max_tokens_per_expert: Annotated[
        PositiveInt | None,
        Restart(
            "most tokens one expert takes from one step, the rest is dropped, so that answers depend on what else is in "
            "the batch; null: no limit, nothing is ever dropped"
        ),
    ] = None
    profiles: Annotated[
        dict[
            ProfileName,
            Annotated[str, Meta(min_length=1, max_length=4096), About("the file of the profile of this name")],
        ],
        Meta(max_length=32),
        Live(
            "profiles that `colibrid tune` has written for this pack, files by the names that requests may give as `profile` "
            "(docs/EXPERTS.md); {}: none. SIGHUP reads the files again"
        ),
    ] = field(default_factory=dict)
    swap_slots: Annotated[
        int,
        Meta(ge=0, le=64),
        Restart("blocks of the largest expert kept free, to replace experts while serving (docs/HOT_SWAP.md)"),
    ] = 0
    swap_formats: Annotated[
        Annotated[tuple[SwapFormat, ...], Meta(max_length=16)],
        Restart(
            "formats that an expert may be replaced by on a GPU, beyond those of the pack's experts; the CPU takes any. Its "
            "steps then have kernels for them, and any but bf16 makes 16-bit matrices fp16"
        ),
    ] = ()
    swap_folders: Annotated[
        tuple[Folder, ...],
        Meta(max_length=64),
        Live("absolute paths of folders: only files below them may replace experts; []: none"),
    ] = ()
    generate: Annotated[TaskExpertsSettings, About("for requests that generate text")] = TaskExpertsSettings()
    score: Annotated[TaskExpertsSettings, About("for requests that only read the prompt (max_tokens: 0)")] = (
        TaskExpertsSettings()
    )
    embed: Annotated[TaskExpertsSettings, About("for /v1/embeddings")] = TaskExpertsSettings()


class KernelModuleSettings(Section, frozen=True, kw_only=True):
    """A shared object with kernels of its own for experts."""

    file: Annotated[str, Meta(min_length=1, max_length=4096), About("its absolute path, below one of modules.folders")]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$"), About("of the file; another one is not loaded")]


class ModulesSettings(Section, frozen=True, kw_only=True):
    """Kernel modules that do not come with the package (docs/HOT_SWAP.md)."""

    folders: Annotated[
        tuple[Folder, ...],
        Meta(max_length=64),
        Restart("absolute paths of folders: modules are loaded from below them only; []: none"),
    ] = ()
    load: Annotated[
        dict[ModuleName, KernelModuleSettings],
        Meta(max_length=8),
        Restart("by name, for experts on the CPU; they compute those experts only for which they are named"),
    ] = field(default_factory=dict)


class EmbeddingsSettings(Section, frozen=True, kw_only=True):
    """/v1/embeddings."""

    pooling: Annotated[
        Literal["mean", "last"], Live("of a text's hidden states: mean of all positions, or last position")
    ] = "mean"


_PAGE = Size(4096, 1 << 30, power_of_two=True)


class TierSettings(Section, frozen=True, kw_only=True):
    """One pool."""

    page_size: Annotated[
        str | int, _PAGE, Restart("unit of allocation; auto: 2MiB for weights, 64KiB for kv, 4KiB for temp")
    ] = "auto"
    huge_pages: Annotated[HugePages, Restart("off, try (falls back) or require (fails to start without them)")] = "try"
    bytes: Annotated[str | int, Size(), Restart("auto: what is needed")] = "auto"


class TiersSettings(Section, frozen=True, kw_only=True):
    """One pool each; fixed when the engine opens."""

    weights: Annotated[TierSettings, About("the model")] = TierSettings()
    kv: Annotated[
        TierSettings, About("what requests have read and written; below all slots at full length, requests wait")
    ] = TierSettings()
    temp: Annotated[TierSettings, About("what a step needs; auto: the worst one")] = TierSettings()


class MemorySettings(Section, frozen=True, kw_only=True):
    """What the engine may take."""

    tiers: TiersSettings = TiersSettings()
    gpu_fraction: Annotated[
        float,
        Meta(gt=0, le=1),
        Restart("the most of the device's free memory (CPU: of the available RAM) that the bill may take"),
    ] = 0.9
    kv_tokens: Annotated[
        PositiveInt | None,
        Restart("tokens of the KV cache, instead of tiers.kv.bytes; null: as that says"),
    ] = None


class KvSettings(Section, frozen=True, kw_only=True):
    """The KV cache."""

    precision: Annotated[Literal["auto", "fp32", "fp16"], Restart("auto: fp32 on the CPU, fp16 on a GPU")] = "auto"


class MetricsSettings(Section, frozen=True, kw_only=True):
    """What Prometheus reads (docs/OBSERVABILITY.md); the admin socket answers GET /metrics always."""

    enabled: Annotated[
        bool, Live("answer GET /metrics on the public addresses too; where keys are set, to those of scope metrics")
    ] = True
    bandwidth_gb_s: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        Live(
            "of the memory that holds the weights, the line `read` of `colibrid bench engine`: dashboards then show a "
            "step's time against the least that it could take; null: they do not"
        ),
    ] = None


class LoggingSettings(Section, frozen=True, kw_only=True):
    """What goes to stderr; prompts never do."""

    level: Annotated[Literal["debug", "info", "warning", "error"], Live("the least that is written")] = "info"
    format: Annotated[Literal["auto", "console", "json"], Live("auto: console on a terminal, else json")] = "auto"


class Settings(Section, frozen=True, kw_only=True):
    """The whole tree; one attribute a YAML section."""

    server: ServerSettings = ServerSettings()
    auth: AuthSettings = AuthSettings()
    limits: LimitsSettings = LimitsSettings()
    model: ModelSettings = ModelSettings()
    sampling: SamplingSettings = SamplingSettings()
    engine: EngineSettings = EngineSettings()
    batch: BatchSettings = BatchSettings()
    experts: ExpertsSettings = ExpertsSettings()
    modules: ModulesSettings = ModulesSettings()
    embeddings: EmbeddingsSettings = EmbeddingsSettings()
    memory: MemorySettings = MemorySettings()
    kv: KvSettings = KvSettings()
    metrics: MetricsSettings = MetricsSettings()
    logging: LoggingSettings = LoggingSettings()
    plugins: Annotated[
        dict[
            str,
            Annotated[
                dict[str, Annotated[Any, About("what the plugin says that it means")]],
                Meta(max_length=64),
                About("the settings of the plugin of this name, {}: none"),
            ],
        ],
        Meta(max_length=16),
        Restart(
            "installed plugins to load, by name, each with its own settings (docs/PLUGINS.md); others are not loaded"
        ),
    ] = field(default_factory=dict)

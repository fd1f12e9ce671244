"""Small random checkpoints in Hugging Face form, the same bytes everywhere and always.

Values come from the raw 64-bit stream of PCG64, which numpy promises never to change, and from exact arithmetic; so
the repository holds only the reference's answers (tests/data/random/*.json) and not the weights.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from colibrid.model import floats
from colibrid.model.checkpoint import PRECISION_BY_DTYPE
from colibrid.model.manifest import Precision

if TYPE_CHECKING:
    from pathlib import Path

DTYPE_NAMES: dict[Precision, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
PROMPT_LENGTHS = (23, 70)  # the second crosses a chunk border of 64


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint. `config` overrides the family's base below."""

    name: str
    family: str  # "qwen2_moe" or "mixtral"
    config: dict[str, Any]
    precision: Precision = "fp32"
    fused: bool = False  # experts.gate_up_proj and experts.down_proj
    shards: int = 1
    seed: int = 0


_BASE: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": True,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
    },
}
_COMMON = {
    "vocab_size": 20,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 19,
}

CASES: tuple[Case, ...] = (
    Case(name="qwen-tied-gqa", family="qwen2_moe", seed=1, config={"tie_word_embeddings": True}),
    Case(
        name="qwen-64-experts-k8",
        family="qwen2_moe",
        seed=2,
        precision="bf16",
        fused=True,
        shards=3,
        config={"num_hidden_layers": 1, "num_experts": 64, "num_experts_per_tok": 8, "num_key_value_heads": 4},
    ),
    Case(
        name="qwen-dense-first-renormalised",
        family="qwen2_moe",
        seed=3,
        shards=2,
        config={
            "num_hidden_layers": 4,
            "mlp_only_layers": [0],
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    Case(
        name="qwen-every-second-no-shared-k1",
        family="qwen2_moe",
        seed=4,
        fused=True,
        config={
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "num_experts": 6,
            "num_experts_per_tok": 1,
            "shared_expert_intermediate_size": 0,
            "qkv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        name="qwen-odd-sizes",
        family="qwen2_moe",
        seed=5,
        precision="bf16",
        config={
            "num_hidden_layers": 4,
            "hidden_size": 44,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 22,
            "num_experts": 16,
            "num_experts_per_tok": 5,
            "moe_intermediate_size": 19,
            "shared_expert_intermediate_size": 37,
            "intermediate_size": 51,
            "mlp_only_layers": [1, 3],
            "vocab_size": 17,
            "eos_token_id": 16,
        },
    ),
    Case(name="qwen-fp16", family="qwen2_moe", seed=6, precision="fp16", config={"hidden_size": 64, "num_experts": 5}),
    Case(
        name="mixtral-gqa-sharded",
        family="mixtral",
        seed=7,
        shards=2,
        config={"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    Case(
        name="mixtral-k1-tied-fused",
        family="mixtral",
        seed=8,
        precision="bf16",
        fused=True,
        config={
            "num_hidden_layers": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_theta": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
        },
    ),
    Case(
        name="mixtral-deep-head-dim",
        family="mixtral",
        seed=9,
        precision="bf16",
        config={
            "num_hidden_layers": 4,
            "num_local_experts": 16,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 4,
            "head_dim": 24,
        },
    ),
    Case(
        name="mixtral-wide-vocabulary",
        family="mixtral",
        seed=10,
        config={"num_hidden_layers": 1, "vocab_size": 300, "eos_token_id": 299},
    ),
)


def config_of(case: Case) -> dict[str, Any]:
    """config.json."""
    merged = {**_COMMON, **_BASE[case.family], **case.config}
    merged["torch_dtype"] = DTYPE_NAMES[case.precision]
    return {key: value for key, value in merged.items() if value is not None or key == "bos_token_id"}


def prompts_of(case: Case) -> list[list[int]]:
    """Token ids of the prompts that the golden file answers."""
    vocabulary = config_of(case)["vocab_size"]
    raw = np.random.PCG64(1000 + case.seed)
    return [[int(value % vocabulary) for value in raw.random_raw(length)] for length in PROMPT_LENGTHS]


def write_checkpoint(case: Case, folder: Path) -> Path:
    """A Hugging Face folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(case)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tensors(folder, tensors_of(case, config), case.precision, case.shards)
    return folder


def write_tensors(folder: Path, tensors: dict[str, floats.Array], precision: Precision, shards: int = 1) -> None:
    """float32 tensors as safetensors of `precision`: one file, or shards with an index."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, precision)
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        write_safetensors(folder / file, {name: tensors[name] for name in part}, precision)
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_safetensors(path: Path, tensors: dict[str, floats.Array], precision: Precision) -> None:
    """The format by hand: 8 bytes of header length, JSON, data. The library cannot write bf16 from numpy."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs = []
    offset = 0
    for name, values in tensors.items():
        blob = floats.narrow(np.ascontiguousarray(values, np.float32), precision).tobytes()
        dtype = next(dtype for dtype, kind in PRECISION_BY_DTYPE.items() if kind == precision)
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": (offset, offset + len(blob))}
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def tensors_of(case: Case, config: dict[str, Any]) -> dict[str, floats.Array]:
    """All tensors in float32, before rounding to the checkpoint's precision."""
    return _Maker(case, config).tensors


class _Maker:
    """Fills `tensors` with uniform values whose scale keeps activations near one."""

    def __init__(self, case: Case, config: dict[str, Any]) -> None:
        self._case = case
        self._config = config
        self._raw = np.random.PCG64(case.seed)
        self.tensors: dict[str, floats.Array] = {}
        hidden, vocabulary = config["hidden_size"], config["vocab_size"]
        self._matrix("model.embed_tokens.weight", (vocabulary, hidden), 1.0)
        self._norm("model.norm.weight")
        if not config["tie_word_embeddings"]:
            self._matrix("lm_head.weight", (vocabulary, hidden))
        for layer in range(config["num_hidden_layers"]):
            self._layer(layer)

    def _uniform(self, shape: tuple[int, ...], scale: float) -> floats.Array:
        bits = self._raw.random_raw(int(np.prod(shape))).reshape(shape) >> np.uint64(40)
        unit = bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)  # exact, [-1, 1)
        return unit * np.float32(scale)

    def _matrix(self, name: str, shape: tuple[int, ...], scale: float | None = None) -> None:
        self.tensors[name] = self._uniform(shape, scale or 2.0 / shape[-1] ** 0.5)

    def _norm(self, name: str) -> None:
        self.tensors[name] = np.float32(1.0) + self._uniform((self._config["hidden_size"],), 0.5)

    def _layer(self, layer: int) -> None:
        config, prefix = self._config, f"model.layers.{layer}."
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        dim = config.get("head_dim", hidden // heads)
        self._norm(f"{prefix}input_layernorm.weight")
        self._norm(f"{prefix}post_attention_layernorm.weight")
        for name, count in (("q", heads), ("k", config["num_key_value_heads"]), ("v", config["num_key_value_heads"])):
            self._matrix(f"{prefix}self_attn.{name}_proj.weight", (count * dim, hidden))
            if config.get("qkv_bias"):
                self._matrix(f"{prefix}self_attn.{name}_proj.bias", (count * dim,), 0.25)
        self._matrix(f"{prefix}self_attn.o_proj.weight", (hidden, heads * dim))
        if self._case.family == "mixtral":
            self._moe(prefix, "block_sparse_moe", ("w1", "w3", "w2"), config["num_local_experts"])
        elif layer in config["mlp_only_layers"] or (layer + 1) % config["decoder_sparse_step"]:
            self._ffn(f"{prefix}mlp.", ("gate_proj", "up_proj", "down_proj"), config["intermediate_size"])
        else:
            self._moe(prefix, "mlp", ("gate_proj", "up_proj", "down_proj"), config["num_experts"])
            names = ("gate_proj", "up_proj", "down_proj")
            self._ffn(f"{prefix}mlp.shared_expert.", names, config["shared_expert_intermediate_size"])
            self._matrix(f"{prefix}mlp.shared_expert_gate.weight", (1, hidden))

    def _moe(self, prefix: str, block: str, names: tuple[str, str, str], experts: int) -> None:
        config = self._config
        block = "mlp" if self._case.fused else block
        hidden, width = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
        self._matrix(f"{prefix}{block}.gate.weight", (experts, hidden), 4.0 / hidden**0.5)
        if self._case.fused:
            self._matrix(f"{prefix}{block}.experts.gate_up_proj", (experts, 2 * width, hidden))
            self._matrix(f"{prefix}{block}.experts.down_proj", (experts, hidden, width))
            return
        for expert in range(experts):
            self._ffn(f"{prefix}{block}.experts.{expert}.", names, width)

    def _ffn(self, prefix: str, names: tuple[str, str, str], width: int) -> None:
        hidden = self._config["hidden_size"]
        for name in names[:2]:
            self._matrix(f"{prefix}{name}.weight", (width, hidden))
        self._matrix(f"{prefix}{names[2]}.weight", (hidden, width), 2.0 / max(width, 1) ** 0.5)

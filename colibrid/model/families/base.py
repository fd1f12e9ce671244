"""What a family is: a reader of config.json and a table of tensor names. Pure.

A family maps names and configuration onto existing operations. It adds no code to the engine: what the
operations cannot do (another activation, a clipped projection) is refused here by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from colibrid.errors import ModelError
from colibrid.model.families.config import Config
from colibrid.model.families.rope import read_rope
from colibrid.model.layout import Tensor, expert_file_name
from colibrid.model.manifest import Hyperparameters, Layer, QkNorm, Role

MAX_LAYERS = 256
MAX_EXPERTS = 512
MAX_EXPERTS_PER_TOKEN = 16
MAX_VOCAB = 1 << 20
MAX_POSITIONS = 1 << 20
MAX_WIDTH = 1 << 20
_ATTENTION_VECTORS: dict[Role, str] = {
    "out_bias": "o_proj.bias",
    "q_norm": "q_norm.weight",
    "k_norm": "k_norm.weight",
}
_ATTENTION_ROLES = ("qkv", "qkv_bias", "out", *_ATTENTION_VECTORS)


class Source(msgspec.Struct, frozen=True):
    """Rows of one checkpoint tensor."""

    name: str
    shape: tuple[int, ...]  # the whole tensor as the checkpoint must have it
    index: int | None = None  # into the first axis of a fused tensor (experts, rows, cols)
    rows: tuple[int, int] | None = None  # begin, end; none: all


# How a pack's tensor is made: sources stacked by rows, vectors end to end.
Recipe = tuple[Source, ...]


class Names(msgspec.Struct, frozen=True, kw_only=True):
    """Where the blocks of a layer are, after "model.layers.{layer}."; the first prefix present is taken."""

    moe: tuple[str, ...]  # prefixes of router and experts
    router: str  # after the prefix
    expert: tuple[str, str, str]  # gate, up, down of one expert, after "{prefix}.experts.{expert}."
    dense: str | None = None  # prefix of a dense layer's FFN
    shared: str | None = None  # the shared expert, after the prefix
    shared_gate: str | None = None


class Description(msgspec.Struct, frozen=True):
    """What config.json says, in our terms."""

    hyperparameters: Hyperparameters
    layers: tuple[Layer, ...]


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture."""

    architecture: str  # as in config.json's "architectures"
    read: Callable[[Config], Description]
    names: Names


def read_hyperparameters(
    config: Config,
    *,
    rope_theta: float,
    rms_norm_eps: float,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: QkNorm = "none",
) -> Hyperparameters:
    """The fields that Llama-like decoders share; rope_theta and rms_norm_eps are the family's defaults."""
    act = config.raw("hidden_act") or "silu"
    if act != "silu":
        raise ModelError(f"config.json: hidden_act is {act!r}, only 'silu' is supported")
    hidden = config.integer("hidden_size", 1, MAX_WIDTH)
    heads = config.integer("num_attention_heads", 1, 4096)
    kv_heads = config.integer("num_key_value_heads", 1, heads, heads)
    if heads % kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = config.integer("head_dim", 2, 256, hidden // heads)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim is {head_dim}, expected an even number")
    max_positions = config.integer("max_position_embeddings", 1, MAX_POSITIONS)
    rope = read_rope(config, head_dim, rope_theta, max_positions)
    return Hyperparameters(
        vocab_size=config.integer("vocab_size", 1, MAX_VOCAB),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rms_norm_eps=config.number("rms_norm_eps", 1e-12, 1.0, rms_norm_eps),
        tied_head=config.flag("tie_word_embeddings", default=False),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        rope_inv_freq=rope.inv_freq,
        rope_scale=rope.scale,
        attention_scale=head_dim**-0.5,
    )


def sliding_window(config: Config) -> int:
    """The positions that a token of a windowed layer sees; 0: all, because the window is as long as the context."""
    window = config.integer("sliding_window", 1, (1 << 31) - 1)
    return window if window < config.integer("max_position_embeddings", 1, MAX_POSITIONS) else 0


def expert_count(config: Config, low: int = 1) -> int:
    """Routed experts of a layer: the same field under the two names that checkpoints use."""
    return config.integer(config.first("num_experts", "num_local_experts"), low, MAX_EXPERTS)


def is_dense(config: Config, index: int, count: int) -> bool:
    """Whether mlp_only_layers, decoder_sparse_step or the lack of experts make layer `index` of `count` dense."""
    dense = config.integers("mlp_only_layers")
    if any(not 0 <= layer < count for layer in dense):
        raise config.error("mlp_only_layers", f"{list(dense)} names a layer outside 0 to {count - 1}")
    step = config.integer("decoder_sparse_step", 1, MAX_LAYERS, 1)
    return index in dense or expert_count(config, low=0) == 0 or (index + 1) % step > 0


def moe_layer(
    config: Config,
    index: int,
    *,
    experts: int,
    width: int,
    renormalise: bool,
    shared_width: int = 0,
    window: int = 0,
) -> Layer:
    """A layer of routed experts, with the checkpoint's own k, and a gated shared expert if it has a width."""
    return Layer(
        ffn="moe",
        window=window,
        experts=experts,
        experts_per_token=config.integer("num_experts_per_tok", 1, min(experts, MAX_EXPERTS_PER_TOKEN)),
        expert_width=width,
        shared_width=shared_width,
        renormalise=renormalise,
        shared_gated=shared_width > 0,
        expert_files=tuple(expert_file_name(index, expert) for expert in range(experts)),
    )


def recipe(
    names: Names, hyper: Hyperparameters, layers: tuple[Layer, ...], tensor: Tensor, present: Collection[str]
) -> Recipe:
    """Where the checkpoint, whose tensors are called `present`, holds `tensor`, as (outputs, inputs)."""
    d = hyper.hidden
    if tensor.layer is None:
        top = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}.get(tensor.role)
        return (Source(top, tensor.shape),) if top else (Source("model.norm.weight", (d,)),)
    prefix = f"model.layers.{tensor.layer}."
    if tensor.role in ("attn_norm", "ffn_norm"):
        norm = "input_layernorm" if tensor.role == "attn_norm" else "post_attention_layernorm"
        return (Source(f"{prefix}{norm}.weight", (d,)),)
    if tensor.role in _ATTENTION_ROLES:
        return _attention(hyper, tensor, f"{prefix}self_attn.")
    return _ffn(names, d, layers[tensor.layer], tensor, prefix, present)


def _attention(hyper: Hyperparameters, tensor: Tensor, prefix: str) -> Recipe:
    q, kv = hyper.heads * hyper.head_dim, hyper.kv_heads * hyper.head_dim
    if tensor.role == "out":
        return (Source(f"{prefix}o_proj.weight", tensor.shape),)
    if tensor.role in _ATTENTION_VECTORS:
        return (Source(f"{prefix}{_ATTENTION_VECTORS[tensor.role]}", tensor.shape[1:]),)
    parts = (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
    if tensor.role == "qkv":
        return tuple(Source(f"{prefix}{name}.weight", (rows, hyper.hidden)) for name, rows in parts)
    return tuple(Source(f"{prefix}{name}.bias", (rows,)) for name, rows in parts)


def _ffn(names: Names, d: int, layer: Layer, tensor: Tensor, prefix: str, present: Collection[str]) -> Recipe:
    if layer.ffn == "dense":
        return _projection(f"{prefix}{names.dense}", ("gate_proj", "up_proj", "down_proj"), tensor)
    moe = _moe_prefix(names, prefix, present)
    if tensor.role == "router":
        return (Source(f"{moe}{names.router}", tensor.shape),)
    if tensor.role == "shared_gate":
        return (Source(f"{moe}{names.shared_gate}", (1, d)),)
    if tensor.expert is None:
        return _projection(f"{moe}{names.shared}", ("gate_proj", "up_proj", "down_proj"), tensor)
    if f"{moe}experts.gate_up_proj" in present:
        return _fused(f"{moe}experts.", layer, tensor)
    return _projection(f"{moe}experts.{tensor.expert}", names.expert, tensor)


def _moe_prefix(names: Names, prefix: str, present: Collection[str]) -> str:
    candidates = [f"{prefix}{moe}." for moe in names.moe]
    return next((c for c in candidates if f"{c}{names.router}" in present), candidates[0])


def _projection(block: str, names: tuple[str, str, str], tensor: Tensor) -> Recipe:
    width, d = tensor.shape
    name = names[("gate", "up", "down").index(tensor.role)]
    down = tensor.role == "down"
    return (Source(f"{block}.{name}.weight", (d, width) if down else (width, d)),)


def _fused(block: str, layer: Layer, tensor: Tensor) -> Recipe:
    """experts.gate_up_proj (experts, 2 * width, hidden): rows of gate, then of up; experts.down_proj as it was."""
    width, d = tensor.shape
    if tensor.role == "down":
        return (Source(f"{block}down_proj", (layer.experts, d, width), tensor.expert),)
    rows = (0, width) if tensor.role == "gate" else (width, 2 * width)
    return (Source(f"{block}gate_up_proj", (layer.experts, 2 * width, d), tensor.expert, rows),)


def ignorable(names: Names, layers: tuple[Layer, ...], name: str) -> bool:
    """Tensors that some checkpoints carry and nothing needs: old RoPE buffers, shared experts of width 0."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    head, _, rest = name.removeprefix("model.layers.").partition(".")
    if names.shared is None or not head.isdigit() or int(head) >= len(layers) or layers[int(head)].shared_width:
        return False
    return any(rest.startswith(f"{moe}.{names.shared}") for moe in names.moe)

"""Options of vLLM and llama-server, and what `colibrid serve` has instead: a wrong option is answered with the right one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MODEL = "give the model as MODEL, without an option"
_SLOTS = "use --max-batch-size"
_CONTEXT = "use --max-model-len for one request, --set memory.kv_tokens=N for all together"
_PREFILL = "use --set batch.prefill_tokens=N"
_KV = "use --set kv.precision=fp16 or fp32"
_DEVICE = "use --device; a model lies on one device as a whole"
_ONE_DEVICE = "leave it out; a model lies on one device as a whole"
_PREFIXES = "use --set batch.prefix_reuse=key, all or off"
_TEMPLATE = "leave it out; the model's own template is used"
_REASONING = "use --set model.reasoning_parser=NAME"
_TLS = "use --set server.tls_cert_file=FILE and --set server.tls_key_file=FILE"
_ROUNDING = (
    "leave it out; AWQ and GPTQ checkpoints are known by their config.json, others are rounded by "
    "--set model.precision=int8 or by `colibrid quantize`"
)
_ABSENT = "leave it out; there is nothing of the kind"
_NOT_NEEDED = "leave it out; there is nothing to configure"

_INSTEAD = {
    "--model": _MODEL,
    "-m": _MODEL,
    "--hf-repo": "give org/name as MODEL; it is looked up in the local Hugging Face cache",
    "--max-num-seqs": _SLOTS,
    "--parallel": _SLOTS,
    "-np": _SLOTS,
    "--ctx-size": _CONTEXT,
    "-c": _CONTEXT,
    "--max-num-batched-tokens": _PREFILL,
    "--batch-size": _PREFILL,
    "-b": _PREFILL,
    "--ubatch-size": _PREFILL,
    "-ub": _PREFILL,
    "--dtype": "use --set model.dtype=auto, fp32, fp16 or bf16",
    "--kv-cache-dtype": _KV,
    "--cache-type-k": _KV,
    "-ctk": _KV,
    "--cache-type-v": _KV,
    "-ctv": _KV,
    "--n-gpu-layers": _DEVICE,
    "-ngl": _DEVICE,
    "--tensor-parallel-size": _ONE_DEVICE,
    "-tp": _ONE_DEVICE,
    "--pipeline-parallel-size": _ONE_DEVICE,
    "-pp": _ONE_DEVICE,
    "--data-parallel-size": _ONE_DEVICE,
    "-dp": _ONE_DEVICE,
    "--enable-expert-parallel": _ONE_DEVICE,
    "--tensor-split": _ONE_DEVICE,
    "-ts": _ONE_DEVICE,
    "--split-mode": _ONE_DEVICE,
    "-sm": _ONE_DEVICE,
    "--threads": "use --set engine.threads=N",
    "-t": "use --set engine.threads=N",
    "--alias": "use --served-model-name, and --set model.aliases=A,B for more names",
    "--enable-prefix-caching": _PREFIXES,
    "--no-enable-prefix-caching": _PREFIXES,
    "--cache-reuse": _PREFIXES,
    "--slot-prompt-similarity": _PREFIXES,
    "--load-format": "use --set model.weights=files or dummy",
    "--generation-config": "leave it out; the model's own generation_config.json is used, over it --set sampling.temperature=T and the like",
    "--chat-template": _TEMPLATE,
    "--jinja": _TEMPLATE,
    "--tool-call-parser": "use --set model.tool_parser=NAME",
    "--enable-auto-tool-choice": _NOT_NEEDED,
    "--reasoning-parser": _REASONING,
    "--reasoning-format": _REASONING,
    "--structured-outputs-config": _NOT_NEEDED,
    "--max-logprobs": "leave it out; the limit is 20",
    "--enable-lora": _ABSENT,
    "--lora": _ABSENT,
    "--quantization": _ROUNDING,
    "-q": _ROUNDING,
    "--speculative-config": _ABSENT,
    "--model-draft": _ABSENT,
    "-md": _ABSENT,
    "--trust-remote-code": "leave it out; no code is ever loaded from a model folder",
    "--ssl-certfile": _TLS,
    "--ssl-keyfile": _TLS,
    "--ssl-cert-file": _TLS,
    "--ssl-key-file": _TLS,
    "--uds": "use --set server.listen=unix:PATH",
    "--allowed-origins": "use --set server.allowed_origins=ORIGINS",
    "--disable-log-requests": "leave it out; prompts are never logged",
    "--log-level": "use --set logging.level=debug, info, warning or error",
    "--shutdown-timeout": "use --set server.drain_timeout_s=SECONDS",
    "--timeout": "send timeout_s with a request",
    "--metrics": "leave it out; GET /readyz says what the engine does",
    "--slots": "leave it out; GET /readyz says what the engine does",
    "--props": "leave it out; GET /readyz says what the engine does",
}


def instead_of(refused: str, arguments: Sequence[str]) -> str | None:
    """The message for an option that the parser refused, if another server has it.

    Of a word like -ngl the parser refuses the first letter, -n; `arguments` are the words that it was given.
    """
    for argument in arguments:
        option = argument.partition("=")[0]
        if option.startswith(refused) and option in _INSTEAD:
            return f"No such option {option!r}: {_INSTEAD[option]}."
    return None

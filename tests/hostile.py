"""Requests that are too large, too deep, too many of something, or out of the bounds of the API: path, body, status."""

from __future__ import annotations

import json

BIG = (8 << 20) - 200  # about the largest body
COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"


def prompt(raw: bytes) -> bytes:
    return b'{"max_tokens": 1, "prompt": ' + raw + b"}"


def message(raw: bytes) -> bytes:
    return b'{"messages": [{"role": "user", "content": ' + raw + b"}]}"


def arguments(text: str) -> bytes:
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    return json.dumps({"messages": [{"role": "assistant", "tool_calls": [call]}]}).encode()


HOSTILE = {
    "nested lists": (COMPLETIONS, prompt(b"[" * BIG), 400),
    "nested and closed": (COMPLETIONS, prompt(b"[" * (BIG // 2) + b"]" * (BIG // 2)), 400),
    "nested objects": (COMPLETIONS, prompt(b'{"a":' * (BIG // 5)), 400),
    "nested in messages": (CHAT, message(b"[" * BIG), 400),
    "many small nests": (COMPLETIONS, prompt(b"[" + (b"[" * 99 + b"]" * 99 + b",") * (BIG // 199) + b"1]"), 400),
    "empty lists": (COMPLETIONS, prompt(b"[" + b"[]," * (BIG // 3) + b"[]]"), 400),
    "empty messages": (CHAT, b'{"messages": [' + b"{}," * (BIG // 3) + b"{}]}", 400),
    "ids": (COMPLETIONS, prompt(b"[" + b"1," * (BIG // 2) + b"1]"), 400),
    "ids within the limit": (COMPLETIONS, prompt(b"[" + b"1234," * 500_000 + b"1]"), 400),
    "floats": (COMPLETIONS, prompt(b"[" + b"1.5," * 500_000 + b"1]"), 400),
    "ids out of range": (COMPLETIONS, b'{"truncate_prompt_tokens": 5, "prompt": [' + b"1," * 500_000 + b"9999]}", 400),
    "lists of ids": (COMPLETIONS, prompt(b"[" + b",".join([b"[" + b"5," * 1999 + b"5]"] * 256) + b"]"), 200),
    "strings": (COMPLETIONS, prompt(b"[" + b'"a",' * (BIG // 4) + b'"a"]'), 400),
    "keys": (CHAT, message(b"{" + b",".join(b'"k%d":1' % i for i in range(700_000)) + b"}"), 400),
    "one text": (COMPLETIONS, prompt(b'"' + b"a b " * (BIG // 8) + b'"'), 400),
    "one escaped text": (COMPLETIONS, prompt(b'"' + b"\\u65e5" * (BIG // 6) + b'"'), 400),
    "quotes in a text": (COMPLETIONS, prompt(b'"' + b'\\"[{:,' * (BIG // 6) + b'"'), 400),
    "an open text": (COMPLETIONS, prompt(b'"' + b'\\"' * (BIG // 2)), 400),
    "lone surrogates": (COMPLETIONS, prompt(b'"' + b"\\ud800" * (BIG // 6) + b'"'), 400),
    "special tokens": (CHAT, message(b'"' + b"<|im_end|>" * (BIG // 10) + b'"'), 400),
    "deep arguments": (CHAT, arguments("[" * (BIG // 2)), 400),
    "wide arguments": (CHAT, arguments("[" + "[]," * (BIG // 3) + "[]]"), 400),
    "stops": (COMPLETIONS, json.dumps({"prompt": "a", "stop": ["x"] * 50_000}).encode(), 400),
    "biases": (
        COMPLETIONS,
        json.dumps({"prompt": "a", "logit_bias": {str(i): -100 for i in range(4096)}}).encode(),
        400,
    ),
    "unknown fields": (COMPLETIONS, json.dumps({"prompt": "a"} | {f"k{i}": 1 for i in range(20_000)}).encode(), 200),
    "text to count": (TOKENIZE, prompt(b'"' + b"a b " * 100_000 + b'"'), 400),
    "ids to spell": (DETOKENIZE, b'{"tokens": [' + b"1234," * 131_071 + b"1]}", 200),
}


def completion(**fields: object) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 1} | fields).encode()


def with_raw(name: str, raw: str) -> bytes:
    return b'{"prompt": "a", "%b": %b}' % (name.encode(), raw.encode())


VOCABULARY = 4096  # of the bundled model
MALFORMED = {
    "n of a billion": (COMPLETIONS, completion(n=10**9), 400),
    "n of a billion, as a float": (COMPLETIONS, with_raw("n", "1e9"), 400),
    "best_of of a billion": (COMPLETIONS, completion(best_of=10**9), 400),
    "logprobs of a billion": (COMPLETIONS, completion(logprobs=10**9), 400),
    "max_tokens of a billion": (COMPLETIONS, completion(max_tokens=10**9), 400),
    "max_tokens beyond 64 bits": (COMPLETIONS, completion(max_tokens=1 << 80), 400),
    "temperature NaN": (COMPLETIONS, with_raw("temperature", "NaN"), 400),
    "temperature Infinity": (COMPLETIONS, with_raw("temperature", "Infinity"), 400),
    "temperature 1e999": (COMPLETIONS, with_raw("temperature", "1e999"), 400),
    "top_p -Infinity": (COMPLETIONS, with_raw("top_p", "-Infinity"), 400),
    "bias NaN": (COMPLETIONS, b'{"prompt": "a", "logit_bias": {"1": NaN}}', 400),
    "bias on the whole vocabulary": (
        COMPLETIONS,
        completion(logit_bias={str(token): -100 for token in range(VOCABULARY)}),
        400,
    ),
    "id behind the vocabulary": (COMPLETIONS, completion(prompt=[VOCABULARY]), 400),
    "id below zero": (COMPLETIONS, completion(prompt=[-1]), 400),
    "id beyond 64 bits": (COMPLETIONS, completion(prompt=[1 << 70]), 400),
    "id with a fraction": (COMPLETIONS, completion(prompt=[1.5]), 400),
    "id that is true": (COMPLETIONS, completion(prompt=[True]), 400),
    "stop id behind the vocabulary": (COMPLETIONS, completion(stop_token_ids=[VOCABULARY]), 400),
    "no prompt": (COMPLETIONS, b"{}", 400),
    "empty prompts": (COMPLETIONS, completion(prompt=["", []]), 400),
    "a hundred thousand stops": (COMPLETIONS, completion(stop=["x"] * 100_000), 400),
    "empty stop": (COMPLETIONS, completion(stop=[""]), 400),
    "lone surrogate": (COMPLETIONS, with_raw("stop", '"\\ud800"'), 400),
    "lone surrogate in a key": (COMPLETIONS, b'{"prompt": "a", "\\udfff": 1}', 400),
    "bytes that are no UTF-8": (COMPLETIONS, b'{"prompt": "\xff"}', 400),
    "a field twice": (COMPLETIONS, b'{"prompt": "a", "prompt": "b"}', 400),
    "no object": (COMPLETIONS, b"[]", 400),
    "no JSON": (COMPLETIONS, b"prompt=a", 400),
    "nothing": (COMPLETIONS, b"", 400),
    "timeout of zero": (COMPLETIONS, completion(timeout_s=0), 400),
    "experts of a billion": (COMPLETIONS, completion(experts={"per_token": 10**9}), 400),
    "four thousand messages": (CHAT, json.dumps({"messages": [{"role": "user", "content": "a"}] * 4097}).encode(), 400),
    "tokens behind the vocabulary": (DETOKENIZE, b'{"tokens": [4096]}', 400),
}

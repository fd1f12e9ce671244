"""Ask a running daemon through the openai SDK, as a user would: once plainly, once streaming.

Usage: ask.py BASE_URL   (exits 1 unless both answers name Oslo)
"""

from __future__ import annotations

import sys

from openai import OpenAI

QUESTION = "What is the capital of Norway?"


def main() -> int:
    client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0, timeout=60)
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": QUESTION}]
    plain = client.chat.completions.create(model=model, messages=messages).choices[0].message.content or ""
    print(f"{model}: {plain!r}")
    parts = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(model=model, messages=messages, stream=True)
        if chunk.choices
    ]
    streamed = "".join(parts)
    print(f"{model}, in {len(parts)} chunks: {streamed!r}")
    return 0 if "Oslo" in plain and streamed == plain and len(parts) > 1 else 1


if __name__ == "__main__":
    sys.exit(main())

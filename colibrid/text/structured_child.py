"""The process that tries grammars out before the daemon compiles them: a grammar that takes too long, too much memory
or too deep a stack ends this process, and nothing else.

Reads frames from standard input, a grammar each, and answers each with a frame: empty, or what is wrong with it. A
frame is its length in 4 bytes, the lowest first, and its bytes. Ends with its input. Started by structured_check.py.

The vocabulary is one token a byte: what makes a grammar expensive to compile does not depend on the model's.
"""

from __future__ import annotations

import re
import resource
import struct
import sys
from typing import TYPE_CHECKING, BinaryIO

import llguidance

from colibrid.text.structured_limits import CHECK_CPU_S, CHECK_MEMORY_BYTES, parser_limits

if TYPE_CHECKING:
    from collections.abc import Callable

_LENGTH = struct.Struct("<I")
_TOKEN_BY_ID = re.compile(r"<\[[0-9,\- ]*\]>")  # of the model's vocabulary; stands for one token


class _Bytes:
    """The vocabulary, as llguidance's TokenizerWrapper wants it."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def make_check() -> Callable[[str], str]:
    """A function that says what is wrong with a grammar; empty if nothing is."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=256)
    limits = parser_limits()

    def check(grammar: str) -> str:
        matcher = llguidance.LLMatcher(tokenizer, _TOKEN_BY_ID.sub("/./", grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return str(matcher.get_error())

    return check


def serve(source: BinaryIO, sink: BinaryIO, check: Callable[[str], str]) -> None:
    """Answers frames until `source` ends."""
    while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
        grammar = source.read(_LENGTH.unpack(head)[0]).decode("utf-8", "surrogatepass")
        _allow_cpu_time()
        answer = check(grammar).encode("utf-8", "replace")
        sink.write(_LENGTH.pack(len(answer)) + answer)
        sink.flush()


def _allow_cpu_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    allowed = int(used.ru_utime + used.ru_stime) + 1 + CHECK_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (allowed, resource.RLIM_INFINITY))


def main() -> None:
    """Never uses more than its share; a core file would hold what clients sent."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (CHECK_MEMORY_BYTES, CHECK_MEMORY_BYTES))
    serve(sys.stdin.buffer, sys.stdout.buffer, make_check())

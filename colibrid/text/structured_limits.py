"""Bounds of structured output: what a client may send, and what it may cost."""

from __future__ import annotations

import llguidance

MAX_GRAMMAR_BYTES = 64 << 10  # of a schema, a grammar or all choices, as UTF-8
MAX_REGEX_BYTES = 8 << 10
MAX_CHOICES = 1024
MAX_SCHEMA_DEPTH = 64  # lists and objects inside each other
MAX_NESTING = 64  # brackets inside each other, of a regex or grammar

CHECK_CPU_S = 2  # to compile a grammar, in the process that tries it out
CHECK_WALL_S = 30.0  # the same on the clock: the machine may be busy
CHECK_MEMORY_BYTES = 2 << 30  # address space of that process
CHECK_IDLE_S = 60.0  # it ends when it has had nothing to do for so long
MAX_WAITING = 256  # grammars that wait to be compiled; beyond it 503

CACHED_GRAMMARS = 64  # compiled, and refused ones
CACHED_CHARS = 4 << 20  # of their texts
MASK_CPU_S = 1.0  # of one mask; a request whose grammar needs more ends with an error
MASK_MEAN_CPU_S = 0.02  # of each mask of a request, MASK_CPU_S in all apart; a usual one takes a tenth of it at most


def parser_limits() -> llguidance.LLParserLimits:
    """What llguidance itself enforces. Not precomputed: the daemon would do that with its large vocabulary."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=20_000,  # up to 1 KiB each, shared by all requests of one grammar
        max_grammar_size=100_000,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )

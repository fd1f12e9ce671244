"""Bounds of requests that no setting changes."""

from __future__ import annotations

from colibrid.batch.admission import MAX_PRIORITY
from colibrid.engine.abi import MAX_BIAS, MAX_SLOTS, MAX_STOP_IDS
from colibrid.engine.abi import MAX_TOP_LOGPROBS as MAX_LOGPROBS

__all__ = [
    "BODY_TIMEOUT_S",
    "CROWDED_WRITE_S",
    "FEW_STREAMS",
    "HEAD_TIMEOUT_S",
    "HELD_BYTES",
    "INLINE_BODY_BYTES",
    "MAX_ANSWER_LOGPROBS",
    "MAX_BIAS",
    "MAX_EXPERTS_PER_TOKEN",
    "MAX_INCOMING_BODIES",
    "MAX_INPUTS",
    "MAX_JSON_CONTAINERS",
    "MAX_JSON_DEPTH",
    "MAX_JSON_KEYS",
    "MAX_JSON_STRINGS",
    "MAX_JSON_VALUES",
    "MAX_LISTED_TOKENS",
    "MAX_LOGPROBS",
    "MAX_MESSAGES",
    "MAX_PRIORITY",
    "MAX_PROFILE_NAME",
    "MAX_PROMPTS",
    "MAX_SLOTS",
    "MAX_STOPS",
    "MAX_STOP_CHARS",
    "MAX_STOP_IDS",
    "MAX_TIMEOUT_S",
    "OTHER_FIELDS_BYTES",
    "UNSENT_BYTES",
    "WRITE_HIGH",
    "WRITE_LOW",
    "WRITE_TIMEOUT_S",
]

MAX_EXPERTS_PER_TOKEN = 16
MAX_STOPS = 16  # stop strings of one request
MAX_STOP_CHARS = 256  # characters of one stop string
MAX_PROMPTS = 256  # prompts of one request
MAX_INPUTS = 2048  # texts of one request for embeddings
MAX_MESSAGES = 4096  # messages of one request
OTHER_FIELDS_BYTES = 256 << 10  # of a body beside what may be long: prompt, messages, input, tokens
INLINE_BODY_BYTES = 32 << 10  # decoded on the event loop, within 2 ms whatever is in it; larger ones in a thread
MAX_INCOMING_BODIES = 32  # times server.max_body_bytes: of all bodies that arrive or are being decoded
HEAD_TIMEOUT_S = 30.0  # for the head of a request to arrive, from connect or its first byte on
BODY_TIMEOUT_S = 30.0  # for the whole body to arrive
WRITE_TIMEOUT_S = 30.0  # a reader that has not caught up after so long is cut off
CROWDED_WRITE_S = 3.0  # the same for one that holds a slot which others wait for
WRITE_HIGH = 4 << 10  # bytes that wait for a client: from here on it is behind, and nothing more is handed over ...
WRITE_LOW = 1 << 10  # ... until it has caught up to here
UNSENT_BYTES = 16 << 10  # that the kernel holds beside them, and has not sent yet
HELD_BYTES = 20 << 10  # of a stream's next event, about, that wait while the reader is behind: then its slot waits, too
FEW_STREAMS = 8  # up to so many, each token of a stream is sent as it comes
MAX_JSON_DEPTH = 128  # levels of a body
MAX_JSON_CONTAINERS = 1 << 16  # lists and objects of a body
MAX_JSON_KEYS = 1 << 16  # of all objects of a body
MAX_JSON_STRINGS = 1 << 18  # of a body, keys among them
MAX_JSON_VALUES = 1 << 19  # in all lists and objects of a body, token ids first of all
MAX_LISTED_TOKENS = 1 << 17  # ids that /tokenize gives and /detokenize takes at a time
MAX_PROFILE_NAME = 64  # characters, as of every name in the settings
MAX_TIMEOUT_S = 86400.0  # that a request may ask for
MAX_ANSWER_LOGPROBS = 1 << 20  # of all tokens and choices of one answer, the likeliest ones of each among them

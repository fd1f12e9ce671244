"""Bounds of requests that no setting changes. The engine has the same ones (engine_c/include/colibri.h)."""

from __future__ import annotations

MAX_LOGPROBS = 20  # likeliest tokens listed at each position
MAX_BIAS = 1024  # entries of logit_bias
MAX_STOP_IDS = 64  # end ids of one request, the model's own included
MAX_EXPERTS_PER_TOKEN = 16
MAX_STOPS = 16  # stop strings of one request
MAX_STOP_CHARS = 256  # characters of one stop string
MAX_PROMPTS = 256  # prompts of one request
MAX_MESSAGES = 4096  # messages of one request
BODY_TIMEOUT_S = 30.0  # for the whole body to arrive
WRITE_TIMEOUT_S = 30.0  # a reader that takes nothing for so long is cut off

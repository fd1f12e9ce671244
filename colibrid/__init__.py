"""colibrid: a daemon that serves Mixture-of-Experts language models over the OpenAI API."""

__version__ = "0.1.0"

"""How Python's garbage collector behaves in a daemon.

A full collection looks at every object and stops the event loop meanwhile: 0.2 s with the log-probabilities of a few
thousand tokens in memory. Nearly all our garbage is freed by reference counts; what is left are small cycles around
connections, which the collections of young objects find.
"""

from __future__ import annotations

import gc

_YOUNG = 2000  # objects more than before: the youngest are looked at
_MIDDLE = 10  # such collections: the next generation too
_FULL = 500  # of those: everything, so after ten million objects that stay


def calm_collector() -> None:
    """Full collections become rare, and leave out what exists now. Call once, when everything is loaded."""
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _FULL)

"""Numbers on the command line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from click import Context, Parameter


class NumberRange(click.FloatRange):
    """As FloatRange, but `nan`, which no bound keeps out, is refused."""

    def convert(self, value: Any, param: Parameter | None, ctx: Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number

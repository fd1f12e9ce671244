"""config.json with errors that name the field. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from colibrid.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Config:
    """An object of config.json. Values of a wrong type or outside their bounds raise ModelError."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where  # "rope_scaling." for an object inside config.json

    def raw(self, field: str) -> Any:
        """The value as JSON has it, None where it is absent."""
        return self._values.get(field)

    def first(self, *fields: str) -> str:
        """The first of these names of one field that is given, or the first of all."""
        return next((field for field in fields if self._values.get(field) is not None), fields[0])

    def integer(self, field: str, low: int, high: int, default: int | None = None) -> int:
        value = self._or_default(field, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(field, f"is {value!r}, expected an integer from {low} to {high}")
        return value

    def number(self, field: str, low: float, high: float, default: float | None = None) -> float:
        value = self._or_default(field, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(field, f"is {value!r}, expected a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, field: str, *, default: bool) -> bool:
        value = self._or_default(field, default)
        if not isinstance(value, bool):
            raise self.error(field, f"is {value!r}, expected true or false")
        return value

    def integers(self, field: str) -> tuple[int, ...]:
        """A list of integers, empty where it is absent."""
        value = self._values.get(field) or []
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self.error(field, f"is {value!r}, expected a list of integers")
        return tuple(value)

    def inner(self, field: str) -> Config | None:
        """An object inside, None where it is absent or empty."""
        value = self._values.get(field)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.error(field, f"is {value!r}, expected an object")
        return Config(value, f"{self._where}{field}.")

    def has_objects(self) -> bool:
        """Whether a value is itself an object."""
        return any(isinstance(value, dict) for value in self._values.values())

    def error(self, field: str, what: str) -> ModelError:
        """For the caller to raise: what is wrong with a field."""
        return ModelError(f"config.json: {self._where}{field} {what}")

    def _or_default(self, field: str, default: object) -> Any:
        value = self._values.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.error(field, "is missing")
        return value

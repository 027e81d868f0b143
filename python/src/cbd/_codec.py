# SPDX-License-Identifier: MIT OR Apache-2.0
"""JSON to dataclasses and back.

A field that a newer daemon has and this package does not know is kept in ``extra``. A field that an older daemon lacks has
the value 0, "", False, [] or None. A value of another type than described is a :class:`~cbd.errors.ProtocolError`.
"""

from __future__ import annotations

import dataclasses
import keyword
from typing import Any, Callable, ClassVar, Dict, List, Mapping, Type, TypeVar

from .errors import ProtocolError

O = TypeVar("O", bound="Object")
Decoder = Callable[[Any], Any]


def python_name(name: str) -> str:
    """The name of a field in Python: a keyword gets an underscore at its end."""
    return f"{name}_" if keyword.iskeyword(name) else name


def _wrong(wanted: str, value: Any) -> ProtocolError:
    return ProtocolError(f"the daemon's answer is not understood: {value!r:.100} where {wanted} was expected")


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong("a text", value)
    return value


def integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong("a whole number", value)
    return value


def number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _wrong("a number", value)
    return float(value)


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong("true or false", value)
    return value


def anything(value: Any) -> Any:
    """Whatever JSON can hold."""
    return value


def either(value: Any) -> Any:
    """A number or a name."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise _wrong("a number or a name", value)
    return value


def list_of(decoder: Decoder) -> Decoder:
    def decode(value: Any) -> List[Any]:
        if not isinstance(value, list):
            raise _wrong("a list", value)
        return [decoder(item) for item in value]

    return decode


def map_of(decoder: Decoder) -> Decoder:
    def decode(value: Any) -> Dict[str, Any]:
        if not isinstance(value, dict):
            raise _wrong("an object", value)
        return {key: decoder(item) for key, item in value.items()}

    return decode


def object_of(find: Callable[[], Type[Object]]) -> Decoder:
    """An object of a class that may be defined later in the module."""
    return lambda value: find().from_json(value)


@dataclasses.dataclass
class Object:
    """An object of the control interface."""

    #: Fields that this package does not know: the daemon is newer.
    extra: Dict[str, Any] = dataclasses.field(default_factory=dict, init=False)

    _decoders: ClassVar[Mapping[str, Decoder]] = {}

    @classmethod
    def from_json(cls: Type[O], value: Any) -> O:
        """The object of a parsed JSON value."""
        if not isinstance(value, dict):
            raise _wrong(f"an object ({cls.__name__})", value)
        known: Dict[str, Any] = {}
        extra: Dict[str, Any] = {}
        for name, item in value.items():
            decoder = cls._decoders.get(name)
            if decoder is None:
                extra[name] = item
            elif item is not None:
                known[python_name(name)] = decoder(item)
        made = cls(**known)
        made.extra = extra
        return made

    def to_json(self) -> Dict[str, Any]:
        """The object for a request or a file; fields that are None are left out."""
        fields = {name: encode(getattr(self, python_name(name))) for name in self._decoders}
        fields.update(self.extra)
        return {name: value for name, value in fields.items() if value is not None}


def encode(value: Any) -> Any:
    """A value for JSON."""
    if isinstance(value, Object):
        return value.to_json()
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def body_of(fields: Mapping[str, Any]) -> Dict[str, Any]:
    """The body of a request: the fields that were given."""
    return {name: encode(value) for name, value in fields.items() if value is not None}

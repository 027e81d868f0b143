# SPDX-License-Identifier: MIT OR Apache-2.0
"""Errors: a stable kind for programs, and one line for people.

Each kind of the daemon (``busy``, ``not_found``, ...) has a class of its own, so that it can be caught alone. A kind of a
newer daemon is a plain :class:`Error` with that kind.
"""

from __future__ import annotations

from typing import Any, Dict, Optional, Type


class Error(Exception):
    """What the daemon, the library or this package refuses, or what failed."""

    #: The kind of the class.
    KIND = "system"

    def __init__(
        self,
        message: str,
        *,
        kind: Optional[str] = None,
        path: Optional[str] = None,
        offset: Optional[int] = None,
        length: Optional[int] = None,
    ) -> None:
        super().__init__(message)
        #: A stable word.
        self.kind = self.KIND if kind is None else kind
        #: One line: what was wrong, with which object, what to do.
        self.message = message
        #: The file or device that the error is about.
        self.path = path
        #: The first byte of the device that it is about.
        self.offset = offset
        #: The number of bytes.
        self.length = length

    def __str__(self) -> str:
        return self.message


class InvalidArgument(Error):
    """An argument or the body of a request is wrong."""

    KIND = "invalid_argument"


class NotFound(Error):
    """There is no such object."""

    KIND = "not_found"


class NotRunning(NotFound):
    """No daemon listens on the socket."""


class AlreadyExists(Error):
    """There is such an object already."""

    KIND = "already_exists"


class Busy(Error):
    """The object is in use."""

    KIND = "busy"


class NoSpace(Error):
    """There is no space for it."""

    KIND = "no_space"


class OutOfRange(Error):
    """A range is outside of the device."""

    KIND = "out_of_range"


class ReadOnly(Error):
    """The object may not be changed."""

    KIND = "read_only"


class Media(Error):
    """The memory of the region failed."""

    KIND = "media"


class Backing(Error):
    """The backing device failed."""

    KIND = "backing"


class Damaged(Error):
    """Data or a structure is damaged."""

    KIND = "damaged"


class Foreign(Error):
    """The object is not one of CBD."""

    KIND = "foreign"


class Unsupported(Error):
    """It is not supported here."""

    KIND = "unsupported"


class Stopped(Error):
    """The daemon ended, or ends."""

    KIND = "stopped"


class Permission(Error):
    """This user may not do it."""

    KIND = "permission"


class TimedOut(Error):
    """It was not done in time."""

    KIND = "timed_out"


class Exchanged(Error):
    """Another disk or region is at the path."""

    KIND = "exchanged"


class Torn(Error):
    """A write is there in part."""

    KIND = "torn"


class Mismatch(Error):
    """A comparison has found a difference."""

    KIND = "mismatch"


class System(Error):
    """Anything else."""


class ProtocolError(Error):
    """The answer is not one of a daemon of CBD."""

    KIND = "unsupported"


_CLASSES: Dict[str, Type[Error]] = {
    cls.KIND: cls
    for cls in (
        InvalidArgument, NotFound, AlreadyExists, Busy, NoSpace, OutOfRange, ReadOnly, Media, Backing, Damaged, Foreign,
        Unsupported, Stopped, Permission, TimedOut, Exchanged, Torn, Mismatch, System,
    )
}  # fmt: skip


def from_body(body: Any) -> Error:
    """The error in an answer of the daemon (``ErrorBody``)."""
    if not isinstance(body, dict):
        return ProtocolError(f"the daemon's error is not understood: {body!r:.200}")
    kind = str(body.get("kind", "system"))

    def number(name: str) -> Optional[int]:
        value = body.get(name)
        return value if isinstance(value, int) else None

    path = body.get("path")
    return _CLASSES.get(kind, Error)(
        str(body.get("message", "the daemon gave no reason")),
        kind=kind,
        path=path if isinstance(path, str) else None,
        offset=number("offset"),
        length=number("length"),
    )

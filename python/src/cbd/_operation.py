# SPDX-License-Identifier: MIT OR Apache-2.0
"""Answers in lines: long operations, with progress while they run and then a result, and events."""

from __future__ import annotations

from typing import Any, Callable, Generic, Iterator, Optional, TypeVar

from ._connection import Closing, Stream
from .errors import ProtocolError, Stopped, from_body

P = TypeVar("P")
D = TypeVar("D")


class Operation(Closing, Generic[P, D]):
    """An operation that runs in the daemon.

    Iterating gives its progress until it ends. :meth:`result` waits for the end. Closing it before, or dropping it, cancels
    it, and nothing is lost by that. An operation that fails raises its error in both.
    """

    def __init__(self, stream: Stream, progress: Callable[[Any], P], done: Callable[[Any], D]) -> None:
        self._stream = stream
        self._lines = stream.lines()
        self._progress = progress
        self._done = done
        self._result: Optional[D] = None
        self._closed = False

    def __enter__(self) -> Operation[P, D]:
        return self

    def __iter__(self) -> Iterator[P]:
        return self

    def __next__(self) -> P:
        if self._result is not None:
            raise StopIteration
        if self._closed:
            raise Stopped("the operation was cancelled: its connection was closed")
        line = next(self._lines, None)
        if line is None:
            self.close()
            raise Stopped("the daemon ended before the operation did; dirty data is in the region")
        if not isinstance(line, dict) or len(line) != 1:
            self.close()
            raise ProtocolError(f"a line of the daemon is not understood: {line!r:.200}")
        if "progress" in line:
            return self._progress(line["progress"])
        self.close()
        if "done" in line:
            self._result = self._done(line["done"])
            raise StopIteration
        raise from_body(line.get("error"))

    def result(self) -> D:
        """Waits for the end, and returns the result."""
        for _ in self:
            pass
        # The loop has ended without an error only because there is a result.
        assert self._result is not None
        return self._result

    def close(self) -> None:
        """Closes the connection, which cancels an operation that has not ended."""
        self._closed = True
        self._stream.close()


class Lines(Closing, Generic[P]):
    """An answer in lines, each an object. Closing it ends it. With ``follow`` a line may take any time to come."""

    def __init__(self, stream: Stream, decode: Callable[[Any], P], follow: bool = False) -> None:
        self._stream = stream
        if follow:
            stream.wait_without_limit()
        self._lines = stream.lines()
        self._decode = decode

    def __enter__(self) -> Lines[P]:
        return self

    def __iter__(self) -> Iterator[P]:
        return self

    def __next__(self) -> P:
        line = next(self._lines, None)
        if line is None:
            self.close()
            raise StopIteration
        if isinstance(line, dict) and "error" in line:
            self.close()
            raise from_body(line["error"])
        return self._decode(line)

    def close(self) -> None:
        """Closes the connection."""
        self._stream.close()

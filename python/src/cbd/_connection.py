# SPDX-License-Identifier: MIT OR Apache-2.0
"""HTTP over the daemon's unix socket, one connection for each call.

Every wait has a limit: ``timeout`` seconds without a byte from the daemon. An answer has at most 64 MiB.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from types import TracebackType
from typing import Any, Dict, Iterator, Optional, Type, Union
from urllib.parse import quote, urlencode

from .errors import Error, NotRunning, Permission, ProtocolError, Stopped, TimedOut, from_body

#: A backend or block device: its number on the transport, or its name there.
NumberOrName = Union[int, str]

#: Most bytes of an answer, and of a line of a long operation.
ANSWER_MAX = 64 << 20


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("cbd", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
        # The base class gives up its socket to an answer without a length.
        self._unix = self.sock

    def wait_without_limit(self) -> None:
        """Lets the answer take any time from now on."""
        self._unix.settimeout(None)


def default_path() -> str:
    """The socket that ``cbdctrl`` uses: ``$CBD_SOCKET``, or that of the daemon which this user would start."""
    named = os.environ.get("CBD_SOCKET")
    if named:
        return named
    if os.geteuid() == 0:
        return "/run/cbd/control.sock"
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return f"{runtime}/cbd/control.sock" if runtime else f"/tmp/cbd-{os.geteuid()}/control.sock"


class Stream:
    """The body of an answer, by lines."""

    def __init__(self, connection: _UnixConnection, response: http.client.HTTPResponse, path: str) -> None:
        self._connection = connection
        self._response = response
        self._path = path

    def lines(self) -> Iterator[Any]:
        """The parsed lines."""
        try:
            while True:
                line = self._response.readline(ANSWER_MAX)
                if not line:
                    return
                yield _parse(line)
        except (OSError, http.client.HTTPException) as error:
            raise _failure(error, self._path) from error

    def wait_without_limit(self) -> None:
        """Lets the next lines take any time."""
        self._connection.wait_without_limit()

    def close(self) -> None:
        """Closes the connection."""
        self._response.close()
        self._connection.close()


class Connection:
    """Calls of the daemon."""

    def __init__(self, path: Optional[str] = None, timeout: float = 60.0) -> None:
        #: The path of the socket.
        self.path = default_path() if path is None else os.fspath(path)
        #: Seconds without a byte from the daemon after which a call fails.
        self.timeout = timeout

    def open_call(self, method: str, path: str, query: Dict[str, Any], body: Optional[Dict[str, Any]]) -> Stream:
        """Sends a request; the answer is a success."""
        given = {key: _shown(value) for key, value in query.items() if value is not None}
        target = f"{path}?{urlencode(given)}" if given else path
        data = None if body is None else json.dumps(body).encode()
        headers = {} if data is None else {"content-type": "application/json"}
        connection = _UnixConnection(self.path, self.timeout)
        try:
            connection.request(method.upper(), target, body=data, headers=headers)
            response = connection.getresponse()
            if response.status == 200:
                return Stream(connection, response, self.path)
            answer = _parse(response.read(ANSWER_MAX))
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _failure(error, self.path) from error
        except Error:
            connection.close()
            raise
        connection.close()
        raise from_body(answer.get("error") if isinstance(answer, dict) else answer)

    def call(self, method: str, path: str, query: Dict[str, Any], body: Optional[Dict[str, Any]]) -> Any:
        """Sends a request and returns the parsed answer."""
        return _parse(self.call_text(method, path, query, body))

    def call_text(self, method: str, path: str, query: Dict[str, Any], body: Optional[Dict[str, Any]]) -> bytes:
        """Sends a request and returns the bytes of the answer."""
        stream = self.open_call(method, path, query, body)
        try:
            data = stream._response.read(ANSWER_MAX + 1)
        except (OSError, http.client.HTTPException) as error:
            raise _failure(error, self.path) from error
        finally:
            stream.close()
        if len(data) > ANSWER_MAX:
            raise ProtocolError(f"the daemon's answer has more than {ANSWER_MAX} bytes")
        return data


def part(value: Union[int, str]) -> str:
    """A part of a path."""
    return quote(str(value), safe="")


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:
        raise ProtocolError(f"the daemon's answer is not understood: {error}") from error


def _failure(error: Exception, path: str) -> Error:
    if isinstance(error, (FileNotFoundError, ConnectionRefusedError)):
        return NotRunning(f"no daemon listens on {path}; start it with cbdd, or give the path of its socket")
    if isinstance(error, PermissionError):
        return Permission(f"the daemon's socket {path} may not be used by this user; run the program as root")
    if isinstance(error, (socket.timeout, BlockingIOError)):
        return TimedOut(f"the daemon at {path} does not answer in time; give a longer timeout to connect()")
    if isinstance(error, (ConnectionError, http.client.IncompleteRead, http.client.RemoteDisconnected)):
        return Stopped(f"the daemon at {path} ended the connection: {error}")
    if isinstance(error, http.client.HTTPException):
        return ProtocolError(f"the program at {path} does not speak HTTP: {error!r}")
    return Error(f"the daemon's socket {path} cannot be reached: {error}", kind="system")


class Closing:
    """A context manager that closes."""

    def close(self) -> None:
        """Closes it."""

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()

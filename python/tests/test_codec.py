# SPDX-License-Identifier: MIT OR Apache-2.0
"""Answers that no daemon of this version gives: newer and older ones, malformed ones, none at all."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import threading
import time
import unittest
from typing import List, Optional

import cbd
from cbd import api, errors


class FakeDaemon:
    """Answers one request with these bytes, and then closes the connection, or not."""

    def __init__(self, answer: bytes, closes: bool = True) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "socket")
        self.request = b""
        self._closes = closes
        self._answer = answer
        self._done = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return
        with connection:
            while not self._is_complete():
                self.request += connection.recv(1 << 16)
            connection.sendall(self._answer)
            if not self._closes:
                self._done.wait(30)

    def _is_complete(self) -> bool:
        # The body may come after the head.
        head, end, body = self.request.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        return end != b"" and len(body) >= (int(length.group(1)) if length else 0)

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(30)
        self.folder.cleanup()


def http(body: bytes, status: str = "200 OK", length: Optional[int] = None) -> bytes:
    size = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\ncontent-length: {size}\r\n\r\n".encode() + body


def lines(*values: object) -> bytes:
    return http(b"".join(json.dumps(value).encode() + b"\n" for value in values))


class Answers(unittest.TestCase):
    def test_a_field_of_a_newer_daemon_is_kept(self) -> None:
        body = {"version": "9.0", "pid": 7, "moon": {"phase": 3}, "transports": [{"transport_id": 1, "colour": "blue"}]}
        with FakeDaemon(http(json.dumps(body).encode())) as daemon:
            status = cbd.connect(daemon.path).status()
        self.assertEqual((status.version, status.pid, status.extra), ("9.0", 7, {"moon": {"phase": 3}}))
        self.assertEqual((status.transports[0].transport_id, status.transports[0].extra), (1, {"colour": "blue"}))
        self.assertEqual(api.Status.from_json(status.to_json()), status)

    def test_a_field_that_an_older_daemon_lacks_is_empty(self) -> None:
        status = api.Status.from_json({})
        self.assertEqual((status.pid, status.version, status.transports, status.front_ends), (0, "", [], None))

    def test_a_value_of_another_type_is_refused(self) -> None:
        for value in [[], "x", 7, {"pid": "x"}, {"pid": True}, {"transports": {}}, {"transports": [1]}, {"version": 1}]:
            with self.subTest(value), self.assertRaises(errors.ProtocolError):
                api.Status.from_json(value)

    def test_a_keyword_has_an_underscore(self) -> None:
        blkdev = api.BlkdevInfo.from_json({"class": "metadata"})
        self.assertEqual((blkdev.class_, blkdev.to_json()["class"]), ("metadata", "metadata"))

    def test_a_request_has_the_fields_that_were_given(self) -> None:
        with FakeDaemon(http(b'{"backend_id": 3, "warnings": []}')) as daemon:
            started = cbd.connect(daemon.path).start_backend("/dev/sdb", transport=2, cache_size=1 << 30, name="a b")
        head, body = daemon.request.split(b"\r\n\r\n")
        self.assertEqual(started.backend_id, 3)
        self.assertTrue(head.startswith(b"POST /v1/transports/2/backends HTTP/1.1\r\n"))
        self.assertEqual(json.loads(body), {"path": "/dev/sdb", "cache_size": 1 << 30, "name": "a b"})

    def test_a_name_in_a_path_is_escaped(self) -> None:
        with FakeDaemon(http(b"{}")) as daemon:
            cbd.connect(daemon.path).pins("a/../b?c")
        self.assertTrue(daemon.request.startswith(b"GET /v1/transports/0/backends/a%2F..%2Fb%3Fc/pins "))


class Failures(unittest.TestCase):
    def fails(self, answer: bytes, kind: type, timeout: float = 10, closes: bool = True) -> cbd.Error:
        with FakeDaemon(answer, closes) as daemon, self.assertRaises(kind) as caught:
            cbd.connect(daemon.path, timeout=timeout).status()
        assert isinstance(caught.exception, cbd.Error)
        return caught.exception

    def test_an_error_has_kind_message_and_context(self) -> None:
        body = {"error": {"kind": "busy", "message": "in use", "path": "/dev/sdb", "offset": 4096, "length": 512}}
        error = self.fails(http(json.dumps(body).encode(), "409 Conflict"), errors.Busy)
        self.assertEqual((str(error), error.kind, error.path), ("in use", "busy", "/dev/sdb"))
        self.assertEqual((error.offset, error.length), (4096, 512))

    def test_a_kind_of_a_newer_daemon_is_kept(self) -> None:
        body = {"error": {"kind": "eclipsed", "message": "the moon"}}
        error = self.fails(http(json.dumps(body).encode(), "500 X"), cbd.Error)
        self.assertEqual((type(error), error.kind), (cbd.Error, "eclipsed"))

    def test_what_is_no_answer_is_an_error(self) -> None:
        for answer in [b"", b"\0\1\2\n", b"SSH-2.0-x\r\n", http(b"{", length=9), http(b"not json"), http(b"[1]", "500 X")]:
            with self.subTest(answer):
                self.fails(answer, cbd.Error)

    def test_a_daemon_that_says_nothing_is_not_waited_for(self) -> None:
        began = time.monotonic()
        self.fails(b"", errors.TimedOut, timeout=0.2, closes=False)
        self.fails(http(b"", length=9), errors.TimedOut, timeout=0.2, closes=False)
        self.assertLess(time.monotonic() - began, 20)

    def test_without_a_daemon_the_error_says_so(self) -> None:
        with self.assertRaisesRegex(errors.NotRunning, "no daemon listens on /nonexistent/x"):
            cbd.connect("/nonexistent/x").status()


class LongOperations(unittest.TestCase):
    PROGRESS: List[object] = [{"progress": {"backend_id": 0, "dirty_bytes": 8 - done, "written_bytes": done}} for done in (0, 4)]

    def test_progress_is_iterated_and_the_result_returned(self) -> None:
        with FakeDaemon(lines(*self.PROGRESS, {"done": {"written_bytes": 8, "warnings": []}})) as daemon:
            operation = cbd.connect(daemon.path).drain()
            self.assertEqual([progress.dirty_bytes for progress in operation], [8, 4])
            self.assertEqual(operation.result().written_bytes, 8)
            self.assertEqual(list(operation), [])

    def test_an_operation_that_fails_raises(self) -> None:
        failed = {"error": {"kind": "backing", "message": "the disk fails"}}
        with FakeDaemon(lines(*self.PROGRESS, failed)) as daemon:
            operation = cbd.connect(daemon.path).stop_backend(0)
            with self.assertRaisesRegex(errors.Backing, "the disk fails"):
                operation.result()

    def test_a_daemon_that_ends_before_the_operation_is_an_error(self) -> None:
        for answer in [lines(*self.PROGRESS), lines(), lines([1]), lines({"progress": {}, "done": {}})]:
            with self.subTest(answer), FakeDaemon(answer) as daemon, self.assertRaises(cbd.Error):
                cbd.connect(daemon.path).drain().result()

    def test_closing_cancels(self) -> None:
        with FakeDaemon(http(b'{"progress": {}}\n', length=999), closes=False) as daemon:
            with cbd.connect(daemon.path).drain() as operation:
                self.assertEqual(next(operation), api.Progress())
            with self.assertRaises(errors.Stopped):
                operation.result()


if __name__ == "__main__":
    unittest.main()

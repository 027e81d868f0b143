# SPDX-License-Identifier: MIT OR Apache-2.0
"""CBD, a persistent-memory cache for block devices: its control interface, and libcbd.

>>> import cbd
>>> for transport in cbd.connect().status().transports:        # doctest: +SKIP
...     for backend in transport.backends:
...         print(backend.backend_path, backend.cache and backend.cache.read_hit_ratio)

:func:`connect` gives a :class:`Client`, whose methods are the operations of ``docs/openapi.yaml``. :mod:`cbd.device` opens a
region and a disk in this process, through libcbd.
"""

from __future__ import annotations

import os
from typing import Optional, Union

from . import api, device, errors
from ._operation import Lines, Operation
from .api import Client
from .errors import Error

__version__ = "0.1.0"

__all__ = ["Client", "Error", "Lines", "Operation", "api", "connect", "device", "errors"]


def connect(path: Optional[Union[str, os.PathLike[str]]] = None, *, timeout: float = 60.0) -> Client:
    """A client of the daemon that listens at ``path``.

    Without a path it is that of ``cbdctrl``: ``$CBD_SOCKET``, or ``/run/cbd/control.sock`` for root. Nothing is sent yet. A
    call fails after ``timeout`` seconds without a byte from the daemon; long operations send progress every second.
    """
    return Client(None if path is None else os.fspath(path), timeout)

# SPDX-License-Identifier: MIT OR Apache-2.0
"""A region and a disk behind it in this process, through libcbd (``docs/libcbd.md``).

>>> from cbd import device
>>> with device.open("/mnt/pmem/region", "/dev/sdb", size=8 << 30, format=True) as disk:     # doctest: +SKIP
...     disk.write(bytes(4096), 0)            # durable in the region when it returns
...     disk.flush()

A region has one owner at a time: no daemon serves it meanwhile. Offsets and lengths are bytes, in whole sectors of the
device. Any number of threads may use a device; the interpreter's lock is not held while the library works. A child of
``fork`` must not use a device or region, and gets :class:`~cbd.errors.Unsupported`.

The library is ``libcbd.so.0``, found by the system's rules, or the file that ``$CBD_LIBRARY`` names.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import threading
from types import TracebackType
from typing import Any, Callable, Dict, List, Literal, Optional, Tuple, Type, Union

from .errors import (
    AlreadyExists, Backing, Busy, Error, InvalidArgument, NoSpace, NotFound, OutOfRange, Permission, ReadOnly, TimedOut,
    Unsupported,
)  # fmt: skip

#: Bytes, or anything that gives them: bytes, bytearray, memoryview, array, mmap, numpy arrays.
Buffer = Union[bytes, bytearray, memoryview, Any]
Path = Union[str, "os.PathLike[str]"]
Consistency = Literal["strict", "checkpoint", "none"]
Level = Literal["newest", "all", "agree"]

_CONSISTENCIES = {"strict": 1, "checkpoint": 2, "none": 3}
_LEVELS = {"newest": 0, "all": 1, "agree": 2}
_FLAWS = (
    "unreadable", "cache_damaged", "dirty_damaged", "both_damaged", "backing_unreadable", "backing_differs",
    "backing_changed", "quarantined", "record_copy",
)  # fmt: skip
_CLASSES: Dict[int, Type[Error]] = {
    errno.EBUSY: Busy,
    errno.ENOENT: NotFound,
    errno.EEXIST: AlreadyExists,
    errno.EINVAL: InvalidArgument,
    errno.ENOSPC: NoSpace,
    errno.EROFS: ReadOnly,
    errno.EACCES: Permission,
    errno.EPERM: Permission,
    errno.ETIMEDOUT: TimedOut,
    errno.ERANGE: OutOfRange,
    errno.EOPNOTSUPP: Unsupported,
    errno.EIO: Backing,
}


class RegionOptions(ctypes.Structure):
    """``cbd_region_options`` of cbd.h."""

    _fields_ = [
        ("size", ctypes.c_uint64),
        ("segment_size", ctypes.c_uint64),
        ("host", ctypes.c_char_p),
        ("flags", ctypes.c_uint32),
        ("reserved0", ctypes.c_uint32),
        ("reserved", ctypes.c_uint64 * 4),
    ]


class CRegionInfo(ctypes.Structure):
    """``cbd_region_info``."""

    _fields_ = [
        ("size", ctypes.c_uint64),
        ("segment_size", ctypes.c_uint64),
        ("free_bytes", ctypes.c_uint64),
        ("host_id", ctypes.c_uint32),
        ("power_fail", ctypes.c_uint32),
        ("uuid", ctypes.c_char * 40),
        ("host", ctypes.c_char * 64),
        ("reserved", ctypes.c_uint64 * 8),
    ]


class DeviceOptions(ctypes.Structure):
    """``cbd_device_options``."""

    _fields_ = [
        ("cache_size", ctypes.c_uint64),
        ("consistency", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint64 * 6),
    ]


class CGeometry(ctypes.Structure):
    """``cbd_geometry``."""

    _fields_ = [
        ("size", ctypes.c_uint64),
        ("sector", ctypes.c_uint32),
        ("physical_sector", ctypes.c_uint32),
        ("atomic_unit", ctypes.c_uint32),
        ("discard_granularity", ctypes.c_uint32),
        ("backend_id", ctypes.c_uint32),
        ("reserved0", ctypes.c_uint32),
        ("reserved", ctypes.c_uint64 * 4),
    ]


class CStatus(ctypes.Structure):
    """``cbd_status``."""

    _fields_ = [
        ("flags", ctypes.c_uint32),
        ("segments", ctypes.c_uint32),
        ("free_segments", ctypes.c_uint32),
        ("damaged_ranges", ctypes.c_uint32),
        ("dirty_bytes", ctypes.c_uint64),
        ("written_bytes", ctypes.c_uint64),
        ("read_hit_bytes", ctypes.c_uint64),
        ("read_missed_bytes", ctypes.c_uint64),
        ("written_back_bytes", ctypes.c_uint64),
        ("parked_bytes", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("drained_epoch", ctypes.c_uint64),
        ("drained_unix_ms", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 8),
    ]


class CFinding(ctypes.Structure):
    """``cbd_finding``."""

    _fields_ = [
        ("offset", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("flaw", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
    ]


class VerifyRequest(ctypes.Structure):
    """``cbd_verify_request``."""

    _fields_ = [
        ("offset", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("level", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("findings", ctypes.POINTER(CFinding)),
        ("capacity", ctypes.c_size_t),
        ("reserved", ctypes.c_uint64 * 4),
    ]


class CVerified(ctypes.Structure):
    """``cbd_verified``."""

    _fields_ = [
        ("cache_bytes", ctypes.c_uint64),
        ("backing_bytes", ctypes.c_uint64),
        ("changed_bytes", ctypes.c_uint64),
        ("findings", ctypes.c_uint64),
        ("lost", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 3),
    ]


#: The structures of cbd.h by their names there. A test compares sizes and offsets with a C compiler's.
STRUCTURES: Dict[str, Type[ctypes.Structure]] = {
    "cbd_region_options": RegionOptions,
    "cbd_region_info": CRegionInfo,
    "cbd_device_options": DeviceOptions,
    "cbd_geometry": CGeometry,
    "cbd_status": CStatus,
    "cbd_finding": CFinding,
    "cbd_verify_request": VerifyRequest,
    "cbd_verified": CVerified,
}


@dataclasses.dataclass(frozen=True)
class RegionInfo:
    """The properties of a region."""

    size: int
    segment_size: int
    free_bytes: int
    #: Whether a completed write survives a power failure, and not only the end of the process.
    power_fail: bool
    uuid: str
    host: str
    warnings: List[str]


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The properties of a device, in bytes."""

    size: int
    sector: int
    physical_sector: int
    #: A write of at most this many bytes inside 4 MiB of the device is recovered completely or not at all.
    atomic_unit: int
    #: 0 where discards free no space.
    discard_granularity: int
    backend_id: int


@dataclasses.dataclass(frozen=True)
class DeviceStatus:
    """Counters since the device was opened, and its present state."""

    cached: bool
    disk_is_consistent: bool
    disk_fails: bool
    stalled: bool
    writers_wait: bool
    segments: int
    free_segments: int
    damaged_ranges: int
    dirty_bytes: int
    written_bytes: int
    read_hit_bytes: int
    read_missed_bytes: int
    written_back_bytes: int
    parked_bytes: int
    epoch: int
    drained_epoch: int
    drained_unix_ms: int


@dataclasses.dataclass(frozen=True)
class Finding:
    """A range with a flaw."""

    offset: int
    length: int
    #: A name as in the control interface; ``unknown N`` of a newer library.
    flaw: str
    repaired: bool
    lost: bool


@dataclasses.dataclass(frozen=True)
class Verified:
    """The result of a verification."""

    cache_bytes: int
    backing_bytes: int
    changed_bytes: int
    #: The number of all findings; :attr:`findings` has the first of them.
    found: int
    lost: int
    findings: List[Finding]


class _Library:
    """The loaded library, with the types of its functions."""

    def __init__(self) -> None:
        name = os.environ.get("CBD_LIBRARY") or "libcbd.so.0"
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            text = f"{name} cannot be loaded: {error}; install libcbd (docs/libcbd.md), or name the file in CBD_LIBRARY"
            raise NotFound(text) from error
        handle, u32, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
        string, size = ctypes.c_char_p, ctypes.c_size_t
        pointer = ctypes.POINTER
        types: Dict[str, List[Any]] = {
            "cbd_region_open": [string, pointer(RegionOptions), pointer(handle)],
            "cbd_region_close": [handle],
            "cbd_region_get_info": [handle, pointer(CRegionInfo)],
            "cbd_region_warnings": [handle, string, size],
            "cbd_device_attach": [handle, string, pointer(DeviceOptions), pointer(handle)],
            "cbd_device_open": [handle, u32, pointer(handle)],
            "cbd_device_close": [handle],
            "cbd_device_detach": [pointer(handle), u32],
            "cbd_device_drain": [handle, u32],
            "cbd_device_grow": [handle, pointer(u64)],
            "cbd_device_geometry": [handle, pointer(CGeometry)],
            "cbd_device_status": [handle, pointer(CStatus)],
            "cbd_device_warnings": [handle, string, size],
            "cbd_read": [handle, handle, size, u64],
            "cbd_write": [handle, handle, size, u64, u32],
            "cbd_flush": [handle],
            "cbd_discard": [handle, u64, u64],
            "cbd_write_zeroes": [handle, u64, u64, u32],
            "cbd_verify": [handle, pointer(VerifyRequest), pointer(CVerified)],
        }
        self.functions: Dict[str, Callable[..., int]] = {}
        for function_name, arguments in types.items():
            function = getattr(self._library, function_name)
            function.argtypes, function.restype = arguments, ctypes.c_int
            self.functions[function_name] = function
        self._error = self._library.cbd_last_error
        self._error.argtypes, self._error.restype = [], string
        self._version = self._library.cbd_version
        self._version.argtypes, self._version.restype = [], string

    def call(self, name: str, *arguments: Any) -> int:
        """Calls a function; a negative result is an error."""
        result = self.functions[name](*arguments)
        if result >= 0:
            return result
        text = (self._error() or b"").decode(errors="replace")
        raise _error(-result, text)

    def version(self) -> str:
        return bytes(self._version()).decode()


def _error(number: int, text: str) -> Error:
    cls = _CLASSES.get(number, Error)
    error = cls(text or os.strerror(number))
    # The errno of the library, for programs that need more than the class.
    error.errno = number  # type: ignore[attr-defined]
    return error


_library: Optional[_Library] = None
_loading = threading.Lock()


def _loaded() -> _Library:
    global _library
    with _loading:
        if _library is None:
            _library = _Library()
        return _library


def version() -> str:
    """The version of the library."""
    return _loaded().version()


class _Kept(Exception):
    """A handle is still valid after a failure to close it."""

    def __init__(self, error: Error) -> None:
        super().__init__(error)
        self.error = error


class _Handle:
    """A handle of the library. It is not closed while a call of another thread uses it."""

    def __init__(self, what: str, pointer: ctypes.c_void_p) -> None:
        self._what = what
        self._pointer: Optional[ctypes.c_void_p] = pointer
        self._process = os.getpid()
        self._users = 0
        self._lock = threading.Lock()

    def use(self, name: str, *arguments: Any) -> int:
        """Calls a function whose first argument is the handle."""
        with self._lock:
            pointer = self._checked()
            self._users += 1
        try:
            return _loaded().call(name, pointer, *arguments)
        finally:
            with self._lock:
                self._users -= 1

    def end(self, close: Callable[[ctypes.c_void_p], None]) -> None:
        """Closes it. The library has released the handle unless it is busy, or the function says otherwise (:class:`_Kept`)."""
        with self._lock:
            if self._pointer is None or self._process != os.getpid():
                return
            if self._users > 0:
                raise Busy(f"the {self._what} is in use by another thread: let its calls end before it is closed")
            try:
                close(self._pointer)
            except _Kept as kept:
                raise kept.error from None
            except Error:
                self._pointer = None
                raise
            self._pointer = None

    def _checked(self) -> ctypes.c_void_p:
        if self._process != os.getpid():
            raise Unsupported(f"a child of fork cannot use the {self._what} of its parent")
        if self._pointer is None:
            raise InvalidArgument(f"the {self._what} is closed")
        return self._pointer

    @property
    def closed(self) -> bool:
        return self._pointer is None


def _text(path: Path) -> bytes:
    text = os.fsencode(path)
    if b"\0" in text:
        raise InvalidArgument(f"{path!r} is no path: it has a zero byte")
    return text


def _lines(handle: _Handle, name: str) -> List[str]:
    length = handle.use(name, None, 0)
    text = ctypes.create_string_buffer(length + 1)
    handle.use(name, text, length + 1)
    return text.value.decode(errors="replace").splitlines()


def _readable(data: Buffer) -> Tuple[Any, int, Any]:
    """A pointer to the bytes of a buffer, their number, and what keeps them."""
    if isinstance(data, bytes):
        return data, len(data), data
    view = memoryview(data)
    if not view.contiguous:
        raise InvalidArgument("the buffer is not contiguous: give its bytes")
    if view.readonly:
        copy = view.tobytes()
        return copy, len(copy), copy
    flat = view.cast("B")
    array = (ctypes.c_char * len(flat)).from_buffer(flat)
    return array, len(flat), array


class Device:
    """A disk behind its cache, open in this process."""

    def __init__(self, handle: _Handle, owned: Optional[Region] = None) -> None:
        self._handle = handle
        self._owned = owned

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def read(self, length: int, offset: int) -> bytes:
        """Reads bytes, in whole sectors."""
        if length < 0:
            raise InvalidArgument(f"{length} bytes cannot be read")
        buffer = bytearray(length)
        self.read_into(buffer, offset)
        return bytes(buffer)

    def read_into(self, buffer: Buffer, offset: int) -> None:
        """Fills a writable buffer from ``offset`` on. After an error its content is undefined."""
        view = memoryview(buffer)
        if view.readonly or not view.contiguous:
            raise InvalidArgument("the buffer must be writable and contiguous")
        flat = view.cast("B")
        if len(flat) == 0:
            return
        array = (ctypes.c_char * len(flat)).from_buffer(flat)
        self._handle.use("cbd_read", array, len(flat), _number(offset))

    def write(self, data: Buffer, offset: int, *, fua: bool = False) -> None:
        """Writes bytes, in whole sectors; they are durable in the region when it returns."""
        pointer, length, kept = _readable(data)
        if length > 0:
            self._handle.use("cbd_write", pointer, length, _number(offset), int(fua))
        del kept

    def flush(self) -> None:
        """A write barrier: nothing written after this reaches the disk before the earlier writes."""
        self._handle.use("cbd_flush")

    def discard(self, offset: int, length: int) -> None:
        """Discards a range: it reads as zeroes from now on."""
        self._handle.use("cbd_discard", _number(offset), _number(length))

    def write_zeroes(self, offset: int, length: int, *, fua: bool = False) -> None:
        """Zeroes a range."""
        self._handle.use("cbd_write_zeroes", _number(offset), _number(length), int(fua))

    def drain(self, timeout_s: int = 60) -> None:
        """Writes everything that was written before to the disk. Fails after that many seconds without progress."""
        self._handle.use("cbd_device_drain", _seconds(timeout_s))

    def grow(self) -> int:
        """Uses a disk that has become larger to its end; returns the size in bytes."""
        size = ctypes.c_uint64()
        self._handle.use("cbd_device_grow", ctypes.byref(size))
        return size.value

    def geometry(self) -> Geometry:
        """Its properties."""
        found = CGeometry()
        self._handle.use("cbd_device_geometry", ctypes.byref(found))
        return Geometry(**{field.name: getattr(found, field.name) for field in dataclasses.fields(Geometry)})

    def status(self) -> DeviceStatus:
        """Its counters and its state."""
        found = CStatus()
        self._handle.use("cbd_device_status", ctypes.byref(found))
        fields = dataclasses.fields(DeviceStatus)
        flags = {field.name: bool(found.flags >> bit & 1) for bit, field in enumerate(fields[:5])}
        return DeviceStatus(**flags, **{field.name: getattr(found, field.name) for field in fields[5:]})

    def warnings(self) -> List[str]:
        """Its present warnings."""
        return _lines(self._handle, "cbd_device_warnings")

    def verify(
        self, offset: int = 0, length: Optional[int] = None, *, level: Level = "newest", repair: bool = False,
        findings_max: int = 1024,
    ) -> Verified:  # fmt: skip
        """Looks at each copy of a range where it is; what is wrong with the data is no error."""
        if length is None:
            length = self.geometry().size - offset
        if level not in _LEVELS:
            raise InvalidArgument(f"{level!r} is no level: {', '.join(_LEVELS)}")
        findings = (CFinding * max(findings_max, 1))()
        request = VerifyRequest(
            offset=_number(offset), length=_number(length), level=_LEVELS[level], flags=int(repair),
            findings=findings, capacity=max(findings_max, 1),
        )  # fmt: skip
        result = CVerified()
        self._handle.use("cbd_verify", ctypes.byref(request), ctypes.byref(result))
        shown = [_finding(findings[index]) for index in range(min(result.findings, max(findings_max, 1)))]
        return Verified(
            result.cache_bytes, result.backing_bytes, result.changed_bytes, result.findings, result.lost, shown
        )

    def close(self) -> None:
        """Closes the device: dirty data stays in the region for the next process that opens it."""
        self._handle.end(_closing("cbd_device_close"))
        if self._owned is not None:
            self._owned.close()

    def detach(self, timeout_s: int = 60) -> None:
        """Drains and closes the device, and removes the disk from the region: it is a plain disk again."""

        def detach(pointer: ctypes.c_void_p) -> None:
            changed = ctypes.c_void_p(pointer.value)
            try:
                _loaded().call("cbd_device_detach", ctypes.byref(changed), _seconds(timeout_s))
            except Error as error:
                if changed.value is not None:
                    raise _Kept(error) from error
                raise

        self._handle.end(detach)
        if self._owned is not None:
            self._owned.close()


class Region:
    """An open region."""

    def __init__(self, handle: _Handle) -> None:
        self._handle = handle

    @classmethod
    def open(
        cls, path: Path, *, size: int = 0, format: bool = False, force: bool = False, segment_size: int = 0,
        host: Optional[str] = None, require_persistent: bool = False,
    ) -> Region:  # fmt: skip
        """Opens, locks and maps a region.

        With ``format`` it is formatted first; ``force`` does so even over data. ``size`` is its least size in bytes, which a
        file that is created gets. A region that another process has open is :class:`~cbd.errors.Busy`.
        """
        options = RegionOptions(
            size=_number(size), segment_size=_number(segment_size), host=None if host is None else _text(host),
            flags=int(format) | int(force) << 1 | int(require_persistent) << 2,
        )  # fmt: skip
        pointer = ctypes.c_void_p()
        _loaded().call("cbd_region_open", _text(path), ctypes.byref(options), ctypes.byref(pointer))
        return cls(_Handle("region", pointer))

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()

    def attach(
        self, disk: Path, *, cache_size: int = 0, consistency: Optional[Consistency] = None, cache: bool = True,
        data_crc: bool = True,
    ) -> Device:  # fmt: skip
        """Attaches a disk, or opens it if the region has it already. A cache of size 0 is all free space."""
        if consistency is not None and consistency not in _CONSISTENCIES:
            raise InvalidArgument(f"{consistency!r} is no consistency: {', '.join(_CONSISTENCIES)}")
        options = DeviceOptions(
            cache_size=_number(cache_size),
            consistency=0 if consistency is None else _CONSISTENCIES[consistency],
            flags=int(not cache) | int(not data_crc) << 1,
        )
        pointer = ctypes.c_void_p()
        self._handle.use("cbd_device_attach", _text(disk), ctypes.byref(options), ctypes.byref(pointer))
        return Device(_Handle("device", pointer))

    def device(self, backend_id: int) -> Device:
        """Opens the backend with this number, with the disk at its recorded path."""
        pointer = ctypes.c_void_p()
        self._handle.use("cbd_device_open", _number(backend_id, 32), ctypes.byref(pointer))
        return Device(_Handle("device", pointer))

    def info(self) -> RegionInfo:
        """Its properties, and warnings."""
        found = CRegionInfo()
        self._handle.use("cbd_region_get_info", ctypes.byref(found))
        return RegionInfo(
            found.size, found.segment_size, found.free_bytes, bool(found.power_fail), found.uuid.decode(),
            found.host.decode(), _lines(self._handle, "cbd_region_warnings"),
        )  # fmt: skip

    def close(self) -> None:
        """Closes the region; :class:`~cbd.errors.Busy` while devices on it are open."""
        self._handle.end(_closing("cbd_region_close"))


def open(
    region: Path, disk: Path, *, size: int = 0, format: bool = False, force: bool = False, cache_size: int = 0
) -> Device:
    """Opens a region and a disk behind it; both are closed with the device."""
    opened = Region.open(region, size=size, format=format, force=force)
    try:
        device = opened.attach(disk, cache_size=cache_size)
    except BaseException:
        opened.close()
        raise
    device._owned = opened
    return device


def _closing(name: str) -> Callable[[ctypes.c_void_p], None]:
    def close(pointer: ctypes.c_void_p) -> None:
        try:
            _loaded().call(name, pointer)
        except Busy as error:
            raise _Kept(error) from error

    return close


def _finding(found: CFinding) -> Finding:
    known = 1 <= found.flaw <= len(_FLAWS)
    flaw = _FLAWS[found.flaw - 1] if known else f"unknown {found.flaw}"
    return Finding(found.offset, found.length, flaw, bool(found.flags & 1), bool(found.flags & 2))


def _number(value: int, bits: int = 64) -> int:
    """ctypes would take the low bits of a number that is too large."""
    if not 0 <= value < 1 << bits:
        raise InvalidArgument(f"{value} is not a number of bytes, or out of range")
    return value


def _seconds(value: int) -> int:
    if not 0 <= value < 1 << 32:
        raise InvalidArgument(f"{value} is not a number of seconds")
    return value

# SPDX-License-Identifier: MIT OR Apache-2.0
# Generated from docs/openapi.yaml by python/generate.py; do not edit.
"""The types and the operations of the daemon's control interface."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Dict, List, Literal, Mapping, Optional, Sequence, Union

from . import _codec
from ._codec import Decoder, Object
from ._connection import Connection, part
from ._operation import Lines, Operation

#: Not only digits; unique among the backends and among the block devices of a transport, and a block device has no
#: name of another backend than its own.
Name = str
#: The number of the object on the transport, or its name there.
NumberOrName = Union[int, str]
#: The class of the requests of a block device that have none.
BlkdevClass = Literal["none", "metadata"]
#: newest - what a read would return; all - each copy, whether it can be read; agree - each copy, and whether the
#: copies of clean blocks have the same content.
VerifyLevel = Literal["newest", "all", "agree"]
#: Whether the backing device verifies ranges by commands of its own - NVMe Verify alone, every command that it has,
#: or none.
Offload = Literal["auto", "on", "never"]
Consistency = Literal["strict", "checkpoint", "none"]
#: What is done about what the backing device has refused for write_error_after_s seconds.
OnWriteError = Literal["stop", "park"]
CacheMode = Literal["writeback", "writethrough", "writearound", "passthrough"]
ReadFill = Literal["admit", "all", "off"]
Readahead = Literal["auto", "off"]
WhenFull = Literal["wait", "around"]
Severity = Literal["info", "warning", "error"]
PinKind = Literal["file", "range", "metadata"]


@dataclasses.dataclass
class ErrorAnswer(Object):
    """Error answer."""

    error: Optional[ErrorBody] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {"error": _codec.object_of(lambda: ErrorBody)}


@dataclasses.dataclass
class ErrorBody(Object):
    """Error body."""

    #: invalid_argument, not_found, already_exists, busy, no_space, out_of_range, read_only, media, backing, damaged,
    #: foreign, unsupported, stopped, permission, timed_out, exchanged, torn, mismatch or system.
    kind: str = ""
    #: One line: what was wrong, with which object, what to do.
    message: str = ""
    #: The file or device that the error is about; absent if it is about none.
    path: Optional[str] = None
    #: The first byte of the device that the error is about; absent if it is about none.
    offset: Optional[int] = None
    #: The number of bytes.
    length: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "kind": _codec.text,
        "message": _codec.text,
        "path": _codec.text,
        "offset": _codec.integer,
        "length": _codec.integer,
    }


@dataclasses.dataclass
class RegisterTransport(Object):
    """Register transport."""

    #: Name of this host.
    host: str = ""
    #: Absolute path of the region.
    path: str = ""
    #: Bytes of a region that is to be made.
    size: Optional[int] = None
    #: Bytes of a segment of a region that is formatted.
    segment_size: Optional[int] = None
    #: Make a transport on the region.
    format: Optional[bool] = None
    #: With format - even over an existing transport.
    force: Optional[bool] = None
    #: With format - several hosts share the region.
    shared: Optional[bool] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "host": _codec.text,
        "path": _codec.text,
        "size": _codec.integer,
        "segment_size": _codec.integer,
        "format": _codec.boolean,
        "force": _codec.boolean,
        "shared": _codec.boolean,
    }


@dataclasses.dataclass
class TransportRegistered(Object):
    """Transport registered."""

    transport_id: int = 0
    host_id: int = 0
    warnings: List[str] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "transport_id": _codec.integer,
        "host_id": _codec.integer,
        "warnings": _codec.list_of(_codec.text),
    }


@dataclasses.dataclass
class TransportInfo(Object):
    """Transport info."""

    #: 0x and hexadecimal digits.
    magic: str = ""
    version: int = 0
    #: 0x and eight hexadecimal digits.
    flags: str = ""
    host_area_off: int = 0
    bytes_per_host_info: int = 0
    host_num: int = 0
    backend_area_off: int = 0
    bytes_per_backend_info: int = 0
    backend_num: int = 0
    blkdev_area_off: int = 0
    bytes_per_blkdev_info: int = 0
    blkdev_num: int = 0
    segment_area_off: int = 0
    bytes_per_segment: int = 0
    segment_num: int = 0
    transport_id: int = 0
    host_id: int = 0
    path: str = ""
    #: Whether the region is mapped.
    alive: bool = False
    host: str = ""
    uuid: str = ""
    free_segments: int = 0
    #: power-fail or process-crash.
    durability: str = ""
    #: How the region is mapped and copied to.
    copy: str = ""
    #: Why it is not mapped.
    error: Optional[str] = None
    #: Seconds until the daemon retries it at the latest; absent while it is mapped.
    retry_in_s: Optional[int] = None
    warnings: List[str] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "magic": _codec.text,
        "version": _codec.integer,
        "flags": _codec.text,
        "host_area_off": _codec.integer,
        "bytes_per_host_info": _codec.integer,
        "host_num": _codec.integer,
        "backend_area_off": _codec.integer,
        "bytes_per_backend_info": _codec.integer,
        "backend_num": _codec.integer,
        "blkdev_area_off": _codec.integer,
        "bytes_per_blkdev_info": _codec.integer,
        "blkdev_num": _codec.integer,
        "segment_area_off": _codec.integer,
        "bytes_per_segment": _codec.integer,
        "segment_num": _codec.integer,
        "transport_id": _codec.integer,
        "host_id": _codec.integer,
        "path": _codec.text,
        "alive": _codec.boolean,
        "host": _codec.text,
        "uuid": _codec.text,
        "free_segments": _codec.integer,
        "durability": _codec.text,
        "copy": _codec.text,
        "error": _codec.text,
        "retry_in_s": _codec.integer,
        "warnings": _codec.list_of(_codec.text),
    }


@dataclasses.dataclass
class HostInfo(Object):
    """Host info."""

    host_id: int = 0
    hostname: str = ""
    alive: bool = False
    #: Whether it is the host of this daemon.
    this: Optional[bool] = None
    #: Milliseconds since its last sign of life that this daemon has seen come.
    seen_ms: Optional[int] = None
    #: Whether what it had is being taken from it.
    clearing: Optional[bool] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "host_id": _codec.integer,
        "hostname": _codec.text,
        "alive": _codec.boolean,
        "this": _codec.boolean,
        "seen_ms": _codec.integer,
        "clearing": _codec.boolean,
    }


@dataclasses.dataclass
class ClearHost(Object):
    """Clear host."""

    #: Bytes of dirty and quarantined data that its caches hold, which are lost then.
    discard_dirty: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {"discard_dirty": _codec.integer}


@dataclasses.dataclass
class StartBackend(Object):
    """Start backend."""

    #: Absolute path of the block device or file.
    path: str = ""
    #: Bytes; none or 0 for no cache.
    cache_size: Optional[int] = None
    #: Bytes up to which a cache that shares the space of its transport grows; cache_size is its minimum then.
    cache_max: Optional[int] = None
    #: With cache_max: how much a hit of this cache counts; 1 where absent.
    weight: Optional[int] = None
    #: Number of queues.
    handlers: Optional[int] = None
    #: Also make a block device.
    start_dev: Optional[bool] = None
    #: Let it be reached by NBD at an address that is not a loopback address.
    allow_remote: Optional[bool] = None
    #: auto, kernel (auto without NBD), ublk, fuse-loop, nbd:unix:PATH, nbd:tcp:ADDR:PORT or vhost-user:PATH.
    export: Optional[str] = None
    consistency: Optional[Consistency] = None
    #: writeback where absent.
    cache_mode: Optional[CacheMode] = None
    data_crc: Optional[bool] = None
    #: Serve it although the log of recovery points says that the disk is newer than the region.
    older_region: Optional[bool] = None
    #: Serve it although its disk was written while no daemon served it, or whether it was cannot be read.
    changed_disk: Optional[bool] = None
    name: Optional[str] = None
    #: Seconds that its recovery point is old at most, if writeback can keep that; 0 - no promise.
    recovery_point_max_age_s: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "path": _codec.text,
        "cache_size": _codec.integer,
        "cache_max": _codec.integer,
        "weight": _codec.integer,
        "handlers": _codec.integer,
        "start_dev": _codec.boolean,
        "allow_remote": _codec.boolean,
        "export": _codec.text,
        "consistency": _codec.text,
        "cache_mode": _codec.text,
        "data_crc": _codec.boolean,
        "older_region": _codec.boolean,
        "changed_disk": _codec.boolean,
        "name": _codec.text,
        "recovery_point_max_age_s": _codec.integer,
    }


@dataclasses.dataclass
class BackendStarted(Object):
    """Backend started."""

    backend_id: int = 0
    blkdev: Optional[BlkdevInfo] = None
    warnings: List[str] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "backend_id": _codec.integer,
        "blkdev": _codec.object_of(lambda: BlkdevInfo),
        "warnings": _codec.list_of(_codec.text),
    }


@dataclasses.dataclass
class BackendInfo(Object):
    """Backend info."""

    backend_id: int = 0
    host_id: int = 0
    #: Absent without one.
    name: Optional[str] = None
    #: Never changes.
    uuid: str = ""
    backend_path: str = ""
    alive: bool = False
    #: Segments of the cache that can hold a log, all but the one that holds its state; 0 without a cache.
    cache_segs: int = 0
    #: Bytes of the cache, the segment that holds its state included; 0 without a cache.
    cache_size: int = 0
    #: The minimum of a cache that shares the space of its transport, in bytes; absent for others.
    cache_min: Optional[int] = None
    #: Its maximum.
    cache_max: Optional[int] = None
    cache_gc_percent: int = 0
    #: Those of them that hold records or are open for the next ones; 0 while it is not served.
    cache_used_segs: int = 0
    #: Bytes of the device.
    size: int = 0
    #: Bytes that are not on the backing device yet; absent where that is not known, and without a cache.
    dirty_bytes: Optional[int] = None
    #: How it is, in a few words; serving if all is well.
    state: str = ""
    blkdevs: List[BlkdevInfo] = dataclasses.field(default_factory=list)
    #: Why it is not served.
    error: Optional[str] = None
    #: Seconds until the daemon retries it at the latest; absent while it is served.
    retry_in_s: Optional[int] = None
    #: Where it was before a rescue moved it to backend_path; absent unless it still has to be started there.
    moved_from: Optional[str] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "backend_id": _codec.integer,
        "host_id": _codec.integer,
        "name": _codec.text,
        "uuid": _codec.text,
        "backend_path": _codec.text,
        "alive": _codec.boolean,
        "cache_segs": _codec.integer,
        "cache_size": _codec.integer,
        "cache_min": _codec.integer,
        "cache_max": _codec.integer,
        "cache_gc_percent": _codec.integer,
        "cache_used_segs": _codec.integer,
        "size": _codec.integer,
        "dirty_bytes": _codec.integer,
        "state": _codec.text,
        "blkdevs": _codec.list_of(_codec.object_of(lambda: BlkdevInfo)),
        "error": _codec.text,
        "retry_in_s": _codec.integer,
        "moved_from": _codec.text,
    }


@dataclasses.dataclass
class StartBlkdev(Object):
    """Start blkdev."""

    backend: NumberOrName = 0
    #: auto, kernel (auto without NBD), ublk, fuse-loop, nbd:unix:PATH, nbd:tcp:ADDR:PORT or vhost-user:PATH.
    export: Optional[str] = None
    #: Let it be reached by NBD at an address that is not a loopback address.
    allow_remote: Optional[bool] = None
    name: Optional[str] = None
    #: Whether there may be other block devices on the backend, on this host and on others, all of which were started
    #: with this: they are the same disk.
    shared: Optional[bool] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "backend": _codec.either,
        "export": _codec.text,
        "allow_remote": _codec.boolean,
        "name": _codec.text,
        "shared": _codec.boolean,
    }


@dataclasses.dataclass
class BlkdevChange(Object):
    """Blkdev change."""

    #: A name of its own; empty - it has that of its backend.
    name: Optional[str] = None
    class_: Optional[BlkdevClass] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {"name": _codec.text, "class": _codec.text}


@dataclasses.dataclass
class BlkdevInfo(Object):
    """Blkdev info."""

    blkdev_id: int = 0
    host_id: int = 0
    backend_id: int = 0
    #: Its own name, else that of its backend; absent without one.
    name: Optional[str] = None
    class_: str = ""
    #: Whether there may be other block devices on its backend.
    shared: bool = False
    #: /dev/cbdN or an NBD URI.
    dev_name: str = ""
    alive: bool = False
    #: How it is reached, as the user asked for it.
    export: str = ""
    #: How clients reach it, in words; absent while it is not served.
    method: Optional[str] = None
    #: Why it is not served.
    error: Optional[str] = None
    #: Its faults while it is served (its socket or link was removed or replaced, its clients wait), or else why it
    #: is not the best there could be: auto had to choose another export, or it ends with the daemon.
    note: Optional[str] = None
    #: The requests of its clients since its backend was opened, by operation: read, write, flush, discard and
    #: write_zeroes. Only in the status, while the backend is served.
    operations: Dict[str, OperationFigures] = dataclasses.field(default_factory=dict)

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "blkdev_id": _codec.integer,
        "host_id": _codec.integer,
        "backend_id": _codec.integer,
        "name": _codec.text,
        "class": _codec.text,
        "shared": _codec.boolean,
        "dev_name": _codec.text,
        "alive": _codec.boolean,
        "export": _codec.text,
        "method": _codec.text,
        "error": _codec.text,
        "note": _codec.text,
        "operations": _codec.map_of(_codec.object_of(lambda: OperationFigures)),
    }


@dataclasses.dataclass
class Histogram(Object):
    """Durations. A bucket is an eighth of a power of two of nanoseconds; buckets without durations are absent."""

    #: Number of durations.
    count: Optional[int] = None
    #: Their sum in nanoseconds.
    sum_ns: Optional[int] = None
    #: The shortest durations first.
    buckets: List[Bucket] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "count": _codec.integer,
        "sum_ns": _codec.integer,
        "buckets": _codec.list_of(_codec.object_of(lambda: Bucket)),
    }


@dataclasses.dataclass
class Bucket(Object):
    """Bucket."""

    #: Exclusive upper bound in nanoseconds. The bucket with the bound 2^40 has all longer durations, too.
    upper_ns: Optional[int] = None
    #: Durations in it.
    count: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {"upper_ns": _codec.integer, "count": _codec.integer}


@dataclasses.dataclass
class OperationFigures(Object):
    """Operation figures."""

    #: Requests that have ended, failed ones included.
    requests: Optional[int] = None
    #: Bytes of those that succeeded.
    bytes: Optional[int] = None
    #: Requests that failed.
    failed: Optional[int] = None
    #: Those that succeeded, by outcome: hit and miss of reads; cached of everything else; disk of flushes for which
    #: the disk was flushed; past- and the reason of what went past the cache; uncached without a cache; remote of a
    #: block device on a backend of another host. An outcome that has not occurred is absent.
    outcomes: Dict[str, Outcome] = dataclasses.field(default_factory=dict)
    #: Of those that succeeded. Not all that end at once are timed, and one that is counts for those before it.
    latency: Optional[Histogram] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "requests": _codec.integer,
        "bytes": _codec.integer,
        "failed": _codec.integer,
        "outcomes": _codec.map_of(_codec.object_of(lambda: Outcome)),
        "latency": _codec.object_of(lambda: Histogram),
    }


@dataclasses.dataclass
class Outcome(Object):
    """Outcome."""

    #: Requests. One that has several outcomes is counted with the one that took it to the disk.
    requests: Optional[int] = None
    #: Bytes, each with its own outcome.
    bytes: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {"requests": _codec.integer, "bytes": _codec.integer}


@dataclasses.dataclass
class DiskFigures(Object):
    """Disk figures."""

    #: Operations that have ended, failed ones included.
    operations: Optional[int] = None
    #: Bytes of those that succeeded.
    bytes: Optional[int] = None
    #: Operations that failed.
    failed: Optional[int] = None
    #: The same operations by origin, those that have occurred: client (reads that missed, and what goes past the
    #: cache), readahead, writeback, verify.
    origins: Dict[str, DiskOrigin] = dataclasses.field(default_factory=dict)
    latency: Optional[Histogram] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "operations": _codec.integer,
        "bytes": _codec.integer,
        "failed": _codec.integer,
        "origins": _codec.map_of(_codec.object_of(lambda: DiskOrigin)),
        "latency": _codec.object_of(lambda: Histogram),
    }


@dataclasses.dataclass
class DiskOrigin(Object):
    """Disk origin."""

    #: Operations that have ended, failed ones included.
    operations: Optional[int] = None
    #: Bytes of those that succeeded.
    bytes: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {"operations": _codec.integer, "bytes": _codec.integer}


@dataclasses.dataclass
class Wait(Object):
    """Wait."""

    #: Waits that have ended.
    count: Optional[int] = None
    #: Their time in nanoseconds.
    total_ns: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {"count": _codec.integer, "total_ns": _codec.integer}


@dataclasses.dataclass
class StopBlkdev(Object):
    """Stop blkdev."""

    #: Even if it is mounted or open.
    force: Optional[bool] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {"force": _codec.boolean}


@dataclasses.dataclass
class GrowTransport(Object):
    """Grow transport."""

    #: Bytes that the region is to have, to which its file is extended; absent if its file or device has become
    #: larger already.
    size: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {"size": _codec.integer}


@dataclasses.dataclass
class TransportGrown(Object):
    """Transport grown."""

    transport_id: int = 0
    path: str = ""
    #: The size in bytes before.
    before: int = 0
    #: The size in bytes now; the same if neither the file nor the device has become larger.
    now: int = 0
    #: Segments that it has more.
    new_segments: int = 0
    bytes_per_segment: int = 0
    #: Segments that belong to no cache now.
    free_segments: int = 0

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "transport_id": _codec.integer,
        "path": _codec.text,
        "before": _codec.integer,
        "now": _codec.integer,
        "new_segments": _codec.integer,
        "bytes_per_segment": _codec.integer,
        "free_segments": _codec.integer,
    }


@dataclasses.dataclass
class BackendGrown(Object):
    """Backend grown."""

    backend_id: int = 0
    backend_path: str = ""
    #: The size in bytes before.
    before: int = 0
    #: The size in bytes now; the same if the backing device has not become larger.
    now: int = 0
    #: Those that are served.
    blkdevs: List[BlkdevGrown] = dataclasses.field(default_factory=list)
    warnings: List[str] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "backend_id": _codec.integer,
        "backend_path": _codec.text,
        "before": _codec.integer,
        "now": _codec.integer,
        "blkdevs": _codec.list_of(_codec.object_of(lambda: BlkdevGrown)),
        "warnings": _codec.list_of(_codec.text),
    }


@dataclasses.dataclass
class BlkdevGrown(Object):
    """Blkdev grown."""

    blkdev_id: int = 0
    dev_name: str = ""
    #: Whether its clients see the size now.
    is_seen: bool = False
    #: Otherwise when they see it.
    pending: Optional[str] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "blkdev_id": _codec.integer,
        "dev_name": _codec.text,
        "is_seen": _codec.boolean,
        "pending": _codec.text,
    }


@dataclasses.dataclass
class BlkdevUser(Object):
    """Blkdev user."""

    transport_id: Optional[int] = None
    blkdev_id: Optional[int] = None
    #: How clients reach it: a path or an NBD URI; of one of another host its number and that host.
    dev_name: Optional[str] = None
    #: Its user, as a sentence.
    user: Optional[str] = None
    #: Whether its users wait while no daemon runs; otherwise they see errors.
    outlives_daemon: Optional[bool] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "transport_id": _codec.integer,
        "blkdev_id": _codec.integer,
        "dev_name": _codec.text,
        "user": _codec.text,
        "outlives_daemon": _codec.boolean,
    }


@dataclasses.dataclass
class BlkdevStopped(Object):
    """Blkdev stopped."""

    #: What did not close completely, such as requests that wait for a disk.
    warnings: List[str] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {"warnings": _codec.list_of(_codec.text)}


@dataclasses.dataclass
class StopBackend(Object):
    """Stop backend."""

    #: Even if its block devices are mounted or open; drops nothing.
    force: Optional[bool] = None
    #: Seconds without progress after which the stop gives up.
    timeout_s: Optional[int] = None
    #: Drop what is dirty or quarantined; must be exactly the dirty and quarantined bytes of the moment.
    discard_dirty: Optional[int] = None
    #: Compare the backing device with the cache after the drain; the backend is not removed if they differ.
    verify: Optional[bool] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "force": _codec.boolean,
        "timeout_s": _codec.integer,
        "discard_dirty": _codec.integer,
        "verify": _codec.boolean,
    }


@dataclasses.dataclass
class AttachCache(Object):
    """Attach cache."""

    #: Bytes of the cache, rounded down to whole segments.
    cache_size: int = 0
    #: Bytes up to which a cache that shares the space of its transport grows; cache_size is its minimum then.
    cache_max: Optional[int] = None
    #: With cache_max: how much a hit of this cache counts; 1 where absent.
    weight: Optional[int] = None
    #: As stored for the backend where absent, at first writeback.
    cache_mode: Optional[CacheMode] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "cache_size": _codec.integer,
        "cache_max": _codec.integer,
        "weight": _codec.integer,
        "cache_mode": _codec.text,
    }


@dataclasses.dataclass
class DetachCache(Object):
    """Detach cache."""

    #: Seconds without progress after which the backend keeps its cache.
    timeout_s: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {"timeout_s": _codec.integer}


@dataclasses.dataclass
class MoveBackend(Object):
    """Move backend."""

    #: Name or number of the host; either it or the host that has the backend is that of this daemon.
    to: str = ""
    #: Seconds without progress of the drain after which the backend stays where it is.
    timeout_s: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {"to": _codec.text, "timeout_s": _codec.integer}


@dataclasses.dataclass
class ResizeCache(Object):
    """Resize cache."""

    #: Bytes that the cache is to have, rounded down to whole segments.
    cache_size: int = 0
    #: Bytes up to which a cache that shares the space of its transport grows; cache_size is its minimum then.
    cache_max: Optional[int] = None
    #: With cache_max: how much a hit of this cache counts; 1 where absent.
    weight: Optional[int] = None
    #: Seconds without progress after which a cache that shrinks keeps its size.
    timeout_s: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "cache_size": _codec.integer,
        "cache_max": _codec.integer,
        "weight": _codec.integer,
        "timeout_s": _codec.integer,
    }


@dataclasses.dataclass
class Drain(Object):
    """Drain."""

    #: All of the transport where absent.
    backend: Optional[NumberOrName] = None
    #: Answer when it is done.
    wait: Optional[bool] = None
    #: Seconds without progress after which waiting ends.
    timeout_s: Optional[int] = None
    #: Of a drain - compare the backing device with the cache afterwards; findings are an error.
    verify: Optional[bool] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "backend": _codec.either,
        "wait": _codec.boolean,
        "timeout_s": _codec.integer,
        "verify": _codec.boolean,
    }


@dataclasses.dataclass
class VerifyRange(Object):
    """Verify range."""

    #: First byte of the range, in whole sectors; 0 where absent.
    offset: Optional[int] = None
    #: Bytes of the range, in whole sectors; to the end of the device where absent.
    length: Optional[int] = None
    #: newest where absent.
    level: Optional[VerifyLevel] = None
    #: Make clean blocks dirty again whose copy on the backing device is lost, so that writeback repairs it.
    repair: Optional[bool] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "offset": _codec.integer,
        "length": _codec.integer,
        "level": _codec.text,
        "repair": _codec.boolean,
    }


@dataclasses.dataclass
class FindingInfo(Object):
    """Finding info."""

    start: int = 0
    length: int = 0
    flaw: str = ""
    #: The copy in the cache is whole again, or the range is dirty again.
    repaired: bool = False

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "start": _codec.integer,
        "length": _codec.integer,
        "flaw": _codec.text,
        "repaired": _codec.boolean,
    }


@dataclasses.dataclass
class CopyInfo(Object):
    """Copy info."""

    structure: str = ""
    #: Its row, lane, segment or index.
    number: int = 0
    #: First byte of the copy in the region.
    at: int = 0
    #: Whether the memory can be read.
    readable: bool = False
    #: Whether the copy is whole again.
    repaired: bool = False

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "structure": _codec.text,
        "number": _codec.integer,
        "at": _codec.integer,
        "readable": _codec.boolean,
        "repaired": _codec.boolean,
    }


@dataclasses.dataclass
class MetadataInfo(Object):
    """Metadata info."""

    #: Structures that were looked at, each in both copies.
    structures: int = 0
    #: Copies that were damaged and are whole again.
    repaired: int = 0
    #: Copies that are damaged or cannot be read, and stay so.
    unrepaired: int = 0
    #: The first 64 of these copies.
    copies: List[CopyInfo] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "structures": _codec.integer,
        "repaired": _codec.integer,
        "unrepaired": _codec.integer,
        "copies": _codec.list_of(_codec.object_of(lambda: CopyInfo)),
    }


@dataclasses.dataclass
class VerifiedInfo(Object):
    """Verified info."""

    #: Bytes that were looked at.
    verified_bytes: int = 0
    #: The part of them whose copy in the cache was checked.
    cache_bytes: int = 0
    #: Bytes that the backing device read; what is read again to be sure counts again.
    backing_bytes: int = 0
    #: Bytes that clients changed while they were looked at.
    changed_bytes: int = 0
    #: The number of findings; adjacent blocks with the same flaw are one.
    found: int = 0
    #: The part of them that is repaired.
    repaired: int = 0
    #: The first 1024.
    findings: List[FindingInfo] = dataclasses.field(default_factory=list)
    #: Of a scrub - the metadata of the region; absent if it was not looked at.
    metadata: Optional[MetadataInfo] = None
    #: How the backing device was asked, and why not better.
    method: str = ""
    #: Why a part could not be looked at or repaired; the first such error.
    error: Optional[str] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "verified_bytes": _codec.integer,
        "cache_bytes": _codec.integer,
        "backing_bytes": _codec.integer,
        "changed_bytes": _codec.integer,
        "found": _codec.integer,
        "repaired": _codec.integer,
        "findings": _codec.list_of(_codec.object_of(lambda: FindingInfo)),
        "metadata": _codec.object_of(lambda: MetadataInfo),
        "method": _codec.text,
        "error": _codec.text,
    }


@dataclasses.dataclass
class RequestSample(Object):
    """Request sample."""

    backend_id: int = 0
    #: Blocks of 4 KiB of a group, of which one is in the sample; 0 while nothing is sampled.
    one_of: int = 0
    #: The groups of requests before the others, oldest first - of older ones only the first of each group.
    earlier_groups: List[int] = dataclasses.field(default_factory=list)
    #: Whether each of them was a write.
    earlier_writes: List[bool] = dataclasses.field(default_factory=list)
    #: Whether no group is missing there, and the cache held hardly anything before.
    earlier_is_all: bool = False
    #: The time after which times_ms begin again at 0.
    period_ms: int = 0
    #: When each request came, oldest first, modulo period_ms.
    times_ms: List[int] = dataclasses.field(default_factory=list)
    #: Whether each request was a write; otherwise it was a read.
    writes: List[bool] = dataclasses.field(default_factory=list)
    #: The group of each request - the number of its first block, divided by one_of.
    groups: List[int] = dataclasses.field(default_factory=list)
    #: The number of the first request behind which read_bytes and hit_bytes were counted, from 0.
    counted_from: int = 0
    #: Bytes that clients have read since then, in the sample or not.
    read_bytes: int = 0
    #: Bytes of these that the cache had.
    hit_bytes: int = 0
    #: The mean bytes of all requests that read or write.
    request_bytes: int = 0

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "backend_id": _codec.integer,
        "one_of": _codec.integer,
        "earlier_groups": _codec.list_of(_codec.integer),
        "earlier_writes": _codec.list_of(_codec.boolean),
        "earlier_is_all": _codec.boolean,
        "period_ms": _codec.integer,
        "times_ms": _codec.list_of(_codec.integer),
        "writes": _codec.list_of(_codec.boolean),
        "groups": _codec.list_of(_codec.integer),
        "counted_from": _codec.integer,
        "read_bytes": _codec.integer,
        "hit_bytes": _codec.integer,
        "request_bytes": _codec.integer,
    }


@dataclasses.dataclass
class ScrubRequest(Object):
    """Scrub request."""

    action: str = ""
    #: Of a start - bytes a second; the setting scrub_rate where absent.
    rate: Optional[int] = None
    #: Of a start - as for a range.
    repair: Optional[bool] = None
    #: Of a start - agree where absent.
    level: Optional[VerifyLevel] = None
    #: Of a start - answer when the pass has ended; it continues if the client disconnects.
    wait: Optional[bool] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "action": _codec.text,
        "rate": _codec.integer,
        "repair": _codec.boolean,
        "level": _codec.text,
        "wait": _codec.boolean,
    }


@dataclasses.dataclass
class ScrubPass(Object):
    """Scrub pass."""

    #: In seconds since 1970 UTC.
    began: int = 0
    #: In seconds since 1970 UTC.
    ended: int = 0
    level: str = ""
    repair: bool = False
    results: Optional[VerifiedInfo] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "began": _codec.integer,
        "ended": _codec.integer,
        "level": _codec.text,
        "repair": _codec.boolean,
        "results": _codec.object_of(lambda: VerifiedInfo),
    }


@dataclasses.dataclass
class ScrubInfo(Object):
    """Scrub info."""

    backend_id: int = 0
    state: str = ""
    #: Bytes from the beginning of the device that the pass has looked at.
    position: int = 0
    size: int = 0
    percent: int = 0
    #: At present.
    bytes_per_s: int = 0
    #: The limit of the pass in bytes a second; 0 is none.
    rate: int = 0
    level: str = ""
    repair: bool = False
    #: In seconds since 1970 UTC; absent without a pass.
    began: Optional[int] = None
    #: What the pass has found so far; absent without one.
    results: Optional[VerifiedInfo] = None
    #: The last complete pass.
    last: Optional[ScrubPass] = None
    #: When the next pass begins by the schedule, in seconds since 1970 UTC; absent without one.
    next: Optional[int] = None
    #: Seconds from the beginning of a pass to that of the next one; 0 is never.
    scrub_every_s: int = 0
    #: When scheduled passes run, HH:MM-HH:MM in UTC; always if empty.
    scrub_window: str = ""
    #: Bytes a second; 0 is no limit.
    scrub_rate: int = 0
    #: Whether a pass waits while clients use the cache.
    scrub_idle_only: bool = False
    offload: str = ""
    #: Seconds that the recovery point is old at most, if writeback can keep that; 0 - no promise.
    recovery_point_max_age_s: Optional[int] = None
    #: How verifications ask the backing device, and why not better; absent while the backend is not served.
    method: Optional[str] = None
    #: Findings of all passes by flaw.
    found_total: Dict[str, int] = dataclasses.field(default_factory=dict)
    #: The part of them that was repaired.
    repaired_total: int = 0
    #: Bytes that all passes have looked at.
    verified_bytes_total: int = 0
    #: Copies of structures of the region that all passes have repaired.
    metadata_repaired_total: int = 0
    #: Why the scrub does not run or is not recorded.
    error: Optional[str] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "backend_id": _codec.integer,
        "state": _codec.text,
        "position": _codec.integer,
        "size": _codec.integer,
        "percent": _codec.integer,
        "bytes_per_s": _codec.integer,
        "rate": _codec.integer,
        "level": _codec.text,
        "repair": _codec.boolean,
        "began": _codec.integer,
        "results": _codec.object_of(lambda: VerifiedInfo),
        "last": _codec.object_of(lambda: ScrubPass),
        "next": _codec.integer,
        "scrub_every_s": _codec.integer,
        "scrub_window": _codec.text,
        "scrub_rate": _codec.integer,
        "scrub_idle_only": _codec.boolean,
        "offload": _codec.text,
        "recovery_point_max_age_s": _codec.integer,
        "method": _codec.text,
        "found_total": _codec.map_of(_codec.integer),
        "repaired_total": _codec.integer,
        "verified_bytes_total": _codec.integer,
        "metadata_repaired_total": _codec.integer,
        "error": _codec.text,
    }


@dataclasses.dataclass
class CommonCheckpoint(Object):
    """Common checkpoint."""

    #: Backends with a cache.
    backends: List[NumberOrName] = dataclasses.field(default_factory=list)
    #: Seconds for which writeback is paused then; 30 where absent.
    hold_s: Optional[int] = None
    #: Seconds without progress after which the command gives up.
    timeout_s: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "backends": _codec.list_of(_codec.either),
        "hold_s": _codec.integer,
        "timeout_s": _codec.integer,
    }


@dataclasses.dataclass
class SettingsChange(Object):
    """Settings change."""

    gc_percent: Optional[int] = None
    consistency: Optional[Consistency] = None
    #: Bytes a second, 32768 at least; 0 is automatic.
    writeback_rate: Optional[int] = None
    writeback_percent: Optional[int] = None
    on_write_error: Optional[OnWriteError] = None
    write_error_after_s: Optional[int] = None
    cache_mode: Optional[CacheMode] = None
    read_fill: Optional[ReadFill] = None
    #: Bytes; 0 is never.
    sequential_read_cutoff: Optional[int] = None
    readahead: Optional[Readahead] = None
    #: Bytes; 0 is never.
    sequential_write_cutoff: Optional[int] = None
    when_full: Optional[WhenFull] = None
    #: 0 is never.
    congestion_read_us: Optional[int] = None
    #: 0 is never.
    congestion_write_us: Optional[int] = None
    #: 0 is never.
    read_latency_target_us: Optional[int] = None
    #: Seconds from now on; 0 ends a pause.
    writeback_pause_s: Optional[int] = None
    #: Share of the cache that pins may take.
    pin_percent: Optional[int] = None
    #: Share of the cache that metadata keeps; with pin_percent at most 60.
    metadata_min_percent: Optional[int] = None
    #: Share of the cache above which metadata gets no preference.
    metadata_max_percent: Optional[int] = None
    #: Seconds from the beginning of a scrub to that of the next one; 0 is never.
    scrub_every_s: Optional[int] = None
    #: When scheduled scrubs run, HH:MM-HH:MM in UTC; empty - always.
    scrub_window: Optional[str] = None
    #: Bytes a second of scrubs, 65536 at least; 0 is no limit.
    scrub_rate: Optional[int] = None
    #: Whether scrubs wait while clients use the cache.
    scrub_idle_only: Optional[bool] = None
    offload: Optional[Offload] = None
    #: Seconds that the recovery point is old at most, if writeback can keep that; 0 - no promise.
    recovery_point_max_age_s: Optional[int] = None
    #: The name of the backend; empty - it has none any more. A backend without a cache has this setting and those of
    #: scrubs only.
    name: Optional[str] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "gc_percent": _codec.integer,
        "consistency": _codec.text,
        "writeback_rate": _codec.integer,
        "writeback_percent": _codec.integer,
        "on_write_error": _codec.text,
        "write_error_after_s": _codec.integer,
        "cache_mode": _codec.text,
        "read_fill": _codec.text,
        "sequential_read_cutoff": _codec.integer,
        "readahead": _codec.text,
        "sequential_write_cutoff": _codec.integer,
        "when_full": _codec.text,
        "congestion_read_us": _codec.integer,
        "congestion_write_us": _codec.integer,
        "read_latency_target_us": _codec.integer,
        "writeback_pause_s": _codec.integer,
        "pin_percent": _codec.integer,
        "metadata_min_percent": _codec.integer,
        "metadata_max_percent": _codec.integer,
        "scrub_every_s": _codec.integer,
        "scrub_window": _codec.text,
        "scrub_rate": _codec.integer,
        "scrub_idle_only": _codec.boolean,
        "offload": _codec.text,
        "recovery_point_max_age_s": _codec.integer,
        "name": _codec.text,
    }


@dataclasses.dataclass
class Settings(Object):
    """Settings."""

    gc_percent: int = 0
    consistency: str = ""
    writeback_rate: int = 0
    writeback_percent: int = 0
    on_write_error: str = ""
    write_error_after_s: int = 0
    cache_mode: str = ""
    read_fill: str = ""
    sequential_read_cutoff: int = 0
    readahead: str = ""
    sequential_write_cutoff: int = 0
    when_full: str = ""
    congestion_read_us: int = 0
    congestion_write_us: int = 0
    read_latency_target_us: int = 0
    #: Milliseconds since 1970 UTC; 0 if writeback is not paused.
    writeback_paused_until_ms: int = 0
    #: Share of the cache in percent that pins may take.
    pin_percent: int = 0
    #: Share of the cache in percent that metadata keeps.
    metadata_min_percent: int = 0
    #: Share of the cache in percent above which metadata gets no preference.
    metadata_max_percent: int = 0

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "gc_percent": _codec.integer,
        "consistency": _codec.text,
        "writeback_rate": _codec.integer,
        "writeback_percent": _codec.integer,
        "on_write_error": _codec.text,
        "write_error_after_s": _codec.integer,
        "cache_mode": _codec.text,
        "read_fill": _codec.text,
        "sequential_read_cutoff": _codec.integer,
        "readahead": _codec.text,
        "sequential_write_cutoff": _codec.integer,
        "when_full": _codec.text,
        "congestion_read_us": _codec.integer,
        "congestion_write_us": _codec.integer,
        "read_latency_target_us": _codec.integer,
        "writeback_paused_until_ms": _codec.integer,
        "pin_percent": _codec.integer,
        "metadata_min_percent": _codec.integer,
        "metadata_max_percent": _codec.integer,
    }


@dataclasses.dataclass
class SettingsChanged(Settings):
    """Settings changed."""

    backend_id: int = 0
    scrub_every_s: int = 0
    scrub_window: str = ""
    scrub_rate: int = 0
    scrub_idle_only: bool = False
    offload: str = ""
    recovery_point_max_age_s: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        **Settings._decoders,
        "backend_id": _codec.integer,
        "scrub_every_s": _codec.integer,
        "scrub_window": _codec.text,
        "scrub_rate": _codec.integer,
        "scrub_idle_only": _codec.boolean,
        "offload": _codec.text,
        "recovery_point_max_age_s": _codec.integer,
    }


@dataclasses.dataclass
class ProgressLine(Object):
    """Exactly one of the three."""

    progress: Optional[Progress] = None
    done: Optional[Done] = None
    error: Optional[ErrorBody] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "progress": _codec.object_of(lambda: Progress),
        "done": _codec.object_of(lambda: Done),
        "error": _codec.object_of(lambda: ErrorBody),
    }


@dataclasses.dataclass
class Progress(Object):
    """Progress."""

    backend_id: int = 0
    dirty_bytes_at_start: int = 0
    dirty_bytes: int = 0
    written_bytes: int = 0
    #: Bytes that a cache which shrinks has freed so far.
    given_up_bytes: Optional[int] = None
    #: Bytes by which it shrinks.
    to_give_up_bytes: Optional[int] = None
    #: Bytes that a verification has looked at.
    verified_bytes: Optional[int] = None
    #: Bytes that it looks at in all.
    to_verify_bytes: Optional[int] = None
    #: What it has found so far.
    found: Optional[int] = None
    elapsed_ms: int = 0
    #: The latest failure of the backing device.
    error: Optional[str] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "backend_id": _codec.integer,
        "dirty_bytes_at_start": _codec.integer,
        "dirty_bytes": _codec.integer,
        "written_bytes": _codec.integer,
        "given_up_bytes": _codec.integer,
        "to_give_up_bytes": _codec.integer,
        "verified_bytes": _codec.integer,
        "to_verify_bytes": _codec.integer,
        "found": _codec.integer,
        "elapsed_ms": _codec.integer,
        "error": _codec.text,
    }


@dataclasses.dataclass
class Done(Object):
    """Done."""

    written_bytes: int = 0
    discarded_bytes: int = 0
    warnings: List[str] = dataclasses.field(default_factory=list)
    moment: Optional[Moment] = None
    #: Of a verification.
    verified: Optional[VerifiedInfo] = None
    #: Of a change of a scrub.
    scrub: Optional[ScrubInfo] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "written_bytes": _codec.integer,
        "discarded_bytes": _codec.integer,
        "warnings": _codec.list_of(_codec.text),
        "moment": _codec.object_of(lambda: Moment),
        "verified": _codec.object_of(lambda: VerifiedInfo),
        "scrub": _codec.object_of(lambda: ScrubInfo),
    }


@dataclasses.dataclass
class Moment(Object):
    """A moment that several backing devices have in common; only of a checkpoint of several backends."""

    #: Milliseconds since 1970 UTC; what completed before is on the backing devices.
    at_ms: int = 0
    #: Until when nothing else is written to them, in milliseconds since 1970 UTC.
    held_until_ms: int = 0

    _decoders: ClassVar[Mapping[str, Decoder]] = {"at_ms": _codec.integer, "held_until_ms": _codec.integer}


@dataclasses.dataclass
class Status(Object):
    """Status."""

    version: str = ""
    pid: int = 0
    uptime_s: int = 0
    warnings: List[str] = dataclasses.field(default_factory=list)
    front_ends: Optional[FrontEndStatus] = None
    events: Optional[EventsInfo] = None
    transports: List[TransportStatus] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "version": _codec.text,
        "pid": _codec.integer,
        "uptime_s": _codec.integer,
        "warnings": _codec.list_of(_codec.text),
        "front_ends": _codec.object_of(lambda: FrontEndStatus),
        "events": _codec.object_of(lambda: EventsInfo),
        "transports": _codec.list_of(_codec.object_of(lambda: TransportStatus)),
    }


@dataclasses.dataclass
class Event(Object):
    """Something that happened; docs/events.md lists the names."""

    #: Its number in this run of the daemon, from 1 on without gaps.
    sequence: Optional[int] = None
    #: The run of the daemon.
    instance: Optional[str] = None
    #: Milliseconds since 1970 UTC.
    time_ms: Optional[int] = None
    #: Its stable name, e.g. backend.started.
    name: Optional[str] = None
    severity: Optional[str] = None
    #: Number of the transport that it is about.
    transport: Optional[int] = None
    #: Number of the backend that it is about.
    backend: Optional[int] = None
    #: Number of the block device that it is about.
    blkdev: Optional[int] = None
    #: What else is known of it.
    fields: Dict[str, Any] = dataclasses.field(default_factory=dict)
    #: The line of the log.
    text: Optional[str] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "sequence": _codec.integer,
        "instance": _codec.text,
        "time_ms": _codec.integer,
        "name": _codec.text,
        "severity": _codec.text,
        "transport": _codec.integer,
        "backend": _codec.integer,
        "blkdev": _codec.integer,
        "fields": _codec.map_of(_codec.anything),
        "text": _codec.text,
    }


@dataclasses.dataclass
class EventLine(Object):
    """One line of an answer with events; it has one of these."""

    begin: Optional[EventsBegin] = None
    event: Optional[Event] = None
    gap: Optional[EventsGap] = None
    end: Optional[EventsEnd] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "begin": _codec.object_of(lambda: EventsBegin),
        "event": _codec.object_of(lambda: Event),
        "gap": _codec.object_of(lambda: EventsGap),
        "end": _codec.object_of(lambda: EventsEnd),
    }


@dataclasses.dataclass
class EventsBegin(Object):
    """The first line of an answer with events."""

    #: The run of the daemon.
    instance: str = ""
    #: Number of the oldest event that is kept.
    oldest: int = 0
    #: Number of the latest event; 0 before the first.
    latest: int = 0

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "instance": _codec.text,
        "oldest": _codec.integer,
        "latest": _codec.integer,
    }


@dataclasses.dataclass
class EventsGap(Object):
    """Events that are not kept any more."""

    #: Their number.
    dropped: int = 0

    _decoders: ClassVar[Mapping[str, Decoder]] = {"dropped": _codec.integer}


@dataclasses.dataclass
class EventsEnd(Object):
    """All events until now were sent."""


    _decoders: ClassVar[Mapping[str, Decoder]] = {}


@dataclasses.dataclass
class EventsInfo(Object):
    """The record of events."""

    #: The run of the daemon.
    instance: Optional[str] = None
    #: Events since the daemon started.
    recorded: Optional[int] = None
    #: Events of them that are kept.
    kept: Optional[int] = None
    #: Events of them that are not kept any more.
    dropped: Optional[int] = None
    #: Events since the daemon started, by name.
    counts: Dict[str, int] = dataclasses.field(default_factory=dict)
    command: Optional[EventCommandInfo] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "instance": _codec.text,
        "recorded": _codec.integer,
        "kept": _codec.integer,
        "dropped": _codec.integer,
        "counts": _codec.map_of(_codec.integer),
        "command": _codec.object_of(lambda: EventCommandInfo),
    }


@dataclasses.dataclass
class EventCommandInfo(Object):
    """The command that the configuration names for events."""

    program: str = ""
    #: Events for which it succeeded.
    succeeded: int = 0
    #: Events for which it could not be run or failed.
    failed: int = 0
    #: Events for which it ran too long and was killed.
    timed_out: int = 0
    #: Events for which it was not run: too many were waiting.
    dropped: int = 0
    #: Events that wait for it.
    waiting: int = 0
    #: Why it failed last.
    last_error: Optional[str] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "program": _codec.text,
        "succeeded": _codec.integer,
        "failed": _codec.integer,
        "timed_out": _codec.integer,
        "dropped": _codec.integer,
        "waiting": _codec.integer,
        "last_error": _codec.text,
    }


@dataclasses.dataclass
class FrontEndStatus(Object):
    """Memory of clients of all devices together, and counters of refused clients since the daemon started."""

    #: Bytes of memory that virtual machines have shared with the daemon.
    guest_memory_bytes: int = 0
    #: Bytes that they may share together.
    guest_memory_limit: int = 0
    #: Requests to share memory that were refused by this limit.
    guest_memory_refused: int = 0
    #: Bytes that NBD connections have allocated, or that are reserved for the first ones of each device.
    nbd_memory_bytes: int = 0
    #: Bytes that they may allocate together.
    nbd_memory_limit: int = 0
    #: NBD clients that were refused.
    nbd_refused: int = 0
    #: NBD clients in the handshake that were disconnected for newer ones.
    nbd_gave_way: int = 0
    #: NBD connections that ended with an error.
    nbd_failed: int = 0
    #: Front ends of virtual machines that were refused.
    vhost_refused: int = 0
    #: Front ends and rings of virtual machines that broke a rule or a bound.
    vhost_failed: int = 0
    #: Connections to the control socket.
    control_connections: int = 0
    #: Connections to the control socket that were refused.
    control_refused: int = 0
    #: Connections of the listener for metrics.
    web_connections: Optional[int] = None
    #: Requests for metrics that were refused, and connections that were closed for newer ones.
    web_refused: Optional[int] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "guest_memory_bytes": _codec.integer,
        "guest_memory_limit": _codec.integer,
        "guest_memory_refused": _codec.integer,
        "nbd_memory_bytes": _codec.integer,
        "nbd_memory_limit": _codec.integer,
        "nbd_refused": _codec.integer,
        "nbd_gave_way": _codec.integer,
        "nbd_failed": _codec.integer,
        "vhost_refused": _codec.integer,
        "vhost_failed": _codec.integer,
        "control_connections": _codec.integer,
        "control_refused": _codec.integer,
        "web_connections": _codec.integer,
        "web_refused": _codec.integer,
    }


@dataclasses.dataclass
class TransportStatus(TransportInfo):
    """Transport status."""

    #: Bytes of the region.
    size: int = 0
    #: The hosts of a region that several share, as this daemon sees them; absent for a region of one host.
    hosts: List[HostInfo] = dataclasses.field(default_factory=list)
    backends: List[BackendStatus] = dataclasses.field(default_factory=list)
    #: The block devices of this host on backends of other hosts; absent without any.
    remote_blkdevs: List[RemoteBlkdevStatus] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        **TransportInfo._decoders,
        "size": _codec.integer,
        "hosts": _codec.list_of(_codec.object_of(lambda: HostInfo)),
        "backends": _codec.list_of(_codec.object_of(lambda: BackendStatus)),
        "remote_blkdevs": _codec.list_of(_codec.object_of(lambda: RemoteBlkdevStatus)),
    }


@dataclasses.dataclass
class RemoteBlkdevStatus(BlkdevInfo):
    """A block device of this host on a backend of another host. Its requests are counted since it was opened."""

    #: Number of the host that has the backend.
    backend_host_id: int = 0
    #: Name of that host.
    backend_host: str = ""
    #: Requests that wait for that host, or are executed there, and those that are held while the backend moves.
    in_flight: int = 0
    #: Milliseconds for which none of these requests has completed, or the oldest has been held; 0 without any.
    waiting_ms: int = 0
    #: A write of at most this many bytes within one 4 MiB chunk is atomic, across a crash and for clients of other
    #: hosts; absent while it is not served.
    atomic_unit: Optional[int] = None
    #: Whether both hosts wake each other: they are processes of one kernel. Otherwise they look from time to time
    #: for what the other one has stored.
    woken: Optional[bool] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        **BlkdevInfo._decoders,
        "backend_host_id": _codec.integer,
        "backend_host": _codec.text,
        "in_flight": _codec.integer,
        "waiting_ms": _codec.integer,
        "atomic_unit": _codec.integer,
        "woken": _codec.boolean,
    }


@dataclasses.dataclass
class BackendStatus(BackendInfo):
    """Backend status."""

    sector: int = 0
    handlers: int = 0
    backing: str = ""
    #: How verifications ask the backing device, and why not better; absent while the backend is not served.
    verify_method: Optional[str] = None
    #: A write of at most this many bytes within one 4 MiB chunk is atomic across a crash; absent while it is not
    #: served.
    atomic_unit: Optional[int] = None
    warnings: List[str] = dataclasses.field(default_factory=list)
    #: What has become of the backing file since it was opened.
    file_change: Optional[str] = None
    #: Why it cannot be told whether the disk was written without its cache before the backend was started; absent
    #: once the disk was left by a stop of the daemon and found unchanged by the next.
    unchecked: Optional[str] = None
    #: For how long the oldest operation of the backing device has had no answer; 0 where none is older than 1 ms.
    oldest_operation_ms: int = 0
    #: What the backing device has not answered for 10 s or longer.
    silent: Optional[str] = None
    #: The requests of clients of all hosts and all its block devices since it was opened, by operation: read, write,
    #: flush, discard and write_zeroes. Absent while it is not served.
    operations: Dict[str, OperationFigures] = dataclasses.field(default_factory=dict)
    #: The operations of the backing device since it was opened: read, write, write_zeroes, discard, flush, verify
    #: and compare; those of clients, writeback and scrubs together. Absent while it is not served.
    disk: Dict[str, DiskFigures] = dataclasses.field(default_factory=dict)
    #: What requests have waited for: space; order, what must precede a change that goes past the cache; flush, of
    #: the backing device; lane, the lock of a part of the cache.
    waits: Dict[str, Wait] = dataclasses.field(default_factory=dict)
    #: Until nothing is dirty, if writeback goes on as at present; absent while it rests.
    time_to_empty_s: Optional[int] = None
    #: Until the cache is full of dirty data, if it goes on as in the last seconds; absent if it does not fill.
    time_to_full_s: Optional[int] = None
    #: Age of the recovery point: milliseconds since the oldest write that the backing device may lack; 0 if it lacks
    #: none.
    recovery_point_age_ms: Optional[int] = None
    #: How long recovery took when the cache was opened.
    recovery_ms: Optional[int] = None
    #: Bytes written to the region for records and data since the cache was opened.
    region_written_bytes: Optional[int] = None
    #: Absent without a pass, a result of one and a schedule.
    scrub: Optional[ScrubInfo] = None
    cache: Optional[CacheInfo] = None
    held: Optional[HeldInfo] = None
    #: Why it cannot be said what the cache of a backend holds that is not served.
    held_error: Optional[str] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        **BackendInfo._decoders,
        "sector": _codec.integer,
        "handlers": _codec.integer,
        "backing": _codec.text,
        "verify_method": _codec.text,
        "atomic_unit": _codec.integer,
        "warnings": _codec.list_of(_codec.text),
        "file_change": _codec.text,
        "unchecked": _codec.text,
        "oldest_operation_ms": _codec.integer,
        "silent": _codec.text,
        "operations": _codec.map_of(_codec.object_of(lambda: OperationFigures)),
        "disk": _codec.map_of(_codec.object_of(lambda: DiskFigures)),
        "waits": _codec.map_of(_codec.object_of(lambda: Wait)),
        "time_to_empty_s": _codec.integer,
        "time_to_full_s": _codec.integer,
        "recovery_point_age_ms": _codec.integer,
        "recovery_ms": _codec.integer,
        "region_written_bytes": _codec.integer,
        "scrub": _codec.object_of(lambda: ScrubInfo),
        "cache": _codec.object_of(lambda: CacheInfo),
        "held": _codec.object_of(lambda: HeldInfo),
        "held_error": _codec.text,
    }


@dataclasses.dataclass
class HeldInfo(Object):
    """Contents of the cache of a backend that is not served; absent while it is served, without a cache, and until
    the cache was examined.
    """

    dirty_bytes: int = 0
    #: Bytes that are lost because they are damaged in the cache; no part of dirty_bytes.
    quarantined_bytes: int = 0
    parked_bytes: int = 0
    #: Records that the backing device does not have, those without bytes included.
    dirty_records: int = 0
    drained_epoch: int = 0
    recovery_point: str = ""

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "dirty_bytes": _codec.integer,
        "quarantined_bytes": _codec.integer,
        "parked_bytes": _codec.integer,
        "dirty_records": _codec.integer,
        "drained_epoch": _codec.integer,
        "recovery_point": _codec.text,
    }


@dataclasses.dataclass
class SharedInfo(Object):
    """Of a cache that shares the space of its transport; absent for others."""

    #: Bytes that it keeps.
    min: int = 0
    #: Bytes up to which it grows.
    max: int = 0
    #: How much one of its hits counts.
    weight: int = 0
    #: Bytes that it is to have by its present load; absent until that was seen.
    target: Optional[int] = None
    #: Share of its reads, 0 to 1, that would hit besides if it had its maximum; absent without reads lately.
    gain_at_max: Optional[float] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "min": _codec.integer,
        "max": _codec.integer,
        "weight": _codec.integer,
        "target": _codec.integer,
        "gain_at_max": _codec.number,
    }


@dataclasses.dataclass
class CacheInfo(Settings):
    """Cache info."""

    size: int = 0
    shared: Optional[SharedInfo] = None
    #: Segments that are free; with cache_used_segs they are cache_segs.
    free_segments: int = 0
    lanes: int = 0
    data_crc: bool = False
    #: cache_mode is not in force yet: the backing device gets what it lacks first.
    is_changing_mode: bool = False
    dirty_bytes: int = 0
    pace: Optional[PaceInfo] = None
    read_hit_bytes: int = 0
    read_miss_bytes: int = 0
    #: Share of the bytes read that came from the cache.
    read_hit_ratio: Optional[float] = None
    #: Bytes that went past the cache since it was opened, by reason: mode (cache_mode), sequential (behind
    #: sequential_write_cutoff, and behind sequential_read_cutoff in a full cache), congested (the cache took longer
    #: than congestion_read_us or congestion_write_us), full (when_full), not_admitted (misses that a full cache did
    #: not record), read_fill_off.
    bypassed_bytes: Dict[str, int] = dataclasses.field(default_factory=dict)
    #: Bytes that a setting would have sent past the cache, and that were cached because it was not legal.
    bypass_refused_bytes: int = 0
    epoch: int = 0
    drained_epoch: int = 0
    #: When the drained epoch was closed, milliseconds since 1970: all that was flushed before is on the backing
    #: device; 0 if not known. A lower bound of the recovery point, whose age is recovery_point_age_ms.
    drained_ms: int = 0
    recovery_point: str = ""
    #: Seconds that this is at most by the setting recovery_point_max_age; 0 without one.
    recovery_point_max_age_s: Optional[int] = None
    #: Why the backing device alone is not consistent now.
    void: Optional[str] = None
    backing_errors: int = 0
    last_error: Optional[str] = None
    #: Whether a write waits for space.
    writers_waiting: bool = False
    #: By clients, since the cache was opened.
    written_bytes: int = 0
    #: To the backing device, since then.
    written_back_bytes: int = 0
    #: Metadata of file systems, in whole blocks of 4 KiB that were marked so.
    metadata_bytes: int = 0
    pinned_bytes: int = 0
    #: Bytes that may be pinned; of a cache that shares space, in its minimum.
    pin_limit_bytes: int = 0
    #: Memory of the index.
    index_bytes: int = 0
    #: Bytes of the quarantined ranges, listed or not; no part of dirty_bytes.
    quarantined_bytes: int = 0
    #: Damaged records that reads and writeback have found since the cache was opened: a dirty one once, a clean one
    #: at each read that meets it until it is cached again.
    damage_found: int = 0
    #: The number of them that were clean, and were read from the backing device instead.
    damage_healed: int = 0
    #: How often rare paths were taken since the cache was opened, by name.
    rare_paths: Dict[str, int] = dataclasses.field(default_factory=dict)
    #: The backing device has refused writes for long: writes that find no space fail.
    stalled: bool = False
    #: What the backing device refuses; the cache keeps it.
    parked: List[RangeInfo] = dataclasses.field(default_factory=list)
    #: Part of dirty_bytes.
    parked_bytes: int = 0
    #: What the backing device said when it was tried last.
    parked_error: Optional[str] = None
    #: Reads of these ranges answer with an error.
    quarantined: List[DamagedInfo] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        **Settings._decoders,
        "size": _codec.integer,
        "shared": _codec.object_of(lambda: SharedInfo),
        "free_segments": _codec.integer,
        "lanes": _codec.integer,
        "data_crc": _codec.boolean,
        "is_changing_mode": _codec.boolean,
        "dirty_bytes": _codec.integer,
        "pace": _codec.object_of(lambda: PaceInfo),
        "read_hit_bytes": _codec.integer,
        "read_miss_bytes": _codec.integer,
        "read_hit_ratio": _codec.number,
        "bypassed_bytes": _codec.map_of(_codec.integer),
        "bypass_refused_bytes": _codec.integer,
        "epoch": _codec.integer,
        "drained_epoch": _codec.integer,
        "drained_ms": _codec.integer,
        "recovery_point": _codec.text,
        "recovery_point_max_age_s": _codec.integer,
        "void": _codec.text,
        "backing_errors": _codec.integer,
        "last_error": _codec.text,
        "writers_waiting": _codec.boolean,
        "written_bytes": _codec.integer,
        "written_back_bytes": _codec.integer,
        "metadata_bytes": _codec.integer,
        "pinned_bytes": _codec.integer,
        "pin_limit_bytes": _codec.integer,
        "index_bytes": _codec.integer,
        "quarantined_bytes": _codec.integer,
        "damage_found": _codec.integer,
        "damage_healed": _codec.integer,
        "rare_paths": _codec.map_of(_codec.integer),
        "stalled": _codec.boolean,
        "parked": _codec.list_of(_codec.object_of(lambda: RangeInfo)),
        "parked_bytes": _codec.integer,
        "parked_error": _codec.text,
        "quarantined": _codec.list_of(_codec.object_of(lambda: DamagedInfo)),
    }


@dataclasses.dataclass
class PaceInfo(Object):
    """The pace of writeback."""

    #: idle, below the target, holding the target, catching up, drain requested, restoring consistency, keeping the
    #: recovery point, full, paused until a time, yielding to reads, or limited by writeback_rate.
    reason: str = ""
    #: Written to the backing device at present.
    bytes_per_s: int = 0
    #: What the pace permits; null if there is no limit.
    permitted_bytes_per_s: Optional[int] = None
    #: Bytes that are to be dirty.
    target_bytes: int = 0
    #: By how many points, in percent of the cache, the dirty data exceeds its target; negative below it.
    error_points: float = 0.0

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "reason": _codec.text,
        "bytes_per_s": _codec.integer,
        "permitted_bytes_per_s": _codec.integer,
        "target_bytes": _codec.integer,
        "error_points": _codec.number,
    }


@dataclasses.dataclass
class PinName(Object):
    """Pin name."""

    kind: str = ""
    #: The path, the range or the mount point.
    name: str = ""

    _decoders: ClassVar[Mapping[str, Decoder]] = {"kind": _codec.text, "name": _codec.text}


@dataclasses.dataclass
class NewPin(Object):
    """New pin."""

    kind: str = ""
    #: A pin with the same kind and name is replaced.
    name: str = ""
    #: Of the device; widened to blocks of 4 KiB.
    ranges: List[RangeInfo] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "kind": _codec.text,
        "name": _codec.text,
        "ranges": _codec.list_of(_codec.object_of(lambda: RangeInfo)),
    }


@dataclasses.dataclass
class AddPins(Object):
    """Add pins."""

    pins: List[NewPin] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {"pins": _codec.list_of(_codec.object_of(lambda: NewPin))}


@dataclasses.dataclass
class RemovePins(Object):
    """Remove pins."""

    pins: List[PinName] = dataclasses.field(default_factory=list)
    all: Optional[bool] = None

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "pins": _codec.list_of(_codec.object_of(lambda: PinName)),
        "all": _codec.boolean,
    }


@dataclasses.dataclass
class PinsInfo(Object):
    """Pins info."""

    backend_id: int = 0
    #: What several pins have in common counts once.
    pinned_bytes: int = 0
    #: Bytes that may be pinned.
    limit_bytes: int = 0
    #: There was a list of pins, and neither of its copies can be read.
    lost: bool = False
    pins: List[PinInfo] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "backend_id": _codec.integer,
        "pinned_bytes": _codec.integer,
        "limit_bytes": _codec.integer,
        "lost": _codec.boolean,
        "pins": _codec.list_of(_codec.object_of(lambda: PinInfo)),
    }


@dataclasses.dataclass
class PinInfo(Object):
    """Pin info."""

    kind: str = ""
    name: str = ""
    bytes: int = 0
    #: The number of its ranges.
    ranges: int = 0
    #: Bytes of them that are in the cache.
    cached_bytes: int = 0

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "kind": _codec.text,
        "name": _codec.text,
        "bytes": _codec.integer,
        "ranges": _codec.integer,
        "cached_bytes": _codec.integer,
    }


@dataclasses.dataclass
class DeviceMap(Object):
    """Device map."""

    backend_id: int = 0
    #: Bytes of the device.
    size: int = 0
    #: Bytes of the device that a cell stands for; the last one may have fewer.
    cell_bytes: int = 0
    #: One block in so many was looked at and stands for the others; 1 for a map without an error.
    sampled_one_of: int = 0
    #: In the order of the device.
    cells: List[MapCell] = dataclasses.field(default_factory=list)

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "backend_id": _codec.integer,
        "size": _codec.integer,
        "cell_bytes": _codec.integer,
        "sampled_one_of": _codec.integer,
        "cells": _codec.list_of(_codec.object_of(lambda: MapCell)),
    }


@dataclasses.dataclass
class MapCell(Object):
    """Map cell."""

    #: Bytes in the cache.
    cached_bytes: int = 0
    #: Those of them that the disk does not have yet.
    dirty_bytes: int = 0
    #: Those of them that were read since they were written into the cache.
    read_bytes: int = 0

    _decoders: ClassVar[Mapping[str, Decoder]] = {
        "cached_bytes": _codec.integer,
        "dirty_bytes": _codec.integer,
        "read_bytes": _codec.integer,
    }


@dataclasses.dataclass
class RangeInfo(Object):
    """Range info."""

    #: First byte.
    start: int = 0
    #: One past the last byte.
    end: int = 0

    _decoders: ClassVar[Mapping[str, Decoder]] = {"start": _codec.integer, "end": _codec.integer}


@dataclasses.dataclass
class DamagedInfo(Object):
    """Damaged info."""

    #: First byte.
    start: int = 0
    #: One past the last byte.
    end: int = 0
    reason: str = ""

    _decoders: ClassVar[Mapping[str, Decoder]] = {"start": _codec.integer, "end": _codec.integer, "reason": _codec.text}


class Client(Connection):
    """A client of one daemon: a method for each operation. It may be used by several threads."""

    def status(self, *, transport: Optional[int] = None, backend: Optional[NumberOrName] = None) -> Status:
        """All that there is to know, or the part about one transport or one backend."""
        answer = self.call("get", "/v1/status", {"transport": transport, "backend": backend}, None)
        return Status.from_json(answer)

    def metrics(self) -> str:
        """The status for Prometheus."""
        return self.call_text("get", "/v1/metrics", {}, None).decode()

    def events(
        self,
        *,
        since: Optional[int] = None,
        instance: Optional[str] = None,
        since_ms: Optional[int] = None,
        follow: bool = False,
        transport: Optional[int] = None,
        backend: Optional[NumberOrName] = None,
        severity: Optional[Severity] = None,
    ) -> Lines[EventLine]:
        """What happened, and with follow what happens."""
        query = {
            "since": since,
            "instance": instance,
            "since_ms": since_ms,
            "follow": follow,
            "transport": transport,
            "backend": backend,
            "severity": severity,
        }
        stream = self.open_call("get", "/v1/events", query, None)
        return Lines(stream, EventLine.from_json, follow)

    def list_blkdev_users(self) -> List[BlkdevUser]:
        """The block devices that are in use, and whether their users wait while no daemon runs."""
        answer = self.call("get", "/v1/blkdev-users", {}, None)
        decoded: List[BlkdevUser] = _codec.list_of(_codec.object_of(lambda: BlkdevUser))(answer)
        return decoded

    def list_transports(self) -> List[TransportInfo]:
        """The transports."""
        answer = self.call("get", "/v1/transports", {}, None)
        decoded: List[TransportInfo] = _codec.list_of(_codec.object_of(lambda: TransportInfo))(answer)
        return decoded

    def register_transport(
        self,
        host: str,
        path: str,
        *,
        size: Optional[int] = None,
        segment_size: Optional[int] = None,
        format: Optional[bool] = None,
        force: Optional[bool] = None,
        shared: Optional[bool] = None,
    ) -> TransportRegistered:
        """Register this host on a region.

        :param host: Name of this host.
        :param path: Absolute path of the region.
        :param size: Bytes of a region that is to be made.
        :param segment_size: Bytes of a segment of a region that is formatted.
        :param format: Make a transport on the region.
        :param force: With format - even over an existing transport.
        :param shared: With format - several hosts share the region.
        """
        body = _codec.body_of({
            "host": host,
            "path": path,
            "size": size,
            "segment_size": segment_size,
            "format": format,
            "force": force,
            "shared": shared,
        })
        answer = self.call("post", "/v1/transports", {}, body)
        return TransportRegistered.from_json(answer)

    def unregister_transport(self, transport: int) -> None:
        """Take this host off a transport that has no backends."""
        self.call("delete", f"/v1/transports/{part(transport)}", {}, None)

    def grow_transport(self, *, transport: int = 0, size: Optional[int] = None) -> TransportGrown:
        """Use a region to the present end of its file or device, or extend its file, while the transport is in
        use.

        :param size: Bytes that the region is to have, to which its file is extended; absent if its file or device
            has become larger already.
        """
        body = _codec.body_of({"size": size})
        answer = self.call("post", f"/v1/transports/{part(transport)}/grow", {}, body)
        return TransportGrown.from_json(answer)

    def list_hosts(self, *, transport: int = 0) -> List[HostInfo]:
        """The hosts of a transport."""
        answer = self.call("get", f"/v1/transports/{part(transport)}/hosts", {}, None)
        decoded: List[HostInfo] = _codec.list_of(_codec.object_of(lambda: HostInfo))(answer)
        return decoded

    def clear_host(self, host: int, *, transport: int = 0, discard_dirty: Optional[int] = None) -> None:
        """Take everything from a dead host of a transport that several hosts share.

        :param discard_dirty: Bytes of dirty and quarantined data that its caches hold, which are lost then.
        """
        body = _codec.body_of({"discard_dirty": discard_dirty})
        self.call("post", f"/v1/transports/{part(transport)}/hosts/{part(host)}/clear", {}, body)

    def list_backends(self, *, transport: int = 0, all: bool = False) -> List[BackendInfo]:
        """The backends of this host."""
        answer = self.call("get", f"/v1/transports/{part(transport)}/backends", {"all": all}, None)
        decoded: List[BackendInfo] = _codec.list_of(_codec.object_of(lambda: BackendInfo))(answer)
        return decoded

    def start_backend(
        self,
        path: str,
        *,
        transport: int = 0,
        cache_size: Optional[int] = None,
        cache_max: Optional[int] = None,
        weight: Optional[int] = None,
        handlers: Optional[int] = None,
        start_dev: Optional[bool] = None,
        allow_remote: Optional[bool] = None,
        export: Optional[str] = None,
        consistency: Optional[Consistency] = None,
        cache_mode: Optional[CacheMode] = None,
        data_crc: Optional[bool] = None,
        older_region: Optional[bool] = None,
        changed_disk: Optional[bool] = None,
        name: Optional[str] = None,
        recovery_point_max_age_s: Optional[int] = None,
    ) -> BackendStarted:
        """Bring a backing device onto a transport.

        :param path: Absolute path of the block device or file.
        :param cache_size: Bytes; none or 0 for no cache.
        :param cache_max: Bytes up to which a cache that shares the space of its transport grows; cache_size is
            its minimum then.
        :param weight: With cache_max: how much a hit of this cache counts; 1 where absent.
        :param handlers: Number of queues.
        :param start_dev: Also make a block device.
        :param allow_remote: Let it be reached by NBD at an address that is not a loopback address.
        :param export: auto, kernel (auto without NBD), ublk, fuse-loop, nbd:unix:PATH, nbd:tcp:ADDR:PORT or
            vhost-user:PATH.
        :param cache_mode: writeback where absent.
        :param older_region: Serve it although the log of recovery points says that the disk is newer than the
            region.
        :param changed_disk: Serve it although its disk was written while no daemon served it, or whether it was
            cannot be read.
        :param recovery_point_max_age_s: Seconds that its recovery point is old at most, if writeback can keep
            that; 0 - no promise.
        """
        body = _codec.body_of({
            "path": path,
            "cache_size": cache_size,
            "cache_max": cache_max,
            "weight": weight,
            "handlers": handlers,
            "start_dev": start_dev,
            "allow_remote": allow_remote,
            "export": export,
            "consistency": consistency,
            "cache_mode": cache_mode,
            "data_crc": data_crc,
            "older_region": older_region,
            "changed_disk": changed_disk,
            "name": name,
            "recovery_point_max_age_s": recovery_point_max_age_s,
        })
        answer = self.call("post", f"/v1/transports/{part(transport)}/backends", {}, body)
        return BackendStarted.from_json(answer)

    def stop_backend(
        self,
        backend: NumberOrName,
        *,
        transport: int = 0,
        force: Optional[bool] = None,
        timeout_s: Optional[int] = None,
        discard_dirty: Optional[int] = None,
        verify: Optional[bool] = None,
    ) -> Operation[Progress, Done]:
        """Drain a backend and take it off the transport.

        :param force: Even if its block devices are mounted or open; drops nothing.
        :param timeout_s: Seconds without progress after which the stop gives up.
        :param discard_dirty: Drop what is dirty or quarantined; must be exactly the dirty and quarantined bytes
            of the moment.
        :param verify: Compare the backing device with the cache after the drain; the backend is not removed if
            they differ.
        """
        body = _codec.body_of({
            "force": force,
            "timeout_s": timeout_s,
            "discard_dirty": discard_dirty,
            "verify": verify,
        })
        stream = self.open_call("post", f"/v1/transports/{part(transport)}/backends/{part(backend)}/stop", {}, body)
        return Operation(stream, Progress.from_json, Done.from_json)

    def grow_backend(self, backend: NumberOrName, *, transport: int = 0) -> BackendGrown:
        """Use a backing device that has become larger to its end, while it is in use."""
        answer = self.call("post", f"/v1/transports/{part(transport)}/backends/{part(backend)}/grow", {}, None)
        return BackendGrown.from_json(answer)

    def set(
        self,
        backend: NumberOrName,
        *,
        transport: int = 0,
        gc_percent: Optional[int] = None,
        consistency: Optional[Consistency] = None,
        writeback_rate: Optional[int] = None,
        writeback_percent: Optional[int] = None,
        on_write_error: Optional[OnWriteError] = None,
        write_error_after_s: Optional[int] = None,
        cache_mode: Optional[CacheMode] = None,
        read_fill: Optional[ReadFill] = None,
        sequential_read_cutoff: Optional[int] = None,
        readahead: Optional[Readahead] = None,
        sequential_write_cutoff: Optional[int] = None,
        when_full: Optional[WhenFull] = None,
        congestion_read_us: Optional[int] = None,
        congestion_write_us: Optional[int] = None,
        read_latency_target_us: Optional[int] = None,
        writeback_pause_s: Optional[int] = None,
        pin_percent: Optional[int] = None,
        metadata_min_percent: Optional[int] = None,
        metadata_max_percent: Optional[int] = None,
        scrub_every_s: Optional[int] = None,
        scrub_window: Optional[str] = None,
        scrub_rate: Optional[int] = None,
        scrub_idle_only: Optional[bool] = None,
        offload: Optional[Offload] = None,
        recovery_point_max_age_s: Optional[int] = None,
        name: Optional[str] = None,
    ) -> SettingsChanged:
        """Change settings of a backend while it runs.

        :param writeback_rate: Bytes a second, 32768 at least; 0 is automatic.
        :param sequential_read_cutoff: Bytes; 0 is never.
        :param sequential_write_cutoff: Bytes; 0 is never.
        :param congestion_read_us: 0 is never.
        :param congestion_write_us: 0 is never.
        :param read_latency_target_us: 0 is never.
        :param writeback_pause_s: Seconds from now on; 0 ends a pause.
        :param pin_percent: Share of the cache that pins may take.
        :param metadata_min_percent: Share of the cache that metadata keeps; with pin_percent at most 60.
        :param metadata_max_percent: Share of the cache above which metadata gets no preference.
        :param scrub_every_s: Seconds from the beginning of a scrub to that of the next one; 0 is never.
        :param scrub_window: When scheduled scrubs run, HH:MM-HH:MM in UTC; empty - always.
        :param scrub_rate: Bytes a second of scrubs, 65536 at least; 0 is no limit.
        :param scrub_idle_only: Whether scrubs wait while clients use the cache.
        :param recovery_point_max_age_s: Seconds that the recovery point is old at most, if writeback can keep
            that; 0 - no promise.
        :param name: The name of the backend; empty - it has none any more. A backend without a cache has this
            setting and those of scrubs only.
        """
        body = _codec.body_of({
            "gc_percent": gc_percent,
            "consistency": consistency,
            "writeback_rate": writeback_rate,
            "writeback_percent": writeback_percent,
            "on_write_error": on_write_error,
            "write_error_after_s": write_error_after_s,
            "cache_mode": cache_mode,
            "read_fill": read_fill,
            "sequential_read_cutoff": sequential_read_cutoff,
            "readahead": readahead,
            "sequential_write_cutoff": sequential_write_cutoff,
            "when_full": when_full,
            "congestion_read_us": congestion_read_us,
            "congestion_write_us": congestion_write_us,
            "read_latency_target_us": read_latency_target_us,
            "writeback_pause_s": writeback_pause_s,
            "pin_percent": pin_percent,
            "metadata_min_percent": metadata_min_percent,
            "metadata_max_percent": metadata_max_percent,
            "scrub_every_s": scrub_every_s,
            "scrub_window": scrub_window,
            "scrub_rate": scrub_rate,
            "scrub_idle_only": scrub_idle_only,
            "offload": offload,
            "recovery_point_max_age_s": recovery_point_max_age_s,
            "name": name,
        })
        answer = self.call("patch", f"/v1/transports/{part(transport)}/backends/{part(backend)}/settings", {}, body)
        return SettingsChanged.from_json(answer)

    def attach_cache(
        self,
        backend: NumberOrName,
        cache_size: int,
        *,
        transport: int = 0,
        cache_max: Optional[int] = None,
        weight: Optional[int] = None,
        cache_mode: Optional[CacheMode] = None,
    ) -> Done:
        """Give a backend a cache while its block devices are in use.

        :param cache_size: Bytes of the cache, rounded down to whole segments.
        :param cache_max: Bytes up to which a cache that shares the space of its transport grows; cache_size is
            its minimum then.
        :param weight: With cache_max: how much a hit of this cache counts; 1 where absent.
        :param cache_mode: As stored for the backend where absent, at first writeback.
        """
        body = _codec.body_of({
            "cache_size": cache_size,
            "cache_max": cache_max,
            "weight": weight,
            "cache_mode": cache_mode,
        })
        answer = self.call("post", f"/v1/transports/{part(transport)}/backends/{part(backend)}/cache/attach", {}, body)
        return Done.from_json(answer)

    def move_backend(
        self,
        backend: NumberOrName,
        to: str,
        *,
        transport: int = 0,
        timeout_s: Optional[int] = None,
    ) -> Operation[Progress, Done]:
        """Move a backend to another host of a region that several share, while its block devices are in use.

        :param to: Name or number of the host; either it or the host that has the backend is that of this daemon.
        :param timeout_s: Seconds without progress of the drain after which the backend stays where it is.
        """
        body = _codec.body_of({"to": to, "timeout_s": timeout_s})
        stream = self.open_call("post", f"/v1/transports/{part(transport)}/backends/{part(backend)}/move", {}, body)
        return Operation(stream, Progress.from_json, Done.from_json)

    def detach_cache(
        self,
        backend: NumberOrName,
        *,
        transport: int = 0,
        timeout_s: Optional[int] = None,
    ) -> Operation[Progress, Done]:
        """Drain the cache of a backend and take it away while its block devices are in use.

        :param timeout_s: Seconds without progress after which the backend keeps its cache.
        """
        body = _codec.body_of({"timeout_s": timeout_s})
        stream = self.open_call("post", f"/v1/transports/{part(transport)}/backends/{part(backend)}/cache/detach", {}, body)
        return Operation(stream, Progress.from_json, Done.from_json)

    def resize_cache(
        self,
        backend: NumberOrName,
        cache_size: int,
        *,
        transport: int = 0,
        cache_max: Optional[int] = None,
        weight: Optional[int] = None,
        timeout_s: Optional[int] = None,
    ) -> Operation[Progress, Done]:
        """Change the size of the cache of a backend while its block devices are in use.

        :param cache_size: Bytes that the cache is to have, rounded down to whole segments.
        :param cache_max: Bytes up to which a cache that shares the space of its transport grows; cache_size is
            its minimum then.
        :param weight: With cache_max: how much a hit of this cache counts; 1 where absent.
        :param timeout_s: Seconds without progress after which a cache that shrinks keeps its size.
        """
        body = _codec.body_of({
            "cache_size": cache_size,
            "cache_max": cache_max,
            "weight": weight,
            "timeout_s": timeout_s,
        })
        stream = self.open_call("post", f"/v1/transports/{part(transport)}/backends/{part(backend)}/cache/resize", {}, body)
        return Operation(stream, Progress.from_json, Done.from_json)

    def pins(self, backend: NumberOrName, *, transport: int = 0) -> PinsInfo:
        """The pins of the cache of a backend."""
        answer = self.call("get", f"/v1/transports/{part(transport)}/backends/{part(backend)}/pins", {}, None)
        return PinsInfo.from_json(answer)

    def pin(self, backend: NumberOrName, pins: Sequence[NewPin], *, transport: int = 0) -> PinsInfo:
        """Pin ranges of the device of a backend in its cache, all of them or none."""
        body = _codec.body_of({"pins": pins})
        answer = self.call("post", f"/v1/transports/{part(transport)}/backends/{part(backend)}/pins", {}, body)
        return PinsInfo.from_json(answer)

    def map(self, backend: NumberOrName, *, transport: int = 0, cells: Optional[int] = None) -> DeviceMap:
        """What the cache of a backend holds of each part of its device."""
        answer = self.call("get", f"/v1/transports/{part(transport)}/backends/{part(backend)}/map", {"cells": cells}, None)
        return DeviceMap.from_json(answer)

    def unpin(
        self,
        backend: NumberOrName,
        *,
        transport: int = 0,
        pins: Optional[Sequence[PinName]] = None,
        all: Optional[bool] = None,
    ) -> PinsInfo:
        """End pins, all that are named or none."""
        body = _codec.body_of({"pins": pins, "all": all})
        answer = self.call("post", f"/v1/transports/{part(transport)}/backends/{part(backend)}/unpin", {}, body)
        return PinsInfo.from_json(answer)

    def verify(
        self,
        backend: NumberOrName,
        *,
        transport: int = 0,
        offset: Optional[int] = None,
        length: Optional[int] = None,
        level: Optional[VerifyLevel] = None,
        repair: Optional[bool] = None,
    ) -> Operation[Progress, Done]:
        """Verify a range of a backend once; no data is moved to the client.

        :param offset: First byte of the range, in whole sectors; 0 where absent.
        :param length: Bytes of the range, in whole sectors; to the end of the device where absent.
        :param level: newest where absent.
        :param repair: Make clean blocks dirty again whose copy on the backing device is lost, so that writeback
            repairs it.
        """
        body = _codec.body_of({"offset": offset, "length": length, "level": level, "repair": repair})
        stream = self.open_call("post", f"/v1/transports/{part(transport)}/backends/{part(backend)}/verify", {}, body)
        return Operation(stream, Progress.from_json, Done.from_json)

    def sample(self, backend: NumberOrName, *, transport: int = 0) -> RequestSample:
        """A sample of the requests of a backend, by which cbdctrl advise foretells other sizes of its cache."""
        answer = self.call("get", f"/v1/transports/{part(transport)}/backends/{part(backend)}/sample", {}, None)
        return RequestSample.from_json(answer)

    def scrub_info(self, backend: NumberOrName, *, transport: int = 0) -> ScrubInfo:
        """The scrub of a backend."""
        answer = self.call("get", f"/v1/transports/{part(transport)}/backends/{part(backend)}/scrub", {}, None)
        return ScrubInfo.from_json(answer)

    def scrub(
        self,
        backend: NumberOrName,
        action: Literal["start", "pause", "resume", "stop"],
        *,
        transport: int = 0,
        rate: Optional[int] = None,
        repair: Optional[bool] = None,
        level: Optional[VerifyLevel] = None,
        wait: Optional[bool] = None,
    ) -> Operation[Progress, Done]:
        """Begin, pause, continue or stop a scrub.

        :param rate: Of a start - bytes a second; the setting scrub_rate where absent.
        :param repair: Of a start - as for a range.
        :param level: Of a start - agree where absent.
        :param wait: Of a start - answer when the pass has ended; it continues if the client disconnects.
        """
        body = _codec.body_of({"action": action, "rate": rate, "repair": repair, "level": level, "wait": wait})
        stream = self.open_call("post", f"/v1/transports/{part(transport)}/backends/{part(backend)}/scrub", {}, body)
        return Operation(stream, Progress.from_json, Done.from_json)

    def checkpoint(
        self,
        *,
        transport: int = 0,
        backend: Optional[NumberOrName] = None,
        wait: Optional[bool] = None,
        timeout_s: Optional[int] = None,
        verify: Optional[bool] = None,
    ) -> Operation[Progress, Done]:
        """Advance the recovery point; write what is dirty at this moment to the backing devices.

        :param backend: All of the transport where absent.
        :param wait: Answer when it is done.
        :param timeout_s: Seconds without progress after which waiting ends.
        :param verify: Of a drain - compare the backing device with the cache afterwards; findings are an error.
        """
        body = _codec.body_of({"backend": backend, "wait": wait, "timeout_s": timeout_s, "verify": verify})
        stream = self.open_call("post", f"/v1/transports/{part(transport)}/checkpoint", {}, body)
        return Operation(stream, Progress.from_json, Done.from_json)

    def checkpoint_together(
        self,
        backends: Sequence[NumberOrName],
        *,
        transport: int = 0,
        hold_s: Optional[int] = None,
        timeout_s: Optional[int] = None,
    ) -> Operation[Progress, Done]:
        """Write what was written up to one moment to the backing devices of several backends, and leave them there
        for a time.

        :param backends: Backends with a cache.
        :param hold_s: Seconds for which writeback is paused then; 30 where absent.
        :param timeout_s: Seconds without progress after which the command gives up.
        """
        body = _codec.body_of({"backends": backends, "hold_s": hold_s, "timeout_s": timeout_s})
        stream = self.open_call("post", f"/v1/transports/{part(transport)}/checkpoint-together", {}, body)
        return Operation(stream, Progress.from_json, Done.from_json)

    def drain(
        self,
        *,
        transport: int = 0,
        backend: Optional[NumberOrName] = None,
        wait: Optional[bool] = None,
        timeout_s: Optional[int] = None,
        verify: Optional[bool] = None,
    ) -> Operation[Progress, Done]:
        """Write all that is dirty to the backing devices.

        :param backend: All of the transport where absent.
        :param wait: Answer when it is done.
        :param timeout_s: Seconds without progress after which waiting ends.
        :param verify: Of a drain - compare the backing device with the cache afterwards; findings are an error.
        """
        body = _codec.body_of({"backend": backend, "wait": wait, "timeout_s": timeout_s, "verify": verify})
        stream = self.open_call("post", f"/v1/transports/{part(transport)}/drain", {}, body)
        return Operation(stream, Progress.from_json, Done.from_json)

    def list_blkdevs(self, *, transport: int = 0, all: bool = False) -> List[BlkdevInfo]:
        """The block devices of this host."""
        answer = self.call("get", f"/v1/transports/{part(transport)}/blkdevs", {"all": all}, None)
        decoded: List[BlkdevInfo] = _codec.list_of(_codec.object_of(lambda: BlkdevInfo))(answer)
        return decoded

    def start_blkdev(
        self,
        backend: NumberOrName,
        *,
        transport: int = 0,
        export: Optional[str] = None,
        allow_remote: Optional[bool] = None,
        name: Optional[str] = None,
        shared: Optional[bool] = None,
    ) -> BlkdevInfo:
        """Create a block device on a backend.

        :param export: auto, kernel (auto without NBD), ublk, fuse-loop, nbd:unix:PATH, nbd:tcp:ADDR:PORT or
            vhost-user:PATH.
        :param allow_remote: Let it be reached by NBD at an address that is not a loopback address.
        :param shared: Whether there may be other block devices on the backend, on this host and on others, all of
            which were started with this: they are the same disk.
        """
        body = _codec.body_of({
            "backend": backend,
            "export": export,
            "allow_remote": allow_remote,
            "name": name,
            "shared": shared,
        })
        answer = self.call("post", f"/v1/transports/{part(transport)}/blkdevs", {}, body)
        return BlkdevInfo.from_json(answer)

    def stop_blkdev(self, blkdev: NumberOrName, *, transport: int = 0, force: Optional[bool] = None) -> BlkdevStopped:
        """Remove a block device.

        :param force: Even if it is mounted or open.
        """
        body = _codec.body_of({"force": force})
        answer = self.call("post", f"/v1/transports/{part(transport)}/blkdevs/{part(blkdev)}/stop", {}, body)
        return BlkdevStopped.from_json(answer)

    def set_blkdev(
        self,
        blkdev: NumberOrName,
        *,
        transport: int = 0,
        name: Optional[str] = None,
        class_: Optional[BlkdevClass] = None,
    ) -> BlkdevInfo:
        """Change a block device while it runs.

        :param name: A name of its own; empty - it has that of its backend.
        """
        body = _codec.body_of({"name": name, "class": class_})
        answer = self.call("patch", f"/v1/transports/{part(transport)}/blkdevs/{part(blkdev)}/settings", {}, body)
        return BlkdevInfo.from_json(answer)

//! Devices in C.

use super::border::{bytes, bytes_mut, call, check_flags, give, give_text, invalid, shared, text, wanted};
use super::region::CbdRegion;
use crate::{
    BackendId, Consistency, DRAIN_TIMEOUT, Device, DeviceOptions, Error, ErrorKind, OnWriteError, Operation,
    Result, Settings,
};
use std::ffi::{c_char, c_int, c_void};
use std::ops::ControlFlow;
use std::time::Duration;

/// A disk behind its cache, open in this process. Any number of threads may use it.
pub struct CbdDevice(pub(super) Device);

/// Without a cache: all requests go to the disk.
pub const CBD_DEVICE_NO_CACHE: u32 = 1;
/// No checksums of data; for a new cache only.
pub const CBD_DEVICE_NO_DATA_CRC: u32 = 2;

/// The present mode, or strict for a new cache.
pub const CBD_CONSISTENCY_DEFAULT: u32 = 0;
/// Epoch by epoch: without the region, the disk is a valid crash state at any moment.
pub const CBD_CONSISTENCY_STRICT: u32 = 1;
/// Many epochs in one batch: the disk is a valid crash state between batches.
pub const CBD_CONSISTENCY_CHECKPOINT: u32 = 2;
/// At once, in the order of addresses: the disk is consistent only when all data is drained.
pub const CBD_CONSISTENCY_NONE: u32 = 3;

/// No later data is written to a disk that has refused a write for a long time.
pub const CBD_ON_WRITE_ERROR_STOP: u32 = 0;
/// Blocks that the disk refuses stay in the cache, and everything else is written.
pub const CBD_ON_WRITE_ERROR_PARK: u32 = 1;

/// A FUA write: nothing that is written later reaches the disk before it.
pub const CBD_FUA: u32 = 1;

/// The device has a cache.
pub const CBD_STATUS_CACHED: u32 = 1;
/// The disk without the region is in a state that a plain disk could have after a power failure.
pub const CBD_STATUS_DISK_IS_CONSISTENT: u32 = 2;
/// The disk fails at this moment.
pub const CBD_STATUS_DISK_FAILS: u32 = 4;
/// Writes fail if the cache has no space, because the disk has refused writes for a long time.
pub const CBD_STATUS_STALLED: u32 = 8;
/// A request waits for space.
pub const CBD_STATUS_WRITERS_WAIT: u32 = 16;

/// The parameters with which a disk is attached to a region. All zeroes: a new disk gets a cache of all free space, an attached
/// one is opened unchanged.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CbdDeviceOptions {
    /// Bytes of its cache. 0: all free space, or the present size.
    pub cache_size: u64,
    /// `CBD_CONSISTENCY_..`.
    pub consistency: u32,
    /// `CBD_DEVICE_..`.
    pub flags: u32,
    /// 0.
    pub reserved: [u64; 6],
}

/// The properties of a device.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CbdGeometry {
    /// Bytes.
    pub size: u64,
    /// Every request is whole sectors of this many bytes.
    pub sector: u32,
    /// The unit that is best not written in part, in bytes.
    pub physical_sector: u32,
    /// A write of at most this many bytes inside 4 MiB of the device is recovered completely or not at all.
    pub atomic_unit: u32,
    /// Granularity of discards in bytes; 0 where discards free no space.
    pub discard_granularity: u32,
    /// Row of the backend on its region.
    pub backend_id: u32,
    /// 0.
    pub reserved0: u32,
    /// 0.
    pub reserved: [u64; 4],
}

/// The settings that can be changed while a cache runs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CbdSettings {
    /// Reclaim begins when more than this percentage of the segments is used; 0 to 98.
    pub gc_percent: u32,
    /// `CBD_CONSISTENCY_..`, not the default.
    pub consistency: u32,
    /// Limit of writeback in bytes per second, 32768 at least; 0: as fast as needed.
    pub writeback_rate: u64,
    /// The percentage of the cache that is dirty while data is written; 0 to 90. 0: everything is written back at once.
    pub dirty_target_percent: u32,
    /// `CBD_ON_WRITE_ERROR_..`.
    pub on_write_error: u32,
    /// Seconds of failed attempts after which `on_write_error` takes effect; 0 to 86400.
    pub write_error_after_s: u32,
    /// 0.
    pub reserved0: u32,
    /// 0.
    pub reserved: [u64; 4],
}

/// Counters since the device was opened, and its present state.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct CbdStatus {
    /// `CBD_STATUS_..`.
    pub flags: u32,
    /// Segments of the cache.
    pub segments: u32,
    /// Free segments.
    pub free_segments: u32,
    /// Ranges whose reads fail.
    pub damaged_ranges: u32,
    /// Bytes that the disk does not have yet, overwritten versions included.
    pub dirty_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes that reads found in the cache.
    pub read_hit_bytes: u64,
    /// Bytes that reads took from the disk.
    pub read_missed_bytes: u64,
    /// Bytes written to the disk.
    pub written_back_bytes: u64,
    /// Bytes that the disk refuses.
    pub parked_bytes: u64,
    /// The present epoch.
    pub epoch: u64,
    /// Everything up to this epoch is durable on the disk.
    pub drained_epoch: u64,
    /// Every write that completed and was flushed before this time is on the disk; milliseconds since 1970
    /// UTC, 0: not known.
    pub drained_unix_ms: u64,
    /// 0.
    pub reserved: [u64; 8],
}

/// Attaches the disk at `path` to the region. If the region already has a backend of this disk, the call opens it, whichever
/// process created it. `options` may be NULL.
///
/// # Safety
/// `region` is open or NULL; `path` is text or NULL; `options` points to options or is NULL; `device` can be written or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_device_attach(
    region: *const CbdRegion,
    path: *const c_char,
    options: *const CbdDeviceOptions,
    device: *mut *mut CbdDevice,
) -> c_int {
    call(|| {
        wanted(device, "device")?;
        // SAFETY: the caller guarantees it.
        let region = unsafe { shared(region, "region") }?;
        // SAFETY: the caller guarantees it.
        let path = unsafe { text(path, "path") }?;
        // SAFETY: the caller guarantees it.
        let options = unsafe { options.as_ref() }.map(options_of).transpose()?.unwrap_or_default();
        let opened = Box::into_raw(Box::new(CbdDevice(region.0.attach(path, &options)?)));
        // SAFETY: the caller guarantees it.
        unsafe { give(device, "device", opened) }?;
        Ok(0)
    })
}

fn options_of(given: &CbdDeviceOptions) -> Result<DeviceOptions> {
    check_flags(given.flags, CBD_DEVICE_NO_CACHE | CBD_DEVICE_NO_DATA_CRC, &given.reserved)?;
    let uncached = given.flags & CBD_DEVICE_NO_CACHE != 0;
    if uncached && given.cache_size != 0 {
        return Err(invalid("cache_size does not go with CBD_DEVICE_NO_CACHE".to_owned()));
    }
    Ok(DeviceOptions {
        cache_size: if uncached { Some(0) } else { Some(given.cache_size).filter(|&size| size != 0) },
        data_crc: (given.flags & CBD_DEVICE_NO_DATA_CRC != 0).then_some(false),
        consistency: match given.consistency {
            CBD_CONSISTENCY_DEFAULT => None,
            given => Some(consistency_of(given)?),
        },
    })
}

fn consistency_of(given: u32) -> Result<Consistency> {
    match given {
        CBD_CONSISTENCY_STRICT => Ok(Consistency::Strict),
        CBD_CONSISTENCY_CHECKPOINT => Ok(Consistency::Checkpoint),
        CBD_CONSISTENCY_NONE => Ok(Consistency::None),
        _ => Err(invalid(format!("consistency is one of CBD_CONSISTENCY_.., not {given}"))),
    }
}

/// Opens the backend `id` of the region, with the disk at its recorded path.
///
/// # Safety
/// `region` is open or NULL; `device` can be written or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_device_open(
    region: *const CbdRegion,
    id: u32,
    device: *mut *mut CbdDevice,
) -> c_int {
    call(|| {
        wanted(device, "device")?;
        // SAFETY: the caller guarantees it.
        let region = unsafe { shared(region, "region") }?;
        let opened = Box::into_raw(Box::new(CbdDevice(region.0.open_device(BackendId(id))?)));
        // SAFETY: the caller guarantees it.
        unsafe { give(device, "device", opened) }?;
        Ok(0)
    })
}

/// Closes the device: dirty data stays in the region, marked, for the next process that opens it. -EBUSY
/// while queues of it are open; the handle stays valid then. -EIO: the region's memory fails; the handle is
/// released. NULL is ignored.
///
/// # Safety
/// `device` is open or NULL, and no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_device_close(device: *mut CbdDevice) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let Some(open) = (unsafe { device.as_ref() }) else { return Ok(0) };
        refuse_with_queues(open)?;
        // SAFETY: the pointer came from `Box::into_raw`, and the caller does not use it any more.
        unsafe { Box::from_raw(device) }.0.close()?;
        Ok(0)
    })
}

fn refuse_with_queues(device: &CbdDevice) -> Result<()> {
    match device.0.queues_open() {
        0 => Ok(()),
        queues => {
            let text = format!("{queues} queues of {} are open: close them first", device.0.path());
            Err(Error::new(ErrorKind::Busy, text))
        }
    }
}

/// Drains the device, closes it, and removes the disk from the region: it is a plain disk again, with all its data. Fails after
/// `timeout_s` seconds without progress (0: 60). After a failure `*device` is NULL if the device is closed, and unchanged
/// otherwise.
///
/// # Safety
/// `device` points to an open device, or to NULL, or is NULL; no other thread uses the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_device_detach(device: *mut *mut CbdDevice, timeout_s: u32) -> c_int {
    call(|| {
        wanted(device, "device")?;
        // SAFETY: the pointer is not null, and the caller guarantees that it points to a handle.
        let handle = unsafe { *device };
        // SAFETY: the caller guarantees it.
        refuse_with_queues(unsafe { shared(handle, "the device") }?)?;
        // SAFETY: as above. From this point on the caller has no handle, whatever happens.
        unsafe { device.write(std::ptr::null_mut()) };
        // SAFETY: the pointer came from `Box::into_raw`, and the caller does not use it any more.
        let taken = unsafe { Box::from_raw(handle) };
        match taken.0.detach(timeout(timeout_s)) {
            Ok(()) => Ok(0),
            Err((kept, error)) => {
                if let Some(kept) = kept {
                    // SAFETY: as above.
                    unsafe { device.write(Box::into_raw(Box::new(CbdDevice(kept)))) };
                }
                Err(error)
            }
        }
    })
}

fn timeout(seconds: u32) -> Duration {
    if seconds == 0 { DRAIN_TIMEOUT } else { Duration::from_secs(u64::from(seconds)) }
}

/// Writes all data that was written before the call to the disk. Fails after `timeout_s` seconds without progress (0: 60): the
/// dirty data then stays in the region.
///
/// # Safety
/// `device` is open or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_device_drain(device: *const CbdDevice, timeout_s: u32) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let device = unsafe { shared(device, "device") }?;
        device.0.drain(timeout(timeout_s), &mut |_| ControlFlow::Continue(()))?;
        Ok(0)
    })
}

/// Uses a disk that has become larger to its present end, and stores the size in bytes, which is the same as before if the disk has
/// not become larger. cbd_device_geometry shows it. Other threads may use the device meanwhile. EINVAL: the disk has shrunk, and
/// nothing has changed.
///
/// # Safety
/// `device` is open or NULL; `size` can be written or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_device_grow(device: *const CbdDevice, size: *mut u64) -> c_int {
    call(|| {
        wanted(size, "size")?;
        // SAFETY: the caller guarantees it.
        let now = unsafe { shared(device, "device") }?.0.grow()?;
        // SAFETY: the caller guarantees it.
        unsafe { give(size, "size", now) }?;
        Ok(0)
    })
}

/// The properties of the device.
///
/// # Safety
/// `device` is open or NULL; `geometry` can be written or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_device_geometry(device: *const CbdDevice, geometry: *mut CbdGeometry) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let device = unsafe { shared(device, "device") }?;
        let known = device.0.geometry();
        let answer = CbdGeometry {
            size: known.size,
            sector: known.sector,
            physical_sector: known.physical_sector,
            atomic_unit: known.atomic_unit,
            discard_granularity: if known.discard { known.discard_granularity } else { 0 },
            backend_id: device.0.id().0,
            reserved0: 0,
            reserved: [0; 4],
        };
        // SAFETY: the caller guarantees it.
        unsafe { give(geometry, "geometry", answer) }?;
        Ok(0)
    })
}

/// The present settings.
///
/// # Safety
/// `device` is open or NULL; `settings` can be written or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_device_settings(device: *const CbdDevice, settings: *mut CbdSettings) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let known = unsafe { shared(device, "device") }?.0.settings();
        let answer = CbdSettings {
            gc_percent: u32::from(known.gc_percent),
            consistency: match known.consistency {
                Consistency::Strict => CBD_CONSISTENCY_STRICT,
                Consistency::Checkpoint => CBD_CONSISTENCY_CHECKPOINT,
                Consistency::None => CBD_CONSISTENCY_NONE,
            },
            writeback_rate: known.writeback_rate,
            dirty_target_percent: u32::from(known.dirty_target_percent),
            on_write_error: match known.on_write_error {
                OnWriteError::Stop => CBD_ON_WRITE_ERROR_STOP,
                OnWriteError::Park => CBD_ON_WRITE_ERROR_PARK,
            },
            write_error_after_s: known.write_error_after_s,
            reserved0: 0,
            reserved: [0; 4],
        };
        // SAFETY: the caller guarantees it.
        unsafe { give(settings, "settings", answer) }?;
        Ok(0)
    })
}

/// Replaces the settings of the structure, for this process and for later openers of the region. Query the present ones first.
///
/// # Safety
/// `device` is open or NULL; `settings` points to settings or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_device_set_settings(
    device: *const CbdDevice,
    settings: *const CbdSettings,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let device = unsafe { shared(device, "device") }?;
        // SAFETY: the caller guarantees it.
        let given = unsafe { shared(settings, "settings") }?;
        check_flags(given.reserved0, 0, &given.reserved)?;
        let percent = |value: u32, name: &str| {
            u8::try_from(value).map_err(|_| invalid(format!("{name} is {value}: it must be 0 to 90")))
        };
        // Settings that the structure does not have stay as they are.
        device.0.set_settings(Settings {
            gc_percent: percent(given.gc_percent, "gc_percent")?,
            consistency: consistency_of(given.consistency)?,
            writeback_rate: given.writeback_rate,
            dirty_target_percent: percent(given.dirty_target_percent, "dirty_target_percent")?,
            on_write_error: match given.on_write_error {
                CBD_ON_WRITE_ERROR_STOP => OnWriteError::Stop,
                CBD_ON_WRITE_ERROR_PARK => OnWriteError::Park,
                other => {
                    let text = format!("on_write_error is one of CBD_ON_WRITE_ERROR_.., not {other}");
                    return Err(invalid(text));
                }
            },
            write_error_after_s: given.write_error_after_s,
            ..device.0.settings()
        })?;
        Ok(0)
    })
}

/// Counters since the device was opened, and its present state. Without a cache all fields are 0.
///
/// # Safety
/// `device` is open or NULL; `status` can be written or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_device_status(device: *const CbdDevice, status: *mut CbdStatus) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let known = unsafe { shared(device, "device") }?.0.status();
        let answer = known.map_or_else(CbdStatus::default, |known| {
            let flag = |is: bool, flag: u32| if is { flag } else { 0 };
            CbdStatus {
                flags: CBD_STATUS_CACHED
                    | flag(known.backing_is_consistent, CBD_STATUS_DISK_IS_CONSISTENT)
                    | flag(known.backing_trouble.is_some(), CBD_STATUS_DISK_FAILS)
                    | flag(known.is_stalled, CBD_STATUS_STALLED)
                    | flag(known.writers_waiting, CBD_STATUS_WRITERS_WAIT),
                segments: known.segments,
                free_segments: known.free_segments,
                damaged_ranges: u32::try_from(known.damaged.len()).unwrap_or(u32::MAX),
                dirty_bytes: known.dirty_bytes,
                written_bytes: known.written_bytes,
                read_hit_bytes: known.read_hit_bytes,
                read_missed_bytes: known.read_missed_bytes,
                written_back_bytes: known.written_back_bytes,
                parked_bytes: known.parked_bytes,
                epoch: known.epoch.0,
                drained_epoch: known.drained_epoch.0,
                drained_unix_ms: known.drained_wall_ms,
                reserved: [0; 8],
            }
        });
        // SAFETY: the caller guarantees it.
        unsafe { give(status, "status", answer) }?;
        Ok(0)
    })
}

/// The present warnings of the device, one per line, as `cbd_region_warnings`.
///
/// # Safety
/// `device` is open or NULL; `capacity` bytes at `buffer` can be written, or it is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_device_warnings(
    device: *const CbdDevice,
    buffer: *mut c_char,
    capacity: usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let warnings = unsafe { shared(device, "device") }?.0.warnings();
        // SAFETY: the caller guarantees it.
        unsafe { give_text(&warnings.join("\n"), buffer, capacity) }
    })
}

/// Reads `length` bytes from `offset` into `buffer`, in whole sectors. After a failure the content of the
/// buffer is undefined.
///
/// # Safety
/// `device` is open or NULL; `length` bytes at `buffer` can be written, or it is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_read(
    device: *const CbdDevice,
    buffer: *mut c_void,
    length: usize,
    offset: u64,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let device = unsafe { shared(device, "device") }?;
        // SAFETY: the caller guarantees it.
        let buffer = unsafe { bytes_mut(buffer.cast(), length, "buffer") }?;
        device.0.read_at(buffer, offset)?;
        Ok(0)
    })
}

/// Writes `length` bytes at `data` to `offset`, in whole sectors. They are durable in the region when the call returns 0.
/// `flags`: 0 or `CBD_FUA`.
///
/// # Safety
/// `device` is open or NULL; `length` bytes at `data` can be read, or it is NULL; no thread changes them during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_write(
    device: *const CbdDevice,
    data: *const c_void,
    length: usize,
    offset: u64,
    flags: u32,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let device = unsafe { shared(device, "device") }?;
        check_flags(flags, CBD_FUA, &[])?;
        // SAFETY: the caller guarantees it.
        let data = unsafe { bytes(data.cast(), length, "data") }?;
        device.0.write_with(data, offset, flags & CBD_FUA != 0)?;
        Ok(0)
    })
}

/// A write barrier: nothing written after this reaches the disk before the earlier writes. Writes are durable
/// without it.
///
/// # Safety
/// `device` is open or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_flush(device: *const CbdDevice) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        unsafe { shared(device, "device") }?.0.flush()?;
        Ok(0)
    })
}

/// Discards the range: it reads as zeroes from now on, and the disk frees its space where it can.
///
/// # Safety
/// `device` is open or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_discard(device: *const CbdDevice, offset: u64, length: u64) -> c_int {
    // SAFETY: the caller guarantees it.
    call(|| unsafe { change(device, Operation::Discard, offset, length, 0) })
}

/// Zeroes the range. `flags`: 0 or `CBD_FUA`.
///
/// # Safety
/// `device` is open or NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_write_zeroes(
    device: *const CbdDevice,
    offset: u64,
    length: u64,
    flags: u32,
) -> c_int {
    // SAFETY: the caller guarantees it.
    call(|| unsafe { change(device, Operation::WriteZeroes, offset, length, flags) })
}

/// # Safety
/// `device` is open or null.
unsafe fn change(
    device: *const CbdDevice,
    operation: Operation,
    offset: u64,
    length: u64,
    flags: u32,
) -> Result<c_int> {
    // SAFETY: the caller guarantees it.
    let device = unsafe { shared(device, "device") }?;
    check_flags(flags, CBD_FUA, &[])?;
    device.0.change(operation, offset, length, flags & CBD_FUA != 0)?;
    Ok(0)
}

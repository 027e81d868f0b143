//! Regions in C.

use super::border::{call, check_flags, field, give, give_text, invalid, shared, text, wanted};
use crate::{Durability, Error, ErrorKind, Format, Region, RegionOptions};
use std::ffi::{c_char, c_int};

/// An open region. Any number of threads may use it.
pub struct CbdRegion(pub(super) Region);

/// Format the region with a new transport; its content is lost.
pub const CBD_REGION_FORMAT: u32 = 1;
/// With `CBD_REGION_FORMAT`: format even if the region holds a transport or other data.
pub const CBD_REGION_FORCE: u32 = 2;
/// Refuse a region that does not survive a power failure.
pub const CBD_REGION_REQUIRE_PERSISTENT: u32 = 4;

/// The parameters with which a region is opened. All zeroes: an existing region, unchanged.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CbdRegionOptions {
    /// Its minimum size in bytes; a file that is created gets this size. 0: the present size.
    pub size: u64,
    /// With `CBD_REGION_FORMAT`: bytes of a segment, a power of two. 0: derived from the region's size.
    pub segment_size: u64,
    /// The host to act as; a daemon that will serve the same backends later needs the same name. NULL: the
    /// host of the region, or the machine's name if it has none.
    pub host: *const c_char,
    /// `CBD_REGION_..`.
    pub flags: u32,
    /// 0.
    pub reserved0: u32,
    /// 0.
    pub reserved: [u64; 4],
}

/// The properties of a region.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CbdRegionInfo {
    /// Bytes of the mapping.
    pub size: u64,
    /// Bytes of a segment.
    pub segment_size: u64,
    /// Bytes that are free for new caches.
    pub free_bytes: u64,
    /// Row of this process's host.
    pub host_id: u32,
    /// 1 if a completed write survives a power failure; 0 if it survives only the death of the process.
    pub power_fail: u32,
    /// The transport's identity, as text.
    pub uuid: [c_char; 40],
    /// Name of this process's host.
    pub host: [c_char; 64],
    /// 0.
    pub reserved: [u64; 8],
}

/// A disk that is recorded in a region.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CbdBackendInfo {
    /// Its row: the argument of `cbd_device_open`.
    pub id: u32,
    /// Row of the host that it belongs to.
    pub host_id: u32,
    /// Bytes.
    pub size: u64,
    /// Bytes of its cache; 0 without one.
    pub cache_size: u64,
    /// Bytes of a sector.
    pub sector: u32,
    /// 1 if data has checksums.
    pub data_crc: u32,
    /// The path of the disk, as it was last found.
    pub path: [c_char; 1024],
    /// 0.
    pub reserved: [u64; 8],
}

/// Opens, locks and maps the region at `path`, and formats it on request. `options` may be NULL.
///
/// -EBUSY: another process has the region open; `cbd_last_error` names that process. -ENOENT: the region does not exist. -EEXIST:
/// the region to be formatted holds data. -EIO: the region is damaged, or the file is not a region.
///
/// # Safety
/// `path` is text or NULL; `options` points to options or is NULL; `region` can be written or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_region_open(
    path: *const c_char,
    options: *const CbdRegionOptions,
    region: *mut *mut CbdRegion,
) -> c_int {
    call(|| {
        wanted(region, "region")?;
        // SAFETY: the caller guarantees it.
        let path = unsafe { text(path, "path") }?;
        // SAFETY: the caller guarantees it.
        let options = match unsafe { options.as_ref() } {
            // SAFETY: the caller guarantees it.
            Some(options) => unsafe { options_of(options) }?,
            None => RegionOptions::default(),
        };
        let opened = Box::into_raw(Box::new(CbdRegion(Region::open(path, &options)?)));
        // SAFETY: the caller guarantees it.
        unsafe { give(region, "region", opened) }?;
        Ok(0)
    })
}

/// # Safety
/// `host` is text or null.
unsafe fn options_of(given: &CbdRegionOptions) -> crate::Result<RegionOptions> {
    const KNOWN: u32 = CBD_REGION_FORMAT | CBD_REGION_FORCE | CBD_REGION_REQUIRE_PERSISTENT;
    check_flags(given.flags, KNOWN, &given.reserved)?;
    check_flags(0, 0, &[u64::from(given.reserved0)])?;
    let has = |flag| given.flags & flag != 0;
    if !has(CBD_REGION_FORMAT) && (has(CBD_REGION_FORCE) || given.segment_size != 0) {
        return Err(invalid("CBD_REGION_FORCE and segment_size go with CBD_REGION_FORMAT only".to_owned()));
    }
    let format = Format {
        segment_size: Some(given.segment_size).filter(|&size| size != 0),
        force: has(CBD_REGION_FORCE),
    };
    let host = match given.host.is_null() {
        true => None,
        // SAFETY: the caller guarantees it.
        false => Some(unsafe { text(given.host, "host") }?.to_owned()),
    };
    Ok(RegionOptions {
        format: has(CBD_REGION_FORMAT).then_some(format),
        size: Some(given.size).filter(|&size| size != 0),
        host,
        require_persistent: has(CBD_REGION_REQUIRE_PERSISTENT),
    })
}

/// Closes the region. -EBUSY while devices or queues on it are open; the handle stays valid then. NULL is
/// ignored.
///
/// # Safety
/// `region` came from `cbd_region_open` and was not closed, or is NULL; no other thread uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_region_close(region: *mut CbdRegion) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let Some(open) = (unsafe { region.as_ref() }) else { return Ok(0) };
        match open.0.users() {
            0 => {}
            users => {
                let text = format!("{users} devices or queues on the region are open: close them first");
                return Err(Error::new(ErrorKind::Busy, text));
            }
        }
        // SAFETY: the pointer came from `Box::into_raw`, and the caller does not use it any more.
        drop(unsafe { Box::from_raw(region) });
        Ok(0)
    })
}

/// The properties of the region.
///
/// # Safety
/// `region` is open or NULL; `info` can be written or is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_region_get_info(region: *const CbdRegion, info: *mut CbdRegionInfo) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let known = unsafe { shared(region, "region") }?.0.info();
        let answer = CbdRegionInfo {
            size: known.size,
            segment_size: known.segment_size,
            free_bytes: known.free_bytes,
            host_id: known.host.0,
            power_fail: u32::from(known.durability == Durability::PowerFail),
            uuid: field(&known.uuid),
            host: field(&known.host.1),
            reserved: [0; 8],
        };
        // SAFETY: the caller guarantees it.
        unsafe { give(info, "info", answer) }?;
        Ok(0)
    })
}

/// The warnings of the region, one per line. `buffer` receives as much as fits, and ends with a zero byte. The result is the
/// length of the whole text, without that byte.
///
/// # Safety
/// `region` is open or NULL; `capacity` bytes at `buffer` can be written, or it is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_region_warnings(
    region: *const CbdRegion,
    buffer: *mut c_char,
    capacity: usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let warnings = unsafe { shared(region, "region") }?.0.info().warnings;
        // SAFETY: the caller guarantees it.
        unsafe { give_text(&warnings.join("\n"), buffer, capacity) }
    })
}

/// The disks that are recorded in the region: at most `capacity` of them in `backends`; the result is their
/// total number.
///
/// # Safety
/// `region` is open or NULL; `capacity` elements at `backends` can be written, or it is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cbd_region_backends(
    region: *const CbdRegion,
    backends: *mut CbdBackendInfo,
    capacity: usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller guarantees it.
        let region = &unsafe { shared(region, "region") }?.0;
        if capacity > 0 {
            wanted(backends, "backends")?;
        }
        let segment_size = region.info().segment_size;
        let entries = region.backends();
        for (place, entry) in entries.iter().take(capacity).enumerate() {
            let answer = CbdBackendInfo {
                id: entry.id.0,
                host_id: entry.host.0,
                size: entry.size,
                cache_size: u64::from(entry.cache_segments) * segment_size,
                sector: entry.sector,
                data_crc: u32::from(entry.data_crc),
                path: field(&entry.path),
                reserved: [0; 8],
            };
            // SAFETY: `place` is below `capacity`, and the caller guarantees the rest.
            unsafe { give(backends.add(place), "backends", answer) }?;
        }
        c_int::try_from(entries.len()).map_err(|_| invalid("too many backends".to_owned()))
    })
}

//! A fresh region with one cache on it.

use super::WorldOptions;
use crate::environment::SimEnvironment;
use crate::memory::CrashMemory;
use cbd_engine::{BackendSpec, FormatOptions, Pin, PinKind, Settings, Transport, WhenFull};
use cbd_types::{BackendId, ByteRange, Error, Region};
use std::sync::Arc;

pub(crate) fn region_size(options: &WorldOptions) -> u64 {
    // Tables and both superblocks take less space than the last term.
    let others = if options.varies_size { super::neighbour::SEGMENTS + super::neighbour::SPARE } else { 0 };
    (u64::from(options.segments + others) + 1) * options.segment_size + (256 << 10)
}

/// Formats the region and creates one cache on it.
pub(crate) fn make_cache(
    options: &WorldOptions,
    environment: &Arc<SimEnvironment>,
    memory: &CrashMemory,
) -> Result<(BackendId, ByteRange), Error> {
    let (_, backend, area) = make_cache_on(options, environment, memory)?;
    Ok((backend, area))
}

/// As [`make_cache`], with the transport.
pub(super) fn make_cache_on(
    options: &WorldOptions,
    environment: &Arc<SimEnvironment>,
    memory: &CrashMemory,
) -> Result<(Arc<Transport<SimEnvironment>>, BackendId, ByteRange), Error> {
    let format = FormatOptions {
        segment_size: Some(options.segment_size),
        force: false,
        host_rows: 2,
        backend_rows: 2,
        blkdev_rows: 2,
    };
    let transport = Transport::format(Arc::clone(environment), Region::new(memory.clone()), &format)?;
    let host = transport.register_host("simulated", None)?;
    let layout = transport.info().layout;
    let area = u64::from(layout.segment_count) * layout.segment_size;
    let backend = transport.create_backend(&BackendSpec {
        host,
        path: String::from("/simulated/disk"),
        identity: String::from("simulated"),
        size: options.size,
        sector: options.sector,
        cache_bytes: (!options.uncached_at_first)
            .then_some(u64::from(options.segments) * options.segment_size),
        lanes_max: options.lanes_max,
        handlers: 1,
        data_crc: options.data_crc,
        settings: Settings {
            consistency: options.consistency,
            cache_mode: options.cache_mode,
            sequential_write_cutoff: if options.bypasses { 4096 } else { 0 },
            when_full: if options.bypasses { WhenFull::Around } else { WhenFull::Wait },
            on_write_error: options.on_write_error,
            write_error_after_s: options.write_error_after_s,
            ..Settings::default()
        },
    })?;
    if options.pins {
        let cache = transport.open_cache(backend)?;
        let text = String::from("the beginning");
        let ranges = vec![ByteRange::at(0, cache.pin_limit())];
        transport.set_pins(backend, &[Pin { kind: PinKind::Range, text, ranges }])?;
    }
    Ok((transport, backend, ByteRange::at(layout.segment_area, area)))
}

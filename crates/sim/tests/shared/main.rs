//! The tables of hosts that share a region.

mod channels;
mod moves;
mod regions;

use cbd_engine::{BackendSpec, Beat, FormatOptions, Host, Settings, Transport};
use cbd_sim::hosts::{HostEnvironment, HostMemory, Medium};
use cbd_types::{BackendId, ErrorKind, HostId, Region, Result};
use std::collections::BTreeSet;
use std::sync::Arc;

const SEGMENT: u64 = 64 << 10;
const SIZE: u64 = 12 << 20;

type Shared = Arc<Transport<HostEnvironment>>;

fn format(medium: &Medium) {
    let environment = Arc::new(HostEnvironment::new(1));
    let options = FormatOptions {
        segment_size: Some(SEGMENT),
        force: false,
        host_rows: 3,
        backend_rows: 4,
        blkdev_rows: 4,
    };
    let memory = HostMemory::new(medium, false, 1);
    drop(Transport::format_shared(&environment, Region::new(memory), &options).expect("it fits"));
}

/// The host `name` on a machine of its own; `dead`: no process that has been that host lives.
fn open_if(medium: &Medium, name: &str, seed: u64, dead: bool) -> Result<Shared> {
    let memory = HostMemory::new(medium, false, seed);
    let mut prove = |_: HostId, host: Option<&Host>, _: &dyn Fn() -> Option<Beat>| match host {
        Some(_) if !dead => Err(cbd_types::Error::new(ErrorKind::Busy, "it lives")),
        _ => Ok(()),
    };
    Transport::open_shared(Arc::new(HostEnvironment::new(seed)), Region::new(memory), name, &mut prove)
}

fn open(medium: &Medium, name: &str, seed: u64) -> Shared {
    let shared = open_if(medium, name, seed, true).expect("it can join");
    let host = shared.register_host(name, None).expect("there is a row");
    assert_eq!(host, shared.members().expect("it is shared").1.id);
    shared
}

fn spec(shared: &Shared, path: &str, segments: u64) -> BackendSpec {
    BackendSpec {
        host: shared.members().expect("it is shared").1.id,
        path: path.into(),
        identity: String::new(),
        size: 1 << 20,
        sector: 512,
        cache_bytes: Some(segments * SEGMENT),
        lanes_max: 1,
        handlers: 1,
        data_crc: true,
        settings: Settings::default(),
    }
}

fn segments(shared: &Shared, id: BackendId) -> BTreeSet<u32> {
    shared.segments_of(id).into_iter().map(|segment| segment.0).collect()
}

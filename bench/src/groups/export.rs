//! Each export over CBD against the same export over a bare persistent copy: 4 KiB writes at depth 1 and 16.
//!
//! Invariants: both devices have the same size and lie in one mapping. Both get the same offsets in the same order from the same
//! client, and threads with the same setup serve them. Background work of the cache runs between the turns, not in them. The
//! figure of a turn is the median of its requests, so interruptions of a few requests do not change it.

mod client;
mod fuse;
mod nbd;
mod vhost;

use crate::budgets::budget;
use crate::figures::{Figures, spread};
use crate::options::Options;
use crate::rig::Rig;
use crate::scale::{Scale, Sources, random_places};
use crate::statistics::{percentile, rounded};
use crate::turns::{Comparison, Turn, compare};
use crate::window::Window;
use cbd_device::Device;
use cbd_export::{BlockDevice, MemoryDevice};
use cbd_pmem::Mapping;
use cbd_runtime::ServedDevice;
use cbd_types::Result;
use client::ExportClient;
pub use client::Exports;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::{Map, json};
use std::cell::RefCell;
use std::sync::Arc;

/// The number of requests that a client has in flight.
struct Depth {
    depth: usize,
    /// Requests in a turn.
    requests: usize,
    /// The processor of the server; the client runs on the first processor. Whether both run on one processor or on two makes a
    /// factor of two, so the benchmark uses the faster choice for each depth. A client that waits for each answer loses by a
    /// change of the processor; a client that does not wait gains.
    server: usize,
}

/// The measured depths.
const DEPTHS: [Depth; 2] =
    [Depth { depth: 1, requests: 512, server: 0 }, Depth { depth: 16, requests: 2048, server: 1 }];

/// Divisor of the number of turns: a turn takes some milliseconds, so there are fewer turns than for the engine.
const FEWER: usize = 4;

/// The share of the cache that is written between two rests, in which background work cleans and reclaims it.
const SHARE_BETWEEN_RESTS: u64 = 8;

/// Serves a device and connects to it; `name` distinguishes its paths from those of other devices.
type Open = fn(exports: &Exports, device: Arc<dyn BlockDevice>, name: &str) -> Result<Box<dyn ExportClient>>;

/// An export to measure.
struct Target {
    /// Its name in the figures.
    name: &'static str,
    /// The function that opens it.
    open: Open,
    /// The client polls for its answers and never sleeps, so its processor must be free of other threads.
    polls: bool,
}

/// All exports.
const TARGETS: [Target; 4] = [
    Target { name: "nbd", open: nbd::open, polls: false },
    Target { name: "fuse", open: fuse::open_file, polls: false },
    Target { name: "loop", open: fuse::open_loop, polls: false },
    Target { name: "vhost", open: vhost::open, polls: true },
];

/// Runs the measurements.
///
/// # Errors
/// The errors of the engine. An export that the system refuses is reported and left out.
pub fn run(options: &Options, figures: &mut Figures) -> Result<()> {
    let scale = Scale::of(options);
    let size = scale.export_size;
    let mapping = Arc::new(Mapping::anonymous(2 * size)?);
    let mut contest = Contest::new(&mapping, size)?;
    let exports = Exports::new()?;
    for Target { name, open, polls } in TARGETS {
        for depth in DEPTHS {
            let exports = exports.serving_on(if polls { 1 } else { depth.server });
            let opened = open(&exports, contest.cached(), "cached")
                .and_then(|cached| Ok((cached, open(&exports, Arc::clone(&contest.bare), "bare")?)));
            match opened {
                Ok((mut cached, mut bare)) => {
                    // Pinned only at this point, because a new thread inherits the processors of the thread that starts it.
                    exports.processors.pin(0)?;
                    let rounds = options.rounds().div_ceil(FEWER);
                    let found = contest.play(&mut *cached, &mut *bare, &depth, rounds);
                    exports.processors.unpin()?;
                    report(figures, name, depth.depth, &found?);
                    cached.close()?;
                    bare.close()?;
                }
                Err(error) => {
                    figures.add(format!("{name}.not_measured"), error.to_string());
                    break;
                }
            }
        }
    }
    Ok(())
}

fn report(figures: &mut Figures, name: &str, depth: usize, found: &Comparison) {
    let us = |nanoseconds: f64| rounded(nanoseconds / 1000.0, 2);
    let mut detail = Map::new();
    detail.insert("rounds".to_owned(), json!(found.rounds));
    detail.insert("p10_p90".to_owned(), spread(found.ratio, 3));
    let absolute = format!("{:.1} us against {:.1} us", us(found.a.median), us(found.b.median));
    detail.insert("absolute".to_owned(), json!(absolute));
    for (side, summary) in [("cbd", found.a), ("copy", found.b)] {
        detail.insert(format!("{side}_p50_us_p10_p90"), json!([us(summary.low), us(summary.high)]));
    }
    figures.add(format!("{name}.qd{depth}_p50_us"), us(found.a.median));
    figures.add(format!("{name}.qd{depth}_copy_p50_us"), us(found.b.median));
    if depth == 1 && budget(&format!("export.{name}.write_4k_p50_us")).is_some() {
        figures.add(format!("{name}.write_4k_p50_us"), us(found.a.median));
    }
    let ratio = rounded(found.ratio.median, 3);
    figures.add_detailed(&format!("{name}.qd{depth}_over_copy"), ratio, detail, Some(found.certainty()));
}

/// The two devices.
struct Contest {
    rig: Rig,
    served: Arc<dyn BlockDevice>,
    bare: Arc<dyn BlockDevice>,
    size: u64,
    random: SmallRng,
}

impl Contest {
    /// Creates a cache and bare memory of `size` bytes each, and writes both completely. The cached device has the size of the
    /// memory.
    fn new(mapping: &Arc<Mapping>, size: u64) -> Result<Self> {
        let bare = Window::new(Arc::clone(mapping), size, size);
        bare.fill();
        let mut rig = Rig::new(Window::new(Arc::clone(mapping), 0, size), size)?;
        let mut random = SmallRng::seed_from_u64(7);
        let around = usize::try_from(3 * size / 4096).unwrap_or(usize::MAX);
        rig.write_all(&random_places(&mut random, size, 4096, around), &Sources::new(4096))?;
        rig.settle()?;
        let device = Arc::new(Device::cached(rig.share(), rig.disk().geometry()));
        let served = Arc::new(ServedDevice::new(device, Arc::clone(rig.disk())));
        let bare = Arc::new(MemoryDevice::new(Arc::new(bare), 512)?);
        Ok(Self { rig, served, bare, size, random })
    }

    fn cached(&self) -> Arc<dyn BlockDevice> {
        Arc::clone(&self.served)
    }

    /// Both devices serve the same requests in turns.
    fn play(
        &mut self,
        cached: &mut dyn ExportClient,
        bare: &mut dyn ExportClient,
        depth: &Depth,
        rounds: usize,
    ) -> Result<Comparison> {
        let &Depth { depth, requests, .. } = depth;
        let sources = Sources::new(4096);
        let places = RefCell::new(Vec::new());
        let (rig, random, size) = (&mut self.rig, &mut self.random, self.size);
        let mut written = u64::MAX;
        compare(
            rounds,
            || {
                let next = requests as u64 * 4096;
                if written.saturating_add(next) > size / SHARE_BETWEEN_RESTS {
                    rig.settle()?;
                    written = 0;
                }
                written += next;
                let mut places = places.borrow_mut();
                *places = random_places(random, size, 4096, requests);
                turn(cached, &places, &sources, depth)
            },
            || turn(bare, &places.borrow(), &sources, depth),
        )
    }
}

/// The median of the times of the writes to `places`.
fn turn(client: &mut dyn ExportClient, places: &[u64], sources: &Sources, depth: usize) -> Result<Turn> {
    let mut taken = Vec::with_capacity(places.len());
    client.write(places, sources, depth, &mut taken)?;
    taken.sort_unstable();
    // A client that waits for its answer does not occupy its processor.
    Ok(Turn { nanoseconds: f64::from(percentile(&taken, 0.5)), undisturbed: true })
}

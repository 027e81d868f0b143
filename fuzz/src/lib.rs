//! Fuzz targets: all code that reads foreign bytes, driven from plain bytes.
//!
//! A target is one function of bytes. The coverage-guided fuzzer (`cargo xtask fuzz`) and the replay of the corpora
//! on an ordinary compiler (`cargo test -p cbd-fuzz`) call the same function. `fuzz/corpus/TARGET` holds the inputs
//! that extended the coverage, `fuzz/regressions/TARGET` those that once failed.
//!
//! Invariants: a target is as deterministic as the code under test, leaves no files or processes, and accesses only a
//! directory of its own; a target that returns has found no failure.
//!
//! Elsewhere: the code under test. No target has a copy of it.
#![forbid(unsafe_code)]

pub mod channels;
pub mod control;
pub mod decoders;
pub mod fuse;
pub mod guest_memory;
pub mod input;
pub mod nbd;
pub mod pcache;
pub mod region;
pub mod store;
pub mod traces;
pub mod virtqueue;
mod wires;

/// A fuzz target.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, and that of its directories.
    pub name: &'static str,
    /// Runs one input; panics on a failure.
    pub run: fn(&[u8]),
    /// The initial inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Longest input that is worth trying, in bytes.
    pub length_max: usize,
}

/// All targets.
pub const TARGETS: [Target; 10] = [
    Target { name: "recovery", run: region::run, seeds: region::seeds, length_max: 400 },
    Target { name: "decoders", run: decoders::run, seeds: decoders::seeds, length_max: 1200 },
    Target { name: "nbd", run: nbd::run, seeds: nbd::seeds, length_max: 2048 },
    Target { name: "virtqueue", run: virtqueue::run, seeds: virtqueue::seeds, length_max: 1200 },
    Target { name: "guest_memory", run: guest_memory::run, seeds: guest_memory::seeds, length_max: 400 },
    Target { name: "fuse", run: fuse::run, seeds: fuse::seeds, length_max: 2048 },
    Target { name: "pcache", run: pcache::run, seeds: pcache::seeds, length_max: 1200 },
    Target { name: "control", run: control::run, seeds: control::seeds, length_max: 1500 },
    Target { name: "channels", run: channels::run, seeds: channels::seeds, length_max: 1500 },
    Target { name: "traces", run: traces::run, seeds: traces::seeds, length_max: 1000 },
];

/// The target of this name.
#[must_use]
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

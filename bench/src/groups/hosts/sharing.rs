//! What it costs that several hosts share a backend: writes of clients at its own host, on a block device that was started with
//! `--shared` against one that was not.
//!
//! Invariants: both have queues of one device, in one thread. The order of the turns alternates. Background work runs between the turns.

use super::connected::Connected;
use super::over_nbd::{Used, Waiting};
use crate::Figures;
use crate::options::Options;
use crate::rounded;
use crate::scale::Sources;
use crate::turns::{Turn, compare_both_orders};
use cbd_export::BlockDevice;
use cbd_remote::{Changes, SharedDevice};
use cbd_types::{Operation, Result};
use std::cell::RefCell;
use std::sync::Arc;

/// Requests in a turn.
const REQUESTS: usize = 2048;

/// Runs the measurement.
///
/// # Errors
/// The errors of the engine.
pub fn run(options: &Options, connected: &mut Connected, figures: &mut Figures) -> Result<()> {
    let shared = SharedDevice::new(Arc::clone(&connected.served) as _, Arc::<Changes>::default());
    let plain = RefCell::new(Used::new(connected.served.open_queue()?));
    let shared = RefCell::new(Used::new(shared.open_queue()?));
    let (sources, connected) = (Sources::new(4096), RefCell::new(connected));
    let mut worst: f64 = 0.0;
    for depth in [1, 32] {
        let turn = |used: &RefCell<Used>| {
            let places = connected.borrow_mut().places_to_write(REQUESTS)?;
            let mut used = used.borrow_mut();
            Turn::measure(REQUESTS, || used.play(Operation::Write, &places, &sources, depth, Waiting::Polls))
        };
        let found = compare_both_orders(options.rounds(), || turn(&shared), || turn(&plain))?;
        let (a, b) =
            (format!("shared_device_write_4k_qd{depth}"), format!("plain_device_write_4k_qd{depth}"));
        figures.add_comparison(&a, "plain", &b, &found);
        worst = worst.max(found.ratio.median);
    }
    figures.add("shared_device_cost", rounded(worst, 3));
    Ok(())
}

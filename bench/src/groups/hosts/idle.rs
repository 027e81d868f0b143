//! The processor time of a channel without requests.
//!
//! Invariants: the session goes on while it is measured, and there were requests before. The host that uses the device serves it over NBD
//! with a client connected, as a daemon does. Heartbeats of the hosts are not of the channel, and do not count.

use super::connected::Connected;
use super::threads::Threads;
use crate::groups::export::Exports;
use crate::options::Options;
use crate::{Figures, rounded};
use cbd_export::wait_any;
use cbd_nbd::{Listen, Options as NbdOptions, Server};
use cbd_remote::IDLE;
use cbd_testkit::Client;
use cbd_types::{Error, ErrorKind, Result};
use serde_json::{Map, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests before.
const REQUESTS: usize = 1000;

/// Runs the measurement of hosts that wake each other or look from time to time: `how` begins the names of the figures.
///
/// # Errors
/// Those of both sides, and of the system.
pub fn run(options: &Options, connected: &mut Connected, how: &str, figures: &mut Figures) -> Result<()> {
    let exports = Exports::new()?;
    let before = Threads::now()?;
    let listen = Listen::Unix(exports.path("of-the-other-host.sock"));
    let server = Server::start(Arc::clone(&connected.device) as _, listen.clone(), NbdOptions::default())?;
    let mut client = Client::connect(&listen)?;
    let mut block = [0; 4096];
    for place in connected.places_to_write(REQUESTS)? {
        client.write(place, &block, false)?;
        client.read(place, &mut block)?;
    }
    let sides = [connected.server_threads.clone(), Threads::now()?.without(&before)];
    wait_any(&[], Some(IDLE + IDLE / 4))?;
    let time = Duration::from_secs(if options.quick { 2 } else { 10 });
    let percent = percent_of_a_processor(&sides, time)?;
    // The session goes on.
    client.read(0, &mut block)?;
    if connected.device.is_ended() || connected.device.in_flight() > 0 {
        return Err(Error::new(ErrorKind::Stopped, "the channel was not idle, or has ended"));
    }
    drop(client);
    server.stop()?;

    let [server, client] = percent;
    figures.add(format!("{how}_server_cpu_percent"), rounded(server, 3));
    figures.add(format!("{how}_client_cpu_percent"), rounded(client, 3));
    let mut detail = Map::new();
    detail.insert("seconds".to_owned(), json!(time.as_secs()));
    detail.insert("threads".to_owned(), json!(sides.each_ref().map(Threads::count)));
    detail.insert("absolute".to_owned(), json!(format!("{server:.3} % and {client:.3} %")));
    figures.add_detailed(&format!("{how}_cpu_percent"), rounded(server.max(client), 3), detail, None);
    Ok(())
}

/// The share of one processor that each side uses for this time.
fn percent_of_a_processor(sides: &[Threads; 2], time: Duration) -> Result<[f64; 2]> {
    let of_both =
        || -> Result<[Duration; 2]> { Ok([sides[0].processor_time()?, sides[1].processor_time()?]) };
    let (before, begun) = (of_both()?, Instant::now());
    wait_any(&[], Some(time))?;
    let (after, passed) = (of_both()?, begun.elapsed());
    let percent = |side: usize| 100.0 * (after[side] - before[side]).as_secs_f64() / passed.as_secs_f64();
    Ok([percent(0), percent(1)])
}

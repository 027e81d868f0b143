//! `backend-grow` and `tp-grow`: a backend uses its backing device, a transport its region, to the present end.

use crate::command::{Output, warn};
use cbd_daemon::api::{BackendGrown, GrowTransport, NumberOrName, TransportGrown};
use cbd_daemon::client::Client;
use cbd_daemon::size::format_size;
use cbd_types::Result;
use std::fmt::Write;

/// Lets a backend grow, and prints what its users see.
pub fn run(client: &Client, output: &Output, transport: u32, backend: &NumberOrName) -> Result<()> {
    let path = format!("/v1/transports/{transport}/backends/{backend}/grow");
    let grown: BackendGrown = client.post(&path, &serde_json::json!({}))?;
    warn(&grown.warnings);
    output.result(&grown, &text_of(&grown))
}

/// Lets the region of a transport grow.
pub fn run_transport(client: &Client, output: &Output, transport: u32, size: Option<u64>) -> Result<()> {
    let path = format!("/v1/transports/{transport}/grow");
    let grown: TransportGrown = client.post(&path, &GrowTransport { size })?;
    output.result(&grown, &text_of_transport(&grown))
}

fn text_of_transport(grown: &TransportGrown) -> String {
    let TransportGrown { path, before, now, new_segments, bytes_per_segment, free_segments, .. } = grown;
    let free = format_size(u64::from(*free_segments) * bytes_per_segment);
    if now == before {
        return format!("{path} has {now} bytes, as before: it has not become larger; {free} are free\n");
    }
    format!("{path} has grown from {before} to {now} bytes: {new_segments} segments more; {free} are free\n")
}

fn text_of(grown: &BackendGrown) -> String {
    let BackendGrown { backend_path, before, now, blkdevs, .. } = grown;
    let mut text = if now > before {
        format!("{backend_path} has grown from {before} to {now} bytes\n")
    } else {
        format!("{backend_path} has {now} bytes, as before: it has not become larger\n")
    };
    for blkdev in blkdevs {
        let seen = match &blkdev.pending {
            Some(pending) => pending.as_str(),
            None if now > before => "its users see the new size",
            None => continue,
        };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}: {seen}", blkdev.dev_name);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_daemon::api::BlkdevGrown;
    use clap::Parser;

    #[test]
    fn a_region_that_is_to_grow_is_named_by_its_transport() {
        let parse = |line: &str| {
            crate::cli::Cli::try_parse_from(line.split_whitespace()).map_err(|error| error.exit_code())
        };
        for line in ["cbdctrl tp-grow", "cbdctrl tp-grow -t 1 -s 64G", "cbdctrl tp-grow --size 64GiB"] {
            assert!(parse(line).is_ok(), "{line}");
        }
        for line in ["cbdctrl tp-grow -s much", "cbdctrl tp-grow /region", "cbdctrl tp-grow -t x"] {
            assert_eq!(parse(line).err(), Some(2), "{line}");
        }
    }

    #[test]
    fn the_answer_says_how_large_the_region_is_and_what_is_free() {
        let mut grown = TransportGrown {
            path: "/region".to_owned(),
            before: 1 << 30,
            now: 2 << 30,
            new_segments: 255,
            bytes_per_segment: 4 << 20,
            free_segments: 256,
            ..TransportGrown::default()
        };
        assert_eq!(
            text_of_transport(&grown),
            "/region has grown from 1073741824 to 2147483648 bytes: 255 segments more; 1 GiB are free\n"
        );
        grown.now = 1 << 30;
        assert_eq!(
            text_of_transport(&grown),
            "/region has 1073741824 bytes, as before: it has not become larger; 1 GiB are free\n"
        );
    }

    #[test]
    fn the_answer_says_what_has_grown_and_when_users_see_it() {
        let blkdev = |dev_name: &str, pending: Option<&str>| BlkdevGrown {
            dev_name: dev_name.into(),
            is_seen: pending.is_none(),
            pending: pending.map(str::to_owned),
            ..BlkdevGrown::default()
        };
        let mut grown = BackendGrown {
            backend_path: "/disk".into(),
            before: 1024,
            now: 2048,
            blkdevs: vec![blkdev("/dev/cbd0", None), blkdev("nbd:1", Some("clients see it later"))],
            ..BackendGrown::default()
        };
        assert_eq!(
            text_of(&grown),
            "/disk has grown from 1024 to 2048 bytes\n/dev/cbd0: its users see the new size\nnbd:1: clients see it later\n"
        );
        grown.before = 2048;
        grown.blkdevs.truncate(1);
        assert_eq!(text_of(&grown), "/disk has 2048 bytes, as before: it has not become larger\n");
    }
}

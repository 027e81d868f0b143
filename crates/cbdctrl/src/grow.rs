//! `backend-grow`: a backend uses its backing device to its present end.

use crate::command::{Output, warn};
use cbd_daemon::api::{BackendGrown, NumberOrName};
use cbd_daemon::client::Client;
use cbd_types::Result;
use std::fmt::Write;

/// Lets a backend grow, and prints what its users see.
pub fn run(client: &Client, output: &Output, transport: u32, backend: &NumberOrName) -> Result<()> {
    let path = format!("/v1/transports/{transport}/backends/{backend}/grow");
    let grown: BackendGrown = client.post(&path, &serde_json::json!({}))?;
    warn(&grown.warnings);
    output.result(&grown, &text_of(&grown))
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

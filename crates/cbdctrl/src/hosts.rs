//! The commands `host-list` and `host-clear`.
//!
//! Invariants: none but those of the requests.
//!
//! Elsewhere: the requests (`command`), what they do (`cbd-daemon`).

use crate::command::{Output, yes};
use crate::table::Table;
use cbd_daemon::api::{ClearHost, HostInfo};
use cbd_daemon::client::Client;
use cbd_types::Result;

/// Lists the hosts of a transport.
pub(crate) fn list(client: &Client, transport: u32, output: &Output) -> Result<()> {
    let list: Vec<HostInfo> = client.get(&format!("/v1/transports/{transport}/hosts"))?;
    output.list(&list, host_table)
}

/// Takes everything from a dead host of a transport.
pub(crate) fn clear(
    client: &Client,
    (transport, host): (u32, u32),
    discard_dirty: Option<u64>,
    output: &Output,
) -> Result<()> {
    let path = format!("/v1/transports/{transport}/hosts/{host}/clear");
    let () = client.post(&path, &ClearHost { discard_dirty })?;
    output.result(&serde_json::json!({}), "")
}

fn host_table(list: &[HostInfo]) -> Table {
    let mut table = Table::new(&["ID", "NAME", "ALIVE", "SEEN"]);
    for it in list {
        let seen = match it.seen_ms {
            _ if it.this => "this one".to_owned(),
            _ if it.clearing => "being cleared".to_owned(),
            Some(ms) => format!("{}.{} s ago", ms / 1000, ms % 1000 / 100),
            None => "-".to_owned(),
        };
        table.row(vec![it.host_id.to_string(), it.hostname.clone(), yes(it.alive), seen]);
    }
    table
}

//! One interval as a table.

use super::rates::Rates;
use super::text::{byte_rate, latency, percent, rate};
use super::view::situation;
use crate::table::{Table, terminal_width};

/// The table, in the width of the terminal if there is one.
pub fn table(rates: &Rates) -> String {
    render(rates, terminal_width().unwrap_or(usize::MAX))
}

fn render(rates: &Rates, width: usize) -> String {
    let heads =
        ["DEVICE", "READ/s", "REQ/s", "P50", "P99", "WRITE/s", "REQ/s", "P50", "P99", "HIT%", "STATE"];
    let mut table = Table::new(&heads);
    for row in &rates.rows {
        let mut cells = vec![row.short_name()];
        for name in ["read", "write"] {
            let operation = row.operation(name);
            let of = |count: fn(&cbd_daemon::api::OperationFigures) -> u64| {
                operation.as_ref().and_then(|it| rates.per_second(count(it)))
            };
            let at = |share: f64| latency(operation.as_ref().and_then(|it| it.latency.percentile(share)));
            cells.extend([byte_rate(of(|it| it.bytes)), rate(of(|it| it.requests)), at(0.5), at(0.99)]);
        }
        cells.extend([percent(row.hit_ratio()), situation(row, false)]);
        table.row(cells);
    }
    table.render(width)
}

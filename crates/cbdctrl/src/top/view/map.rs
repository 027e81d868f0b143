//! The map of a device as lines of its page: what the cache has of each part, from the first byte to the last.
//!
//! Invariants: a part that has anything is not blank; the largest part has the darkest sign, and its share stands beside.

use crate::top::text::percent;
use cbd_daemon::api::{DeviceMap, MapCell};

/// Signs for nothing, and for a quarter, a half, three quarters and all of the largest share.
const ASCII: [char; 5] = [' ', '.', ':', '+', '#'];
const SHADES: [char; 5] = [' ', '\u{2591}', '\u{2592}', '\u{2593}', '\u{2588}'];
/// The columns of the frame and of the largest share.
const BESIDE: usize = 13;

/// What a line shows of a part.
type Bytes = fn(&MapCell) -> u64;

/// The names and the lines, in at most `columns` columns. The line of what is read comes first.
pub fn lines(map: &DeviceMap, columns: usize, unicode: bool) -> Vec<(&'static str, String)> {
    let of: [(&str, Bytes); 3] = [
        ("map: read", |cell| cell.read_bytes),
        ("map: cached", |cell| cell.cached_bytes),
        ("map: dirty", |cell| cell.dirty_bytes),
    ];
    let width = columns.saturating_sub(BESIDE);
    if width == 0 || map.cells.is_empty() {
        return Vec::new();
    }
    let signs = if unicode { SHADES } else { ASCII };
    of.map(|(name, bytes)| (name, line(map, bytes, width, &signs))).to_vec()
}

#[expect(clippy::cast_precision_loss, reason = "a share")]
fn line(map: &DeviceMap, bytes: Bytes, width: usize, signs: &[char; 5]) -> String {
    let cells = map.cells.len();
    // A column shows the largest of its cells, or a cell has several columns.
    let columns: Vec<u64> = (0..width)
        .map(|column| {
            let first = column * cells / width;
            let end = ((column + 1) * cells / width).clamp(first + 1, cells);
            map.cells[first..end].iter().map(bytes).max().unwrap_or(0)
        })
        .collect();
    let most = columns.iter().copied().max().unwrap_or(0);
    let sign = |bytes: &u64| {
        let level = u128::from(*bytes) * 4;
        signs[usize::try_from(level.div_ceil(u128::from(most.max(1)))).unwrap_or(4).min(4)]
    };
    let strip: String = columns.iter().map(sign).collect();
    let share = most as f64 / map.cell_bytes.max(1) as f64;
    format!("|{strip}| max {} %", percent(Some(share)))
}

//! The map of a device.

use crate::fixture::{Fixture, MIB, refused};
use cbd_daemon::api::{MapCell, StartBackend};
use cbd_daemon::control::Control;
use cbd_types::ErrorKind;

#[test]
fn a_map_has_what_is_cached_of_each_part_of_a_device() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    let mut client = fixture.client();
    client.write(6 * MIB, &[1; 8192], true).unwrap();
    client.read(6 * MIB, &mut [0; 4096]).unwrap();
    let map = daemon.map(0, 0, Some(4)).unwrap();
    assert_eq!((map.backend_id, map.size, map.cell_bytes), (0, 8 * MIB, 2 * MIB));
    assert_eq!((map.sampled_one_of, map.cells.len()), (1, 4));
    let [before @ .., last] = &map.cells[..] else { panic!("four cells") };
    assert!(before.iter().all(|cell| *cell == MapCell::default()), "{map:?}");
    assert_eq!((last.cached_bytes, last.read_bytes), (8192, 4096));
    assert_eq!(daemon.map(0, 0, None).unwrap().cells.len(), 128);
}

#[test]
fn a_map_that_cannot_be_made_is_refused() {
    let fixture = Fixture::new();
    let (disk, plain) = (fixture.disk("disk", 64 * MIB), fixture.disk("plain", 8 * MIB));
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    let uncached =
        StartBackend { cache_size: None, start_dev: false, export: None, ..fixture.backend(&plain) };
    daemon.start_backend(0, &uncached).unwrap();
    let invalid = ErrorKind::InvalidArgument;
    refused(daemon.map(0, 1, None), invalid, "backend 1 has no cache");
    refused(daemon.map(0, 0, Some(0)), invalid, "a map has 1 to 256 cells, not 0");
    refused(daemon.map(0, 0, Some(257)), invalid, "not 257");
    refused(daemon.map(0, 7, None), ErrorKind::NotFound, "no backend 7");
}

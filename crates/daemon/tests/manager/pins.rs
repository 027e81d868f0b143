//! Pins: made, listed, replaced, ended, refused, and kept for the next daemon.

use crate::fixture::{Fixture, MIB, cache_of, refused};
use cbd_daemon::api::{
    AddPins, DetachCache, NewPin, PinKind, PinName, RangeInfo, RemovePins, ResizeCache, StartBackend,
};
use cbd_daemon::control::{Control, Flow};
use cbd_types::ErrorKind;

fn pin(name: &str, ranges: &[(u64, u64)]) -> NewPin {
    let ranges = ranges.iter().map(|&(start, end)| RangeInfo { start, end }).collect();
    NewPin { kind: PinKind::File, name: name.into(), ranges }
}

fn add(pins: Vec<NewPin>) -> AddPins {
    AddPins { pins }
}

fn remove(name: &str) -> RemovePins {
    RemovePins { pins: vec![PinName { kind: PinKind::File, name: name.into() }], all: false }
}

#[test]
fn pins_are_listed_with_what_is_cached_of_them_replaced_by_their_name_and_kept() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    fixture.client().write(4096, &[1; 8192], true).unwrap();
    // Widened to blocks: 4 of them, of which two are cached; what both have in common counts once.
    let info = daemon
        .add_pins(0, 0, add(vec![pin("a", &[(1, 13_000)]), pin("b", &[(0, 1), (8192, 8193)])]))
        .unwrap();
    let of = |name: &str| {
        let pin = info.pins.iter().find(|pin| pin.name == name).expect("it is listed");
        (pin.bytes, pin.ranges, pin.cached_bytes)
    };
    assert_eq!((of("a"), of("b")), ((16_384, 1, 8192), (8192, 2, 4096)));
    assert_eq!((info.pinned_bytes, info.lost), (16_384, false));
    assert_eq!(
        (cache_of(&daemon).pinned_bytes, cache_of(&daemon).pin_limit_bytes),
        (16_384, info.limit_bytes)
    );
    let info = daemon.add_pins(0, 0, add(vec![pin("a", &[(0, 4096)])])).unwrap();
    assert_eq!((info.pins.len(), info.pinned_bytes), (2, 8192));
    drop(daemon);
    let daemon = fixture.daemon();
    assert_eq!(daemon.pins(0, 0).unwrap(), info);
    let info = daemon.remove_pins(0, 0, &remove("b")).unwrap();
    assert_eq!((info.pins.len(), info.pinned_bytes), (1, 4096));
    let info = daemon.remove_pins(0, 0, &RemovePins { all: true, ..RemovePins::default() }).unwrap();
    assert_eq!((info.pins.len(), info.pinned_bytes), (0, 0));
}

#[test]
fn what_cannot_be_pinned_is_refused_and_changes_nothing() {
    let fixture = Fixture::new();
    let (disk, plain) = (fixture.disk("disk", 64 * MIB), fixture.disk("plain", 8 * MIB));
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    let uncached =
        StartBackend { cache_size: None, start_dev: false, export: None, ..fixture.backend(&plain) };
    daemon.start_backend(0, &uncached).unwrap();
    let invalid = ErrorKind::InvalidArgument;
    let good = pin("good", &[(0, 4096)]);
    refused(daemon.add_pins(0, 1, add(vec![good.clone()])), invalid, "backend 1 has no cache");
    refused(daemon.pins(0, 1), invalid, "backend 1 has no cache");
    refused(daemon.pins(0, 7), ErrorKind::NotFound, "no backend 7");
    refused(daemon.add_pins(0, 0, AddPins::default()), invalid, "name what is to be pinned");
    for (bad, part) in [
        (pin("bad", &[]), "bad: a pin has ranges"),
        (pin("bad", &[(4096, 4096)]), "none is empty"),
        (pin("bad", &[(64 * MIB, 64 * MIB + 1)]), "the device has 67108864 bytes"),
    ] {
        refused(daemon.add_pins(0, 0, add(vec![good.clone(), bad])), invalid, part);
    }
    let large = pin("large", &[(0, 60 * MIB)]);
    refused(
        daemon.add_pins(0, 0, add(vec![good.clone(), large])),
        ErrorKind::NoSpace,
        "(62914560 bytes) do not fit",
    );
    assert_eq!(daemon.pins(0, 0).unwrap().pins, []);
    refused(daemon.remove_pins(0, 0, &remove("x")), ErrorKind::NotFound, "nothing is pinned");
    refused(daemon.remove_pins(0, 0, &RemovePins::default()), invalid, "name the pins");
    daemon.add_pins(0, 0, add(vec![good])).unwrap();
    refused(daemon.remove_pins(0, 0, &remove("x")), ErrorKind::NotFound, "of the file x; pinned: good");
}

#[test]
fn a_cache_is_not_made_too_small_for_its_pins_and_a_detach_ends_them() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 64 * MIB);
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &StartBackend { cache_size: Some(24 * MIB), ..fixture.backend(&disk) }).unwrap();
    let limit = daemon.pins(0, 0).unwrap().limit_bytes;
    daemon.add_pins(0, 0, add(vec![pin("a", &[(0, limit)])])).unwrap();
    let mut go_on = |_| Flow::Continue;
    let size = |cache_size, cache_max| ResizeCache { cache_size, cache_max, ..ResizeCache::default() };
    for request in [size(16 * MIB, None), size(16 * MIB, Some(32 * MIB))] {
        let result = daemon.resize_cache(0, 0, &request, &mut go_on);
        refused(result, ErrorKind::NoSpace, "do not fit");
    }
    daemon.remove_pins(0, 0, &remove("a")).unwrap();
    daemon.resize_cache(0, 0, &size(16 * MIB, Some(32 * MIB)), &mut go_on).unwrap();
    // The minimum counts now, and so the limit says.
    assert!(daemon.add_pins(0, 0, add(vec![pin("a", &[(0, limit)])])).is_err());
    let least = daemon.pins(0, 0).unwrap().limit_bytes;
    assert!(least < limit && cache_of(&daemon).pin_limit_bytes == least, "{least} of {limit}");
    let more = daemon.add_pins(0, 0, add(vec![pin("a", &[(0, least + 1)])]));
    refused(more, ErrorKind::NoSpace, &format!("({least} bytes)"));
    daemon.add_pins(0, 0, add(vec![pin("a", &[(0, least)])])).unwrap();
    daemon.detach_cache(0, 0, &DetachCache::default(), &mut go_on).unwrap();
    daemon
        .attach_cache(0, 0, &cbd_daemon::api::AttachCache { cache_size: 24 * MIB, ..Default::default() })
        .unwrap();
    assert_eq!(daemon.pins(0, 0).unwrap().pins, []);
}

#[test]
fn a_command_ends_all_pins_that_it_names_or_none_and_an_error_lists_them_on_one_line() {
    let fixture = Fixture::new();
    let disk = fixture.disk("disk", 8 * MIB);
    let daemon = fixture.daemon_with_region();
    daemon.start_backend(0, &fixture.backend(&disk)).unwrap();
    let ranges = &[(0, 4096)][..];
    daemon.add_pins(0, 0, add(vec![pin("a", ranges), pin("b\n", ranges), pin("a", ranges)])).unwrap();
    let names = |names: &[&str]| RemovePins {
        pins: names.iter().flat_map(|name| remove(name).pins).collect(),
        all: false,
    };
    let text = "of the file \\u{1b}x; pinned: a, b\\n";
    refused(daemon.remove_pins(0, 0, &names(&["a", "\u{1b}x"])), ErrorKind::NotFound, text);
    assert_eq!(daemon.pins(0, 0).unwrap().pins.len(), 2);
    // A name that is there twice, too.
    assert_eq!(daemon.remove_pins(0, 0, &names(&["a", "b\n", "a"])).unwrap().pins, []);
}

//! Tests of the tables: the stores of each call, the arguments that it refuses, and its results for damaged rows.

mod attach;
mod extend;
mod features;
mod grow;
mod limits;
mod metadata;
mod moved;
mod names;
mod owner;
mod resize;
mod settings;
mod shared;
mod uses;

use super::*;
use crate::tests::{FIRST_RANDOM, Op, Ram, Still, WALL_MS};
use crate::{CacheMode, Consistency, OnWriteError, ReadFill, Readahead, Settings, WhenFull};
use cbd_format::superblock::FEATURE_BYPASS;
use cbd_format::{Drained, LaneMark, LaneTail, SegmentHeader, StateShape, tables};
use cbd_types::{BlkdevId, ByteRange, Class, HostId, LaneId};

const SEGMENT: u64 = 64 << 10;
const SIZE: u64 = 40 * SEGMENT;
const OPTIONS: FormatOptions = FormatOptions {
    segment_size: Some(SEGMENT),
    force: false,
    host_rows: 4,
    backend_rows: 4,
    blkdev_rows: 4,
};

type Tested = Arc<Transport<Still>>;

fn formatted(mixes_pages: bool) -> Tested {
    let region = Region::new(Ram::new(SIZE as usize, mixes_pages));
    Transport::format(Arc::new(Still::default()), region, &OPTIONS).expect("there is room")
}

fn transport() -> Tested {
    formatted(false)
}

/// Opens the same memory as the next process would.
fn reopened(transport: &Tested) -> Tested {
    let region = Region::new(transport.region.memory().copy());
    Transport::open(Arc::new(Still::default()), region).expect("it opens")
}

fn spec() -> BackendSpec {
    BackendSpec {
        host: HostId(0),
        path: "/dev/disk".into(),
        identity: "a disk".into(),
        size: 1 << 30,
        sector: 512,
        cache_bytes: Some(9 * SEGMENT),
        lanes_max: 16,
        handlers: 2,
        data_crc: true,
        settings: Settings {
            gc_percent: 80,
            consistency: Consistency::Checkpoint,
            writeback_rate: 77,
            dirty_target_percent: 20,
            on_write_error: OnWriteError::Park,
            write_error_after_s: 30,
            ..Settings::default()
        },
    }
}

fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

fn ops(transport: &Tested) -> Vec<Op> {
    transport.region.memory().take_ops()
}

/// The offsets of both slots of a row.
fn slots<T: SlotContent>(area: u64, rows: u32, row: u32) -> [u64; 2] {
    Layout::slots::<T>(area, rows, row)
}

/// The stores and fences of an update of a row of `length` bytes in both slots, the second slot first if `is_later`.
fn kept(slots: [u64; 2], length: u64, is_later: bool) -> Vec<Op> {
    let [a, b] = if is_later { [slots[1], slots[0]] } else { slots };
    vec![Op::Store(a, length), Op::Fence, Op::Store(b, length), Op::Fence]
}

#[test]
fn a_format_erases_the_superblocks_blanks_the_tables_and_then_stores_both() {
    let transport = formatted(true);
    let layout = transport.layout();
    let (second, tables) = (SIZE - PAGE, layout.segment_area - layout.host_area);
    let blocks = tables.div_ceil(64 * PAGE);
    let blank = |number: u64| {
        let at = layout.host_area + number * 64 * PAGE;
        Op::Store(at, (64 * PAGE).min(layout.segment_area - at))
    };
    let mut expected = vec![Op::Store(0, PAGE), Op::Store(second, PAGE), Op::Fence];
    expected.extend([Op::Sync(0, PAGE), Op::Sync(second, PAGE)]);
    expected.extend((0..blocks).map(blank));
    expected.extend([Op::Fence, Op::Sync(layout.host_area, tables)]);
    expected.extend([Op::Store(0, 192), Op::Store(second, 192), Op::Fence]);
    let all = ops(&transport);
    assert_eq!(all[..expected.len()], expected);
    assert!(all.contains(&Op::Sync(layout.host_area, tables)), "what was read is on the disk");
    let info = transport.info();
    let uuid = [FIRST_RANDOM.to_le_bytes(), (FIRST_RANDOM + 2).to_le_bytes()].concat();
    assert_eq!((info.uuid.to_vec(), info.created_ms, info.magic, info.version), (uuid, WALL_MS, MAGIC, 1));
    assert_eq!(info.features, [0, 0, FEATURE_USE_NOTES]);
    assert_eq!(transport_features(&transport_of_ram()), 0);
    assert_eq!((info.layout, info.bytes_per_row), (layout, [256, 1024, 512, 64]));
    assert_eq!(info.free_segments, layout.segment_count);
}

fn transport_of_ram() -> Tested {
    transport()
}

fn transport_features(transport: &Tested) -> u64 {
    transport.info().features[2]
}

#[test]
fn a_region_that_is_too_small_names_the_smallest_one_that_is_not() {
    let format = |size: u64, options: &FormatOptions| {
        Transport::format(Arc::new(Still::default()), Ram::region(size as usize), options)
    };
    let error = format(8 * SEGMENT, &OPTIONS).err().expect("it is too small");
    assert_eq!(error.kind(), ErrorKind::NoSpace);
    let line = error.line();
    assert!(line.contains("needs 9 segments of 64 KiB, 704 KiB in all"), "{line}");
    let smallest = format(704 << 10, &OPTIONS).expect("that is enough");
    assert_eq!(smallest.layout().segment_count, 9);
    let odd = FormatOptions { segment_size: Some(3 * SEGMENT), ..OPTIONS };
    assert_eq!(kind(format(SIZE, &odd)), Some(ErrorKind::InvalidArgument));
}

#[test]
fn a_region_that_holds_anything_is_formatted_by_force_only() {
    let again = |transport: &Tested, force: bool| {
        let region = Region::new(transport.region.memory().copy());
        kind(Transport::format(Arc::new(Still::default()), region, &FormatOptions { force, ..OPTIONS }))
    };
    let whole = transport();
    assert_eq!((again(&whole, false), again(&whole, true)), (Some(ErrorKind::AlreadyExists), None));
    let without_first = transport();
    let _ = without_first.region.store(0, &[0; 192]);
    assert_eq!(again(&without_first, false), Some(ErrorKind::AlreadyExists));
    let foreign = Ram::region(SIZE as usize);
    let _ = foreign.store(4095, &[1]);
    assert_eq!(kind(Transport::<Still>::refuse_used(&foreign)), Some(ErrorKind::Foreign));
    let used_behind = Ram::region(SIZE as usize);
    let _ = used_behind.store(SIZE - PAGE, &[1]);
    assert_eq!(kind(Transport::<Still>::refuse_used(&used_behind)), None, "only a superblock counts there");
    assert_eq!(kind(Transport::<Still>::refuse_used(&Ram::region(SIZE as usize))), None);
}

#[test]
fn tables_without_a_superblock_are_damage_and_not_foreign() {
    let options = FormatOptions { segment_size: Some(SEGMENT), ..FormatOptions::default() };
    for make in [
        (|transport: &Tested| transport.register_host("host", None).map(|_| ())) as fn(&Tested) -> Result<()>,
        |transport| transport.create_backend(&spec()).map(|_| ()),
        |_| Ok(()),
    ] {
        let region = Ram::region(SIZE as usize);
        let transport = Transport::format(Arc::new(Still::default()), region, &options).expect("room");
        make(&transport).expect("there is room");
        let has_rows = !transport.hosts().is_empty() || !transport.backends().expect("good").is_empty();
        let memory = transport.region.memory().copy();
        let region = Region::new(memory);
        for at in [0, SIZE - PAGE] {
            let _ = region.store(at, &[0; 192]);
        }
        let refused = kind(Transport::<Still>::refuse_used(&region));
        assert_eq!(refused, has_rows.then_some(ErrorKind::AlreadyExists));
        let expected = if has_rows { ErrorKind::Damaged } else { ErrorKind::Foreign };
        assert_eq!(kind(Transport::open(Arc::new(Still::default()), region)), Some(expected));
    }
}

#[test]
fn the_row_of_a_backend_says_all_that_was_asked_for() {
    let transport = transport();
    let environment = Arc::clone(&transport.environment);
    let first = environment.random() + 2;
    let id = transport.create_backend(&spec()).expect("there is room");
    let row = transport.backend_row(id).expect("it is there");
    assert_eq!([row.state, row.host, row.sector, row.lanes, row.segments].map(u32::from), [1, 0, 512, 1, 9]);
    assert_eq!([row.handlers, row.gc_percent, row.consistency].map(u32::from), [2, 80, 1]);
    assert_eq!([row.dirty_target_percent, row.features, row.cache_mode].map(u32::from), [20, 1, 0]);
    assert_eq!([row.on_write_error, row.write_error_after_s, row.use_state].map(u32::from), [1, 30, 0]);
    assert_eq!(row.state_segment.get(), 0);
    assert_eq!((row.metadata_min_percent.get(), row.metadata_max_percent.get()), (0, 0));
    let numbers = [row.ownership, row.cache_id, row.size, row.writeback_rate, row.created_ms];
    assert_eq!(numbers.map(u64::from), [1, first + 1, 1 << 30, 77, WALL_MS]);
    // Between them a random number is used for the salt of the state segment.
    assert_eq!(row.uuid.to_vec(), [(first + 4).to_le_bytes(), (first + 6).to_le_bytes()].concat());
    assert_eq!((row.use_boot, row.name, row.pin_percent.get()), ([0; 16], [0; 32], 0));
    assert_eq!((row.cache_min.get(), row.cache_max.get(), row.weight.get()), (0, 0, 0));
    let entry = transport.backend(id).expect("it is good");
    assert_eq!((entry.path.as_str(), entry.identity.as_str()), ("/dev/disk", "a disk"));
    assert_eq!((entry.settings, entry.data_crc, entry.is_moved), (spec().settings, true, false));
    assert_eq!((entry.log_segments(), entry.lanes, entry.handlers, entry.sector), (8, 1, 2, 512));
    assert_eq!((entry.size, entry.uuid, entry.cache_segments, entry.host), (1 << 30, row.uuid, 9, HostId(0)));
}

#[test]
fn a_backend_without_a_cache_has_none_of_its_numbers() {
    let transport = transport();
    let spec = BackendSpec { cache_bytes: None, data_crc: false, ..spec() };
    let id = transport.create_backend(&spec).expect("there is room");
    let row = transport.backend_row(id).expect("it is there");
    assert_eq!((row.cache_id.get(), row.lanes.get(), row.segments.get(), row.features.get()), (0, 0, 0, 0));
    assert_eq!(row.state_segment.get(), u32::MAX);
    assert_eq!(kind(transport.open_cache(id)), Some(ErrorKind::InvalidArgument));
    assert_eq!((transport.segments_of(id).len(), transport.drained(id)), (0, None));
    assert_eq!(transport.pages_of(id).expect("it is there"), Pages::Whole);
    assert_eq!(kind(transport.move_backend(id, "/dev/b", "b")), Some(ErrorKind::InvalidArgument));
    assert!(transport.former_disks(id).is_empty());
}

#[test]
fn a_backend_names_its_segments_and_its_state_before_its_row() {
    let transport = transport();
    let layout = transport.layout();
    ops(&transport);
    transport.create_backend(&spec()).expect("there is room");
    let all = ops(&transport);
    let entry = |segment: u32| slots::<SegmentEntry>(layout.segment_table, layout.segment_count, segment);
    let mut expected: Vec<Op> = (0..9).map(|segment| Op::Store(entry(segment)[0], 64)).collect();
    expected.push(Op::Fence);
    expected.extend((0..9).map(|segment| Op::Store(entry(segment)[1], 64)));
    expected.push(Op::Fence);
    let base = layout.segment_area;
    let state = StateShape { lanes: 1 };
    let line = |at: u64| Op::Store(base + at, 64);
    expected.extend([Op::Store(base, 128), Op::Store(base + SEGMENT - PAGE, 128)]);
    expected.extend(state.mark(LaneId(0)).map(line));
    expected.extend(state.tail(LaneId(0)).map(line));
    expected.extend(state.drained().map(line));
    expected.push(Op::Fence);
    expected.extend(kept(slots::<BackendRow>(layout.backend_area, 4, 0), 1024, false));
    assert_eq!(all, expected);
}

#[test]
fn the_state_of_a_new_cache_is_that_of_an_empty_one() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("there is room");
    let cache_id = transport.backend_row(id).expect("it is there").cache_id.get();
    let base = transport.layout().segment_area;
    let mut bytes = [0; 128];
    for at in [base, base + SEGMENT - PAGE] {
        transport.region.load(at, &mut bytes).expect("it can be read");
        let header = SegmentHeader::decode(&bytes).expect("long enough");
        let header = header.verify(SegmentId(0), cache_id, 1).expect("it is good");
        assert_eq!([header.generation, header.lane, header.lanes].map(u32::from), [1, 0, 1]);
        let counters = [header.ordinal, header.run, header.cut, header.first_sequence, header.epoch];
        assert_eq!((counters.map(u64::from), header.ownership.get()), ([0; 5], 1));
        assert_eq!((header.magic.get(), header.reserved), (cbd_format::segment::STATE_MAGIC, [0; 40]));
    }
    let state = StateShape { lanes: 1 };
    let at = |slots: [u64; 2]| slots.map(|at| base + at);
    let tail = TwoSlots::<LaneTail>::read(&transport.region, at(state.tail(LaneId(0))), 0);
    let tail = *tail.content().expect("it is there");
    assert_eq!([tail.ordinal, tail.ownership, tail.first_sequence].map(u64::from), [1; 3]);
    let mark = TwoSlots::<LaneMark>::read(&transport.region, at(state.mark(LaneId(0))), 0);
    assert!(mark.content().is_none());
    let drained = TwoSlots::<Drained>::read(&transport.region, at(state.drained()), 0);
    let drained = *drained.content().expect("it is there");
    let numbers = [drained.epoch, drained.void_until, drained.wall_ms, drained.ownership, drained.closed_ms];
    assert_eq!(numbers.map(u64::from), [0, 0, WALL_MS, 1, 0]);
    assert_eq!(transport.drained(id), Some((cbd_types::Epoch(0), 0)));
}

#[test]
fn a_spec_is_valid_up_to_its_limits() {
    let made = |change: fn(&mut BackendSpec)| {
        let mut spec = spec();
        change(&mut spec);
        kind(transport().create_backend(&spec))
    };
    for valid in [
        (|spec| spec.sector = 512) as fn(&mut BackendSpec),
        |spec| spec.sector = 4096,
        |spec| spec.handlers = 1,
        |spec| spec.handlers = 128,
        |spec| spec.size = 512,
        |spec| spec.cache_bytes = Some(10 * SEGMENT - 1),
        |spec| spec.path = "p".repeat(512),
        |spec| spec.identity = "i".repeat(256),
        |spec| spec.size = ((1 << 22) - 1) * (4 << 20),
    ] {
        assert_eq!(made(valid), None);
    }
    for invalid in [
        (|spec| spec.sector = 256) as fn(&mut BackendSpec),
        |spec| spec.sector = 8192,
        |spec| spec.sector = 1536,
        |spec| spec.handlers = 0,
        |spec| spec.handlers = 129,
        |spec| spec.size = 0,
        |spec| spec.size = 1000,
        |spec| spec.path = "p".repeat(513),
        |spec| spec.identity = "i".repeat(257),
        |spec| spec.settings.gc_percent = 99,
        |spec| spec.size = (1 << 22) * (4 << 20),
    ] {
        assert_eq!(made(invalid), Some(ErrorKind::InvalidArgument));
    }
    assert_eq!(made(|spec| spec.cache_bytes = Some(9 * SEGMENT - 1)), Some(ErrorKind::NoSpace));
}

#[test]
fn a_cache_takes_free_segments_only_and_as_many_lanes_as_they_feed() {
    let transport = transport();
    let count = u64::from(transport.layout().segment_count);
    let ask =
        |segments: u64, lanes_max| BackendSpec { cache_bytes: Some(segments * SEGMENT), lanes_max, ..spec() };
    assert_eq!(kind(transport.create_backend(&ask(count + 1, 1))), Some(ErrorKind::NoSpace));
    for (segments, lanes_max, lanes) in [(17, 16, 2), (16, 16, 1), (33, 16, 4), (33, 3, 2), (32, 16, 2)] {
        let id = transport.create_backend(&ask(segments, lanes_max)).expect("there is room");
        assert_eq!(transport.backend(id).expect("it is good").lanes, lanes, "{segments} segments");
        assert_eq!(transport.segments_of(id).len() as u64, segments);
        assert_eq!(u64::from(transport.info().free_segments), count - segments);
        transport.remove_backend(id).expect("no one uses it");
    }
    transport.create_backend(&ask(count, 1)).expect("all of them");
    assert_eq!(transport.info().free_segments, 0);
}

#[test]
fn rows_are_used_again_with_a_higher_ownership_until_the_table_is_full() {
    let transport = transport();
    let spec = BackendSpec { cache_bytes: None, ..spec() };
    let ids: Vec<u32> = (0..4).map(|_| transport.create_backend(&spec).expect("room").0).collect();
    assert_eq!(ids, [0, 1, 2, 3]);
    assert_eq!(kind(transport.create_backend(&spec)), Some(ErrorKind::NoSpace));
    transport.remove_backend(BackendId(2)).expect("no one uses it");
    assert_eq!(kind(transport.backend(BackendId(2))), Some(ErrorKind::NotFound));
    assert_eq!(kind(transport.remove_backend(BackendId(2))), Some(ErrorKind::NotFound));
    assert_eq!(transport.create_backend(&spec).expect("room"), BackendId(2));
    assert_eq!(transport.backend_row(BackendId(2)).expect("it is there").ownership.get(), 2);
    let named: Vec<u32> = transport.backends().expect("good").iter().map(|entry| entry.id.0).collect();
    assert_eq!(named, [0, 1, 2, 3]);
}

#[test]
fn a_row_whose_content_is_impossible_is_damaged() {
    let read = |change: fn(&mut BackendRow)| {
        let transport = transport();
        let id = transport.create_backend(&spec()).expect("there is room");
        transport.update_backend(id, change).expect("it is there");
        (kind(transport.backend(id)), kind(transport.open_cache(id)))
    };
    let damaged = Some(ErrorKind::Damaged);
    for change in [
        (|row| row.gc_percent = 99.into()) as fn(&mut BackendRow),
        |row| row.gc_percent = 256.into(),
        |row| row.dirty_target_percent = 300.into(),
        |row| row.consistency = 3.into(),
        |row| row.on_write_error = 2.into(),
        |row| row.write_error_after_s = 86_401.into(),
        |row| row.sector = 256.into(),
        |row| row.sector = 8192.into(),
        |row| row.sector = 1536.into(),
        |row| row.size = 1000.into(),
        |row| row.path_length = 513.into(),
        |row| row.identity_length = 257.into(),
    ] {
        assert_eq!(read(change), (damaged, damaged));
    }
    assert_eq!(
        read(|row| row.cache_mode = 2.into()),
        (Some(ErrorKind::Unsupported), Some(ErrorKind::Unsupported))
    );
    for change in [
        (|row| row.lanes = 3.into()) as fn(&mut BackendRow),
        |row| row.lanes = 0.into(),
        |row| row.lanes = 2.into(),
        |row| row.lanes = 1024.into(),
        |row| row.state_segment = 20.into(),
        |row| row.state_segment = u32::MAX.into(),
        |row| row.size = ((1 << 22) * (4_u64 << 20)).into(),
    ] {
        assert_eq!(read(change), (None, damaged));
    }
    assert_eq!(read(|row| row.cache_id = 0.into()), (None, Some(ErrorKind::InvalidArgument)));
    assert_eq!(read(|row| row.sector = 4096.into()), (None, None));
}

#[test]
fn a_cache_is_open_once_and_its_backend_stays_while_it_is() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("there is room");
    let cache = transport.open_cache(id).expect("it opens");
    assert_eq!((cache.backend(), cache.size(), cache.sector(), cache.lane_count()), (id, 1 << 30, 512, 1));
    assert_eq!(kind(transport.open_cache(id)), Some(ErrorKind::Busy));
    assert_eq!(kind(transport.remove_backend(id)), Some(ErrorKind::Busy));
    drop(cache);
    drop(transport.open_cache(id).expect("it opens again"));
    transport.remove_backend(id).expect("no one uses it");
    assert_eq!(kind(transport.open_cache(id)), Some(ErrorKind::NotFound));
}

#[test]
fn hosts_have_names_and_rows_of_their_own() {
    let transport = transport();
    ops(&transport);
    let register = |name: &str, wanted: Option<u32>| transport.register_host(name, wanted.map(HostId));
    assert_eq!(register("a", None).expect("room"), HostId(0));
    let places = slots::<HostRow>(transport.layout().host_area, 4, 0);
    assert_eq!(ops(&transport), kept(places, 256, false));
    assert_eq!(register("a", None).expect("the same"), HostId(0));
    assert_eq!(register("a", Some(0)).expect("the same"), HostId(0));
    assert_eq!(kind(register("a", Some(1))), Some(ErrorKind::AlreadyExists));
    assert_eq!(kind(register("b", Some(0))), Some(ErrorKind::Busy));
    assert_eq!(kind(register("b", Some(4))), Some(ErrorKind::InvalidArgument));
    assert_eq!(register("b", Some(3)).expect("room"), HostId(3));
    assert_eq!(register("c", None).expect("room"), HostId(1));
    for name in ["", "a/b", "a\n"] {
        assert_eq!(kind(register(name, None)), Some(ErrorKind::InvalidArgument), "{name:?}");
    }
    assert_eq!(register(&"n".repeat(64), None).expect("room"), HostId(2));
    assert_eq!(kind(register(&"n".repeat(65), None)), Some(ErrorKind::InvalidArgument));
    assert_eq!(kind(register("d", None)), Some(ErrorKind::NoSpace));
    transport.unregister_host(HostId(1)).expect("nothing is of it");
    assert_eq!(kind(transport.unregister_host(HostId(1))), Some(ErrorKind::NotFound));
    assert_eq!(register("d", None).expect("room"), HostId(1));
    let row = |row: usize| *transport.tables.lock().hosts[row].content().expect("it is there");
    assert_eq!([0, 1].map(|at| row(at).ownership.get()), [1, 2]);
    assert_eq!((row(0).registered_ms.get(), row(0).state.get()), (WALL_MS, tables::STATE_ACTIVE));
    let names: Vec<String> = transport.hosts().into_iter().map(|host| host.name).collect();
    assert_eq!(names[..2], ["a", "d"]);
    transport.create_backend(&BackendSpec { cache_bytes: None, ..spec() }).expect("room");
    assert_eq!(kind(transport.unregister_host(HostId(0))), Some(ErrorKind::Busy));
}

#[test]
fn a_blkdev_stands_on_one_backend_which_stays_while_it_does() {
    let transport = transport();
    let spec_of = |backend: u32| BlkdevSpec {
        backend: BackendId(backend),
        host: HostId(0),
        export: "nbd".into(),
        shared: false,
    };
    assert_eq!(kind(transport.create_blkdev(&spec_of(0))), Some(ErrorKind::NotFound));
    let bare = BackendSpec { cache_bytes: None, ..spec() };
    transport.create_backend(&bare).expect("room");
    transport.create_backend(&bare).expect("room");
    ops(&transport);
    assert_eq!(transport.create_blkdev(&spec_of(1)).expect("room"), BlkdevId(0));
    let places = slots::<BlkdevRow>(transport.layout().blkdev_area, 4, 0);
    assert_eq!(ops(&transport), kept(places, 512, false));
    assert_eq!(kind(transport.create_blkdev(&spec_of(1))), Some(ErrorKind::Busy));
    assert_eq!(transport.create_blkdev(&spec_of(0)).expect("room"), BlkdevId(1));
    assert_eq!(kind(transport.remove_backend(BackendId(1))), Some(ErrorKind::Busy));
    let entry = BlkdevEntry {
        id: BlkdevId(0),
        backend: BackendId(1),
        host: HostId(0),
        export: "nbd".into(),
        shared: false,
        further: false,
        name: None,
        class: Class::Unmarked,
        backend_name: None,
    };
    assert_eq!(transport.blkdevs()[0], entry);
    transport.remove_blkdev(BlkdevId(0)).expect("it is there");
    assert_eq!(kind(transport.remove_blkdev(BlkdevId(0))), Some(ErrorKind::NotFound));
    assert_eq!(transport.create_blkdev(&spec_of(1)).expect("room"), BlkdevId(0));
    let row = *transport.tables.lock().blkdevs[0].content().expect("it is there");
    assert_eq!((row.ownership.get(), row.state.get(), row.reserved), (2, tables::STATE_ACTIVE, [0; 148]));
    assert!(transport.lost_blkdevs().is_empty());
    // A blkdev of a backend that was created again is stale.
    transport.update_backend(BackendId(1), |row| row.uuid = [9; 16]).expect("it is there");
    assert_eq!(transport.blkdevs().len(), 1);
}

#[test]
fn no_row_counts_after_a_store_that_failed() {
    for call in [
        (|transport: &Tested| transport.register_host("b", None).map(|_| ())) as fn(&Tested) -> Result<()>,
        |transport| transport.unregister_host(HostId(1)),
        |transport| transport.create_backend(&BackendSpec { cache_bytes: None, ..spec() }).map(|_| ()),
        |transport| transport.remove_backend(BackendId(1)),
        |transport| transport.update_path(BackendId(0), "/dev/b"),
        |transport| transport.remove_blkdev(BlkdevId(0)),
        |transport| transport.move_backend(BackendId(0), "/dev/b", "b"),
        |transport| transport.settle_backend(BackendId(0)),
        |transport| transport.empty_backend(BackendId(0)),
        |transport| transport.name_backend(BackendId(0), Some(&"a".parse()?)),
        |transport| transport.name_blkdev(BlkdevId(0), Some(&"a".parse()?)),
        |transport| {
            let spec =
                BlkdevSpec { backend: BackendId(1), host: HostId(0), export: "nbd".into(), shared: false };
            transport.create_blkdev(&spec).map(|_| ())
        },
    ] {
        let transport = transport();
        for name in ["a", "c"] {
            transport.register_host(name, None).expect("room");
        }
        transport.create_backend(&spec()).expect("room");
        transport.create_backend(&BackendSpec { cache_bytes: None, ..spec() }).expect("room");
        let blkdev =
            BlkdevSpec { backend: BackendId(0), host: HostId(0), export: "nbd".into(), shared: false };
        transport.create_blkdev(&blkdev).expect("room");
        transport.region.memory().fail_stores_after(0);
        assert_eq!(kind(call(&transport)), Some(ErrorKind::Media));
    }
}

/// Makes both slots of a row invalid.
fn lose<T: SlotContent>(transport: &Tested, area: u64, rows: u32, row: u32) {
    for at in slots::<T>(area, rows, row) {
        let _ = transport.region.store(at + 20, &[0xff; 4]);
    }
}

#[test]
fn a_lost_backend_is_named_as_such_while_anything_shows_that_there_was_one() {
    let transport = transport();
    let layout = transport.layout();
    transport.create_backend(&spec()).expect("room");
    transport.create_backend(&BackendSpec { cache_bytes: None, ..spec() }).expect("room");
    lose::<BackendRow>(&transport, layout.backend_area, 4, 0);
    lose::<BackendRow>(&transport, layout.backend_area, 4, 1);
    let found = reopened(&transport);
    assert_eq!(kind(found.backend(BackendId(0))), Some(ErrorKind::Damaged));
    assert_eq!(kind(found.backend(BackendId(1))), Some(ErrorKind::NotFound), "nothing names it");
    assert_eq!(found.info().free_segments, layout.segment_count - 9, "its segments are kept");
    let next = found.create_backend(&BackendSpec { cache_bytes: None, ..spec() }).expect("room");
    assert_eq!(next, BackendId(2), "lost rows are not used again");
    // With so many lost segment rows, all segments of a cache may be among them.
    for (lost, expected) in [(8, ErrorKind::NotFound), (9, ErrorKind::Damaged)] {
        let transport = reopened(&transport);
        (0..lost).for_each(|row| {
            lose::<SegmentEntry>(&transport, layout.segment_table, layout.segment_count, row);
        });
        let entry = slots::<SegmentEntry>(layout.segment_table, layout.segment_count, 8);
        if lost == 8 {
            entry.into_iter().for_each(|at| drop(transport.region.store(at, &[0; 64])));
        }
        let found = reopened(&transport);
        assert_eq!(kind(found.backend(BackendId(0))), Some(expected), "{lost} lost rows");
        assert_eq!(found.info().free_segments, layout.segment_count - lost);
    }
}

#[test]
fn a_lost_backend_on_which_a_blkdev_stands_is_named_too() {
    let transport = transport();
    let layout = transport.layout();
    transport.create_backend(&BackendSpec { cache_bytes: None, ..spec() }).expect("room");
    let blkdev = BlkdevSpec { backend: BackendId(0), host: HostId(0), export: "nbd".into(), shared: false };
    transport.create_blkdev(&blkdev).expect("room");
    lose::<BackendRow>(&transport, layout.backend_area, 4, 0);
    assert_eq!(kind(reopened(&transport).backend(BackendId(0))), Some(ErrorKind::Damaged));
    transport.remove_blkdev(BlkdevId(0)).expect("it is there");
    assert_eq!(kind(reopened(&transport).backend(BackendId(0))), Some(ErrorKind::NotFound));
    lose::<BlkdevRow>(&transport, layout.blkdev_area, 4, 0);
    assert_eq!(reopened(&transport).lost_blkdevs(), [BlkdevId(0)]);
}

#[test]
fn rows_of_which_a_crash_left_one_slot_are_completed_when_the_region_is_opened() {
    let transport = formatted(true);
    let layout = transport.layout();
    transport.register_host("a", None).expect("room");
    transport.create_backend(&spec()).expect("room");
    let blkdev = BlkdevSpec { backend: BackendId(0), host: HostId(0), export: "nbd".into(), shared: false };
    transport.create_blkdev(&blkdev).expect("room");
    let rows = layout.segment_area - layout.host_area;
    let sync = Op::Sync(layout.host_area, rows);
    let syncs = |transport: &Tested| ops(transport).iter().filter(|op| **op == sync).count();
    assert_eq!(syncs(&reopened(&transport)), 1, "nothing is behind");
    for (places, length) in [
        (slots::<HostRow>(layout.host_area, 4, 0), 256),
        (slots::<BackendRow>(layout.backend_area, 4, 0), 1024),
        (slots::<BlkdevRow>(layout.blkdev_area, 4, 0), 512),
        (slots::<SegmentEntry>(layout.segment_table, layout.segment_count, 3), 64),
    ] {
        let one = reopened(&transport);
        let _ = one.region.store(places[0], &vec![0; length]);
        let two = reopened(&one);
        let all = ops(&two);
        assert!(all.contains(&Op::Store(places[0], length as u64)), "{places:?}");
        assert_eq!(all.iter().filter(|op| **op == sync).count(), 2, "{places:?}");
        assert!(all.contains(&Op::WriteBack(places[1], length as u64)));
    }
}

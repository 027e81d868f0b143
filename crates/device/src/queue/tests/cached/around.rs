//! Changes that go past the cache, and a queue that ends while they are on their way.

use super::*;
use cbd_engine::{CacheMode, WhenFull};

/// A rig in whose cache this mode is in force.
fn rig(cache_mode: CacheMode) -> Rig {
    let rig = rig_with(DEVICE, Settings { cache_mode, ..Settings::default() });
    rig.make_room();
    assert!(!rig.cache.status().is_changing_mode);
    rig
}

#[test]
fn a_write_goes_to_the_disk_and_a_fua_write_waits_for_its_flush() {
    for fua in [false, true] {
        let mut rig = rig(CacheMode::Writearound);
        rig.submit(Request { fua, ..write(1, 0, BLOCK, 1) });
        assert_eq!((rig.asked(), rig.completed()), (vec![("write", 0, BLOCK)], vec![]));
        if fua {
            assert_eq!(rig.poll(), [], "the disk has it, and may lose it");
            rig.make_room();
        }
        assert_eq!(rig.poll(), [(1, None)]);
    }
}

#[test]
fn a_queue_that_ends_first_gets_back_what_it_has_sent_past_the_cache() {
    let mut rig = rig(CacheMode::Writearound);
    let device = Arc::new(Device::cached(Arc::clone(&rig.cache), rig.geometry));
    let bell = Arc::new(Bell::default());
    let mut second = Queue::new(device, disk(), Waker::from(Arc::clone(&bell)));
    rig.submit(write(1, 0, BLOCK, 1));
    second.submit(write(2, 0, BLOCK, 2), &mut rig.done);
    assert_eq!(second.backing.asked, [], "the first one is on its way to the same block");
    let rings = bell.0.load(Ordering::Relaxed);
    drop(core::mem::replace(&mut rig.queue, second));
    assert!(bell.0.load(Ordering::Relaxed) > rings);
    assert_eq!(rig.poll(), []);
    assert_eq!((rig.asked(), rig.poll()), (vec![("write", 0, BLOCK)], vec![(2, None)]));
}

/// A rig with these settings, whose cache has room.
fn rig_set(change: fn(&mut Settings)) -> Rig {
    let mut settings = Settings::default();
    change(&mut settings);
    let rig = rig_with(DEVICE, settings);
    rig.make_room();
    rig
}

/// Writes blocks one behind the other; returns those that the disk got.
fn write_stream(rig: &mut Rig, blocks: core::ops::Range<u64>, submit: fn(&mut Rig, Request)) -> Vec<u64> {
    let mut sent = Vec::new();
    for block in blocks {
        submit(rig, write(block, block * BLOCK, BLOCK, 1));
        let asked = rig.asked();
        assert!(asked.is_empty() || asked == [("write", block * BLOCK, BLOCK)], "{asked:?}");
        sent.extend(asked.iter().map(|(_, at, _)| at / BLOCK));
        assert_eq!(rig.poll(), [(block, None)]);
    }
    sent
}

#[test]
fn a_sequential_stream_of_writes_goes_to_the_disk_behind_its_cutoff() {
    let submits: [fn(&mut Rig, Request); 2] = [Rig::submit, Rig::plug];
    for submit in submits {
        let mut rig = rig_set(|settings| settings.sequential_write_cutoff = 4 * BLOCK);
        assert_eq!(write_stream(&mut rig, 0..8, submit), [4, 5, 6, 7]);
        assert_eq!(rig.past(BypassReason::Sequential), 4 * BLOCK);
        let fua = Request { fua: true, ..write(8, 8 * BLOCK, BLOCK, 1) };
        submit(&mut rig, fua);
        assert_eq!((rig.poll(), rig.asked()), (vec![(8, None)], vec![]), "it need not wait for a flush");
        submit(&mut rig, write(9, 40 * BLOCK, BLOCK, 1));
        assert_eq!((rig.poll(), rig.asked()), (vec![(9, None)], vec![]), "another place");
        // The open epoch has no order, the closed one has.
        submit(&mut rig, write(10, 9 * BLOCK, BLOCK, 1));
        assert_eq!(
            (rig.poll(), rig.asked()),
            (vec![(10, None)], vec![]),
            "the epoch of the FUA write is not drained"
        );
        assert_eq!(rig.cache.status().refused_bypass_bytes, BLOCK);
        rig.make_room();
        assert_eq!(write_stream(&mut rig, 10..11, submit), [10]);
    }
}

#[test]
fn writes_from_the_memory_of_a_caller_go_past_the_cache_as_well() {
    let mut rig = rig_set(|settings| settings.sequential_write_cutoff = 2 * BLOCK);
    let data = [3; BLOCK as usize];
    let mut results = Vec::new();
    for block in 0..4 {
        let result = rig.queue.write_from(block, ByteRange::at(block * BLOCK, BLOCK), &data, false);
        results.push(result.is_some());
    }
    assert_eq!(results, [true, true, false, false]);
    assert_eq!((rig.asked().len(), rig.poll()), (2, vec![(2, None), (3, None)]));
}

#[test]
fn what_the_disk_refuses_of_a_change_by_choice_is_cached() {
    let mut rig = rig_set(|settings| settings.sequential_write_cutoff = BLOCK);
    let first = BAD / BLOCK;
    rig.submit(write(0, BAD, BLOCK, 1));
    // Several pieces, the first of which is on the way when it fails.
    rig.submit(write(1, BAD + BLOCK, 8 * BLOCK, 1));
    let sent: Vec<_> = rig.asked().iter().map(|(_, at, _)| at / BLOCK).collect();
    assert_eq!(sent, [first + 1, first + 5]);
    assert_eq!((rig.poll(), rig.asked()), (vec![(0, None), (1, None)], vec![]));
    let status = rig.cache.status();
    assert_eq!((status.dirty_bytes, rig.past(BypassReason::Sequential)), (9 * BLOCK, 0));
}

#[test]
fn writes_go_past_a_slow_cache_and_try_it_again() {
    let mut rig = rig_set(|settings| settings.congestion_write_us = 1000);
    rig.pass_time(4_000);
    let sent = write_stream(&mut rig, 0..6, Rig::submit);
    assert_eq!(sent, [3, 4, 5], "4 ms count for an eighth");
    assert_eq!(rig.past(BypassReason::Congested), 3 * BLOCK);
    rig.pass_time(0);
    rig.environment.now_us.fetch_add(100_000, Ordering::Relaxed);
    assert_eq!(write_stream(&mut rig, 6..9, Rig::submit), [7, 8], "one write was measured");
}

#[test]
fn misses_of_a_slow_cache_are_not_recorded() {
    let mut rig = rig_set(|settings| settings.congestion_read_us = 1000);
    rig.pass_time(8_000);
    for block in 0..3 {
        rig.submit(read(block, 2 * block * BLOCK, BLOCK));
        rig.poll();
        rig.poll();
    }
    let filled = rig.cache.status().filled_bytes;
    assert_eq!((filled, rig.past(BypassReason::Congested)), (BLOCK, 2 * BLOCK));
}

fn marked(request: Request) -> Request {
    Request { class: Class::Metadata, ..request }
}

#[test]
fn metadata_does_not_go_past_the_cache_by_choice() {
    let mut rig = rig_set(|settings| settings.sequential_write_cutoff = BLOCK);
    for block in 0..6 {
        rig.submit(marked(write(block, block * BLOCK, BLOCK, 1)));
        rig.plug(marked(write(8 + block, (8 + block) * BLOCK, BLOCK, 1)));
    }
    assert_eq!((rig.asked(), rig.past(BypassReason::Sequential)), (vec![], 0));
    rig.cache
        .set_settings(Settings {
            congestion_write_us: 1000,
            congestion_read_us: 1000,
            ..rig.cache.settings()
        })
        .expect("valid");
    rig.pass_time(8_000);
    for block in 0..3 {
        rig.submit(marked(write(block, 2 * block * BLOCK, BLOCK, 1)));
        rig.submit(marked(read(3 + block, (40 + 2 * block) * BLOCK, BLOCK)));
        rig.poll();
        rig.poll();
    }
    let filled = rig.cache.status().filled_bytes;
    assert_eq!((filled, rig.past(BypassReason::Congested)), (3 * BLOCK, 0));
}

#[test]
fn requests_without_a_class_have_that_of_the_blkdev() {
    let mut rig = rig_set(|settings| settings.sequential_write_cutoff = BLOCK);
    rig.queue.class.set(Class::Metadata);
    let data = vec![1; BLOCK as usize];
    for block in 0..6 {
        rig.submit(write(block, block * BLOCK, BLOCK, 1));
        rig.plug(write(8 + block, (8 + block) * BLOCK, BLOCK, 1));
        let range = ByteRange::at((16 + block) * BLOCK, BLOCK);
        assert!(rig.queue.write_from(block, range, &data, false).is_some());
    }
    rig.poll();
    assert_eq!((rig.asked(), rig.cache.status().metadata_bytes), (vec![], 18 * BLOCK));
    let mut out = vec![0; BLOCK as usize];
    rig.submit(read(1, 40 * BLOCK, BLOCK));
    assert!(rig.queue.read_into(2, ByteRange::at(50 * BLOCK, BLOCK), &mut out).is_none());
    rig.poll();
    rig.poll();
    assert_eq!(rig.cache.status().metadata_bytes, 20 * BLOCK);
    rig.queue.class.set(Class::Unmarked);
    rig.submit(write(1, 4 * BLOCK, BLOCK, 1));
    rig.poll();
    assert_eq!(rig.cache.status().metadata_bytes, 19 * BLOCK, "other data in the place of metadata");
}

/// Fills the cache with clean data, and then the room that is left with dirty data of the open epoch.
fn full_rig() -> (Rig, u64) {
    let mut rig = rig_set(|settings| settings.when_full = WhenFull::Around);
    for block in 0..2 * 17 * 16 {
        rig.submit(write(block, block * BLOCK, BLOCK, 1));
        if rig.queue.waiting.is_empty() {
            rig.poll();
            continue;
        }
        return (rig, block);
    }
    panic!("the cache never becomes full");
}

#[test]
fn a_write_that_finds_the_cache_full_goes_around_if_the_disk_is_sooner() {
    let (mut rig, waiting) = full_rig();
    assert_eq!(rig.past(BypassReason::Full), 0, "no time has passed");
    let far = DEVICE / BLOCK / 4;
    rig.environment.now_us.fetch_add(5_000, Ordering::Relaxed);
    rig.submit(write(9000, far * BLOCK, BLOCK, 1));
    assert_eq!(rig.asked(), [("write", far * BLOCK, BLOCK)], "waited {waiting}");
    rig.submit(write(9001, (far + 1) * BLOCK, BLOCK, 1));
    assert_eq!(rig.asked(), [], "the first one measures the disk");
    assert_eq!(rig.poll(), [(9000, None)]);
    let followed = [("write", waiting * BLOCK, BLOCK), ("write", (far + 1) * BLOCK, BLOCK)];
    assert_eq!(rig.asked(), followed, "it is measured, and those that wait go, too");
    assert_eq!(rig.poll(), [(waiting, None), (9001, None)]);
    rig.submit(write(9002, 0, BLOCK, 1));
    assert_eq!((rig.asked(), rig.poll()), (vec![], vec![]), "the range is dirty");
    rig.make_room();
    assert_eq!((rig.poll(), rig.past(BypassReason::Full)), (vec![(9002, None)], 3 * BLOCK));
}

#[test]
fn a_write_that_waits_while_the_mode_changes_goes_past_the_cache() {
    let mut rig = rig_set(|settings| settings.sequential_write_cutoff = BLOCK);
    write_stream(&mut rig, 0..1, Rig::submit);
    rig.make_room();
    rig.submit(write(1, BLOCK, BLOCK, 1));
    assert_eq!(rig.asked(), [("write", BLOCK, BLOCK)]);
    // It waits for the one that is on its way to the disk.
    rig.submit(Request { fua: true, ..write(2, BLOCK, BLOCK, 2) });
    let settings = Settings { cache_mode: CacheMode::Writethrough, ..rig.cache.settings() };
    rig.cache.set_settings(settings).expect("the region is ready");
    assert!(!rig.cache.status().is_changing_mode, "nothing is dirty");
    assert_eq!((rig.poll(), rig.asked()), (vec![(1, None)], vec![("write", BLOCK, BLOCK)]));
    assert_eq!(
        (rig.poll(), rig.cache.status().dirty_records),
        (vec![], 0),
        "it waits for a flush of the disk"
    );
    rig.make_room();
    assert_eq!(rig.poll(), [(2, None)]);
}

#[test]
fn writes_behind_the_end_of_a_stream_are_cached() {
    let mut rig = rig_set(|settings| settings.sequential_write_cutoff = 4 * BLOCK);
    write_stream(&mut rig, 0..64, Rig::submit);
    let past = rig.past(BypassReason::Sequential);
    for id in 100..110 {
        rig.submit(write(id, (id % 10 + 50) * BLOCK, BLOCK, 2));
        assert_eq!((rig.asked(), rig.poll()), (vec![], vec![(id, None)]));
    }
    assert_eq!(rig.past(BypassReason::Sequential), past);
}

#[test]
fn what_the_disk_refuses_of_a_client_that_is_gone_is_not_cached() {
    let mut rig = rig_set(|settings| settings.sequential_write_cutoff = BLOCK);
    rig.submit(write(0, BAD, BLOCK, 1));
    rig.submit(write(1, BAD + BLOCK, BLOCK, 1));
    rig.queue.give_up(&mut rig.done);
    assert_eq!(rig.poll(), [(0, None), (1, Some(ErrorKind::Stopped))]);
    assert_eq!((rig.poll(), rig.queue.parked(), rig.cache.status().dirty_bytes), (vec![], 0, BLOCK));
}

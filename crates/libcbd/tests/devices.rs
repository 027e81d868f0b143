//! Devices: written data is read back, by any number of threads, through calls and queues, however full the
//! cache is.

mod support;

use cbd::{
    AlignedBuffer, ByteRange, Completion, DRAIN_TIMEOUT, Device, DeviceOptions, Error, ErrorKind, Operation,
    Queue, Region, Request, Settings,
};
use std::ops::ControlFlow;
use std::time::Duration;
use support::{BLOCK, MIB, Place, pattern, version};

const LIMIT: Option<Duration> = Some(Duration::from_secs(60));

fn place_of(block: u64) -> u64 {
    block * BLOCK as u64
}

#[track_caller]
fn read(device: &Device, block: u64) -> Vec<u8> {
    let mut bytes = vec![0xee; BLOCK];
    device.read_at(&mut bytes, place_of(block)).unwrap();
    bytes
}

/// Waits for all requests in flight.
#[track_caller]
fn settle(queue: &mut Queue) -> Vec<Completion> {
    let mut done = Vec::new();
    queue.wait(&mut done, usize::MAX, LIMIT).unwrap();
    assert_eq!(queue.in_flight(), 0, "not all completed in time");
    done
}

#[test]
fn handles_are_send_and_sync() {
    fn shared<T: Send + Sync>() {}
    fn sent<T: Send>() {}
    shared::<Region>();
    shared::<Device>();
    sent::<Queue>();
}

#[test]
fn reads_combine_data_of_the_disk_and_of_the_cache() {
    let place = Place::new();
    std::fs::write(
        place.disk(),
        [pattern(0, 1), pattern(1, 1), vec![0; (16 * MIB) as usize - 2 * BLOCK]].concat(),
    )
    .unwrap();
    let (_region, device) = place.cached(8 * MIB);
    assert_eq!(version(0, &read(&device, 0)), 1);
    device.write_at(&pattern(1, 2), place_of(1)).unwrap();
    // Half of the range is in the cache, half of it on the disk.
    let mut both = vec![0; 2 * BLOCK];
    device.read_at(&mut both, 0).unwrap();
    assert_eq!((version(0, &both[..BLOCK]), version(1, &both[BLOCK..])), (1, 2));
    assert_eq!(place.on_disk(2), vec![0; BLOCK]);
}

#[test]
fn threads_that_write_more_than_the_cache_holds_wait_for_space_and_lose_nothing() {
    let place = Place::new();
    let (_region, device) = place.cached(MIB);
    const THREADS: u64 = 4;
    let blocks = 16 * MIB / BLOCK as u64;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let device = &device;
            scope.spawn(move || {
                for round in 1..=2 {
                    for block in (thread..blocks).step_by(THREADS as usize) {
                        device.write_at(&pattern(block, round), place_of(block)).unwrap();
                    }
                }
            });
        }
    });
    for block in 0..blocks {
        assert_eq!(version(block, &read(&device, block)), 2, "block {block}");
    }
    let written = device.status().unwrap().written_bytes;
    assert_eq!(written, 2 * 16 * MIB);
}

#[test]
fn a_queue_completes_each_of_many_requests_once() {
    let place = Place::new();
    let (_region, device) = place.cached(MIB);
    let mut queue = device.queue().unwrap();
    let blocks = 2048;
    for block in 0..blocks {
        queue.write_at(block, &pattern(block, 7), place_of(block), block % 64 == 0).unwrap();
    }
    let mut seen: Vec<u64> = settle(&mut queue)
        .into_iter()
        .map(|done| {
            done.result.unwrap();
            done.id
        })
        .collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..blocks).collect::<Vec<_>>());
    for block in 0..blocks {
        let range = ByteRange::at(place_of(block), BLOCK as u64);
        let buffer = AlignedBuffer::zeroed(BLOCK);
        queue.submit(Request::unmarked(block, Operation::Read, range, false, buffer)).unwrap();
    }
    let done = settle(&mut queue);
    assert_eq!(done.len() as u64, blocks);
    for done in done {
        done.result.unwrap();
        assert_eq!(version(done.id, &done.buffer), 7);
    }
}

#[test]
fn a_wait_ends_with_enough_completions_or_at_its_timeout() {
    let place = Place::new();
    let (_region, device) = place.cached(8 * MIB);
    let mut queue = device.queue().unwrap();
    let mut done = Vec::new();
    queue.wait(&mut done, 1, None).unwrap();
    assert!(done.is_empty(), "nothing is in flight, so there is nothing to wait for");
    for block in 0..8 {
        queue.write_at(block, &pattern(block, 1), place_of(block), false).unwrap();
    }
    queue.wait(&mut done, 1, LIMIT).unwrap();
    assert_eq!(done.len(), 8, "all of these are complete when they are submitted");
    assert_eq!(queue.wait_descriptors().len(), 2);
}

#[test]
fn zeroes_and_discards_read_as_zeroes_and_reach_the_disk() {
    let place = Place::new();
    std::fs::write(place.disk(), vec![9; (16 * MIB) as usize]).unwrap();
    let (_region, device) = place.cached(8 * MIB);
    device.write_at(&pattern(1, 1), place_of(1)).unwrap();
    device.write_zeroes(0, 2 * BLOCK as u64).unwrap();
    assert!(device.geometry().discard, "a file frees space, and it reads as zeroes");
    device.discard(place_of(4), BLOCK as u64).unwrap();
    for block in [0, 1, 4] {
        assert_eq!(read(&device, block), vec![0; BLOCK], "block {block}");
    }
    assert_eq!(read(&device, 5), vec![9; BLOCK]);
    device.flush().unwrap();
    device.drain(DRAIN_TIMEOUT, &mut |_| ControlFlow::Continue(())).unwrap();
    for block in [0, 1, 4] {
        assert_eq!(place.on_disk(block), vec![0; BLOCK], "block {block}");
    }
}

#[test]
fn a_range_outside_the_device_is_refused_and_changes_nothing() {
    let place = Place::new();
    let (_region, device) = place.cached(8 * MIB);
    let cases = [
        (device.write_at(&[1; 512], 16 * MIB), ErrorKind::OutOfRange),
        (device.write_at(&[1; 512], u64::MAX - 100), ErrorKind::OutOfRange),
        (device.write_at(&[1; 512], 100), ErrorKind::InvalidArgument),
        (device.write_at(&[1; 100], 0), ErrorKind::InvalidArgument),
        (device.read_at(&mut [1; 100], 0), ErrorKind::InvalidArgument),
        (device.discard(0, 16 * MIB + 512), ErrorKind::OutOfRange),
        (device.write_zeroes(512, u64::MAX), ErrorKind::OutOfRange),
    ];
    for (place, (result, kind)) in cases.into_iter().enumerate() {
        assert_eq!(result.unwrap_err().kind(), kind, "case {place}");
    }
    assert_eq!(device.status().unwrap().dirty_records, 0);
    device.write_at(&[], 0).unwrap();
}

#[test]
fn a_drain_writes_everything_to_the_disk_and_can_be_cancelled() {
    let place = Place::new();
    let (_region, device) = place.cached(8 * MIB);
    // Slow enough that it is not drained before the request.
    device.set_settings(Settings { writeback_rate: 1 << 20, ..device.settings() }).unwrap();
    for block in 0..512 {
        device.write_at(&pattern(block, 3), place_of(block)).unwrap();
    }
    let ended = device
        .drain(DRAIN_TIMEOUT, &mut |_| ControlFlow::Break(Error::new(ErrorKind::TimedOut, "enough")))
        .unwrap_err();
    assert_eq!(ended.line(), "enough");
    device.set_settings(Settings { writeback_rate: 0, ..device.settings() }).unwrap();
    device.drain(DRAIN_TIMEOUT, &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(device.status().unwrap().dirty_bytes, 0);
    for block in 0..512 {
        assert_eq!(version(block, &place.on_disk(block)), 3);
    }
}

#[test]
fn settings_persist_across_a_close_and_invalid_ones_are_refused() {
    let place = Place::new();
    let (region, device) = place.cached(8 * MIB);
    let settings = Settings { gc_percent: 55, writeback_rate: 123 << 20, ..device.settings() };
    device.set_settings(settings).unwrap();
    let error = device.set_settings(Settings { gc_percent: 99, ..settings }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let error = device.set_settings(Settings { writeback_rate: 32767, ..settings }).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.line().contains("32K is the least"), "{error}");
    let id = device.id();
    device.close().unwrap();
    assert_eq!(region.open_device(id).unwrap().settings(), settings);
}

#[test]
fn a_detached_disk_is_a_plain_disk_with_all_its_data_and_its_space_is_free_again() {
    let place = Place::new();
    let (region, device) = place.cached(8 * MIB);
    let free = region.info().free_bytes;
    for block in 0..256 {
        device.write_at(&pattern(block, 5), place_of(block)).unwrap();
    }
    device.detach(DRAIN_TIMEOUT).unwrap();
    for block in 0..256 {
        assert_eq!(version(block, &place.on_disk(block)), 5);
    }
    assert!(region.backends().is_empty());
    assert_eq!(region.info().free_bytes, free + 8 * MIB);
}

#[test]
fn a_device_with_open_queues_is_not_detached_and_ends_with_the_last_of_them() {
    let place = Place::new();
    let (region, device) = place.cached(8 * MIB);
    let mut queue = device.queue().unwrap();
    let (device, error) = device.detach(DRAIN_TIMEOUT).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert_eq!(device.unwrap().close().unwrap_err().kind(), ErrorKind::Busy);
    queue.write_at(1, &pattern(0, 1), 0, false).unwrap();
    settle(&mut queue).pop().unwrap().result.unwrap();
    assert_eq!(region.users(), 1);
    drop(queue);
    assert_eq!(region.users(), 0);
}

#[test]
fn a_disk_without_a_cache_is_written_at_once() {
    let place = Place::new();
    let region = place.format();
    let device = region
        .attach(place.disk(), &DeviceOptions { cache_size: Some(0), ..DeviceOptions::default() })
        .unwrap();
    device.write_fua_at(&pattern(3, 1), place_of(3)).unwrap();
    assert_eq!(version(3, &place.on_disk(3)), 1);
    assert_eq!(version(3, &read(&device, 3)), 1);
    device.flush().unwrap();
    assert!(device.status().is_none());
    assert_eq!(device.set_settings(Settings::default()).unwrap_err().kind(), ErrorKind::InvalidArgument);
    device.detach(DRAIN_TIMEOUT).unwrap();
}

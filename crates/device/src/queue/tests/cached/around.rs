//! Changes that go past the cache, and a queue that ends while they are on their way.

use super::*;
use cbd_engine::CacheMode;

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

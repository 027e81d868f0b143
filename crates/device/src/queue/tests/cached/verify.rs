//! Verifications of a queue with a cache: what the disk is asked for, what is repaired, and what is left behind.

use super::*;
use cbd_types::{Finding, Flaw, Verified, Verify, VerifyLevel};

/// The block that is cached, and what it and the disk have.
const CACHED: u64 = 8 * BLOCK;
const VALUE: u8 = 7;

/// A rig with one clean block whose copy in the cache is damaged.
fn damaged() -> Rig {
    let mut rig = rig();
    rig.submit(write(0, CACHED, BLOCK, VALUE));
    rig.make_room();
    assert_eq!(rig.completed(), [(0, None)]);
    let lane = (0..2).find(|lane| !rig.cache.log().segments(LaneId(*lane)).is_empty()).expect("one has it");
    let base = rig.cache.log().segments(LaneId(lane))[0].base;
    let _ = rig.transport.region().store(base + SEGMENT - 4096 - BLOCK + 100, &[VALUE + 2]);
    rig
}

fn verify(rig: &mut Rig, level: VerifyLevel) {
    rig.queue.verify(5, Verify { range: ByteRange::at(0, 16 * BLOCK), level, repair: false });
}

/// The result, after as many polls as it takes.
fn verified(rig: &mut Rig) -> Verified {
    for _ in 0..100 {
        rig.poll();
        if let Some((id, result)) = rig.queue.take_verified().pop() {
            assert_eq!(id, 5);
            return result.expect("it was looked at");
        }
    }
    panic!("the verification does not end");
}

/// Polls until the disk is asked to repair the cache.
fn until_repairing(rig: &mut Rig) {
    for _ in 0..100 {
        rig.poll();
        if rig.pending_fills() > 0 {
            return;
        }
    }
    panic!("the damage is not found");
}

#[test]
fn a_damaged_copy_is_read_from_the_disk_and_recorded_again() {
    let mut rig = damaged();
    verify(&mut rig, VerifyLevel::Newest);
    let result = verified(&mut rig);
    let expected = Finding { range: ByteRange::at(CACHED, BLOCK), flaw: Flaw::CacheDamaged, repaired: true };
    assert_eq!((result.findings, result.error.is_none()), (vec![expected], true));
    assert_eq!(rig.pending_fills(), 0);
    rig.asked();
    let mut read = [0; BLOCK as usize];
    let outcome = rig.queue.read_into(6, ByteRange::at(CACHED, BLOCK), &mut read);
    assert!(matches!(outcome, Some(Ok(()))) && read == [VALUE; BLOCK as usize]);
    assert_eq!(rig.asked(), [], "the cache has it");
}

#[test]
fn only_what_the_disk_alone_has_is_left_to_the_disk_to_verify() {
    for level in [VerifyLevel::Newest, VerifyLevel::All, VerifyLevel::Agree] {
        let mut rig = rig();
        rig.submit(write(0, CACHED, BLOCK, VALUE));
        rig.make_room();
        rig.completed();
        verify(&mut rig, level);
        assert_eq!(verified(&mut rig).findings, []);
        let asked = rig.asked();
        assert!(asked.iter().all(|(what, ..)| ["verify", "read"].contains(what)), "{asked:?}");
        let of_cached = |(_, at, length): &&(&str, u64, u64)| (*at..at + length).contains(&CACHED);
        let of_cached: Vec<_> = asked.iter().filter(of_cached).map(|(what, ..)| *what).collect();
        let expected: &[&str] = match level {
            VerifyLevel::Newest => &[],
            VerifyLevel::All => &["verify"],
            VerifyLevel::Agree => &["read"],
        };
        assert_eq!(of_cached, expected, "{level:?}: {asked:?}");
    }
}

#[test]
fn a_queue_that_ends_cancels_the_read_that_is_to_repair_the_cache() {
    let mut rig = damaged();
    rig.queue.backing.is_hung = true;
    verify(&mut rig, VerifyLevel::Newest);
    until_repairing(&mut rig);
    let Rig { cache, queue, .. } = rig;
    drop(queue);
    let pending: usize = (0..2).map(|lane| cache.log().pending_fills(LaneId(lane))).sum();
    assert_eq!(pending, 0);
}

#[test]
fn a_verification_that_is_given_up_ends_once_and_leaves_no_fill() {
    let mut rig = damaged();
    rig.queue.backing.is_hung = true;
    verify(&mut rig, VerifyLevel::Newest);
    until_repairing(&mut rig);
    rig.queue.give_up(&mut rig.done);
    rig.queue.backing.is_hung = false;
    for _ in 0..4 {
        rig.poll();
    }
    let ended: Vec<_> = rig.queue.take_verified();
    assert!(matches!(&ended[..], [(5, Err(error))] if error.kind() == ErrorKind::Stopped), "{ended:?}");
    assert_eq!(rig.pending_fills(), 0);
}

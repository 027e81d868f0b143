//! Requests that a queue returns as if they had not been submitted.

use super::*;
use cbd_types::TakeBack;

/// Nothing that has begun.
fn none() -> TakeBack<'static> {
    TakeBack { begun_writes: false, is_given_up: &|_| false }
}

#[test]
fn requests_of_which_nothing_was_done_are_returned() {
    let mut rig = rig();
    let id = rig.fill_up();
    rig.submit(read(5, 0, BLOCK));
    // The first of its lanes has space.
    rig.submit(request(Operation::WriteZeroes, 0, DEVICE, false));
    rig.submit(request(Operation::WriteZeroes, CHUNK, BLOCK, false));
    rig.plug(write(78, 0, BLOCK, 5));
    let mut returned = Vec::new();
    rig.queue.take_back(none(), &mut returned);
    let returned: Vec<_> = returned.into_iter().map(|request| (request.id, request.range.start)).collect();
    assert_eq!((returned.len(), returned[0], returned[1].0), (3, (78, 0), id), "{returned:?}");
    assert_eq!(returned[2].1, CHUNK);
    assert_eq!(rig.queue.changes(), 1, "what was done in part stays");
    let mut zeroes = Vec::new();
    rig.queue.take_back(TakeBack { begun_writes: true, ..none() }, &mut zeroes);
    assert!(zeroes.is_empty(), "zeroes keep their progress");
    assert!(rig.cache.status().writers_waiting);
    let mut returned = Vec::new();
    let given_up = TakeBack { begun_writes: false, is_given_up: &|id| id == 9 };
    rig.queue.take_back(given_up, &mut returned);
    assert_eq!((returned.len(), returned[0].id, rig.queue.changes()), (1, 9, 0));
    assert!(!rig.cache.status().writers_waiting, "no client waits for space any more");
    rig.make_room();
    assert_eq!(
        rig.poll().into_iter().map(|(done, _)| done).collect::<Vec<_>>(),
        [5],
        "they do not happen later"
    );
}

#[test]
fn a_write_of_which_a_part_was_done_is_returned_only_where_no_one_sees_that() {
    let mut rig = rig();
    // The first lane has a segment with space, the second one gets all others.
    rig.submit(write(0, 0, BLOCK, 1));
    for id in 100.. {
        rig.submit(write(id, CHUNK + id % 512 * BLOCK, BLOCK, 1));
        if !rig.queue.waiting.is_empty() {
            break;
        }
    }
    rig.submit(write(78, CHUNK - BLOCK, 2 * BLOCK, 5));
    let has_begun = |parked: &Parked| parked.request.id == 78 && parked.has_begun();
    assert!(rig.queue.parked.iter().any(has_begun), "the first lane had space");
    let mut returned = Vec::new();
    rig.queue.take_back(none(), &mut returned);
    assert!(!returned.iter().any(|request| request.id == 78));
    rig.queue.take_back(TakeBack { begun_writes: true, ..none() }, &mut returned);
    assert!(returned.iter().any(|request| request.id == 78));
    assert_eq!((rig.queue.parked(), rig.cache.status().writers_waiting), (0, false));
}

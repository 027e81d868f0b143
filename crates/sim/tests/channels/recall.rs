//! Requests that wait for space on the server, and that the client takes back.

use super::*;

const BLOCK: u64 = 4096;

fn write(rig: &mut Rig, id: u64, block: u64) {
    rig.submit(id, Operation::Write, ByteRange::at(block * BLOCK, BLOCK));
}

fn read(rig: &mut Rig, id: u64, block: u64) {
    rig.submit(id, Operation::Read, ByteRange::at(block * BLOCK, BLOCK));
}

/// Sends back all that the server has taken, if its client asks for that.
fn answer(rig: &mut Rig) -> Vec<u64> {
    for _ in 0..100 {
        rig.server.poll(&mut rig.taken).expect("there is memory");
    }
    if !rig.server.take_recall() {
        return Vec::new();
    }
    assert!(!rig.server.take_recall(), "it was asked once");
    let taken = std::mem::take(&mut rig.taken);
    let returned = taken.iter().map(|request| request.range.start / BLOCK).collect();
    taken.into_iter().for_each(|request| rig.server.send_back(request));
    rig.poll();
    returned
}

fn blocks(rig: &Rig) -> Vec<u64> {
    rig.taken.iter().map(|request| request.range.start / BLOCK).collect()
}

#[test]
fn requests_that_need_no_space_overtake_changes_that_wait_for_it() {
    let mut rig = Rig::new();
    for id in 0..4 {
        write(&mut rig, id, id);
    }
    assert_eq!(rig.client.blocked_by(), None, "nothing waits for a place");
    write(&mut rig, 4, 4);
    assert_eq!(rig.client.blocked_by(), None, "a write would wait for space as well");
    // This one waits for a write, and not for a place.
    read(&mut rig, 5, 2);
    assert_eq!(rig.client.blocked_by(), None);
    read(&mut rig, 6, 9);
    assert_eq!(rig.client.blocked_by(), Some(0));
    assert_eq!(answer(&mut rig), [], "the client has not asked");
    rig.client.recall();
    assert_eq!(answer(&mut rig), [0, 1, 2, 3]);
    assert_eq!((blocks(&rig), rig.client.blocked_by()), (vec![0, 9], None), "one write of four places");
    let reads = rig.taken.split_off(1);
    let writes = std::mem::replace(&mut rig.taken, reads);
    rig.complete();
    assert_eq!(rig.ended(), [(6, None)]);
    // There is space: all are executed, in order.
    rig.taken = writes;
    for block in 0..4 {
        assert_eq!(blocks(&rig)[0], block);
        let rest = rig.taken.split_off(1);
        rig.complete();
        rig.taken.splice(..0, rest);
    }
    rig.complete();
    rig.complete();
    assert_eq!(rig.ended(), [0, 1, 2, 3, 4, 5].map(|id| (id, None)));
    assert_eq!((rig.client.in_flight(), rig.client.repeated()), (0, 0));
}

#[test]
fn a_recall_is_not_repeated_while_other_requests_have_the_places() {
    let mut rig = Rig::new();
    for id in 0..4 {
        write(&mut rig, id, id);
    }
    for id in 4..8 {
        read(&mut rig, id, id);
    }
    assert_eq!(rig.client.blocked_by(), Some(0));
    rig.client.recall();
    assert_eq!(answer(&mut rig), [0, 1, 2, 3]);
    // A quarter of the places have writes again, the others have reads, and one more waits.
    assert_eq!(blocks(&rig), [0, 4, 5, 6]);
    assert_eq!(rig.client.blocked_by(), None, "none of the writes would make room for it");
    let rest = rig.taken.split_off(2);
    let reads = rig.taken.split_off(1);
    let writes = std::mem::replace(&mut rig.taken, reads);
    rig.complete();
    assert_eq!((rig.ended(), blocks(&rig)), (vec![(4, None)], vec![7]));
    rig.taken.extend(writes.into_iter().chain(rest));
    for _ in 0..4 {
        rig.complete();
    }
    assert_eq!(rig.client.in_flight(), 0);
}

#[test]
fn an_old_change_gets_a_new_entry() {
    let mut rig = Rig::new();
    write(&mut rig, 100, 50);
    let old = rig.taken.pop().expect("it was taken");
    for id in 0..15 {
        read(&mut rig, id, id);
        rig.complete();
    }
    read(&mut rig, 15, 15);
    assert_eq!((rig.taken.len(), rig.client.blocked_by()), (0, Some(0)), "its entry is that of the write");
    rig.client.recall();
    rig.taken.push(old);
    assert_eq!(answer(&mut rig), [50]);
    assert_eq!(blocks(&rig), [50, 15]);
}

#[test]
fn what_is_sent_back_stays_before_what_overlaps_it() {
    let mut rig = Rig::new();
    for id in 0..3 {
        write(&mut rig, id, 0);
    }
    assert_eq!(blocks(&rig), [0]);
    rig.client.recall();
    assert_eq!(answer(&mut rig), [0]);
    for id in 0..3 {
        assert_eq!(blocks(&rig), [0]);
        rig.complete();
        assert_eq!(rig.ended(), [(id, None)]);
    }
}

#[test]
fn requests_of_a_client_that_is_gone_are_given_up_unless_they_have_begun() {
    let mut rig = Rig::new();
    for id in 0..6 {
        write(&mut rig, id, id);
    }
    let begun = rig.taken.remove(1);
    rig.client.give_up(|id| id != 2, &mut rig.done);
    let stopped = |id| (id, Some(ErrorKind::Stopped));
    assert_eq!(rig.ended(), [4, 5].map(stopped), "the server has not seen them");
    rig.poll();
    assert_eq!([0, 1, 2, 3, 4].map(|id| rig.server.is_given_up(id)), [true, true, false, true, false]);
    assert!(rig.client.has_given_up());
    assert_eq!(answer(&mut rig), [0, 2, 3]);
    assert_eq!(rig.ended(), [0, 3].map(stopped));
    rig.taken.push(begun);
    rig.complete();
    assert_eq!((rig.ended(), blocks(&rig)), (vec![(1, None)], vec![2]));
    assert!(!rig.client.has_given_up());
    // Others that have the same data places.
    (6..9).for_each(|id| write(&mut rig, id, id));
    assert!(!(4..10).any(|id| rig.server.is_given_up(id)));
    rig.complete();
    assert_eq!(rig.ended(), [2, 6, 7, 8].map(|id| (id, None)));
    assert_eq!(rig.client.in_flight(), 0);
}

#[test]
fn a_recall_is_answered_when_all_that_was_submitted_before_it_was_taken() {
    let mut rig = Rig::new();
    for id in 0..2 {
        let (range, buffer) = (ByteRange::at(id * BLOCK, BLOCK), AlignedBuffer::zeroed(BLOCK as usize));
        rig.client.submit(Request::unmarked(id, Operation::Write, range, false, buffer), &mut rig.done);
    }
    let second = areas().client + shape().entry(1);
    let entry = store_without(&rig, second, 0);
    rig.client.recall();
    assert_eq!((answer(&mut rig), blocks(&rig)), (vec![], vec![0]));
    let memory = memory(&rig.medium, 7);
    memory.store_line(second, &entry);
    memory.publish(second, 64);
    assert_eq!(answer(&mut rig), [0, 1]);
    rig.complete();
    rig.complete();
    assert_eq!(rig.ended(), [0, 1].map(|id| (id, None)));
    // A server with another session counts from the first one.
    for id in 2..5 {
        write(&mut rig, id, id);
        rig.complete();
    }
    rig.client.recall();
    assert_eq!((answer(&mut rig), rig.ended().len()), (vec![], 3));
    write(&mut rig, 5, 5);
    damage(&rig, areas().server);
    damage(&rig, areas().server + 64);
    restart(&mut rig, 33);
    for _ in 0..100 {
        rig.server.poll(&mut rig.taken).expect("there is memory");
    }
    assert!(!rig.server.take_recall(), "the number in the header is of the former session");
    rig.poll();
    assert_eq!(answer(&mut rig), [5]);
}

#[test]
fn what_a_former_process_may_have_executed_is_not_sent_back() {
    let mut rig = Rig::new();
    write(&mut rig, 0, 0);
    write(&mut rig, 1, 1);
    rig.client.give_up(|id| id == 0, &mut rig.done);
    restart(&mut rig, 33);
    assert_eq!(answer(&mut rig), []);
    assert_eq!(blocks(&rig), [0, 1]);
    rig.complete();
    write(&mut rig, 2, 2);
    assert_eq!(answer(&mut rig), [2], "the client has asked the former process");
    rig.complete();
    assert_eq!(rig.ended(), [0, 1, 2].map(|id| (id, None)));
}

//! Hosts that die while a backend moves, at any operation on the memory.

use super::{A, B, C, CACHE, World, id, kind, withdrawn};
use cbd_engine::MoveAnswer;
use cbd_sim::until_crash;
use cbd_types::{BackendId, ErrorKind};
use std::sync::Arc;

/// Moves the backend from a to b until the operation number `operations` of host `role`, which dies then. Afterwards
/// one host has the backend, and it can be moved. Returns the host that had it, and whether the move came to its end.
fn die_while_it_moves(world: &mut World, role: usize, operations: u64) -> (usize, bool) {
    let memory = world.memory(role);
    memory.die_in(operations);
    let ended = until_crash(|| world.move_between(A, B)).is_ok();
    memory.live();
    let others = || (A..=C).filter(|host| *host != role);
    // The others continue before it joins again, or only then.
    if operations % 2 == 1 {
        if let Some(own) = world.hosts[A].own_move().filter(|_| role != A) {
            match kind(world.hosts[A].hand_over_backend(world.id(), own.to, own.number)) {
                Ok(()) | Err(ErrorKind::Stopped | ErrorKind::NotFound) => {}
                Err(other) => panic!("{other:?} after {operations} operations"),
            }
        }
        others().for_each(|host| world.recover(host));
    }
    world.join_again(role, operations ^ 0x5555);
    for _ in 0..2 {
        world.recover(role);
        others().for_each(|host| world.recover(host));
    }
    let holder = world.holder();
    world.free_segments();
    let next = (holder + 1) % 3;
    world.move_between(holder, next);
    assert_eq!(world.holder(), next, "after {operations} operations");
    world.remove_all(next);
    (holder, ended)
}

/// Host `role` dies at each operation whose number is a multiple of `step`.
fn deaths_of(role: usize, step: usize) {
    for is_coherent in [false, true] {
        let first = World::new(is_coherent, CACHE);
        let bytes = first.medium.bytes();
        let mut holders = [0, 0];
        for operations in (0..).step_by(step) {
            let mut world = first.copied(&bytes, operations);
            let (holder, ended) = die_while_it_moves(&mut world, role, operations);
            holders[holder] += 1;
            if ended {
                break;
            }
        }
        println!("host {role} dies, coherent {is_coherent}: {holders:?}");
        assert!(holders.iter().all(|count| *count > 0), "{holders:?}");
    }
}

#[test]
fn a_host_that_dies_while_it_hands_a_backend_over_leaves_it_to_one_host() {
    deaths_of(A, 23);
}

#[test]
fn a_host_that_dies_while_it_takes_a_backend_over_leaves_it_to_one_host() {
    deaths_of(B, 61);
}

#[test]
fn a_host_that_dies_while_its_blkdev_follows_a_backend_finds_it() {
    deaths_of(C, 19);
}

#[test]
fn a_host_that_dies_while_it_creates_a_backend_never_has_one_that_did_not_move() {
    let first = withdrawn();
    let bytes = first.medium.bytes();
    let mut created = [0, 0];
    for operations in (0..).step_by(19) {
        let mut world = first.copied(&bytes, operations);
        let memory = world.memory(B);
        memory.die_in(operations);
        let ended = until_crash(|| world.create_other(B, CACHE).expect("there is room")).is_ok();
        memory.live();
        world.join_again(B, operations ^ 0x5555);
        let incoming = world.hosts[B].incoming_backends(&|_| true).expect("they can be read");
        assert_eq!(incoming, [], "after {operations} operations");
        let backends = world.hosts[B].backends().expect("they are valid");
        assert!(backends.iter().all(|entry| entry.path == "/other"), "after {operations} operations");
        created[backends.len()] += 1;
        world.create_other(B, CACHE).expect("there is room");
        world.free_segments();
        if ended {
            break;
        }
    }
    println!("{created:?}");
    assert!(created[0] > 100 && created[1] > 0, "{created:?}");
}

#[test]
fn a_row_that_a_crash_left_after_the_decision_is_never_active_again() {
    let first = World::new(false, CACHE);
    let offer = first.offer(A, B);
    first.accept(&offer);
    first.hold(&offer);
    let bytes = first.medium.bytes();
    let mut left = 0;
    for operations in 0.. {
        let mut world = first.copied(&bytes, operations);
        let memory = world.memory(A);
        memory.die_in(operations);
        let handed = until_crash(|| {
            world.hosts[A].hand_over_backend(world.id(), id(B), offer.number).expect("b holds")
        });
        memory.live();
        if world.owner(B) == Some(id(B)) {
            left += u32::from(!world.hosts[B].is_released_by_others(world.id()));
            world.clear(B, C);
            assert_eq!(world.create_other(C, CACHE).expect("the number is free"), world.id());
            world.join_again(A, operations ^ 0x5555);
            assert!(world.hosts[A].backends().expect("they are valid").is_empty(), "after {operations}");
            assert!(world.hosts[A].is_released_by_others(BackendId(3)));
            world.free_segments();
        }
        if handed.is_ok() {
            break;
        }
    }
    println!("{left} rows left");
    assert!(left > 5, "{left}");
}

#[test]
fn a_process_that_follows_one_that_held_its_requests_does_not_hold_them() {
    let mut world = World::new(false, CACHE);
    let offer = world.offer(A, B);
    world.accept(&offer);
    world.hold(&offer);
    world.join_again(B, 9);
    world.hosts[B].end_former_answer().expect("it is stored");
    let refused = world.hosts[A].hand_over_backend(world.id(), id(B), offer.number);
    assert_eq!(kind(refused), Err(ErrorKind::Stopped));
    // Nor does a former process of the host that has the backend.
    let former = Arc::clone(&world.hosts[A]);
    world.join_again(A, 10);
    world.hosts[B].answer_move(world.id(), offer.number, MoveAnswer::Held).expect("it is stored");
    assert_eq!(kind(former.hand_over_backend(world.id(), id(B), offer.number)), Err(ErrorKind::Stopped));
    assert_eq!(kind(former.offer_move(world.id(), id(C), None)), Err(ErrorKind::Stopped));
    assert_eq!(kind(former.end_move(offer.number, false)), Err(ErrorKind::Stopped));
    assert_eq!(world.owner(B), Some(id(A)));
}

//! Who gets a segment, and who is woken.

use super::*;
use crate::tests::{Still, bell};

fn pool(free: u32, reserve: u32) -> Pool<Still> {
    Pool { reserve, left_by_clients: AtomicU32::new(reserve), ..of_lanes(free, 0) }
}

fn of_lanes(free: u32, lanes: u32) -> Pool<Still> {
    Pool::new((0..free).collect(), lanes)
}

/// How many segments this requester gets of a pool of 20 for 24 lanes.
fn given(requester: Requester) -> usize {
    let pool = of_lanes(20, 24);
    core::iter::from_fn(|| pool.take(requester, None).ok()).count()
}

#[test]
fn clients_leave_the_reserve_and_optional_askers_a_few_more() {
    assert_eq!(
        [Requester::Essential, Requester::Client, Requester::Frugal, Requester::Optional].map(given),
        [20, 18, 18, 15]
    );
}

#[test]
fn the_reserve_is_for_all_lanes_together_and_fills_leave_one_segment_more_for_eight_lanes() {
    let of = |lanes| {
        let pool = of_lanes(9, lanes);
        (pool.reserve(), pool.spare(), pool.left_to_writers())
    };
    assert_eq!([1, 2, 8, 9, 32].map(of), [(1, 1, 2), (2, 1, 3), (2, 1, 3), (2, 2, 4), (2, 4, 6)]);
}

#[test]
fn the_segment_that_came_back_first_is_taken_last() {
    let pool = pool(0, 0);
    [3, 1, 2].into_iter().for_each(|segment| pool.release(segment));
    assert_eq!(pool.free(), 3);
    let taken: Vec<_> = core::iter::from_fn(|| pool.take(Requester::Essential, None).ok()).collect();
    assert_eq!(taken, [3, 1, 2]);
    assert_eq!(pool.free(), 0);
}

#[test]
fn the_number_of_free_segments_is_known_without_the_lock() {
    let pool = pool(3, 1);
    assert_eq!(pool.free(), 3);
    let taken = pool.take(Requester::Client, None).expect("three are free");
    assert_eq!(pool.free(), 2);
    pool.release(taken);
    assert_eq!(pool.free(), 3);
}

#[test]
fn a_client_without_space_is_woken_once_when_the_reserve_is_whole() {
    let pool = pool(0, 2);
    let (bell, waker) = bell();
    assert!(!pool.has_waiters());
    for _ in 0..2 {
        assert_eq!(pool.take(Requester::Client, Some(&waker)), Err(Lack::Space));
    }
    assert!(pool.has_waiters());
    pool.release(0);
    assert_eq!((bell.rings(), pool.has_waiters()), (0, true), "the reserve is not whole yet");
    pool.release(1);
    assert_eq!((bell.rings(), pool.has_waiters()), (1, false));
    pool.release(2);
    assert_eq!(bell.rings(), 1);
}

#[test]
fn who_asks_without_a_waker_or_gets_a_segment_does_not_wait() {
    let pool = pool(1, 0);
    let (bell, waker) = bell();
    assert_eq!(pool.take(Requester::Client, Some(&waker)), Ok(0));
    assert_eq!(pool.take(Requester::Client, None), Err(Lack::Space));
    assert!(!pool.has_waiters());
    pool.release(0);
    assert_eq!(bell.rings(), 0);
}

#[test]
fn who_is_forgotten_is_not_woken_and_others_still_wait() {
    let pool = pool(0, 0);
    let ((first, first_waker), (second, second_waker)) = (bell(), bell());
    let _ = pool.take(Requester::Client, Some(&first_waker));
    let _ = pool.take(Requester::Client, Some(&second_waker));
    pool.forget(&first_waker);
    assert!(pool.has_waiters());
    pool.release(0);
    assert_eq!((first.rings(), second.rings()), (0, 1));
    let _ = pool.take(Requester::Essential, None);
    let _ = pool.take(Requester::Client, Some(&second_waker));
    pool.forget(&second_waker);
    assert!(!pool.has_waiters());
}

#[test]
fn all_are_woken_for_a_stop() {
    let pool = pool(0, 4);
    let ((first, first_waker), (second, second_waker)) = (bell(), bell());
    let _ = pool.take(Requester::Client, Some(&first_waker));
    let _ = pool.take(Requester::Client, Some(&second_waker));
    pool.wake_all();
    assert_eq!((first.rings(), second.rings(), pool.has_waiters()), (1, 1, false));
    pool.wake_all();
    assert_eq!((first.rings(), second.rings()), (1, 1));
}

/// How many of the pool's segments a client gets.
fn left(pool: &Pool<Still>) -> usize {
    core::iter::from_fn(|| pool.take(Requester::Essential, None).ok()).count()
}

#[test]
fn free_segments_are_given_up_at_once_but_those_that_are_left_to_writers() {
    let pool = of_lanes(10, 1);
    assert_eq!(pool.left_to_writers(), 2);
    assert_eq!(pool.give_up(5), Ok(()));
    assert_eq!((pool.free(), pool.owed()), (5, 0));
    assert_eq!(pool.take_given_up().len(), 5);
    assert_eq!(pool.give_up(7), Ok(()));
    assert_eq!((pool.free(), pool.owed()), (2, 4), "two are left to writers");
    assert_eq!((pool.take_given_up().len(), pool.owed(), left(&pool)), (3, 0, 2));
}

#[test]
fn segments_are_given_up_once_at_a_time() {
    let pool = of_lanes(10, 1);
    assert_eq!(pool.give_up(1), Ok(()));
    assert_eq!(pool.give_up(1), Err(Lack::Space), "one is given up");
    pool.take_given_up();
    assert_eq!(pool.give_up(9), Ok(()));
    assert_eq!(pool.give_up(1), Err(Lack::Space), "two are still missing");
}

#[test]
fn a_released_segment_is_given_up_while_some_are_missing_and_the_reserve_is_whole() {
    let pool = of_lanes(2, 1);
    assert_eq!((pool.reserve(), pool.give_up(1)), (1, Ok(())));
    let taken: Vec<_> = core::iter::from_fn(|| pool.take(Requester::Essential, None).ok()).collect();
    pool.release(taken[0]);
    assert_eq!((pool.free(), pool.owed()), (1, 1), "the reserve comes first");
    pool.release(taken[1]);
    assert_eq!((pool.free(), pool.owed()), (1, 0));
    assert_eq!(pool.take_given_up(), [taken[1]]);
    pool.release(taken[1]);
    assert_eq!(pool.free(), 2, "nothing is missing any more");
}

#[test]
fn each_second_released_segment_is_for_the_requests_that_wait() {
    let pool = pool(0, 1);
    assert_eq!(pool.give_up(3), Ok(()));
    let (bell, waker) = bell();
    pool.release(0);
    assert_eq!((pool.free(), pool.owed()), (1, 3), "the reserve");
    let mut woken = Vec::new();
    for segment in 1..=4 {
        // It takes what it is given, and waits again.
        while pool.take(Requester::Client, Some(&waker)).is_ok() {}
        pool.release(segment);
        woken.push((bell.rings(), pool.owed()));
    }
    assert_eq!(woken, [(0, 2), (1, 2), (1, 1), (2, 1)]);
}

#[test]
fn memory_for_segments_that_come_later_is_reserved() {
    let pool = of_lanes(2, 1);
    assert_eq!(pool.reserve_for(40), Ok(()));
    assert!(pool.state.lock().free.capacity() >= 40);
}

#[test]
fn a_cache_that_gives_up_no_more_keeps_what_is_released_later() {
    let pool = pool(2, 0);
    pool.give_up(3).expect("nothing is being given up");
    assert_eq!((pool.free(), pool.owed()), (0, 1));
    assert_eq!(pool.give_up_no_more(), 2);
    pool.release(9);
    assert_eq!((pool.free(), pool.owed(), pool.take_given_up().len()), (1, 0, 2));
}

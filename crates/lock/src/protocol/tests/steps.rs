//! The steps of one thread, in a script of what the other threads do.

use super::super::*;
use std::cell::{Cell, RefCell};

thread_local! {
    /// The words of the lock: whether it is held, and the sleepers.
    static WORDS: [Cell<u32>; 2] = const { [Cell::new(0), Cell::new(0)] };
    static STEPS: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
    /// The holder unlocks at this pause.
    static FREE_AT: Cell<usize> = const { Cell::new(0) };
}

/// A platform of one thread; a word is an index of `WORDS`.
struct Script;

fn word<T>(index: usize, look: impl FnOnce(&Cell<u32>) -> T) -> T {
    WORDS.with(|words| look(&words[index]))
}

fn step(name: &'static str) -> usize {
    STEPS.with_borrow_mut(|steps| {
        steps.push(name);
        steps.iter().filter(|step| **step == name).count()
    })
}

impl Platform for Script {
    type Word = usize;

    const SPINS: u32 = 3;

    fn load(index: &usize, _: Ordering) -> u32 {
        word(*index, Cell::get)
    }
    fn store(index: &usize, value: u32, _: Ordering) {
        word(*index, |word| word.set(value));
    }
    fn add(index: &usize, value: u32) {
        word(*index, |word| word.set(word.get().wrapping_add(value)));
    }
    fn try_acquire(index: &usize) -> bool {
        word(*index, |word| word.get() == 0 && word.replace(1) == 0)
    }
    fn light_barrier() {
        step("light");
    }
    fn heavy_barrier() -> bool {
        step("heavy");
        false
    }
    fn sleep(index: &usize, has_barrier: bool) {
        assert!(!has_barrier, "what the heavy barrier answered is passed on");
        assert_eq!(word(1, Cell::get), 1, "the sleeper is counted");
        // The holder unlocks meanwhile.
        word(*index, |word| word.set(0));
        step("sleep");
    }
    fn wake(_: &usize) {
        step("wake");
    }
    fn pause() {
        if step("pause") == FREE_AT.get() {
            word(0, |word| word.set(0));
        }
    }
}

/// The steps of a `lock` while another thread holds it and unlocks at the pause `free_at`.
fn steps_of_lock(free_at: usize) -> Vec<&'static str> {
    let lock = Protocol::<Script>::new(0, 1);
    word(0, |word| word.set(1));
    FREE_AT.set(free_at);
    assert!(lock.is_locked() && !lock.try_lock());
    lock.lock();
    assert!(lock.is_locked());
    assert_eq!((word(0, Cell::get), word(1, Cell::get)), (1, 0), "it is held, and no thread sleeps");
    STEPS.take()
}

#[test]
fn a_thread_takes_a_lock_that_becomes_free_while_it_looks_and_sleeps_after_a_few_looks() {
    assert_eq!(steps_of_lock(1), ["pause"]);
    assert_eq!(steps_of_lock(2), ["pause", "pause"]);
    assert_eq!(steps_of_lock(3), ["pause", "pause", "pause", "heavy"], "it tries again before it sleeps");
    assert_eq!(steps_of_lock(4), ["pause", "pause", "pause", "heavy", "pause"]);
    let all = ["pause", "pause", "pause", "heavy", "pause", "pause", "pause", "sleep"];
    assert_eq!(steps_of_lock(0), all);
}

#[test]
fn an_unlock_wakes_a_thread_only_if_one_sleeps() {
    let lock = Protocol::<Script>::new(0, 1);
    lock.lock();
    lock.unlock();
    assert!(!lock.is_locked());
    assert_eq!(STEPS.take(), ["light"]);
    lock.lock();
    word(1, |word| word.set(1));
    lock.unlock();
    assert_eq!(STEPS.take(), ["light", "wake"]);
}

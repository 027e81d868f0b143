//! Ending all holders in passes: an object that is busy is tried again, until nothing moves any more.
//!
//! Invariants: it ends after [`Limits::whole`], or when nothing was ended for [`Limits::stall`]; what comes up again
//! meanwhile is ended again.
//!
//! Elsewhere: finding and ending one of them ([`super::walk`], [`super::system`]).

use super::walk::Holder;
use std::time::{Duration, Instant};

/// Time limits of the passes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Of all together.
    pub whole: Duration,
    /// Without any progress.
    pub stall: Duration,
    /// Between two passes: the kernel has no event for an object that becomes free.
    pub pause: Duration,
}

/// A holder that is left, and why.
pub type Left = (Holder, String);

/// Ends what `find` finds, by `end`, which gets the time that is left. `say` is told of each that was ended. Returns those that
/// are left.
pub fn end_all(
    limits: Limits,
    find: impl Fn() -> Vec<Holder>,
    end: impl Fn(&Holder, Duration) -> Result<(), String>,
    mut say: impl FnMut(&Holder),
) -> Vec<Left> {
    let deadline = Instant::now() + limits.whole;
    let mut progress = Instant::now();
    loop {
        let found = find();
        if found.is_empty() {
            return Vec::new();
        }
        let mut left = Vec::new();
        for holder in found {
            let remaining = deadline.saturating_duration_since(Instant::now());
            match end(&holder, remaining) {
                Ok(()) => {
                    progress = Instant::now();
                    say(&holder);
                }
                Err(error) => left.push((holder, error)),
            }
        }
        if Instant::now() >= deadline || progress.elapsed() >= limits.stall {
            return left;
        }
        if !left.is_empty() {
            std::thread::sleep(limits.pause);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    const LIMITS: Limits = Limits {
        whole: Duration::from_secs(60),
        stall: Duration::from_millis(50),
        pause: Duration::from_millis(1),
    };

    fn holder(name: &str) -> Holder {
        Holder::Array(name.to_owned())
    }

    #[test]
    fn a_busy_holder_is_tried_again_and_what_it_stands_on_ends_after_it() {
        let standing = RefCell::new(vec![holder("top"), holder("below")]);
        let tries = RefCell::new(0);
        let end = |which: &Holder, _| {
            *tries.borrow_mut() += 1;
            let is_free = *tries.borrow() > 4 && standing.borrow().first() == Some(which);
            is_free.then(|| drop(standing.borrow_mut().remove(0))).ok_or_else(|| "busy".to_owned())
        };
        let mut ended = Vec::new();
        let left = end_all(LIMITS, || standing.borrow().clone(), end, |holder| ended.push(holder.clone()));
        assert_eq!((left, ended), (vec![], vec![holder("top"), holder("below")]));
    }

    #[test]
    fn what_never_becomes_free_is_reported_with_its_reason() {
        let begun = Instant::now();
        let end = |_: &Holder, _| Err("busy".to_owned());
        let left = end_all(LIMITS, || vec![holder("a")], end, |_| panic!("nothing ends"));
        assert_eq!(left, [(holder("a"), "busy".to_owned())]);
        assert!(begun.elapsed() < LIMITS.whole);
    }

    #[test]
    fn what_always_comes_back_ends_at_the_limit() {
        let limits = Limits { whole: Duration::from_millis(30), ..LIMITS };
        let left = end_all(limits, || vec![holder("a")], |_, _| Ok(()), |_| ());
        assert_eq!(left, []);
    }

    #[test]
    fn nothing_is_ended_where_nothing_stands() {
        assert_eq!(end_all(LIMITS, Vec::new, |_, _| panic!("nothing is there"), |_| ()), []);
    }
}

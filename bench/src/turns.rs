//! Two contestants in turns: A B A B ..
//!
//! Always true here: a ratio is taken between turns that follow each other, so what slows the machine for longer than
//! a turn slows both sides and drops out; turns are short and many; and a turn in which the thread was taken off
//! its processor does not count, with its partner.

use crate::statistics::{Summary, median_range};
use rustix::time::{ClockId, clock_gettime};
use std::time::Instant;

/// A ratio whose median is not known better than this share is worth a warning.
const NOISY: f64 = 0.06;

/// A thread that ran for less than this share of the time was not alone on its processor.
const ALONE: f64 = 0.98;

/// How many turns are made for each that counts, at most.
const ATTEMPTS: usize = 8;

/// What a turn took.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Turn {
    /// Nanoseconds by the wall clock for each operation.
    pub nanoseconds: f64,
    /// Whether the thread had its processor all the time.
    pub undisturbed: bool,
}

impl Turn {
    /// Measures `work`, which does so many operations.
    ///
    /// # Errors
    /// That of the work.
    pub fn measure<E>(operations: usize, work: impl FnOnce() -> Result<(), E>) -> Result<Self, E> {
        let processor = processor_nanoseconds();
        let begun = Instant::now();
        work()?;
        let wall = begun.elapsed().as_nanos() as f64;
        let ran = processor_nanoseconds() - processor;
        Ok(Self { nanoseconds: wall / operations.max(1) as f64, undisturbed: ran >= ALONE * wall })
    }
}

/// Nanoseconds for which the calling thread has run.
fn processor_nanoseconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// What the turns brought.
#[derive(Clone, Copy, Debug)]
pub struct Comparison {
    /// The first contestant's figure.
    pub a: Summary,
    /// The second's.
    pub b: Summary,
    /// First over second, turn by turn.
    pub ratio: Summary,
    /// Where the median of the ratio lies with 95 % confidence.
    pub ratio_range: (f64, f64),
    /// How many turns of each counted.
    pub rounds: usize,
    /// How many were left out because something else wanted the processor.
    pub disturbed: usize,
}

impl Comparison {
    /// Whether the ratio is too uncertain to be trusted to the second digit.
    pub fn is_noisy(&self) -> bool {
        (self.ratio_range.1 - self.ratio_range.0) > NOISY * self.ratio.median
    }
}

/// Lets both run in turns until `rounds` turns of each were undisturbed, after one turn each that does not count.
/// Where the machine is too busy for that, the disturbed ones count too.
///
/// # Errors
/// That of a contestant; it ends the comparison.
pub fn compare<E>(
    rounds: usize,
    mut a: impl FnMut() -> Result<Turn, E>,
    mut b: impl FnMut() -> Result<Turn, E>,
) -> Result<Comparison, E> {
    a()?;
    b()?;
    let mut figures = Vec::with_capacity(rounds);
    let mut left_out = Vec::new();
    while figures.len() < rounds && figures.len() + left_out.len() < ATTEMPTS * rounds {
        let (a, b) = (a()?, b()?);
        let place = if a.undisturbed && b.undisturbed { &mut figures } else { &mut left_out };
        place.push((a.nanoseconds, b.nanoseconds));
    }
    let disturbed = left_out.len();
    left_out.truncate(rounds - figures.len());
    figures.append(&mut left_out);
    let of = |figure: fn(&(f64, f64)) -> f64| figures.iter().map(figure).collect::<Vec<_>>();
    let ratios = of(|turn| turn.0 / turn.1);
    Ok(Comparison {
        a: Summary::of(&of(|turn| turn.0)),
        b: Summary::of(&of(|turn| turn.1)),
        ratio: Summary::of(&ratios),
        ratio_range: median_range(&ratios),
        rounds,
        disturbed,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use std::convert::Infallible;

    fn turn(nanoseconds: f64) -> Result<Turn, Infallible> {
        Ok(Turn { nanoseconds, undisturbed: true })
    }

    #[test]
    fn the_contestants_take_turns_and_the_first_turns_do_not_count() {
        let order = RefCell::new(String::new());
        let Ok(found) = compare(
            2,
            || {
                order.borrow_mut().push('a');
                turn(if order.borrow().len() == 1 { 1000.0 } else { 30.0 })
            },
            || {
                order.borrow_mut().push('b');
                turn(20.0)
            },
        );
        assert_eq!(order.into_inner(), "ababab");
        assert_eq!((found.a.median, found.b.median, found.ratio.median), (30.0, 20.0, 1.5));
    }

    #[test]
    fn a_machine_that_slows_both_sides_down_leaves_the_ratio() {
        let mut slowness = [1.0, 1.0, 4.0, 9.0].into_iter();
        let now = Cell::new(1.0);
        let Ok(found) = compare(
            3,
            || {
                now.set(slowness.next().unwrap_or(1.0));
                turn(12.0 * now.get())
            },
            || turn(10.0 * now.get()),
        );
        assert!((found.ratio.median - 1.2).abs() < 1e-9);
        assert!(!found.is_noisy());
    }

    #[test]
    fn a_disturbed_turn_is_left_out_with_its_partner() {
        let number = Cell::new(0);
        let Ok(found) = compare(
            4,
            || {
                number.set(number.get() + 1);
                let disturbed = number.get() % 2 == 0;
                Ok::<_, Infallible>(Turn {
                    nanoseconds: if disturbed { 900.0 } else { 15.0 },
                    undisturbed: !disturbed,
                })
            },
            || turn(10.0),
        );
        assert_eq!((found.ratio.low, found.ratio.high, found.disturbed), (1.5, 1.5, 4));
    }

    #[test]
    fn a_machine_that_is_always_busy_still_gives_a_figure() {
        let busy = || Ok::<_, Infallible>(Turn { nanoseconds: 7.0, undisturbed: false });
        let Ok(found) = compare(3, busy, busy);
        assert_eq!((found.ratio.median, found.rounds, found.disturbed), (1.0, 3, 24));
    }

    #[test]
    fn a_thread_that_sleeps_is_disturbed() {
        let slept = Turn::measure(1, || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            Ok::<_, Infallible>(())
        });
        let Ok(slept) = slept;
        assert!(!slept.undisturbed && slept.nanoseconds >= 20e6);
    }
}

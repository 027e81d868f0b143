//! Contestants in turns: A B A B ..
//!
//! Invariants: a ratio is computed from consecutive turns, so a disturbance of the machine that lasts longer than a turn slows
//! both contestants and cancels out. Turns are short and many. A turn in which the thread lost its processor does not count, nor
//! does the turn that is paired with it.

use crate::figures::Certainty;
use crate::statistics::{Summary, median_range};
use rustix::time::{ClockId, clock_gettime};
use std::time::Instant;

/// A ratio whose median has a wider range than this share is reported as uncertain.
const NOISY: f64 = 0.06;

/// A thread that ran for less than this share of the time has shared its processor.
const ALONE: f64 = 0.98;

/// Maximum number of turns that are run for each turn that counts.
const ATTEMPTS: usize = 8;

/// The time of a turn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Turn {
    /// Nanoseconds by the wall clock for each operation.
    pub nanoseconds: f64,
    /// Whether the thread had its processor the whole time.
    pub undisturbed: bool,
}

impl Turn {
    /// Measures `work`, which executes this many operations.
    ///
    /// # Errors
    /// The error of `work`.
    pub fn measure<E>(operations: usize, work: impl FnOnce() -> Result<(), E>) -> Result<Self, E> {
        let processor = processor_nanoseconds();
        let begun = Instant::now();
        work()?;
        let wall = begun.elapsed().as_nanos() as f64;
        let ran = processor_nanoseconds() - processor;
        Ok(Self { nanoseconds: wall / operations.max(1) as f64, undisturbed: ran >= ALONE * wall })
    }

    /// Combines this turn with a simultaneous one: the average time of an operation.
    pub fn beside(self, other: Self) -> Self {
        Self {
            nanoseconds: f64::midpoint(self.nanoseconds, other.nanoseconds),
            undisturbed: self.undisturbed && other.undisturbed,
        }
    }
}

/// Processor time of the calling thread, in nanoseconds.
fn processor_nanoseconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Nanoseconds since `begun`.
pub fn since(begun: Instant) -> u32 {
    u32::try_from(begun.elapsed().as_nanos()).unwrap_or(u32::MAX)
}

/// The turns of some contestants, round by round, in nanoseconds for an operation.
#[derive(Clone, Debug)]
pub struct Rounds<const CONTESTANTS: usize> {
    /// The rounds that count.
    pub figures: Vec<[f64; CONTESTANTS]>,
    /// Number of rounds that were left out because another thread used the processor.
    pub disturbed: usize,
}

impl<const CONTESTANTS: usize> Rounds<CONTESTANTS> {
    /// Computes a figure of each round.
    pub fn each(&self, figure: impl Fn(&[f64; CONTESTANTS]) -> f64) -> Vec<f64> {
        self.figures.iter().map(figure).collect()
    }
}

/// The result of the turns of two contestants.
#[derive(Clone, Copy, Debug)]
pub struct Comparison {
    /// The first contestant's figure.
    pub a: Summary,
    /// The second's.
    pub b: Summary,
    /// First over second, turn by turn.
    pub ratio: Summary,
    /// The 95 % confidence range of the median of the ratio.
    pub ratio_range: (f64, f64),
    /// First minus second, turn by turn.
    pub difference: Summary,
    /// The 95 % confidence range of the median of the difference.
    pub difference_range: (f64, f64),
    /// Number of turns of each contestant that counted.
    pub rounds: usize,
    /// Number of turns that were left out because another thread used the processor.
    pub disturbed: usize,
}

impl Comparison {
    /// Summarizes the turns of two contestants.
    pub fn of(rounds: &Rounds<2>) -> Self {
        let ratios = rounds.each(|[a, b]| a / b);
        let differences = rounds.each(|[a, b]| a - b);
        Self {
            a: Summary::of(&rounds.each(|turn| turn[0])),
            b: Summary::of(&rounds.each(|turn| turn[1])),
            ratio: Summary::of(&ratios),
            ratio_range: median_range(&ratios),
            difference: Summary::of(&differences),
            difference_range: median_range(&differences),
            rounds: rounds.figures.len(),
            disturbed: rounds.disturbed,
        }
    }

    /// Whether the ratio is too uncertain to be trusted to the second digit.
    pub fn is_noisy(&self) -> bool {
        is_noisy(self.ratio, self.ratio_range)
    }

    /// The certainty of the ratio.
    pub fn certainty(&self) -> Certainty {
        Certainty { range: self.ratio_range, is_noisy: self.is_noisy() }
    }
}

/// Whether a figure of each round, whose median lies in `range`, scatters too much to be trusted to the
/// second digit.
pub fn is_noisy(figure: Summary, range: (f64, f64)) -> bool {
    (range.1 - range.0) > NOISY * figure.median.abs()
}

/// Runs two contestants in turns; see [`play`].
///
/// # Errors
/// The error of a contestant; it ends the comparison.
pub fn compare<E>(
    rounds: usize,
    mut a: impl FnMut() -> Result<Turn, E>,
    mut b: impl FnMut() -> Result<Turn, E>,
) -> Result<Comparison, E> {
    Ok(Comparison::of(&play(rounds, [&mut a, &mut b])?))
}

/// As [`compare`], in turns in the order A B B A: what comes first in a pair has no advantage, and no disadvantage.
///
/// # Errors
/// The error of a contestant; it ends the comparison.
pub fn compare_both_orders<E>(
    rounds: usize,
    a: impl Fn() -> Result<Turn, E>,
    b: impl Fn() -> Result<Turn, E>,
) -> Result<Comparison, E> {
    let found = play(rounds, [&mut || a(), &mut || b(), &mut || b(), &mut || a()])?;
    let pair =
        |[a, b, later_b, later_a]: &[f64; 4]| [f64::midpoint(*a, *later_a), f64::midpoint(*b, *later_b)];
    let figures = found.figures.iter().map(pair).collect();
    Ok(Comparison::of(&Rounds { figures, disturbed: found.disturbed }))
}

/// Runs all contestants in turns until `rounds` turns of each were undisturbed, after one turn of each that does not count. If
/// the machine is too busy for that, the disturbed turns count, too.
///
/// # Errors
/// The error of a contestant; it ends the comparison.
pub fn play<const CONTESTANTS: usize, E>(
    rounds: usize,
    mut contestants: [&mut dyn FnMut() -> Result<Turn, E>; CONTESTANTS],
) -> Result<Rounds<CONTESTANTS>, E> {
    let mut round = || {
        let mut figures = [0.0; CONTESTANTS];
        let mut undisturbed = true;
        for (figure, contestant) in figures.iter_mut().zip(&mut contestants) {
            let turn = contestant()?;
            *figure = turn.nanoseconds;
            undisturbed &= turn.undisturbed;
        }
        Ok((figures, undisturbed))
    };
    round()?;
    let mut figures = Vec::with_capacity(rounds);
    let mut left_out = Vec::new();
    while figures.len() < rounds && figures.len() + left_out.len() < ATTEMPTS * rounds {
        let (found, undisturbed) = round()?;
        if undisturbed { &mut figures } else { &mut left_out }.push(found);
    }
    let disturbed = left_out.len();
    left_out.truncate(rounds - figures.len());
    figures.append(&mut left_out);
    Ok(Rounds { figures, disturbed })
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

//! Two threads against one, each on a processor of its own: the speed-up of the engine, compared with that of
//! the bare copy.
//!
//! Invariants: both threads of a turn begin at the same moment and do the same number of operations.

use super::copy;
use super::pair::{Pair, write};
use crate::figures::{Certainty, Figures, spread};
use crate::processors::{Gate, Processors};
use crate::scale::Sources;
use crate::statistics::{Summary, median_range, rounded};
use crate::turns::{Rounds, Turn, is_noisy, play};
use cbd_types::{Error, ErrorKind, Result};
use serde_json::{Map, json};
use std::cell::RefCell;

/// Writes of 4 KiB.
///
/// # Errors
/// The errors of the engine and of the system.
pub fn measure(pair: &mut Pair, figures: &mut Figures) -> Result<()> {
    let processors = Processors::new()?;
    if processors.count() < 2 {
        figures.add("scale_2_not_measured", "there is one processor");
        return Ok(());
    }
    processors.pin(0)?;
    let rounds = turns(pair, &processors);
    processors.unpin()?;
    report(&rounds?, figures);
    Ok(())
}

/// The turns: the engine on one thread, the copy on one, the engine on two, the copy on two. The figures are nanoseconds for an
/// operation of one thread.
fn turns(pair: &mut Pair, processors: &Processors) -> Result<Rounds<4>> {
    let sources = Sources::new(4096);
    let stores = pair.stores(4096)?;
    let rounds = pair.rounds;
    let copies = RefCell::new(stores.chunks(pair.scale.turn(4096)).cycle());
    let next = || copies.borrow_mut().next().unwrap_or_default();
    let pair = RefCell::new(pair);
    play(
        rounds,
        [
            &mut || pair.borrow_mut().write_turn(4096, &sources),
            &mut || copy::turn(&pair.borrow().bare, &sources, next()),
            &mut || {
                let pair = &mut *pair.borrow_mut();
                pair.rest_before(2)?;
                let (ours, others) = (pair.places(4096, 1), pair.places(4096, 1));
                let cache = pair.rig.cache();
                together(processors, || write(cache, &ours, &sources), || write(cache, &others, &sources))
            },
            &mut || {
                let bare = &pair.borrow().bare;
                let (ours, others) = (next(), next());
                together(
                    processors,
                    || copy::turn(bare, &sources, ours),
                    || copy::turn(bare, &sources, others),
                )
            },
        ],
    )
}

/// Two turns at the same time: the calling thread's on the first processor, and another thread's on the second.
fn together(
    processors: &Processors,
    ours: impl FnOnce() -> Result<Turn>,
    others: impl FnOnce() -> Result<Turn> + Send,
) -> Result<Turn> {
    let gate = Gate::default();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            processors.pin(1)?;
            gate.meet()?;
            others()
        });
        let ours = gate.meet().and_then(|()| ours());
        let other = other.join().map_err(|_| Error::new(ErrorKind::System, "the second thread panicked"))?;
        Ok(ours?.beside(other?))
    })
}

fn report(rounds: &Rounds<4>, figures: &mut Figures) {
    let engine = rounds.each(|turn| 2.0 * turn[0] / turn[2]);
    let copy = rounds.each(|turn| 2.0 * turn[1] / turn[3]);
    let ratios: Vec<_> = engine.iter().zip(&copy).map(|(engine, copy)| engine / copy).collect();
    let ratio = Summary::of(&ratios);
    let range = median_range(&ratios);
    let mut detail = Map::new();
    detail.insert("rounds".to_owned(), json!(rounds.figures.len()));
    detail.insert("disturbed".to_owned(), json!(rounds.disturbed));
    for (contestant, speed_ups, alone) in [("write_4k", &engine, 0), ("copy_4k", &copy, 1)] {
        let speed_up = Summary::of(speed_ups);
        figures.add(format!("{contestant}_speed_up_2"), rounded(speed_up.median, 3));
        detail.insert(format!("{contestant}_speed_up_2_p10_p90"), spread(speed_up, 3));
        for (threads, place) in [(1, alone), (2, alone + 2)] {
            let taken = Summary::of(&rounds.each(|turn| turn[place]));
            detail.insert(format!("{contestant}_ns_of_{threads}_threads"), json!(rounded(taken.median, 1)));
        }
    }
    detail.insert("p10_p90".to_owned(), spread(ratio, 3));
    let speed_up = |of: &[f64]| Summary::of(of).median;
    let absolute = format!("{:.2} times against {:.2} times as fast", speed_up(&engine), speed_up(&copy));
    detail.insert("absolute".to_owned(), json!(absolute));
    let certainty = Certainty { range, is_noisy: is_noisy(ratio, range) };
    figures.add_detailed("scale_2_over_copy", rounded(ratio.median, 3), detail, Some(certainty));
}

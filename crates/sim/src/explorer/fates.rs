//! The contents that a power cut can leave in the open lines of one moment: all subsets while there are few
//! lines. For more lines: subsets of those that recovery reads, each line alone, each line missing, and
//! random choices.

use super::Effort;
use crate::memory::{CrashMemory, Line, OpenLine};
use crate::random::Seeded;
use cbd_types::ByteRange;

/// One possible outcome of a power cut.
#[derive(Clone, Debug)]
pub(super) struct Fate {
    /// The rule by which it was chosen.
    pub(super) kind: &'static str,
    /// The content of each open line; `None` for the content before the open stores.
    lines: Vec<Option<Line>>,
    /// A line that cannot be read after the cut.
    poisoned: Option<u64>,
}

impl Fate {
    /// The lines whose bit is set in `subset` have their newest content.
    pub(super) fn subset(lines: &[OpenLine], subset: u64) -> Self {
        let keep = |(at, line): (usize, &OpenLine)| (subset & (1 << at) != 0).then(|| *line.newest());
        Self { kind: "subset", lines: lines.iter().enumerate().map(keep).collect(), poisoned: None }
    }

    fn chosen(
        kind: &'static str,
        lines: &[OpenLine],
        mut choose: impl FnMut(usize, &OpenLine) -> Option<Line>,
    ) -> Self {
        let lines = lines.iter().enumerate().map(|(at, line)| choose(at, line)).collect();
        Self { kind, lines, poisoned: None }
    }

    /// The memory after this outcome.
    pub(super) fn apply(&self, memory: &CrashMemory, lines: &[OpenLine]) -> CrashMemory {
        let kept = lines.iter().zip(&self.lines);
        let left = memory.cut_to(kept.filter_map(|(line, kept)| kept.as_ref().map(|kept| (line.at, kept))));
        if let Some(at) = self.poisoned {
            left.poison(ByteRange::at(at, 64));
        }
        left
    }
}

/// Fates that tear lines, leave an intermediate version, or leave a line that cannot be read.
pub(super) fn hostile(lines: &[OpenLine], effort: &Effort, random: &mut Seeded) -> Vec<Fate> {
    let mut fates = Vec::new();
    if lines.is_empty() {
        return fates;
    }
    for _ in 0..effort.torn {
        // Either all lines are torn, or one is and the others are present or missing.
        let one = random.chance(500).then(|| random.below(lines.len() as u64) as usize);
        fates.push(Fate::chosen("torn", lines, |at, line| {
            if one.is_none_or(|one| one == at) {
                Some(line.torn(random.next() as u8))
            } else {
                random.chance(800).then(|| *line.newest())
            }
        }));
    }
    if lines.iter().any(|line| line.versions.len() > 1) {
        for _ in 0..effort.torn {
            fates.push(Fate::chosen("older version", lines, |_, line| {
                random.chance(700).then(|| *random.pick(&line.versions))
            }));
        }
    }
    for _ in 0..effort.poisoned {
        let mut fate = Fate::chosen("poisoned", lines, |_, line| random.chance(600).then(|| *line.newest()));
        fate.poisoned = Some(random.pick(lines).at);
        fates.push(fate);
    }
    fates
}

/// Fates of many lines: none, all, prefixes, each line alone, each line missing, and random choices. `read` contains
/// for each line whether recovery reads it; all subsets of the lines that are read are tried if these are few.
pub(super) fn sampled(lines: &[OpenLine], read: &[bool], effort: &Effort, random: &mut Seeded) -> Vec<Fate> {
    let keep = |keep: bool, line: &OpenLine| keep.then(|| *line.newest());
    let mut fates = vec![
        Fate::chosen("sampled", lines, |_, _| None),
        Fate::chosen("sampled", lines, |_, line| Some(*line.newest())),
    ];
    let relevant: Vec<usize> = (0..lines.len()).filter(|at| read[*at]).collect();
    if relevant.len() <= effort.lines_read_max {
        for subset in 0..1_u64 << relevant.len() {
            fates.push(Fate::chosen("read lines", lines, |at, line| {
                match relevant.iter().position(|read| *read == at) {
                    Some(bit) => keep(subset & (1 << bit) != 0, line),
                    None => keep(random.chance(500), line),
                }
            }));
        }
    }
    for _ in 0..effort.sampled {
        let one = random.below(lines.len() as u64) as usize;
        let permille = *random.pick(&[100, 500, 900]);
        let rule = random.below(4);
        fates.push(Fate::chosen("sampled", lines, |at, line| {
            let kept = match rule {
                0 => at == one,
                1 => at != one,
                2 => at <= one,
                _ => random.chance(permille),
            };
            keep(kept, line)
        }));
    }
    fates
}

//! Recovery and all later operations, over whole regions that are forged or damaged.
//!
//! An input names a base ([`base`]), edits to it ([`forge`]) and the use of the result ([`life`]). Checksums are recomputed
//! unless an edit breaks them: a fuzzer of plain bytes would never pass them.
//!
//! Invariants: a forged region ends in an error or in a cache that works, without a panic, a hang, an access outside the region,
//! or an operation that a disk does not support. If data was only damaged, no damaged data is returned or written back.

pub mod base;
pub mod forge;
pub mod life;

use crate::input::Input;
use cbd_sim::CrashMemory;
use forge::Edit;
use life::Usage;

/// Maximum number of edits of one input.
const EDITS_MAX: usize = 12;

/// Bytes before the edits.
const HEAD: usize = 4;

/// A parsed input.
#[derive(Debug)]
struct Plan<'a> {
    base: usize,
    usage: Usage,
    /// The region is cut to this many 256ths of its size.
    size: u64,
    edits: Vec<Edit>,
    acts: &'a [u8],
}

impl<'a> Plan<'a> {
    fn read(data: &'a [u8]) -> Self {
        let mut input = Input(data);
        let base = usize::from(input.u8()) % base::count();
        let (flags, count, seed) = (input.u8(), usize::from(input.u8()), u64::from(input.u8()));
        let edits: Vec<Edit> = (0..count % (EDITS_MAX + 1)).map(|_| Edit::read(&mut input)).collect();
        let only_damage = edits.iter().all(Edit::is_damage);
        let usage = Usage {
            seed,
            power_cut: flags & 1 != 0,
            shaky_disk: flags & 2 != 0,
            disk_refuses: flags & 4 != 0,
            watch_marker: only_damage && base::base(base).data_crc,
        };
        let size = if flags & 0xf0 == 0xf0 { seed } else { 256 };
        Self { base, usage, size, edits, acts: input.rest() }
    }
}

/// Runs one region twice.
pub fn run(data: &[u8]) {
    let plan = Plan::read(data);
    let base = base::base(plan.base);
    let memory = base.memory.fork();
    for edit in &plan.edits {
        edit.apply(&memory, &base.layout);
    }
    let memory = if plan.size < 256 {
        let mut image = memory.image();
        image.truncate((image.len() as u64 * plan.size / 256) as usize & !4095);
        CrashMemory::from_image(image)
    } else {
        memory
    };
    life::live_twice(&memory, plan.usage, plan.acts);
}

/// A description of an input, to analyse a failure.
#[must_use]
pub fn explain(data: &[u8]) -> String {
    format!("{:#?}", Plan::read(data))
}

/// Each base without edits, and each kind of edit on the base with the most content.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let acts = [0, 1, 0x80, 3, 4, 0, 0, 0, 5, 0, 0x80, 4, 6, 9, 0x80, 1, 10, 0, 0, 0, 8, 0, 0, 0];
    let mut seeds = Vec::new();
    for base in 0..base::count() as u8 {
        seeds.push([&[base, base & 1, 0, base], &acts[..]].concat());
        seeds.push([&[base, 4, 0, base], &acts[..]].concat());
    }
    for edit in 0..18 {
        for (field, how) in [(3, 0), (5, 1), (7, 5), (8, 4)] {
            let mut bytes = vec![if edit % 2 == 0 { 2 } else { 8 }, field & 3, 1, edit];
            bytes.extend_from_slice(&[edit, 2, 3, field, how, 0x10, 0, 0, field, 2, 0, 0, 0, 0, 0, 0]);
            assert_eq!(bytes.len(), HEAD + Edit::SIZE);
            bytes.extend_from_slice(&acts);
            seeds.push(bytes);
        }
    }
    seeds
}

#[cfg(test)]
mod tests {
    use super::*;
    use cbd_format::RecordKind;

    #[test]
    fn every_base_without_edits_opens() {
        for number in 0..base::count() {
            let memory = base::base(number).memory.fork();
            let usage = Usage {
                seed: 1,
                power_cut: false,
                shaky_disk: false,
                disk_refuses: false,
                watch_marker: true,
            };
            assert!(life::live_twice(&memory, usage, &[]), "base {number}");
        }
    }

    #[test]
    fn a_base_has_what_its_script_makes() {
        let holds = |number: usize, kind| {
            let base = base::base(number);
            forge::segments(&base.memory, &base.layout).any(|(segment, header)| {
                let records = forge::records(&base.memory, &base.layout, segment, &header);
                records.iter().any(|(_, record)| record.kind() == kind)
            })
        };
        assert!(holds(6, RecordKind::Quarantine));
        assert!(holds(10, RecordKind::ParkedWrite));
        assert!(holds(2, RecordKind::Fill) && holds(2, RecordKind::Discard));
    }

    #[test]
    fn a_forged_record_counts() {
        // Otherwise no forgery of the fuzzer would pass the checksums.
        let base = base::base(2);
        let memory = base.memory.fork();
        let before = count_records(&memory, base);
        let append = Edit::read(&mut Input(&[0, 0, 255, 3, 1, 0x10]));
        let mut grown = 0;
        for which in 0..=255 {
            let memory = base.memory.fork();
            append.at(0, which).apply(&memory, &base.layout);
            grown += usize::from(count_records(&memory, base) > before);
        }
        assert!(grown > 0);
    }

    fn count_records(memory: &CrashMemory, base: &base::Base) -> usize {
        forge::segments(memory, &base.layout)
            .map(|(segment, header)| forge::records(memory, &base.layout, segment, &header).len())
            .sum()
    }
}

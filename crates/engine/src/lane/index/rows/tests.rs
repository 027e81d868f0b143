//! Tests the begins of rows, and that addresses of two tables do no harm.

use super::*;
use alloc::vec::Vec;

#[test]
fn which_blocks_meet_depends_on_the_seed() {
    // Groups of chunks that start in the same bucket as the first group, in a table with a known seed.
    let met = |seed: u32| -> Vec<u32> {
        let key = |group: u32| group * NEIGHBOURS * BLOCKS_PER_CHUNK;
        let row = |group: u32| Row::new(Start::new(key(group), seed), 1024).at(0);
        (1..60_000).filter(|group| row(*group) == row(0)).collect()
    };
    let chosen = met(7);
    assert!(chosen.len() > 30, "{}", chosen.len());
    for seed in [0, 1, 8, 0x9e37_79b9] {
        let still = met(seed).into_iter().filter(|group| chosen.contains(group)).count();
        assert!(still < 5, "{still} of {} meet with seed {seed} too", chosen.len());
    }
}

#[test]
fn rows_are_in_the_same_order_in_every_table() {
    let mut starts: Vec<Start> = (0..20_000).map(|chunk| Start::new(chunk * BLOCKS_PER_CHUNK, 7)).collect();
    starts.sort_unstable();
    for count in [16, 17, 1000, 1 << 20, 1 << 30] {
        assert!(starts.is_sorted_by_key(|start| start.of(count)), "{count} buckets");
        assert!(starts.iter().all(|start| start.of(count) < count));
    }
    assert_eq!(Start(u32::MAX).of(16), 15);
    assert!(Start(u32::MAX).is_up_to(u32::MAX) && !Start(u32::MAX).is_up_to(u32::MAX - 1));
    assert!(starts.iter().all(|start| !start.is_up_to(0)) && Start(1).is_up_to(1));
}

#[test]
fn a_row_that_passes_the_end_of_the_table_continues_at_its_first_bucket() {
    let row = Row::new(Start(u32::MAX), 400);
    let all: Vec<usize> = row.buckets(0..=BLOCKS_PER_CHUNK - 1).collect();
    assert_eq!(all.len(), BLOCKS_PER_CHUNK as usize / PLACES + 1);
    assert_eq!((all[0], all[1], all[ROW - 1]), (399, 0, ROW - 2));
    let row = Row::new(Start(1 << 31), 16);
    assert_eq!((row.at(0), row.at(8), row.at(341)), (8, 0, (8 + 341) % 16));
}

use super::*;
use crate::{act_as, until_crash};

fn load<const N: usize>(memory: &CrashMemory, at: u64) -> [u8; N] {
    let mut bytes = [0; N];
    memory.load(at, &mut bytes).expect("not poisoned");
    bytes
}

#[test]
fn what_was_fenced_survives_and_what_was_not_may_go() {
    for seed in 0..100 {
        let memory = CrashMemory::new(4096);
        memory.store(0, &[1; 64]);
        memory.fence();
        memory.store(64, &[2; 64]);
        let after = memory.power_cut(seed, Keep::Any);
        assert_eq!(load::<64>(&after, 0), [1; 64]);
        assert!(load::<64>(&after, 64).chunks(8).all(|word| word == [0; 8] || word == [2; 8]));
    }
}

#[test]
fn a_power_cut_can_keep_each_word_without_its_neighbours() {
    let seen: BTreeSet<(bool, bool)> = (0..200)
        .map(|seed| {
            let memory = CrashMemory::new(64);
            memory.store(0, &[1; 16]);
            let after = memory.power_cut(seed, Keep::Random);
            (load::<1>(&after, 0) == [1], load::<1>(&after, 8) == [1])
        })
        .collect();
    assert_eq!(seen.len(), 4);
}

#[test]
fn a_word_never_goes_back_behind_what_was_fenced_later() {
    for seed in 0..100 {
        let memory = CrashMemory::new(64);
        act_as(1);
        memory.store(0, &[1; 8]);
        act_as(2);
        memory.store(0, &[2; 8]);
        memory.fence();
        assert_eq!(load::<8>(&memory.power_cut(seed, Keep::Any), 0), [2; 8]);
    }
}

#[test]
fn a_fence_does_not_drain_the_stores_of_another_actor() {
    let memory = CrashMemory::new(64);
    act_as(1);
    memory.store(0, &[1; 8]);
    act_as(2);
    memory.fence();
    assert_eq!(load::<8>(&memory.power_cut(0, Keep::Nothing), 0), [0; 8]);
}

#[test]
fn after_a_process_crash_a_line_is_seen_but_lost_by_a_power_cut_until_it_is_written_back() {
    let memory = CrashMemory::new(128);
    memory.store(0, &[1; 128]);
    let successor = memory.process_crash();
    assert_eq!(load::<128>(&successor, 0), [1; 128]);
    successor.write_back(10, 1);
    successor.fence();
    let after = successor.power_cut(0, Keep::Nothing);
    assert_eq!(load::<64>(&after, 0), [1; 64]);
    assert_eq!(load::<64>(&after, 64), [0; 64]);
}

#[test]
fn what_was_written_back_and_fenced_does_not_fall_back_to_an_older_store() {
    for seed in 0..100 {
        let memory = CrashMemory::new(64);
        memory.store(0, &[1; 8]);
        memory.store(0, &[2; 8]);
        let successor = memory.process_crash();
        successor.write_back(0, 8);
        successor.fence();
        assert_eq!(load::<8>(&successor.power_cut(seed, Keep::Any), 0), [2; 8]);
    }
}

#[test]
fn the_process_crashes_in_the_store_that_was_chosen() {
    let memory = CrashMemory::new(4096);
    memory.crash_after(3, 1);
    let ended = until_crash(|| {
        memory.store(0, &[1; 8]);
        memory.fence();
        memory.store(8, &[2; 8]);
        unreachable!("the third event crashes");
    });
    assert!(ended.is_err() && memory.is_dead());
    memory.store(16, &[3; 8]);
    memory.fence();
    let after = memory.process_crash();
    assert_eq!(load::<8>(&after, 0), [1; 8]);
    assert!([[0; 8], [2; 8]].contains(&load::<8>(&after, 8)));
    assert_eq!(load::<8>(&after, 16), [0; 8], "a dead process stores nothing");
}

#[test]
fn a_poisoned_line_fails_until_it_is_stored_whole() {
    let memory = CrashMemory::new(256);
    memory.poison(ByteRange::at(64, 1));
    assert_eq!(memory.load(0, &mut [0; 256]), Err(MediaError { at: 64 }));
    assert_eq!(memory.load(0, &mut [0; 64]), Ok(()));
    memory.store(64, &[1; 32]);
    assert_eq!(memory.load(100, &mut [0; 1]), Err(MediaError { at: 100 }));
    memory.store_line(64, &[1; 64]);
    assert_eq!(memory.load(0, &mut [0; 256]), Ok(()));
}

#[test]
fn a_flipped_bit_stays_flipped_after_a_power_cut() {
    let memory = CrashMemory::new(64);
    memory.store(0, &[1; 1]);
    memory.flip(0, 1);
    memory.fence();
    assert_eq!(load::<1>(&memory.power_cut(0, Keep::Nothing), 0), [3]);
}

#[test]
fn stores_are_summed_block_by_block() {
    let memory = CrashMemory::new(16 << 10);
    let bytes: Vec<u8> = (0..9000_u32).map(|byte| byte as u8).collect();
    let mut sums = [0; 3];
    memory.store_summed(512, &bytes, 3584, &mut sums);
    let expected = [&bytes[..3584], &bytes[3584..7680], &bytes[7680..]].map(crc_fast::crc32_iscsi);
    assert_eq!(sums, expected);
    let mut back = vec![0; 3584];
    assert_eq!(memory.load_summed(512, &mut back), Ok(sums[0]));
}

#[test]
fn a_load_of_what_is_not_fenced_is_counted() {
    let memory = CrashMemory::new(64);
    memory.store(0, &[1; 8]);
    let _ = load::<1>(&memory, 8);
    assert_eq!(memory.counters().loads_of_unfenced, 0);
    let _ = load::<1>(&memory, 7);
    assert_eq!(memory.counters().loads_of_unfenced, 1);
}

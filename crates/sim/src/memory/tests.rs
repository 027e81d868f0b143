use super::*;
use crate::{Content, act_as, until_crash};

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
    let mut checksums = [0; 3];
    memory.store_summed(512, &bytes, 3584, &mut checksums);
    let expected = [&bytes[..3584], &bytes[3584..7680], &bytes[7680..]].map(crc_fast::crc32_iscsi);
    assert_eq!(checksums, expected);
    let mut back = vec![0; 3584];
    assert_eq!(memory.load_summed(512, &mut back), Ok(checksums[0]));
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

#[test]
fn a_line_is_open_until_it_is_fenced_by_its_actor() {
    let memory = CrashMemory::new(4096);
    act_as(1);
    memory.store(0, &[1; 64]);
    memory.store(8, &[2; 8]);
    act_as(2);
    memory.store(1000, &[3; 8]);
    let lines = memory.open_lines();
    assert_eq!(
        lines.iter().map(|line| (line.at, line.versions.len())).collect::<Vec<_>>(),
        [(0, 2), (960, 1)]
    );
    assert_eq!(lines[0].old, [0; 64]);
    assert_eq!(lines[0].newest()[..24], [[1; 8], [2; 8], [1; 8]].concat());
    memory.fence();
    assert_eq!(memory.open_lines().iter().map(|line| line.at).collect::<Vec<_>>(), [0]);
}

#[test]
fn a_line_that_was_stored_as_it_was_is_not_open() {
    let memory = CrashMemory::new(4096);
    memory.store(64, &[1; 64]);
    memory.fence();
    memory.store(64, &[1; 64]);
    memory.store(128, &[0; 64]);
    assert!(memory.open_lines().is_empty());
}

#[test]
fn a_cut_to_chosen_lines_leaves_them_and_the_original_memory_stays_alive() {
    let memory = CrashMemory::new(4096);
    memory.store(0, &[1; 192]);
    let lines = memory.open_lines();
    let torn = lines[1].torn(0b0000_0010);
    let after = memory.cut_to([(0, lines[0].newest()), (64, &torn)]);
    assert_eq!(load::<64>(&after, 0), [1; 64]);
    assert_eq!(load::<24>(&after, 64)[..], [[0; 8], [1; 8], [0; 8]].concat());
    assert_eq!(load::<64>(&after, 128), [0; 64]);
    assert!(after.open_lines().is_empty());
    assert_eq!(load::<192>(&memory, 0), [1; 192]);
    memory.fence();
    assert_eq!(load::<64>(&memory.power_cut(0, Keep::Nothing), 128), [1; 64]);
}

#[test]
fn persistent_caches_keep_what_was_stored() {
    let memory = CrashMemory::new(4096);
    memory.set_kind(MemoryKind::PersistentCaches);
    memory.store(0, &[1; 8]);
    assert_eq!(load::<8>(&memory.power_cut(0, Keep::Nothing), 0), [1; 8]);
}

#[test]
fn a_memory_with_whole_lines_tears_none() {
    for seed in 0..100 {
        let memory = CrashMemory::new(4096);
        memory.set_kind(MemoryKind::WholeLines);
        memory.store(0, &[1; 256]);
        let after = memory.power_cut(seed, Keep::Any);
        assert!(
            (0..4).all(|line| [[0; 64], [1; 64]].contains(&load::<64>(&after, line * 64))),
            "seed {seed}"
        );
    }
}

#[test]
fn a_witness_sees_each_fence_before_it_takes_effect() {
    let memory = CrashMemory::new(4096);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let witness = Arc::clone(&seen);
    memory.watch(0, 1, move |copy| witness.lock().push(copy.open_lines().len()));
    memory.store(0, &[1; 64]);
    memory.store(64, &[1; 64]);
    memory.fence();
    memory.fence();
    memory.store(128, &[1; 64]);
    memory.fence();
    assert_eq!(*seen.lock(), [2, 1]);
}

#[test]
fn loads_are_traced_by_lines() {
    let memory = CrashMemory::new(4096);
    memory.trace_loads();
    let _: [u8; 100] = load(&memory, 100);
    let lines: Vec<u64> = (0..64).filter(|line| memory.was_loaded(line * 64)).collect();
    assert_eq!(lines, [1, 2, 3]);
}

#[test]
fn a_fickle_client_changes_sectors_as_they_are_loaded_and_what_is_stored_is_summed() {
    for size in [512, 4096] {
        let memory = CrashMemory::new(1 << 20);
        let content = Content(77);
        memory.set_fickle(content, true);
        let mut source = vec![0; 8 * size];
        content.fill_range(40, size, &mut source);
        let mut checksums = vec![0; source.len() / 4096];
        memory.store_summed(0, &source, 4096, &mut checksums);
        let stored = memory.image();
        let stored = &stored[..source.len()];
        assert_ne!(stored, source);
        assert!((40..).zip(stored.chunks(size)).all(|(at, bytes)| Content::of(at, bytes) == Some(content)));
        let of_stored: Vec<u32> = stored.chunks(4096).map(crc_fast::crc32_iscsi).collect();
        assert_eq!(checksums, of_stored);
        memory.set_fickle(content, false);
        memory.store(1 << 19, &source);
        assert_eq!(memory.image()[1 << 19..][..source.len()], source);
    }
}

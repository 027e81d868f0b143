//! Copies preserve every byte, whatever the method, the alignment and the length, and checksums are CRC32C.

use cbd_pmem::{CopyMethod, Mapping};
use cbd_types::Pmem;
use cbd_types::pmem::blocks_of;
use proptest::prelude::*;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

const SIZE: u64 = 4 << 20;

fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// One mapping for each method of this processor, and the calibrated one. One test at a time uses them, since
/// all store at the same offsets.
fn mappings() -> MutexGuard<'static, Vec<Mapping>> {
    static MAPPINGS: LazyLock<Mutex<Vec<Mapping>>> = LazyLock::new(|| {
        let forced =
            CopyMethod::ALL.into_iter().filter_map(|method| Mapping::anonymous_with(SIZE, Some(method)).ok());
        let mut all: Vec<_> = forced.collect();
        all.push(Mapping::anonymous(SIZE).expect("memory"));
        Mutex::new(all)
    });
    // A test that panics by design, or that fails, must not fail the others.
    MAPPINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn loaded(mapping: &Mapping, at: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    mapping.load(at, &mut bytes).expect("memory does not fail");
    bytes
}

#[test]
fn the_portable_method_is_available_on_every_processor() {
    Mapping::anonymous_with(SIZE, Some(CopyMethod::Portable)).expect("it is portable");
}

#[test]
fn a_store_writes_every_byte_at_every_alignment_and_no_other() {
    let surroundings = noise(2048, 1);
    let source = noise(1024, 2);
    for mapping in mappings().iter() {
        for at in [0_usize, 1, 7, 8, 63, 64, 65, 127, 130] {
            for from in [0_usize, 1, 8, 63] {
                for length in [0_usize, 1, 7, 8, 63, 64, 65, 128, 191, 256, 300, 512, 600, 700] {
                    mapping.store(0, &surroundings);
                    mapping.store(at as u64, &source[from..from + length]);
                    mapping.fence();
                    let mut expected = surroundings.clone();
                    expected[at..at + length].copy_from_slice(&source[from..from + length]);
                    assert_eq!(loaded(mapping, 0, 2048), expected, "{length} from {from} at {at}");
                }
            }
        }
        assert_eq!(mapping.failed(), None);
    }
}

#[test]
fn a_line_is_stored_whole() {
    for mapping in mappings().iter() {
        let line: [u8; 64] = noise(64, 3).try_into().expect("64 bytes");
        mapping.store_line(SIZE - 64, &line);
        mapping.fence();
        assert_eq!(loaded(mapping, SIZE - 64, 64), line);
    }
}

#[test]
fn what_is_shared_has_every_byte_and_no_other() {
    let surroundings = noise(1024, 5);
    let source = noise(700, 6);
    for mapping in mappings().iter() {
        for at in [0_usize, 1, 64, 130] {
            for length in [0_usize, 1, 63, 64, 65, 300, 700] {
                let mut expected = surroundings.clone();
                expected[at..at + length].copy_from_slice(&source[..length]);
                mapping.store(0, &surroundings);
                mapping.share(at as u64, &source[..length]);
                assert_eq!(loaded(mapping, 0, 1024), expected, "{length} at {at}");
                mapping.store(0, &surroundings);
                let sum = mapping.share_summed(at as u64, &source[..length]);
                assert_eq!(loaded(mapping, 0, 1024), expected, "{length} at {at}, summed");
                assert_eq!(mapping.load_summed(at as u64, &mut vec![0; length]), Ok(sum), "{length} at {at}");
            }
        }
        assert_eq!(mapping.failed(), None);
    }
}

#[test]
fn a_thread_that_sees_what_was_shared_sees_what_was_shared_before() {
    const ROUNDS: u64 = 20_000;
    const DATA: u64 = 4096;
    let mapping = Mapping::anonymous(SIZE).expect("memory");
    let number_at = |at| {
        mapping.observe(at, 8);
        u64::from_le_bytes(loaded(&mapping, at, 8).try_into().expect("8 bytes"))
    };
    let wait_for = |at, round| {
        while number_at(at) < round {
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 1..=ROUNDS {
                mapping.share_summed(DATA, &[round as u8; 1000]);
                mapping.share(0, &round.to_le_bytes());
                wait_for(64, round);
            }
        });
        for round in 1..=ROUNDS {
            wait_for(0, round);
            mapping.observe(DATA, 1000);
            let data = loaded(&mapping, DATA, 1000);
            mapping.share(64, &round.to_le_bytes());
            assert!(data.iter().all(|byte| *byte == round as u8), "round {round}");
        }
    });
}

#[test]
fn a_write_back_changes_no_byte() {
    let bytes = noise(10_000, 4);
    for mapping in mappings().iter() {
        mapping.store(100, &bytes);
        mapping.fence();
        for (at, length) in [(100, 10_000), (0, 1), (63, 2), (5000, 0), (SIZE, 0), (SIZE - 1, 1)] {
            mapping.write_back(at, length);
        }
        mapping.fence();
        assert_eq!(loaded(mapping, 100, 10_000), bytes);
    }
}

#[test]
fn an_empty_store_has_one_checksum_of_zero() {
    for mapping in mappings().iter() {
        let mut checksums = [7];
        mapping.store_summed(64, &[], 0, &mut checksums);
        assert_eq!(checksums, [0]);
        assert_eq!(mapping.load_summed(64, &mut []), Ok(0));
    }
}

#[test]
fn a_mebibyte_has_a_checksum_for_each_block() {
    let bytes = noise(1 << 20, 5);
    for mapping in mappings().iter() {
        let mut checksums = vec![0; 256];
        mapping.store_summed(4096, &bytes, 4096, &mut checksums);
        mapping.fence();
        let expected: Vec<_> = bytes.chunks(4096).map(crc32c).collect();
        assert_eq!(checksums, expected);
        assert_eq!(loaded(mapping, 4096, 1 << 20), bytes);
    }
}

#[test]
#[should_panic(expected = "reaches past")]
fn a_store_outside_the_region_panics() {
    mappings()[0].store(SIZE - 1, &[1, 2]);
}

#[test]
fn a_load_outside_the_region_is_an_error() {
    let mapping = &mappings()[0];
    assert_eq!(mapping.load(SIZE - 1, &mut [0; 2]).map_err(|error| error.at), Err(SIZE - 1));
    assert_eq!(mapping.load(u64::MAX, &mut [0; 2]).map_err(|error| error.at), Err(u64::MAX));
    mapping.prefetch(u64::MAX);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn stored_checksums_are_those_of_the_blocks(
        at in 0_u64..5000, from in 0_usize..100, length in 0_usize..20_000, first in 0_usize..5000, seed: u64,
    ) {
        // Half of the cases as the engine stores: aligned, in sectors.
        let aligned = seed.is_multiple_of(2);
        let (at, length, first) =
            if aligned { (at / 64 * 64, length / 512 * 512, first / 512 * 512) } else { (at, length, first) };
        let source = noise(from + length, seed);
        let data = &source[from..];
        let (head, rest) = data.split_at(first.min(length));
        let mut expected = vec![crc32c(head)];
        expected.extend(rest.chunks(4096).map(crc32c));
        for mapping in mappings().iter() {
            // A range of its own: the tests share the mappings.
            let at = at + (2 << 20);
            let mut checksums = vec![0; blocks_of(length, first)];
            mapping.store_summed(at, data, first, &mut checksums);
            mapping.fence();
            prop_assert_eq!(&checksums, &expected);
            prop_assert_eq!(loaded(mapping, at, length), data);
        }
    }

    #[test]
    fn a_loaded_checksum_is_that_of_the_bytes(
        at in 0_u64..5000, into in 0_usize..100, length in 0_usize..20_000, seed: u64,
    ) {
        let source = noise(length, seed);
        for mapping in mappings().iter() {
            let at = at + (3 << 20);
            mapping.store(at, &source);
            mapping.fence();
            let mut target = vec![0; into + length];
            prop_assert_eq!(mapping.load_summed(at, &mut target[into..]), Ok(crc32c(&source)));
            prop_assert_eq!(&target[into..], &source);
            prop_assert!(target[..into].iter().all(|&byte| byte == 0));
        }
    }
}

//! What a mapping does to the memory, by the operations of the processor.

use super::*;
use crate::recorder;

#[test]
fn a_fence_of_a_mapping_is_one_of_the_processor() {
    let mapping = Mapping::anonymous(1 << 20).expect("memory");
    recorder::take();
    mapping.fence();
    assert_eq!(recorder::take().fences, 1);
}

#[test]
fn memory_that_another_kernel_can_have_is_known() {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
    file.as_file().set_len(1 << 20).expect("its size");
    let open = |options: &OpenOptions| Mapping::open(file.path(), options).expect("a region");
    assert_eq!(open(&OpenOptions::default()).reach(), Reach::Guests);
    let boot = Some(BootId([9; 16]));
    assert_eq!(open(&OpenOptions { boot, ..OpenOptions::default() }).reach(), Reach::Kernel);
    assert_eq!(Mapping::anonymous(1 << 20).expect("memory").reach(), Reach::Kernel);
}

/// How many lines of a mapping are in the caches and not on their way.
fn cached(mapping: &Mapping, found: &recorder::Record) -> usize {
    let begin = mapping.memory.base() / 64;
    let lines = begin..begin + (1 << 20) / 64;
    found.cached.iter().filter(|line| lines.contains(line)).count()
}

#[test]
fn what_is_shared_stays_in_the_caches_unless_other_machines_have_the_memory() {
    let ways: [fn(&Mapping); 2] =
        [|mapping| mapping.share(4096, &[1; 4096]), |mapping| _ = mapping.share_summed(4096, &[1; 4096])];
    let kinds = [(false, Kind::Tmpfs), (true, Kind::DaxFile), (false, Kind::DeviceDax)];
    for ((mixes_pages, kind), share) in kinds.into_iter().flat_map(|kind| ways.map(|way| (kind, way))) {
        let mut mapping = Mapping::anonymous(1 << 20).expect("memory");
        mapping = Mapping { methods: recorder::methods(true), kind, mixes_pages, ..mapping };
        share(&mapping);
        let found = recorder::take();
        let is_coherent = mapping.reach() != Reach::Machines;
        let expected = if is_coherent { (64, false) } else { (0, true) };
        assert_eq!((cached(&mapping, &found), found.fences > 0), expected, "{kind:?}");
        // The other one, because the user says so.
        let chosen = if is_coherent { Coherence::Software } else { Coherence::Hardware };
        mapping.coherence = Some(chosen);
        share(&mapping);
        let found = recorder::take();
        let expected = if is_coherent { (0, true) } else { (64, false) };
        assert_eq!((cached(&mapping, &found), found.fences > 0), expected, "{kind:?}, {chosen:?}");
        assert_eq!(mapping.describe().ends_with(", software coherence"), is_coherent);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn no_store_reaches_memory_that_was_given_up() {
    let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
    file.as_file().set_len(1 << 20).expect("its size");
    let mapping = Mapping::open(file.path(), &OpenOptions::default()).expect("a region");
    mapping.store(4096, &[1; 4096]);
    mapping.fence();
    mapping.observe(0, 1 << 20);
    assert_eq!(mapping.failed_at(), None);
    mapping.give_up();
    assert_eq!(mapping.failed_at(), Some(0));
    for length in [1, 64, 4096, 300 << 10] {
        mapping.store(4096, &vec![2; length]);
        mapping.store_summed(4096, &vec![3; length], 4096, &mut vec![0; length.div_ceil(4096)]);
    }
    mapping.store_line(0, &[4; 64]);
    mapping.write_back(0, 1 << 20);
    mapping.observe(0, 1 << 20);
    mapping.publish(0, 64);
    mapping.share(0, &[5; 64]);
    mapping.prefetch(0);
    assert!(mapping.load(4096, &mut [0; 64]).is_err() && mapping.load_summed(0, &mut [0; 64]).is_err());
    let error = mapping.grow(file.path(), 2 << 20).expect_err("it is not this host's any more");
    assert_eq!(
        (error.kind(), file.as_file().metadata().expect("it is there").len()),
        (ErrorKind::Media, 1 << 20)
    );
    let bytes = std::fs::read(file.path()).expect("it is there");
    assert!(
        bytes[4096..8192] == [1; 4096]
            && bytes[8192..].iter().all(|byte| *byte == 0)
            && bytes[..64] == [0; 64]
    );
}

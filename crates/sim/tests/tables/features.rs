//! A transport gets a feature after it was formatted. At any crash one superblock is valid, and the region holds
//! nothing that needs the feature before every copy names it, so that an earlier program refuses the region.

use crate::rig::{CHANGES, Tables, backend, ends_of, format, made, open, region};
use cbd_format::{
    Layout, Superblock, crc32c,
    superblock::FEATURE_USE_NOTES,
    tables::{USE_SYNCED, USE_UNKNOWN},
};
use cbd_sim::{CrashMemory, act_as, until_crash};
use cbd_types::{BackendId, BootId, ByteRange, ErrorKind};

const BACKEND: BackendId = BackendId(0);
const PAGE: u64 = 4096;

const fn boot(number: u8) -> BootId {
    BootId([number; 16])
}

fn copies(image: &[u8]) -> [Option<Superblock>; 2] {
    let size = image.len() as u64;
    [0, Layout::second_superblock(size)].map(|at| {
        let block = Superblock::decode(&image[at as usize..])?.verify(size).ok()?;
        Some(block.0)
    })
}

/// Whether a program that knows no feature opens the region: it uses the first valid copy.
fn earlier_program_opens(image: &[u8]) -> bool {
    copies(image).into_iter().flatten().next().is_some_and(|block| block.incompatible.get() == 0)
}

#[track_caller]
fn both_name_it(image: &[u8], when: &str) {
    for (number, copy) in copies(image).into_iter().enumerate() {
        let names_it = copy.is_some_and(|block| block.has_incompatible(FEATURE_USE_NOTES));
        assert!(names_it, "{when}: copy {number} is {copy:?}");
    }
}

fn is_noted(tables: &Tables) -> bool {
    tables.backend_row(BACKEND).is_some_and(|row| row.use_state.get() != USE_UNKNOWN)
}

/// Crashes `require_feature` at every event, on memory that `hurt` has changed.
fn crash_everywhere(hurt: fn(&CrashMemory)) {
    for event in 1.. {
        let mut is_done = false;
        for seed in 0..8 {
            let memory = made(&CHANGES[..2]).0;
            hurt(&memory);
            let tables = open(&memory).expect("one copy is valid");
            memory.crash_after(event, seed);
            is_done = until_crash(|| tables.require_feature(FEATURE_USE_NOTES).expect("known")).is_ok();
            act_as(0);
            for (fate, end) in ends_of(&memory, 8).into_iter().enumerate() {
                let when = format!("event {event}, seed {seed}, fate {fate}");
                let tables = open(&end).unwrap_or_else(|error| panic!("{when}: {error}"));
                tables.backend(BACKEND).unwrap_or_else(|error| panic!("{when}: {error}"));
                if is_done {
                    both_name_it(&end.image(), &when);
                }
                tables.require_feature(FEATURE_USE_NOTES).unwrap_or_else(|error| panic!("{when}: {error}"));
                both_name_it(&end.image(), &when);
            }
        }
        if is_done {
            assert!(event > 4, "it has two copies, each with a fence");
            break;
        }
    }
}

#[test]
fn one_superblock_is_valid_at_every_crash_while_features_change() {
    crash_everywhere(|_| ());
}

#[test]
fn a_crash_while_features_change_leaves_the_only_valid_superblock() {
    crash_everywhere(|memory| memory.flip(60, 3));
    crash_everywhere(|memory| memory.flip(Layout::second_superblock(region().image().len() as u64) + 60, 3));
}

#[test]
fn a_superblock_that_cannot_be_read_keeps_the_other_one_from_being_changed() {
    let second = Layout::second_superblock(region().image().len() as u64);
    for at in [0, second] {
        let memory = made(&CHANGES[..2]).0;
        memory.poison(ByteRange::at(at, PAGE));
        let before = memory.image();
        let tables = open(&memory).expect("by the other copy");
        let error = tables.require_feature(FEATURE_USE_NOTES).expect_err("a crash could leave none");
        assert_eq!(error.kind(), ErrorKind::Media);
        assert!(error.line().contains("cbdctrl repair"), "{error}");
        assert!(memory.image() == before, "nothing was stored");
        // An unreadable superblock does not prevent the use of a region that has the feature already.
        let memory = made(&CHANGES[..2]).0;
        open(&memory).and_then(|tables| tables.require_feature(FEATURE_USE_NOTES)).expect("both are valid");
        memory.poison(ByteRange::at(at, PAGE));
        open(&memory).and_then(|tables| tables.require_feature(FEATURE_USE_NOTES)).expect("it has it");
    }
}

#[test]
fn a_damaged_superblock_gets_the_features_of_the_other_one() {
    let second = Layout::second_superblock(region().image().len() as u64);
    for at in [0, second] {
        let memory = made(&CHANGES[..2]).0;
        open(&memory).and_then(|tables| tables.require_feature(FEATURE_USE_NOTES)).expect("both are valid");
        memory.flip(at + 60, 3);
        let tables = open(&memory).expect("by the other copy");
        assert_eq!(tables.info().features, [0, 0, FEATURE_USE_NOTES]);
        tables.require_feature(FEATURE_USE_NOTES).expect("the memory works");
        both_name_it(&memory.image(), "repaired");
    }
}

#[test]
fn a_feature_that_this_program_does_not_know_is_not_required() {
    let (memory, tables) = made(&CHANGES[..2]);
    let before = memory.image();
    assert_eq!(tables.require_feature(1 << 40).expect_err("it is not known").kind(), ErrorKind::Unsupported);
    assert!(memory.image() == before);
}

#[test]
fn only_regions_in_ordinary_files_get_the_feature_of_notes() {
    let memory = made(&CHANGES[..2]).0;
    drop(open(&memory).and_then(|tables| tables.open_cache(BACKEND)).expect("a cache"));
    assert!(earlier_program_opens(&memory.image()), "what needs no note stays as it was");
    let file = region();
    file.become_file(boot(1));
    let tables = format(&file, false).expect("a fresh region");
    assert_eq!(tables.info().features, [0, 0, FEATURE_USE_NOTES]);
    both_name_it(&file.image(), "at format");
    CHANGES[..2].iter().for_each(|change| change(&tables).expect("possible"));
    drop(tables.open_cache(BACKEND).expect("a cache"));
    tables.sync().expect("the disk takes it");
    // The copy of such a region on persistent memory.
    let copy = CrashMemory::from_image(file.image());
    let tables = open(&copy).expect("a transport");
    drop(tables.open_cache(BACKEND).expect("it was synced"));
    assert_eq!(tables.info().features, [0, 0, FEATURE_USE_NOTES]);
}

type Start = (&'static str, fn(&CrashMemory));

/// The three initial states: both superblocks are valid, or the first or the second is damaged.
const STARTS: [Start; 3] = [
    ("both are whole", |_| ()),
    ("the first is damaged", |memory| memory.flip(60, 3)),
    ("the second is damaged", |memory| memory.flip(second(memory) + 60, 3)),
];

fn second(memory: &CrashMemory) -> u64 {
    Layout::second_superblock(memory.image().len() as u64)
}

/// Expects a valid superblock, and no note while an earlier program can open the region. Returns whether there is a
/// note.
#[track_caller]
fn is_noted_and_refused(memory: &CrashMemory, when: &str) -> bool {
    let image = memory.image();
    let tables = open(memory).unwrap_or_else(|error| panic!("{when}: {error}"));
    let is_noted = is_noted(&tables);
    assert!(!is_noted || !earlier_program_opens(&image), "{when}: a note without the feature");
    is_noted
}

/// At most one superblock may be changing on the disk.
#[track_caller]
fn one_superblock_is_on_the_disk(memory: &CrashMemory, when: &str) {
    let open_pages = memory.unsynced_pages();
    let superblocks = [0, second(memory)];
    assert!(
        !superblocks.iter().all(|at| open_pages.contains(at)),
        "{when}: the disk may be writing both superblocks"
    );
}

/// Another process opens the region and runs `steps`; it crashes in one of its events or completes. Then the machine
/// crashes.
fn go_on(memory: CrashMemory, steps: fn(&Tables), seed: u64, crash: Option<u64>, when: &str) {
    let when = format!("{when}; then event {crash:?}");
    if let Some(event) = crash {
        memory.crash_after(event, seed);
    }
    let result = until_crash(|| {
        let tables = open(&memory).unwrap_or_else(|error| panic!("{when}: {error}"));
        steps(&tables);
    });
    act_as(0);
    memory.never_crash();
    one_superblock_is_on_the_disk(&memory, &when);
    let end = memory.machine_crash(seed, boot(2));
    let is_noted = is_noted_and_refused(&end, &when);
    assert!(is_noted || result.is_err(), "{when}: the note is lost");
}

/// Runs `steps` on a region in an ordinary file as an earlier program left it, with a crash at every event.
fn upgrade_everywhere(changes: usize, steps: fn(&Tables)) {
    for (start, hurt) in STARTS {
        let before = made(&CHANGES[..changes]).0;
        hurt(&before);
        before.become_file(boot(1));
        for event in 1.. {
            let mut is_done = false;
            let mut notes = 0;
            for seed in 0..30 {
                let when = format!("{start}: event {event}, seed {seed}");
                let memory = before.fork();
                memory.crash_after(event, seed);
                is_done = until_crash(|| steps(&open(&memory).expect("a transport"))).is_ok();
                act_as(0);
                memory.never_crash();
                one_superblock_is_on_the_disk(&memory, &when);
                go_on(memory.fork().process_crash(), steps, seed, None, &when);
                go_on(memory.fork().process_crash(), steps, seed, Some(1 + seed % 20), &when);
                for end in [memory.fork().process_crash(), memory.machine_crash(seed, boot(2))] {
                    notes += u32::from(is_noted_and_refused(&end, &when));
                }
            }
            if is_done {
                assert!(event > 6 && notes > 0, "two superblocks and a row change, each with a sync");
                break;
            }
        }
    }
}

#[test]
fn no_note_is_in_a_region_that_an_earlier_program_opens_when_a_cache_is_opened() {
    upgrade_everywhere(2, |tables| drop(tables.open_cache(BACKEND).expect("it was left whole")));
}

#[test]
fn no_note_is_in_a_region_that_an_earlier_program_opens_when_a_cache_is_made() {
    upgrade_everywhere(1, |tables| {
        if tables.backend(BACKEND).is_err() {
            tables.create_backend(&backend(9)).expect("there is space");
        }
    });
}

/// Removes the features from the superblocks, so that an earlier program opens the region.
fn strip_features(memory: &CrashMemory) -> CrashMemory {
    let mut image = memory.image();
    let second = Layout::second_superblock(image.len() as u64) as usize;
    for at in [0, second] {
        image[at + 32..at + 40].fill(0);
        let sum = crc32c(&image[at + 12..at + size_of::<Superblock>()]);
        image[at + 8..at + 12].copy_from_slice(&sum.to_le_bytes());
    }
    let stripped = CrashMemory::from_image(image);
    stripped.become_file(boot(1));
    assert!(earlier_program_opens(&stripped.image()));
    stripped
}

#[test]
fn an_existing_note_is_used_only_after_the_feature_is_named() {
    let memory = region();
    memory.become_file(boot(1));
    let tables = format(&memory, false).expect("a fresh region");
    CHANGES[..2].iter().for_each(|change| change(&tables).expect("possible"));
    let cache = tables.open_cache(BACKEND).expect("a cache");
    cache.write(ByteRange::at(0, 4096), &[7; 4096], std::task::Waker::noop()).expect("it runs");
    drop((cache, tables));
    let stripped = strip_features(&memory);
    drop(open(&stripped).and_then(|tables| tables.open_cache(BACKEND)).expect("the same boot"));
    both_name_it(&stripped.image(), "a cache is opened");
    let stripped = strip_features(&memory);
    let tables = open(&stripped).expect("a transport");
    tables.sync().expect("the disk takes it");
    assert_eq!(tables.backend_row(BACKEND).expect("a row").use_state.get(), USE_SYNCED);
    both_name_it(&stripped.image(), "the region is synced");
}

//! Features that are added to the superblocks after the format, and what is kept of superblocks that were read.

use super::*;
use cbd_format::superblock::INCOMPATIBLE_KNOWN;

const SECOND: u64 = SIZE - PAGE;

/// A transport without features, opened on memory that mixes pages.
fn plain() -> Tested {
    let memory = transport().region.memory().copy_to(true);
    Transport::open(Arc::new(Still::default()), Region::new(memory)).expect("it opens")
}

fn features(transport: &Tested) -> u64 {
    transport.info().features[2]
}

/// The steps that make a superblock durable.
fn stored(at: u64) -> [Op; 3] {
    [Op::Store(at, 192), Op::Fence, Op::Sync(at, PAGE)]
}

#[test]
fn a_feature_is_durable_in_one_superblock_before_the_other_one_changes() {
    let transport = plain();
    ops(&transport);
    transport.require_feature(FEATURE_USE_NOTES).expect("no store fails");
    assert_eq!(ops(&transport), [stored(SECOND), stored(0)].concat());
    assert_eq!(
        (features(&transport), features(&reopened(&transport))),
        (FEATURE_USE_NOTES, FEATURE_USE_NOTES)
    );
    transport.require_feature(FEATURE_USE_NOTES).expect("it is there");
    assert_eq!(ops(&transport), []);
    for unknown in [1 << 40, FEATURE_USE_NOTES | 1 << 40, INCOMPATIBLE_KNOWN + 1] {
        assert_eq!(kind(transport.require_feature(unknown)), Some(ErrorKind::Unsupported));
    }
    assert_eq!((ops(&transport), features(&transport)), (vec![], FEATURE_USE_NOTES));
}

#[test]
fn settings_with_which_requests_go_past_the_cache_are_stored_behind_the_feature() {
    let bypassed: [fn(&mut Settings); 6] = [
        |settings| settings.cache_mode = CacheMode::Writethrough,
        |settings| settings.cache_mode = CacheMode::Writearound,
        |settings| settings.cache_mode = CacheMode::Passthrough,
        |settings| settings.sequential_write_cutoff = 1,
        |settings| settings.congestion_write_us = 1,
        |settings| settings.when_full = WhenFull::Around,
    ];
    for change in bypassed {
        let transport = transport();
        let id = transport.create_backend(&spec()).expect("there is room");
        let cache = transport.open_cache(id).expect("it opens");
        let mut settings = cache.settings();
        change(&mut settings);
        let error = cache.set_settings(settings).expect_err("the region is not ready for it");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        ops(&transport);
        transport.update_settings(id, settings).expect("no store fails");
        let done = ops(&transport);
        let fences: Vec<usize> = (0..done.len()).filter(|at| done[*at] == Op::Fence).collect();
        let row = done.iter().position(|op| matches!(op, Op::Store(at, 1024) if *at != 0 && *at != SECOND));
        assert!(fences[1] < row.expect("the row is stored"), "{done:?}");
        assert_eq!(features(&reopened(&transport)) & FEATURE_BYPASS, FEATURE_BYPASS);
        cache.set_settings(settings).expect("it is ready");
        drop(cache);
        let cache = reopened(&transport).open_cache(id).expect("it opens");
        assert_eq!(cache.settings(), settings);
        cache.set_settings(settings).expect("a region with the feature is ready");
    }
    let mut spec = spec();
    spec.settings.cache_mode = CacheMode::Writearound;
    let transport = transport();
    transport.create_backend(&spec).expect("there is room");
    assert_eq!(features(&reopened(&transport)) & FEATURE_BYPASS, FEATURE_BYPASS);
}

#[test]
fn a_feature_that_could_not_be_kept_is_stored_again_in_the_copies_that_may_lack_it() {
    // The first sync fails, or the second one.
    let transport = plain();
    transport.region.memory().fail_syncs(1);
    assert_eq!(kind(transport.require_feature(FEATURE_USE_NOTES)), Some(ErrorKind::System));
    assert_eq!(features(&transport), 0, "not yet");
    ops(&transport);
    transport.require_feature(FEATURE_USE_NOTES).expect("no sync fails");
    assert_eq!(ops(&transport), [stored(SECOND), stored(0)].concat());

    let transport = plain();
    ops(&transport);
    transport.region.memory().fail_stores_after(1);
    assert_eq!(kind(transport.require_feature(FEATURE_USE_NOTES)), Some(ErrorKind::Media));
    assert_eq!((features(&transport), features(&reopened(&transport))), (0, FEATURE_USE_NOTES));
    let after = ops(&transport);
    assert!(!after.contains(&Op::Sync(0, PAGE)), "the store failed: {after:?}");
}

#[test]
fn a_superblock_that_lacks_a_feature_of_the_other_one_gets_it_before_the_feature_is_used() {
    let transport = formatted(true);
    for at in [0, SECOND] {
        let memory = transport.region.memory().copy();
        memory.store(at + 100, &[0xff; 8]);
        let opened = Transport::open(Arc::new(Still::default()), Region::new(memory)).expect("it opens");
        ops(&opened);
        opened.require_feature(FEATURE_USE_NOTES).expect("no store fails");
        assert_eq!(ops(&opened), stored(at));
        opened.require_feature(FEATURE_USE_NOTES).expect("it is there");
        assert_eq!(ops(&opened), []);
    }
}

#[test]
fn a_superblock_that_cannot_be_read_gets_no_new_feature_and_prevents_none_that_is_there() {
    for at in [0, SECOND] {
        for (transport, has_it) in [(plain(), false), (formatted(true), true)] {
            let memory = transport.region.memory().copy();
            memory.fail(ByteRange::at(at, PAGE));
            let opened = Transport::open(Arc::new(Still::default()), Region::new(memory)).expect("it opens");
            ops(&opened);
            let result = opened.require_feature(FEATURE_USE_NOTES);
            assert_eq!(ops(&opened), []);
            match result {
                Ok(()) => assert!(has_it),
                Err(error) => {
                    assert!(!has_it && error.kind() == ErrorKind::Media);
                    assert!(error.line().contains(&format!("superblock at byte {at} ")), "{}", error.line());
                }
            }
        }
    }
}

#[test]
fn what_was_read_is_written_back_fenced_and_synced_before_anything_changes() {
    let transport = formatted(true);
    let opened = reopened(&transport);
    let all = ops(&opened);
    let position = |op: Op| all.iter().position(|seen| *seen == op).expect("it is asked for");
    for at in [0, SECOND] {
        assert!(position(Op::WriteBack(at, PAGE)) < position(Op::Fence));
        let sync = position(Op::Sync(at, PAGE));
        assert!(
            matches!(all[sync - 2..sync], [Op::Store(touched, 64), Op::Fence] if touched == at),
            "{all:?}"
        );
    }
    let plain = reopened(&self::transport());
    assert!(!ops(&plain).iter().any(|op| matches!(op, Op::Store(..))), "no byte changes");
    assert!(position(Op::Fence) < position(Op::Store(0, 64)));
}

#[test]
fn a_region_too_small_for_superblocks_is_foreign() {
    for size in [192, PAGE - 1, PAGE, 2 * PAGE - 1, 2 * PAGE, 3 * PAGE] {
        let opened = Transport::open(Arc::new(Still::default()), Ram::region(size as usize));
        assert_eq!(kind(opened), Some(ErrorKind::Foreign), "{size} bytes");
    }
}

#[test]
fn the_first_use_of_a_cache_on_memory_that_mixes_pages_requires_the_feature() {
    let transport = plain();
    let bare = transport.create_backend(&BackendSpec { cache_bytes: None, ..spec() }).expect("room");
    assert_eq!((features(&transport), transport.pages_of(bare).ok()), (0, Some(Pages::Whole)));
    transport.create_backend(&spec()).expect("room");
    assert_eq!(features(&transport), FEATURE_USE_NOTES);
    // A cache of another memory that is opened on such memory, too.
    let elsewhere = self::transport();
    let id = elsewhere.create_backend(&spec()).expect("room");
    assert_eq!(
        (features(&elsewhere), elsewhere.backend_row(id).map(|row| row.use_state.get())),
        (0, Some(tables::USE_UNKNOWN))
    );
    let memory = elsewhere.region.memory().copy_to(true);
    let copied = Transport::open(Arc::new(Still::default()), Region::new(memory)).expect("it opens");
    assert_eq!(copied.pages_of(id).ok(), Some(Pages::Unknown));
    drop(copied.open_cache(id).expect("it opens"));
    assert_eq!(features(&copied), FEATURE_USE_NOTES);
}

//! Settings and path of a backend, kept for the next process.

use super::*;

#[test]
fn settings_and_path_are_kept_in_both_slots_for_the_next_process() {
    let transport = transport();
    let id = transport.create_backend(&spec()).expect("there is room");
    let settings = Settings {
        gc_percent: 11,
        consistency: Consistency::None,
        writeback_rate: 5,
        dirty_target_percent: 33,
        on_write_error: OnWriteError::Stop,
        write_error_after_s: 7,
        cache_mode: CacheMode::Writearound,
        read_fill: ReadFill::Off,
        sequential_read_cutoff: 0,
        readahead: Readahead::Off,
        sequential_write_cutoff: 1,
        when_full: WhenFull::Around,
        congestion_read_us: 2,
        congestion_write_us: 3,
        read_latency_target_us: 4,
        writeback_paused_until_ms: 6,
        pin_percent: 40,
        metadata_min_percent: 20,
        metadata_max_percent: 90,
    };
    transport.require_feature(FEATURE_BYPASS).expect("no store fails");
    ops(&transport);
    transport.update_settings(id, settings).expect("it is there");
    let places = slots::<BackendRow>(transport.layout().backend_area, 4, 0);
    assert_eq!(ops(&transport), kept(places, 1024, false));
    transport.update_path(id, "/dev/another").expect("it is there");
    let entry = reopened(&transport).backend(id).expect("it is good");
    assert_eq!((entry.settings, entry.path.as_str()), (settings, "/dev/another"));
    let invalid = [(99, 50), (11, 0), (11, 61)];
    for (gc_percent, pin_percent) in invalid {
        let invalid = Settings { gc_percent, pin_percent, ..settings };
        assert_eq!(kind(transport.update_settings(id, invalid)), Some(ErrorKind::InvalidArgument));
    }
    assert_eq!(kind(transport.update_settings(BackendId(1), settings)), Some(ErrorKind::NotFound));
    assert_eq!(kind(transport.update_path(id, &"p".repeat(513))), Some(ErrorKind::InvalidArgument));
}

//! Codes, names and ranges of settings.

use super::*;

#[test]
fn each_choice_has_its_code_and_its_name() {
    let consistencies = Consistency::ALL.map(|choice| (choice.code(), choice.name()));
    assert_eq!(consistencies, [(0, "strict"), (1, "checkpoint"), (2, "none")]);
    let policies = OnWriteError::ALL.map(|choice| (choice.code(), choice.name()));
    assert_eq!(policies, [(0, "stop"), (1, "park")]);
    assert_eq!([0, 1, 2].map(Consistency::from_code), Consistency::ALL.map(Some));
    assert_eq!([0, 1].map(OnWriteError::from_code), OnWriteError::ALL.map(Some));
    assert_eq!(ReadFill::ALL.map(ReadFill::name), ["admit", "all", "off"]);
    assert_eq!(Readahead::ALL.map(Readahead::name), ["auto", "off"]);
    assert_eq!(WhenFull::ALL.map(WhenFull::name), ["wait", "around"]);
    assert_eq!(
        (Consistency::from_name("none"), Consistency::from_name("None")),
        (Some(Consistency::None), None)
    );
    assert_eq!((Consistency::from_code(3), OnWriteError::from_code(2)), (None, None));
}

#[test]
fn the_defaults_are_those_of_the_documentation() {
    let defaults = Settings::default();
    assert_eq!((defaults.gc_percent, defaults.dirty_target_percent, defaults.writeback_rate), (97, 10, 0));
    assert_eq!((defaults.consistency, defaults.on_write_error), (Consistency::Strict, OnWriteError::Stop));
    assert_eq!(defaults.write_error_after_s, 60);
    assert_eq!((defaults.read_fill, defaults.readahead), (ReadFill::Admit, Readahead::Auto));
    assert_eq!((defaults.sequential_read_cutoff, defaults.sequential_write_cutoff), (1 << 20, 0));
    assert_eq!(defaults.when_full, WhenFull::Wait);
    assert_eq!((defaults.congestion_read_us, defaults.congestion_write_us), (0, 0));
    assert_eq!((defaults.read_latency_target_us, defaults.writeback_paused_until_ms), (0, 0));
}

#[test]
fn a_setting_is_valid_up_to_its_limit() {
    let is_valid = |change: fn(&mut Settings)| {
        let mut settings = Settings::default();
        change(&mut settings);
        settings.validated().map(|valid| valid == settings)
    };
    for change in [
        (|settings| settings.gc_percent = 98) as fn(&mut Settings),
        |settings| settings.gc_percent = 0,
        |settings| settings.dirty_target_percent = 90,
        |settings| settings.write_error_after_s = 86_400,
        |settings| settings.write_error_after_s = 0,
        |settings| settings.congestion_read_us = 60_000_000,
        |settings| settings.congestion_write_us = 60_000_000,
        |settings| settings.read_latency_target_us = 60_000_000,
    ] {
        assert!(is_valid(change).expect("it is valid"));
    }
    for (change, name) in [
        ((|settings| settings.gc_percent = 99) as fn(&mut Settings), "gc_percent is 99"),
        (|settings| settings.dirty_target_percent = 91, "dirty_target_percent is 91"),
        (|settings| settings.write_error_after_s = 86_401, "write_error_after_s is 86401"),
        (|settings| settings.congestion_read_us = 60_000_001, "congestion_read_us is 60000001"),
        (|settings| settings.congestion_write_us = 60_000_001, "congestion_write_us is 60000001"),
        (|settings| settings.read_latency_target_us = 60_000_001, "read_latency_target_us is 60000001"),
    ] {
        let error = is_valid(change).expect_err(name);
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.line().contains(name), "{}", error.line());
    }
}

//! A region in an ordinary file that was in use when the machine crashed: the tools report it, and write its
//! data only on request.
#![allow(missing_docs)]

mod support;

use cbd_engine::{Admission, Transport};
use cbd_inspect::Report;
use cbd_inspect::check::{DataChecked, check};
use cbd_inspect::rescue::{Options, Rescued, rescue};
use cbd_pmem::{Mapping, OpenOptions, Reader};
use cbd_runtime::ProcessEnvironment;
use cbd_types::{BackendId, BootId, ByteRange, ErrorKind, Region};
use std::sync::Arc;
use std::task::Waker;
use support::{BLOCK, Fixture};

const OTHER: BootId = BootId([9; 16]);

/// A region that holds a dirty block of another boot.
fn left_by_another_boot() -> Fixture {
    let fixture = Fixture::new();
    let how = OpenOptions { boot: Some(OTHER), ..OpenOptions::default() };
    let region = Region::new(Mapping::open(fixture.region(), &how).expect("mapped"));
    let transport = Transport::open(Arc::new(ProcessEnvironment::new()), region).expect("a transport");
    let cache = transport.open_cache(BackendId(0)).expect("a cache");
    let written = cache.write(ByteRange::at(0, BLOCK), &[7; BLOCK as usize], Waker::noop());
    assert!(matches!(written, Ok(Admission::Done(_))));
    fixture
}

fn checked(fixture: &Fixture) -> Report {
    let region = Reader::open(fixture.region()).expect("it is free");
    check(Arc::new(region), DataChecked::None, &mut |_| {})
}

fn rescued(fixture: &Fixture, options: &Options) -> Rescued {
    let region = Mapping::open(fixture.region(), &OpenOptions::default()).expect("it is free");
    rescue(region, options, &mut |_| {}).expect("a transport").remove(0)
}

fn first_byte(fixture: &Fixture) -> u8 {
    std::fs::read(fixture.disk()).expect("the disk")[0]
}

#[test]
fn check_reports_that_pages_may_be_old_and_changes_nothing() {
    let fixture = left_by_another_boot();
    for _ in 0..2 {
        let report = checked(&fixture);
        assert_eq!(report.exit_code, 2);
        assert!(report.backends[0].mixed_pages);
        let said = report.findings.iter().any(|finding| finding.what.contains(&OTHER.to_string()));
        assert!(said, "{:?}", report.findings);
    }
}

#[test]
fn rescue_writes_a_region_of_another_boot_only_with_the_option() {
    let fixture = left_by_another_boot();
    let before = first_byte(&fixture);
    let refused = rescued(&fixture, &Options::default());
    assert!(!refused.opened && !refused.complete);
    assert!(refused.error.is_some_and(|error| error.contains("was not closed")));
    assert_eq!(first_byte(&fixture), before);
    let done = rescued(&fixture, &Options { after_crash: true, ..Options::default() });
    assert!(done.complete && done.warnings.iter().any(|warning| warning.contains("may be old")), "{done:?}");
    assert_eq!(first_byte(&fixture), 7);
    // The cache was closed cleanly.
    assert!(!checked(&fixture).backends[0].mixed_pages);
    let how = OpenOptions { boot: Some(OTHER), ..OpenOptions::default() };
    let region = Region::new(Mapping::open(fixture.region(), &how).expect("mapped"));
    let transport = Transport::open(Arc::new(ProcessEnvironment::new()), region).expect("a transport");
    assert_ne!(
        transport.open_cache(BackendId(0)).map(drop).map_err(|error| error.kind()),
        Err(ErrorKind::Torn)
    );
}

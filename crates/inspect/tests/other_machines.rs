//! A region that a host of another machine has is opened by no tool while that host lives.

mod support;

use cbd_inspect::open::{announce, to_change, to_read};
use cbd_inspect::rescue::{Options, rescue};
use cbd_testkit::other_machine::OtherMachine;
use cbd_types::{Error, ErrorKind, Region};
use std::sync::Arc;
use support::Fixture;

const WHO: &str = "host node-elsewhere (process 4242 there) on another machine";

#[track_caller]
fn refused(error: Option<Error>) {
    let error = error.expect("the other machine lives");
    assert!(error.kind() == ErrorKind::Busy && error.line().contains(WHO), "{error}");
}

#[test]
fn no_tool_opens_a_region_that_a_living_host_elsewhere_has() {
    let fixture = Fixture::new();
    let file = tempfile::Builder::new().prefix("cbd-test-").tempfile_in("/dev/shm").expect("a file");
    let path = file.path();
    std::fs::copy(fixture.region(), path).expect("a copy of the region");
    let other = OtherMachine::take(path).expect("it takes the region");
    refused(to_read(path).err());
    refused(rescue(to_change(path).expect("no process here has it"), &Options::default(), &mut |_| {}).err());
    let region = Arc::new(Region::new(to_change(path).expect("no process here has it")));
    refused(announce(&region, path).err());
    other.release().expect("it is released");
    // A repair is the host meanwhile, and releases the region at its end.
    let presence = announce(&region, path).expect("no host has it");
    let held = std::fs::read(path).expect("it is there");
    assert!(presence.is_some() && held[2048..2056] == *b"CBDowner" && held[2060] == 1);
    drop(presence);
    assert_eq!(std::fs::read(path).expect("it is there")[2060], 2, "it is released");
    drop(region);
    to_read(path).expect("no host has it");
}

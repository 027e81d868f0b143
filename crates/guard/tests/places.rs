//! Places are bounded, and those of one kind are not taken by the other.

use cbd_guard::{Registration, Routines};
use cbd_types::ErrorKind;

/// Routines that nothing is in.
// SAFETY: no instruction lies between the two.
static NOTHING: Routines = unsafe { Routines::new(std::ptr::null(), std::ptr::null(), std::ptr::null()) };

fn fill(take: impl Fn() -> cbd_types::Result<Registration>) -> (Vec<Registration>, cbd_types::Error) {
    let mut taken = Vec::new();
    loop {
        match take() {
            Ok(registration) => taken.push(registration),
            Err(error) => return (taken, error),
        }
        assert!(taken.len() <= 10_000, "there is no bound");
    }
}

#[test]
fn guests_that_hand_over_much_leave_room_for_regions_and_the_reverse() {
    // SAFETY: nothing is there, so nothing is touched.
    let (guests, error) = fill(|| unsafe { Registration::of_zeroes(4096, 4096) });
    assert_eq!((guests.len(), error.kind()), (1024, ErrorKind::NoSpace));
    let (mut regions, error) = fill(|| Registration::of_routines(4096, 4096, &NOTHING));
    assert_eq!((regions.len(), error.kind()), (256, ErrorKind::NoSpace));
    drop(guests);
    let refused = Registration::of_routines(4096, 4096, &NOTHING).expect_err("none was given back");
    assert!(refused.line().contains("256 regions are mapped already"), "{refused}");
    regions.pop();
    Registration::of_routines(4096, 4096, &NOTHING).expect("one was given back");
}

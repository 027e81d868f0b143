//! Entries are bounded, and those of one kind are not used by the other.

use cbd_guard::{Registration, Routines};
use cbd_types::ErrorKind;

/// Routines without instructions.
// SAFETY: there is no instruction between the two.
static NOTHING: Routines = unsafe { Routines::new(std::ptr::null(), std::ptr::null(), std::ptr::null()) };

fn register_all(take: impl Fn() -> cbd_types::Result<Registration>) -> (Vec<Registration>, cbd_types::Error) {
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
fn the_entries_of_guests_and_of_regions_are_separate() {
    // SAFETY: there is no memory, and no access to it.
    let (guests, error) = register_all(|| unsafe { Registration::of_zeroes(4096, 4096) });
    assert_eq!((guests.len(), error.kind()), (1024, ErrorKind::NoSpace));
    let (mut regions, error) = register_all(|| Registration::of_routines(4096, 4096, &NOTHING));
    assert_eq!((regions.len(), error.kind()), (256, ErrorKind::NoSpace));
    drop(guests);
    let refused = Registration::of_routines(4096, 4096, &NOTHING).expect_err("no entry was freed");
    assert!(refused.line().contains("256 regions are mapped already"), "{refused}");
    regions.pop();
    Registration::of_routines(4096, 4096, &NOTHING).expect("an entry was freed");
}

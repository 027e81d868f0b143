//! The stores of a repair survive a power cut as soon as the repair returns.

use cbd_engine::{TwoSlots, copy_over};
use cbd_format::{LaneTail, Slot};
use cbd_sim::{CrashMemory, Keep};
use cbd_types::Region;

/// The offsets of the two copies, in different pages.
const AT: [u64; 2] = [0, 4096];

#[test]
fn a_copy_that_was_stored_over_a_damaged_one_stays() {
    let mut image = vec![0; 8192];
    image[..64].fill(0xa5);
    let memory = CrashMemory::from_image(image);
    let region = Region::new(memory.clone());
    copy_over(&region, AT[0], AT[1], 64).unwrap();
    let left = memory.power_cut(1, Keep::Nothing).image();
    assert_eq!(left[4096..4160], [0xa5; 64]);
}

#[test]
fn a_slot_that_was_stored_again_stays() {
    let content =
        LaneTail { ordinal: 5.into(), ownership: 1.into(), first_sequence: 9.into(), reserved: [0; 24] };
    let mut image = vec![0; 8192];
    image[..64].copy_from_slice(&Slot { sequence: 3, content }.encode_line(0));
    let memory = CrashMemory::from_image(image);
    let region = Region::new(memory.clone());
    assert!(TwoSlots::<LaneTail>::read(&region, AT, 0).store_again(&region));
    let left = memory.power_cut(1, Keep::Nothing).image();
    let read = AT.map(|at| Slot::<LaneTail>::decode(0, &left[at as usize..at as usize + 64]));
    assert_eq!(read.map(|slot| slot.map(|slot| slot.content)), [Some(content); 2]);
}

//! Damage, structure by structure. One failed copy costs nothing; two failed copies cost an error unless newer data
//! exists. Neither writeback nor reclaim nor a restart makes the damage larger, or forgets it.
//!
//! Each test drives one small cache step by step, so that it knows the slot and the segment of every record. The
//! other tests of this crate use random histories.

mod after_recovery;
mod at_recovery;
mod drained;
mod foreign;
mod in_the_log;
mod noted_once;
mod of_one_copy;
mod outside;
mod parked;
mod reclaimed;
mod recovery_point;
mod reopened;
mod rig;
mod rows;
mod scattered;
mod shared_reserve;
mod torn;
mod waiting;

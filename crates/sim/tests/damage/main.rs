//! Damage, structure by structure: one failed copy costs nothing, two failed copies cost an error unless
//! something newer exists, and neither writeback nor reclaim nor a restart makes the damage larger, or
//! forgets it.
//!
//! Each test drives one small cache step by step, so that it knows in which slot of which segment everything
//! lies. Random histories are in the other tests of this crate.

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
mod torn;
mod waiting;

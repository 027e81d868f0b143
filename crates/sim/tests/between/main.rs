//! Others come between two steps of an operation: at every moment at which it holds no lock, one moment after the
//! other, on one thread, so that each schedule is the same in every run.

mod flushes;
mod meeting;
mod openings;
mod parked;
mod reads;
mod reclaims;
mod rig;
mod short_of_space;
mod writebacks;

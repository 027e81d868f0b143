//! Other operations run between two steps of an operation, on one thread. A test tries every moment at which
//! the operation holds no lock, one after the other, so each schedule is the same in every run.

mod flushes;
mod meeting;
mod moments;
mod openings;
mod parked;
mod reads;
mod reclaims;
mod rig;
mod short_of_space;
mod writebacks;

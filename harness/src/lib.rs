//! What the project's tasks share.
//!
//! Invariants: every command has a time limit, and so has a task that a build machine runs; a process that a task started does not outlive it.
//!
//! Elsewhere: the tasks (`xtask`), guests (`cbd-guest`).
#![forbid(unsafe_code)]

pub mod deadline;
pub mod fio;
pub mod install;
pub mod leftovers;
pub mod packages;
pub mod problem;
pub mod processes;
pub mod random;
pub mod report;
pub mod shell;
pub mod workspace;

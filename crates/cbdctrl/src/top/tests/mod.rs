//! Tests of `top` without a daemon: samples from made statuses, pages on a terminal in memory.

mod away;
mod drawing;
mod panics;
mod pictures;
mod rates;
mod scene;
mod versions;

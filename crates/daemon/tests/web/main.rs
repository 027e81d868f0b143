//! The listener for metrics: its formats, its limits, its list of names.

mod clients;
mod fixture;
mod list;
#[cfg(feature = "page")]
mod page;

//! From the system's errors to ours.

pub use cbd_export::system_error;

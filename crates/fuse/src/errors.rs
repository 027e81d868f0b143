//! Converts system errors to the project's errors.

pub use cbd_export::system_error;

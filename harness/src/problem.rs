//! The reasons for which a task can fail.

/// The reason for which a task did not complete.
#[derive(Debug, PartialEq, Eq)]
pub enum Problem {
    /// The arguments were wrong: exit code 2.
    Usage(String),
    /// Something that the task needs is missing or failed: exit code 1.
    Failed(String),
    /// A command of the task failed and has printed the reason: its exit code.
    Code(u8),
}

//! Bytes that were read and are not trusted yet.

/// A value as it came from media. Nothing of it can be used before `verify`, which each type offers with
/// the arguments that its check needs.
#[derive(Clone, Copy, Debug)]
pub struct Unverified<T>(pub(crate) T);

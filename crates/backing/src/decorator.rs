//! A function that wraps backing devices: a demonstration or a test uses it to put its own device in front of a disk,
//! such as a [`Throttle`](crate::Throttle).

use crate::Backing;
use std::fmt;
use std::sync::Arc;

type Wrap = dyn Fn(Arc<dyn Backing>) -> Arc<dyn Backing> + Send + Sync;

/// A function that takes a backing device and returns the one to use in its place.
#[derive(Clone)]
pub struct Decorator(Arc<Wrap>);

impl Decorator {
    /// A decorator that calls `wrap`.
    pub fn new(wrap: impl Fn(Arc<dyn Backing>) -> Arc<dyn Backing> + Send + Sync + 'static) -> Self {
        Self(Arc::new(wrap))
    }

    /// The device to use in place of `inner`.
    #[must_use]
    pub fn wrap(&self, inner: Arc<dyn Backing>) -> Arc<dyn Backing> {
        (self.0)(inner)
    }
}

impl fmt::Debug for Decorator {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Decorator")
    }
}

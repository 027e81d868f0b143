//! Decorators by name, as a test, a demonstration or a hidden option asks for them.
//!
//! Always true here: a specification is understood whole or refused before anything is wrapped.
//!
//! Left to others: what the decorators do.

use crate::{Backing, FaultRule, Faulty, Throttle, ThrottleParameters, Traced};
use cbd_types::{Error, ErrorKind, Result};
use std::sync::Arc;

/// A decorator that is not around anything yet.
#[derive(Clone, PartialEq, Debug)]
pub enum Decorator {
    /// See [`Throttle`].
    Throttle(ThrottleParameters),
    /// See [`Faulty`].
    Fault(FaultRule),
    /// See [`Traced`].
    Trace,
}

impl Decorator {
    /// Reads `throttle:PARAMETERS` ([`ThrottleParameters::parse`]), `fault:RULE` ([`FaultRule::parse`]) or `trace`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for what is not understood.
    pub fn parse(text: &str) -> Result<Self> {
        let (name, arguments) = text.split_once(':').unwrap_or((text, ""));
        match name.trim() {
            "throttle" => Ok(Self::Throttle(ThrottleParameters::parse(arguments)?)),
            "fault" => Ok(Self::Fault(FaultRule::parse(arguments)?)),
            "trace" if arguments.is_empty() => Ok(Self::Trace),
            _ => {
                let text = format!("{text:?} is no decorator; there are throttle:..., fault:... and trace");
                Err(Error::new(ErrorKind::InvalidArgument, text))
            }
        }
    }

    /// Puts the decorator around a backing device.
    #[must_use]
    pub fn wrap(self, inner: Arc<dyn Backing>) -> Arc<dyn Backing> {
        match self {
            Self::Throttle(parameters) => Arc::new(Throttle::new(inner, parameters)),
            Self::Fault(rule) => Arc::new(Faulty::new(inner, vec![rule])),
            Self::Trace => Arc::new(Traced::new(inner)),
        }
    }
}

/// Puts the decorators that `specification` names around a backing device, the first innermost, separated by
/// semicolons: `throttle:seek_ms=8,rpm=7200,mib_per_s=150;fault:op=write,after=100`.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for what is not understood.
pub fn decorate(specification: &str, inner: Arc<dyn Backing>) -> Result<Arc<dyn Backing>> {
    let decorators: Vec<_> = specification.split(';').map(Decorator::parse).collect::<Result<_>>()?;
    Ok(decorators.into_iter().fold(inner, |inner, decorator| decorator.wrap(inner)))
}

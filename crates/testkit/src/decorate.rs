//! Decorators from a textual specification.
//!
//! Invariants: a specification is parsed completely, or refused before any device is wrapped.
//!
//! Elsewhere: the decorators themselves.

use crate::{FaultRule, Faulty, Traced};
use cbd_backing::{Backing, Decorator, Throttle, ThrottleParameters};
use cbd_types::{Error, ErrorKind, Result};
use std::sync::Arc;

/// The decorators that `specification` names, the first innermost, separated by semicolons: `throttle:PARAMETERS`
/// ([`ThrottleParameters::parse`]), `fault:RULE` ([`FaultRule::parse`]) or `trace`. For example
/// `throttle:seek_ms=8,rpm=7200,mib_per_s=150;fault:op=write,after=100`.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a specification that does not parse.
pub fn decorator(specification: &str) -> Result<Decorator> {
    let layers: Vec<_> = specification.split(';').map(Layer::parse).collect::<Result<_>>()?;
    Ok(Decorator::new(move |inner| layers.iter().fold(inner, |inner, layer| layer.wrap(inner))))
}

/// Wraps a backing device in the decorators of `specification`; see [`decorator`].
///
/// # Errors
/// As [`decorator`].
pub fn decorate(specification: &str, inner: Arc<dyn Backing>) -> Result<Arc<dyn Backing>> {
    Ok(decorator(specification)?.wrap(inner))
}

/// One decorator.
enum Layer {
    Throttle(ThrottleParameters),
    Fault(FaultRule),
    Trace,
}

impl Layer {
    fn parse(text: &str) -> Result<Self> {
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

    fn wrap(&self, inner: Arc<dyn Backing>) -> Arc<dyn Backing> {
        match self {
            Self::Throttle(parameters) => Arc::new(Throttle::new(inner, *parameters)),
            Self::Fault(rule) => Arc::new(Faulty::new(inner, vec![rule.clone()])),
            Self::Trace => Arc::new(Traced::new(inner)),
        }
    }
}

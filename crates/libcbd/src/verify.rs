//! Verification of a range: every copy is looked at where it is, and no data is moved to the program.
//!
//! Invariants: a verification changes nothing that a read returns, except that reads of data of which no good copy is left fail.
//!
//! Elsewhere: how the copies are looked at (`cbd-device`), many requests from one thread ([`crate::Queue::verify`]).

use crate::Device;
use cbd_runtime::Sweep;
use cbd_runtime::verify::VERIFY_STEP;
use cbd_types::{ByteRange, Error, ErrorKind, Result, Verified, Verify};
use std::ops::ControlFlow;
use std::time::Duration;

/// Longest range of one request to a queue, in bytes.
pub const QUEUED_VERIFY_MAX: u64 = 4 << 20;
/// A wait for the disk is repeated after this time, without effect.
const WAIT: Duration = Duration::from_secs(1);

impl Device {
    /// Verifies a range of any length, in whole sectors, and waits for it. `each` receives the result of each part in the order of the
    /// device, and can end the verification with an error of its own. Other threads may use the device meanwhile.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfRange`] and [`ErrorKind::InvalidArgument`] for a range that is not whole sectors of the device; the error of
    /// a part that could not be looked at. What is wrong with the data is no error: it is in the results.
    pub fn verify(
        &self,
        verify: Verify,
        each: &mut dyn FnMut(ByteRange, &Verified) -> ControlFlow<Error>,
    ) -> Result<()> {
        self.guarded_run(|run| {
            let Verify { range, level, repair } = verify;
            let range = run.check_range(range.start, Some(range.end.saturating_sub(range.start)))?;
            let mut verifier = run.verifier()?;
            let mut sweep = Sweep::new(range, level, repair);
            while !sweep.is_done() {
                while sweep.submit(&mut *verifier, VERIFY_STEP) > 0 {}
                if sweep.is_waiting() {
                    verifier.wait(WAIT)?;
                }
                let mut failed = None;
                sweep.collect(&mut *verifier, |part, result| {
                    if failed.is_none() {
                        failed = take(part, result, each).err();
                    }
                });
                if let Some(error) = failed {
                    verifier.give_up();
                    return Err(error);
                }
            }
            Ok(())
        })
    }
}

/// Passes on what was found, then the error of the part.
fn take(
    part: ByteRange,
    result: Result<Verified>,
    each: &mut dyn FnMut(ByteRange, &Verified) -> ControlFlow<Error>,
) -> Result<()> {
    let mut verified = result?;
    let error = verified.error.take();
    if let ControlFlow::Break(error) = each(part, &verified) {
        return Err(error);
    }
    error.map_or(Ok(()), Err)
}

/// # Errors
/// [`ErrorKind::InvalidArgument`] for a range that a queue does not take.
pub(crate) fn check_queued(range: ByteRange) -> Result<()> {
    if range.end.saturating_sub(range.start) > QUEUED_VERIFY_MAX {
        let text = format!(
            "{range} in one verification: a queue takes {QUEUED_VERIFY_MAX} bytes at a time; split the range"
        );
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    Ok(())
}

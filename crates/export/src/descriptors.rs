//! The descriptors of the process, which all exports and the control socket share.
//!
//! A client uses some descriptors: its socket, and those of its queue to the device. A client that would leave fewer than a
//! reserve is refused at once, so that the control socket still answers while clients use up all other descriptors.
//!
//! Invariants: a listening socket never stays readable because the process has no descriptor to accept with ([`Spare`]).

use cbd_types::{Error, ErrorKind, Result};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, getrlimit};
use socket2::Socket;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};

/// Descriptors that clients of exports cannot use, if the limit is high enough.
const RESERVE: u64 = 32;
/// Maximum number of descriptors of a client with one queue, besides its socket.
const PER_CLIENT: u64 = 6;

/// Refuses a client if few descriptors are left. `socket` is the socket of the client.
///
/// # Errors
/// [`ErrorKind::NoSpace`] with the limit.
pub fn check_reserve(socket: &impl AsFd) -> Result<()> {
    let limit = limit();
    let Some(lowest) = lowest_free(socket) else { return Err(few(limit)) };
    let reserve = RESERVE.min(limit / 4);
    if lowest.saturating_add(PER_CLIENT).saturating_add(reserve) > limit { Err(few(limit)) } else { Ok(()) }
}

fn few(limit: u64) -> Error {
    Error::new(
        ErrorKind::NoSpace,
        format!(
            "the process has few of its {limit} descriptors left; raise the limit of open files (LimitNOFILE)"
        ),
    )
}

/// The number of the next descriptor: all lower numbers are in use.
fn lowest_free(any: &impl AsFd) -> Option<u64> {
    u64::try_from(fcntl_dupfd_cloexec(any, 0).ok()?.as_raw_fd()).ok()
}

fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// A descriptor in reserve, with which a client can be accepted and disconnected when no other is left.
#[derive(Debug)]
pub struct Spare(Option<File>);

impl Default for Spare {
    fn default() -> Self {
        Self(File::open("/dev/null").ok())
    }
}

impl Spare {
    /// Accepts the next client of `listener` with the spare descriptor and closes it. Returns false if there is no spare
    /// descriptor: the client then waits until another descriptor is free.
    pub fn turn_away(&mut self, listener: &Socket) -> bool {
        let Some(spare) = self.0.take() else {
            *self = Self::default();
            return self.0.is_some();
        };
        drop(spare);
        // Dropping the socket disconnects the client.
        let turned_away = listener.accept().is_ok();
        *self = Self::default();
        turned_away
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Type};

    #[test]
    fn no_client_is_refused_while_many_descriptors_are_free() {
        let (one, _other) = Socket::pair(Domain::UNIX, Type::STREAM, None).expect("a pair");
        check_reserve(&one).expect("there are plenty");
        let lowest = lowest_free(&one).expect("there are plenty");
        assert!(lowest > one.as_raw_fd() as u64 || lowest < limit());
    }

    #[test]
    fn a_client_is_disconnected_with_the_spare_descriptor() {
        use std::io::Read;
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let (listener, _file) = crate::socket::listen(&path, "tests").expect("it listens");
        let listener = Socket::from(listener);
        let mut client = std::os::unix::net::UnixStream::connect(&path).expect("it listens");
        let mut spare = Spare::default();
        assert!(spare.turn_away(&listener));
        assert_eq!(client.read(&mut [0; 1]).expect("closed in order"), 0);
        assert!(spare.0.is_some(), "there is a spare one again");
    }
}

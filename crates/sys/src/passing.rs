//! One message with descriptors over a unix socket.
//!
//! Invariants: a message is received whole, with all its descriptors, or is an error. Received descriptors are closed
//! on `exec`.

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Most descriptors of a message: the kernel's limit (`SCM_MAX_FD`).
pub const DESCRIPTORS_MAX: usize = 253;
/// Most bytes of a text.
pub const TEXT_BYTES_MAX: usize = 512;
/// Size of the control data of a message with the most descriptors.
const SPACE: usize = rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX));

/// Whether the process at the other end of a unix socket has the same user.
pub fn is_of_own_user(socket: impl AsFd) -> bool {
    let own = rustix::process::geteuid();
    rustix::net::sockopt::socket_peercred(socket).is_ok_and(|peer| peer.uid == own)
}

/// A text and its descriptors.
pub type Message = (String, Vec<OwnedFd>);

/// Sends to the peer of a connected socket, or to an address.
///
/// # Errors
/// The system error; an error for more than [`DESCRIPTORS_MAX`] descriptors.
pub fn send(
    socket: impl AsFd,
    to: Option<&SocketAddrUnix>,
    text: &str,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = vec![MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other(format!(
            "{} descriptors are too many for one message",
            descriptors.len()
        )));
    }
    let parts = [IoSlice::new(text.as_bytes())];
    let socket = socket.as_fd();
    // The kernel does not restart a system call with a timeout after a signal.
    let sent = retry_on_intr(|| match to {
        Some(address) => {
            rustix::net::sendmsg_addr(socket, address, &parts, &mut control, SendFlags::NOSIGNAL)
        }
        None => rustix::net::sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL),
    })?;
    if sent == text.len() { Ok(()) } else { Err(io::Error::from(io::ErrorKind::WriteZero)) }
}

/// Waits for a message; none if the peer has disconnected.
///
/// # Errors
/// The system error, [`io::ErrorKind::WouldBlock`] if the socket does not wait; an error for a message that is not whole or no text.
pub fn receive(socket: impl AsFd) -> io::Result<Option<Message>> {
    let mut text = [0; TEXT_BYTES_MAX];
    let mut space = vec![MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut text)];
    let socket = socket.as_fd();
    // The kernel does not restart a system call with a timeout after a signal.
    let received =
        retry_on_intr(|| rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC))?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            descriptors.extend(passed);
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::other(
            "a message is longer than the limit, or one of its descriptors was lost",
        ));
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    let text = text.get(..received.bytes).and_then(|bytes| std::str::from_utf8(bytes).ok());
    let text = text.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    Ok(Some((text.to_owned(), descriptors)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::fs::File;
    use std::io::{Read, Seek, Write};

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn descriptors_arrive_in_order_and_refer_to_the_same_files() {
        let (one, other) = pair();
        let mut files: Vec<File> = (0..3).map(|_| tempfile::tempfile().unwrap()).collect();
        for (number, file) in files.iter_mut().enumerate() {
            write!(file, "{number}").unwrap();
        }
        let descriptors: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        send(&one, None, "put it", &descriptors).unwrap();
        let (text, came) = receive(&other).unwrap().unwrap();
        assert_eq!(text, "put it");
        for (number, descriptor) in came.into_iter().enumerate() {
            let (mut file, mut text) = (File::from(descriptor), String::new());
            file.rewind().unwrap();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, number.to_string());
        }
        drop(one);
        assert!(receive(&other).unwrap().is_none());
    }

    #[test]
    fn the_most_descriptors_that_the_kernel_passes_arrive_and_one_more_is_refused() {
        let (one, other) = pair();
        let file = tempfile::tempfile().unwrap();
        send(&one, None, "all", &vec![file.as_fd(); DESCRIPTORS_MAX]).unwrap();
        assert_eq!(receive(&other).unwrap().unwrap().1.len(), DESCRIPTORS_MAX);
        assert!(send(&one, None, "more", &vec![file.as_fd(); DESCRIPTORS_MAX + 1]).is_err());
    }

    #[test]
    fn a_wait_continues_after_the_process_was_stopped_and_continued() {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        let (one, other) = pair();
        // Only a wait with a timeout is interrupted by a stop.
        set_socket_timeout(&other, Timeout::Recv, Some(std::time::Duration::from_secs(20))).unwrap();
        let waiting = std::thread::spawn(move || receive(&other).unwrap().unwrap().0);
        let script = format!("kill -STOP {0}; sleep 0.05; kill -CONT {0}", std::process::id());
        for _ in 0..3 {
            assert!(std::process::Command::new("sh").args(["-c", &script]).status().unwrap().success());
        }
        assert!(!waiting.is_finished());
        send(&one, None, "at last", &[]).unwrap();
        assert_eq!(waiting.join().unwrap(), "at last");
    }

    #[test]
    fn a_text_that_is_too_long_is_an_error_and_no_part_of_it_is_accepted() {
        let (one, other) = pair();
        send(&one, None, &"x".repeat(TEXT_BYTES_MAX + 1), &[]).unwrap();
        assert!(receive(&other).is_err());
        send(&one, None, "next", &[]).unwrap();
        assert_eq!(receive(&other).unwrap().unwrap().0, "next");
    }
}

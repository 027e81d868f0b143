//! Validation of request heads: a task for the device, or an error.
//!
//! Invariants: a task's range lies inside the device, is whole sectors and is not empty; no payload is longer than
//! [`Rules::payload_max`]. No I/O, no state.

use super::handshake::{Contexts, Negotiated};
use super::memory::cost_of;
use crate::protocol::{RequestHeader, command, command_flag, transmission_flag};
use cbd_types::{ByteRange, Error, ErrorKind, Geometry, Operation, Result};

/// Bytes that a CACHE command reads at a time.
pub(super) const CACHE_PIECE: u64 = 1 << 20;
/// Bytes that the block status of a range may take.
const STATUS_COST: usize = 128 << 10;
/// Bytes that it may take if the range is verified: also the findings in a step of the verification.
const VERIFY_COST: usize = 768 << 10;

/// The rules for all requests to an export.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    pub(super) size: u64,
    /// Logical sector in bytes; every request is whole sectors.
    pub(super) sector: u32,
    /// Longest read or write in bytes.
    pub(super) payload_max: u32,
    read_only: bool,
    discard: bool,
    discard_granularity: u64,
    rotational: bool,
    fast_zeroes: bool,
    status_cost: usize,
}

/// What a request asks the server to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Task {
    /// One request to the device.
    Device { operation: Operation, range: ByteRange, fua: bool },
    /// Read the range and discard the data.
    Cache(ByteRange),
    /// Report the block status of the range; of its first extent only if `one` is set.
    Status { range: ByteRange, one: bool },
}

impl Rules {
    pub(super) fn new(geometry: &Geometry, read_only: bool, payload_max: u32) -> Self {
        Self {
            size: geometry.size,
            sector: geometry.sector,
            payload_max,
            read_only,
            discard: geometry.discard && !read_only,
            discard_granularity: u64::from(geometry.discard_granularity.max(geometry.sector)),
            rotational: geometry.rotational,
            fast_zeroes: geometry.fast_zeroes,
            status_cost: STATUS_COST,
        }
    }

    /// The rules for a client that selected `contexts`.
    pub(super) const fn with_contexts(self, contexts: Contexts) -> Self {
        Self { status_cost: if contexts.verify { VERIFY_COST } else { STATUS_COST }, ..self }
    }

    /// The transmission flags of the export.
    pub(super) fn flags(&self, structured: bool) -> u16 {
        use transmission_flag as flag;
        let mut flags =
            flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::CAN_MULTI_CONN | flag::SEND_CACHE;
        let mut set = |condition: bool, flag: u16| flags |= if condition { flag } else { 0 };
        set(self.read_only, flag::READ_ONLY);
        set(!self.read_only, flag::SEND_WRITE_ZEROES);
        set(self.fast_zeroes && !self.read_only, flag::SEND_FAST_ZERO);
        set(self.discard, flag::SEND_TRIM);
        set(self.rotational, flag::ROTATIONAL);
        set(structured, flag::SEND_DF);
        flags
    }

    /// Bytes that a valid request takes if it is executed as a whole.
    pub(super) fn cost(&self, header: &RequestHeader) -> usize {
        match header.command {
            command::READ | command::WRITE if header.length <= self.payload_max => {
                cost_of(header.length as usize)
            }
            command::CACHE => cost_of(u64::from(header.length).min(CACHE_PIECE) as usize),
            command::BLOCK_STATUS => self.status_cost,
            _ => 0,
        }
    }

    /// The task that `header` requests.
    ///
    /// # Errors
    /// The kind determines the error number that the client receives.
    pub(super) fn validate(&self, header: &RequestHeader, negotiated: &Negotiated) -> Result<Task> {
        self.check_flags(header, negotiated)?;
        let fua = header.flags & command_flag::FUA != 0;
        let device = |operation, range| Task::Device { operation, range, fua };
        match header.command {
            command::READ => {
                self.check_payload(header)?;
                let range = self.range(header, ErrorKind::InvalidArgument)?;
                // FUA has no meaning for a read; the protocol allows a server to ignore it.
                Ok(Task::Device { operation: Operation::Read, range, fua: false })
            }
            command::WRITE => {
                self.check_writable()?;
                self.check_payload(header)?;
                Ok(device(Operation::Write, self.range(header, ErrorKind::NoSpace)?))
            }
            command::FLUSH => {
                if header.offset != 0 || header.length != 0 {
                    return Err(invalid(
                        "a flush covers the whole device: its offset and length must be 0".into(),
                    ));
                }
                let range = ByteRange { start: 0, end: 0 };
                Ok(Task::Device { operation: Operation::Flush, range, fua: false })
            }
            command::TRIM => {
                self.check_writable()?;
                if !self.discard {
                    return Err(Error::new(ErrorKind::Unsupported, "this export does not offer trim"));
                }
                Ok(device(Operation::Discard, self.range(header, ErrorKind::InvalidArgument)?))
            }
            command::WRITE_ZEROES => {
                self.check_writable()?;
                let range = self.range(header, ErrorKind::NoSpace)?;
                Ok(device(self.zeroing(header, range), range))
            }
            command::CACHE => Ok(Task::Cache(self.range(header, ErrorKind::InvalidArgument)?)),
            command::BLOCK_STATUS => {
                if negotiated.contexts == Contexts::default() {
                    return Err(invalid("no metadata context was negotiated in the handshake".into()));
                }
                let range = self.range(header, ErrorKind::InvalidArgument)?;
                Ok(Task::Status { range, one: header.flags & command_flag::REQ_ONE != 0 })
            }
            unknown => Err(invalid(format!("command {unknown} is not supported"))),
        }
    }

    /// WRITE_ZEROES without NO_HOLE becomes a discard if the device promises zeroes after one. In a cache both are
    /// records and equally fast, so FAST_ZERO has no effect; without a cache it is not offered.
    fn zeroing(&self, header: &RequestHeader, range: ByteRange) -> Operation {
        let whole = |at: u64| at.is_multiple_of(self.discard_granularity);
        let may_be_hole = header.flags & command_flag::NO_HOLE == 0;
        if may_be_hole && self.discard && whole(range.start) && whole(range.end) {
            Operation::Discard
        } else {
            Operation::WriteZeroes
        }
    }

    fn check_flags(&self, header: &RequestHeader, negotiated: &Negotiated) -> Result<()> {
        use command_flag as flag;
        // FUA is valid with every command once it was offered.
        let known = flag::FUA
            | match header.command {
                command::READ if negotiated.structured => flag::DF,
                command::WRITE_ZEROES if self.fast_zeroes => flag::NO_HOLE | flag::FAST_ZERO,
                command::WRITE_ZEROES => flag::NO_HOLE,
                command::BLOCK_STATUS => flag::REQ_ONE,
                _ => 0,
            };
        let unknown = header.flags & !known;
        if unknown != 0 {
            return Err(invalid(format!(
                "flags {unknown:#x} are not supported with command {}",
                header.command
            )));
        }
        Ok(())
    }

    fn check_writable(&self) -> Result<()> {
        if self.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, "this export is read-only"));
        }
        Ok(())
    }

    fn check_payload(&self, header: &RequestHeader) -> Result<()> {
        if header.length > self.payload_max {
            return Err(invalid(format!(
                "{} bytes in one request; at most {} are supported",
                header.length, self.payload_max
            )));
        }
        Ok(())
    }

    fn range(&self, header: &RequestHeader, beyond: ErrorKind) -> Result<ByteRange> {
        if header.length == 0 {
            return Err(invalid("a request of zero bytes".into()));
        }
        let sector = u64::from(self.sector);
        let length = u64::from(header.length);
        if !header.offset.is_multiple_of(sector) || !length.is_multiple_of(sector) {
            return Err(invalid(format!(
                "{length} bytes at {} are not whole sectors of {sector} bytes",
                header.offset
            )));
        }
        match header.offset.checked_add(length) {
            Some(end) if end <= self.size => Ok(ByteRange { start: header.offset, end }),
            _ => Err(Error::new(
                beyond,
                format!(
                    "{length} bytes at {} reach past the end of the device at {}",
                    header.offset, self.size
                ),
            )),
        }
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 1 << 30;

    fn rules(discard: bool, read_only: bool) -> Rules {
        let geometry = Geometry {
            size: SIZE,
            sector: 512,
            physical_sector: 4096,
            atomic_unit: 1 << 20,
            discard,
            discard_granularity: 4096,
            rotational: false,
            fast_zeroes: true,
        };
        Rules::new(&geometry, read_only, 32 << 20)
    }

    #[test]
    fn a_device_on_which_zeroing_takes_as_long_as_writing_does_not_offer_fast_zeroes() {
        let slow = Rules { fast_zeroes: false, ..rules(true, false) };
        assert_eq!(slow.flags(true) & transmission_flag::SEND_FAST_ZERO, 0);
        assert_ne!(slow.flags(true) & transmission_flag::SEND_WRITE_ZEROES, 0);
        assert_ne!(rules(true, false).flags(true) & transmission_flag::SEND_FAST_ZERO, 0);
        let zero = |flags| {
            let header =
                RequestHeader { flags, command: command::WRITE_ZEROES, cookie: 0, offset: 0, length: 4096 };
            slow.validate(&header, &all()).map(drop).map_err(|error| error.kind())
        };
        assert_eq!(zero(command_flag::NO_HOLE), Ok(()));
        assert_eq!(zero(command_flag::FAST_ZERO), Err(ErrorKind::InvalidArgument));
    }

    fn all() -> Negotiated {
        Negotiated { structured: true, contexts: Contexts { allocation: true, state: true, verify: true } }
    }

    fn validate(command: u16, flags: u16, offset: u64, length: u32) -> Result<Task> {
        rules(true, false).validate(&RequestHeader { flags, command, cookie: 0, offset, length }, &all())
    }

    fn kind(command: u16, flags: u16, offset: u64, length: u32) -> ErrorKind {
        validate(command, flags, offset, length).expect_err("it is refused").kind()
    }

    #[test]
    fn a_range_past_the_end_is_no_space_for_writes_and_invalid_for_others() {
        for (command, expected) in [
            (command::READ, ErrorKind::InvalidArgument),
            (command::WRITE, ErrorKind::NoSpace),
            (command::TRIM, ErrorKind::InvalidArgument),
            (command::CACHE, ErrorKind::InvalidArgument),
            (command::WRITE_ZEROES, ErrorKind::NoSpace),
            (command::BLOCK_STATUS, ErrorKind::InvalidArgument),
        ] {
            assert!(validate(command, 0, SIZE - 512, 512).is_ok(), "command {command}");
            assert_eq!(kind(command, 0, SIZE - 512, 1024), expected, "command {command}");
            assert_eq!(kind(command, 0, u64::MAX - 511, 512), expected, "command {command}");
            assert_eq!(kind(command, 0, u64::MAX - 511, 1024), expected, "command {command}");
        }
    }

    #[test]
    fn a_request_that_is_not_whole_sectors_is_invalid() {
        for command in [command::READ, command::WRITE, command::TRIM, command::CACHE, command::WRITE_ZEROES] {
            for (offset, length) in [(1, 512), (512, 511), (0, 0), (256, 256)] {
                assert_eq!(kind(command, 0, offset, length), ErrorKind::InvalidArgument);
            }
        }
    }

    #[test]
    fn payloads_are_bounded_and_other_lengths_are_not() {
        assert_eq!(kind(command::READ, 0, 0, (32 << 20) + 512), ErrorKind::InvalidArgument);
        assert_eq!(kind(command::WRITE, 0, 0, (32 << 20) + 512), ErrorKind::InvalidArgument);
        assert!(validate(command::WRITE, 0, 0, 32 << 20).is_ok());
        assert!(validate(command::TRIM, 0, 0, 1 << 30).is_ok());
        assert!(validate(command::WRITE_ZEROES, 0, 0, 1 << 30).is_ok());
    }

    #[test]
    fn a_flag_is_known_only_with_its_command() {
        use command_flag as flag;
        let known = |command, flags| {
            validate(command, flags, 0, if command == command::FLUSH { 0 } else { 4096 }).is_ok()
        };
        for command in 0..8 {
            if command == command::DISC {
                continue;
            }
            assert!(known(command, flag::FUA), "command {command}");
            assert_eq!(known(command, flag::DF), command == command::READ, "command {command}");
            assert_eq!(known(command, flag::NO_HOLE), command == command::WRITE_ZEROES, "command {command}");
            assert_eq!(
                known(command, flag::FAST_ZERO),
                command == command::WRITE_ZEROES,
                "command {command}"
            );
            assert_eq!(known(command, flag::REQ_ONE), command == command::BLOCK_STATUS, "command {command}");
            assert!(!known(command, 1 << 9), "command {command}");
        }
        let simple = Negotiated::default();
        let fragment =
            RequestHeader { flags: flag::DF, command: command::READ, cookie: 0, offset: 0, length: 512 };
        assert!(rules(true, false).validate(&fragment, &simple).is_err());
    }

    #[test]
    fn zeroes_become_a_hole_only_where_client_device_and_alignment_allow_it() {
        let operation = |rules: Rules, flags, offset, length| {
            let header = RequestHeader { flags, command: command::WRITE_ZEROES, cookie: 0, offset, length };
            match rules.validate(&header, &all()).expect("it is legal") {
                Task::Device { operation, .. } => operation,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(operation(rules(true, false), 0, 4096, 8192), Operation::Discard);
        assert_eq!(operation(rules(true, false), command_flag::FAST_ZERO, 4096, 8192), Operation::Discard);
        assert_eq!(operation(rules(true, false), command_flag::NO_HOLE, 4096, 8192), Operation::WriteZeroes);
        assert_eq!(operation(rules(true, false), 0, 512, 8192), Operation::WriteZeroes);
        assert_eq!(operation(rules(false, false), 0, 4096, 8192), Operation::WriteZeroes);
    }

    #[test]
    fn changes_of_a_read_only_export_are_refused() {
        let rules = rules(true, true);
        for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
            let header = RequestHeader { flags: 0, command, cookie: 0, offset: 0, length: 4096 };
            assert_eq!(rules.validate(&header, &all()).expect_err("read-only").kind(), ErrorKind::ReadOnly);
        }
        let flags = rules.flags(true);
        assert_ne!(flags & transmission_flag::READ_ONLY, 0);
        let changing = transmission_flag::SEND_TRIM | transmission_flag::SEND_WRITE_ZEROES;
        assert_eq!(flags & changing, 0);
    }

    #[test]
    fn trim_is_offered_and_accepted_only_if_the_device_discards() {
        assert_ne!(rules(true, false).flags(false) & transmission_flag::SEND_TRIM, 0);
        assert_eq!(rules(false, false).flags(false) & transmission_flag::SEND_TRIM, 0);
        let header = RequestHeader { flags: 0, command: command::TRIM, cookie: 0, offset: 0, length: 4096 };
        let refused = rules(false, false).validate(&header, &all()).expect_err("not offered");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
    }

    #[test]
    fn unknown_commands_and_a_status_without_a_negotiated_context_are_invalid() {
        assert_eq!(kind(9, 0, 0, 512), ErrorKind::InvalidArgument);
        let header =
            RequestHeader { flags: 0, command: command::BLOCK_STATUS, cookie: 0, offset: 0, length: 512 };
        assert!(
            rules(true, false)
                .validate(&header, &Negotiated { structured: true, ..Negotiated::default() })
                .is_err()
        );
    }
}

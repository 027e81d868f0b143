//! Converts the kernel's description of a request.
//!
//! Invariants: whatever a description contains, the result lies inside the device, is whole sectors, and fits the
//! buffer of its slot; everything else is an error of that request only.

use crate::abi::{Description, operation};
use crate::parameters::SECTOR;
use cbd_types::{ByteRange, Class, Geometry, Operation};

/// An operation of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Task {
    /// The operation.
    pub operation: Operation,
    /// The range; empty for a flush.
    pub range: ByteRange,
    /// Durable at its completion.
    pub fua: bool,
    /// What the kernel says of its data.
    pub class: Class,
}

impl Task {
    /// Bytes of the slot's buffer that it uses.
    #[must_use]
    pub fn data_bytes(&self) -> usize {
        match self.operation {
            // At most the capacity of the slot's buffer.
            Operation::Read | Operation::Write => self.range.len() as usize,
            Operation::Flush | Operation::Discard | Operation::WriteZeroes => 0,
        }
    }
}

/// Validates and converts a description; the buffer of the request's slot has `capacity` bytes.
///
/// # Errors
/// The errno of the reply.
pub fn parse(
    description: &Description,
    geometry: &Geometry,
    read_only: bool,
    capacity: usize,
) -> Result<Task, i32> {
    let Description { operation_and_flags, sectors, first_sector, .. } = *description;
    let operation = match operation_and_flags & operation::MASK {
        operation::READ => Operation::Read,
        operation::WRITE => Operation::Write,
        operation::FLUSH => {
            let range = ByteRange { start: 0, end: 0 };
            return Ok(Task { operation: Operation::Flush, range, fua: false, class: Class::Unmarked });
        }
        operation::DISCARD => Operation::Discard,
        operation::WRITE_ZEROES => Operation::WriteZeroes,
        _ => return Err(libc::EOPNOTSUPP),
    };
    let start = first_sector.checked_mul(SECTOR).ok_or(libc::EIO)?;
    let end = start.checked_add(u64::from(sectors) * SECTOR).ok_or(libc::EIO)?;
    let range = ByteRange { start, end };
    let sector = u64::from(geometry.sector);
    if range.is_empty() || end > geometry.size || !start.is_multiple_of(sector) || !end.is_multiple_of(sector)
    {
        return Err(libc::EIO);
    }
    let changes = operation != Operation::Read;
    let carries = matches!(operation, Operation::Read | Operation::Write);
    if carries && range.len() > capacity as u64 {
        return Err(libc::EIO);
    }
    if changes && read_only {
        return Err(libc::EROFS);
    }
    if operation == Operation::Discard && !geometry.discard {
        return Err(libc::EOPNOTSUPP);
    }
    let class = if operation_and_flags & operation::META != 0 { Class::Metadata } else { Class::Unmarked };
    Ok(Task { operation, range, fua: changes && operation_and_flags & operation::FUA != 0, class })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parameters::TRANSFER_BYTES_MAX as CAPACITY;
    use proptest::prelude::*;

    const GEOMETRY: Geometry = Geometry {
        size: 1 << 24,
        sector: 4096,
        physical_sector: 4096,
        atomic_unit: 4096,
        discard: true,
        discard_granularity: 4096,
        rotational: false,
        fast_zeroes: true,
    };

    fn description(operation_and_flags: u32, first_sector: u64, sectors: u32) -> Description {
        Description { operation_and_flags, sectors, first_sector, address: 0 }
    }

    fn parsed(operation_and_flags: u32, first_sector: u64, sectors: u32) -> Result<Task, i32> {
        parse(&description(operation_and_flags, first_sector, sectors), &GEOMETRY, false, CAPACITY)
    }

    #[test]
    fn each_operation_is_parsed_with_its_range_and_fua_flag() {
        let range = ByteRange { start: 4096, end: 12288 };
        for (number, operation, forced) in [
            (operation::READ, Operation::Read, false),
            (operation::WRITE, Operation::Write, true),
            (operation::DISCARD, Operation::Discard, true),
            (operation::WRITE_ZEROES, Operation::WriteZeroes, true),
        ] {
            let class = Class::Unmarked;
            assert_eq!(parsed(number, 8, 16), Ok(Task { operation, range, fua: false, class }));
            // Other flags are hints.
            let flags = operation::FUA | 1 << 8 | 1 << 15 | 1 << 16;
            assert_eq!(parsed(number | flags, 8, 16), Ok(Task { operation, range, fua: forced, class }));
            let class = Class::Metadata;
            assert_eq!(parsed(number | 1 << 11, 8, 16), Ok(Task { operation, range, fua: false, class }));
        }
        let flush = parsed(operation::FLUSH, u64::MAX, u32::MAX).unwrap();
        assert_eq!((flush.operation, flush.range.is_empty()), (Operation::Flush, true));
    }

    #[test]
    fn a_range_outside_the_device_is_an_error() {
        let end = GEOMETRY.size / SECTOR;
        for (first, sectors) in [
            (end, 8),
            (end - 8, 16),
            (u64::MAX, 8),
            (u64::MAX / 512, 8),
            (0, 0),
            (0, 4),
            (1, 8),
            (0, u32::MAX),
        ] {
            for operation in [operation::READ, operation::WRITE, operation::DISCARD, operation::WRITE_ZEROES]
            {
                assert_eq!(
                    parsed(operation, first, sectors),
                    Err(libc::EIO),
                    "{operation} {first} {sectors}"
                );
            }
        }
        assert!(parsed(operation::READ, end - 8, 8).is_ok());
    }

    #[test]
    fn a_transfer_larger_than_the_buffer_is_an_error_and_a_discard_is_not() {
        let sectors = (CAPACITY as u64 / SECTOR) as u32;
        assert_eq!(parsed(operation::WRITE, 0, sectors).unwrap().data_bytes(), CAPACITY);
        assert_eq!(parsed(operation::WRITE, 0, sectors + 8), Err(libc::EIO));
        assert_eq!(parsed(operation::READ, 0, sectors + 8), Err(libc::EIO));
        assert_eq!(parsed(operation::DISCARD, 0, sectors + 8).unwrap().data_bytes(), 0);
    }

    #[test]
    fn unknown_operations_are_refused() {
        for unknown in [4, 10, 18, 255] {
            assert_eq!(parsed(unknown, 0, 8), Err(libc::EOPNOTSUPP));
        }
        let whole = Geometry { discard: false, ..GEOMETRY };
        assert_eq!(
            parse(&description(operation::DISCARD, 0, 8), &whole, false, CAPACITY),
            Err(libc::EOPNOTSUPP)
        );
    }

    #[test]
    fn changes_of_a_read_only_device_are_refused() {
        for operation in [operation::WRITE, operation::DISCARD, operation::WRITE_ZEROES] {
            assert_eq!(parse(&description(operation, 0, 8), &GEOMETRY, true, CAPACITY), Err(libc::EROFS));
        }
        assert!(parse(&description(operation::READ, 0, 8), &GEOMETRY, true, CAPACITY).is_ok());
    }

    proptest! {
        #[test]
        fn every_parsed_request_lies_inside_the_device_and_fits_its_buffer(
            operation_and_flags in any::<u32>(),
            sectors in prop_oneof![any::<u32>(), 0..8192_u32],
            first_sector in prop_oneof![any::<u64>(), 0..65536_u64],
        ) {
            let described = description(operation_and_flags, first_sector, sectors);
            if let Ok(task) = parse(&described, &GEOMETRY, false, CAPACITY) {
                prop_assert!(task.range.start <= task.range.end && task.range.end <= GEOMETRY.size);
                prop_assert!(task.range.start.is_multiple_of(4096) && task.range.end.is_multiple_of(4096));
                prop_assert!(task.data_bytes() <= CAPACITY);
                prop_assert_eq!(task.range.is_empty(), task.operation == Operation::Flush);
            }
        }
    }
}

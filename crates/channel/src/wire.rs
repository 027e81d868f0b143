//! The numbers of operations and errors in entries, and the geometry in a server's header.
//!
//! Invariants: numbers never change; the two functions for each are inverse to each other.

use cbd_format::channel::{FLAG_DISCARD, FLAG_FAST_ZEROES, FLAG_ROTATIONAL, SERVER_MAGIC};
use cbd_format::{ChannelShape, ServerHeader};
use cbd_types::{ErrorKind, Geometry, Operation};

/// [`ChannelCompletion::status`](cbd_format::ChannelCompletion): the data that arrived is not that of the request, which is to be
/// submitted again.
pub const STATUS_AGAIN: u32 = u32::MAX;

/// Nothing was done of the request, which the client has asked for: it waits for space, or for another one.
pub const STATUS_RETURNED: u32 = u32::MAX - 2;

/// The number of a kind of error in a completion; 0 is success.
pub fn status_of(kind: ErrorKind) -> u32 {
    let place = ErrorKind::ALL.iter().position(|known| *known == kind);
    place.map_or(u32::MAX - 1, |place| place as u32 + 1)
}

/// The kind of error of a completion's number; a number that is not known is [`ErrorKind::System`].
pub fn kind_of(status: u32) -> ErrorKind {
    let place = (status as usize).checked_sub(1);
    place.and_then(|place| ErrorKind::ALL.get(place)).copied().unwrap_or(ErrorKind::System)
}

/// The number of an operation in an entry.
pub const fn number_of(operation: Operation) -> u16 {
    match operation {
        Operation::Read => 1,
        Operation::Write => 2,
        Operation::Flush => 3,
        Operation::Discard => 4,
        Operation::WriteZeroes => 5,
    }
}

/// The operation with this number.
pub fn operation_of(number: u16) -> Option<Operation> {
    Operation::ALL.get(usize::from(number).checked_sub(1)?).copied()
}

/// Whether a request has data in a data place.
pub const fn has_data(operation: Operation) -> bool {
    matches!(operation, Operation::Read | Operation::Write)
}

/// Whether an operation changes the device.
pub const fn changes(operation: Operation) -> bool {
    !matches!(operation, Operation::Read | Operation::Flush)
}

/// The header of a server's area, without its checksum and the numbers of its boot and its processes.
pub fn header_of(session: u64, state: u16, client: u64, geometry: &Geometry) -> ServerHeader {
    let flag = |is_set, flag| if is_set { flag } else { 0 };
    let flags = flag(geometry.discard, FLAG_DISCARD)
        | flag(geometry.rotational, FLAG_ROTATIONAL)
        | flag(geometry.fast_zeroes, FLAG_FAST_ZEROES);
    ServerHeader {
        crc: 0.into(),
        magic: SERVER_MAGIC.into(),
        session: session.into(),
        client: client.into(),
        size: geometry.size.into(),
        state: state.into(),
        sector: geometry.sector.into(),
        physical_sector: geometry.physical_sector.into(),
        atomic_unit: geometry.atomic_unit.into(),
        discard_granularity: geometry.discard_granularity.into(),
        flags: flags.into(),
        boot: 0.into(),
        process: 0.into(),
        next: 0.into(),
    }
}

/// The geometry in a server's header; `None` if no device has it.
pub fn geometry_of(header: &ServerHeader, shape: ChannelShape) -> Option<Geometry> {
    let (flags, sector) = (header.flags.get(), header.sector.get());
    let (physical, granularity) = (header.physical_sector.get(), header.discard_granularity.get());
    let is_possible = sector.is_power_of_two()
        && (512..=4096).contains(&sector)
        && header.size.get().is_multiple_of(u64::from(sector))
        && i64::try_from(header.size.get()).is_ok();
    if !is_possible {
        return None;
    }
    // The others are hints: one that makes no sense is that of a device without the property.
    let is_physical = physical.is_power_of_two() && physical > sector;
    let is_granularity = granularity > sector && granularity.is_multiple_of(sector);
    let atomic_unit = header.atomic_unit.get() / sector * sector;
    let geometry = Geometry {
        size: header.size.get(),
        sector,
        physical_sector: if is_physical { physical } else { sector },
        // What is longer is submitted in pieces.
        atomic_unit: atomic_unit.clamp(sector, shape.place_bytes()),
        discard: flags & FLAG_DISCARD != 0,
        discard_granularity: if is_granularity { granularity } else { sector },
        rotational: flags & FLAG_ROTATIONAL != 0,
        fast_zeroes: flags & FLAG_FAST_ZEROES != 0,
    };
    Some(geometry)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry {
        size: 1 << 20,
        sector: 512,
        physical_sector: 4096,
        atomic_unit: 1 << 20,
        discard: true,
        discard_granularity: 8192,
        rotational: false,
        fast_zeroes: true,
    };

    #[test]
    fn numbers_of_errors_and_operations_lead_back_to_them_and_do_not_change() {
        for kind in ErrorKind::ALL {
            let status = status_of(kind);
            assert!(![0, STATUS_AGAIN, STATUS_RETURNED].contains(&status));
            assert_eq!(kind_of(status), kind);
        }
        assert_eq!(
            [ErrorKind::InvalidArgument, ErrorKind::Media, ErrorKind::System].map(status_of),
            [1, 8, 19]
        );
        assert_eq!([0, 20, STATUS_AGAIN].map(kind_of), [ErrorKind::System; 3]);
        for operation in Operation::ALL {
            assert_eq!(operation_of(number_of(operation)), Some(operation));
        }
        assert_eq!([0, 6, u16::MAX].map(operation_of), [None; 3]);
    }

    #[test]
    fn a_geometry_reads_back_unless_no_device_has_it() {
        let shape = ChannelShape::new(4, 8192).expect("it is possible");
        let read = |geometry: Geometry| geometry_of(&header_of(1, 1, 2, &geometry), shape);
        assert_eq!(read(GEOMETRY), Some(Geometry { atomic_unit: 8192, ..GEOMETRY }));
        let other =
            Geometry { discard: false, rotational: true, fast_zeroes: false, atomic_unit: 512, ..GEOMETRY };
        assert_eq!(read(other), Some(other));
        for sector in [0, 1, 256, 513, 8192] {
            assert_eq!(read(Geometry { sector, ..GEOMETRY }), None, "sector {sector}");
        }
        for size in [511, 1 << 63, u64::MAX] {
            assert_eq!(read(Geometry { size, ..GEOMETRY }), None, "size {size}");
        }
        // Properties that no device has.
        let plain = Geometry { physical_sector: 512, atomic_unit: 512, discard_granularity: 512, ..GEOMETRY };
        for physical_sector in [0, 1, 256, 4097] {
            for discard_granularity in [0, 1, 513] {
                for atomic_unit in [0, 511, 1023] {
                    let found =
                        read(Geometry { physical_sector, discard_granularity, atomic_unit, ..GEOMETRY });
                    assert_eq!(found, Some(plain));
                }
            }
        }
    }
}

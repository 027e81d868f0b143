//! The parameters of the disk, as reported to the kernel.
//!
//! Invariants: the parameters match the device's behaviour. Flushes and FUA writes are requested although a write is
//! durable at its completion, because they delimit epochs.

use crate::abi::{Basic, Discard, Parameters, attribute, parameter};
use cbd_types::{Error, ErrorKind, Geometry, Result};

/// The kernel's unit of sectors, whatever the device's is.
pub const SECTOR: u64 = 512;
/// The largest read or write: the largest that is recovered completely or not at all.
pub const TRANSFER_BYTES_MAX: usize = 1 << 20;
/// The largest discard or write of zeroes, in sectors: 2 GiB.
const ZERO_SECTORS_MAX: u32 = 4 << 20;

/// The parameters of a disk of this geometry.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for a geometry that no disk can have.
pub fn of(geometry: &Geometry, read_only: bool) -> Result<Parameters> {
    let Geometry {
        size, sector, physical_sector, atomic_unit, discard, discard_granularity, rotational, ..
    } = *geometry;
    if !sector.is_power_of_two()
        || !(512..=4096).contains(&sector)
        || size == 0
        || !size.is_multiple_of(u64::from(sector))
    {
        return Err(Error::new(
            ErrorKind::InvalidArgument,
            format!("a device of {size} bytes with sectors of {sector} bytes cannot be exported"),
        ));
    }
    let flag = |wanted: bool, flag: u32| if wanted { flag } else { 0 };
    // Kernels accept no sector larger than a page.
    let physical = physical_sector.clamp(sector, 4096);
    let optimal = atomic_unit.clamp(physical, TRANSFER_BYTES_MAX as u32);
    let granularity = discard_granularity.max(sector);
    let zero_sectors = whole_units(ZERO_SECTORS_MAX, granularity / SECTOR as u32);
    Ok(Parameters {
        length: size_of::<Parameters>() as u32,
        kinds: parameter::BASIC | parameter::DISCARD,
        basic: Basic {
            attributes: attribute::VOLATILE_CACHE
                | attribute::FUA
                | flag(read_only, attribute::READ_ONLY)
                | flag(rotational, attribute::ROTATIONAL),
            logical_shift: shift(sector),
            physical_shift: shift(physical),
            optimal_shift: shift(optimal),
            minimal_shift: shift(physical),
            sectors_max: (TRANSFER_BYTES_MAX as u64 / SECTOR) as u32,
            chunk_sectors: 0,
            sectors: size / SECTOR,
            boundary_mask: 0,
        },
        discard: Discard {
            alignment: 0,
            granularity,
            discard_sectors_max: flag(discard && !read_only, zero_sectors),
            zeroes_sectors_max: flag(!read_only, zero_sectors),
            segments_max: 1,
            reserved: 0,
        },
        ..Parameters::default()
    })
}

/// The binary logarithm, rounded down.
const fn shift(bytes: u32) -> u8 {
    // At most 31.
    bytes.ilog2() as u8
}

/// `sectors` rounded down to whole units, at least one unit.
const fn whole_units(sectors: u32, unit: u32) -> u32 {
    if unit <= 1 {
        sectors
    } else if unit > sectors {
        unit
    } else {
        sectors / unit * unit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> Geometry {
        Geometry {
            size: 1 << 30,
            sector: 512,
            physical_sector: 4096,
            atomic_unit: 1 << 20,
            discard: true,
            discard_granularity: 4096,
            rotational: false,
            fast_zeroes: true,
        }
    }

    #[test]
    fn flushes_are_requested_although_writes_are_durable_without_them() {
        let told = of(&geometry(), false).unwrap();
        assert_eq!(told.basic.attributes, attribute::VOLATILE_CACHE | attribute::FUA);
        assert_eq!((told.basic.logical_shift, told.basic.physical_shift), (9, 12));
        assert_eq!((told.basic.minimal_shift, told.basic.optimal_shift), (12, 20));
        assert_eq!((told.basic.sectors, told.basic.sectors_max), (2 << 20, 2048));
        assert_eq!((told.discard.granularity, told.discard.discard_sectors_max), (4096, 4 << 20));
        assert_eq!((told.discard.zeroes_sectors_max, told.discard.segments_max), (4 << 20, 1));
    }

    #[test]
    fn zeroing_needs_no_discard_support_and_read_only_disks_have_neither() {
        let told = of(&Geometry { discard: false, ..geometry() }, false).unwrap().discard;
        assert_eq!((told.discard_sectors_max, told.zeroes_sectors_max), (0, 4 << 20));
        let told = of(&geometry(), true).unwrap();
        assert_eq!((told.discard.discard_sectors_max, told.discard.zeroes_sectors_max), (0, 0));
        assert_ne!(told.basic.attributes & attribute::READ_ONLY, 0);
    }

    #[test]
    fn the_largest_discard_is_whole_units() {
        let told = of(&Geometry { discard_granularity: 3 << 20, ..geometry() }, false).unwrap();
        assert_eq!(told.discard.discard_sectors_max % (6 << 10), 0);
        assert!(told.discard.discard_sectors_max > (4 << 20) - (6 << 10));
    }

    #[test]
    fn an_impossible_geometry_is_refused() {
        for wrong in [
            Geometry { size: 0, ..geometry() },
            Geometry { size: 1000, ..geometry() },
            Geometry { sector: 8192, ..geometry() },
            Geometry { sector: 256, ..geometry() },
            Geometry { sector: 513, ..geometry() },
        ] {
            assert_eq!(of(&wrong, false).unwrap_err().kind(), ErrorKind::InvalidArgument, "{wrong:?}");
        }
    }
}

//! The kernel's interface: numbers and structures of `linux/ublk_cmd.h`.
//!
//! Invariants: a structure has the kernel's size and field offsets, which the tests compare with the values of the
//! kernel's compiler; commands are encoded as ioctls, since newer kernels accept no others.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The control device.
pub const CONTROL: &str = "/dev/ublk-control";

/// As the kernel's `_IOC`: direction (1 to the kernel, 2 from it), size of the argument, number.
const fn encode(direction: u32, size: usize, number: u32) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number
}

const fn control(direction: u32, number: u32) -> u32 {
    encode(direction, size_of::<ControlCommand>(), number)
}

const READ: u32 = 2;
const BOTH: u32 = 3;

/// Commands about devices, for [`CONTROL`].
pub mod command {
    use super::{BOTH, READ, control};

    /// Returns the processors whose requests go to a queue.
    pub const GET_QUEUE_AFFINITY: u32 = control(READ, 0x01);
    /// Returns the properties of a device.
    pub const GET_DEVICE_INFO: u32 = control(READ, 0x02);
    /// Creates a device, without its disk.
    pub const ADD_DEVICE: u32 = control(BOTH, 0x04);
    /// Removes a device, and waits until no process has it open.
    pub const DELETE_DEVICE: u32 = control(BOTH, 0x05);
    /// Creates the disk; waits until all queues are served.
    pub const START_DEVICE: u32 = control(BOTH, 0x06);
    /// Removes the disk; its users see errors.
    pub const STOP_DEVICE: u32 = control(BOTH, 0x07);
    /// Sets the parameters of the disk.
    pub const SET_PARAMETERS: u32 = control(BOTH, 0x08);
    /// Returns the parameters of the disk.
    pub const GET_PARAMETERS: u32 = control(READ, 0x09);
    /// Announces that a new server takes over a device whose server has ended.
    pub const START_RECOVERY: u32 = control(BOTH, 0x10);
    /// Announces that the new server serves all queues.
    pub const END_RECOVERY: u32 = control(BOTH, 0x11);
    /// Returns the features of the driver (Linux 6.5).
    pub const GET_FEATURES: u32 = control(READ, 0x13);
    /// As [`DELETE_DEVICE`], without the wait (Linux 6.9).
    pub const DELETE_DEVICE_LATER: u32 = control(READ, 0x14);
    /// Sets the size of the disk, in sectors of 512 bytes; see [`super::feature::UPDATE_SIZE`].
    pub const UPDATE_SIZE: u32 = control(BOTH, 0x15);
    /// As [`STOP_DEVICE`], but refused with EBUSY while the disk is open; see [`super::feature::SAFE_STOP`].
    pub const TRY_STOP_DEVICE: u32 = control(BOTH, 0x17);
}

/// Commands about requests, for the device file of a queue.
pub mod request_command {
    use super::{BOTH, IoCommand, encode};

    /// The first command of a slot: offers it for a request.
    pub const FETCH: u32 = encode(BOTH, size_of::<IoCommand>(), 0x20);
    /// Answers the request of a slot, and offers the slot for another one.
    pub const COMMIT_AND_FETCH: u32 = encode(BOTH, size_of::<IoCommand>(), 0x21);
}

/// Features of a device or of the driver.
pub mod feature {
    /// The device outlives its server.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// Requests that an ended server had not answered are sent to the next server again.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands are encoded as ioctls.
    pub const IOCTL_ENCODED: u64 = 1 << 6;
    /// [`super::command::UPDATE_SIZE`] is supported (Linux 6.16).
    pub const UPDATE_SIZE: u64 = 1 << 10;
    /// [`super::command::TRY_STOP_DEVICE`] is supported.
    pub const SAFE_STOP: u64 = 1 << 17;
}

/// States of a device; the kernel has more, which need no action here.
pub mod state {
    /// It has no disk: not started, or stopped.
    pub const DEAD: u16 = 0;
    /// It has a server, as far as the kernel knows.
    pub const LIVE: u16 = 1;
    /// Its server has ended; requests wait for the next server.
    pub const QUIESCED: u16 = 2;
}

/// A command about a device, inside the submission entry.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Debug)]
#[repr(C)]
pub struct ControlCommand {
    /// The device; [`ANY_DEVICE`] to let the kernel choose.
    pub device: u32,
    /// [`NO_QUEUE`]: no command used here is about a queue.
    pub queue: u16,
    /// Bytes at `address`.
    pub length: u16,
    /// The argument of the command.
    pub address: u64,
    /// A numeric argument of the command.
    pub data: u64,
    /// For devices of unprivileged users: unused here.
    pub path_length: u16,
    pub padding: u16,
    pub reserved: u32,
}

/// The kernel chooses the number of a new device.
pub const ANY_DEVICE: u32 = u32::MAX;
/// The command is not about a queue.
pub const NO_QUEUE: u16 = u16::MAX;

/// The properties of a device, for its creation and from the kernel.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct DeviceInfo {
    /// Queues. The kernel creates no more than there are processors.
    pub queues: u16,
    /// Slots of each.
    pub depth: u16,
    /// One of [`state`].
    pub state: u16,
    pub padding0: u16,
    /// Bytes of a slot's buffer.
    pub buffer_bytes: u32,
    /// Its number: N of `/dev/ublkbN`.
    pub device: u32,
    /// The process id of its server.
    pub server: i32,
    pub padding1: u32,
    /// Of [`feature`].
    pub flags: u64,
    /// A value of the server; the kernel stores it and does not interpret it.
    pub tag: u64,
    /// Its owner.
    pub owner_user: u32,
    pub owner_group: u32,
    pub reserved1: u64,
    pub reserved2: u64,
}

/// The parts of [`Parameters`] that are set; [`Numbers`] cannot be set.
pub mod parameter {
    /// [`super::Basic`].
    pub const BASIC: u32 = 1 << 0;
    /// [`super::Discard`].
    pub const DISCARD: u32 = 1 << 1;
}

/// Attributes of a disk.
pub mod attribute {
    /// The disk is read-only.
    pub const READ_ONLY: u32 = 1 << 0;
    /// Seeks are expensive.
    pub const ROTATIONAL: u32 = 1 << 1;
    /// Flushes are sent.
    pub const VOLATILE_CACHE: u32 = 1 << 2;
    /// FUA writes are sent as such.
    pub const FUA: u32 = 1 << 3;
}

/// Size, sectors and sizes of requests. Shifts are of bytes, sectors of 512 bytes.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Basic {
    /// Of [`attribute`].
    pub attributes: u32,
    pub logical_shift: u8,
    pub physical_shift: u8,
    pub optimal_shift: u8,
    pub minimal_shift: u8,
    pub sectors_max: u32,
    pub chunk_sectors: u32,
    pub sectors: u64,
    pub boundary_mask: u64,
}

/// Discards and writes of zeroes.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Discard {
    pub alignment: u32,
    pub granularity: u32,
    pub discard_sectors_max: u32,
    pub zeroes_sectors_max: u32,
    pub segments_max: u16,
    pub reserved: u16,
}

/// Device numbers, reported by the kernel.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Numbers {
    pub queue_major: u32,
    pub queue_minor: u32,
    /// 0 while there is no disk.
    pub disk_major: u32,
    pub disk_minor: u32,
}

/// The parameters of a disk. Newer kernels have more, which are neither set nor queried: the length states where this
/// structure ends.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Parameters {
    /// Bytes of this structure.
    pub length: u32,
    /// Of [`parameter`].
    pub kinds: u32,
    pub basic: Basic,
    pub discard: Discard,
    pub numbers: Numbers,
    pub padding: u32,
}

/// A command about a request, inside the submission entry.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Debug)]
#[repr(C)]
pub struct IoCommand {
    pub queue: u16,
    /// The slot.
    pub slot: u16,
    /// Bytes transferred, or a negative errno; for replies.
    pub result: i32,
    /// The slot's buffer.
    pub address: u64,
}

/// The kernel's description of a request, in shared memory.
#[derive(Clone, Copy, Default, FromBytes, IntoBytes, Immutable, KnownLayout, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Description {
    /// [`operation`] in the lowest eight bits, flags above.
    pub operation_and_flags: u32,
    /// Of 512 bytes.
    pub sectors: u32,
    /// Of 512 bytes.
    pub first_sector: u64,
    /// The slot's buffer, as it was passed to the kernel.
    pub address: u64,
}

/// The operation of a request.
pub mod operation {
    pub const READ: u32 = 0;
    pub const WRITE: u32 = 1;
    pub const FLUSH: u32 = 2;
    pub const DISCARD: u32 = 3;
    pub const WRITE_ZEROES: u32 = 5;
    /// The bits of the operation.
    pub const MASK: u32 = 0xff;
    /// Metadata of a file system.
    pub const META: u32 = 1 << 11;
    /// Durable at its completion.
    pub const FUA: u32 = 1 << 13;
}

/// Slots that a queue can have at most; descriptions of queues are this many apart.
pub const DEPTH_MAX: usize = 4096;
/// Queues that a device can have at most.
pub const QUEUES_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!(size_of::<ControlCommand>(), 32);
        assert_eq!(size_of::<DeviceInfo>(), 64);
        assert_eq!(size_of::<Basic>(), 32);
        assert_eq!(size_of::<Discard>(), 20);
        assert_eq!(size_of::<Numbers>(), 16);
        assert_eq!(size_of::<IoCommand>(), 16);
        assert_eq!(size_of::<Description>(), 24);
    }

    #[test]
    fn fields_have_the_kernels_offsets() {
        assert_eq!(offset_of!(ControlCommand, queue), 4);
        assert_eq!(offset_of!(ControlCommand, address), 8);
        assert_eq!(offset_of!(ControlCommand, data), 16);
        assert_eq!(offset_of!(DeviceInfo, state), 4);
        assert_eq!(offset_of!(DeviceInfo, buffer_bytes), 8);
        assert_eq!(offset_of!(DeviceInfo, server), 16);
        assert_eq!(offset_of!(DeviceInfo, flags), 24);
        assert_eq!(offset_of!(DeviceInfo, tag), 32);
        assert_eq!(offset_of!(DeviceInfo, owner_user), 40);
        assert_eq!(offset_of!(Parameters, basic), 8);
        assert_eq!(offset_of!(Parameters, discard), 40);
        assert_eq!(offset_of!(Parameters, numbers), 60);
        assert_eq!(offset_of!(Basic, sectors_max), 8);
        assert_eq!(offset_of!(Basic, sectors), 16);
        assert_eq!(offset_of!(Discard, segments_max), 16);
        assert_eq!(offset_of!(IoCommand, result), 4);
        assert_eq!(offset_of!(IoCommand, address), 8);
        assert_eq!(offset_of!(Description, first_sector), 8);
    }

    /// The values of the macros of the kernel's header.
    #[test]
    fn commands_are_encoded_as_the_kernels_macros_do() {
        assert_eq!(command::GET_QUEUE_AFFINITY, 0x8020_7501);
        assert_eq!(command::GET_DEVICE_INFO, 0x8020_7502);
        assert_eq!(command::ADD_DEVICE, 0xc020_7504);
        assert_eq!(command::DELETE_DEVICE, 0xc020_7505);
        assert_eq!(command::START_DEVICE, 0xc020_7506);
        assert_eq!(command::STOP_DEVICE, 0xc020_7507);
        assert_eq!(command::SET_PARAMETERS, 0xc020_7508);
        assert_eq!(command::GET_PARAMETERS, 0x8020_7509);
        assert_eq!(command::START_RECOVERY, 0xc020_7510);
        assert_eq!(command::END_RECOVERY, 0xc020_7511);
        assert_eq!(command::GET_FEATURES, 0x8020_7513);
        assert_eq!(command::DELETE_DEVICE_LATER, 0x8020_7514);
        assert_eq!(command::UPDATE_SIZE, 0xc020_7515);
        assert_eq!(command::TRY_STOP_DEVICE, 0xc020_7517);
        assert_eq!(feature::UPDATE_SIZE, 0x400);
        assert_eq!(request_command::FETCH, 0xc010_7520);
        assert_eq!(request_command::COMMIT_AND_FETCH, 0xc010_7521);
    }
}

//! Tests of answers, limits and texts, and of commands to a device that stands in for the kernel and a disk.

mod device;

use super::*;
use crate::job::Job;
use crate::job::tests::disk_with;
use crate::sync::run_to_end;
use cbd_sys::passthrough::{IDENTIFY_BYTES, SENSE_BYTES};
use cbd_types::{AlignedBuffer, ByteRange, ErrorKind, OpToken, Result};
pub(crate) use device::{Device, Reply, Sent};
use std::sync::RwLock;

const SIZE: u64 = 4 << 20;
/// The media error of an NVMe device.
const UNRECOVERED: u16 = 0x281;

fn sense(bytes: &[u8]) -> ScsiAnswer {
    let mut answer = ScsiAnswer { status: 2, host: 0, driver: 8, sense: [0; SENSE_BYTES] };
    answer.sense[..bytes.len()].copy_from_slice(bytes);
    answer
}

/// A device and a target that uses it.
struct Rig {
    device: Arc<Device>,
    target: Target,
}

impl Rig {
    /// Reads find zeroes but for one byte at `odd`; the partition begins at byte `start` of the disk.
    fn at(device: Device, offload: Offload, start: u64, odd: usize) -> Self {
        let device = Arc::new(device);
        let mut content = vec![0; SIZE as usize];
        content[odd] = 1;
        let mut target = disk_with(&content);
        target.commands = RwLock::new(Arc::new(device.commands(&target, offload, start)));
        Self { device, target }
    }

    fn new(device: Device, offload: Offload) -> Self {
        Self::at(device, offload, 0, 1 << 20)
    }

    fn run(&self, op: BackingOp) -> Result<()> {
        let job = Job::new(OpToken(1), op, &self.target);
        match job.known_result(&self.target) {
            Some(result) => result,
            None => run_to_end(job, &self.target).result,
        }
    }

    fn verify(&self, start: u64, length: u64) -> Result<()> {
        self.run(BackingOp::Verify { range: ByteRange::at(start, length) })
    }

    fn is_zero(&self, start: u64, length: u64) -> Result<()> {
        let range = ByteRange::at(start, length);
        self.run(BackingOp::Compare { range, expected: Expected::Zeroes })
    }

    fn compare(&self, start: u64, bytes: &[u8]) -> Result<()> {
        let expected = Expected::Bytes(AlignedBuffer::from_slice(bytes));
        self.run(BackingOp::Compare { range: ByteRange::at(start, bytes.len() as u64), expected })
    }

    /// The commands since the last call: name, first block, blocks.
    fn sent(&self) -> Vec<(&'static str, u64, u32)> {
        self.device.take().into_iter().map(|sent| (sent.name, sent.first, sent.blocks)).collect()
    }
}

/// The byte that is not zero is in this sector.
fn odd_sector() -> ByteRange {
    ByteRange::at(1 << 20, 512)
}

#[test]
fn an_nvme_status_is_a_media_error_a_difference_or_a_refusal() {
    assert_eq!(nvme_answer(0), Answer::Good);
    // "Do not retry" is set.
    assert_eq!(nvme_answer(0x4281), Answer::Unreadable);
    assert_eq!(nvme_answer(0x4285), Answer::Differs);
    assert_eq!(nvme_answer(0x4002), Answer::Other("NVMe status 0x2".to_owned()));
}

#[test]
fn sense_data_is_read_in_both_formats() {
    assert_eq!(scsi_answer(&sense(&[0x70, 0, 3])), Answer::Unreadable);
    assert_eq!(scsi_answer(&sense(&[0x72, 3, 0x11])), Answer::Unreadable);
    assert_eq!(scsi_answer(&sense(&[0x72, 0xE, 0x1D])), Answer::Differs);
    assert_eq!(scsi_answer(&sense(&[0x70, 0, 1])), Answer::Good);
    assert!(matches!(scsi_answer(&sense(&[0x72, 5, 0x20])), Answer::Other(_)));
    assert!(matches!(scsi_answer(&sense(&[])), Answer::Other(_)), "without sense data");
    let timed_out = ScsiAnswer { status: 0, host: 3, driver: 0, sense: [0; SENSE_BYTES] };
    assert!(matches!(scsi_answer(&timed_out), Answer::Other(_)));
}

#[test]
fn a_limit_of_no_pages_is_no_limit() {
    assert_eq!(pages(0), None);
    assert_eq!(pages(5), Some(128 << 10));
    assert_eq!(pages(200), Some(u64::MAX));
}

#[test]
fn the_format_of_a_namespace_says_whether_it_has_metadata() {
    let mut namespace = [0; IDENTIFY_BYTES];
    namespace[128 + 4] = 8;
    assert!(!has_metadata(&namespace));
    namespace[26] = 1;
    assert!(has_metadata(&namespace));
}

#[test]
fn a_comparison_sends_its_bytes_from_the_place_of_the_command() {
    let range = ByteRange::at(0, 1024);
    let bytes = AlignedBuffer::from_slice(&[[1; 512], [2; 512]].concat());
    let op = BackingOp::Compare { range, expected: Expected::Bytes(bytes) };
    assert_eq!(data(&op, 512, 512), Some(&[2; 512][..]));
    assert_eq!(data(&op, 512, 1024), None);
    let op = BackingOp::Compare { range, expected: Expected::Zeroes };
    assert_eq!(data(&op, 1 << 30, 512), Some(&[0; 512][..]));
    assert_eq!(data(&BackingOp::Verify { range }, 0, 512), None);
}

#[test]
fn why_no_command_is_used_is_in_the_text() {
    assert_eq!(Commands::none("it is a file").describe(), "reads (it is a file)");
    assert_eq!(
        Command::used(0, "NVMe Verify").describe(),
        "reads (NVMe Verify is limited to less than a block)"
    );
}

#[test]
fn a_device_without_a_say_in_comparisons_is_not_asked_for_them() {
    let rig = Rig::new(Device::nvme().that_says_yes(), Offload::Auto);
    rig.verify(0, SIZE).expect("it is as expected");
    assert_eq!(rig.sent(), [("verify", 0, 8192)]);
    for result in [rig.is_zero(0, SIZE), rig.compare(1 << 20, &[0; 4096])] {
        let error = result.expect_err("a read finds it");
        assert_eq!((error.kind(), error.range()), (ErrorKind::Mismatch, Some(odd_sector())));
    }
    assert_eq!(rig.sent(), [], "no comparison was passed to the device");
    let text = "NVMe Verify; comparisons: reads (NVMe Compare is used only if the setting offload is on)";
    assert_eq!(rig.target.commands().describe(), text);
}

#[test]
fn on_request_a_device_is_trusted_for_what_is_equal() {
    for device in [Device::nvme(), Device::scsi()] {
        let rig = Rig::new(device.that_says_yes(), Offload::On);
        rig.is_zero(0, SIZE).expect("it is as expected");
        rig.compare(1 << 20, &[0; 4096]).expect("it is as expected");
        assert_eq!(rig.sent().len(), 17, "16 pieces of 256 KiB, and one");
    }
}

#[test]
fn a_scsi_disk_is_asked_for_nothing_unless_the_user_wants_it() {
    let rig = Rig::new(Device::scsi().that_says_yes(), Offload::Auto);
    rig.verify(0, SIZE).expect("it is as expected");
    assert!(rig.is_zero(0, SIZE).is_err());
    assert_eq!(rig.sent(), []);
    let text = "reads (SCSI VERIFY is used only if the setting offload is on)";
    assert_eq!(rig.target.commands().describe(), text);
}

#[test]
fn a_scsi_disk_gets_no_bytes_as_many_as_it_compares_or_one_block() {
    let rig = Rig::new(Device::scsi(), Offload::On);
    rig.verify(0, 8192).expect("it is as expected");
    rig.compare(4096, &[0; 1024]).expect("it is as expected");
    rig.is_zero(8192, 4096).expect("it is as expected");
    let expected = [(0, 0, 16, 0), (1, 8, 2, 1024), (3, 16, 8, 512)];
    let sent = rig.device.take().into_iter();
    assert!(sent.map(|sent| (sent.check, sent.first, sent.blocks, sent.bytes)).eq(expected));
    assert_eq!(rig.target.commands().describe(), "SCSI VERIFY(16); comparisons: SCSI VERIFY(16) with data");
}

#[test]
fn what_a_device_finds_is_found() {
    for device in [Device::nvme(), Device::scsi()] {
        let content = vec![(odd_sector().start, 1)];
        let rig = Rig::new(Device { unreadable: vec![4096], content, ..device }, Offload::On);
        let error = rig.verify(0, SIZE).expect_err("a sector is unreadable");
        assert_eq!((error.kind(), error.range()), (ErrorKind::Backing, Some(ByteRange::at(0, SIZE))));
        rig.verify(4608, SIZE - 4608).expect("it is as expected");
        let error = rig.is_zero(8192, SIZE - 8192).expect_err("a byte is not zero");
        assert_eq!((error.kind(), error.range()), (ErrorKind::Mismatch, Some(odd_sector())));
    }
}

#[test]
fn commands_reach_the_blocks_of_the_partition_and_no_others() {
    for device in [Device::nvme(), Device::scsi()] {
        let rig = Rig::at(device, Offload::On, 3 << 20, 0);
        let first = (3 << 20) / 512;
        rig.verify(512, SIZE - 512).expect("it is as expected");
        assert_eq!(rig.sent(), [("verify", first + 1, 8191)]);
        rig.compare(SIZE - 1024, &[0; 1024]).expect("it is as expected");
        assert_eq!(rig.sent(), [("compare", first + 8190, 2)]);
        for result in [rig.verify(0, SIZE + 512), rig.is_zero(SIZE, 512), rig.compare(SIZE - 512, &[0; 1024])]
        {
            assert_eq!(result.expect_err("past the end").kind(), ErrorKind::OutOfRange);
        }
        assert_eq!(rig.sent(), []);
    }
}

#[test]
fn a_controller_that_reports_only_a_limit_for_verify_has_the_command() {
    let device = Device { commands: 1, verify_limit: Some(3), ..Device::nvme() };
    let rig = Rig::new(device, Offload::Auto);
    rig.verify(0, 64 << 10).expect("it is as expected");
    assert_eq!(rig.sent(), [("verify", 0, 64), ("verify", 64, 64)]);
    let without = Device { commands: 1, verify_limit: Some(0), ..Device::nvme() };
    let text = Rig::new(without, Offload::Auto).target.commands().describe();
    assert!(text.starts_with("reads (the controller has no Verify command)"), "{text}");
}

#[test]
fn a_controller_without_a_limit_for_verify_gets_as_much_as_it_transfers() {
    for (transfer_limit, blocks) in [(1, 16), (0, 256)] {
        let device = Device { verify_limit: None, transfer_limit, ..Device::nvme() };
        let rig = Rig::new(device, Offload::Auto);
        rig.verify(0, 256 << 10).expect("it is as expected");
        assert_eq!(rig.sent()[0], ("verify", 0, blocks));
    }
}

#[test]
fn a_namespace_with_metadata_is_verified_and_not_compared() {
    let rig = Rig::new(Device { metadata: 8, ..Device::nvme() }, Offload::On);
    rig.verify(0, 4096).expect("it is as expected");
    assert!(rig.is_zero(0, SIZE).is_err());
    assert_eq!(rig.sent(), [("verify", 0, 8)]);
}

/// A device that answers every command of this name so.
fn answering(device: Device, name: &'static str, reply: Reply) -> Device {
    Device { hook: Box::new(move |sent| (sent.name == name).then_some(reply)), ..device }
}

#[test]
fn a_range_whose_command_fails_is_read_and_the_command_is_not_used_again() {
    // Vendor specific and aborted commands, errors of host adapter and kernel, and an answer without a meaning.
    let scsi = |host, driver| Reply::Scsi(ScsiAnswer { status: 0, host, driver, sense: [0; SENSE_BYTES] });
    let cases = [
        (Device::nvme(), Reply::Nvme(0x4707), "NVMe status 0x707"),
        (Device::nvme(), Reply::Nvme(0x4001), "NVMe status 0x1"),
        (Device::nvme(), Reply::Nvme(0x285), "it reports a difference, and was not asked for one"),
        (Device::nvme(), Reply::Error(libc::EACCES), "Permission denied (os error 13)"),
        (
            Device::scsi(),
            Reply::Scsi(sense(&[0x70, 0, 9])),
            "SCSI status 0x2, sense key 0x9, additional code 0x0",
        ),
        (Device::scsi(), Reply::Scsi(sense(&[0x72, 5, 0x20])), "sense key 0x5, additional code 0x20"),
        (Device::scsi(), scsi(3, 0), "host status 0x3, driver status 0x0"),
        (Device::scsi(), scsi(0, 6), "host status 0x0, driver status 0x6"),
        (Device::scsi(), Reply::Error(libc::ENOTTY), "Inappropriate ioctl for device"),
    ];
    for (device, reply, why) in cases {
        let rig = Rig::new(answering(device, "verify", reply), Offload::On);
        rig.verify(0, SIZE).expect("it was read");
        rig.verify(0, SIZE).expect("it is as expected");
        assert_eq!(rig.sent(), [("verify", 0, 8192)], "{why}: the command was sent once");
        let text = rig.target.commands().describe();
        assert!(text.starts_with("reads (") && text.contains(why), "{text} does not say {why}");
        rig.is_zero(0, 4096).expect("it is as expected");
        assert_eq!(rig.sent(), [("compare", 0, 8)], "another command is still used");
    }
}

#[test]
fn a_comparison_whose_command_fails_is_made_by_reads_from_there() {
    for (device, reply) in
        [(Device::nvme(), Reply::Nvme(0x4006)), (Device::scsi(), Reply::Scsi(sense(&[0x70, 0, 0xB])))]
    {
        let rig = Rig::new(answering(device, "compare", reply), Offload::On);
        let error = rig.is_zero(0, SIZE).expect_err("a read finds the byte");
        assert_eq!((error.kind(), error.range()), (ErrorKind::Mismatch, Some(odd_sector())));
        rig.compare(0, &[0; 4096]).expect("it is as expected");
        assert_eq!(rig.sent(), [("compare", 0, 512)]);
    }
}

#[test]
fn a_controller_that_refuses_what_its_limits_allow_is_read() {
    let limited = |sent: &Sent| (sent.blocks > 8).then_some(Reply::Nvme(0x4002));
    let rig = Rig::new(Device { hook: Box::new(limited), ..Device::nvme() }, Offload::On);
    rig.verify(0, 4096).expect("it is as expected");
    rig.verify(0, SIZE).expect("it is as expected");
    rig.verify(0, 4096).expect("it is as expected");
    assert_eq!(rig.sent(), [("verify", 0, 8), ("verify", 0, 8192)]);
    let text = rig.target.commands().describe();
    assert_eq!(text, "reads (NVMe Verify failed: NVMe status 0x2); comparisons: NVMe Compare");
}

#[test]
fn a_difference_that_no_read_confirms_is_none() {
    let device = answering(Device::nvme(), "compare", Reply::Nvme(0x285));
    let rig = Rig::new(device, Offload::On);
    rig.is_zero(0, 4096).expect("it is as expected");
}

#[test]
fn a_media_error_that_a_device_reports_leaves_the_command_in_use() {
    let rig = Rig::new(answering(Device::nvme(), "verify", Reply::Nvme(UNRECOVERED)), Offload::Auto);
    assert!(rig.verify(0, 4096).is_err() && rig.verify(4096, 4096).is_err());
    assert_eq!(rig.sent().len(), 2);
}

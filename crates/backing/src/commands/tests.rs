//! Tests of answers, limits and texts. The commands themselves need a device.

use super::*;

fn sense(bytes: &[u8]) -> ScsiAnswer {
    let mut answer = ScsiAnswer { status: 2, host: 0, driver: 8, sense: [0; passthrough::SENSE_BYTES] };
    answer.sense[..bytes.len()].copy_from_slice(bytes);
    answer
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
    let timed_out = ScsiAnswer { status: 0, host: 3, driver: 0, sense: [0; passthrough::SENSE_BYTES] };
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
    let mut namespace = [0; passthrough::IDENTIFY_BYTES];
    namespace[128 + 4] = 8;
    assert!(!has_metadata(&namespace));
    namespace[26] = 1;
    assert!(has_metadata(&namespace));
}

#[test]
fn a_comparison_sends_its_bytes_from_the_place_of_the_command() {
    let range = cbd_types::ByteRange::at(0, 1024);
    let bytes = cbd_types::AlignedBuffer::from_slice(&[[1; 512], [2; 512]].concat());
    let op = BackingOp::Compare { range, expected: Expected::Bytes(bytes) };
    assert_eq!(data(&op, 512, 512), Some(&[2; 512][..]));
    assert_eq!(data(&op, 512, 1024), None);
    let op = BackingOp::Compare { range, expected: Expected::Zeroes };
    assert_eq!(data(&op, 1 << 30, 512), Some(&[0; 512][..]));
    assert_eq!(data(&BackingOp::Verify { range }, 0, 512), None);
}

#[test]
fn a_command_that_failed_is_not_used_again_and_the_text_says_why() {
    let commands = Commands::for_tests(1 << 20);
    let op = BackingOp::Verify { range: cbd_types::ByteRange::at(0, 512) };
    assert_eq!(commands.describe(), "a verify command; comparisons: a compare command");
    assert!(commands.has_one_for(&op));
    commands.verify.refused.get_or_init(|| "status 0x2".to_owned());
    assert!(!commands.has_one_for(&op));
    let text = "reads (a verify command failed: status 0x2); comparisons: a compare command";
    assert_eq!(commands.describe(), text);
    assert_eq!(Commands::none("it is a file").describe(), "reads (it is a file)");
}

//! Traces of block requests: iologs and logs of fio, and the text of blkparse.
//!
//! Invariants: any file ends in an error of one line or in requests. No request is longer, or further behind, than those of a disk.
//! The requests of a file that was cut are the first ones of the whole file.

use crate::input::Input;
use cbd_advise::{Action, Format, Request, Survey, Trace};

/// The longest error: a path, the beginning of a line, and a list of devices.
const ERROR_MAX: usize = 20_000;
const LENGTH_MAX: u64 = 4 << 30;
const OFFSET_MAX: u64 = 1 << 56;
/// Blocks of the requests that are surveyed; each is looked at.
const BLOCKS_MAX: u64 = 1 << 16;

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let flags = input.u8();
    let format = [Format::Auto, Format::Fio, Format::Blkparse][usize::from(flags % 3)];
    let device = [None, Some("8,0"), Some("/disk"), Some("")][usize::from(flags / 3 % 4)];
    let text = input.rest();
    let Some(whole) = read(text, format, device) else { return };
    let mut survey = Survey::new();
    let mut blocks = 0;
    for request in &whole {
        let length = request.range.len();
        assert!(length <= LENGTH_MAX && request.range.end <= OFFSET_MAX, "{request:?}");
        assert!(request.action != Action::Flush || length == 0, "{request:?}");
        blocks += length / 4096 + 2;
        if blocks < BLOCKS_MAX {
            survey.add(request);
        }
    }
    // A file of which the last line was lost has the requests before it, if any are left.
    let cut = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end / 2);
    let end = text[..cut].iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
    if format == Format::Fio
        && let Some(first) = read(&text[..end], format, device)
    {
        assert_eq!(first, whole[..first.len()], "the requests before a cut are others");
    }
}

/// The requests; `None` for an error.
fn read(text: &[u8], format: Format, device: Option<&str>) -> Option<Vec<Request>> {
    let opened = Trace::of_bytes(text.to_vec(), format, device);
    let requests = opened.and_then(|mut trace| {
        let mut requests = Vec::new();
        while let Some(request) = trace.next_request()? {
            requests.push(request);
        }
        let (read, length) = trace.position();
        assert!(read <= length, "{read} of {length} bytes were read");
        Ok(requests)
    });
    match requests {
        Ok(requests) => {
            assert!(!requests.is_empty(), "a trace without a request is an error");
            Some(requests)
        }
        Err(error) => {
            let line = error.line();
            assert!(line.len() < ERROR_MAX && !line.is_empty(), "{} bytes: {line}", line.len());
            assert!(!line.contains('\n'), "{line:?}");
            None
        }
    }
}

/// Inputs from which mutations are productive.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    const TEXTS: [&str; 6] = [
        "fio version 3 iolog\n1 /disk add\n2 /disk open\n3 /disk read 249856 4096\n5 /disk write 3104768 8192\n6 /disk sync 0 0\n7 \
         /disk trim 0 65536\n8 /disk close\n",
        "fio version 2 iolog\n/disk add\n/disk open\n/disk read 0 4096\n/disk wait 500\n/disk write 8192 512\n/disk datasync\n",
        "0, 274622, 0, 4096, 249856, 0\n3, 14853, 1, 8192, 3104768, 0\n4, 1, 2, 65536, 0, 0\n",
        "  8,0    3        1     0.000000000   697  Q  RA 2048 + 8 [kworker]\n  8,0    3        3     0.000003057   697  D   R 2048 + 8 \
         [kworker]\n  8,0    1        5     1.500100000   697  Q FWS [dd]\n  8,0    1        7     2.000000000   697  Q   D 0 + 128 \
         [fstrim]\nCPU0 (8,0):\n Reads Queued: 1\n",
        "  8,0  0  1  0.1  1  Q  R 5 - 8 [a]\n  8,16  0  1  0.1  1  Q  W 5 + 8 [a]\n",
        "fio version 3 iolog\n1 /disk read 18446744073709551615 4096\n1 /disk read 0 1000000000000000\n",
    ];
    let flagged = |flags: u8| TEXTS.iter().map(move |text| [&[flags], text.as_bytes()].concat());
    (0..12).flat_map(flagged).collect()
}

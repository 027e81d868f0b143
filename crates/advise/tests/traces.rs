//! Files of traces: what is read from each format, and what is refused.

use cbd_advise::{Action, Format, Request, Trace};
use cbd_types::ByteRange;
use std::io::Write;

const IOLOG: &str = "fio version 3 iolog
22 /disk add
155 /disk open
159 /disk read 249856 4096
503 /disk write 3104768 8192
600 /disk sync 0 0
700 /disk trim 0 65536
482180 /disk close
";

const BLKPARSE: &str = "  8,0    3        1     0.000000000   697  Q  RA 2048 + 8 [kworker/3:1]
  8,0    3        2     0.000001829   697  G   R 2048 + 8 [kworker/3:1]
  8,0    3        3     0.000003057   697  D   R 2048 + 8 [kworker/3:1]
  8,0    1        4     1.500000000   697  Q  WS 4096 + 16 [a process with 3 words]
  8,0    1        5     1.500100000   697  Q FWS [dd]
  8,0    1        6     1.600000000     0  C   R 2048 + 8 [0]
  8,0    1        7     2.000000000   697  Q   D 0 + 128 [fstrim]
  8,0    1        8     2.000000000   697  m   N cfq697 slice expired
CPU0 (8,0):
 Reads Queued:           1,        4KiB  Writes Queued:           1,        8KiB
";

fn file(content: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(content).expect("written");
    file
}

fn read_of(
    content: &[u8],
    format: Format,
    device: Option<&str>,
) -> Result<(Vec<Request>, Option<String>), String> {
    let file = file(content);
    let line = |error: cbd_types::Error| error.line();
    let mut trace = Trace::open(file.path(), format, device).map_err(line)?;
    let mut requests = Vec::new();
    while let Some(request) = trace.next_request().map_err(line)? {
        requests.push(request);
    }
    Ok((requests, trace.note().map(str::to_owned)))
}

fn read(content: &str) -> Vec<Request> {
    let (requests, note) = read_of(content.as_bytes(), Format::Auto, None).expect("a trace");
    assert_eq!(note, None);
    requests
}

#[track_caller]
fn refused(content: &[u8], device: Option<&str>, parts: &[&str]) {
    let error = read_of(content, Format::Auto, device).expect_err("refused");
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

fn request(us: u64, action: Action, start: u64, length: u64) -> Request {
    Request { us, action, range: ByteRange::at(start, length) }
}

#[test]
fn an_iolog_of_fio_has_requests_with_times() {
    let expected = [
        request(159, Action::Read, 249_856, 4096),
        request(503, Action::Write, 3_104_768, 8192),
        request(600, Action::Flush, 0, 0),
        request(700, Action::Discard, 0, 65_536),
    ];
    assert_eq!(read(IOLOG), expected);
}

#[test]
fn an_iolog_of_version_2_has_no_times() {
    let text =
        "fio version 2 iolog\n/disk add\n/disk open\n/disk read 0 4096\n/disk write 8192 512\n/disk close\n";
    assert_eq!(read(text), [request(0, Action::Read, 0, 4096), request(0, Action::Write, 8192, 512)]);
    let file = file(text.as_bytes());
    assert!(!Trace::open(file.path(), Format::Fio, None).expect("a trace").has_times());
}

#[test]
fn a_log_of_fio_with_offsets_has_requests() {
    let text = "0, 274622, 0, 4096, 249856, 0\n3, 14853, 1, 8192, 3104768, 0\n";
    let expected = [request(0, Action::Read, 249_856, 4096), request(3000, Action::Write, 3_104_768, 8192)];
    assert_eq!(read(text), expected);
    refused(b"0, 274622, 0, 4096, 0\n", None, &["log_offset=1", "274622"]);
}

#[test]
fn the_text_of_blkparse_has_what_was_queued() {
    let expected = [
        request(0, Action::Read, 2048 * 512, 4096),
        request(1_500_000, Action::Write, 4096 * 512, 8192),
        request(1_500_100, Action::Flush, 0, 0),
        request(2_000_000, Action::Discard, 0, 65_536),
    ];
    assert_eq!(read(BLKPARSE), expected);
}

#[test]
fn a_trace_of_completions_alone_is_read_too() {
    let text: String =
        BLKPARSE.lines().filter(|line| line.contains(" C ")).map(|line| format!("{line}\n")).collect();
    assert_eq!(read(&text), [request(1_600_000, Action::Read, 2048 * 512, 4096)]);
}

#[test]
fn a_trace_of_several_devices_needs_the_name_of_one() {
    let text = format!(
        "{}  8,16   1        9     3.000000000   697  Q   R 8 + 8 [a]\n",
        &BLKPARSE[..BLKPARSE.find("CPU0").unwrap_or(0)]
    );
    refused(text.as_bytes(), None, &["several devices", "8,0", "8,16", "--device"]);
    let (requests, _) = read_of(text.as_bytes(), Format::Auto, Some("8:16")).expect("one device");
    assert_eq!(requests, [request(3_000_000, Action::Read, 4096, 4096)]);
    refused(text.as_bytes(), Some("8,32"), &["8,32", "another device", "8,0", "8,16"]);
    refused(IOLOG.as_bytes(), Some("/other"), &["/other", "another device", "/disk"]);
}

#[test]
fn a_trace_that_was_cut_ends_with_its_last_whole_line() {
    for text in [IOLOG, BLKPARSE] {
        let end = text.find("700").or(text.find("     2.00")).expect("a line") + 12;
        let (requests, note) = read_of(&text.as_bytes()[..end], Format::Auto, None).expect("the rest");
        assert_eq!(requests.len(), 3, "{requests:?}");
        assert!(note.expect("a note").contains("was cut"));
    }
}

#[test]
fn what_is_no_trace_is_refused_with_what_to_do() {
    refused(b"", None, &["is empty"]);
    refused(b"\x1f\x8b\x08\x00", None, &["compressed", "gunzip"]);
    refused(b"\x28\xb5\x2f\xfd\x00", None, &["compressed", "unzstd"]);
    refused(b"\x07\x74\x61\x65\x00\x00", None, &["binary", "blkparse -i"]);
    refused(b"hello\0world", None, &["no text"]);
    refused(b"hello world\n", None, &["blkparse", "write_iolog", "hello world"]);
    refused(b"fio version 3 iolog\n1 /disk add\n", None, &["no request"]);
    refused(b"fio version 3 iolog\n1 /disk read x 4096\n", None, &["line 2", "/disk read x"]);
    refused(b"fio version 3 iolog\n1 /disk read 18446744073709551615 4096\n", None, &["line 2"]);
    refused(b"fio version 3 iolog\n1 /disk read 9223372036854775807 4096\n", None, &["line 2"]);
    refused(
        b"fio version 3 iolog\n1 /disk read 0 1000000000000000\n",
        None,
        &["line 2", "a read of", "4 GiB"],
    );
    refused(b"fio version 3 iolog\n1 /disk trim 0 1000000000000000\n", None, &["line 2", "a discard of"]);
    refused(&[b"fio version 3 iolog\n".as_slice(), &[b'x'; 100_000]].concat(), None, &["line 2"]);
    refused(b"  8,0  0  1  0.1  1  Q  R 5 - 8 [a]\n", None, &["line 1", "blkparse"]);
    let error = read_of(IOLOG.as_bytes(), Format::Blkparse, None).expect_err("another format");
    assert!(error.contains("not the text of blkparse"), "{error}");
    let folder = std::env::temp_dir();
    let error = Trace::open(&folder, Format::Auto, None).map(|_| ()).expect_err("a folder").line();
    assert!(error.contains("no file"), "{error}");
}

//! Lines of the log with their fields for systemd's journal, by its native protocol (`systemd.journal-fields(7)`,
//! <https://systemd.io/JOURNAL_NATIVE_PROTOCOL/>).
//!
//! A line has the text that it would have on standard error as its `MESSAGE`, which is why this is no crate for
//! `tracing`: those leave the fields out of it, and with them the numbers of the objects.
//!
//! Invariants: a line that the journal does not take goes to standard error. No line waits for the journal longer than
//! [`SEND_LIMIT`].

use super::text::TextFields;
use std::fmt::{Debug, Write as _};
use std::io::Write as _;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::time::Duration;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::layer::Context;

/// The socket of the journal.
const SOCKET: &str = "/run/systemd/journal/socket";
/// How long a line waits for a journal that does not read.
const SEND_LIMIT: Duration = Duration::from_secs(5);
/// Most bytes of a value: all values of a line fit into a datagram of the kernel's usual size.
const VALUE_MAX: usize = 16 << 10;
/// Most fields of a line.
const FIELDS_MAX: usize = 10;

/// The journal, if standard error is connected to it.
pub(super) fn of_standard_error() -> Option<Journal> {
    let stream = std::env::var("JOURNAL_STREAM").ok()?;
    let file = rustix::fs::fstat(rustix::stdio::stderr()).ok()?;
    is_stream(&stream, file.st_dev, file.st_ino).then(|| Journal::open(Path::new(SOCKET)).ok())?
}

/// Whether `JOURNAL_STREAM` names this file: "device:inode".
fn is_stream(stream: &str, device: u64, inode: u64) -> bool {
    stream == format!("{device}:{inode}")
}

/// Sends lines to the journal.
#[derive(Debug)]
pub(super) struct Journal {
    socket: UnixDatagram,
    /// The name of the program.
    identifier: String,
}

impl Journal {
    fn open(path: &Path) -> std::io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(SEND_LIMIT))?;
        socket.connect(path)?;
        let program = std::env::args_os().next().unwrap_or_default();
        let name = Path::new(&program).file_name().unwrap_or_default();
        Ok(Self { socket, identifier: name.to_string_lossy().into_owned() })
    }
}

impl<S: Subscriber> Layer<S> for Journal {
    fn on_event(&self, line: &Event<'_>, _: Context<'_, S>) {
        let mut message = String::new();
        if TextFields.format_fields(Writer::new(&mut message), line).is_err() {
            return;
        }
        let (priority, level) = match *line.metadata().level() {
            Level::ERROR => ("3", "ERROR"),
            Level::WARN => ("4", "WARN"),
            Level::INFO => ("6", "INFO"),
            _ => ("7", "DEBUG"),
        };
        let mut entry = Entry::default();
        entry.add("PRIORITY", priority);
        entry.add("SYSLOG_IDENTIFIER", &self.identifier);
        entry.add("MESSAGE", &message);
        line.record(&mut entry);
        if self.socket.send(&entry.bytes).is_err() {
            let _ = writeln!(std::io::stderr(), "{level} {message}");
        }
    }
}

/// One entry of the journal.
#[derive(Default)]
struct Entry {
    bytes: Vec<u8>,
    fields: usize,
    text: String,
}

impl Entry {
    fn add(&mut self, name: &str, value: &str) {
        let end =
            (0..=value.len().min(VALUE_MAX)).rev().find(|&end| value.is_char_boundary(end)).unwrap_or(0);
        let value = &value.as_bytes()[..end];
        self.bytes.extend_from_slice(name.as_bytes());
        // A value of several lines has its length in front.
        if value.contains(&b'\n') {
            self.bytes.push(b'\n');
            self.bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
        } else {
            self.bytes.push(b'=');
        }
        self.bytes.extend_from_slice(value);
        self.bytes.push(b'\n');
    }
}

impl Visit for Entry {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let mut text = std::mem::take(&mut self.text);
        text.clear();
        let _ = write!(text, "{value:?}");
        self.record_str(field, &text);
        self.text = text;
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" || self.fields == FIELDS_MAX {
            return;
        }
        self.fields += 1;
        self.add(&format!("CBD_{}", field.name().to_uppercase().replace('.', "_")), value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::EventName;
    use std::collections::BTreeMap;
    use tracing_subscriber::layer::SubscriberExt;

    /// The fields of an entry.
    fn parse(mut bytes: &[u8]) -> BTreeMap<String, String> {
        let mut fields = BTreeMap::new();
        while !bytes.is_empty() {
            let at = bytes.iter().position(|byte| [b'=', b'\n'].contains(byte)).unwrap();
            let (name, rest) = (std::str::from_utf8(&bytes[..at]).unwrap(), &bytes[at + 1..]);
            let (from, length) = if bytes[at] == b'=' {
                (0, rest.iter().position(|byte| *byte == b'\n').unwrap())
            } else {
                (8, usize::try_from(u64::from_le_bytes(rest[..8].try_into().unwrap())).unwrap())
            };
            let value = String::from_utf8(rest[from..from + length].to_vec()).unwrap();
            assert!(fields.insert(name.to_owned(), value).is_none(), "{name} is there twice");
            assert_eq!(rest[from + length], b'\n');
            bytes = &rest[from + length + 1..];
        }
        fields
    }

    #[test]
    fn a_line_has_its_text_its_priority_and_its_fields() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let socket = UnixDatagram::bind(&path).unwrap();
        let subscriber = tracing_subscriber::registry().with(Journal::open(&path).unwrap());
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(
                transport = 1,
                backend = 2_u32,
                event = EventName::DiskFailing.name(),
                path = "/dev/sd\nb",
                long = "x".repeat(1 << 20),
                "writeback fails: {}",
                "EIO"
            );
        });
        let mut bytes = vec![0; 1 << 20];
        let length = socket.recv(&mut bytes).unwrap();
        let fields = parse(&bytes[..length]);
        for (name, value) in [
            ("MESSAGE", "writeback fails: EIO transport=1 backend=2"),
            ("PRIORITY", "4"),
            ("CBD_EVENT", "disk.failing"),
            ("CBD_TRANSPORT", "1"),
            ("CBD_BACKEND", "2"),
            ("CBD_PATH", "/dev/sd\nb"),
        ] {
            assert_eq!(fields.get(name).map(String::as_str), Some(value), "{name}: {fields:?}");
        }
        assert_eq!(fields["CBD_LONG"].len(), VALUE_MAX);
        assert!(fields.contains_key("SYSLOG_IDENTIFIER"));
    }

    #[test]
    fn only_the_file_that_the_variable_names_is_the_journal() {
        assert!(is_stream("9:1234", 9, 1234));
        for other in ["9:1235", "8:1234", "", "9", "9:1234:5"] {
            assert!(!is_stream(other, 9, 1234), "{other}");
        }
    }
}

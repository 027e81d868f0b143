//! `cbdctrl dump`.

use super::{DumpArguments, NOT_PRINTED, UNOPENABLE, failed, number_of, of_region, opened_to_read};
use crate::command::Output;
use cbd_inspect::dump::{Filter, Item};
use std::io::{self, BufWriter, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::Arc;

/// Runs `dump`: a line for each item, or a JSON array of them.
#[must_use]
pub fn dump(arguments: &DumpArguments, json: bool) -> ExitCode {
    let output = Output { json };
    let region: Arc<dyn cbd_inspect::Bytes> = match opened_to_read(&arguments.region) {
        Ok((region, _)) => Arc::new(region),
        Err(error) => return failed(&error, &output),
    };
    let backend = match number_of(arguments.backend.as_ref(), || Ok(Arc::clone(&region))) {
        Ok(backend) => backend,
        Err(error) => return failed(&of_region(error, &arguments.region), &output),
    };
    let filter = Filter {
        backend,
        lane: arguments.lane,
        segment: arguments.segment,
        sequence: arguments.sequence.clone(),
        range: arguments.range,
        kind: arguments.kind,
        dirty: arguments.dirty,
        damaged: arguments.damaged,
    };
    let mut printer = Printer { out: BufWriter::new(io::stdout().lock()), json, items: 0, error: None };
    let done =
        cbd_inspect::dump::dump(&region, arguments.what.into(), &filter, &mut |item| printer.item(&item));
    let (items, printed) = (printer.items, printer.end());
    match done {
        // Nothing was printed yet: the error is the only output, in JSON too.
        Err(error) if items == 0 => return failed(&of_region(error, &arguments.region), &output),
        Err(error) => {
            eprintln!("cbdctrl: {}", of_region(error, &arguments.region).line());
            return ExitCode::from(UNOPENABLE);
        }
        Ok(()) => {}
    }
    match printed {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("cbdctrl: the result cannot be printed: {error}");
            ExitCode::from(NOT_PRINTED)
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Prints each item as it is read: there may be millions.
struct Printer<W: Write> {
    out: W,
    json: bool,
    items: u64,
    error: Option<io::Error>,
}

impl<W: Write> Printer<W> {
    fn item(&mut self, item: &Item) -> ControlFlow<()> {
        let line = if self.json {
            let begin = if self.items == 0 { "[\n    " } else { ",\n    " };
            serde_json::to_string(item).map(|item| format!("{begin}{item}")).map_err(io::Error::from)
        } else {
            Ok(format!("{item}\n"))
        };
        self.items += 1;
        match line.and_then(|line| self.out.write_all(line.as_bytes())) {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                self.error = Some(error);
                ControlFlow::Break(())
            }
        }
    }

    fn end(mut self) -> io::Result<()> {
        if let Some(error) = self.error {
            return Err(error);
        }
        if self.json && self.items > 0 {
            self.out.write_all(b"\n]\n")?;
        } else if self.json {
            self.out.write_all(b"[]\n")?;
        }
        self.out.flush()
    }
}

//! The terminal's modes: the alternate screen, raw input and a hidden cursor, and back.
//!
//! Invariants: [`leave`] undoes all that [`Screen::enter`] has done, from any thread and any number of times; a panic
//! of any thread does it before its message is printed, and ends the process.
//!
//! Elsewhere: when ([`super::live`]).

use super::state::State;
use super::view;
use crossterm::cursor::{Hide, Show};
use crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use crossterm::{Command, queue};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use std::io::{self, BufWriter, Write};
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether the terminal is in the modes of [`Screen::enter`].
static ENTERED: AtomicBool = AtomicBool::new(false);

/// The code with which a process ends after a panic.
const PANICKED: i32 = 101;

/// Standard output without the lock and the line buffer of std: whoever restores the terminal must not wait for a lock.
#[derive(Debug)]
struct Direct;

impl Write for Direct {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(rustix::stdio::stdout(), bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Standard output for pages: takes nothing any more once the terminal is restored, e.g. because it has gone.
#[derive(Debug)]
struct Pages;

impl Write for Pages {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if ENTERED.load(Ordering::SeqCst) { Direct.write(bytes) } else { Ok(bytes.len()) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The terminal on standard output, in the modes for a page.
pub struct Screen {
    terminal: Terminal<CrosstermBackend<BufWriter<Pages>>>,
}

impl Screen {
    /// Sets the modes. A panic undoes them from now on.
    ///
    /// # Errors
    /// That of the terminal, whose modes are then as before.
    pub fn enter() -> io::Result<Self> {
        restore_after_a_panic();
        set()?;
        match Terminal::new(CrosstermBackend::new(BufWriter::with_capacity(1 << 16, Pages))) {
            Ok(terminal) => Ok(Self { terminal }),
            Err(error) => {
                leave();
                Err(error)
            }
        }
    }

    /// Sets the modes again, e.g. after the process was stopped, and draws everything at the next time.
    ///
    /// # Errors
    /// That of the terminal.
    pub fn enter_again(&mut self) -> io::Result<()> {
        // Another process may have changed the modes: those that are set already would not be set again.
        let _ = disable_raw_mode();
        set()?;
        self.redraw()
    }

    /// Draws everything at the next time.
    ///
    /// # Errors
    /// That of the terminal.
    pub fn redraw(&mut self) -> io::Result<()> {
        // Not `clear`, which asks the terminal for the cursor's place and waits for its answer.
        let size = self.terminal.size()?;
        self.terminal.resize(size.into())
    }

    /// Sends what differs from the page before.
    ///
    /// # Errors
    /// That of the terminal.
    pub fn draw(&mut self, state: &State) -> io::Result<()> {
        self.terminal.draw(|frame| view::draw(state, frame.buffer_mut())).map(|_| ())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        leave();
    }
}

fn set() -> io::Result<()> {
    enable_raw_mode()?;
    ENTERED.store(true, Ordering::SeqCst);
    send(EnterAlternateScreen, Hide).inspect_err(|_| leave())
}

/// Restores the terminal, if its modes are set.
pub fn leave() {
    if ENTERED.swap(false, Ordering::SeqCst) {
        // If the terminal has gone there is nothing to restore.
        let _ = send(LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
    }
}

/// Restores the modes of the terminal's line alone, which waits for no output.
pub fn leave_at_once() {
    if ENTERED.swap(false, Ordering::SeqCst) {
        let _ = disable_raw_mode();
    }
}

fn send(screen: impl Command, cursor: impl Command) -> io::Result<()> {
    let mut bytes = Vec::new();
    queue!(bytes, screen, cursor)?;
    Direct.write_all(&bytes)
}

fn restore_after_a_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        leave();
        before(panic);
        // The other threads would go on to draw.
        std::process::exit(PANICKED);
    }));
}

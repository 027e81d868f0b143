//! The boundary between C and Rust: converts results to numbers, pointers to references, panics to errors.
//!
//! Invariants: nothing unwinds into C; a pointer is dereferenced only after a check for null.

use cbd_types::{Error, ErrorKind, Result};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

pub(super) fn last_error() -> *const c_char {
    // The text is valid until the next failed call of the thread, or until the thread ends.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Stores the text of an error for [`last_error`], and returns its number.
pub(super) fn note(error: &Error) -> c_int {
    let text = error.line().replace('\0', "?");
    // While a thread is destroyed, no code of it can query the text.
    let _ = LAST.try_with(|last| *last.borrow_mut() = CString::new(text).unwrap_or_default());
    -error.errno()
}

/// Runs the body of a C function.
pub(super) fn call(work: impl FnOnce() -> Result<c_int>) -> c_int {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => note(&error),
        Err(panic) => note(&of_panic(&*panic)),
    }
}

fn of_panic(panic: &(dyn Any + Send)) -> Error {
    let words = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let words = words.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    Error::new(
        ErrorKind::System,
        format!(
            "libcbd failed ({words}); what was acknowledged is in the region: close what is open and open it again"
        ),
    )
}

fn is_null(what: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("{what} is a null pointer"))
}

pub(super) fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

/// # Safety
/// A pointer that is not null points to a `T` that no thread changes during `'a`.
pub(super) unsafe fn shared<'a, T>(pointer: *const T, what: &str) -> Result<&'a T> {
    // SAFETY: the caller guarantees it.
    unsafe { pointer.as_ref() }.ok_or_else(|| is_null(what))
}

/// # Safety
/// A `T` can be written to a pointer that is not null.
pub(super) unsafe fn give<T>(pointer: *mut T, what: &str, value: T) -> Result<()> {
    if pointer.is_null() {
        return Err(is_null(what));
    }
    // SAFETY: the pointer is not null, and the caller guarantees that it can be written. The old value is not dropped: it may be
    // uninitialized.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Refuses a null pointer before an operation whose result could not be returned.
pub(super) fn wanted<T>(pointer: *mut T, what: &str) -> Result<()> {
    if pointer.is_null() { Err(is_null(what)) } else { Ok(()) }
}

/// # Safety
/// A pointer that is not null points to text that ends with a zero byte and is valid during `'a`.
pub(super) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Result<&'a str> {
    if pointer.is_null() {
        return Err(is_null(what));
    }
    // SAFETY: the caller guarantees it.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| invalid(format!("{what} is not UTF-8")))
}

/// Checks the length of memory that C passes.
pub(super) fn checked_length<T>(pointer: *const T, length: usize, what: &str) -> Result<()> {
    if pointer.is_null() && length > 0 {
        return Err(is_null(what));
    }
    if isize::try_from(length).is_err() {
        return Err(invalid(format!("{what} of {length} bytes is larger than any memory")));
    }
    Ok(())
}

/// # Safety
/// `length` bytes at a pointer that is not null can be read, and no thread changes them during `'a`.
pub(super) unsafe fn bytes<'a>(pointer: *const u8, length: usize, what: &str) -> Result<&'a [u8]> {
    checked_length(pointer, length, what)?;
    if length == 0 {
        return Ok(&[]);
    }
    // SAFETY: the pointer is not null, the length does not exceed that of any memory, and the caller guarantees the rest.
    Ok(unsafe { std::slice::from_raw_parts(pointer, length) })
}

/// # Safety
/// `length` bytes at a pointer that is not null can be read and written, and no other thread accesses them
/// during `'a`.
pub(super) unsafe fn bytes_mut<'a>(pointer: *mut u8, length: usize, what: &str) -> Result<&'a mut [u8]> {
    checked_length(pointer, length, what)?;
    if length == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `bytes`.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, length) })
}

/// Writes as much of `text` as fits, followed by a zero byte, and returns the length of the whole text.
///
/// # Safety
/// `capacity` bytes at a pointer that is not null can be written.
pub(super) unsafe fn give_text(text: &str, buffer: *mut c_char, capacity: usize) -> Result<c_int> {
    checked_length(buffer, capacity, "the buffer")?;
    if capacity > 0 {
        let mut length = text.len().min(capacity - 1);
        while !text.is_char_boundary(length) {
            length -= 1;
        }
        // SAFETY: `length` is below `capacity`, which can be written; the text is Rust memory, so the two do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast::<u8>(), length);
            buffer.add(length).write(0);
        }
    }
    c_int::try_from(text.len()).map_err(|_| invalid("the text is too long".to_owned()))
}

/// A character array with as much of `text` as fits, filled up with zero bytes.
pub(super) fn field<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (place, byte) in field.iter_mut().take(N - 1).zip(text.bytes()) {
        *place = c_char::from_ne_bytes([byte]);
    }
    field
}

/// # Errors
/// When a flag or reserved field has an unknown bit.
pub(super) fn check_flags(flags: u32, known: u32, reserved: &[u64]) -> Result<()> {
    if flags & !known != 0 {
        return Err(invalid(format!(
            "the flags {flags:#x} have bits that mean nothing: {:#x}",
            flags & !known
        )));
    }
    if reserved.iter().any(|&word| word != 0) {
        return Err(invalid(
            "a reserved field is not zero: set the whole structure to zeroes first".to_owned(),
        ));
    }
    Ok(())
}

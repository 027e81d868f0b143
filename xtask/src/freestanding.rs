//! `cargo xtask stack`: the engine built without std, and the stack frames of its functions.
//!
//! Invariants: the sizes come from the machine code, as objdump (binutils) prints it: pushes, subtractions from the stack
//! pointer and the return address. Every function of the measured crates counts, with what they instantiate of `core` and `alloc`.
//!
//! Not here: frames of what a host passes in, and of compiler built-ins such as memcpy.

use crate::flags::Problem;
use crate::shell;
use crate::workspace::cargo;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The target without an operating system.
const TARGET: &str = "x86_64-unknown-none";

/// The crates whose functions are measured: as cargo names their libraries.
const MEASURED: [&str; 5] = ["cbd_types", "cbd_format", "cbd_engine", "cbd_device", "cbd_freestanding"];

/// The largest stack frame of a function, in bytes.
const FRAME_MAX: usize = 1024;

/// The largest frame of a function that only the opening of a region or of a cache calls, and administration: rows of tables, of
/// which the largest has 1008 bytes, and superblocks are moved as values there.
const OPENING_FRAME_MAX: usize = 1536;

/// Parts of the names of these functions. The last two read a table.
const OPENING: [&str; 6] = [
    "cbd_engine::transport::",
    "cbd_engine::recovery::",
    "cbd_format::superblock::",
    "cbd_engine::slots::TwoSlots<T>::read",
    "alloc::vec::spec_from_iter::SpecFromIter<T,I>>::from_iter",
    "core::iter::adapters::map::Map<I,F> as core::iter::traits::iterator::Iterator>::fold",
];

/// Frames that `cargo xtask stack` lists.
const LISTED: usize = 20;

/// Limit of each command here.
const LIMIT: Duration = Duration::from_secs(1200);

/// Builds the engine for a target without an operating system and checks the stack frames of its functions. True if none
/// exceeds the limit, or if that target cannot be installed and none was checked.
///
/// # Errors
/// When it cannot be built or disassembled.
pub fn run(arguments: &[String]) -> Result<bool, Problem> {
    let json = match arguments {
        [] => false,
        [argument] if argument == "--json" => true,
        _ => return Err(Problem::Usage("stack takes --json alone".to_owned())),
    };
    let target = target();
    let frames = measure(target).map_err(Problem::Failed)?;
    let Some((largest, bytes)) = frames.first() else {
        return Err(Problem::Failed("no function was found in the libraries".to_owned()));
    };
    if json {
        let max = json!({ "bytes": bytes, "function": largest, "limit": limit_of(largest) });
        let other = frames.iter().find(|(name, _)| limit_of(name) == FRAME_MAX);
        let other =
            other.map(|(name, bytes)| json!({ "bytes": bytes, "function": name, "limit": FRAME_MAX }));
        let house = json!({ "stack_frame_max": max, "stack_frame_max_when_open": other });
        println!("{:#}", json!({ "house": house }));
    } else {
        for (name, bytes) in frames.iter().take(LISTED) {
            println!("{bytes:6} {name}");
        }
        println!("stack_frame_max {bytes}");
    }
    let over: Vec<_> =
        frames.iter().filter(|(name, bytes)| *bytes > limit_of(name)).filter(|_| target.is_some()).collect();
    for (name, bytes) in &over {
        eprintln!("stack: the frame of {name} has {bytes} bytes; the limit is {}", limit_of(name));
    }
    Ok(over.is_empty())
}

/// The limit of a function's frame, in bytes.
fn limit_of(name: &str) -> usize {
    if OPENING.iter().any(|part| name.contains(part)) { OPENING_FRAME_MAX } else { FRAME_MAX }
}

/// The target without an operating system. None, with a warning, where it cannot be installed: then the crates are built for this machine,
/// which shows less, and has other frames.
fn target() -> Option<&'static str> {
    let installed = install_target();
    installed
        .inspect_err(|text| {
            eprintln!("stack: {text}; the crates are built for this machine's own target, and the limit of frames is not checked");
        })
        .ok()
        .map(|()| TARGET)
}

/// The frame of each function, in bytes, largest first.
fn measure(target: Option<&str>) -> Result<Vec<(String, usize)>, String> {
    let mut frames: BTreeMap<String, usize> = BTreeMap::new();
    for library in build(target)? {
        let mut objdump = Command::new("objdump");
        objdump.args(["--disassemble", "--demangle", "--no-show-raw-insn"]).arg(&library);
        let text =
            shell::output_of(&mut objdump, LIMIT).map_err(|end| format!("objdump {library}: {end}"))?;
        for (name, bytes) in frames_of(&text) {
            let known = frames.entry(name).or_default();
            *known = bytes.max(*known);
        }
    }
    let mut frames: Vec<_> = frames.into_iter().collect();
    frames.sort_by_key(|(_, bytes)| Reverse(*bytes));
    Ok(frames)
}

/// Installs the target's library through rustup where it is missing.
fn install_target() -> Result<(), String> {
    let mut compiler = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    compiler.args(["--print", "target-libdir", "--target", TARGET]);
    let libraries = shell::output_of(&mut compiler, LIMIT)
        .map_err(|end| format!("rustc --print target-libdir: {end}"))?;
    if Path::new(libraries.trim()).is_dir() {
        return Ok(());
    }
    shell::output_of(Command::new("rustup").args(["target", "add", TARGET]), LIMIT)
        .map_err(|end| format!("rustup target add {TARGET}: {end}"))?;
    Ok(())
}

/// Builds the crates; the paths of their libraries.
fn build(target: Option<&str>) -> Result<Vec<String>, String> {
    let mut command = cargo(["build", "--release", "--package", "cbd-freestanding"]);
    command.args(["--message-format", "json-render-diagnostics"]);
    if let Some(target) = target {
        command.args(["--target", target]);
    }
    if crate::workspace::is_ci() {
        command.arg("--locked").env("CARGO_INCREMENTAL", "0");
    }
    let messages = shell::output_of(&mut command, LIMIT).map_err(|end| format!("cargo build: {end}"))?;
    let libraries = libraries_in(&messages);
    if libraries.len() == MEASURED.len() {
        Ok(libraries)
    } else {
        Err(format!("cargo named {} libraries instead of {}", libraries.len(), MEASURED.len()))
    }
}

/// The libraries of the measured crates that cargo's messages name.
fn libraries_in(messages: &str) -> Vec<String> {
    let mut libraries = Vec::new();
    for line in messages.lines() {
        let Ok(message) = serde_json::from_str::<Value>(line) else { continue };
        if message["reason"] == "compiler-artifact"
            && message["target"]["name"].as_str().is_some_and(|name| MEASURED.contains(&name))
        {
            let files = message["filenames"].as_array().into_iter().flatten().filter_map(Value::as_str);
            libraries.extend(files.filter(|file| file.ends_with(".rlib")).map(str::to_owned));
        }
    }
    libraries
}

/// The frames of the functions in objdump's output: name and bytes.
fn frames_of(text: &str) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    let mut function: Option<Function> = None;
    for line in text.lines() {
        if let Some(name) = line.strip_suffix(">:").and_then(|line| line.split_once(" <")) {
            found.extend(function.replace(Function::new(name.1)).map(Function::into_frame));
        } else if let Some(function) = &mut function
            && let Some((_, instruction)) = line.split_once(":\t")
        {
            function.add(instruction);
        }
    }
    found.extend(function.map(Function::into_frame));
    found
}

/// What a function takes of the stack.
struct Function {
    name: String,
    /// Registers that it saves; a function saves each once on each path.
    saved: BTreeSet<String>,
    bytes: usize,
}

impl Function {
    fn new(name: &str) -> Self {
        // The return address.
        Self { name: name.to_owned(), saved: BTreeSet::new(), bytes: 8 }
    }

    fn add(&mut self, instruction: &str) {
        let mut parts = instruction.split_whitespace();
        let (name, operands) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        if name.starts_with("push") {
            self.saved.insert(operands.to_owned());
        } else if name.starts_with("sub") && operands.ends_with(",%rsp") {
            self.bytes += hexadecimal(operands.trim_start_matches('$'));
        } else if name == "lea" && operands.ends_with("(%rsp),%r11") && operands.starts_with('-') {
            // A loop probes the pages of a large frame, of which one is subtracted in it.
            self.bytes += hexadecimal(operands.trim_start_matches('-')).saturating_sub(4096);
        }
    }

    fn into_frame(self) -> (String, usize) {
        (self.name, self.bytes + 8 * self.saved.len())
    }
}

/// The number at the beginning of `text`, as in `0x1f8,%rsp`; 0 where there is none.
fn hexadecimal(text: &str) -> usize {
    let digits = text.strip_prefix("0x").unwrap_or_default();
    let end = digits.find(|digit: char| !digit.is_ascii_hexdigit()).unwrap_or(digits.len());
    usize::from_str_radix(&digits[..end], 16).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_from_the_machine_code() {
        let text = "\
x.o:     file format elf64-x86-64

0000000000000000 <<T as a::B>::small>:
       0:\tpush   %rbp
       1:\tpush   %rbx
       2:\tsub    $0x18,%rsp
       6:\tsub    $0x1,%rax
       a:\tret

0000000000000000 <a::paged>:
       0:\tsub    $0x1000,%rsp
       7:\tmovq   $0x0,(%rsp)
       f:\tsub    $0x80,%rsp

0000000000000000 <a::looped>:
       0:\tlea    -0x3000(%rsp),%r11
       8:\tsub    $0x1000,%rsp
       f:\tmovq   $0x0,(%rsp)
      17:\tcmp    %r11,%rsp
      1a:\tjne    8
      1c:\tsub    $0x10,%rsp
";
        let expected =
            [("<T as a::B>::small", 8 + 16 + 24), ("a::paged", 8 + 4224), ("a::looped", 8 + 12288 + 16)];
        assert_eq!(frames_of(text), expected.map(|(name, bytes)| (name.to_owned(), bytes)));
    }

    #[test]
    fn the_data_path_has_the_lower_limit() {
        assert_eq!(
            limit_of("cbd_engine::write::<impl cbd_engine::cache::Cache<E>>::store_locked"),
            FRAME_MAX
        );
        assert_eq!(limit_of("cbd_device::queue::Queue<E,Q>::poll"), FRAME_MAX);
        assert_eq!(limit_of("cbd_engine::slots::TwoSlots<T>::store_copy"), FRAME_MAX);
        assert_eq!(limit_of("cbd_engine::transport::Tables<E>::read"), OPENING_FRAME_MAX);
    }

    #[test]
    fn libraries_are_those_of_the_measured_crates() {
        let messages = "\
{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"syn\"},\"filenames\":[\"/a/libsyn.rlib\"]}
not json
{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"cbd_types\"},\"filenames\":[\"/a/t.rmeta\",\"/a/t.rlib\"]}
{\"reason\":\"build-finished\",\"success\":true}
";
        assert_eq!(libraries_in(messages), ["/a/t.rlib"]);
    }
}

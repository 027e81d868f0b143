//! `cargo xtask stack`: builds the engine without std, and measures the stack frames of its functions.
//!
//! It also adds up chains of calls from the entry points of the data path and of the background worker (`chain`).
//!
//! Invariants: the sizes come from the machine code, as objdump (binutils) prints it: pushes, subtractions from the stack
//! pointer, and the return address. Every function of the measured crates counts, with the functions of `core` and `alloc` that
//! they instantiate.
//!
//! Not measured: frames of functions that a host passes in, and of compiler built-ins such as memcpy.

mod chain;

use crate::problem::Problem;
use crate::shell;
use crate::workspace::{self, cargo_with_lock};
use chain::{Chain, Graph};
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The target without an operating system.
const TARGET: &str = "x86_64-unknown-none";

/// The crates whose functions are measured, under the names that cargo gives their libraries.
const MEASURED: [&str; 5] = ["cbd_types", "cbd_format", "cbd_engine", "cbd_device", "cbd_freestanding"];

/// The largest stack frame of a function, in bytes.
const FRAME_MAX: usize = 1024;

/// Chains of calls: the name, a part of the symbols of their entry points, and the limit in bytes.
const CHAINS: [(&str, &str, usize); 2] = [
    ("data_path", "cbd_freestanding9data_path", 4096),
    ("background_worker", "cbd_freestanding10background4step", 8192),
];

/// Number of frames that `cargo xtask stack` lists.
const LISTED: usize = 20;

/// Time limit of each command of this module.
const LIMIT: Duration = Duration::from_secs(1200);

/// Builds the engine for a target without an operating system, and checks the stack frames of its functions. Returns true if no
/// frame exceeds its limit, or if the target cannot be installed and no frame was checked.
///
/// # Errors
/// When the engine cannot be built or disassembled.
pub fn run(arguments: &[String]) -> Result<bool, Problem> {
    let json = match arguments {
        [] => false,
        [argument] if argument == "--json" => true,
        _ => return Err(Problem::Usage("stack takes --json alone".to_owned())),
    };
    let target = target();
    let found = measure(target).map_err(Problem::Failed)?;
    if json {
        println!("{:#}", found.as_json());
    } else {
        found.print();
    }
    let mut is_good = true;
    for frame in found.frames.iter().filter(|frame| frame.bytes > FRAME_MAX) {
        eprintln!("stack: the frame of {} has {} bytes; the limit is {FRAME_MAX}", frame.name, frame.bytes);
        is_good = false;
    }
    for (name, limit, chain) in found.chains.iter().filter(|(_, limit, chain)| chain.bytes > *limit) {
        eprintln!("stack: the deepest chain of {name} has {} bytes; the limit is {limit}", chain.bytes);
        is_good = false;
    }
    // On the fallback target the frames have other sizes, so their limits are not enforced.
    Ok(is_good || target.is_none())
}

/// The stack frame of a function.
struct Frame {
    name: String,
    bytes: usize,
    /// Whether the data path or the background worker reaches it.
    is_on_path: bool,
}

/// The measurements.
struct Found {
    /// The frames, largest first: the listed ones, and all that exceed their limits. Not empty.
    frames: Vec<Frame>,
    /// The deepest chain of calls below each group of entry points, with its limit in bytes.
    chains: Vec<(&'static str, usize, Chain)>,
}

impl Found {
    fn as_json(&self) -> Value {
        let largest = |is_on_path: bool| {
            let frame = self.frames.iter().find(|frame| frame.is_on_path || !is_on_path)?;
            Some(json!({ "bytes": frame.bytes, "function": frame.name, "limit": FRAME_MAX }))
        };
        let over = self.frames.iter().filter(|frame| frame.bytes > FRAME_MAX).count();
        let mut chains = serde_json::Map::new();
        for (name, limit, chain) in &self.chains {
            let functions = chain.functions.iter();
            let functions: Vec<_> =
                functions.map(|(name, bytes)| json!({ "function": name, "bytes": bytes })).collect();
            chains.insert(
                (*name).to_owned(),
                json!({
                    "bytes": chain.bytes,
                    "limit": limit,
                    "functions": functions,
                    "indirect_calls": chain.indirect,
                    "recursive": chain.recursive,
                }),
            );
        }
        json!({ "house": {
            "stack_frame_max": largest(false),
            "stack_frame_max_when_open": largest(true),
            "stack_frames_over": over,
            "stack_chain_max": chains,
        } })
    }

    fn print(&self) {
        for frame in &self.frames {
            println!("{:6} {}{}", frame.bytes, frame.name, if frame.is_on_path { "" } else { " (opening)" });
        }
        for (name, _, chain) in &self.chains {
            println!("stack_chain_max of {name}: {} bytes", chain.bytes);
            for (function, bytes) in &chain.functions {
                println!("{bytes:6} {function}");
            }
            println!("       {} indirect calls; recursive: {:?}", chain.indirect, chain.recursive);
        }
    }
}

/// The target without an operating system. Returns `None`, with a warning, if it cannot be installed. The crates are then built
/// for this machine, which is a weaker check, and the frames have other sizes.
fn target() -> Option<&'static str> {
    let installed = install_target();
    installed
        .inspect_err(|text| {
            eprintln!("stack: {text}; the crates are built for this machine's own target, and the limit of frames is not checked");
        })
        .ok()
        .map(|()| TARGET)
}

/// The frames and chains of the measured crates.
fn measure(target: Option<&str>) -> Result<Found, String> {
    let graph = Graph::read(&build(target)?, &sysroot(target)?)?;
    let mut chains = Vec::new();
    let mut on_path = BTreeSet::new();
    for (name, entry, limit) in CHAINS {
        let mut chain = graph.deepest(|symbol| symbol.contains(entry));
        if chain.functions.is_empty() {
            return Err(format!("no entry point is called *{entry}*"));
        }
        on_path.append(&mut chain.reached);
        let symbols: Vec<_> = chain.functions.iter().map(|(symbol, _)| symbol.as_str()).collect();
        let names = chain::readable(&symbols)?;
        chain.functions =
            names.into_iter().zip(chain.functions).map(|(name, (_, bytes))| (name, bytes)).collect();
        let recursive: Vec<_> = chain.recursive.iter().map(String::as_str).collect();
        chain.recursive = chain::readable(&recursive)?.into_iter().collect();
        chains.push((name, limit, chain));
    }
    let frame = |(symbol, bytes): (&str, usize)| Frame {
        name: symbol.to_owned(),
        bytes,
        is_on_path: on_path.contains(symbol),
    };
    let mut frames: Vec<_> = graph.frames().map(frame).collect();
    frames.sort_by_key(|frame| Reverse(frame.bytes));
    let first_on_path = frames.iter().position(|frame| frame.is_on_path);
    let mut number = 0;
    frames.retain(|frame| {
        number += 1;
        number <= LISTED || Some(number - 1) == first_on_path || frame.bytes > FRAME_MAX
    });
    let symbols: Vec<_> = frames.iter().map(|frame| frame.name.as_str()).collect();
    let names = chain::readable(&symbols)?;
    frames.iter_mut().zip(names).for_each(|(frame, name)| frame.name = name);
    if frames.is_empty() {
        Err("no function was found in the libraries".to_owned())
    } else {
        Ok(Found { frames, chains })
    }
}

/// The output of objdump for a library.
fn objdump(library: &str, arguments: &[&str]) -> Result<String, String> {
    let mut objdump = Command::new("objdump");
    objdump.args(arguments).arg(library);
    shell::output_of(&mut objdump, LIMIT).map_err(|end| format!("objdump {library}: {end}"))
}

/// The libraries `core` and `alloc` of the target.
fn sysroot(target: Option<&str>) -> Result<Vec<String>, String> {
    let folder = target_libraries(target)?;
    let files = std::fs::read_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let names = files.flatten().map(|file| file.path().display().to_string());
    Ok(names
        .filter(|name| {
            name.ends_with(".rlib") && ["/libcore-", "/liballoc-"].iter().any(|part| name.contains(part))
        })
        .collect())
}

/// The folder of the target's libraries.
fn target_libraries(target: Option<&str>) -> Result<PathBuf, String> {
    let mut compiler = workspace::compiler();
    compiler.args(["--print", "target-libdir"]);
    if let Some(target) = target {
        compiler.args(["--target", target]);
    }
    let folder = shell::output_of(&mut compiler, LIMIT)
        .map_err(|end| format!("rustc --print target-libdir: {end}"))?;
    Ok(PathBuf::from(folder.trim()))
}

/// Installs the target's library through rustup if it is missing.
fn install_target() -> Result<(), String> {
    if target_libraries(Some(TARGET))?.is_dir() {
        return Ok(());
    }
    shell::output_of(Command::new("rustup").args(["target", "add", TARGET]), LIMIT)
        .map_err(|end| format!("rustup target add {TARGET}: {end}"))?;
    Ok(())
}

/// Builds the crates, and returns the paths of their libraries.
fn build(target: Option<&str>) -> Result<Vec<String>, String> {
    let mut command = cargo_with_lock(["build", "--release", "--package", "cbd-freestanding"]);
    command.args(["--message-format", "json-render-diagnostics"]);
    if let Some(target) = target {
        command.args(["--target", target]);
    }
    let messages = shell::output_of(&mut command, LIMIT).map_err(|end| format!("cargo build: {end}"))?;
    let libraries = libraries_in(&messages);
    if libraries.len() == MEASURED.len() {
        Ok(libraries)
    } else {
        Err(format!("cargo named {} libraries instead of {}", libraries.len(), MEASURED.len()))
    }
}

/// The libraries of the measured crates that the messages of cargo name.
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

#[cfg(test)]
mod tests {
    use super::*;

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

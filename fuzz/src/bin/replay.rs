//! Runs inputs on an ordinary compiler, and explains them.

use cbd_fuzz::{Target, region, store, target};
use std::path::Path;
use std::process::ExitCode;

const USAGE: &str = "\
Usage: replay TARGET [FILE..]     runs the files, or all that are kept of the target
       replay --explain FILE..    shows what inputs of the target `recovery` stand for
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["--explain", ref files @ ..] => explain(files),
        [name, ref files @ ..] => known(name).and_then(|target| replay(target, files)),
        [] => Err(USAGE.to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("{text}");
            ExitCode::from(2)
        }
    }
}

fn known(name: &str) -> Result<&'static Target, String> {
    target(name).ok_or_else(|| format!("there is no target '{name}'\n{USAGE}"))
}

fn read(file: &Path) -> Result<Vec<u8>, String> {
    std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))
}

fn explain(files: &[&str]) -> Result<(), String> {
    for file in files {
        println!("{file}: {}", region::explain(&read(Path::new(file))?));
    }
    Ok(())
}

fn replay(target: &Target, files: &[&str]) -> Result<(), String> {
    let mut paths: Vec<_> = files.iter().map(|file| Path::new(file).to_owned()).collect();
    if paths.is_empty() {
        for directory in store::directories(target.name) {
            paths.extend(
                store::files(&directory).map_err(|error| format!("{}: {error}", directory.display()))?,
            );
        }
    }
    for path in &paths {
        println!("{}", path.display());
        (target.run)(&read(path)?);
    }
    println!("{} inputs, nothing wrong", paths.len());
    Ok(())
}

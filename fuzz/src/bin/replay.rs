//! Runs inputs on an ordinary compiler, explains them, and writes the initial inputs.

use cbd_fuzz::{TARGETS, Target, region, store, target};
use std::path::Path;
use std::process::ExitCode;

const USAGE: &str = "\
Usage: replay TARGET [FILE..]     runs the files, or all that are kept of the target
       replay --explain FILE..    shows what inputs of the target `recovery` stand for
       replay --seeds TARGET DIR  writes the inputs to begin with
       replay --list              names the targets, each with its longest input in bytes
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["--list"] => {
            TARGETS.iter().for_each(|target| println!("{} {}", target.name, target.length_max));
            Ok(())
        }
        ["--explain", ref files @ ..] => explain(files),
        ["--seeds", name, directory] => known(name).and_then(|target| seeds(target, Path::new(directory))),
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

fn seeds(target: &Target, directory: &Path) -> Result<(), String> {
    for (number, seed) in (target.seeds)().iter().enumerate() {
        let path = directory.join(format!("seed-{number:03}"));
        std::fs::write(&path, seed).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

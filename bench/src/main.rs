//! `cbd-bench`: measures the distance of CBD from the limit that the machine itself sets.
//!
//! Invariants: compared figures come from turns in one run on one machine, the figures are medians, and each ratio is shown with
//! the absolute figures and their spread.
//!
//! Elsewhere: whether CBD is correct (the tests); a missed budget is not a failure.

mod budgets;
mod counting;
mod figures;
mod full;
mod groups;
mod in_parallel;
mod instant_disk;
mod live;
mod machine;
mod options;
mod processors;
mod report;
mod rig;
mod ring;
mod scale;
mod served;
mod statistics;
mod turns;
mod window;

pub use figures::Figures;
use options::Options;
pub use statistics::rounded;
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let options = match Options::parse(&arguments) {
        Ok(options) => options,
        Err(text) => {
            eprintln!("cbd-bench: {text}\n\n{}", options::usage());
            return ExitCode::from(2);
        }
    };
    if options.help {
        print!("{}", options::usage());
        return ExitCode::SUCCESS;
    }
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("cbd-bench: {text}");
            ExitCode::FAILURE
        }
    }
}

/// Measures, or reads earlier figures, and shows and writes the requested output.
fn run(options: &Options) -> Result<(), String> {
    if let Some(region) = &options.restart_of {
        println!("{}", groups::restart::restart(region).map_err(|error| error.line())?);
        return Ok(());
    }
    let figures = match &options.from {
        Some(file) => report::read(file)?,
        None => measure(options)?.into_json(machine::describe()),
    };
    if options.json {
        println!("{figures:#}");
    }
    if options.report {
        let docs = options.docs.clone().unwrap_or_else(report::docs_of_the_project);
        report::write(&figures, &docs)?;
    }
    Ok(())
}

/// Runs the requested groups.
fn measure(options: &Options) -> Result<Figures, String> {
    let mut figures = Figures::new(options.json);
    for group in groups::GROUPS.iter().filter(|group| options.wants(group.name)) {
        figures.enter(group.name);
        (group.run)(options, &mut figures).map_err(|error| format!("{}: {error}", group.name))?;
    }
    figures.summarize();
    Ok(figures)
}

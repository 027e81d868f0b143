//! `cbd-models`: plays the scenes and prints the results.
//!
//! Invariants: a failed scene makes the exit code 1, and its line has the command that repeats the failing
//! execution.

use cbd_models::{Budget, Outcome, Scene, run, scenes};
use serde_json::{Value, json};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const USAGE: &str = "\
Usage: cbd-models [OPTIONS]

Plays scenes of the engine's threads, each execution under a schedule that its seed chooses.

Options:
  --scene NAME[,NAME..]  only these scenes (default: all)
  --seed N               seed of the first execution of each scene (default: 1)
  --iterations N         executions of each scene (default: 1000)
  --sweep N              instead of random schedules, every schedule in which one thread is interrupted once, in the
                         execution with seed N; --seed is then the number of the first schedule
  --seconds N            no execution of a scene begins after this time
  --jobs N               scenes that run at a time (default: one for each processor)
  --json                 one JSON object on standard output
  --list                 the scenes with their descriptions
";

struct Arguments {
    scenes: Vec<&'static Scene>,
    budget: Budget,
    jobs: usize,
    json: bool,
    list: bool,
}

fn main() -> ExitCode {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let arguments = match parse(&given) {
        Ok(arguments) => arguments,
        Err(text) => {
            eprintln!("cbd-models: {text}\n\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    if arguments.list {
        scenes::ALL.iter().for_each(|scene| println!("{:<14} {}", scene.name, scene.about));
        return ExitCode::SUCCESS;
    }
    let begun = Instant::now();
    let outcomes = play(&arguments);
    let failed = outcomes.iter().filter(|(_, outcome)| outcome.failure.is_some()).count();
    if arguments.json {
        let scenes: Vec<Value> =
            outcomes.iter().map(|(scene, outcome)| as_json(scene, &arguments.budget, outcome)).collect();
        let sum = |of: fn(&Outcome) -> u64| outcomes.iter().map(|(_, outcome)| of(outcome)).sum::<u64>();
        let all = json!({
            "executions": sum(|outcome| outcome.executions),
            "points": sum(|outcome| outcome.points),
            "crash_states": sum(crash_states),
            "violations": failed,
            "seconds": begun.elapsed().as_secs_f64(),
            "scenes": scenes,
        });
        println!("{all:#}");
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Plays the scenes, several at a time; prints the result of each to standard error.
fn play(arguments: &Arguments) -> Vec<(&'static Scene, Outcome)> {
    let waiting = Mutex::new(arguments.scenes.clone());
    let ended = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs {
            scope.spawn(|| {
                loop {
                    let next = waiting.lock().map_or(None, |mut waiting| waiting.pop());
                    let Some(scene) = next else { break };
                    let outcome = run(scene, &arguments.budget);
                    report(scene, &arguments.budget, &outcome);
                    if let Ok(mut ended) = ended.lock() {
                        ended.push((scene, outcome));
                    }
                }
            });
        }
    });
    let mut ended = ended.into_inner().unwrap_or_default();
    ended.sort_by_key(|(scene, _)| scene.name);
    ended
}

fn report(scene: &Scene, budget: &Budget, outcome: &Outcome) {
    let seconds = outcome.time.as_secs_f64();
    eprintln!(
        "{:<14} {} executions, {} points in the longest and {} in the mean, {:?}, {seconds:.1} s",
        scene.name,
        outcome.executions,
        outcome.points_max,
        outcome.points / outcome.executions.max(1),
        outcome.checked,
    );
    if let Some((seed, text)) = &outcome.failure {
        eprintln!(
            "{:<14} FAILED: {text}\n    repeat it: {}",
            scene.name,
            repeat_command(scene, budget, *seed)
        );
    }
}

/// The command that repeats one execution.
fn repeat_command(scene: &Scene, budget: &Budget, seed: u64) -> String {
    let sweep = budget.sweep.map(|of| format!(" --sweep {of}")).unwrap_or_default();
    format!("cargo xtask models --scene {}{sweep} --seed {seed} --iterations 1", scene.name)
}

fn crash_states(outcome: &Outcome) -> u64 {
    outcome.checked.values().sum()
}

fn as_json(scene: &Scene, budget: &Budget, outcome: &Outcome) -> Value {
    json!({
        "scene": scene.name,
        "executions": outcome.executions,
        "points": outcome.points,
        "points_max": outcome.points_max,
        "checked": outcome.checked,
        "seconds": outcome.time.as_secs_f64(),
        "failed": outcome.failure.as_ref().map(|(_, text)| text),
        "seed": outcome.failure.as_ref().map(|(seed, _)| seed),
        "again": outcome.failure.as_ref().map(|(seed, _)| repeat_command(scene, budget, *seed)),
    })
}

fn parse(given: &[String]) -> Result<Arguments, String> {
    let mut arguments = Arguments {
        scenes: scenes::ALL.iter().collect(),
        budget: Budget { seed: 1, sweep: None, iterations: 1000, time: None },
        jobs: std::thread::available_parallelism().map_or(1, usize::from),
        json: false,
        list: false,
    };
    let mut rest = given.iter();
    while let Some(option) = rest.next() {
        let mut value = || rest.next().ok_or_else(|| format!("{option} needs a value"));
        match option.as_str() {
            "--json" => arguments.json = true,
            "--list" => arguments.list = true,
            "--scene" => {
                let find = |name: &str| {
                    scenes::find(name).ok_or_else(|| format!("there is no scene '{name}'; --list shows them"))
                };
                arguments.scenes = value()?.split(',').map(find).collect::<Result<_, _>>()?;
            }
            "--seed" => arguments.budget.seed = number(option, value()?)?,
            "--sweep" => arguments.budget.sweep = Some(number(option, value()?)?),
            "--iterations" => arguments.budget.iterations = number(option, value()?)?,
            "--seconds" => arguments.budget.time = Some(Duration::from_secs(number(option, value()?)?)),
            "--jobs" => arguments.jobs = number(option, value()?)?.clamp(1, 256) as usize,
            other => return Err(format!("unknown option '{other}'")),
        }
    }
    let until_its_end = arguments.budget.time.is_some() || arguments.budget.sweep.is_some();
    if until_its_end && !given.iter().any(|option| option == "--iterations") {
        arguments.budget.iterations = u64::MAX;
    }
    Ok(arguments)
}

fn number(option: &str, text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{option} needs a number, not '{text}'"))
}

//! `cargo xtask package`: Debian packages of this tree, by debhelper.
//!
//! Invariants: the packages hold what was just built, or with `--no-build` what the last release build left. Two runs of one commit
//! with the same programs give the same bytes. The tree itself does not change.
//!
//! Elsewhere: what the packages consist of, and their scripts (`packaging/debian`); their checks ([`checks`]).

pub mod checks;
mod sandbox;
mod stage;

use crate::problem::Problem;
use crate::workspace::{self, cargo_with_lock};
use crate::{packages, shell};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Time limit of the build of the programs, and of that of the packages.
const LIMIT: Duration = Duration::from_secs(2400);

/// What to build, and where to.
#[derive(Debug, PartialEq, Eq)]
pub struct Plan {
    /// The folder of the packages; by default `package` in cargo's target folder.
    output: Option<PathBuf>,
    /// Whether to build the programs before.
    build: bool,
    /// Only lay the files below this folder, for another kind of package.
    stage: Option<PathBuf>,
    /// The folder of libraries below `/usr`, with `stage`.
    library: String,
}

impl Default for Plan {
    fn default() -> Self {
        Self { output: None, build: true, stage: None, library: "lib".to_owned() }
    }
}

impl Plan {
    /// Reads the options.
    ///
    /// # Errors
    /// [`Problem::Usage`] for an unknown option or a missing value.
    pub fn parse(arguments: &[String]) -> Result<Self, Problem> {
        let mut plan = Self::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut value = || rest.next().ok_or_else(|| Problem::Usage(format!("{argument} needs a value")));
            match argument.as_str() {
                "--no-build" => plan.build = false,
                "--output" => plan.output = Some(absolute(value()?)?),
                "--stage" => plan.stage = Some(absolute(value()?)?),
                "--library" => value()?.clone_into(&mut plan.library),
                other => return Err(Problem::Usage(format!("unknown option '{other}'"))),
            }
        }
        if plan.stage.is_some() && plan.output.is_some() {
            return Err(Problem::Usage("--stage makes no packages: leave --output out".to_owned()));
        }
        Ok(plan)
    }
}

fn absolute(path: &str) -> Result<PathBuf, Problem> {
    std::path::absolute(path).map_err(|error| Problem::Usage(format!("{path}: {error}")))
}

/// Builds the packages, and prints their paths.
///
/// # Errors
/// When something cannot be built or written.
pub fn run(plan: &Plan) -> Result<bool, Problem> {
    let target = workspace::target_directory().map_err(Problem::Failed)?;
    let built = target.join("release");
    if plan.build {
        let mut build =
            cargo_with_lock(["build", "--release", "--package", "cbdctrl", "--package", "libcbd"]);
        let end = shell::run(&mut build, LIMIT, |_, line| eprintln!("{line}"));
        if !end.is_success() {
            return Err(Problem::Failed(format!("the programs do not build: {end}")));
        }
    }
    if let Some(folder) = &plan.stage {
        stage::files(&built, folder, &plan.library).map_err(Problem::Failed)?;
        stage::system_files(folder).map_err(Problem::Failed)?;
        return Ok(true);
    }
    let output = plan.output.clone().unwrap_or_else(|| target.join("package"));
    let work = target.join("package-work");
    for package in make(&built, &work, &output, Symbols::Packaged).map_err(Problem::Failed)? {
        println!("{}", package.display());
    }
    Ok(true)
}

/// What becomes of the debug information of the programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Symbols {
    /// Packages of their own hold it.
    Packaged,
    /// Nothing: this takes half of the time.
    Dropped,
}

/// Makes the packages of what is in the folder `built`, with intermediate files in `work`, which is emptied. Returns their paths.
///
/// # Errors
/// What is missing, or the messages of the tools.
pub fn make(built: &Path, work: &Path, output: &Path, symbols: Symbols) -> Result<Vec<PathBuf>, String> {
    for (program, package) in [("dpkg-buildpackage", "dpkg-dev"), ("dh", "debhelper")] {
        if !packages::on_path(program) {
            return Err(format!("{program} is not there: apt-get install {package}"));
        }
    }
    let source = work.join("cbd");
    if work.exists() {
        fs::remove_dir_all(work).map_err(|error| format!("cannot empty {}: {error}", work.display()))?;
    }
    let seconds = last_change()?;
    let debian = source.join("debian");
    copy_tree(&workspace::root().join("packaging/debian"), &debian)?;
    let (responsible, control) = (responsible(), debian.join("control"));
    let text = fs::read_to_string(&control).map_err(|error| format!("{}: {error}", control.display()))?;
    write(&control, &text.replacen("RESPONSIBLE", &responsible, 1))?;
    write(&debian.join("changelog"), &changelog(&debian_version()?, &responsible, seconds)?)?;
    stage::sources_of_debhelper(&source)?;
    let architecture = output_of("dpkg-architecture", &["--query", "DEB_HOST_MULTIARCH"])?;
    let files = source.join("stage");
    stage::files(built, &files, &format!("lib/{architecture}"))?;
    let mut profiles = Vec::new();
    let library = files.join("usr/lib").join(&architecture);
    let fio = match stage::engine(built, &library, work) {
        Ok(version) => version,
        Err(why) => {
            eprintln!("cbd-fio is left out: {why}");
            profiles.push("pkg.cbd.nofio");
            String::new()
        }
    };
    if !stage::monitoring(&files)? {
        eprintln!("cbd-prometheus is left out: packaging/prometheus and packaging/grafana hold no files");
        profiles.push("pkg.cbd.noprometheus");
    }
    let mut build = Command::new("dpkg-buildpackage");
    build.args(["--build=binary", "--no-sign", "--no-check-builddeps", "--no-pre-clean"]);
    build.env("SOURCE_DATE_EPOCH", seconds.to_string()).env("CBD_FIO_VERSION", fio).current_dir(&source);
    if symbols == Symbols::Dropped {
        build.env("DEB_BUILD_OPTIONS", "noautodbgsym");
    }
    if !profiles.is_empty() {
        build.arg(format!("--build-profiles={}", profiles.join(",")));
    }
    let mut said = Vec::new();
    let end = shell::run(&mut build, LIMIT, |_, line| said.push(line.to_owned()));
    if !end.is_success() {
        return Err(format!("dpkg-buildpackage: {end}\n{}", said.join("\n")));
    }
    move_packages(work, output)
}

/// Moves the packages into the folder `output`, in the place of former ones.
fn move_packages(work: &Path, output: &Path) -> Result<Vec<PathBuf>, String> {
    fs::create_dir_all(output).map_err(|error| format!("cannot make {}: {error}", output.display()))?;
    for former in packages_in(output)? {
        fs::remove_file(&former).map_err(|error| format!("cannot remove {}: {error}", former.display()))?;
    }
    let mut packages = Vec::new();
    for package in packages_in(work)? {
        let place = output.join(package.file_name().unwrap_or_default());
        // The output may be on another file system.
        fs::copy(&package, &place).map_err(|error| format!("cannot write {}: {error}", place.display()))?;
        packages.push(place);
    }
    Ok(packages)
}

/// The packages of this project in a folder.
fn packages_in(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let entries =
        fs::read_dir(folder).map_err(|error| format!("cannot read {}: {error}", folder.display()))?;
    let mut found: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| is_ours(path)).collect();
    found.sort();
    Ok(found)
}

fn is_ours(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let package = name.split('_').next().unwrap_or_default();
    let package = package.strip_suffix("-dbgsym").unwrap_or(package);
    path.extension().is_some_and(|extension| extension == "deb" || extension == "ddeb")
        && ["cbd", "libcbd0", "libcbd-dev", "cbd-fio", "cbd-prometheus"].contains(&package)
}

/// When the tree was last changed, in seconds since 1970: `SOURCE_DATE_EPOCH`, or the time of the last commit.
fn last_change() -> Result<u64, String> {
    let text = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(text) => text,
        Err(_) => git(&["log", "-1", "--format=%ct"])
            .map_err(|error| format!("{error}\nset SOURCE_DATE_EPOCH where there is no repository"))?,
    };
    text.parse().map_err(|_| format!("SOURCE_DATE_EPOCH is not a number of seconds: {text}"))
}

/// The version of the packages: that of the workspace for its tag; before that one that is older, with the commit.
fn debian_version() -> Result<String, String> {
    let version = env!("CARGO_PKG_VERSION");
    let tag = format!("v{version}");
    let Ok(commit) = git(&["log", "-1", "--date=format-local:%Y%m%d%H%M%S", "--format=%cd.%h"]) else {
        return Ok(version.to_owned());
    };
    let tags = git(&["tag", "--points-at", "HEAD"])?;
    let is_released = tags.lines().any(|line| line == tag);
    Ok(if is_released { version.to_owned() } else { format!("{version}~git{commit}") })
}

fn git(arguments: &[&str]) -> Result<String, String> {
    let mut command = Command::new("git");
    command.args(arguments).current_dir(workspace::root()).env("TZ", "UTC");
    text_of(&mut command)
}

fn output_of(program: &str, arguments: &[&str]) -> Result<String, String> {
    text_of(Command::new(program).args(arguments))
}

fn text_of(command: &mut Command) -> Result<String, String> {
    let text = shell::output_of(command, LIMIT);
    text.map(|text| text.trim().to_owned())
        .map_err(|end| format!("{}: {end}", command.get_program().display()))
}

/// Who is responsible for the packages, as Debian's tools learn it.
fn responsible() -> String {
    let variable = |name: &str, otherwise: &str| std::env::var(name).unwrap_or_else(|_| otherwise.to_owned());
    format!("{} <{}>", variable("DEBFULLNAME", "The CBD authors"), variable("DEBEMAIL", "cbd@localhost"))
}

/// The changelog of the packages. CHANGELOG.md, which is in them, too, says what has changed.
fn changelog(version: &str, responsible: &str, seconds: u64) -> Result<String, String> {
    let date = output_of("date", &["--utc", "--rfc-email", &format!("--date=@{seconds}")])?;
    Ok(format!(
        "cbd ({version}) unstable; urgency=medium\n\n  * See /usr/share/doc/cbd/changelog.gz.\n\n -- {responsible}  {date}\n"
    ))
}

fn write(file: &Path, text: &str) -> Result<(), String> {
    fs::write(file, text).map_err(|error| format!("cannot write {}: {error}", file.display()))
}

/// Copies a folder with all in it.
fn copy_tree(from: &Path, to: &Path) -> Result<(), String> {
    fs::create_dir_all(to).map_err(|error| format!("cannot make {}: {error}", to.display()))?;
    let entries = fs::read_dir(from).map_err(|error| format!("cannot read {}: {error}", from.display()))?;
    for entry in entries.flatten() {
        let (path, place) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy_tree(&path, &place)?;
        } else {
            fs::copy(&path, &place).map_err(|error| format!("cannot copy {}: {error}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Plan, Problem> {
        Plan::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_are_read_and_wrong_ones_are_refused() {
        let plan = parse("--output /tmp/debs --no-build").expect("all options are valid");
        assert_eq!(plan, Plan { output: Some("/tmp/debs".into()), build: false, ..Plan::default() });
        let plan = parse("--stage /tmp/root --library lib64").expect("all options are valid");
        assert_eq!((plan.stage, plan.library.as_str()), (Some("/tmp/root".into()), "lib64"));
        for line in ["--output", "--debug", "--stage", "deb", "--stage /a --output /b"] {
            assert!(matches!(parse(line), Err(Problem::Usage(_))), "{line}");
        }
    }

    #[test]
    fn only_packages_of_this_project_are_replaced() {
        let ours =
            ["cbd_1_amd64.deb", "cbd-dbgsym_1_amd64.deb", "cbd-fio_1_amd64.deb", "libcbd0_1_amd64.deb"];
        assert!(ours.iter().all(|name| is_ours(Path::new(name))));
        let others = ["cbd", "cbd_1.tar.xz", "fio_3_amd64.deb", "libcbd1_1_amd64.deb", "notes.deb"];
        assert!(!others.iter().any(|name| is_ours(Path::new(name))));
    }

    #[test]
    fn the_list_of_symbols_is_that_of_the_header() {
        let root = workspace::root();
        let read = |path: &str| fs::read_to_string(root.join(path)).expect(path);
        let (header, list) = (read("crates/libcbd/include/cbd.h"), read("packaging/debian/libcbd0.symbols"));
        let listed: Vec<&str> =
            list.lines().skip(1).filter_map(|line| line.trim().split('@').next()).collect();
        assert!(listed.len() > 30, "{listed:?}");
        for symbol in listed {
            assert!(header.contains(&format!("{symbol}(")), "{symbol} is not in the header");
        }
    }
}

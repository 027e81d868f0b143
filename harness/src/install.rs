//! Installs the files that programs link against: the library, its header, its pkg-config file, and the engine for fio; and the
//! program `blkverify`.
//!
//! Invariants: every installed file was just built from this tree. Nothing outside the prefix changes, and nothing inside it
//! changes before everything that was requested is built.

use crate::fio;
use crate::problem::Problem;
use crate::workspace::{self, cargo};
use std::fs;
use std::path::{Path, PathBuf};

/// The name that programs are linked against. It changes when existing programs would no longer work with the library. The build
/// script of the library uses the same name.
const SONAME: &str = "libcbd.so.0";

/// The system libraries that the static library needs.
const SYSTEM_LIBRARIES: &str = "-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc";

/// The files to install, and the prefix.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    prefix: PathBuf,
    debug: bool,
    fio: bool,
    fio_source: Option<PathBuf>,
}

impl Plan {
    /// Reads the options.
    ///
    /// # Errors
    /// [`Problem::Usage`] for an unknown option, a missing value, or no prefix.
    pub fn parse(arguments: &[String]) -> Result<Self, Problem> {
        let mut plan = Self::default();
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let mut value = || {
                let given = rest.next().ok_or_else(|| Problem::Usage(format!("{argument} needs a value")))?;
                std::path::absolute(given)
                    .map_err(|error| Problem::Usage(format!("{argument} {given}: {error}")))
            };
            match argument.as_str() {
                "--prefix" => plan.prefix = value()?,
                "--debug" => plan.debug = true,
                "--fio" => plan.fio = true,
                "--fio-source" => (plan.fio, plan.fio_source) = (true, Some(value()?)),
                other => return Err(Problem::Usage(format!("unknown option '{other}'"))),
            }
        }
        if plan.prefix.as_os_str().is_empty() {
            return Err(Problem::Usage("install needs --prefix DIRECTORY".to_owned()));
        }
        Ok(plan)
    }
}

/// Builds and installs, and prints the installed files.
///
/// # Errors
/// When a file cannot be built or written.
pub fn run(plan: &Plan) -> Result<bool, Problem> {
    let verifier = build_verifier(plan)?;
    let mut places = install(plan)?;
    places.push(place_program(&verifier, &plan.prefix).map_err(Problem::Failed)?);
    for place in places {
        println!("{}", place.display());
    }
    Ok(true)
}

/// Builds the engine for fio and installs it in `prefix`, beside the library. Returns the path of the engine.
///
/// # Errors
/// When a file cannot be built or written.
pub fn engine(prefix: &Path) -> Result<PathBuf, Problem> {
    let plan = Plan { prefix: prefix.to_owned(), fio: true, ..Plan::default() };
    install(&plan)?;
    Ok(prefix.join("lib").join(fio::ENGINE))
}

/// Builds the program `blkverify` and returns its path.
fn build_verifier(plan: &Plan) -> Result<PathBuf, Problem> {
    let target = workspace::target_directory().map_err(Problem::Failed)?;
    cargo_build(&["--package", "blkverify", "--bin", "blkverify"], plan.debug)?;
    Ok(target.join(profile(plan)).join("blkverify"))
}

/// Copies a program into `prefix`.
fn place_program(program: &Path, prefix: &Path) -> Result<PathBuf, String> {
    let folder = prefix.join("bin");
    fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    let place = folder.join(program.file_name().unwrap_or_default());
    copy(program, &place)?;
    Ok(place)
}

const fn profile(plan: &Plan) -> &'static str {
    if plan.debug { "debug" } else { "release" }
}

fn cargo_build(what: &[&str], debug: bool) -> Result<(), Problem> {
    let mut build = cargo(["build", "--quiet"]);
    build.args(what);
    if !debug {
        build.arg("--release");
    }
    let status = build.status().map_err(|error| Problem::Failed(format!("cannot start cargo: {error}")))?;
    if !status.success() {
        return Err(Problem::Failed(format!("{} does not build", what[1])));
    }
    Ok(())
}

fn install(plan: &Plan) -> Result<Vec<PathBuf>, Problem> {
    if plan.prefix.exists() && !plan.prefix.is_dir() {
        return Err(Problem::Failed(format!("{} is no directory to install into", plan.prefix.display())));
    }
    let target = workspace::target_directory().map_err(Problem::Failed)?;
    let headers = match plan.fio {
        true => Some(fio::headers(plan.fio_source.as_deref(), &target).map_err(Problem::Failed)?),
        false => None,
    };
    cargo_build(&["--package", "libcbd", "--lib"], plan.debug)?;
    let built = target.join(profile(plan));
    let engine = headers.map(|headers| fio::build(&headers, &built)).transpose().map_err(Problem::Failed)?;
    place_library(&built, &Place::below(&plan.prefix)).map_err(Problem::Failed)?;
    let mut places = vec![plan.prefix.join("lib").join(SONAME)];
    if let Some(engine) = engine {
        let place = plan.prefix.join("lib").join(fio::ENGINE);
        copy(&engine, &place).map_err(Problem::Failed)?;
        places.push(place);
    }
    Ok(places)
}

/// Where the library's files go.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// The prefix that the pkg-config file names.
    pub prefix: PathBuf,
    /// The folder that stands for the prefix now.
    pub folder: PathBuf,
    /// The folder of libraries below the prefix.
    pub library: String,
}

impl Place {
    /// The usual folders below `prefix`.
    fn below(prefix: &Path) -> Self {
        Self { prefix: prefix.to_owned(), folder: prefix.to_owned(), library: "lib".to_owned() }
    }
}

/// Copies the library that cargo has built in the folder `built`, its header and its pkg-config file.
///
/// # Errors
/// When a file cannot be written.
pub fn place_library(built: &Path, place: &Place) -> Result<(), String> {
    let source = workspace::root().join("crates/libcbd");
    let prefix = &place.folder;
    let library = prefix.join(&place.library);
    let version = env!("CARGO_PKG_VERSION");
    let shared = format!("libcbd.so.{version}");
    for folder in [library.join("pkgconfig"), prefix.join("include")] {
        fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    }
    copy(&built.join("libcbd.so"), &library.join(&shared))?;
    copy(&built.join("libcbd.a"), &library.join("libcbd.a"))?;
    copy(&source.join("include/cbd.h"), &prefix.join("include/cbd.h"))?;
    link(&shared, &library.join(SONAME))?;
    link(SONAME, &library.join("libcbd.so"))?;
    let file = library.join("pkgconfig/cbd.pc");
    fs::write(&file, package_description(place, version))
        .map_err(|error| format!("cannot write {}: {error}", file.display()))
}

fn package_description(place: &Place, version: &str) -> String {
    format!(
        "prefix={}\n\
         exec_prefix=${{prefix}}\n\
         libdir=${{exec_prefix}}/{}\n\
         includedir=${{prefix}}/include\n\
         \n\
         Name: cbd\n\
         Description: Persistent memory in front of a disk, in a program of your own\n\
         Version: {version}\n\
         Libs: -L${{libdir}} -lcbd\n\
         Libs.private: {SYSTEM_LIBRARIES}\n\
         Cflags: -I${{includedir}}\n",
        place.prefix.display(),
        place.library
    )
}

/// Copies to a new file, so that running programs keep the old one.
///
/// # Errors
/// The paths, and the system's error.
pub fn copy(from: &Path, to: &Path) -> Result<(), String> {
    let _ = fs::remove_file(to);
    fs::copy(from, to)
        .map(drop)
        .map_err(|error| format!("cannot copy {} to {}: {error}", from.display(), to.display()))
}

/// Makes a symbolic link, in the place of a file that is there.
///
/// # Errors
/// The path, and the system's error.
pub fn link(target: &str, at: &Path) -> Result<(), String> {
    let _ = fs::remove_file(at);
    std::os::unix::fs::symlink(target, at).map_err(|error| format!("cannot link {}: {error}", at.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Plan, Problem> {
        Plan::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn a_prefix_is_needed_and_a_source_of_fio_means_its_engine() {
        let plan = parse("--prefix /opt/cbd --fio-source /src/fio").expect("all options are valid");
        assert_eq!((plan.prefix, plan.fio, plan.debug), (PathBuf::from("/opt/cbd"), true, false));
        for line in ["", "--debug", "--prefix", "--prefix /opt --static"] {
            assert!(matches!(parse(line), Err(Problem::Usage(_))), "{line}");
        }
    }

    /// The error for `source` as the source of fio. Checks that no file was written.
    fn refused(source: &Path) -> String {
        let place = tempfile::tempdir().expect("a directory");
        let prefix = place.path().join("prefix");
        let plan =
            Plan { prefix: prefix.clone(), debug: true, fio: true, fio_source: Some(source.to_owned()) };
        let ended = run(&plan);
        assert!(!prefix.exists(), "{ended:?}");
        match ended {
            Err(Problem::Failed(text)) => text,
            other => panic!("{}: {other:?}", source.display()),
        }
    }

    #[test]
    fn a_wrong_source_of_fio_is_refused_before_anything_is_installed() {
        let source = tempfile::tempdir().expect("a directory");
        for missing in [source.path(), Path::new("/nowhere/at/all"), Path::new("/dev/null")] {
            let text = refused(missing);
            assert!(text.contains(&format!("{} is no source of fio", missing.display())), "{text}");
        }
        let version = source.path().join("FIO-VERSION-GEN");
        fs::write(&version, "GVF=FIO-VERSION-FILE\n").expect("written");
        assert!(refused(source.path()).contains("does not say its version"));
        // If no fio is installed, the error states that.
        fs::write(&version, "DEF_VER=fio-0.1\n").expect("written");
        let text = refused(source.path());
        assert!(text.contains("is the source of fio-0.1") || text.contains("fio --version"), "{text}");
    }

    #[test]
    fn a_prefix_that_is_a_file_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let plan = Plan { prefix: file.path().to_owned(), debug: true, ..Plan::default() };
        assert!(
            matches!(run(&plan), Err(Problem::Failed(text)) if text.contains("is no directory to install into"))
        );
    }

    #[test]
    fn the_soname_is_that_of_the_build_script() {
        let script =
            fs::read_to_string(workspace::root().join("crates/libcbd/build.rs")).expect("the script");
        assert!(script.contains(&format!("-soname,{SONAME}\"")));
    }
}

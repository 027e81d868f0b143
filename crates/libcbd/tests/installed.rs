//! The installed files suffice for programs: a C program builds with the flags of pkg-config, and fio's
//! engine writes and verifies.
//!
//! Requires `CBD_SYSTEM_TESTS`: a C compiler, pkg-config and fio; fio's headers are fetched through apt.

mod support;

use std::path::Path;
use std::process::{Command, Output};
use support::Place;

/// Whether the test runs and requires the tools. Without the variable it prints that it did not run.
fn wanted(test: &str) -> bool {
    let wanted = std::env::var_os("CBD_SYSTEM_TESTS").is_some_and(|value| value == "1");
    if !wanted {
        eprintln!("{test}: not run, it needs cc, pkg-config, fio and apt; CBD_SYSTEM_TESTS=1 runs it");
    }
    wanted
}

/// Runs a command to its end.
#[track_caller]
fn run(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n{stdout}\n{stderr}");
    stdout.into_owned()
}

/// As [`run`], for commands that could hang.
fn within(seconds: u32, program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("timeout");
    command.arg(seconds.to_string()).arg(program);
    command
}

fn install(prefix: &Path, more: &[&str]) {
    // The sources of fio are fetched into one folder, which apt locks.
    static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut command = Command::new(env!("CARGO"));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().parent().unwrap();
    command.args(["xtask", "install", "--debug", "--prefix"]).arg(prefix).args(more).current_dir(root);
    run(&mut command);
}

fn package(prefix: &Path, arguments: &[&str]) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    command.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")).args(arguments).arg("cbd");
    run(&mut command).split_whitespace().map(str::to_owned).collect()
}

fn compile(source: &str, program: &Path, flags: &[String]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/c").join(source);
    let mut compiler = Command::new("cc");
    compiler.args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-D_POSIX_C_SOURCE=200809L"]);
    run(compiler.arg("-o").arg(program).arg(source).args(flags).arg("-pthread"));
}

#[test]
fn a_c_program_builds_with_the_installed_files_and_runs() {
    if !wanted("the example in C") {
        return;
    }
    let place = Place::new();
    let prefix = place.path("prefix");
    install(&prefix, &[]);
    assert_eq!(package(&prefix, &["--modversion"]), [env!("CARGO_PKG_VERSION")]);
    compile("example.c", &place.path("shared"), &package(&prefix, &["--cflags", "--libs"]));
    let archive = prefix.join("lib/libcbd.a").to_str().unwrap().to_owned();
    let flags = package(&prefix, &["--cflags", "--libs", "--static"]);
    let flags: Vec<_> =
        flags.into_iter().map(|flag| if flag == "-lcbd" { archive.clone() } else { flag }).collect();
    compile("example.c", &place.path("static"), &flags);
    for program in ["shared", "static"] {
        let mut command = within(120, place.path(program));
        command.arg(place.region_path()).arg(place.disk()).env("LD_LIBRARY_PATH", prefix.join("lib"));
        let said = run(&mut command);
        assert!(said.contains("8388608 bytes written, 8388608 read from the cache"), "{said}");
        assert!(said.ends_with("all data is on the disk\n"), "{said}");
    }
    // The program's data is on the disk, and the program requires the soname.
    assert_eq!(place.on_disk(2047)[1], (2047_u64 * 31 + 7) as u8);
    let needed = std::fs::read(place.path("shared")).unwrap();
    assert!(needed.windows(12).any(|bytes| bytes == b"libcbd.so.0\0"));
}

#[test]
fn fio_writes_and_verifies_through_its_engine_with_threads_and_depth() {
    if !wanted("fio's engine") {
        return;
    }
    let place = Place::new();
    let prefix = place.path("prefix");
    install(&prefix, &["--fio"]);
    let engine = format!("--ioengine=external:{}", prefix.join("lib/libfio_cbd.so").display());
    let region = format!("--region={}", place.region_path().display());
    let disk = format!("--filename={}", place.disk().display());
    let fio = |arguments: &[&str]| {
        let mut command = within(300, "fio");
        command.args([
            "--name=job",
            &engine,
            &region,
            &disk,
            "--region_size=32M",
            "--cache_size=9M",
            "--bs=4k",
        ]);
        command.args(arguments).current_dir(place.path("."));
        command
    };
    let threads = ["--thread=1", "--numjobs=2", "--size=8M", "--offset_increment=8M", "--iodepth=16"];
    let verify = ["--verify=crc32c", "--verify_fatal=1", "--group_reporting"];
    // More than the cache holds; some of it is read back from the disk.
    let said = run(fio(&threads).args(verify).args(["--rw=randwrite", "--fsync=64"]));
    assert!(said.contains("err= 0"), "{said}");
    // Another process: it reads the content of the region and the disk.
    run(fio(&threads).args(verify).args(["--rw=randread", "--verify_only", "--drain=1"]));
    run(fio(&threads).args(["--rw=randtrim"]));
    run(fio(&threads).args(["--rw=randrw", "--bs=512", "--number_ios=2000"]));
    // Wrong bytes on the disk are found: fio does verify.
    std::fs::remove_file(place.region_path()).unwrap();
    run(fio(&threads).args(verify).args(["--rw=write", "--drain=1", "--do_verify=0"]));
    std::fs::remove_file(place.region_path()).unwrap();
    std::fs::write(place.disk(), vec![0x55; 16 << 20]).unwrap();
    let spoilt = fio(&threads).args(verify).args(["--rw=read"]).output().unwrap();
    assert!(!spoilt.status.success());
    let processes = fio(&["--rw=write", "--size=1M"]).output().unwrap();
    assert!(!processes.status.success());
    assert!(String::from_utf8_lossy(&processes.stderr).contains("set thread=1"), "{processes:?}");
}

/// A synchronous write of fio is a FUA write here: each ends an epoch, which plain ones do not.
#[test]
fn fio_sends_synchronous_writes_as_fua_and_no_others() {
    const WRITES: u64 = 300;
    if !wanted("fio's engine") {
        return;
    }
    let place = Place::new();
    let prefix = place.path("prefix");
    install(&prefix, &["--fio"]);
    let (region, device) = place.cached(12 << 20);
    drop((device, region));
    let epoch = || {
        let region = place.open();
        let device = region.attach(place.disk(), &cbd::DeviceOptions::default()).unwrap();
        device.status().expect("a cache").epoch.0
    };
    let mut before = epoch();
    for (sync, forced) in [("none", false), ("dsync", true), ("sync", true), ("0", false), ("1", true)] {
        let mut fio = within(300, "fio");
        fio.args(["--name=job", "--thread=1", "--rw=randwrite", "--bs=4k", "--size=4M", "--iodepth=8"]);
        fio.arg(format!("--ioengine=external:{}", prefix.join("lib/libfio_cbd.so").display()));
        fio.arg(format!("--region={}", place.region_path().display()));
        fio.arg(format!("--filename={}", place.disk().display()));
        fio.args([format!("--number_ios={WRITES}"), format!("--sync={sync}")]);
        run(fio.current_dir(place.path(".")));
        let now = epoch();
        assert_eq!(now - before >= WRITES, forced, "sync={sync}: {} epochs", now - before);
        assert!(forced || now - before < WRITES / 10, "sync={sync}: {} epochs", now - before);
        before = now;
    }
}

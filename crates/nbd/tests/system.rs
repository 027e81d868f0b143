//! Clients of other projects: libnbd, QEMU and fio. The tests run if `CBD_SYSTEM_TESTS=1` states that these are
//! installed.

mod common;

use cbd_types::{ByteRange, Flaw, Geometry, Result};
use common::verifying::Verifying;
use common::{Slow, memory, serve};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use cbd_export::{BlockDevice, Extent, ExtentState, RequestQueue};

/// Whether the tools must be installed. If the variable is not set, the test prints that it did not run.
fn wanted(test: &str) -> bool {
    let wanted = std::env::var_os("CBD_SYSTEM_TESTS").is_some_and(|value| value == "1");
    if !wanted {
        eprintln!("{test}: not run, it needs nbdsh, qemu-io and fio; CBD_SYSTEM_TESTS=1 runs it");
    }
    wanted
}

fn run(program: &str, arguments: &[&str]) -> String {
    run_with(program, arguments, &[])
}

/// Runs a tool for a minute at most and returns its output if it succeeded.
fn run_with(program: &str, arguments: &[&str], environment: &[(&str, &str)]) -> String {
    let output = Command::new("timeout")
        .args(["--kill-after=5", "60", program])
        .args(arguments)
        // Only the tools and libraries of the system, not those that the user installed.
        .envs(environment.iter().copied())
        .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
        .stdin(Stdio::null())
        .output()
        .expect("timeout is there");
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {}\n{text}", output.status);
    text
}

/// Memory with extents: the first MiB is dirty, the second clean, the last a hole.
struct WithExtents(Arc<dyn BlockDevice>);

impl BlockDevice for WithExtents {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn open_queue(&self) -> Result<Box<dyn RequestQueue>> {
        self.0.open_queue()
    }

    fn extents(&self, range: ByteRange) -> Result<Vec<Extent>> {
        let last = self.geometry().size - (1 << 20);
        Ok(range
            .split_at_multiples(1 << 20)
            .map(|range| {
                let state = match range.start >> 20 {
                    0 => ExtentState { cached: true, dirty: true, hole: false },
                    1 => ExtentState { cached: true, dirty: false, hole: false },
                    _ => ExtentState { hole: range.start >= last, ..ExtentState::default() },
                };
                Extent { range, state }
            })
            .collect())
    }
}

#[test]
fn libnbd_finds_what_the_protocol_specifies() {
    if !wanted("libnbd_finds_what_the_protocol_specifies") {
        return;
    }
    let served = serve(Arc::new(WithExtents(memory(64 << 20))));
    let uri = served.server.uri();
    let text = run_with("nbdsh", &["-c", include_str!("libnbd.py")], &[("CBD_URI", &uri)]);
    assert!(text.contains("all is well"), "{text}");
    served.server.stop().expect("stopped");
}

#[test]
fn libnbd_maps_what_was_verified() {
    if !wanted("libnbd_maps_what_was_verified") {
        return;
    }
    // Beyond what one reply covers, so that nbdinfo asks several times.
    let findings = [(1 << 20, 4096, Flaw::DirtyDamaged), (40 << 20, 512, Flaw::Unreadable)];
    let served = serve(Verifying::over(memory(64 << 20), &findings));
    let uri = served.server.uri();
    let text = run_with("nbdsh", &["-c", include_str!("libnbd_verify.py")], &[("CBD_URI", &uri)]);
    assert!(text.contains("all is well"), "{text}");
    let map = run("nbdinfo", &["--map=cbd:verify", &uri]);
    let rows: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().collect()).collect();
    let rows: Vec<&[&str]> = rows.iter().map(|row| &row[..3]).collect();
    let expected = [
        ["0", "1048576", "1"],
        ["1048576", "4096", "3"],
        ["1052672", "40890368", "1"],
        ["41943040", "512", "5"],
        ["41943552", "25165312", "1"],
    ];
    assert_eq!(rows, expected, "{map}");
    let list = run("nbdinfo", &["--list", &uri]);
    assert!(list.contains("cbd:verify"), "{list}");
}

#[test]
fn nbdinfo_and_nbdcopy_agree_with_a_file() {
    if !wanted("nbdinfo_and_nbdcopy_agree_with_a_file") {
        return;
    }
    let served = serve(memory(32 << 20));
    let uri = served.server.uri();
    let info = run("nbdinfo", &[&uri]);
    assert!(info.contains("export-size: 33554432") && info.contains("can_multi_conn: true"), "{info}");
    let map = run("nbdinfo", &["--map=cbd:state", &uri]);
    assert!(map.contains("33554432"), "{map}");

    let (from, to) = (served.directory.path().join("from"), served.directory.path().join("to"));
    let mut state = 1_u64;
    let bytes: Vec<u8> = (0..32 << 20)
        .map(|at| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if at >> 22 & 1 == 0 { (state >> 56) as u8 } else { 0 }
        })
        .collect();
    std::fs::write(&from, &bytes).expect("a file");
    run("nbdcopy", &["--connections=4", "--flush", &from.to_string_lossy(), &uri]);
    run("nbdcopy", &["--connections=4", &uri, &to.to_string_lossy()]);
    assert!(std::fs::read(&to).expect("a file") == bytes);
}

#[test]
fn qemu_reads_what_it_wrote() {
    if !wanted("qemu_reads_what_it_wrote") {
        return;
    }
    let served = serve(memory(64 << 20));
    let uri = served.server.uri();
    let commands = [
        "write -P 1 0 1M",
        "write -P 2 512 512",
        "write -f -P 3 2M 4M",
        "write -z 3M 64k",
        "write -z -u 4M 64k",
        "discard 5M 64k",
        "flush",
        "read -P 1 0 512",
        "read -P 2 512 512",
        "read -P 1 1k 1023k",
        "read -P 3 2M 1M",
        "read -P 0 3M 64k",
        "read -P 0 4M 64k",
        "read -P 0 5M 64k",
        "aio_write -P 4 8M 1M",
        "aio_write -P 5 9M 1M",
        "aio_flush",
        "read -P 4 8M 1M",
        "read -P 5 9M 1M",
    ];
    let arguments: Vec<&str> =
        ["-f", "raw", "-t", "none"].into_iter().chain(commands.iter().flat_map(|c| ["-c", *c])).collect();
    let text = run("qemu-io", &[&arguments[..], &[&uri]].concat());
    assert!(!text.contains("failed") && !text.contains("error"), "{text}");
    let map = run("qemu-img", &["map", "-f", "raw", "--output=json", &uri]);
    assert!(map.contains("67108864"), "{map}");
}

fn fio(uri: &str, name: &str, arguments: &[&str]) {
    let common = ["--output-format=terse", "--group_reporting", "--size=32M", "--verify=crc32c"];
    // Without it fio leaves a file in the working directory, which is the source tree.
    let common = [&common[..], &["--verify_state_save=0"]].concat();
    let (uri, name) = (format!("--uri={uri}"), format!("--name={name}"));
    let text =
        run("fio", &[&["--ioengine=nbd", name.as_str(), uri.as_str()], &common[..], arguments].concat());
    assert!(!text.contains("verify:") && !text.contains("err="), "{text}");
}

#[test]
fn fio_verifies_what_it_wrote_at_every_size_and_depth() {
    if !wanted("fio_verifies_what_it_wrote_at_every_size_and_depth") {
        return;
    }
    let served = serve(memory(64 << 20));
    let uri = served.server.uri();
    for (block, depth) in [("512", "1"), ("4k", "1"), ("4k", "32"), ("128k", "8"), ("1M", "4")] {
        let (block, depth) = (format!("--bs={block}"), format!("--iodepth={depth}"));
        let size = if block == "--bs=512" { "--io_size=2M" } else { "--io_size=64M" };
        fio(&uri, "random", &["--rw=randwrite", "--fsync=64", &block, &depth, size]);
    }
    fio(
        &uri,
        "mixed",
        &["--rw=randrw", "--bsrange=512-64k", "--bs_unaligned=0", "--iodepth=16", "--trim_percentage=0"],
    );
}

#[test]
fn fio_verifies_a_device_that_parks_every_request() {
    if !wanted("fio_verifies_a_device_that_parks_every_request") {
        return;
    }
    let device = Slow::over(memory(64 << 20), |request| {
        Some(Duration::from_micros(request.range.start / 512 % 7 * 100))
    });
    let served = serve(device);
    fio(
        &served.server.uri(),
        "parked",
        &["--rw=randwrite", "--bs=16k", "--iodepth=16", "--io_size=32M", "--fsync=32"],
    );
    served.server.stop().expect("stopped");
}

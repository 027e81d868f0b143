//! Clients of other projects over a cached device: libnbd, QEMU and fio.

mod support;

use std::time::Duration;
use support::{Fixture, MIB, run_for, system_tests, tool};

/// A cache of 16 MiB over a disk of 64 MiB.
fn device() -> (Fixture, String) {
    let fixture = Fixture::with_region();
    let disk = fixture.disk("disk", 64 * MIB);
    assert_eq!(fixture.start_backend(&disk), format!("{}\n", fixture.uri()));
    (fixture, disk)
}

const LIBNBD: &str = r"
import os
mib = 1 << 20
h.add_meta_context('base:allocation')
h.add_meta_context('cbd:state')
h.connect_uri(os.environ['CBD_URI'])
assert h.get_size() == 64 * mib
for can in (h.can_flush, h.can_fua, h.can_trim, h.can_zero, h.can_fast_zero, h.can_cache, h.can_multi_conn):
    assert can(), can
assert h.get_block_size(nbd.SIZE_MINIMUM) == 512

data = os.urandom(3 * mib)
h.pwrite(data, 512, nbd.CMD_FLAG_FUA)
h.zero(4096, 512, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FAST_ZERO)
h.trim(4096, 8192)
h.flush()
want = bytearray(data)
want[0:4096] = bytes(4096)
want[8192 - 512:12288 - 512] = bytes(4096)
assert h.pread(len(data), 512) == bytes(want)

other = nbd.NBD()
other.connect_uri(os.environ['CBD_URI'])
other.pwrite(bytes([7]) * mib, 8 * mib)
assert h.pread(mib, 8 * mib) == bytes([7]) * mib
other.shutdown()

left = []
for number in range(64):
    buffer = nbd.Buffer.from_bytearray(bytearray([number]) * 65536)
    left.append(h.aio_pwrite(buffer, 16 * mib + number * 65536))
while left:
    h.poll(1000)
    left = [cookie for cookie in left if not h.aio_command_completed(cookie)]
for number in range(64):
    assert h.pread(65536, 16 * mib + number * 65536) == bytes([number]) * 65536
h.shutdown()
print('all is well')
";

#[test]
fn libnbd_reads_its_writes_by_every_method() {
    if !system_tests("libnbd_reads_its_writes_by_every_method") {
        return;
    }
    let (fixture, disk) = device();
    let mut script = std::process::Command::new("/usr/bin/nbdsh");
    script.args(["-c", LIBNBD]).env("CBD_URI", fixture.uri()).env("PATH", "/usr/bin:/bin");
    let ran = run_for(script, Duration::from_secs(60));
    assert!(ran.code == 0 && ran.stdout.contains("all is well"), "{}\n{}", ran.stdout, ran.stderr);
    fixture.ok(&["backend-stop", "-b", "0"]);
    let plain = std::fs::read(&disk).expect("the disk");
    assert!(plain[8 << 20..9 << 20].iter().all(|byte| *byte == 7));
    assert!(plain[16 << 20..20 << 20].chunks(65536).zip(0..).all(|(chunk, number)| chunk == [number; 65536]));
}

/// The block status of the first MiB: bit 0 cached, bit 1 dirty.
fn states(fixture: &Fixture) -> Vec<u32> {
    let client = &mut fixture.client();
    let all = client.block_status(0, 1 << 20).expect("block status");
    all.iter().filter(|it| it.context == cbd_nbd::CONTEXT_STATE).map(|it| it.flags).collect()
}

#[test]
fn block_status_reports_cached_and_dirty_ranges() {
    let (mut fixture, _disk) = device();
    assert_eq!(states(&fixture), [0], "nothing is cached yet");
    fixture.terminate();
    // The disk refuses writes, so dirty data stays dirty.
    fixture.decorate = Some("fault:op=write".to_owned());
    fixture.start();
    fixture.client().write(0, &[1; 1 << 20], false).expect("written");
    assert_eq!(states(&fixture), [3], "cached and dirty");
    fixture.terminate();
    fixture.decorate = None;
    fixture.start();
    fixture.ok(&["drain", "-b", "0"]);
    assert_eq!(states(&fixture), [1], "cached and clean");
}

#[test]
fn qemu_reads_its_writes() {
    if !system_tests("qemu_reads_its_writes") {
        return;
    }
    let (fixture, disk) = device();
    let uri = fixture.uri();
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
    let mut arguments = vec!["-f", "raw", "-t", "none"];
    arguments.extend(commands.iter().flat_map(|command| ["-c", *command]));
    arguments.push(&uri);
    let text = tool("qemu-io", &arguments);
    assert!(!text.contains("failed") && !text.contains("rror"), "{text}");
    let copy = fixture.text("copy");
    tool("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, &copy]);
    fixture.ok(&["backend-stop", "-b", "0"]);
    tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", &copy, &disk]);
}

#[test]
fn fio_verifies_its_writes_through_a_cache_that_is_too_small() {
    if !system_tests("fio_verifies_its_writes_through_a_cache_that_is_too_small") {
        return;
    }
    let (fixture, _disk) = device();
    let uri = format!("--uri={}", fixture.uri());
    for (block, depth, size) in [
        ("512", "1", "1M"),
        ("4k", "1", "16M"),
        ("4k", "32", "48M"),
        ("128k", "8", "96M"),
        ("1M", "4", "96M"),
    ] {
        let (block, depth, size) =
            (format!("--bs={block}"), format!("--iodepth={depth}"), format!("--io_size={size}"));
        let text = tool(
            "fio",
            &[
                "--ioengine=nbd",
                "--name=cached",
                &uri,
                "--size=48M",
                "--rw=randwrite",
                "--fsync=64",
                &block,
                &depth,
            ]
            .into_iter()
            .chain([
                size.as_str(),
                "--verify=crc32c",
                "--verify_fatal=1",
                "--verify_state_save=0",
                "--output-format=terse",
            ])
            .collect::<Vec<_>>(),
        );
        assert!(!text.contains("verify:") && !text.contains("err="), "{text}");
    }
    fixture.ok(&["backend-stop", "-b", "0"]);
}

//! What the real dm-pcache leaves, and `cbdctrl rescue --from dm-pcache` of it.
//!
//! Invariants: sectors identify their write, so the content of the disk can be checked without knowing when
//! the power failed. What the guest reported as flushed is a lower bound of what was flushed.
//!
//! Elsewhere: images that dm-pcache would not leave (the tests of `cbd-pcache`, the fuzzer).

use super::cuts::MAPPABLE;
use super::memory::shipped;
use super::{Ended, Given, Host, LIMIT, Ran, between, seeded};
use crate::guest::{Outcome, cbdctrl};
use crate::plan::{Disk, MIB, Plan, SharedFile};
use crate::programs;
use crate::shell::Stream;
use std::fs::File;
use std::io::Read;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const SECTOR: usize = 512;
/// Writes go to this many places, each of `PLACE` sectors; a larger area behind them only fills segments.
const PLACES: usize = 64;
const PLACE: usize = 16;
const DISK: u64 = 64 * MIB;
/// dm-pcache requires 512 MiB.
const NVDIMM: u64 = 640 * MIB;
/// Number of writes that the guest can have done beyond the last one that it reported when its power failed.
const UNSAID: usize = 1000;
/// No guest gets this far.
const FOR_EVER: usize = 1 << 30;
/// Writes of a round before the power fails: minimum and maximum.
const WRITES: (u64, u64) = (12, 160);

/// Prints the addresses of the NVDIMM and of the device in it.
const PLACE_OF_DEVICE: &str = "
    cd /sys/bus/nd/devices
    echo \"at $(cat region0/resource) $(cat pfn*/resource 2>/dev/null | sort | tail -n 1)\"
    cd /
";

/// Makes the device on the present content of the cache; garbage collection is at its maximum, so that
/// segments are reused.
fn device(data_crc: bool) -> String {
    format!(
        "dmsetup create pcache --noudevrules --noudevsync --table \\
            \"0 $(cat /sys/block/vda/size) pcache /dev/pmem0 /dev/vda 4 cache_mode writeback data_crc {data_crc}\"
        dmsetup message pcache 0 gc_percent 0
        device=/dev/dm-0"
    )
}

fn plan(given: &Given, script: &str) -> Result<Plan, String> {
    // Only coreutils' dd can bypass the page cache with less than a page, and busybox's shell prefers its own
    // dd unless the path is given.
    let dd = programs::find("dd")?;
    let script = format!("dd={}\n{script}", dd.display());
    Ok(Plan {
        nvdimm: Some(SharedFile { path: given.folder.join("nvdimm"), size: NVDIMM }),
        disks: vec![Disk::File(given.folder.join("disk"))],
        modules: vec!["dm_pcache".to_owned()],
        files: shipped(&["dmsetup", "dd"])?,
        timeout: LIMIT,
        ..Plan::of_script(&script)
    })
}

fn new_disk(given: &Given) -> Result<PathBuf, String> {
    let disk = given.folder.join("disk");
    let made = File::create(&disk).and_then(|file| file.set_len(DISK));
    made.map_err(|error| format!("cannot make {}: {error}", disk.display()))?;
    Ok(disk)
}

/// A device that dm-pcache has open is refused; then its data is rescued in place.
pub fn at_home(host: &Host, given: &Given) -> Result<(), String> {
    let disk = new_disk(given)?;
    let writes = 20;
    let script = format!(
        "{MAPPABLE}
        {}
        {}
        rescue='cbdctrl rescue --from dm-pcache /dev/pmem0 --to /dev/vda'
        $rescue && exit 9 || echo \"in use: $?\"
        dmsetup remove --noudevrules --noudevsync pcache
        $rescue && exit 9 || echo \"dry run: $?\"
        $rescue --yes && echo \"rescued: $?\"",
        device(true),
        writing(1, writes)
    );
    let plan = Plan { cbd: true, ..plan(given, &script)? };
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(
        Ended::Exited(0),
        &["in use: 3", "dry run: 1", "read back: all is on the disk", "rescued: 0"],
    )?;
    let mut floor = vec![0; PLACES * PLACE];
    raise(&mut floor, 1, writes);
    check(&disk, &mut floor, writes).map_err(|text| ran.complaint(&text))
}

/// The power fails at a random moment. On this machine the cache is rescued to the disk, and what was flushed
/// must be there. The next guest continues with the same cache and the same disk.
pub fn after_cuts(host: &Host, given: &Given) -> Result<(), String> {
    let mut random = seeded();
    // Without checksums the data is accepted as it is, and must still be right.
    let data_crc = between(&mut random, 0, 1) == 1;
    let disk = new_disk(given)?;
    let tool = cbdctrl()?;
    let mut floor = vec![0; PLACES * PLACE];
    let mut begin = 1;
    // Rounds after which the disk alone did not have everything that was flushed.
    let mut needed = 0;
    for round in 0..given.cuts {
        let before = if round == 0 { MAPPABLE } else { "" };
        let script = format!(
            "{before}
            {PLACE_OF_DEVICE}
            {}
            {}",
            device(data_crc),
            writing(begin, FOR_EVER)
        );
        let last = begin + between(&mut random, WRITES.0, WRITES.1) as usize;
        let pause = Duration::from_millis(between(&mut random, 0, 300));
        let ran = cut(host, &plan(given, &script)?, last, pause)?;
        ran.expect(Ended::Cut, &[])?;
        let said = ran.output.lines().filter_map(|line| line.parse().ok()).max().unwrap_or(0);
        raise(&mut floor, begin, said);
        let about = |text: String| ran.complaint(&format!("round {round}, writes {begin} to {said}: {text}"));
        needed += usize::from(check(&disk, &mut floor.clone(), said + UNSAID).is_err());
        let cache = given.folder.join("cache");
        cut_out(
            &given.folder.join("nvdimm"),
            offset(&ran.output).ok_or_else(|| about("no place".into()))?,
            &cache,
        )?;
        for (yes, codes) in [(false, &[0, 1][..]), (true, &[0])] {
            rescue(&tool, &cache, &disk, yes, codes).map_err(about)?;
        }
        check(&disk, &mut floor, said + UNSAID).map_err(about)?;
        begin = said + UNSAID + 1;
    }
    if needed == 0 {
        return Err(
            "the disk alone had all that was flushed, each time: the rescue proved nothing".to_owned()
        );
    }
    println!("    {} power cuts, {needed} of them with data that only the cache had", given.cuts);
    Ok(())
}

/// Number of sectors, each with a key of its own, that fill the log's part in a segment with full key sets,
/// and a little more.
const KEYS: usize = 430_000;

/// The log continues in another segment, and the cache is read to its end. Before that nothing reaches the
/// disk: the device under the cache is suspended.
pub fn long_log(host: &Host, given: &Given) -> Result<(), String> {
    let disk = new_disk(given)?;
    let tool = cbdctrl()?;
    let writes = 40;
    let script = format!(
        "{MAPPABLE}
        {PLACE_OF_DEVICE}
        size=$(cat /sys/block/vda/size)
        dmsetup create slow --noudevrules --noudevsync --table \"0 $size linear /dev/vda 0\"
        dmsetup create pcache --noudevrules --noudevsync --table \"0 $size pcache /dev/pmem0 /dev/dm-0\"
        dmsetup suspend --noudevrules --noudevsync --nolockfs slow
        device=/dev/dm-1
        for pass in 1 2 3 4 5; do
            $dd if=/dev/zero of=$device bs=512 count=$(({KEYS} / 5)) seek=32768 oflag=direct conv=notrunc 2>/dev/null
        done
        {}
        dmsetup status pcache
        echo {KEYS}",
        writing(1, writes)
    );
    let ran = cut(host, &plan(given, &script)?, KEYS, Duration::ZERO)?;
    ran.expect(Ended::Cut, &[])?;
    let mut floor = vec![0; PLACES * PLACE];
    raise(&mut floor, 1, writes);
    if check(&disk, &mut floor.clone(), writes).is_ok() {
        return Err(ran.complaint("the disk has what was written although it was suspended"));
    }
    let cache = given.folder.join("cache");
    let at = offset(&ran.output).ok_or_else(|| ran.complaint("it did not say where the device is"))?;
    cut_out(&given.folder.join("nvdimm"), at, &cache)?;
    let said = rescue(&tool, &cache, &disk, true, &[0]).map_err(|text| ran.complaint(&text))?;
    if !said.contains("key sets in 2 segments") {
        return Err(ran.complaint(&format!("the log is in one segment alone:\n{said}")));
    }
    check(&disk, &mut floor, writes).map_err(|text| ran.complaint(&text))
}

/// Boots a guest whose power is cut some time after it has printed `last`.
fn cut(host: &Host, plan: &Plan, last: usize, pause: Duration) -> Result<Ran, String> {
    let (mut output, mut errors) = (String::new(), String::new());
    let outcome: Outcome = host.boot(plan, |stream, line| {
        let taken = if stream == Stream::Output { &mut output } else { &mut errors };
        taken.push_str(line);
        taken.push('\n');
        if stream == Stream::Output && line.parse().is_ok_and(|number: usize| number >= last) {
            std::thread::sleep(pause);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    })?;
    Ok(Ran { outcome, output, errors })
}

/// The place of a write, and its number of sectors from the beginning of the place. Every third write fills
/// its place at once, the others go sector by sector; the first write of all fills every place.
const fn write(number: usize) -> (usize, usize) {
    let sectors = if number.is_multiple_of(3) { PLACE } else { 1 + number * 7 % PLACE };
    (number * 37 % PLACES, sectors)
}

/// Writes from one number to another. Every fourth ends with a flush, after which the number is printed;
/// every sixteenth first fills half a segment elsewhere.
fn writing(from: usize, to: usize) -> String {
    format!(
        "number={from}
        while [ $number -le {to} ]; do
            place=$((number * 37 % {PLACES}))
            sectors=$((1 + number * 7 % {PLACE}))
            size=512
            at=$((place * {PLACE}))
            if [ $((number % 3)) = 0 ]; then size=$((512 * {PLACE})); sectors=1; at=$place; fi
            flush=
            if [ $((number % 4)) = 0 ]; then flush=,fsync; fi
            if [ $((number % 16)) = 0 ]; then
                $dd if=/dev/zero of=$device bs=1M count=8 seek=$((16 + number % 32)) oflag=direct conv=notrunc 2>/dev/null
            fi
            yes \"write $number\" | head -c $((size * sectors)) >/tmp/data
            $dd if=/tmp/data of=$device bs=$size count=$sectors seek=$at oflag=direct conv=notrunc$flush 2>/dev/null
            if [ -n \"$flush\" ]; then echo $number; fi
            number=$((number + 1))
        done"
    )
}

/// The content of a sector of a write.
fn content(number: usize, sector: usize) -> Vec<u8> {
    let line = format!("write {number}\n").into_bytes();
    line.into_iter().cycle().skip(sector * SECTOR).take(SECTOR).collect()
}

/// Raises the minimum write of each sector to the last write that went there.
fn raise(floor: &mut [usize], from: usize, to: usize) {
    for number in from..=to {
        let (place, sectors) = write(number);
        floor[place * PLACE..place * PLACE + sectors].fill(number);
    }
}

/// Checks that each sector has its minimum write, or a later one that went there; raises the minimum to that.
fn check(disk: &Path, floor: &mut [usize], to: usize) -> Result<(), String> {
    let cannot = |error: std::io::Error| format!("cannot read {}: {error}", disk.display());
    let file = File::open(disk).map_err(cannot)?;
    let mut sector = [0; SECTOR];
    for (index, floor) in floor.iter_mut().enumerate() {
        file.read_exact_at(&mut sector, (index * SECTOR) as u64).map_err(cannot)?;
        let (place, inside) = (index / PLACE, index % PLACE);
        let number = number_in(&sector);
        let fits = match number {
            0 => sector == [0; SECTOR],
            _ => {
                write(number).0 == place
                    && inside < write(number).1
                    && sector[..] == content(number, inside)[..]
            }
        };
        if !fits || number < *floor || number > to {
            return Err(format!(
                "sector {index} has write {number}{}, and write {floor} was flushed",
                if fits { "" } else { " in parts" }
            ));
        }
        *floor = number;
    }
    Ok(())
}

/// The number of the write that a sector shows; 0 if it shows none.
fn number_in(sector: &[u8]) -> usize {
    let text = String::from_utf8_lossy(sector);
    let whole =
        text.split_inclusive('\n').skip(1).find(|line| line.starts_with("write ") && line.ends_with('\n'));
    whole.and_then(|line| line.trim_end().strip_prefix("write ")?.parse().ok()).unwrap_or(0)
}

/// The offset of the device in the NVDIMM, by the addresses that the guest printed.
fn offset(output: &str) -> Option<u64> {
    let line = output.lines().find_map(|line| line.strip_prefix("at "))?;
    let mut addresses =
        line.split(' ').map(|word| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok());
    let (region, device) = (addresses.next()??, addresses.next()??);
    device.checked_sub(region)
}

/// Copies only the device into a file; zeroes take no space.
fn cut_out(nvdimm: &Path, from: u64, to: &Path) -> Result<(), String> {
    let copied = (|| {
        let source = File::open(nvdimm)?;
        let target = File::create(to)?;
        target.set_len(NVDIMM - from)?;
        let mut reader = std::io::BufReader::new(&source);
        std::io::Seek::seek(&mut reader, std::io::SeekFrom::Start(from))?;
        let mut part = vec![0; MIB as usize];
        let mut at = 0;
        loop {
            let length = reader.by_ref().take(MIB).read(&mut part)?;
            if length == 0 {
                return Ok(());
            }
            if part[..length].iter().any(|&byte| byte != 0) {
                target.write_all_at(&part[..length], at)?;
            }
            at += length as u64;
        }
    })();
    copied.map_err(|error: std::io::Error| format!("cannot copy {}: {error}", nvdimm.display()))
}

fn rescue(tool: &Path, cache: &Path, disk: &Path, yes: bool, codes: &[i32]) -> Result<String, String> {
    let mut command = Command::new(tool);
    command.args(["rescue", "--from", "dm-pcache"]).arg(cache).arg("--to").arg(disk);
    if yes {
        command.arg("--yes");
    }
    let ended = command.output().map_err(|error| format!("cannot start {}: {error}", tool.display()))?;
    let (output, errors) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    if ended.status.code().is_some_and(|code| codes.contains(&code)) {
        return Ok(output.into_owned());
    }
    Err(format!("{command:?}: {}\n{output}{errors}", ended.status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_identifies_its_write() {
        for number in [1, 20, 321, 4_000, 65_536] {
            for sector in 0..PLACE {
                assert_eq!(number_in(&content(number, sector)), number, "sector {sector}");
            }
        }
        assert_eq!(number_in(&[0; SECTOR]), 0);
    }

    #[test]
    fn a_disk_with_an_older_or_a_torn_write_fails() {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = folder.path().join("disk");
        let mut bytes = vec![0; PLACES * PLACE * SECTOR];
        let mut store = |number: usize| {
            let (place, sectors) = write(number);
            for sector in 0..sectors {
                let at = (place * PLACE + sector) * SECTOR;
                bytes[at..at + SECTOR].copy_from_slice(&content(number, sector));
            }
            std::fs::write(&disk, &bytes).expect("a disk");
        };
        let flushed = |to: usize| {
            let mut floor = vec![0; PLACES * PLACE];
            raise(&mut floor, 1, to);
            floor
        };
        (1..=8).for_each(&mut store);
        assert_eq!(check(&disk, &mut flushed(8), 8), Ok(()));
        assert_eq!(check(&disk, &mut flushed(4), 8), Ok(()), "what was not flushed may be there");
        assert!(check(&disk, &mut flushed(4), 7).is_err(), "a write that was never made");
        assert!(check(&disk, &mut flushed(9), 9).is_err(), "a write that was flushed is not there");
        bytes[write(8).0 * PLACE * SECTOR + 100] ^= 1;
        std::fs::write(&disk, &bytes).expect("a disk");
        assert!(check(&disk, &mut flushed(8), 8).is_err(), "a torn sector");
    }

    #[test]
    fn the_device_begins_at_the_address_that_the_guest_printed() {
        assert_eq!(offset("1\nat 0x140000000 0x140c00000\n4\n"), Some(12 << 20));
        assert_eq!(offset("at 0x2 0x1\n"), None);
        assert_eq!(offset("at x y\n"), None);
    }
}

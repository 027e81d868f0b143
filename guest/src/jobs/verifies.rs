//! blkverify on disks that verify and compare in themselves: QEMU's NVMe controller, and the kernel's scsi_debug.
//!
//! Invariants: what blkverify reports is compared with what is known of the disk, and what the disk was sent with the
//! tracepoints of the guest's kernel. The disk has two partitions; whatever is sent for a partition lies within it.
//!
//! Elsewhere: controllers that report wrong limits, and fail in other ways (the tests of `cbd-backing`).

use super::{Ended, Given, Host, LIMIT, Ran};
use crate::plan::{Disk, MIB, Nvme, Plan};
use serde_json::Value;
use std::fs;

const SECTOR: u64 = 512;
/// Sectors of the disks.
const SECTORS: u64 = 8 * MIB / SECTOR;
/// First sector and number of sectors of each partition.
const PARTITIONS: [(u64, u64); 2] = [(4096, 2048), (8192, 2048)];
/// The sector of the NVMe disk that cannot be read, in the first partition.
const BAD: u64 = 5000;
/// The sectors that scsi_debug cannot read when it is asked to fail.
const BAD_OF_SCSI: (u64, u64) = (0x1234, 10);

/// An image of the disk, the disk, and what the jobs share. The disk differs from the image in sectors 9000, 10240
/// (directly behind the second partition) and 12000 to 12002; from 14000 on all but sector 15000 is zero.
const BEGIN: &str = "
    tracing=/sys/kernel/tracing
    mount -t tracefs tracefs $tracing 2>/dev/null || test -d $tracing/events
    : >$tracing/trace
    byte() { printf $1 | dd of=$2 bs=1 seek=$3 conv=notrunc 2>/dev/null; }
    yes 'what the disk has' | head -c $((14000 * 512)) >/tmp/image
    truncate -s 8M /tmp/image
    byte '\\001' /tmp/image $((15000 * 512))
    # Two partitions of a master boot record: the type, the first sector, and the number of sectors.
    dd if=/dev/zero of=/tmp/image bs=512 count=1 conv=notrunc 2>/dev/null
    byte '\\203\\0\\0\\0\\000\\020\\0\\0\\000\\010\\0\\0' /tmp/image 450
    byte '\\203\\0\\0\\0\\000\\040\\0\\0\\000\\010\\0\\0' /tmp/image 466
    byte '\\125\\252' /tmp/image 510
    cp /tmp/image /tmp/disk
    for sector in 9000 10240 12000 12001 12002; do byte '#' /tmp/disk $((sector * 512 + 100)); done
    dd if=/tmp/disk of=$disk bs=1M oflag=direct 2>/dev/null
    blockdev --rereadpt $disk
    dd if=/tmp/image of=/tmp/part bs=512 skip=8192 count=2048 2>/dev/null
    # Verifies, and notes the result and what the disk was sent.
    look() {
        name=$1
        shift
        : >$tracing/trace
        code=0
        blkverify --json --no-progress \"$@\" >/out/$name.json || code=$?
        echo $code >/out/$name.code
        grep -v '^#' $tracing/trace >/out/$name.trace || true
    }
";

/// A command that the disk was sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Sent {
    what: What,
    first: u64,
    blocks: u64,
}

/// SCSI commands by their field BYTCHK; NVMe has one Compare.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Read,
    /// BYTCHK 0, or NVMe Verify.
    Verify,
    /// BYTCHK 1, or NVMe Compare.
    Compare,
    /// BYTCHK 3.
    CompareOneBlock,
}

impl Sent {
    /// The command in a line of the tracepoints nvme_setup_cmd and scsi_dispatch_cmd_start, if it is one of these.
    fn parse(line: &str) -> Option<Self> {
        let (_, command) = line.split_once("cmd=(nvme_cmd_").or_else(|| line.split_once("cmnd=("))?;
        let (name, rest) = command.split_once(' ')?;
        let number = |key: &str| {
            let (_, behind) = rest.split_once(key)?;
            behind.split(|end: char| !end.is_ascii_digit()).next()?.parse::<u64>().ok()
        };
        let bytes = |key: &str| -> Option<Vec<u8>> {
            let (_, behind) = rest.split_once(key)?;
            let words = behind.split([')', ' ']).take_while(|word| word.len() == 2);
            words.map(|word| u8::from_str_radix(word, 16).ok()).collect()
        };
        let what = match name {
            "read" => {
                return Some(Self { what: What::Read, first: number("slba=")?, blocks: number("len=")? + 1 });
            }
            "verify" => What::Verify,
            "compare" => What::Compare,
            "VERIFY_16" => match bytes("raw=")?.get(1)? >> 1 & 3 {
                0 => What::Verify,
                1 => What::Compare,
                _ => What::CompareOneBlock,
            },
            _ if name.starts_with("READ_") && name != "READ_CAPACITY_16" => What::Read,
            _ => return None,
        };
        if let Some(words) = bytes("cdw10=") {
            let first = u64::from_le_bytes(words.get(..8)?.try_into().ok()?);
            return Some(Self {
                what,
                first,
                blocks: u64::from(u16::from_le_bytes([words[8], words[9]])) + 1,
            });
        }
        Some(Self { what, first: number("lba=")?, blocks: number("txlen=")? })
    }
}

/// The result of one verification.
struct Looked {
    name: String,
    code: u64,
    json: Value,
    sent: Vec<Sent>,
}

impl Looked {
    fn read(given: &Given, name: &str) -> Result<Self, String> {
        let text = |kind: &str| {
            let path = given.folder.join(format!("{name}.{kind}"));
            fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let json = serde_json::from_str(&text("json")?).map_err(|error| format!("{name}.json: {error}"))?;
        let code = text("code")?.trim().parse().map_err(|_| format!("{name} has no exit code"))?;
        let sent = text("trace")?.lines().filter_map(Sent::parse).collect();
        Ok(Self { name: name.to_owned(), code, json, sent })
    }

    fn complaint(&self, what: &str) -> String {
        format!("{}: {what}; exit code {}, {}\nit sent {:?}", self.name, self.code, self.json, self.sent)
    }

    /// Checks exit code, method and findings: first sector, sectors and flaw.
    fn found(&self, method: &str, findings: &[(u64, u64, &str)]) -> Result<&Self, String> {
        if self.json["method"] != method {
            return Err(self.complaint(&format!("the method is not '{method}'")));
        }
        let listed = self.json["findings"].as_array().into_iter().flatten();
        let listed: Vec<_> =
            listed.map(|one| (one["start"].as_u64(), one["length"].as_u64(), one["what"].as_str())).collect();
        let expected: Vec<_> = findings
            .iter()
            .map(|&(first, count, what)| (Some(first * SECTOR), Some(count * SECTOR), Some(what)))
            .collect();
        if listed != expected {
            return Err(self.complaint(&format!("the findings are not {findings:?}, in sectors")));
        }
        if self.code != if findings.is_empty() { 0 } else { 2 } {
            return Err(self.complaint("the exit code does not fit the findings"));
        }
        Ok(self)
    }

    /// Checks that what was sent reaches each sector of a range and no other, all of it by commands of these kinds, each of
    /// which occurs.
    fn reached(&self, (start, count): (u64, u64), kinds: &[What]) -> Result<&Self, String> {
        let end = start + count;
        let mut reached = vec![false; count as usize];
        for sent in &self.sent {
            if sent.first < start || sent.first + sent.blocks > end {
                return Err(self.complaint(&format!("{sent:?} is not within {start} to {end}")));
            }
            reached[(sent.first - start) as usize..][..sent.blocks as usize].fill(true);
        }
        if let Some(missed) = reached.iter().position(|reached| !reached) {
            return Err(self.complaint(&format!("sector {} was not looked at", start + missed as u64)));
        }
        let is_sent = |kind: &What| self.sent.iter().any(|sent| sent.what == *kind);
        let others = self.sent.iter().any(|sent| !kinds.contains(&sent.what));
        if others || !kinds.iter().all(is_sent) {
            return Err(self.complaint(&format!("the disk was not sent {kinds:?} alone")));
        }
        Ok(self)
    }
}

/// An NVMe disk finds the sector that it cannot read by Verify, and on request what differs by Compare.
pub fn nvme(host: &Host, given: &Given) -> Result<(), String> {
    let script = format!(
        "disk=/dev/nvme0n1
        {BEGIN}
        echo 1 >$tracing/events/nvme/nvme_setup_cmd/enable
        look auto $disk
        look on --offload on $disk
        look never --offload never $disk
        look zero_auto --zero --offset $((14000 * 512)) $disk
        look zero_on --offload on --zero --offset $((14000 * 512)) $disk
        look compare_auto --compare /tmp/image $disk
        look compare_on --offload on --compare /tmp/image $disk
        look first --offload on ${{disk}}p1
        look second_auto ${{disk}}p2
        look second --offload on --compare /tmp/part ${{disk}}p2"
    );
    let nvme = vec![Nvme { disk: Disk::New(SECTORS * SECTOR), unreadable: vec![BAD] }];
    check_in(host, given, Plan { nvme, ..Plan::of_script(&script) }, check_nvme)
}

/// Runs the looks of a plan in a guest, and checks what they left.
fn check_in(
    host: &Host,
    given: &Given,
    plan: Plan,
    check: fn(&Given) -> Result<(), String>,
) -> Result<(), String> {
    let plan = Plan { cbd: true, out: Some(given.folder.clone()), timeout: LIMIT, ..plan };
    let ran = Ran::of(host, &plan, None)?;
    ran.expect(Ended::Exited(0), &[])?;
    check(given).map_err(|text| ran.complaint(&text))
}

fn check_nvme(given: &Given) -> Result<(), String> {
    let auto = "NVMe Verify; comparisons: reads (NVMe Compare is used only if the setting offload is on)";
    let on = "NVMe Verify; comparisons: NVMe Compare";
    let never = "reads (the setting offload is never)";
    let look = |name| Looked::read(given, name);
    let all = (0, SECTORS);
    let bad = (BAD, 1, "unreadable");
    look("auto")?.found(auto, &[bad])?.reached(all, &[What::Verify])?;
    look("on")?.found(on, &[bad])?.reached(all, &[What::Verify])?;
    look("never")?.found(never, &[bad])?.reached(all, &[What::Read])?;
    let zeroes = (14000, SECTORS - 14000);
    let not_zero = [(15000, 1, "not_zero")];
    look("zero_auto")?.found(auto, &not_zero)?.reached(zeroes, &[What::Read])?;
    look("zero_on")?.found(on, &not_zero)?.reached(zeroes, &[What::Compare, What::Read])?;
    let differs = [bad, (9000, 1, "differs"), (10240, 1, "differs"), (12000, 3, "differs")];
    look("compare_auto")?.found(auto, &differs)?.reached(all, &[What::Read])?;
    look("compare_on")?.found(on, &differs)?.reached(all, &[What::Compare, What::Read])?;
    let [first, second] = PARTITIONS;
    look("first")?.found(on, &[(BAD - first.0, 1, "unreadable")])?.reached(first, &[What::Verify])?;
    look("second_auto")?.found(auto, &[])?.reached(second, &[What::Verify])?;
    look("second")?
        .found(on, &[(9000 - second.0, 1, "differs")])?
        .reached(second, &[What::Compare, What::Read])?;
    Ok(())
}

/// A SCSI disk is asked by VERIFY(16) on request alone. scsi_debug answers BYTCHK 0 without a look at its medium, as
/// emulated disks do: sectors that no read can read pass. Its interface for errors fails single commands, whatever their
/// range.
pub fn scsi(host: &Host, given: &Given) -> Result<(), String> {
    let script = format!(
        "disk=/dev/sda
        {BEGIN}
        echo 1 >$tracing/events/scsi/scsi_dispatch_cmd_start/enable
        look zero_auto --zero --offset $((14000 * 512)) $disk
        look zero_on --offload on --zero --offset $((14000 * 512)) $disk
        look compare_on --offload on --compare /tmp/image $disk
        look first --offload on ${{disk}}1
        look second --offload on --compare /tmp/part ${{disk}}2
        # The next VERIFY(16) ends with these host, driver and SCSI status bytes, sense key, and additional codes.
        fail() {{ echo \"2 -1 0x8f $*\" >/sys/kernel/debug/scsi_debug/0:0:0:0/error; }}
        fail 0 0 0x2 0x3 0x11 0
        look media --offload on --offset $((7000 * 512)) --length 512 ${{disk}}
        fail 0 0 0x2 0x9 0x80 0x1
        look vendor --offload on --offset $((7000 * 512)) --length 1M $disk
        fail 0 0 0x2 0x5 0x20 0
        look refused --offload on --zero --offset $((14000 * 512)) $disk
        fail 0x7 0 0 0 0 0
        look host --offload on --offset $((7000 * 512)) --length 1M $disk
        echo 2 >/sys/bus/pseudo/drivers/scsi_debug/opts
        look auto $disk
        look on --offload on $disk
        look first_auto ${{disk}}1"
    );
    let modules = ["scsi_debug", "sd_mod"].map(str::to_owned).to_vec();
    check_in(host, given, Plan { modules, ..Plan::of_script(&script) }, check_scsi)
}

fn check_scsi(given: &Given) -> Result<(), String> {
    let auto = "reads (SCSI VERIFY is used only if the setting offload is on)";
    let on = "SCSI VERIFY(16); comparisons: SCSI VERIFY(16) with data";
    let look = |name| Looked::read(given, name);
    let all = (0, SECTORS);
    let zeroes = (14000, SECTORS - 14000);
    let not_zero = [(15000, 1, "not_zero")];
    look("zero_auto")?.found(auto, &not_zero)?.reached(zeroes, &[What::Read])?;
    look("zero_on")?.found(on, &not_zero)?.reached(zeroes, &[What::CompareOneBlock, What::Read])?;
    let differs = [(9000, 1, "differs"), (10240, 1, "differs"), (12000, 3, "differs")];
    look("compare_on")?.found(on, &differs)?.reached(all, &[What::Compare, What::Read])?;
    let [first, second] = PARTITIONS;
    look("first")?.found(on, &[])?.reached(first, &[What::Verify])?;
    look("second")?
        .found(on, &[(9000 - second.0, 1, "differs")])?
        .reached(second, &[What::Compare, What::Read])?;
    look("media")?.found(on, &[(7000, 1, "unreadable")])?.reached((7000, 1), &[What::Verify])?;
    let failed =
        |why| format!("reads (SCSI VERIFY(16) failed: {why}); comparisons: SCSI VERIFY(16) with data");
    let range = (7000, 2048);
    let vendor = failed("SCSI status 0x2, sense key 0x9, additional code 0x80");
    look("vendor")?.found(&vendor, &[])?.reached(range, &[What::Verify, What::Read])?;
    let aborted = failed("host status 0x7, driver status 0x0");
    look("host")?.found(&aborted, &[])?.reached(range, &[What::Verify, What::Read])?;
    let refused = "SCSI VERIFY(16); comparisons: reads (SCSI VERIFY(16) with data failed: SCSI status 0x2, sense key 0x5, \
                   additional code 0x20)";
    look("refused")?.found(refused, &not_zero)?.reached(zeroes, &[What::CompareOneBlock, What::Read])?;
    let bad = |start| [(BAD_OF_SCSI.0 - start, BAD_OF_SCSI.1, "unreadable")];
    look("auto")?.found(auto, &bad(0))?.reached(all, &[What::Read])?;
    look("on")?.found(on, &[])?.reached(all, &[What::Verify])?;
    look("first_auto")?.found(auto, &bad(first.0))?.reached(first, &[What::Read])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_read_from_lines_of_the_kernels_traces() {
        let sent = |what, first, blocks| Some(Sent { what, first, blocks });
        let lines = [
            (
                "x-1 [000] ..... 3.4: nvme_setup_cmd: nvme0: disk=nvme0n1, cmd=(nvme_cmd_read slba=4096, len=1023, ctrl=0x0)",
                sent(What::Read, 4096, 1024),
            ),
            (
                "x-1: nvme_setup_cmd: nvme0: cmd=(nvme_cmd_compare cdw10=00 12 00 00 00 00 00 00 ff 01 00 00 00 00)",
                sent(What::Compare, 0x1200, 512),
            ),
            (
                "x-1: nvme_setup_cmd: nvme0: cmd=(nvme_cmd_verify cdw10=01 00 01 00 00 00 00 00 00 00 00 00)",
                sent(What::Verify, 0x10001, 1),
            ),
            ("x-1: nvme_setup_cmd: nvme0: cmd=(nvme_admin_identify cns=1, ctrlid=0)", None),
            (
                "cmnd=(VERIFY_16 lba=9 txlen=256 protect=0 raw=8f 06 00 00 00 00 00 00 00 09 00 00 01 00 00 00)",
                sent(What::CompareOneBlock, 9, 256),
            ),
            (
                "cmnd=(VERIFY_16 lba=9 txlen=1 protect=0 raw=8f 02 00 00 00 00 00 00 00 09 00 00 00 01 00 00)",
                sent(What::Compare, 9, 1),
            ),
            (
                "cmnd=(VERIFY_16 lba=0 txlen=2 protect=0 raw=8f 00 00 00 00 00 00 00 00 00 00 00 00 02 00 00)",
                sent(What::Verify, 0, 2),
            ),
            ("cmnd=(READ_10 lba=5 txlen=8 protect=0 raw=28 00)", sent(What::Read, 5, 8)),
            ("cmnd=(TEST_UNIT_READY - raw=00 00 00 00 00 00)", None),
        ];
        for (line, expected) in lines {
            assert_eq!(Sent::parse(line), expected, "{line}");
        }
    }

    #[test]
    fn what_was_sent_reaches_all_of_a_range_and_nothing_else() {
        let verify = |first, blocks| Sent { what: What::Verify, first, blocks };
        let looked = |sent: &[Sent]| Looked {
            name: "test".to_owned(),
            code: 0,
            json: Value::Null,
            sent: sent.to_vec(),
        };
        let range = (8, 16);
        assert!(looked(&[verify(16, 8), verify(8, 8)]).reached(range, &[What::Verify]).is_ok());
        assert!(looked(&[verify(8, 17)]).reached(range, &[What::Verify]).is_err(), "past the end");
        assert!(looked(&[verify(7, 17)]).reached(range, &[What::Verify]).is_err(), "before the start");
        assert!(looked(&[verify(8, 15)]).reached(range, &[What::Verify]).is_err(), "not all");
        assert!(looked(&[verify(8, 16)]).reached(range, &[What::Read]).is_err(), "another command");
        assert!(looked(&[verify(8, 16)]).reached(range, &[What::Verify, What::Read]).is_err(), "no read");
    }
}

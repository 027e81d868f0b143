//! The command line of QEMU for a guest.
//!
//! Invariants: QEMU reads no configuration of this machine, and the guest reaches only what the plan names:
//! it has no network.

use super::plan::{Disk, GIB, Mode, Plan};
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Memory below `LOW` is ordinary; the memory that continues behind the hole for devices begins at `ABOVE`.
const LOW: u64 = 3 * GIB;
const ABOVE: u64 = 4 * GIB;

/// The files that a boot reads and writes on this machine.
#[derive(Debug)]
pub struct Paths {
    folder: PathBuf,
}

impl Paths {
    /// In a folder of their own.
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    /// The guest's root, or an archive with the job of a system.
    pub fn image(&self) -> PathBuf {
        self.folder.join("image")
    }

    /// The messages of its kernel.
    pub fn console(&self) -> PathBuf {
        self.folder.join("console")
    }

    /// When the job began, when it ended, and its exit code.
    pub fn result(&self) -> PathBuf {
        self.folder.join("result")
    }

    /// An archive of its /out.
    pub fn files(&self) -> PathBuf {
        self.folder.join("files")
    }

    /// The folder of all these files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn disk(&self, disk: &Disk, name: &str) -> PathBuf {
        match disk {
            Disk::New(_) => self.folder.join(name),
            Disk::File(path) | Disk::Shared(path) => path.clone(),
        }
    }
}

/// The modules that the plan's devices need.
pub fn modules(plan: &Plan) -> Vec<&str> {
    let mut wanted = vec!["virtio_console"];
    if !plan.disks.is_empty() || !plan.vhost_user.is_empty() {
        wanted.push("virtio_blk");
    }
    if plan.pmem.is_some() || plan.nvdimm.is_some() || plan.cxl.is_some() {
        wanted.extend(["nd_e820", "nfit", "nd_pmem", "dax_pmem", "device_dax"]);
    }
    if plan.cxl.is_some() {
        wanted.extend(["cxl_acpi", "cxl_pmem", "cxl_mem", "cxl_pci"]);
    }
    wanted.extend(plan.modules.iter().map(String::as_str));
    wanted
}

/// QEMU's arguments. `kvm` tells whether the processor executes the guest's instructions.
pub fn arguments(plan: &Plan, paths: &Paths, kernel: &Path, kvm: bool) -> Vec<OsString> {
    let mut line = Line::default();
    line.words("-no-user-config -nodefaults -display none -no-reboot -monitor none");
    machine(plan, kvm, &mut line);
    let initramfs = plan.system.as_ref().map_or_else(|| paths.image(), |system| system.initramfs.clone());
    line.word("-kernel").word(kernel).word("-initrd").word(initramfs);
    line.word("-append").word(parameters(plan));
    if plan.command.is_empty() {
        line.words("-serial mon:stdio");
    } else {
        line.word("-serial").value("file:", paths.console(), "");
    }
    line.words("-device virtio-serial-pci");
    // QEMU's own pipes, so that lines arrive while the job runs; a shell uses the console.
    let spoken = plan.command.is_empty();
    let stream = |number: u32| {
        PathBuf::from(if spoken { "/dev/null".to_owned() } else { format!("/proc/self/fd/{number}") })
    };
    let ports: [(&str, PathBuf); 4] =
        [("output", stream(1)), ("error", stream(2)), ("result", paths.result()), ("files", paths.files())];
    for (name, path) in ports {
        line.word("-chardev").value(&format!("file,id={name},path="), path, "");
        line.word("-device").word(format!("virtserialport,chardev={name},name={name}"));
    }
    if plan.takes_orders {
        // What is read is input; the guest writes nothing to this port.
        line.words("-chardev file,id=orders,path=/dev/null,input-path=/proc/self/fd/0");
        line.words("-device virtserialport,chardev=orders,name=orders");
    }
    for (number, disk) in plan.disks.iter().enumerate() {
        // Guests that share a file reach it through one page cache, that of this machine.
        let (behind, attribute) = match disk {
            Disk::Shared(_) => (",file.locking=off", ",share-rw=on"),
            Disk::New(_) | Disk::File(_) => ("", ""),
        };
        line.word("-drive").value(
            "if=none,format=raw,discard=unmap,file=",
            paths.disk(disk, &format!("disk{number}")),
            &format!(",id=disk{number}{behind}"),
        );
        line.word("-device")
            .word(format!("virtio-blk-pci,drive=disk{number},serial=disk{number}{attribute}"));
    }
    for (number, socket) in plan.vhost_user.iter().enumerate() {
        // QEMU reconnects to a server that goes away.
        let behind = format!(",id=vhost{number},reconnect-ms=100");
        line.word("-chardev").value("socket,path=", socket, &behind);
        line.word("-device").word(format!("vhost-user-blk-pci,chardev=vhost{number},num-queues=2"));
    }
    if let Some(system) = &plan.system {
        for (name, path) in [("root", &system.disk), ("job", &paths.image())] {
            line.word("-drive").value("if=none,format=raw,file=", path, &format!(",id={name}"));
            line.word("-device").word(format!("virtio-blk-pci,drive={name},serial={name}"));
        }
    }
    nvme(plan, paths, &mut line);
    devices(plan, &mut line);
    if let Some(socket) = &plan.monitor {
        line.word("-chardev").value("socket,path=", socket, ",id=monitor,server=on,wait=off");
        line.words("-mon chardev=monitor,mode=control");
    }
    if let Some(socket) = &plan.incoming {
        line.word("-incoming").word(uri(socket));
    }
    line.arguments
}

/// A socket as migrations name it.
pub fn uri(socket: &Path) -> String {
    format!("unix:{}", socket.display())
}

/// Creates the files that the guest's devices need.
///
/// # Errors
/// What cannot be created, or has another size than the plan says.
pub fn prepare(plan: &Plan, paths: &Paths) -> Result<(), String> {
    let disks = plan.disks.iter().enumerate().map(|(number, disk)| (disk, format!("disk{number}")));
    let nvme = plan.nvme.iter().enumerate().map(|(number, nvme)| (&nvme.disk, format!("nvme{number}")));
    for (disk, name) in disks.chain(nvme) {
        if let Disk::New(size) = disk {
            sized(&paths.disk(disk, &name), *size)?;
        }
    }
    for shared in plan.nvdimm.iter().chain(&plan.cxl) {
        sized(&shared.path, shared.size)?;
    }
    if let Some(cxl) = &plan.cxl {
        sized(&labels(&cxl.path), LABELS)?;
    }
    Ok(())
}

/// The file of a CXL device's labels, beside its memory.
fn labels(memory: &Path) -> PathBuf {
    let mut name = memory.as_os_str().to_owned();
    name.push(".labels");
    name.into()
}

const LABELS: u64 = 1 << 20;

fn sized(path: &Path, size: u64) -> Result<(), String> {
    let cannot = |error: std::io::Error| format!("cannot make {}: {error}", path.display());
    let file: File =
        OpenOptions::new().write(true).create(true).truncate(false).open(path).map_err(cannot)?;
    match file.metadata().map_err(cannot)?.len() {
        0 => file.set_len(size).map_err(cannot),
        found if found == size => Ok(()),
        found => Err(format!("{} has {found} bytes, and {size} were asked for", path.display())),
    }
}

/// Processors and memory.
fn machine(plan: &Plan, kvm: bool, line: &mut Line) {
    let low = plan.memory.min(LOW);
    let mut machine = if plan.cxl.is_some() { "q35".to_owned() } else { "pc".to_owned() };
    machine.push_str(&format!(",max-ram-below-4g={low}"));
    if plan.nvdimm.is_some() {
        machine.push_str(",nvdimm=on,nvdimm-persistence=mem-ctrl");
    }
    if let Some(cxl) = &plan.cxl {
        machine.push_str(&format!(",cxl=on,cxl-fmw.0.targets.0=cxl,cxl-fmw.0.size={}", cxl.size));
    }
    let memory = plan.memory + plan.pmem.unwrap_or(0);
    if !plan.vhost_user.is_empty() {
        machine.push_str(",memory-backend=memory");
        line.word("-object").word(format!("memory-backend-memfd,id=memory,share=on,size={memory}B"));
    }
    line.word("-machine").word(machine);
    let reach = plan.nvdimm.as_ref().map_or(0, |nvdimm| nvdimm.size + GIB);
    let slots = if reach > 0 { format!(",slots=2,maxmem={}B", memory + reach) } else { String::new() };
    line.word("-m").word(format!("{memory}B{slots}"));
    match (plan.mode, kvm) {
        (Mode::Normal, true) => line.words("-accel kvm -cpu host -smp 2"),
        (Mode::Normal, false) => line.words("-accel tcg,thread=multi -cpu max,hypervisor=off -smp 2"),
        // Otherwise single instructions would copy strings of any length.
        (Mode::Counting, _) => line.words(
            "-accel tcg,thread=single -icount shift=0,sleep=off -cpu max,hypervisor=off,erms=off,fsrm=off -smp 1",
        ),
    };
}

fn parameters(plan: &Plan) -> String {
    let mut text = "console=ttyS0 loglevel=4 panic=-1 oops=panic random.trust_cpu=on".to_owned();
    if plan.mode == Mode::Counting {
        // Addresses decide how many instructions align and copy data, so they are the same each time.
        text.push_str(" nokaslr norandmaps randomize_kstack_offset=off");
    }
    if let Some(size) = plan.pmem {
        let at = ABOVE + plan.memory.saturating_sub(LOW);
        text.push_str(&format!(" memmap={size}!{at}"));
    }
    if plan.command.is_empty() {
        text.push_str(" cbd.interactive");
    }
    if plan.system.is_some() {
        text.push_str(" root=LABEL=root rw systemd.firstboot=off");
    }
    for more in &plan.append {
        text.push(' ');
        text.push_str(more);
    }
    text
}

/// NVMe disks; a read, Verify or Compare of an unreadable sector fails, and all others are answered.
fn nvme(plan: &Plan, paths: &Paths, line: &mut Line) {
    for (number, nvme) in plan.nvme.iter().enumerate() {
        let name = format!("nvme{number}");
        let mut behind = format!(",node-name={name},driver=blkdebug,image.driver=file,discard=unmap");
        for (rule, sector) in nvme.unreadable.iter().enumerate() {
            let rule = format!("inject-error.{rule}");
            behind.push_str(&format!(
                ",{rule}.event=none,{rule}.iotype=read,{rule}.errno=5,{rule}.once=off,{rule}.sector={sector}"
            ));
        }
        line.word("-blockdev").value("image.filename=", paths.disk(&nvme.disk, &name), &behind);
        line.word("-device").word(format!("nvme,drive={name},serial={name}"));
    }
}

/// Devices that are memory.
fn devices(plan: &Plan, line: &mut Line) {
    if let Some(nvdimm) = &plan.nvdimm {
        let size = format!(",size={}B", nvdimm.size);
        line.word("-object").value("memory-backend-file,id=nvdimm,share=on,mem-path=", &nvdimm.path, &size);
        line.words("-device nvdimm,id=nvdimm0,memdev=nvdimm");
    }
    if let Some(cxl) = &plan.cxl {
        let size = format!(",size={}B", cxl.size);
        line.word("-object").value("memory-backend-file,id=cxlmem,share=on,mem-path=", &cxl.path, &size);
        let size = format!(",size={LABELS}B");
        line.word("-object").value(
            "memory-backend-file,id=cxllabels,share=on,mem-path=",
            labels(&cxl.path),
            &size,
        );
        line.words("-device pxb-cxl,bus_nr=12,bus=pcie.0,id=cxl");
        line.words("-device cxl-rp,port=0,bus=cxl,id=cxlport,chassis=0,slot=2");
        line.words("-device cxl-type3,bus=cxlport,persistent-memdev=cxlmem,lsa=cxllabels,id=cxl0,sn=1");
    }
}

/// A command line under construction.
#[derive(Default)]
struct Line {
    arguments: Vec<OsString>,
}

impl Line {
    fn words(&mut self, words: &str) -> &mut Self {
        self.arguments.extend(words.split(' ').map(OsString::from));
        self
    }

    fn word(&mut self, word: impl AsRef<OsStr>) -> &mut Self {
        self.arguments.push(word.as_ref().to_owned());
        self
    }

    /// A path between other settings; QEMU reads two commas as one in it.
    fn value(&mut self, before: &str, path: impl AsRef<Path>, behind: &str) -> &mut Self {
        let mut bytes = before.as_bytes().to_vec();
        for &byte in path.as_ref().as_os_str().as_bytes() {
            bytes.push(byte);
            if byte == b',' {
                bytes.push(byte);
            }
        }
        bytes.extend_from_slice(behind.as_bytes());
        self.arguments.push(OsString::from_vec(bytes));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{MIB, Nvme, SharedFile, System};

    fn line(plan: &Plan, kvm: bool) -> String {
        let words = arguments(plan, &Paths::new(Path::new("/tmp/a,b")), Path::new("/k"), kvm);
        words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn persistent_memory_lies_behind_all_ordinary_memory() {
        let plan = |memory| Plan { memory, pmem: Some(2 * GIB), ..Plan::of_script("true") };
        let small = line(&plan(GIB), false);
        assert!(small.contains(&format!("-m {}B ", 3 * GIB)), "{small}");
        assert!(small.contains(&format!("max-ram-below-4g={GIB} ")), "{small}");
        assert!(small.contains(&format!("memmap={}!{}", 2 * GIB, 4 * GIB)), "{small}");
        let large = line(&plan(5 * GIB), false);
        assert!(large.contains(&format!("max-ram-below-4g={} ", 3 * GIB)), "{large}");
        assert!(large.contains(&format!("memmap={}!{}", 2 * GIB, 6 * GIB)), "{large}");
    }

    #[test]
    fn instructions_are_counted_on_one_processor_without_string_instructions() {
        let plan = Plan { mode: Mode::Counting, ..Plan::of_script("true") };
        let line = line(&plan, false);
        for part in ["-icount shift=0,sleep=off", "erms=off,fsrm=off", "-smp 1", " nokaslr norandmaps "] {
            assert!(line.contains(part), "{part} is not in {line}");
        }
    }

    #[test]
    fn the_server_of_a_disk_has_the_guests_memory() {
        let plan = |vhost_user| Plan { vhost_user, pmem: Some(GIB), ..Plan::of_script("true") };
        let alone = line(&plan(Vec::new()), false);
        assert!(!alone.contains("share=on"), "{alone}");
        let served = line(&plan(vec!["/run/a,b".into()]), false);
        assert!(served.contains(&format!("memfd,id=memory,share=on,size={}B", 3 * GIB)), "{served}");
        assert!(served.contains("memory-backend=memory"), "{served}");
        assert!(served.contains("path=/run/a,,b,id=vhost0,reconnect-ms=100"), "{served}");
    }

    #[test]
    fn a_comma_in_a_path_ends_no_setting() {
        let plan = Plan { disks: vec![Disk::New(MIB)], ..Plan::of_script("true") };
        let line = line(&plan, false);
        assert!(line.contains("file=/tmp/a,,b/disk0,id=disk0"), "{line}");
        assert!(line.contains("-initrd /tmp/a,b/image"), "{line}");
    }

    #[test]
    fn a_shared_disk_is_not_locked_and_a_guest_that_takes_orders_has_a_port_for_them() {
        let plan = |disk| Plan { disks: vec![disk], ..Plan::of_script("true") };
        let alone = line(&plan(Disk::File("/d".into())), false);
        assert!(!alone.contains("locking") && !alone.contains("share-rw"), "{alone}");
        let shared = Plan { takes_orders: true, ..plan(Disk::Shared("/d".into())) };
        let shared = line(&shared, false);
        assert!(shared.contains("file=/d,id=disk0,file.locking=off"), "{shared}");
        assert!(shared.contains("drive=disk0,serial=disk0,share-rw=on"), "{shared}");
        assert!(shared.contains("chardev=orders,name=orders") && !alone.contains("orders"), "{shared}");
    }

    #[test]
    fn reads_of_unreadable_sectors_of_an_nvme_disk_fail_each_time() {
        let disk = Disk::New(MIB);
        let plan = Plan { nvme: vec![Nvme { disk, unreadable: vec![8, 99] }], ..Plan::of_script("true") };
        let line = line(&plan, false);
        assert!(
            line.contains("-blockdev image.filename=/tmp/a,,b/nvme0,node-name=nvme0,driver=blkdebug"),
            "{line}"
        );
        for rule in ["inject-error.0", "inject-error.1"] {
            assert!(line.contains(&format!("{rule}.once=off")), "{rule} is not in {line}");
        }
        assert!(line.contains("inject-error.1.sector=99 -device nvme,drive=nvme0"), "{line}");
    }

    #[test]
    fn a_guest_without_a_command_is_interactive() {
        let line = line(&Plan::default(), false);
        assert!(line.contains("-serial mon:stdio") && line.contains("cbd.interactive"), "{line}");
    }

    #[test]
    fn memory_that_outlives_the_guest_is_made_once_and_keeps_its_size() {
        let folder = std::env::temp_dir().join(format!("cbd-machine-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder can be made");
        let plan = |size| Plan {
            cxl: Some(SharedFile { path: folder.join("cxl"), size }),
            ..Plan::of_script("true")
        };
        let paths = Paths::new(&folder);
        let first = prepare(&plan(256 * MIB), &paths);
        let again = prepare(&plan(256 * MIB), &paths);
        let other = prepare(&plan(512 * MIB), &paths);
        let labelled = folder.join("cxl.labels").metadata().map(|labels| labels.len());
        std::fs::remove_dir_all(&folder).expect("it can be removed");
        assert_eq!((first, again), (Ok(()), Ok(())));
        assert!(other.is_err());
        assert_eq!(labelled.ok(), Some(LABELS));
    }

    #[test]
    fn a_system_boots_its_own_initramfs_and_its_disk_comes_behind_the_others() {
        let system = System { disk: "/s/root".into(), initramfs: "/s/initramfs".into() };
        let plan =
            Plan { system: Some(system), disks: vec![Disk::File("/d".into())], ..Plan::of_script("true") };
        let line = line(&plan, false);
        assert!(line.contains("-initrd /s/initramfs") && line.contains("root=LABEL=root"), "{line}");
        let at = |part: &str| line.find(part).unwrap_or_else(|| panic!("{part}: {line}"));
        assert!(at("serial=disk0") < at("serial=root") && at("serial=root") < at("serial=job"), "{line}");
    }
}

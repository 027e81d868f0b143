//! A golden image as files: the region and the changed blocks of its disk, compressed, and a text file with the
//! contents that a reader must find.

use cbd_sim::{Content, CrashMemory, DiskImage, SimDisk};
use cbd_types::{AlignedBuffer, BackingOp, BackingQueue, BootId, OpToken};
use std::fmt::Write as _;
use std::path::Path;

const BLOCK: usize = 4096;

/// The content of a sector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shown {
    Content(Content),
    /// The read fails because the medium failed.
    Error,
    /// Bytes that no client wrote.
    Foreign,
}

#[derive(Default)]
pub struct Golden {
    /// Version and history.
    pub name: String,
    pub region: Vec<u8>,
    /// Number and bytes of each block of the disk that differs from a fresh one.
    pub blocks: Vec<(u64, Vec<u8>)>,
    pub size: u64,
    pub sector_size: u64,
    pub drained_epoch: u64,
    pub dirty_records: u64,
    pub lanes: u32,
    pub parked_bytes: u64,
    /// The boot in which its ordinary file was used: the value of each byte of the boot id; 0 for memory that
    /// keeps every store.
    pub boot: u8,
    /// First sector, number of sectors, and their content.
    pub runs: Vec<(u64, u64, Shown)>,
}

impl Golden {
    /// The sectors in order, and the content of each.
    pub fn sectors(&self) -> impl Iterator<Item = (u64, Shown)> {
        self.runs
            .iter()
            .flat_map(|&(first, count, shown)| (first..first + count).map(move |sector| (sector, shown)))
    }

    pub fn note(&mut self, sector: u64, shown: Shown) {
        match self.runs.last_mut() {
            Some((first, count, last)) if *first + *count == sector && *last == shown => *count += 1,
            _ => self.runs.push((sector, 1, shown)),
        }
    }

    /// Copies the blocks of `image` that differ from a fresh disk.
    pub fn take_disk(&mut self, image: &DiskImage) {
        let fresh = Content::fresh_disk(self.size, self.sector_size as usize);
        for (number, fresh) in (0u64..).zip(fresh.chunks(BLOCK)) {
            let mut bytes = vec![0; fresh.len()];
            image.read(number * BLOCK as u64, &mut bytes);
            if bytes != fresh {
                self.blocks.push((number, bytes));
            }
        }
    }

    /// A memory with the contents of the image's region.
    pub fn memory(&self) -> CrashMemory {
        let memory = CrashMemory::from_image(self.region.clone());
        if self.boot > 0 {
            memory.become_file(BootId([self.boot; 16]));
        }
        memory
    }

    /// A disk with the contents of the image, all durable.
    pub fn disk(&self) -> SimDisk {
        let disk = SimDisk::new(SimDisk::ordinary(self.size, self.sector_size as u32), 1);
        let mut queue = disk.queue(1);
        let ops = self.blocks.iter().map(|(number, bytes)| BackingOp::Write {
            offset: number * BLOCK as u64,
            buffer: AlignedBuffer::from_slice(bytes),
        });
        for op in ops.chain([BackingOp::Flush]) {
            queue.submit(OpToken(1), op);
            let mut done = Vec::new();
            while done.is_empty() {
                queue.poll(&mut done);
            }
        }
        disk
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let _ = writeln!(text, "size {}\nsector {}\nlanes {}", self.size, self.sector_size, self.lanes);
        let _ = writeln!(text, "drained-epoch {}\ndirty-records {}", self.drained_epoch, self.dirty_records);
        let _ = writeln!(text, "parked-bytes {}", self.parked_bytes);
        if self.boot > 0 {
            let _ = writeln!(text, "boot {}", self.boot);
        }
        for (first, count, shown) in &self.runs {
            let shown = match shown {
                Shown::Content(Content(number)) => number.to_string(),
                Shown::Error => String::from("error"),
                Shown::Foreign => String::from("foreign"),
            };
            let _ = writeln!(text, "sectors {first} {count} {shown}");
        }
        text
    }

    fn take_text(&mut self, text: &str) {
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| words[at].parse::<u64>().expect("a number");
            match words[0] {
                "size" => self.size = number(1),
                "sector" => self.sector_size = number(1),
                "lanes" => self.lanes = number(1) as u32,
                "drained-epoch" => self.drained_epoch = number(1),
                "parked-bytes" => self.parked_bytes = number(1),
                "boot" => self.boot = number(1) as u8,
                "dirty-records" => self.dirty_records = number(1),
                "sectors" => {
                    let shown = match words[3] {
                        "error" => Shown::Error,
                        _ => Shown::Content(Content(number(3))),
                    };
                    self.runs.push((number(1), number(2), shown));
                }
                other => panic!("{}: unknown word {other}", self.name),
            }
        }
    }

    pub fn write(&self, directory: &Path) {
        let mut disk = Vec::new();
        for (number, bytes) in &self.blocks {
            disk.extend(number.to_le_bytes());
            disk.extend((bytes.len() as u64).to_le_bytes());
            disk.extend(bytes);
        }
        let file = |ending: &str| directory.join(format!("{}.{ending}", self.name));
        std::fs::write(file("txt"), self.text()).expect("written");
        for (ending, bytes) in [("region", &self.region), ("disk", &disk)] {
            std::fs::write(file(ending), miniz_oxide::deflate::compress_to_vec_zlib(bytes, 10))
                .expect("written");
        }
    }

    /// All images in a directory, by name.
    pub fn read_all(directory: &Path) -> Vec<Self> {
        let version = directory.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
        let mut texts: Vec<_> = std::fs::read_dir(directory)
            .expect("a directory")
            .map(|entry| entry.expect("readable").path())
            .filter(|path| path.extension().is_some_and(|ending| ending == "txt"))
            .collect();
        texts.sort();
        let inflate = |path: &Path| {
            let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            miniz_oxide::inflate::decompress_to_vec_zlib(&bytes).expect("compressed by write_images")
        };
        let read = |text: &Path| {
            let history = text.file_stem().and_then(|name| name.to_str()).expect("a name");
            let mut golden = Self { name: format!("{version}/{history}"), ..Self::default() };
            golden.take_text(&std::fs::read_to_string(text).expect("readable"));
            golden.region = inflate(&text.with_extension("region"));
            let mut disk = &inflate(&text.with_extension("disk"))[..];
            while let Some((head, rest)) = disk.split_at_checked(16) {
                let number = u64::from_le_bytes(head[..8].try_into().expect("eight"));
                let length = u64::from_le_bytes(head[8..].try_into().expect("eight")) as usize;
                golden.blocks.push((number, rest[..length].to_vec()));
                disk = &rest[length..];
            }
            golden
        };
        texts.iter().map(|text| read(text)).collect()
    }
}

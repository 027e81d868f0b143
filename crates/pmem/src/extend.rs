//! A region whose file or device has become larger, while it is mapped.
//!
//! Invariants: the memory stays where it is, and what it has stays mapped; space is allocated before it is mapped. After an error the
//! file has the size that it had.
//!
//! Elsewhere: the address space that is reserved for this (`memory`), what is stored in the new space (the engine).

use crate::errors::from_io;
use crate::file::{self, Locked};
use crate::identity::HUGETLBFS;
use crate::memory::Memory;
use crate::open::{address_space, device_length, refuse};
use crate::space::Space;
use cbd_holder::Change;
use cbd_types::{Error, ErrorKind, Result, Size};
use std::fs::Metadata;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Bytes of the file or device now, as far as they can be mapped.
pub(crate) fn size_now(file: &Locked, path: &Path) -> Result<u64> {
    let looked = look(file, path)?;
    if looked.file_type().is_char_device() {
        return device_length(path, &looked).map(|(_, length, _)| length);
    }
    let page = page_of(file, path)?;
    Ok(looked.len() / page * page)
}

/// The size that a region can grow to; see [`Mapping::size_to_grow_to`](crate::Mapping::size_to_grow_to).
pub(crate) fn size_to_grow_to(
    file: Option<&Locked>,
    memory: &Memory,
    path: &Path,
    wanted: Option<u64>,
) -> Result<u64> {
    let region = path.display();
    let invalid = |text| Err(refuse(ErrorKind::InvalidArgument, text));
    let Some(file) = file else {
        return Err(refuse(
            ErrorKind::Unsupported,
            format!("the region {region} is memory without a file, which does not grow"),
        ));
    };
    // A user who made another file of that name larger would learn that it has not become larger.
    if let Some(
        change @ (Change::Deleted { .. }
        | Change::Linked { replaced: true, .. }
        | Change::Moved { replaced: true, .. }),
    ) = cbd_holder::change::of(file.as_fd(), path, 0)
    {
        return Err(refuse(ErrorKind::Media, format!("the region {region} cannot grow: {change}")));
    }
    let (mapped, now) = (memory.len() as u64, size_now(file, path)?);
    if now < mapped {
        return Err(refuse(
            ErrorKind::Media,
            format!(
                "the region {region} cannot grow: it was cut short, from {} to {}; what was behind that is lost",
                Size(mapped),
                Size(now)
            ),
        ));
    }
    let is_device = look(file, path)?.file_type().is_char_device();
    let size = match wanted {
        None => now,
        Some(wanted) if is_device && wanted != now => {
            return invalid(format!(
                "the device {region} has {}, not {}: leave out --size to use all of it",
                Size(now),
                Size(wanted)
            ));
        }
        Some(wanted) if wanted < now => {
            let what =
                if wanted < mapped { "a region does not shrink" } else { "a region uses all of its file" };
            return invalid(format!(
                "the file of the region {region} has {} already, more than {}: {what}; leave out --size to use all of it",
                Size(now),
                Size(wanted)
            ));
        }
        Some(wanted) => wanted.checked_next_multiple_of(page_of(file, path)?).ok_or_else(|| {
            refuse(ErrorKind::InvalidArgument, format!("{wanted} bytes are too many for the region {region}"))
        })?,
    };
    if address_space(path, size)? > memory.len_max() {
        return Err(no_addresses(path, size, memory));
    }
    Ok(size)
}

/// Extends a smaller file to `size` bytes, with allocated space, and maps it up to there.
pub(crate) fn extend(file: &Locked, memory: &Memory, path: &Path, size: u64) -> Result<()> {
    let region = path.display();
    let looked = look(file, path)?;
    let is_file = looked.is_file();
    if is_file {
        let free = file::file_system(file).ok().and_then(|system| system.free);
        Space { path, file, looked: &looked, free }.allocate(size)?;
    }
    let restore = || {
        if is_file && looked.len() < size {
            // Nothing has been stored there.
            let _ = file.set_len(looked.len());
        }
    };
    // The size of the file, which is to be on its disk before anything in the new part is relied on.
    if is_file && let Err(error) = file.sync_all() {
        restore();
        return Err(from_io(&error, format!("cannot bring the new size of the region {region} to its disk")));
    }
    memory.extend(file.as_fd(), address_space(path, size)?).map_err(|error| {
        restore();
        if size > memory.len_max() as u64 {
            no_addresses(path, size, memory)
        } else {
            from_io(&error, format!("cannot map the new part of the region {region}"))
        }
    })
}

fn no_addresses(path: &Path, size: u64, memory: &Memory) -> Error {
    refuse(
        ErrorKind::NoSpace,
        format!(
            "the region {} cannot grow to {} while it is in use: it has addresses for {}, and the address space behind them may be in \
             use; stop and register the transport again with the larger file or device, then grow it",
            path.display(),
            Size(size),
            Size(memory.len_max() as u64)
        ),
    )
}

fn look(file: &Locked, path: &Path) -> Result<Metadata> {
    file.metadata().map_err(|error| from_io(&error, format!("cannot look at the region {}", path.display())))
}

/// The unit of the file's pages.
fn page_of(file: &Locked, path: &Path) -> Result<u64> {
    let system = file::file_system(file).map_err(|error| {
        from_io(&error, format!("cannot look at the file system of the region {}", path.display()))
    })?;
    Ok(if system.magic == HUGETLBFS { system.block } else { file::page_size() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, OpenOptions};
    use cbd_types::Pmem;
    use std::sync::atomic::{AtomicBool, Ordering};

    const MIB: u64 = 1 << 20;

    fn file_of(length: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file in memory");
        file.as_file().set_len(length).expect("its size");
        file
    }

    fn open(file: &tempfile::NamedTempFile) -> Mapping {
        Mapping::open(file.path(), &OpenOptions::default()).expect("opened")
    }

    fn refused(
        mapping: &Mapping,
        file: &tempfile::NamedTempFile,
        wanted: Option<u64>,
    ) -> (ErrorKind, String) {
        let error = mapping.size_to_grow_to(file.path(), wanted).expect_err("it is refused");
        (error.kind(), error.line())
    }

    /// Ends the threads of a test, also one that fails.
    struct Over<'a>(&'a AtomicBool);

    impl Drop for Over<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn a_mapping_grows_with_its_file_or_extends_it_while_threads_use_it() {
        let file = file_of(4 * MIB);
        let mapping = open(&file);
        mapping.store(0, b"before");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut round = 0_u8;
                while !is_over.load(Ordering::Relaxed) {
                    round = round.wrapping_add(1);
                    // In the part that is new in its turn.
                    for at in [MIB, mapping.len() - 4096] {
                        mapping.store(at, &[round; 64]);
                        mapping.fence();
                        let mut read = [0; 64];
                        mapping.load(at, &mut read).expect("it does not fail");
                        assert_eq!(read, [round; 64]);
                    }
                }
            });
            let _over = Over(&is_over);
            for (wanted, size) in [(Some(6 * MIB - 1), 6 * MIB), (None, 9 * MIB), (Some(40 * MIB), 40 * MIB)]
            {
                if wanted.is_none() {
                    file.as_file().set_len(size + 100).expect("its size");
                }
                assert_eq!(mapping.size_to_grow_to(file.path(), wanted).expect("it can"), size);
                mapping.grow(file.path(), size).expect("it grows");
                assert_eq!(mapping.len(), size);
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        });
        assert_eq!(mapping.failed(), None);
        mapping.store(39 * MIB, b"behind");
        mapping.fence();
        drop(mapping);
        let again = open(&file);
        let mut read = [0; 6];
        for (at, bytes) in [(0, b"before"), (39 * MIB, b"behind")] {
            again.load(at, &mut read).expect("it is readable");
            assert_eq!(&read, bytes);
        }
        assert_eq!(again.len(), 40 * MIB);
    }

    #[test]
    fn a_failure_of_the_new_part_is_handled_as_one_of_the_first() {
        let file = file_of(4 * MIB);
        let mapping = open(&file);
        mapping.grow(file.path(), 8 * MIB).expect("it grows");
        file.as_file().set_len(4 * MIB).expect("cut");
        let error = mapping.load(6 * MIB, &mut [0; 64]).expect_err("nothing is there");
        assert!((6 * MIB..6 * MIB + 64).contains(&error.at), "{error:?}");
        assert_eq!(mapping.failed(), None);
        mapping.store(7 * MIB, &[1; 64]);
        assert_eq!(mapping.failed(), Some(7 * MIB));
        mapping.load(0, &mut [0; 64]).expect("the first part is there");
        let (kind, text) = refused(&mapping, &file, Some(16 * MIB));
        assert_eq!(kind, ErrorKind::Media);
        assert!(text.contains("it was cut short, from 8 MiB to 4 MiB"), "{text}");
    }

    #[test]
    fn sizes_that_the_file_does_not_have_and_cannot_get_are_refused_and_change_nothing() {
        let file = file_of(4 * MIB);
        let mapping = open(&file);
        file.as_file().set_len(8 * MIB).expect("its size");
        for (wanted, why) in [(MIB, "a region does not shrink"), (6 * MIB, "a region uses all of its file")] {
            let (kind, text) = refused(&mapping, &file, Some(wanted));
            assert_eq!(kind, ErrorKind::InvalidArgument);
            assert!(text.contains("has 8 MiB already") && text.contains(why), "{text}");
        }
        let (kind, text) = refused(&mapping, &file, Some(1 << 45));
        assert_eq!(kind, ErrorKind::NoSpace);
        assert!(text.contains("register the transport again"), "{text}");
        assert_eq!(refused(&mapping, &file, Some(u64::MAX)).0, ErrorKind::InvalidArgument);
        let error = mapping.grow(file.path(), 1 << 45).expect_err("no file system has so much");
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{}", error.line());
        let length = file.as_file().metadata().expect("it is there").len();
        assert_eq!((length, mapping.len()), (8 * MIB, 4 * MIB));
        let path = file.path().to_path_buf();
        let moved = path.with_extension("moved");
        std::fs::rename(&path, &moved).expect("moved");
        assert_eq!(mapping.size_to_grow_to(&path, None).expect("no other file is meant"), 8 * MIB);
        std::fs::write(&path, [0]).expect("another file");
        let (kind, text) = refused(&mapping, &file, None);
        assert_eq!(kind, ErrorKind::Media);
        assert!(text.contains("cannot grow") && text.contains("names another file now"), "{text}");
        std::fs::rename(&moved, &path).expect("moved back");
        let kept = file.reopen().expect("opened");
        drop(file);
        let error = mapping.size_to_grow_to(&path, None).expect_err("it was deleted");
        assert_eq!(error.kind(), ErrorKind::Media);
        assert!(error.line().contains("cannot grow"), "{}", error.line());
        assert_eq!(kept.metadata().expect("it is open").len(), 8 * MIB);
        let error =
            Mapping::anonymous(MIB).expect("memory").size_to_grow_to(&path, None).expect_err("no file");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
}

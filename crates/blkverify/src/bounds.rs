//! The range that the user chose.

use cbd_types::{ByteRange, Error, ErrorKind, Result};

/// The range of an object of `size` bytes with sectors of `sector` bytes. A range that ends with the object may end within a
/// sector, as a file does.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] says what is wrong and what is possible.
pub fn range(offset: u64, length: Option<u64>, size: u64, sector: u64, name: &str) -> Result<ByteRange> {
    let refuse = |text| Err(Error::new(ErrorKind::InvalidArgument, text));
    if size == 0 {
        return refuse(format!("{name} is empty: there is nothing to look at"));
    }
    if offset >= size {
        return refuse(format!("--offset {offset} is past the end of {name}, which has {size} bytes"));
    }
    let left = size - offset;
    let length = length.unwrap_or(left);
    if length == 0 {
        return refuse("--length 0 leaves nothing to look at: leave it out for all to the end".to_owned());
    }
    if length > left {
        return refuse(format!(
            "--length {length} from --offset {offset} is past the end of {name}, which has {size} bytes: --length is {left} at most"
        ));
    }
    let odd = |value: u64| !value.is_multiple_of(sector);
    for (option, value) in [("--offset", offset), ("--length", length)] {
        if odd(value) && (option == "--offset" || length != left) {
            let below = value / sector * sector;
            return refuse(format!(
                "{option} {value} is not whole sectors of {sector} bytes of {name}: {below} and {} are",
                below + sector
            ));
        }
    }
    Ok(ByteRange::at(offset, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_whole_sectors_or_ends_with_the_object() {
        let range =
            |offset, length, size| range(offset, length, size, 512, "x").map_err(|error| error.line());
        assert_eq!(range(0, None, 1000), Ok(ByteRange::at(0, 1000)));
        assert_eq!(range(512, Some(488), 1000), Ok(ByteRange::at(512, 488)));
        assert_eq!(range(512, Some(512), 2048), Ok(ByteRange::at(512, 512)));
        for (offset, length, size, text) in [
            (0, None, 0, "is empty"),
            (4096, None, 4096, "past the end of x, which has 4096 bytes"),
            (512, Some(1024), 1024, "--length is 512 at most"),
            (0, Some(u64::MAX), 1024, "--length is 1024 at most"),
            (100, None, 4096, "--offset 100 is not whole sectors of 512 bytes of x: 0 and 512 are"),
            (0, Some(700), 4096, "--length 700 is not whole sectors of 512 bytes of x: 512 and 1024 are"),
            (0, Some(0), 4096, "leave it out"),
        ] {
            let error = range(offset, length, size).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }
}

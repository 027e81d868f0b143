//! Backends by their name.

use crate::Bytes;
use crate::check::open_private;
use cbd_types::{Error, ErrorKind, Name, Result};
use std::sync::Arc;

/// The number of the backend with this name.
///
/// # Errors
/// [`ErrorKind::NotFound`] with the names that exist, or [`ErrorKind::Damaged`] if several have it; when the transport cannot
/// be opened, its error.
pub fn backend_of_name(bytes: &Arc<dyn Bytes>, name: &Name) -> Result<u32> {
    let transports = open_private(bytes)?;
    let entries: Vec<_> =
        transports.iter().flat_map(|transport| cbd_runtime::disk::entries(transport).0).collect();
    let found: Vec<u32> =
        entries.iter().filter(|entry| entry.name.as_ref() == Some(name)).map(|entry| entry.id.0).collect();
    match found.as_slice() {
        [id] => Ok(*id),
        [] => {
            let names: Vec<&str> =
                entries.iter().filter_map(|entry| Some(entry.name.as_ref()?.as_str())).collect();
            let known = if names.is_empty() {
                "none has a name".to_owned()
            } else {
                format!("there are {}", names.join(", "))
            };
            Err(Error::new(
                ErrorKind::NotFound,
                format!("the region has no backend with the name {name}: {known}; a number is accepted too"),
            ))
        }
        several => Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{} backends of the region have the name {name}: take a number, one of {several:?}",
                several.len()
            ),
        )),
    }
}

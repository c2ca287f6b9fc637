//! Extended attributes of files and directories: user attributes (`user.`) and ACLs.

use std::ffi::CString;
use std::io;
use std::os::fd::AsFd;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::tree::ExtendedAttribute;

/// Prefixes of saved attributes. `security.` and `trusted.` belong to the system, not the owner.
const SAVED_PREFIXES: [&str; 2] = ["user.", "system.posix_acl_"];
/// Kernel limit on a file's attribute name list, and on each value.
const MAX_XATTR_BYTES: usize = 65_536;

/// Maximum total size of a file's values. Some file systems allow hundreds of MB.
const MAX_TOTAL_BYTES: usize = 1 << 20;

/// Reads a file's attributes. Returns an empty list if the file system doesn't support them.
pub(crate) fn read_xattrs(file: &impl AsFd) -> io::Result<Vec<ExtendedAttribute>> {
    // Most files have none.
    let size = match rustix::fs::flistxattr_query(file) {
        Ok(0) | Err(Errno::NOTSUP) => return Ok(Vec::new()),
        Ok(size) => size,
        Err(error) => return Err(error.into()),
    };
    let mut buffer = vec![0; size.min(MAX_XATTR_BYTES)];
    let length = match rustix::fs::flistxattr(file, &mut buffer[..]) {
        // Attributes were added between the two calls.
        Err(Errno::RANGE) => return read_xattrs(file),
        result => result?,
    };
    let mut names: Vec<&[u8]> =
        buffer[..length].split(|byte| *byte == 0).filter(|name| is_saved(name)).collect();
    names.sort_unstable();
    let (mut attributes, mut total) = (Vec::new(), 0);
    for name in names {
        if let Some(value) = read_value(file, name)? {
            total += value.len();
            if total > MAX_TOTAL_BYTES {
                let reason = format!("extended attributes exceed {MAX_TOTAL_BYTES} bytes");
                return Err(io::Error::new(io::ErrorKind::FileTooLarge, reason));
            }
            attributes.push(ExtendedAttribute::new(name, &value));
        }
    }
    Ok(attributes)
}

fn is_saved(name: &[u8]) -> bool {
    SAVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix.as_bytes()))
}

fn read_value(file: &impl AsFd, name: &[u8]) -> io::Result<Option<Vec<u8>>> {
    let mut value = vec![0; MAX_XATTR_BYTES];
    match rustix::fs::fgetxattr(file, name, &mut value[..]) {
        Ok(length) => {
            value.truncate(length);
            Ok(Some(value))
        }
        Err(Errno::NODATA) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Sets the attributes of a restored file. If one is rejected, such as an ACL on a file system without ACL support, the
/// others are still set.
///
/// # Errors
/// The first failure: an I/O error, an attribute rejected by the file system, or an invalid name or value.
pub(crate) fn write_xattrs(file: &impl AsFd, attributes: &[ExtendedAttribute]) -> io::Result<()> {
    let mut result = Ok(());
    for attribute in attributes {
        result = result.and(write_xattr(file, attribute));
    }
    result
}

/// Replaces the user attributes and ACLs of `to` with those of `from`.
///
/// # Errors
/// If attributes can't be read, removed or set. If setting one fails, the others are still set.
pub fn replace_xattrs(from: &impl AsFd, to: &impl AsFd) -> io::Result<()> {
    for attribute in read_xattrs(to)? {
        if let Some(name) = attribute.raw_name().and_then(|name| CString::new(name).ok()) {
            rustix::fs::fremovexattr(to, &name)?;
        }
    }
    write_xattrs(to, &read_xattrs(from)?)
}

fn write_xattr(file: &impl AsFd, attribute: &ExtendedAttribute) -> io::Result<()> {
    let invalid = || {
        io::Error::new(io::ErrorKind::InvalidData, format!("invalid extended attribute {}", attribute.name))
    };
    let name = attribute.raw_name().ok_or_else(invalid)?;
    if !is_saved(&name) {
        return Ok(());
    }
    let value = attribute.value().ok_or_else(invalid)?;
    let name = CString::new(name).map_err(|_| invalid())?;
    Ok(rustix::fs::fsetxattr(file, &name, &value, XattrFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_xattrs_sets_others_if_one_is_rejected() {
        let file = tempfile::tempfile().unwrap();
        if rustix::fs::fsetxattr(&file, "user.probe", b"v", XattrFlags::empty()).is_err() {
            eprintln!("skipped: the file system does not support user attributes");
            return;
        }
        rustix::fs::fremovexattr(&file, "user.probe").unwrap();
        let invalid = ExtendedAttribute::new(b"system.posix_acl_access", b"not a list");
        let tag = ExtendedAttribute::new(b"user.tag", b"v");
        let latin1 = ExtendedAttribute::new(b"user.caf\xe9", b"v");
        assert!(write_xattrs(&file, &[invalid, latin1.clone(), tag.clone()]).is_err());
        assert_eq!(read_xattrs(&file).unwrap(), [latin1, tag]);
    }
}

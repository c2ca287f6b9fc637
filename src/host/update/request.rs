//! The request file. The gateway or the sync agent requests a release, and the run that serves the request removes the
//! file.
//!
//! The writers are not root, so the content is untrusted. A request can name a version, but cannot waive a policy.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use serde::Deserialize;

use crate::system::layout::Layout;
use svc_base::fsx::{self, FileError};
use svc_http::request_id;
use svc_machine::name::ImageVersion;

const MAX_REQUEST_BYTES: u64 = 4096;

/// A request from another process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedRequest {
    pub version: ImageVersion,
    pub request_id: Option<String>,
}

/// The state of the request file.
#[derive(Debug, PartialEq, Eq)]
pub enum RequestFile {
    Missing,
    Valid(ParsedRequest),
    /// The file is not a valid request.
    Invalid,
}

pub fn read(layout: &Layout) -> RequestFile {
    let path = layout.request("update");
    if path.symlink_metadata().is_err() {
        return RequestFile::Missing;
    }
    let text = read_untrusted(&path, MAX_REQUEST_BYTES);
    text.and_then(|text| parse(&text)).map_or(RequestFile::Invalid, RequestFile::Valid)
}

/// Reads the first `max_bytes` of a file that another user can write; `None` if it is not a readable regular file. A
/// symbolic link is not followed, and a FIFO does not block.
pub fn read_untrusted(path: &Path, max_bytes: u64) -> Option<Vec<u8>> {
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    let mut text = Vec::new();
    file.take(max_bytes).read_to_end(&mut text).ok()?;
    Some(text)
}

fn parse(text: &[u8]) -> Option<ParsedRequest> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct WireRequest {
        image_version: ImageVersion,
        request_id: Option<String>,
    }
    let wire: WireRequest = serde_json::from_slice(text).ok()?;
    let request_id = wire.request_id.filter(|id| request_id::is_well_formed(id));
    Some(ParsedRequest { version: wire.image_version, request_id })
}

/// Removes the request, unless it now names a different release.
pub fn complete(layout: &Layout, served: &ImageVersion) -> Result<(), FileError> {
    match read(layout) {
        RequestFile::Valid(request) if request.version != *served => Ok(()),
        RequestFile::Missing => Ok(()),
        _ => remove(layout),
    }
}

/// Removes the request. A directory with its name, which would block every update, is renamed.
pub fn remove(layout: &Layout) -> Result<(), FileError> {
    let path = layout.request("update");
    match fsx::remove_if_exists(&path) {
        Err(error) if error.source.kind() == ErrorKind::IsADirectory => {
            rename_directory(&path).map_err(FileError::wrap("rename", &path))
        }
        removed => removed,
    }
}

/// Renames a directory within its parent. Root does not remove the directory: the parent belongs to another user, who
/// could replace it with a symbolic link, and root would then remove a directory elsewhere.
fn rename_directory(path: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(ErrorKind::InvalidInput.into());
    };
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let parent = nix::fcntl::open(parent, flags, Mode::empty())?;
    let new_name = format!(".not-a-request-{}", uuid::Uuid::new_v4().simple());
    Ok(nix::fcntl::renameat(&parent, name, &parent, new_name.as_str())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout_with_request(content: &[u8]) -> (tempfile::TempDir, Layout) {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        fsx::write_atomic(&layout.request("update"), content, 0o600).unwrap();
        (dir, layout)
    }

    #[test]
    fn read_ignores_fields_other_than_version_and_id() {
        let (_dir, layout) =
            layout_with_request(br#"{"imageVersion":"2","requestId":"abc","allowDowngrade":true}"#);
        let RequestFile::Valid(request) = read(&layout) else { panic!("no request") };
        assert_eq!(request.version.as_str(), "2");
        complete(&layout, &"1".parse().unwrap()).unwrap();
        assert_ne!(read(&layout), RequestFile::Missing, "a different release is requested");
        complete(&layout, &"2".parse().unwrap()).unwrap();
        assert_eq!(read(&layout), RequestFile::Missing);
    }

    #[test]
    fn read_rejects_untrusted_content() {
        for content in [&b""[..], b"{}", b"{\"imageVersion\":\"../x\"}", &vec![b' '; 1 << 20]] {
            let (_dir, layout) = layout_with_request(content);
            assert_eq!(read(&layout), RequestFile::Invalid);
        }
        let (dir, layout) = layout_with_request(b"");
        remove(&layout).unwrap();
        let secret = dir.path().join("secret");
        std::fs::write(&secret, br#"{"imageVersion":"2"}"#).unwrap();
        std::os::unix::fs::symlink(&secret, layout.request("update")).unwrap();
        assert_eq!(read(&layout), RequestFile::Invalid);
        remove(&layout).unwrap();
        nix::unistd::mkfifo(&layout.request("update"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(read(&layout), RequestFile::Invalid);
        complete(&layout, &"2".parse().unwrap()).unwrap();
        assert_eq!(read(&layout), RequestFile::Missing);
    }

    #[test]
    fn remove_renames_directory_but_follows_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        let request = layout.request("update");
        for _ in 0..2 {
            std::fs::create_dir_all(request.join("inside")).unwrap();
            assert_eq!(read(&layout), RequestFile::Invalid);
            complete(&layout, &"2".parse().unwrap()).unwrap();
            assert_eq!(read(&layout), RequestFile::Missing);
        }
        let requests = request.parent().unwrap();
        assert_eq!(std::fs::read_dir(requests).unwrap().count(), 2);
        let victim = dir.path().join("victim/update");
        std::fs::create_dir_all(&victim).unwrap();
        std::fs::rename(requests, dir.path().join("old")).unwrap();
        std::os::unix::fs::symlink(dir.path().join("victim"), requests).unwrap();
        assert!(remove(&layout).is_err());
        assert!(victim.is_dir());
    }
}

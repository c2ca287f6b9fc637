//! The request file. The gateway or the sync agent requests a release, and the run that serves the request removes the
//! file.
//!
//! The writers are not root, so the content is untrusted. A request can name a version, but cannot waive a policy.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

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
    read_untrusted(&path).and_then(|text| parse(&text)).map_or(RequestFile::Invalid, RequestFile::Valid)
}

/// Reads the first `MAX_REQUEST_BYTES` of a file that another user can write; `None` if it is not a readable regular
/// file. A symbolic link is not followed, and a FIFO does not block.
pub fn read_untrusted(path: &Path) -> Option<Vec<u8>> {
    let flags = nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    file.metadata().ok().filter(std::fs::Metadata::is_file)?;
    let mut text = Vec::new();
    file.take(MAX_REQUEST_BYTES).read_to_end(&mut text).ok()?;
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

pub fn remove(layout: &Layout) -> Result<(), FileError> {
    fsx::remove_if_exists(&layout.request("update"))
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
}

//! Files modified through a memory map: the file system updates timestamps only when a clean page becomes dirty.

use std::io::Read;
use std::process::{Command, Stdio};

use super::*;

/// Increments a counter in a mapped page, without pauses, until stdin is closed.
const WRITER: &str = r#"
import mmap, os, sys
with open(sys.argv[1], "r+b") as file:
    page = mmap.mmap(file.fileno(), mmap.PAGESIZE)
os.set_blocking(0, False)
print("ready", flush=True)
n = 0
while True:
    n += 1
    page[0:8] = n.to_bytes(8, "little")
    if n % 1000 == 0:
        try:
            if not os.read(0, 1):
                break
        except BlockingIOError:
            pass
"#;
/// File system type of tmpfs, which doesn't update timestamps on writes through a memory map.
const TMPFS_MAGIC: i64 = 0x0102_1994;

#[tokio::test(flavor = "multi_thread")]
async fn save_detects_last_write_through_memory_map() {
    // The default temporary directory may be on tmpfs.
    let home = tempfile::tempdir_in("/var/tmp").unwrap();
    if rustix::fs::statfs(home.path()).unwrap().f_type == TMPFS_MAGIC {
        kit::skip::record("tmpfs in /var/tmp doesn't update timestamps on writes through a memory map");
        return;
    }
    let mut fixture = Fixture::new().await;
    fixture.saver.options_mut().home = home.path().to_owned();
    let path = home.path().join("mapped");
    for round in 0..4 {
        fs::write(&path, [0; 8192]).unwrap();
        let mut writer = Command::new("python3")
            .args(["-c", WRITER])
            .arg(&path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        writer.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
        fixture.save().await;
        drop(writer.stdin.take());
        assert!(writer.wait().unwrap().success());
        let saved = fixture.save().await;
        let (target, _) = fixture.restore(&saved.snapshot).await;
        let restored = fs::read(target.path().join("mapped")).unwrap();
        assert!(restored == fs::read(&path).unwrap(), "round {round}: the last writes were not saved");
    }
}

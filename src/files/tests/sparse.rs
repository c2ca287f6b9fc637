//! Restored sparse files keep their holes and take up no more space than the originals.

use super::*;
use crate::history::History;

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn restored_sparse_file_keeps_holes_and_allocated_size() {
    let mut fixture = Fixture::new().await;
    let path = fixture.write("image", "");
    let image = File::options().write(true).open(&path).unwrap();
    image.set_len(64 * MIB).unwrap();
    for position in 0..128 {
        image.write_all_at(&random_bytes(4096), position * MIB / 2).unwrap();
    }
    image.sync_all().unwrap();
    let allocated = |path: &Path| fs::metadata(path).unwrap().blocks() * 512;
    assert!(allocated(&path) < 2 * MIB, "the file system supports holes");
    let saved = fixture.save().await;
    let repository = fixture.open(&fixture.key).await.unwrap().unwrap();
    let history = History::open(repository).await.unwrap();
    let node = history.find(&saved.snapshot, Path::new("image")).await.unwrap().unwrap().node;
    assert_eq!((node.size, node.allocated_bytes), (64 * MIB, Some(allocated(&path))));
    let (target, restored) = fixture.restore(&saved.snapshot).await;
    assert_eq!(restored.files, 1);
    let copy = target.path().join("image");
    assert!(fs::read(&copy).unwrap() == fs::read(&path).unwrap(), "the content differs");
    assert!(allocated(&copy) < 2 * MIB, "{} bytes", allocated(&copy));
}

//! Tests bundles built from small inputs: their content and reproducibility.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;

fn fake_svc(dir: &Path) -> PathBuf {
    let path = dir.join("fake");
    let script =
        "#!/bin/sh\ncase $1 in --list) echo svc-a; echo svcctl;; *) echo 'svc 0.1.0 (commit x, y)';; esac\n";
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// Returns each entry's mode, and its content or link target, by path.
fn unpack(bundle: &Bundle) -> BTreeMap<String, (u32, String)> {
    let file = File::open(bundle.dir.join(ARCHIVE)).unwrap();
    let mut archive = tar::Archive::new(flate2::bufread::GzDecoder::new(io::BufReader::new(file)));
    let mut entries = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        assert_eq!((entry.header().mtime().unwrap(), entry.header().uid().unwrap()), (0, 0));
        let path = entry.path().unwrap().display().to_string();
        let mode = entry.header().mode().unwrap();
        let link = entry.link_name().unwrap().map(|link| link.display().to_string());
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        entries.insert(path, (mode, link.unwrap_or_else(|| String::from_utf8_lossy(&content).into_owned())));
    }
    entries
}

fn write(path: &Path, content: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

/// Builds a bundle with every kind of part. The shell's files are created in the order of `names`.
fn build_full(dir: &Path, names: [&str; 3]) -> Bundle {
    for name in names {
        write(&dir.join("shell/assets").join(name), name);
    }
    write(&dir.join("apps/a/svc.json"), r#"{"slug": "a", "version": "2.3.4"}"#);
    write(&dir.join("apps/a/dist/index.html"), "<p>a");
    write(&dir.join("svc-bridge/index.js"), "export {};");
    write(&dir.join("agents/claude/bin/claude"), "#!/bin/sh\n");
    write(&dir.join("node/bin/node"), "#!/bin/sh\n");
    fs::set_permissions(dir.join("node/bin/node"), fs::Permissions::from_mode(0o700)).unwrap();
    symlink("node", dir.join("node/bin/nodejs")).unwrap();
    write(&dir.join("units/system/svc-a.service"), "[Service]\n");
    write(&dir.join("key.pem"), include_str!("ed25519-test-only.txt"));
    let part = |name: &str, version: &str| BundlePart {
        name: name.to_owned(),
        version: version.to_owned(),
        dir: dir.join(name),
    };
    let mut options = Options::new(&fake_svc(dir), "v1", &dir.join("out")).unwrap();
    options.systemd = dir.join("units");
    options.apps = Apps::Built(dir.join("apps"));
    options.shell = Some(part("shell", "1.0.0"));
    options.packages = vec![part("svc-bridge", "0.5.0")];
    options.runtime = vec![part("node", "24.1.0"), part("agents/claude", "2.1.0")];
    options.signing_keys = vec![dir.join("key.pem")];
    options.created_at = Timestamp::from_second(1_700_000_000).unwrap();
    options.valid_days = 36_500;
    build(&options).unwrap()
}

#[test]
fn build_rejects_expired_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = Options::new(&fake_svc(dir.path()), "v1", &dir.path().join("out")).unwrap();
    options.created_at = Timestamp::UNIX_EPOCH;
    build(&options).unwrap();
    write(&dir.path().join("key.pem"), include_str!("ed25519-test-only.txt"));
    options.signing_keys = vec![dir.path().join("key.pem")];
    let error = build(&options).unwrap_err().to_string();
    assert!(error.contains("1971-01-01") && error.contains("SOURCE_DATE_EPOCH"), "{error}");
    assert!(error.contains("--valid-days"), "{error}");
    assert!(!options.out.join(format!("{ARCHIVE}.json.sig")).exists());
}

#[test]
fn build_is_reproducible() {
    let (first_dir, second_dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = build_full(first_dir.path(), ["a", "b", "c"]);
    let second = build_full(second_dir.path(), ["c", "a", "b"]);
    for suffix in ["", ".sha256", ".json", ".json.sig"] {
        let read = |bundle: &Bundle| fs::read(bundle.dir.join(format!("{ARCHIVE}{suffix}"))).unwrap();
        assert!(read(&first) == read(&second), "{suffix}");
    }
    let bytes = fs::read(first.dir.join(ARCHIVE)).unwrap();
    assert_eq!(hex::encode(Sha256::digest(&bytes)), first.sha256);
    assert_eq!(bytes.len() as u64, first.size_bytes);
}

#[test]
fn build_includes_and_lists_every_part() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = build_full(dir.path(), ["a", "b", "c"]);
    let entries = unpack(&bundle);
    let entry = |path: &str| entries[path].clone();
    assert_eq!(entry("bin/svc-a"), (0o777, "svc".to_owned()));
    assert_eq!(entry("bin/svc").0, 0o755);
    assert_eq!(entry("app/apps/a/dist/index.html"), (0o644, "<p>a".to_owned()));
    assert_eq!(entry("app/shell/assets/b"), (0o644, "b".to_owned()));
    assert_eq!(entry("runtime/node/bin/node").0, 0o755);
    assert_eq!(entry("runtime/node/bin/nodejs"), (0o777, "node".to_owned()));
    assert_eq!(entry("runtime/agents/bin/claude"), (0o777, "../claude/bin/claude".to_owned()));
    assert_eq!(entry("app/packages/svc-bridge/index.js"), (0o644, "export {};".to_owned()));
    assert_eq!(entry("systemd/system/svc-a.service"), (0o644, "[Service]\n".to_owned()));
    let release: serde_json::Value = serde_json::from_str(&entry("release.json").1).unwrap();
    assert_eq!(release["imageVersion"], "v1");
    assert_eq!(release["createdAt"], "2023-11-14T22:13:20.000Z");
    let component = |name, version, path| serde_json::json!({"name": name, "version": version, "path": path});
    let expected = [
        component("svc", "0.1.0", "bin/svc"),
        component("a", "2.3.4", "app/apps/a"),
        component("shell", "1.0.0", "app/shell"),
        component("svc-bridge", "0.5.0", "app/packages/svc-bridge"),
        component("node", "24.1.0", "runtime/node"),
        component("agents/claude", "2.1.0", "runtime/agents/claude"),
    ];
    assert_eq!(release["components"], serde_json::Value::from(expected.to_vec()));
}

#[test]
fn manifest_describes_archive_and_is_signed() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = build_full(dir.path(), ["a", "b", "c"]);
    let read = |suffix: &str| fs::read_to_string(bundle.dir.join(format!("{ARCHIVE}{suffix}"))).unwrap();
    let manifest: serde_json::Value = serde_json::from_str(&read(".json")).unwrap();
    assert_eq!(manifest["sha256"], *bundle.sha256);
    assert_eq!(manifest["sizeBytes"], bundle.size_bytes);
    assert_eq!(manifest["expiresAt"], "2123-10-21T22:13:20.000Z");
    let key = SigningKey::read(&dir.path().join("key.pem")).unwrap();
    assert_eq!(read(".json.sig"), key.signature_line(read(".json").as_bytes()));
    assert_eq!(read(".sha256"), format!("{}  {ARCHIVE}\n", bundle.sha256));

    // Without a key, an earlier build's signature is removed.
    let rebuilt = build_minimal(&dir.path().join("fake"), "v2", &bundle.dir).unwrap();
    assert!(!rebuilt.dir.join(format!("{ARCHIVE}.json.sig")).exists());
}

#[test]
fn removed_parts_are_listed_and_must_not_be_bundled() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = Options::new(&fake_svc(dir.path()), "v1", &dir.path().join("out")).unwrap();
    options.removes = vec!["code-server".to_owned(), "agents/claude".to_owned()];
    build(&options).unwrap();
    let manifest = fs::read(options.out.join(format!("{ARCHIVE}.json"))).unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    assert_eq!(manifest["removes"], serde_json::json!(["code-server", "agents/claude"]));
    for (part, reason) in [
        ("notes", "the bundle contains notes"),
        ("shell", "cannot be removed"),
        ("postgres", "cannot be removed"),
    ] {
        options.removes = vec![part.to_owned()];
        let error = build(&options).unwrap_err().to_string();
        assert!(error.contains(reason), "{part}: {error}");
    }
}

#[test]
fn minimal_bundle_has_kit_apps_and_all_directories() {
    let dir = tempfile::tempdir().unwrap();
    let entries = unpack(&build_minimal(&fake_svc(dir.path()), "v1", &dir.path().join("out")).unwrap());
    for path in [
        "app/apps/notes/svc.json",
        "app/apps/notes/dist/main.js",
        "app/apps/tasks/dist/index.html",
        "release.json",
        "runtime/",
        "systemd/",
    ] {
        assert!(entries.contains_key(path), "{path}: {:?}", entries.keys());
    }
    let units = project_dir().join("systemd/system");
    for unit in fs::read_dir(units).into_iter().flatten() {
        let name = unit.unwrap().file_name().into_string().unwrap();
        assert!(entries.contains_key(&format!("systemd/system/{name}")), "{name}");
    }
}

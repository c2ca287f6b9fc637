//! A package's staging directory: files from `packaging/`, the binary, and its manual pages and completions.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use flate2::{Compression, GzBuilder};

use super::{Options, architecture};
use crate::child;

const TIMEOUT: Duration = Duration::from_secs(60);
const MAINTAINER: &str = "svc developers <svc@localhost.invalid>";
const PROGRAM: &str = "usr/lib/svc/svc";
/// The completion file for each shell.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/svcctl"),
    ("zsh", "usr/share/zsh/vendor-completions/_svcctl"),
    ("fish", "usr/share/fish/vendor_completions.d/svcctl.fish"),
];

/// Fills the empty directory `stage` with everything that the package `name` contains.
pub fn fill_stage(stage: &Path, options: &Options, name: &str, sbom_json: &str, epoch: &str) -> Result<()> {
    let dir = name.strip_prefix("svc-").unwrap_or(name);
    copy_tree(&options.source.join("packaging").join(dir), stage)?;
    let program = stage.join(PROGRAM);
    make_parent(&program)?;
    fs::copy(&options.svc, &program).with_context(|| format!("cannot copy {}", options.svc.display()))?;
    set_mode(&program, 0o755)?;
    make_parent(&stage.join("usr/bin/svcctl"))?;
    symlink("../lib/svc/svc", stage.join("usr/bin/svcctl"))?;
    if name == "svc-host" {
        copy_systemd_files(&options.source.join("systemd"), stage)?;
    }
    write_pages_and_completions(&program, name, stage)?;
    write_documents(stage, options, name, sbom_json, epoch)?;
    compress_pages(&stage.join("usr/share/man"))?;
    write_control(stage, &options.version)?;
    normalize(stage, Duration::from_secs(epoch.parse().context("SOURCE_DATE_EPOCH is not a number")?))
}

/// Copies the host's systemd units, and its sysusers.d and tmpfiles.d files, which are the same as in a bundle.
fn copy_systemd_files(from: &Path, stage: &Path) -> Result<()> {
    for (dir, target) in [
        ("system", "usr/lib/systemd/system"),
        ("sysusers.d", "usr/lib/sysusers.d"),
        ("tmpfiles.d", "usr/lib/tmpfiles.d"),
    ] {
        copy_tree(&from.join(dir), &stage.join(target))?;
    }
    Ok(())
}

/// Writes manual pages for this package's applets, and completions.
fn write_pages_and_completions(program: &Path, name: &str, stage: &Path) -> Result<()> {
    let pages = tempfile::tempdir()?;
    let mut list = Command::new(program);
    list.arg("--list").env_clear();
    for applet in child::run(list, TIMEOUT)?.lines() {
        let is_platform = applet == "svc-platform";
        if applet != "svcctl" && is_platform != (name == "svc-platform") {
            continue;
        }
        let mut write = Command::new(program);
        write.args([applet, "--write-man"]).arg(pages.path()).env_clear();
        child::run(write, TIMEOUT).with_context(|| format!("cannot write the manual pages for {applet}"))?;
    }
    for entry in fs::read_dir(pages.path())? {
        let page = entry?.path();
        let section =
            page.extension().and_then(|section| section.to_str()).context("a manual page has no section")?;
        let target = stage.join(format!("usr/share/man/man{section}"));
        fs::create_dir_all(&target)?;
        fs::copy(&page, target.join(page.file_name().context("a manual page has no name")?))?;
    }
    for (shell, target) in COMPLETIONS {
        let mut print = Command::new(program);
        print.args(["svcctl", "completions", shell]).env_clear();
        let script = child::run(print, TIMEOUT)?;
        let target = stage.join(target);
        make_parent(&target)?;
        fs::write(target, script)?;
    }
    Ok(())
}

fn write_documents(stage: &Path, options: &Options, name: &str, sbom_json: &str, epoch: &str) -> Result<()> {
    let dir = stage.join("usr/share/doc").join(name);
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("svc.cdx.json"), sbom_json)?;
    let copyright = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\
                     Upstream-Name: svc\n\nFiles: *\nCopyright: 2026 the svc developers\nLicense: Apache-2.0\n \
                     On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.\nComment:\n \
                     Linked components and their licenses are listed in svc.cdx.json.\n";
    fs::write(dir.join("copyright"), copyright)?;
    let changes = fs::read(options.source.join("CHANGELOG.md")).context("cannot read CHANGELOG.md")?;
    gzip(&changes, &dir.join("CHANGELOG.md.gz"))?;
    let version = &options.version;
    let entry = format!(
        "{name} ({version}) stable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- {MAINTAINER}  {}\n",
        format_date(epoch)?
    );
    gzip(entry.as_bytes(), &dir.join("changelog.gz"))
}

/// Formats a date for a Debian changelog (RFC 5322).
fn format_date(epoch: &str) -> Result<String> {
    let time = jiff::Timestamp::from_second(epoch.parse().context("SOURCE_DATE_EPOCH is not a number")?)?;
    Ok(jiff::fmt::rfc2822::to_string(&time.to_zoned(jiff::tz::TimeZone::UTC))?)
}

fn compress_pages(dir: &Path) -> Result<()> {
    for page in list_files(dir)? {
        if page.extension().is_some_and(|extension| extension == "gz") {
            continue;
        }
        let text = fs::read(&page)?;
        gzip(&text, &page.with_added_extension("gz"))?;
        fs::remove_file(page)?;
    }
    Ok(())
}

/// Writes `content` to a gzip file without a name or time in its header.
fn gzip(content: &[u8], to: &Path) -> Result<()> {
    let mut packed = GzBuilder::new().write(fs::File::create(to)?, Compression::best());
    packed.write_all(content)?;
    packed.finish()?;
    Ok(())
}

fn write_control(stage: &Path, version: &str) -> Result<()> {
    let size: u64 = list_files(stage)?
        .iter()
        .filter_map(|path| path.symlink_metadata().ok())
        .map(|meta| meta.len())
        .sum();
    let path = stage.join("DEBIAN/control");
    let text = fs::read_to_string(&path).context("cannot read DEBIAN/control")?;
    let text = text
        .replace("@VERSION@", version)
        .replace("@ARCH@", &architecture()?)
        .replace("@SIZE@", &size.div_ceil(1024).to_string());
    // The maintainer's address contains the only remaining `@`.
    ensure!(
        !text.contains('@') || text.matches('@').count() == 1,
        "DEBIAN/control has an unresolved placeholder"
    );
    fs::write(path, text)?;
    Ok(())
}

/// Sets modes that do not depend on the umask, and the same modification time for all files and directories.
fn normalize(stage: &Path, date: Duration) -> Result<()> {
    let modified = SystemTime::UNIX_EPOCH + date;
    for path in list_files(stage)? {
        let meta = path.symlink_metadata()?;
        if meta.is_symlink() {
            continue;
        }
        let relative = path.strip_prefix(stage)?;
        let is_script = relative.parent() == Some(Path::new("DEBIAN")) && fs::read(&path)?.starts_with(b"#!");
        let mode = match relative {
            _ if is_script || relative == Path::new(PROGRAM) => 0o755,
            relative if relative.starts_with("etc/svc") => 0o640,
            _ => 0o644,
        };
        set_mode(&path, mode)?;
        fs::File::options().append(true).open(&path)?.set_modified(modified)?;
    }
    for dir in list_directories(stage)? {
        set_mode(&dir, if dir.ends_with("etc/svc") { 0o750 } else { 0o755 })?;
        fs::File::open(&dir)?.set_modified(modified)?;
    }
    Ok(())
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    for path in list_files(from).with_context(|| format!("cannot read {}", from.display()))? {
        let target = to.join(path.strip_prefix(from)?);
        make_parent(&target)?;
        fs::copy(&path, &target)?;
    }
    Ok(())
}

/// Lists all files and links under `dir`, sorted.
fn list_files(dir: &Path) -> Result<Vec<PathBuf>> {
    Ok(walk(dir)?.into_iter().filter(|path| path.is_symlink() || !path.is_dir()).collect())
}

/// Lists all directories under `dir` and `dir` itself, children first.
fn list_directories(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut dirs: Vec<_> =
        walk(dir)?.into_iter().filter(|path| path.is_dir() && !path.is_symlink()).collect();
    dirs.reverse();
    dirs.push(dir.to_owned());
    Ok(dirs)
}

fn walk(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    entries.sort();
    let mut paths = Vec::new();
    for path in entries {
        paths.push(path.clone());
        if path.is_dir() && !path.is_symlink() {
            paths.extend(walk(&path)?);
        }
    }
    Ok(paths)
}

fn make_parent(path: &Path) -> Result<()> {
    Ok(fs::create_dir_all(path.parent().context("the path has no parent")?)?)
}

fn set_mode(path: &Path, bits: u32) -> Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(bits)).with_context(|| path.display().to_string())
}

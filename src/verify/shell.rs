//! Checks the served shell: reads its page and all scripts and styles that the page can load, without running them.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use url::Url;

use super::host_client::{HostClient, HostResponse};
use super::scan;
use svc_base::diagnosis::{Finding, Findings};
use svc_base::quantity::pluralize;

const MAX_FILES: usize = 400;
const MAX_TOTAL_BYTES: usize = 96 << 20;
/// Maximum number of distinct script and style names in one file.
const MAX_NAMES_PER_FILE: usize = 2000;
/// Maximum number of distinct URLs that the files refer to, including URLs that turn out not to be files.
const MAX_REFERENCES: usize = 4000;
/// Calls to the legacy route contain this text, whether their URL is relative or absolute.
const LEGACY_API_PATH: &str = "api/canvas";
/// The page's `meta` that declares where canvas gestures may begin.
const GESTURES_META: &str = "svc-canvas-gestures";
const GESTURES_ON_SURFACE: &str = "surface";
const PLACEHOLDER_CHECK: &str = "placeholder-host";
const LEGACY_CHECK: &str = "legacy-canvas";
const GESTURES_CHECK: &str = "canvas-gestures";

/// A loaded file of the shell.
struct ShellFile {
    url: Url,
    text: String,
}

/// Checks the shell. If it cannot be loaded, the checks of its files are reported as skipped.
pub async fn check_shell(host: &HostClient, timeout: Duration) -> Vec<Finding> {
    let findings = Findings::new("shell");
    let next = "run `systemctl status svc-shell` and `journalctl -u svc-shell -n 50` on the host";
    let loaded = match tokio::time::timeout(timeout, load_shell(host)).await {
        Ok(loaded) => loaded,
        Err(_) => Err(format!("the shell did not load within {} s", timeout.as_secs())),
    };
    let files = match loaded {
        Ok(files) => files,
        Err(reason) => {
            let mut list = findings.problem(reason, next).into_list();
            for check in [PLACEHOLDER_CHECK, LEGACY_CHECK, GESTURES_CHECK] {
                list.extend(Findings::new(check).skipped("the shell could not be loaded").into_list());
            }
            return list;
        }
    };
    let bytes: usize = files.iter().map(|file| file.text.len()).sum();
    let summary = format!("its page and {}, {} KiB", pluralize(files.len() as u64 - 1, "file"), bytes >> 10);
    // Scanning megabytes of text must not block other tasks on this thread.
    let checks = tokio::task::spawn_blocking(move || {
        [check_placeholder(&files), check_legacy_calls(&files), check_gestures(&files)]
    });
    match checks.await {
        Ok(checks) => {
            let mut list = findings.ok(summary).into_list();
            list.extend(checks.into_iter().flat_map(Findings::into_list));
            list
        }
        Err(error) => findings.problem(format!("{summary}: not checked: {error}"), next).into_list(),
    }
}

/// Loads the page and, transitively, all files that it refers to.
async fn load_shell(host: &HostClient) -> Result<Vec<ShellFile>, String> {
    let response = host.get(host.base(), "text/html").await?;
    if !response.status.is_success() || !response.content_type.starts_with("text/html") {
        return Err(format!("the page returned {} {}", response.status, response.content_type));
    }
    let mut seen: HashSet<Url> = HashSet::new();
    let mut queue: VecDeque<(Url, bool)> = VecDeque::new();
    let (page, names) = read_names(response, host.base()).await?;
    queue_files(host.base(), host.base(), &names, true, &mut seen, &mut queue)?;
    let mut has_script = false;
    let mut bytes = page.len();
    let mut files = vec![ShellFile { url: host.base().clone(), text: page }];
    while let Some((url, is_from_page)) = queue.pop_front() {
        let response = host.get(&url, "*/*").await?;
        // A quoted name in a script or style need not refer to a file, but a name in the page must.
        let is_script = response.content_type.contains("javascript");
        let is_code = is_script || response.content_type.contains("css");
        if !response.status.is_success() || !is_code {
            if is_from_page {
                return Err(format!("{} returned {} {}", url.path(), response.status, response.content_type));
            }
            continue;
        }
        if files.len() >= MAX_FILES || bytes + response.body.len() > MAX_TOTAL_BYTES {
            return Err(format!(
                "the shell has more than {MAX_FILES} files or is larger than {} MiB: some files were not read",
                MAX_TOTAL_BYTES >> 20
            ));
        }
        has_script |= is_script;
        let (text, names) = read_names(response, &url).await?;
        bytes += text.len();
        queue_files(host.base(), &url, &names, false, &mut seen, &mut queue)?;
        files.push(ShellFile { url, text });
    }
    if !has_script {
        return Err("the page refers to no script, so it is not the shell".to_owned());
    }
    Ok(files)
}

/// Returns a file's text, and the script and style names in it.
async fn read_names(response: HostResponse, url: &Url) -> Result<(String, Vec<String>), String> {
    let scan = tokio::task::spawn_blocking(move || {
        let text = response.text().into_owned();
        let names = scan::find_script_and_style_names(&text, MAX_NAMES_PER_FILE + 1);
        let names: Vec<_> = names.into_iter().map(str::to_owned).collect();
        (text, names)
    });
    let (text, names) = scan.await.map_err(|error| format!("{}: {error}", url.path()))?;
    if names.len() > MAX_NAMES_PER_FILE {
        return Err(format!("{} refers to more than {MAX_NAMES_PER_FILE} scripts and styles", url.path()));
    }
    Ok((text, names))
}

/// Queues the named files that are on the host itself and have not been queued before.
fn queue_files(
    base: &Url,
    referrer: &Url,
    names: &[String],
    is_from_page: bool,
    seen: &mut HashSet<Url>,
    queue: &mut VecDeque<(Url, bool)>,
) -> Result<(), String> {
    for name in names {
        let uses_referrer = name.starts_with('.') || name.starts_with('/') || name.contains("://");
        // Vite names lazily loaded chunks relative to the site's root, without a leading slash.
        let relative_to = if uses_referrer { referrer } else { base };
        if let Ok(url) = relative_to.join(name)
            && url.origin() == base.origin()
            && !seen.contains(&url)
        {
            if seen.len() >= MAX_REFERENCES {
                return Err(format!("the files refer to more than {MAX_REFERENCES} scripts and styles"));
            }
            seen.insert(url.clone());
            queue.push_back((url, is_from_page));
        }
    }
    Ok(())
}

fn check_placeholder(files: &[ShellFile]) -> Findings {
    let mut findings = Findings::new(PLACEHOLDER_CHECK);
    for file in files {
        if let Some(host) = scan::find_placeholder_host(&file.text) {
            findings = findings.problem(
                format!("{} contains {host}", file.url.path()),
                "the shell was built without NEXT_PUBLIC_IDP_PUBLISHABLE_KEY, or with an example key: rebuild the bundle \
                 with the identity provider's key",
            );
        }
    }
    findings.or_ok("neither the page nor its chunks contain a placeholder host")
}

fn check_legacy_calls(files: &[ShellFile]) -> Findings {
    let mut findings = Findings::new(LEGACY_CHECK);
    for file in files.iter().filter(|file| file.text.contains(LEGACY_API_PATH)) {
        findings = findings.problem(
            format!("{} contains {LEGACY_API_PATH}", file.url.path()),
            "the shell is outdated: rebuild the bundle from the current sources",
        );
    }
    findings.or_ok(format!("neither the page nor its chunks contain {LEGACY_API_PATH}"))
}

fn check_gestures(files: &[ShellFile]) -> Findings {
    let findings = Findings::new(GESTURES_CHECK);
    match meta_content(&files[0].text, GESTURES_META) {
        Some(area) if area == GESTURES_ON_SURFACE => findings.ok(
            "the shell declares that pan and zoom begin only on the canvas surface; verify it in a browser",
        ),
        Some(area) => findings.problem(
            format!("the shell declares that pan and zoom begin on {area:?}"),
            "pan and zoom would intercept gestures in app windows: rebuild the bundle from the current sources",
        ),
        None => findings
            .skipped(format!("the page has no <meta name=\"{GESTURES_META}\">: verify it in a browser")),
    }
}

/// Returns the content of the `meta` element with this name.
fn meta_content<'a>(page: &'a str, name: &str) -> Option<&'a str> {
    let tags = page.split('<').filter(|tag| tag.starts_with("meta"));
    let attribute = |tag: &'a str, name: &str| {
        let (_, rest) = tag.split_once(&format!("{name}=\""))?;
        rest.split('"').next()
    };
    tags.filter(|tag| attribute(tag, "name") == Some(name)).find_map(|tag| attribute(tag, "content"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meta_content_accepts_attributes_in_any_order() {
        let page =
            r#"<head><meta charset="utf-8"><meta content="surface" name="svc-canvas-gestures"></head>"#;
        assert_eq!(meta_content(page, GESTURES_META), Some("surface"));
        assert_eq!(meta_content("<p>svc-canvas-gestures</p>", GESTURES_META), None);
    }

    #[test]
    fn queue_files_resolves_names_like_a_browser() {
        let base = Url::parse("https://app.test/").unwrap();
        let chunk = base.join("/assets/main.js").unwrap();
        let (mut seen, mut queue) = (HashSet::new(), VecDeque::new());
        let names = ["./a.js", "assets/b.js", "https://cdn.test/c.js"].map(str::to_owned);
        queue_files(&base, &chunk, &names, false, &mut seen, &mut queue).unwrap();
        let paths: Vec<_> = queue.iter().map(|(url, _)| url.as_str()).collect();
        assert_eq!(paths, ["https://app.test/assets/a.js", "https://app.test/assets/b.js"]);
    }

    #[test]
    fn queue_files_refuses_too_many_names() {
        let base = Url::parse("https://app.test/").unwrap();
        let (mut seen, mut queue) = (HashSet::new(), VecDeque::new());
        let names: Vec<_> = (0..=MAX_REFERENCES).map(|n| format!("{n}.js")).collect();
        let result = queue_files(&base, &base, &names[1..], false, &mut seen, &mut queue);
        assert_eq!((result, queue.len()), (Ok(()), MAX_REFERENCES));
        assert!(
            queue_files(&base, &base, &names[1..], false, &mut seen, &mut queue).is_ok(),
            "counted queued names again"
        );
        assert!(queue_files(&base, &base, &names, false, &mut seen, &mut queue).is_err());
        assert_eq!((seen.len(), queue.len()), (MAX_REFERENCES, MAX_REFERENCES));
    }
}

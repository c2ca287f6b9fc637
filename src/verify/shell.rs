//! Checks of the served shell: reads its page and all scripts that the page can load, without running them.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use url::Url;

use super::scan;
use super::site::{Site, SiteResponse};
use svc_base::diagnosis::{Finding, Findings};

const MAX_FILES: usize = 400;
const MAX_TOTAL_BYTES: usize = 96 << 20;
/// Maximum different names of scripts and styles in one file.
const MAX_NAMES: usize = 2000;
/// Maximum different files that are named, including names that turn out to be no files.
const MAX_NAMED_FILES: usize = 4000;
/// Part of every call of the legacy route, however its URL is built.
const LEGACY: &str = "api/canvas";
/// The page's `meta` that declares where canvas gestures may begin.
const GESTURES: &str = "svc-canvas-gestures";
const FROM_SURFACE: &str = "surface";
const CHECKS: [&str; 3] = ["placeholder-host", "legacy-canvas", "canvas-gestures"];

/// A file of the shell.
struct ShellFile {
    url: Url,
    text: String,
}

pub async fn check_shell(site: &Site, deadline: Duration) -> Vec<Finding> {
    let findings = Findings::new("shell");
    let next = "systemctl status svc-shell; journalctl -u svc-shell -n 50 on the host";
    let loaded = match tokio::time::timeout(deadline, load(site)).await {
        Ok(loaded) => loaded,
        Err(_) => Err(format!("not read within {} s", deadline.as_secs())),
    };
    let parts = match loaded {
        Ok(parts) => parts,
        Err(why) => {
            let mut list = findings.problem(why, next).into_list();
            for check in CHECKS {
                list.extend(Findings::new(check).skipped("the shell could not be read").into_list());
            }
            return list;
        }
    };
    let bytes: usize = parts.iter().map(|part| part.text.len()).sum();
    let read = format!("its page and {} files, {} KiB", parts.len() - 1, bytes >> 10);
    // Megabytes of text: other tasks of this thread must not wait for it.
    let checks = tokio::task::spawn_blocking(move || {
        [check_placeholder(&parts), check_legacy_calls(&parts), check_gestures(&parts)]
    });
    match checks.await {
        Ok(checks) => {
            let mut list = findings.ok(read).into_list();
            list.extend(checks.into_iter().flat_map(Findings::into_list));
            list
        }
        Err(error) => findings.problem(format!("{read}: not checked: {error}"), next).into_list(),
    }
}

/// Loads the page and, transitively, all files that it refers to.
async fn load(site: &Site) -> Result<Vec<ShellFile>, String> {
    let front = site.get(site.base(), "text/html").await?;
    if !front.status.is_success() || !front.kind.starts_with("text/html") {
        return Err(format!("the page returned {} {}", front.status, front.kind));
    }
    let mut seen: HashSet<Url> = HashSet::new();
    let mut wanted: VecDeque<(Url, bool)> = VecDeque::new();
    let (page, names) = read_names(front, site.base()).await?;
    queue_files(site.base(), site.base(), &names, true, &mut seen, &mut wanted)?;
    if wanted.is_empty() {
        return Err("the page refers to no script, so it is not a shell".to_owned());
    }
    let mut bytes = page.len();
    let mut parts = vec![ShellFile { url: site.base().clone(), text: page }];
    while let Some((url, from_page)) = wanted.pop_front() {
        if parts.len() >= MAX_FILES || bytes >= MAX_TOTAL_BYTES {
            return Err(format!(
                "more than {MAX_FILES} files or {} MiB: some were not read",
                MAX_TOTAL_BYTES >> 20
            ));
        }
        let response = site.get(&url, "*/*").await?;
        // A quoted name in a script need not be a file; a name in the page must be one.
        let is_code = response.kind.contains("javascript") || response.kind.contains("css");
        if !response.status.is_success() || !is_code {
            if from_page {
                return Err(format!("{} returned {} {}", url.path(), response.status, response.kind));
            }
            continue;
        }
        let (text, names) = read_names(response, &url).await?;
        bytes += text.len();
        queue_files(site.base(), &url, &names, false, &mut seen, &mut wanted)?;
        parts.push(ShellFile { url, text });
    }
    Ok(parts)
}

/// The text of a file, and the names of scripts and styles in it.
async fn read_names(response: SiteResponse, url: &Url) -> Result<(String, Vec<String>), String> {
    let scan = tokio::task::spawn_blocking(move || {
        let text = response.text().into_owned();
        let names = scan::script_and_style_names(&text, MAX_NAMES + 1);
        let names: Vec<_> = names.into_iter().map(str::to_owned).collect();
        (text, names)
    });
    let (text, names) = scan.await.map_err(|error| format!("{}: {error}", url.path()))?;
    if names.len() > MAX_NAMES {
        return Err(format!("{} names more than {MAX_NAMES} scripts and styles", url.path()));
    }
    Ok((text, names))
}

fn queue_files(
    base: &Url,
    of: &Url,
    names: &[String],
    from_page: bool,
    seen: &mut HashSet<Url>,
    wanted: &mut VecDeque<(Url, bool)>,
) -> Result<(), String> {
    for name in names {
        let relative = name.starts_with('.') || name.starts_with('/') || name.contains("://");
        // Vite names lazily loaded chunks relative to the site's root, without a leading slash.
        let from = if relative { of } else { base };
        if let Ok(url) = from.join(name)
            && url.origin() == base.origin()
            && !seen.contains(&url)
        {
            if seen.len() >= MAX_NAMED_FILES {
                return Err(format!("more than {MAX_NAMED_FILES} scripts and styles are named"));
            }
            seen.insert(url.clone());
            wanted.push_back((url, from_page));
        }
    }
    Ok(())
}

fn check_placeholder(parts: &[ShellFile]) -> Findings {
    let mut findings = Findings::new(CHECKS[0]);
    for part in parts {
        if let Some(host) = scan::placeholder_host(&part.text) {
            findings = findings.problem(
                format!("{} names {host}", part.url.path()),
                "the shell was built without NEXT_PUBLIC_IDP_PUBLISHABLE_KEY, or with an example key: rebuild the bundle \
                 with the identity provider's key",
            );
        }
    }
    findings.or_ok("neither the page nor its chunks contain one")
}

fn check_legacy_calls(parts: &[ShellFile]) -> Findings {
    let mut findings = Findings::new(CHECKS[1]);
    for part in parts.iter().filter(|part| part.text.contains(LEGACY)) {
        findings = findings.problem(
            format!("{} names {LEGACY}", part.url.path()),
            "an old shell: rebuild the bundle from the current sources",
        );
    }
    findings.or_ok(format!("neither the page nor its chunks contain {LEGACY}"))
}

fn check_gestures(parts: &[ShellFile]) -> Findings {
    let findings = Findings::new(CHECKS[2]);
    match meta_content(&parts[0].text, GESTURES) {
        Some(from) if from == FROM_SURFACE => findings.ok(
            "the shell declares that pan and zoom begin only on the canvas surface; verify it in a browser",
        ),
        Some(from) => findings.problem(
            format!("the shell declares that pan and zoom begin on {from:?}"),
            "they would take gestures from the windows of apps: rebuild the bundle from the current sources",
        ),
        None => {
            findings.skipped(format!("the page has no <meta name=\"{GESTURES}\">: verify it in a browser"))
        }
    }
}

/// The content of the `meta` element with this name.
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
        assert_eq!(meta_content(page, GESTURES), Some("surface"));
        assert_eq!(meta_content("<p>svc-canvas-gestures</p>", GESTURES), None);
    }

    #[test]
    fn queue_files_resolves_names_like_a_browser() {
        let base = Url::parse("https://app.test/").unwrap();
        let chunk = base.join("/assets/main.js").unwrap();
        let (mut seen, mut wanted) = (HashSet::new(), VecDeque::new());
        let names = ["./a.js", "assets/b.js", "https://cdn.test/c.js"].map(str::to_owned);
        queue_files(&base, &chunk, &names, false, &mut seen, &mut wanted).unwrap();
        let paths: Vec<_> = wanted.iter().map(|(url, _)| url.as_str()).collect();
        assert_eq!(paths, ["https://app.test/assets/a.js", "https://app.test/assets/b.js"]);
    }

    #[test]
    fn queue_files_refuses_too_many_names() {
        let base = Url::parse("https://app.test/").unwrap();
        let (mut seen, mut wanted) = (HashSet::new(), VecDeque::new());
        let names: Vec<_> = (0..=MAX_NAMED_FILES).map(|n| format!("{n}.js")).collect();
        let queued = queue_files(&base, &base, &names[1..], false, &mut seen, &mut wanted);
        assert_eq!((queued, wanted.len()), (Ok(()), MAX_NAMED_FILES));
        assert!(queue_files(&base, &base, &names[1..], false, &mut seen, &mut wanted).is_ok(), "no new one");
        assert!(queue_files(&base, &base, &names, false, &mut seen, &mut wanted).is_err());
        assert_eq!((seen.len(), wanted.len()), (MAX_NAMED_FILES, MAX_NAMED_FILES));
    }
}

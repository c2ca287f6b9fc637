//! A minimal Rust lexer: blanks comments and literals, and finds tokens, tests and paths.

use super::ProjectFile;

/// Returns the code with comments and literals blanked; line numbers do not change.
pub fn blank_comments_and_literals(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut index = 0;
    while index < chars.len() {
        let end = match (chars[index], chars.get(index + 1)) {
            ('/', Some('/')) => find_char(&chars, index, '\n'),
            ('/', Some('*')) => end_of_block_comment(&chars, index),
            ('"', _) => end_of_string(&chars, index),
            ('r' | 'b' | 'c', _) if index == 0 || !is_word(chars[index - 1]) => {
                match end_of_prefixed_literal(&chars, index) {
                    Some(end) => end,
                    None => index,
                }
            }
            ('\'', _) => end_of_char_literal(&chars, index),
            _ => index,
        };
        if end == index {
            out.push(chars[index]);
            index += 1;
        } else {
            chars[index..end].iter().for_each(|&c| out.push(if c == '\n' { '\n' } else { ' ' }));
            index = end;
        }
    }
    out
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn find_char(chars: &[char], from: usize, expected: char) -> usize {
    (from..chars.len()).find(|&index| chars[index] == expected).unwrap_or(chars.len())
}

fn end_of_block_comment(chars: &[char], from: usize) -> usize {
    let mut depth = 0;
    let mut index = from;
    while index < chars.len() {
        match (chars[index], chars.get(index + 1)) {
            ('/', Some('*')) => (depth, index) = (depth + 1, index + 2),
            ('*', Some('/')) => (depth, index) = (depth - 1, index + 2),
            _ => index += 1,
        }
        if depth == 0 {
            return index;
        }
    }
    chars.len()
}

fn end_of_string(chars: &[char], from: usize) -> usize {
    let mut index = from + 1;
    while index < chars.len() && chars[index] != '"' {
        index += if chars[index] == '\\' { 2 } else { 1 };
    }
    (index + 1).min(chars.len())
}

/// Returns the end of a literal with a prefix (`r"`, `br#"`, `b"`, `c"`), if one starts here.
fn end_of_prefixed_literal(chars: &[char], from: usize) -> Option<usize> {
    let letters = chars[from..].iter().take(2).take_while(|c| "rbc".contains(**c)).count();
    let is_raw = chars[from..from + letters].contains(&'r');
    let hashes = chars[from + letters..].iter().take_while(|c| **c == '#').count();
    let quote = from + letters + hashes;
    if chars.get(quote) != Some(&'"') || (hashes > 0 && !is_raw) {
        return None;
    }
    if !is_raw {
        return Some(end_of_string(chars, quote));
    }
    let mut index = quote + 1;
    while index < chars.len() {
        if chars[index] == '"'
            && chars[index + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes
        {
            return Some(index + 1 + hashes);
        }
        index += 1;
    }
    Some(chars.len())
}

/// Returns the end of a character literal, or `from` if the quote starts a lifetime.
fn end_of_char_literal(chars: &[char], from: usize) -> usize {
    match (chars.get(from + 1), chars.get(from + 2)) {
        (Some('\\'), Some(_)) => find_char(chars, from + 3, '\'') + 1,
        (Some(_), Some('\'')) => from + 3,
        _ => from,
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    pub text: String,
    pub line: usize,
}

/// Splits code into identifiers, `::`, and single punctuation characters.
pub fn tokenize(code: &str) -> Vec<Token> {
    let mut tokens: Vec<Token> = Vec::new();
    for (number, line) in code.lines().enumerate() {
        let chars: Vec<char> = line.chars().collect();
        let mut index = 0;
        while index < chars.len() {
            let length = if is_word(chars[index]) {
                chars[index..].iter().take_while(|c| is_word(**c)).count()
            } else if chars[index] == ':' && chars.get(index + 1) == Some(&':') {
                2
            } else {
                1
            };
            if !chars[index].is_whitespace() {
                let text = chars[index..index + length].iter().collect();
                tokens.push(Token { text, line: number + 1 });
            }
            index += length;
        }
    }
    tokens
}

fn matches(tokens: &[Token], index: usize, expected: &[&str]) -> bool {
    tokens.len() >= index + expected.len()
        && tokens[index..].iter().zip(expected).all(|(token, text)| token.text == *text)
}

/// Returns the tokens without the items under `#[cfg(test)]`, and the names of the test modules in separate files.
pub fn without_tests(tokens: &[Token]) -> (Vec<Token>, Vec<String>) {
    let (mut code, mut modules) = (Vec::new(), Vec::new());
    let mut index = 0;
    while index < tokens.len() {
        if !is_test_attribute(tokens, index) {
            code.push(tokens[index].clone());
            index += 1;
            continue;
        }
        let from = index;
        let mut depth = 0;
        while index < tokens.len() {
            match tokens[index].text.as_str() {
                "{" | "(" | "[" => depth += 1,
                "}" | ")" | "]" => depth -= 1,
                _ => {}
            }
            let is_end = depth == 0 && matches!(tokens[index].text.as_str(), "}" | ";");
            index += 1;
            if is_end {
                break;
            }
        }
        let item = &tokens[from..index];
        if item.last().is_some_and(|token| token.text == ";")
            && let Some(keyword) = item.iter().position(|token| token.text == "mod")
        {
            modules.push(item[keyword + 1].text.clone());
        }
    }
    (code, modules)
}

fn is_test_attribute(tokens: &[Token], index: usize) -> bool {
    matches(tokens, index, &["#", "[", "cfg", "(", "test", ")", "]"])
        || matches(tokens, index, &["#", "[", "cfg", "(", "all", "(", "test", ","])
}

/// Returns the module path of a file in `src`, beginning with its package's directory.
pub fn module_path(path: &str) -> Option<Vec<String>> {
    let inner = path.strip_prefix("src/")?.strip_suffix(".rs")?;
    let mut names: Vec<String> = inner.split('/').map(str::to_owned).collect();
    if matches!(inner, "main" | "lib") || names.last().is_some_and(|name| name == "mod") {
        names.pop();
    }
    Some(names)
}

/// Returns modules in `src` that are compiled only for tests.
pub fn test_modules(files: &[ProjectFile]) -> Vec<Vec<String>> {
    let mut modules = Vec::new();
    for file in files {
        let Some(parent) = module_path(&file.path) else { continue };
        for name in without_tests(&tokenize(&blank_comments_and_literals(&file.text))).1 {
            modules.push(parent.iter().cloned().chain([name]).collect());
        }
        modules.extend(test_paths(file));
    }
    modules
}

/// Returns the paths of test modules whose file name differs from the module's: `#[cfg(test)]`, then `#[path = "…"]` on
/// the next line.
fn test_paths(file: &ProjectFile) -> Vec<Vec<String>> {
    let dir = file.path.rsplit_once('/').map_or("", |(dir, _)| dir);
    let lines: Vec<&str> = file.text.lines().map(str::trim).collect();
    let pairs = lines.windows(2).filter(|pair| pair[0] == "#[cfg(test)]");
    let names = pairs.filter_map(|pair| pair[1].strip_prefix("#[path = \"")?.strip_suffix("\"]"));
    names.filter_map(|name| module_path(&format!("{dir}/{name}"))).collect()
}

/// A path in the code, resolved so that it begins with its package's directory, and its line number.
#[derive(Debug, PartialEq, Eq)]
pub struct ResolvedPath {
    pub path: Vec<String>,
    pub line: usize,
}

/// Returns a file's paths that begin with `crate::`, `super::` or `svc_host::`, with `use` groups expanded.
pub fn resolved_paths(module: &[String], tokens: &[Token]) -> Vec<ResolvedPath> {
    let mut paths = Vec::new();
    // The inline modules open at the current token, each with its brace depth.
    let mut inline: Vec<(usize, String)> = Vec::new();
    let mut depth = 0;
    for (index, token) in tokens.iter().enumerate() {
        match token.text.as_str() {
            "{" => {
                depth += 1;
                if index >= 2 && tokens[index - 2].text == "mod" {
                    inline.push((depth, tokens[index - 1].text.clone()));
                }
            }
            "}" => {
                inline.pop_if(|(opened, _)| *opened == depth);
                depth = depth.saturating_sub(1);
            }
            "crate" | "super" | "svc_host"
                if matches(tokens, index + 1, &["::"]) && !follows_path(tokens, index) =>
            {
                let current_module: Vec<String> =
                    module.iter().cloned().chain(inline.iter().map(|(_, name)| name.clone())).collect();
                let mut prefix = match token.text.as_str() {
                    "crate" => current_module.iter().take(package_depth(&current_module)).cloned().collect(),
                    "svc_host" => vec!["host".to_owned()],
                    _ => parent(&current_module),
                };
                let mut next = index + 2;
                while matches(tokens, next, &["super", "::"]) {
                    prefix = parent(&prefix);
                    next += 2;
                }
                expand_use_tree(tokens, next, &prefix, &mut paths);
            }
            _ => {}
        }
    }
    paths
}

/// Returns how many leading names of a module path form its package's directory: two for `src/host/gateway` and
/// `src/platform/router`, one for every other package.
pub fn package_depth(module: &[String]) -> usize {
    let is_nested = |dirs: [&str; 2]| module.len() >= 2 && module[..2] == dirs;
    if is_nested(["host", "gateway"]) || is_nested(["platform", "router"]) { 2 } else { 1 }
}

fn follows_path(tokens: &[Token], index: usize) -> bool {
    index > 0 && tokens[index - 1].text == "::"
}

fn parent(path: &[String]) -> Vec<String> {
    path[..path.len().saturating_sub(1)].to_vec()
}

/// Expands the use tree that begins at `index` and returns the index after it.
fn expand_use_tree(
    tokens: &[Token],
    mut index: usize,
    prefix: &[String],
    paths: &mut Vec<ResolvedPath>,
) -> usize {
    let mut path = prefix.to_vec();
    let line = tokens.get(index).map_or(0, |token| token.line);
    loop {
        match tokens.get(index).map(|token| token.text.as_str()) {
            Some("{") => {
                index += 1;
                while index < tokens.len() && tokens[index].text != "}" {
                    index = expand_use_tree(tokens, index, &path, paths);
                    // Skip a rename: `as` and the new name.
                    while index < tokens.len() && !matches!(tokens[index].text.as_str(), "," | "}") {
                        index += 1;
                    }
                    index += usize::from(matches(tokens, index, &[","]));
                }
                return index + 1;
            }
            Some(word) if word.starts_with(is_word) && word != "self" => path.push(word.to_owned()),
            _ => {}
        }
        if !matches(tokens, index + 1, &["::"]) {
            paths.push(ResolvedPath { path, line });
            return index + 1;
        }
        index += 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(module: &[&str], text: &str) -> Vec<String> {
        let module: Vec<String> = module.iter().map(|name| (*name).to_owned()).collect();
        resolved_paths(&module, &tokenize(&blank_comments_and_literals(text)))
            .iter()
            .map(|resolved| resolved.path.join("::"))
            .collect()
    }

    #[test]
    fn comments_and_literals_are_blanked() {
        let text = "a // crate::b\n/* x /* y */ crate::c */ \"crate::d\" r#\"crate::\"e\"# b'\\'' '\"' d('a, \"\\\"f\")";
        let code = blank_comments_and_literals(text);
        assert!(!code.contains("crate") && !code.contains('f'), "{code}");
        assert!(code.starts_with("a ") && code.contains("d('a, "), "{code}");
        assert_eq!(code.lines().count(), text.lines().count());
    }

    #[test]
    fn resolved_paths_finds_paths_in_every_form() {
        assert_eq!(
            paths(
                &["a", "b"],
                "use crate::{c::{self, D as X,}, e as y};\nuse super::f;\nfn g(_: &crate::h::I) {}"
            ),
            ["a::c", "a::c::D", "a::e", "a::f", "a::h::I"]
        );
        assert_eq!(paths(&["a", "b"], "use super::super::c::*;"), ["c"]);
        assert_eq!(
            paths(&["a"], "mod t { use super::x; mod u { use super::super::y; } } use super::z;"),
            ["a::x", "a::y", "z"]
        );
        assert_eq!(
            paths(&["a"], "pub(crate) fn x() { $crate::b!(); let s = S { t: crate::u { v } }; }"),
            ["a::b", "a::u"]
        );
        assert_eq!(
            paths(&["host", "gateway", "a"], "use crate::b::c; use svc_host::{d, e::f};"),
            ["host::gateway::b::c", "host::d", "host::e::f"]
        );
        assert_eq!(paths(&["platform", "router", "a"], "use crate::b::c;"), ["platform::router::b::c"]);
    }

    #[test]
    fn tests_are_separated_from_code() {
        let text = "a\n#[cfg(test)]\nmod tests { fn x() { b } }\nc\n#[cfg(test)]\npub mod far;\n#[cfg(all(test, unix))]\n#[x]\nfn d([e; 3]) {}\nf";
        let (code, modules) = without_tests(&tokenize(&blank_comments_and_literals(text)));
        assert_eq!(code.iter().map(|token| token.text.as_str()).collect::<Vec<_>>(), ["a", "c", "f"]);
        assert_eq!(modules, ["far"]);
        assert_eq!(code[2].line, 10);
    }
}

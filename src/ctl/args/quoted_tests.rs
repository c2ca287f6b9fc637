//! Checks that every `svcctl …` command in the documentation and messages exists, with its options.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Arg, CommandFactory, Parser};

use super::Args;

/// How a command is delimited in the surrounding text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Quoting {
    /// By backticks, or on a separate line.
    Whole,
    /// Not at all: it ends at the first word that cannot be part of it.
    Open,
}

/// The mistake in the command, if any. Its first word is `svcctl`.
fn wrong(svcctl: &clap::Command, words: &str, quoting: Quoting) -> Option<String> {
    let mut command = svcctl;
    let (mut positionals, mut path) = (0, "svcctl".to_owned());
    let mut words = words.split_whitespace().skip(1).peekable();
    while let Some(raw) = words.next() {
        let is_last = raw.ends_with([':', ',', ';', '.', ')']) && quoting == Quoting::Open;
        let word = raw.trim_matches(['[', ']', ',', ';', ':', '.', '(', ')', '"', '\'']);
        if let Some(option) = word.strip_prefix("--") {
            let name = option.split(['=', '[']).next().unwrap_or_default();
            let Some(known) = command.get_arguments().find(|known| known.get_long() == Some(name)) else {
                return Some(format!("{path} has no --{name}"));
            };
            if takes_next(known) && !option.contains('=') {
                words.next();
            }
        } else if word.starts_with('-') || word == "…" {
        } else if command.has_subcommands() && !is_placeholder(word) {
            let found = word.split('|').map(|name| command.find_subcommand(name));
            match found.collect::<Option<Vec<_>>>().and_then(|found| found.into_iter().next()) {
                Some(found) => {
                    path = format!("{path} {word}");
                    command = found;
                }
                // Prose: `svcctl` is the subject of a sentence.
                None if quoting == Quoting::Open => return None,
                None => return Some(format!("{path} has no command {word}")),
            }
        } else if quoting == Quoting::Open && !is_placeholder(word) {
            return None;
        } else {
            positionals += 1;
            if positionals > command.get_positionals().count() && path != "svcctl" {
                return Some(format!("{path} takes no argument {word}"));
            }
        }
        if is_last {
            return None;
        }
    }
    None
}

fn takes_next(option: &Arg) -> bool {
    option.get_action().takes_values() && !option.is_require_equals_set()
}

/// Whether a word is a placeholder: `HANDLE`, `<machine>`, `{id}`, an id or a name of an example.
fn is_placeholder(word: &str) -> bool {
    word.starts_with(['<', '{'])
        || word.chars().next().is_some_and(|first| first.is_ascii_uppercase() || first.is_ascii_digit())
}

fn svcctl() -> clap::Command {
    let mut command = Args::command();
    command.build();
    command
}

/// The `svcctl` commands in a text.
fn commands(text: &str, language: Language) -> Vec<(String, Quoting)> {
    let text = joined(text, language);
    let mut found = Vec::new();
    for (at, _) in text.match_indices("svcctl ") {
        let (before, rest) = (&text[..at], &text[at..]);
        let line = rest.split('\n').next().unwrap_or_default();
        if before.ends_with('`') {
            let quoted = line.split(['`', '"']).next().unwrap_or_default();
            found.push((quoted.to_owned(), Quoting::Whole));
        } else if before.ends_with("$ ") {
            found.push((line.to_owned(), Quoting::Whole));
        } else if before.ends_with(['"', ' ', '(']) {
            found.push((line.split(['`', '"']).next().unwrap_or_default().to_owned(), Quoting::Open));
        }
    }
    found
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Language {
    Markdown,
    Rust,
}

/// Joins the lines of a literal, or of a quotation in a page, into one.
fn joined(text: &str, language: Language) -> String {
    let mut joined = String::new();
    for line in text.lines() {
        let (line, continues) = match line.strip_suffix('\\') {
            Some(line) => (line, true),
            None => (line, language == Language::Markdown && line.matches('`').count() % 2 == 1),
        };
        joined.push_str(if joined.ends_with('\n') { line } else { line.trim_start() });
        joined.push(if continues { ' ' } else { '\n' });
    }
    joined
}

fn texts() -> Vec<PathBuf> {
    fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|end| end == "rs" || end == "md") {
                found.push(path);
            }
        }
    }
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let mut found = vec![root.join("README.md"), root.join("ARCHITECTURE.md"), root.join("CONTRIBUTING.md")];
    walk(&root.join("src"), &mut found);
    walk(&root.join("docs"), &mut found);
    found.retain(|path| !path.ends_with("quoted_tests.rs"));
    found
}

#[test]
fn texts_name_only_existing_commands_and_options() {
    let (svcctl, mut mistakes, mut checked) = (svcctl(), Vec::new(), 0);
    for path in texts() {
        let is_page = path.extension().is_some_and(|end| end == "md");
        let language = if is_page { Language::Markdown } else { Language::Rust };
        for (command, quoting) in commands(&fs::read_to_string(&path).unwrap(), language) {
            checked += 1;
            mistakes.extend(
                wrong(&svcctl, &command, quoting)
                    .map(|why| format!("{}: `{command}`: {why}", path.display())),
            );
        }
    }
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
    assert!(checked > 150, "only {checked} commands were found");
}

/// Members of requests. Operators read messages in `svcctl`, which has options instead.
const MEMBERS: [&str; 8] = [
    "acceptLoss",
    "allowEmpty",
    "replaceFirst",
    "snapshotKey",
    "serverType",
    "imageVersion",
    "fallbackLocations",
    "with force",
];

/// The literals of a source file that are sentences, except those of the API's description.
fn sentences(text: &str) -> Vec<String> {
    let text = joined(text, Language::Rust);
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let is_description = |line: &str| ["summary: ", "about: "].iter().any(|name| line.contains(name));
    let lines = lines.filter(|line| !is_description(line));
    let literals = lines.flat_map(|line| line.split('"').skip(1).step_by(2));
    literals.filter(|literal| literal.contains(' ')).map(str::to_owned).collect()
}

#[test]
fn texts_name_options_instead_of_request_members() {
    let (mut mistakes, mut checked) = (Vec::new(), 0);
    for path in
        texts().into_iter().filter(|path| path.components().any(|part| part.as_os_str() == "platform"))
    {
        for sentence in sentences(&fs::read_to_string(&path).unwrap()) {
            checked += 1;
            let named = MEMBERS.iter().find(|member| sentence.contains(**member));
            mistakes.extend(named.map(|member| format!("{}: {member} in {sentence:?}", path.display())));
        }
    }
    assert!(mistakes.is_empty(), "{}", mistakes.join("\n"));
    assert!(checked > 500, "only {checked} texts were found");
    let found = sentences("    let why = \"Send acceptLoss \\\n        to go on\";");
    assert!(found.len() == 1 && found[0].starts_with("Send acceptLoss"), "{found:?}");
}

#[test]
fn mistakes_in_commands_are_detected() {
    let svcctl = svcctl();
    let mistakes = |text: &str| -> Vec<String> {
        let commands = commands(text, Language::Rust);
        commands.iter().filter_map(|(command, quoting)| wrong(&svcctl, command, *quoting)).collect()
    };
    for (text, part) in [
        ("`svcctl provision <user> --replace-first`", "has no --replace-first"),
        ("`svcctl backups list ada`", "has no command backups"),
        ("`svcctl backup take ada`", "has no command take"),
        ("`svcctl pointer show user_1 second`", "takes no argument second"),
        ("`svcctl recover {user} \\\n   --snapshots KEY`", "has no --snapshots"),
        ("\"svcctl backup now HANDLE --follow\"", "has no --follow"),
        ("$ svcctl delete ada --force", "has no --force"),
    ] {
        let found = mistakes(text);
        assert!(found.len() == 1 && found[0].contains(part), "{text}: {found:?}");
    }
    for text in [
        "`svcctl deploy status|pause|resume|abort [ID]`",
        "`svcctl recover --server-type`",
        "what svcctl says",
    ] {
        assert_eq!(mistakes(text), Vec::<String>::new(), "{text}");
    }
}

/// The examples in the help texts parse.
#[test]
fn help_examples_parse() {
    fn walk(command: &clap::Command) {
        let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        for line in after.lines() {
            let Some(example) = line.trim_start().strip_prefix("Example: ") else { continue };
            let example =
                example.split(" | ").next().unwrap_or_default().split(" >").next().unwrap_or_default();
            let example = example.replace("'disk errors'", "disk-errors");
            if let Err(error) = Args::try_parse_from(example.split_whitespace()) {
                panic!("{example}: {error}");
            }
        }
        command.get_subcommands().filter(|sub| sub.get_name() != "help").for_each(walk);
    }
    walk(&Args::command());
}

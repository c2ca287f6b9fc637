//! Checks that every `svcctl` command and option quoted in the docs or in a message exists.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{CommandFactory, Parser};
use kit::quoted_commands::{self, Language, join_lines};

use super::Args;

fn svcctl() -> clap::Command {
    let mut command = Args::command();
    command.build();
    command
}

fn text_files() -> Vec<PathBuf> {
    fn walk(dir: &Path, files: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, files);
            } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "md") {
                files.push(path);
            }
        }
    }
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let mut files = vec![root.join("README.md"), root.join("ARCHITECTURE.md"), root.join("CONTRIBUTING.md")];
    walk(&root.join("src"), &mut files);
    walk(&root.join("docs"), &mut files);
    files.retain(|path| !path.ends_with("quoted_command_tests.rs"));
    files
}

#[test]
fn quoted_commands_and_options_exist() {
    let (svcctl, mut errors, mut checked) = (svcctl(), Vec::new(), 0);
    for path in text_files() {
        let name = path.display().to_string();
        let Some(language) = Language::of_file(&name) else { continue };
        let quoted = quoted_commands::check(&svcctl, &fs::read_to_string(&path).unwrap(), language);
        checked += quoted.checked;
        errors.extend(quoted.errors.iter().map(|error| format!("{name}: {error}")));
    }
    assert!(errors.is_empty(), "{}", errors.join("\n"));
    assert!(checked > 150, "only {checked} commands found");
}

/// Request members (and a paraphrase of one) that messages must not mention, since operators set them with `svcctl`
/// options.
const REQUEST_MEMBERS: [&str; 8] = [
    "acceptLoss",
    "allowEmpty",
    "replaceFirst",
    "snapshotKey",
    "serverType",
    "imageVersion",
    "fallbackLocations",
    "with force",
];

/// Returns the string literals in a source file that contain a space. Skips lines with a `summary` or `about`, which
/// describe a route or program.
fn extract_sentences(text: &str) -> Vec<String> {
    let text = join_lines(text, Language::Rust);
    let lines = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let is_description = |line: &str| ["summary: ", "about: "].iter().any(|name| line.contains(name));
    let lines = lines.filter(|line| !is_description(line));
    let literals = lines.flat_map(|line| line.split('"').skip(1).step_by(2));
    literals.filter(|literal| literal.contains(' ')).map(str::to_owned).collect()
}

#[test]
fn messages_use_options_not_request_members() {
    let (mut errors, mut checked) = (Vec::new(), 0);
    for path in
        text_files().into_iter().filter(|path| path.components().any(|part| part.as_os_str() == "platform"))
    {
        for sentence in extract_sentences(&fs::read_to_string(&path).unwrap()) {
            checked += 1;
            let member = REQUEST_MEMBERS.iter().find(|member| sentence.contains(**member));
            errors.extend(member.map(|member| format!("{}: {member} in {sentence:?}", path.display())));
        }
    }
    assert!(errors.is_empty(), "{}", errors.join("\n"));
    assert!(checked > 500, "only {checked} messages found");
    let sentences = extract_sentences("    let error = \"Send acceptLoss \\\n        to continue\";");
    assert!(sentences.len() == 1 && sentences[0].starts_with("Send acceptLoss"), "{sentences:?}");
}

#[test]
fn check_detects_invalid_commands() {
    let svcctl = svcctl();
    let find_errors = |text: &str| quoted_commands::check(&svcctl, text, Language::Rust).errors;
    for (text, expected) in [
        ("`svcctl provision <user> --replace-first`", "has no --replace-first"),
        ("`svcctl backups list ada`", "has no command backups"),
        ("`svcctl backup take ada`", "has no command take"),
        ("`svcctl pointer show user_1 second`", "takes no argument second"),
        ("`svcctl recover {user} \\\n   --snapshots KEY`", "has no --snapshots"),
        ("\"svcctl backup now HANDLE --follow\"", "has no --follow"),
        ("$ svcctl delete ada --force", "has no --force"),
    ] {
        let errors = find_errors(text);
        assert!(errors.len() == 1 && errors[0].contains(expected), "{text}: {errors:?}");
    }
    for text in [
        "`svcctl deploy status|pause|resume|abort [ID]`",
        "`svcctl recover --server-type`",
        "what svcctl says",
    ] {
        assert_eq!(find_errors(text), Vec::<String>::new(), "{text}");
    }
}

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

//! Runs the tests/fuzz targets with libFuzzer: the same rules, with coverage-guided inputs. An environment variable
//! names the target, because libFuzzer parses the arguments.

#![no_main]

// `Target::cases` is unused here.
#[allow(dead_code)]
#[path = "../../fuzz/parsers/mod.rs"]
mod parsers;

use std::path::Path;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use parsers::Target;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

/// Number of valid documents that seed a fuzzing run, in addition to the corpus.
const SAMPLE_COUNT: usize = 24;
/// Environment variable that names the target.
const TARGET_VAR: &str = "SVC_FUZZ_TARGET";
/// Environment variable: if set, the program prints the names of all targets and exits.
const LIST_VAR: &str = "SVC_FUZZ_LIST";
/// Environment variable that names the directory for the samples.
const SAMPLES_DIR_VAR: &str = "SVC_FUZZ_SAMPLES";

/// The target's name, and the rule that must hold for any input.
type Rule = (&'static str, fn(&[u8]) -> Result<(), String>);

static RULE: OnceLock<Rule> = OnceLock::new();

fuzz_target!(
    init: {
        if std::env::var_os(LIST_VAR).is_some() {
            parsers::targets().iter().for_each(|target| println!("{}", target.name));
            std::process::exit(0);
        }
        let target = named_target();
        if let Some(dir) = std::env::var_os(SAMPLES_DIR_VAR) {
            write_samples(&target, Path::new(&dir));
        }
        RULE.get_or_init(|| (target.name, target.check_any));
    },
    |input: &[u8]| {
        let (name, check_any) = RULE.get().expect("libFuzzer has initialized the target");
        if let Err(rule) = check_any(input) {
            panic!("{name}: {rule}\ninput {:?}", String::from_utf8_lossy(input));
        }
    }
);

fn named_target() -> Target {
    let name = std::env::var(TARGET_VAR).unwrap_or_else(|error| panic!("{TARGET_VAR}: {error}"));
    let target = parsers::targets().into_iter().find(|target| target.name == name);
    target.unwrap_or_else(|| panic!("{name} is not a target in tests/fuzz/parsers"))
}

fn write_samples(target: &Target, dir: &Path) {
    let mut runner = TestRunner::deterministic();
    for index in 0..SAMPLE_COUNT {
        let sample = target.valid.new_tree(&mut runner).expect("the strategy has no filters").current();
        (target.check_valid)(&sample).unwrap_or_else(|rule| panic!("sample {index}: {rule}"));
        std::fs::write(dir.join(format!("sample-{index}")), sample).expect("cannot write a sample");
    }
}

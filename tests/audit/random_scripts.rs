//! Runs random shell scripts and checks that the file audit's log (`audit.jsonl`) contains exactly the changes found by
//! an observer that is independent of the watcher.

use anyhow::{Context, Result, ensure};
use kit::long_tests::Figures;

use super::home::{ADA, AuditedHome, differences, recorded_operations};

/// Generates reproducible pseudo-random scripts from a seed (splitmix64).
struct ScriptGenerator(u64);

impl ScriptGenerator {
    fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn next_below(&mut self, bound: u64) -> u64 {
        self.next_u64() % bound
    }

    fn pick<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[usize::try_from(self.next_below(choices.len() as u64)).expect("an index into a slice")]
    }

    fn pick_dir(&mut self) -> String {
        let depth = self.next_below(3);
        let mut path = String::from(".");
        for _ in 0..depth {
            path.push('/');
            path.push_str(self.pick(&["d1", "d2", "d3", "'d 4'", "$'d\\n5'", "$'d\\xff6'"]));
        }
        path
    }

    fn pick_file(&mut self) -> String {
        let dir = self.pick_dir();
        // Some names are also directory names, to trigger conflicts.
        let name = self.pick(&["f1", "f2", "f3", "f4", "'f 5'", "$'f\\n6'", "$'f\\xfe7'", "d1", "d2"]);
        format!("{dir}/{name}")
    }

    fn unique_text(&mut self) -> String {
        format!("{:016x}", self.next_u64())
    }

    /// Returns one command line. Contents never repeat, because the observer compares only contents.
    fn next_command(&mut self, can_touch: bool) -> String {
        let (f, g, d, e) = (self.pick_file(), self.pick_file(), self.pick_dir(), self.pick_dir());
        let (n, m) = (self.unique_text(), self.unique_text());
        match self.next_below(if can_touch { 34 } else { 31 }) {
            0..=3 => format!("echo {n} > {f}"),
            4 => format!("echo {n} >> {f}"),
            5 => format!("mkdir -p {d}/n{m}/x/y; echo {n} > {d}/n{m}/x/y/z"),
            6 => format!("mkdir -p {d}; echo {n} > {d}/f1"),
            7 => format!("mkdir -p {d} {e}"),
            8 => format!("rm -rf {d}/d1"),
            9 => format!("rm -rf {d}/d2 {e}/d3"),
            10 => format!("rm -f {f} {g}"),
            11 => format!("mv -f {f} {g}"),
            12 => format!("mv -fT {f} {g}"),
            13 => format!("mv -T {d}/d1 {e}/d2"),
            14 => format!("mv -T {d}/d1 {d}/t{n}; mv -T {e}/d2 {d}/d1; mv -T {d}/t{n} {e}/d2"),
            15 => format!("mv {f} {d}/t{n}; mv {g} {f}; mv {d}/t{n} {g}"),
            16 => format!("echo {n} > {f}.tmp; mv -f {f}.tmp {f}"),
            17 => format!("sed -i s/$/{n}/ {f}"),
            18 => format!("ln -s {n} {f}"),
            19 => format!("ln -sfn {n} {f}"),
            // The links are not deleted, because a write through a hard link that is created and deleted in the same
            // command is not detected.
            20 => format!("ln {f} ./k{m}"),
            21 => format!("ln {f} ./k{m}; echo {n} >> ./k{m}"),
            22 => format!("[ -s {f} ] && truncate -s +3 {f}; printf {n} | dd of={g} conv=notrunc bs=1"),
            23 => format!("cp {f} {g} && echo {n} >> {g}"),
            24 => format!("cp -a {d}/d1 {e}/c{n}; echo {m} > {e}/c{n}/f1"),
            25 => format!("mv {d}/d1 ../out/{n}; echo {m} > ../out/{n}/f2; mv -T ../out/{n} {e}/d1"),
            26 => format!("mv {f} ../out/{n}; mv ../out/{n} {g}"),
            27 => format!("rm -rf {f}; mkdir {f}; echo {n} > {f}/f1"),
            28 => format!("rm -rf {d}/d1; echo {n} > {d}/d1"),
            29 => format!("rm -rf {d}/d1; mkdir {d}/d1; echo {n} > {d}/d1/f1; echo {m} > {d}/d1/f2"),
            30 => format!(
                "echo {n} > {d}/gone; rm {d}/gone; mkdir {d}/g; echo {m} > {d}/g/x; rm -r {d}/g; ln -s ../out/{n} {d}/l{m}"
            ),
            31 => format!("touch -c {f}; chmod u+x {g}; chmod u-x {g}"),
            32 => format!("touch -cd 2001-01-01 {f} {d}"),
            _ => format!("chmod 700 {d}; chmod 755 {d}; cat {f}"),
        }
    }

    fn next_script(&mut self, can_touch: bool) -> String {
        // As docs/host/audit.md states, a write through `mmap` to a file that is also touched is not recorded.
        let is_mapping = self.next_below(12) == 0;
        let can_touch = can_touch && !is_mapping;
        let steps = 1 + self.next_below(14);
        let mut script: String = (0..steps).map(|_| format!("{}\n", self.next_command(can_touch))).collect();
        if is_mapping {
            let n = self.unique_text();
            script.push_str(&format!(
                "f=$(find . -path ./system -prune -o -type f -size +20c -print -quit); [ -z \"$f\" ] || python3 -c '\nimport mmap, sys\nf = open(sys.argv[1], \"r+b\"); m = mmap.mmap(f.fileno(), 0); m[:16] = b\"{n}\"' \"$f\"\n"
            ));
        }
        if self.next_below(6) == 0 {
            // Runs the script in a background process that the command waits for.
            script = format!("({script}) & wait\n");
        }
        format!("{script}true\n")
    }
}

fn run_scripts(seed: u64, count: u64, failpoints: &'static str) -> Result<Figures> {
    let mut home = AuditedHome::with_failpoints(failpoints)?;
    home.start_watcher()?;
    let mut figures = Figures::new("audit_random_scripts");
    for index in 0..count {
        let mut generator = ScriptGenerator(seed.wrapping_add(index));
        let script = generator.next_script(failpoints.is_empty());
        // A failure also depends on files from earlier scripts, so a replay must begin with the first script.
        let context = || format!("AUDIT_SEED={seed}, script {index}:\n{script}");
        if generator.next_below(8) == 0 {
            // Changes by the owner, which no hook reports.
            home.shell(&format!(
                "echo {0} > own-{0}; mkdir -p d1/own; echo {0} > f1",
                generator.unique_text()
            ))
            .ok();
        }
        let before = home.states()?;
        let entries = home.run(ADA, &format!("{{ {script}}} 2>/dev/null")).with_context(context)?;
        let after = home.states()?;
        let expected = differences(&before, &after);
        let actual = recorded_operations(&entries).with_context(context)?;
        let expected = expected.into_iter().map(|(path, op)| (path, op.to_owned())).collect();
        ensure!(actual == expected, "{}\n{}", context(), describe_difference(&actual, &expected));
        figures.fuzz_cases += 1;
        if index % 100 == 99 {
            home.shell("find . -mindepth 1 -maxdepth 1 ! -name system -exec rm -rf {} +; mkdir apps")?;
        }
    }
    Ok(figures)
}

type Operations = std::collections::BTreeMap<Vec<u8>, String>;

fn describe_difference(actual: &Operations, expected: &Operations) -> String {
    let only_in = |operations: &Operations, other: &Operations| -> Vec<String> {
        let unmatched = operations.iter().filter(|(path, op)| other.get(*path) != Some(op));
        unmatched.map(|(path, op)| format!("{op} {}", String::from_utf8_lossy(path))).collect()
    };
    format!("unexpected: {:#?}\nmissing: {:#?}", only_in(actual, expected), only_in(expected, actual))
}

/// Returns the seed of the first script; `AUDIT_SEED` sets it to replay a failure.
fn seed() -> Result<u64> {
    match std::env::var("AUDIT_SEED") {
        Ok(seed) => seed.parse().context("AUDIT_SEED is not a number"),
        Err(_) => Ok(u64::from(std::process::id()) << 20),
    }
}

#[test]
fn audit_log_matches_random_scripts() -> Result<()> {
    run_scripts(seed()?, 40, "").map(drop)
}

#[test]
fn audit_log_matches_random_scripts_with_full_scans() -> Result<()> {
    run_scripts(seed()?, 12, "watch.check=return(error)").map(drop)
}

#[test]
#[ignore = "takes minutes: for the long tests"]
fn long_audit_log_matches_a_thousand_random_scripts() -> Result<()> {
    let mut figures = run_scripts(seed()?, 1000, "")?;
    figures.fuzz_cases +=
        run_scripts(seed()?.wrapping_add(5000), 200, "watch.check=return(error)")?.fuzz_cases;
    figures.record()
}

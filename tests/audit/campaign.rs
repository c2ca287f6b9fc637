//! Random shell scripts, checked by an observer that is independent of the watcher: the record holds exactly the
//! changes that the observer finds.

use anyhow::{Context, Result, ensure};
use kit::long::Figures;

use super::home::{ADA, Home, differences, recorded};

/// A pseudo-random generator: the same seed gives the same numbers.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        // splitmix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn of(&mut self, sides: u64) -> u64 {
        self.roll() % sides
    }

    fn pick<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[usize::try_from(self.of(all.len() as u64)).expect("few")]
    }

    fn folder(&mut self) -> String {
        let depth = self.of(3);
        let mut path = String::from(".");
        for _ in 0..depth {
            path.push('/');
            path.push_str(self.pick(&["d1", "d2", "d3", "'d 4'", "$'d\\n5'", "$'d\\xff6'"]));
        }
        path
    }

    fn file(&mut self) -> String {
        let folder = self.folder();
        // Some names are those of folders elsewhere, to provoke conflicts.
        let name = self.pick(&["f1", "f2", "f3", "f4", "'f 5'", "$'f\\n6'", "$'f\\xfe7'", "d1", "d2"]);
        format!("{folder}/{name}")
    }

    fn unique(&mut self) -> String {
        format!("{:016x}", self.roll())
    }

    /// One step. Contents never repeat, because the observer compares only contents.
    fn step(&mut self, touches: bool) -> String {
        let (f, g, d, e) = (self.file(), self.file(), self.folder(), self.folder());
        let (n, m) = (self.unique(), self.unique());
        match self.of(if touches { 34 } else { 31 }) {
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
            // Only through names that remain: a write through a name that is created and deleted meanwhile is
            // invisible.
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

    fn script(&mut self, touches: bool) -> String {
        // The README lists a file that is mapped and touched in the same command as undetected.
        let is_mapping = self.of(12) == 0;
        let touches = touches && !is_mapping;
        let steps = 1 + self.of(14);
        let mut script: String = (0..steps).map(|_| format!("{}\n", self.step(touches))).collect();
        if is_mapping {
            let n = self.unique();
            script.push_str(&format!(
                "f=$(find . -path ./system -prune -o -type f -size +20c -print -quit); [ -z \"$f\" ] || python3 -c '\nimport mmap, sys\nf = open(sys.argv[1], \"r+b\"); m = mmap.mmap(f.fileno(), 0); m[:16] = b\"{n}\"' \"$f\"\n"
            ));
        }
        if self.of(6) == 0 {
            // Another process may still write the last of it.
            script = format!("({script}) & wait\n");
        }
        format!("{script}true\n")
    }
}

fn play(seed: u64, scripts: u64, failpoints: &'static str) -> Result<Figures> {
    let mut home = Home::with_failpoints(failpoints)?;
    home.watch()?;
    let mut figures = Figures::new("audit_campaign");
    for number in 0..scripts {
        let mut dice = Dice(seed.wrapping_add(number));
        let script = dice.script(failpoints.is_empty());
        let context = || format!("seed {}, script:\n{script}", seed.wrapping_add(number));
        if dice.of(8) == 0 {
            // Changes by the owner, which no hook reports.
            home.shell(&format!("echo {0} > own-{0}; mkdir -p d1/own; echo {0} > f1", dice.unique())).ok();
        }
        let before = home.states()?;
        let found = home.run(ADA, &format!("{{ {script}}} 2>/dev/null")).with_context(context)?;
        let after = home.states()?;
        // The marker is written by the test, not by the script.
        let mut expected = differences(&before, &after);
        expected.retain(|path, _| !path.starts_with(b"apps/marker"));
        let said = recorded(&found).with_context(context)?;
        let expected = expected.into_iter().map(|(path, op)| (path, op.to_owned())).collect();
        ensure!(said == expected, "{}\n{}", context(), describe_difference(&said, &expected));
        figures.fuzz_cases += 1;
        if number % 100 == 99 {
            home.shell("find . -mindepth 1 -maxdepth 1 ! -name system -exec rm -rf {} +; mkdir apps")?;
        }
    }
    Ok(figures)
}

type Operations = std::collections::BTreeMap<Vec<u8>, String>;

fn describe_difference(said: &Operations, expected: &Operations) -> String {
    let only = |one: &Operations, other: &Operations| -> Vec<String> {
        let mine = one.iter().filter(|(path, op)| other.get(*path) != Some(op));
        mine.map(|(path, op)| format!("{op} {}", String::from_utf8_lossy(path))).collect()
    };
    format!("invented: {:#?}\nmissed: {:#?}", only(said, expected), only(expected, said))
}

/// `AUDIT_SEED` replays the scripts of a failed run.
fn seed() -> Result<u64> {
    match std::env::var("AUDIT_SEED") {
        Ok(seed) => seed.parse().context("AUDIT_SEED"),
        Err(_) => Ok(u64::from(std::process::id()) << 20),
    }
}

#[test]
fn record_matches_changes_of_random_scripts() -> Result<()> {
    play(seed()?, 40, "").map(drop)
}

#[test]
fn record_matches_random_scripts_without_file_events() -> Result<()> {
    play(seed()?, 12, "watch.look=return(error)").map(drop)
}

#[test]
#[ignore = "minutes: for the long tests"]
fn long_record_matches_a_thousand_random_scripts() -> Result<()> {
    let mut figures = play(seed()?, 1000, "")?;
    figures.fuzz_cases += play(seed()?.wrapping_add(5000), 200, "watch.look=return(error)")?.fuzz_cases;
    figures.record()
}

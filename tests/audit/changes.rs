//! Tests that each kind of change is recorded.

use anyhow::Result;
use serde_json::json;

use super::home::{ADA, AuditedHome, BOB, path_of, summarize, to_os_str};

#[test]
fn command_is_recorded_by_its_net_changes() -> Result<()> {
    let home = AuditedHome::new()?;
    let logged = |script: &str| home.run(ADA, script).map(|entries| summarize(&entries));
    assert_eq!(logged("echo one > a")?, ["write a"]);
    assert_eq!(logged("cat a; grep -r one . ; ls -R")?, [""; 0]);
    assert_eq!(logged("echo two >> a")?, ["write a"]);
    assert_eq!(logged(": > a")?, ["write a"]);
    assert_eq!(logged("echo x > tmp; rm tmp; mkdir t; rmdir t")?, [""; 0]);
    assert_eq!(
        logged("mkdir -p n/e/s/t; echo x > n/e/s/t/f")?,
        ["mkdir n", "mkdir n/e", "mkdir n/e/s", "mkdir n/e/s/t", "write n/e/s/t/f"]
    );
    assert_eq!(
        logged("mv n/e m")?,
        [
            "delete n/e/s/t/f",
            "delete n/e/s/t",
            "delete n/e/s",
            "delete n/e",
            "mkdir m",
            "mkdir m/s",
            "mkdir m/s/t",
            "write m/s/t/f"
        ]
    );
    // A later change is recorded under the directory's new name.
    assert_eq!(logged("echo y >> m/s/t/f")?, ["write m/s/t/f"]);
    assert_eq!(logged("mv m k; echo z >> k/s/t/f; mv k m")?, ["write m/s/t/f"]);
    assert_eq!(logged("mv m k; mv k m")?, [""; 0]);
    assert_eq!(logged("echo 1 > b; echo 2 > c; mv b c")?, ["write c"]);
    assert_eq!(logged("cp c .c.new; mv .c.new c")?, ["write c"]);
    assert_eq!(
        logged("rm -rf m; mkdir m; echo f > m/f")?,
        ["delete m/s/t/f", "delete m/s/t", "delete m/s", "write m/f"]
    );
    assert_eq!(logged("rm c; mkdir c")?, ["mkdir c"]);
    assert_eq!(logged("rmdir c; echo c > c")?, ["write c"]);
    assert_eq!(logged("touch c; touch -d 2001-01-01 c; chmod 600 c; chmod 700 m")?, [""; 0]);
    assert_eq!(logged("rm -rf n m")?, ["delete n", "delete m/f", "delete m"]);
    Ok(())
}

#[test]
fn symlink_is_recorded_once_and_hard_link_under_every_name() -> Result<()> {
    let home = AuditedHome::new()?;
    let logged = |script: &str| home.run(ADA, script).map(|entries| summarize(&entries));
    assert_eq!(
        logged("echo x > f; ln -s f l; ln -s ../out o; ln -s nowhere d")?,
        ["write d", "write f", "write l", "write o"]
    );
    assert_eq!(logged("echo y >> l")?, ["write f"]);
    assert_eq!(logged("echo y > o/f; mkdir o/sub; echo z > o/sub/f")?, [""; 0]);
    assert_eq!(logged("ln -sfn elsewhere d")?, ["write d"]);
    assert_eq!(logged("mkdir sub; ln f sub/g")?, ["mkdir sub", "write sub/g"]);
    assert_eq!(logged("echo z >> sub/g")?, ["write f", "write sub/g"]);
    assert_eq!(logged("ln f h; echo z >> h")?, ["write f", "write h", "write sub/g"]);
    assert_eq!(logged("echo z >> h; rm h")?, ["delete h", "write f", "write sub/g"]);
    assert_eq!(logged("rm l o")?, ["delete o", "delete l"]);
    Ok(())
}

#[test]
fn write_through_mmap_is_recorded() -> Result<()> {
    let home = AuditedHome::new()?;
    home.shell("head -c 8192 /dev/zero > m")?;
    let script =
        "python3 -c 'import mmap; f = open(\"m\", \"r+b\"); m = mmap.mmap(f.fileno(), 0); m[0:3] = b\"abc\"'";
    assert_eq!(summarize(&home.run(ADA, script)?), ["write m"]);
    Ok(())
}

#[test]
fn non_utf8_names_can_be_read_back() -> Result<()> {
    let home = AuditedHome::new()?;
    let entries =
        home.run(ADA, "echo x > $'a\\nb'; echo x > $'c\\\\\\xff'; mkdir $'\\xc3'; echo x > $'\\xc3/ä'")?;
    let paths: Vec<Vec<u8>> = entries.iter().map(path_of).collect::<Result<_>>()?;
    assert_eq!(paths, [b"a\nb".to_vec(), b"c\\\xff".to_vec(), b"\xc3".to_vec(), b"\xc3/\xc3\xa4".to_vec()]);
    assert!(home.dir().join(to_os_str(&paths[3])).exists());
    assert_eq!((&entries[0]["escaped"], &entries[1]["escaped"]), (&json!(null), &json!(true)));
    Ok(())
}

#[test]
fn file_tool_is_trusted_for_paths_within_the_home_directory() -> Result<()> {
    let home = AuditedHome::new()?;
    let absolute = |relative: &str| home.path(relative).display().to_string();
    home.shell("mkdir real; ln -s real in; ln -s ../out away; ln -s real/t link; echo t > real/t; ln -s ../out/x gone")?;
    let logged = |path: &str, script: &str| -> Result<Vec<String>> {
        home.run_write_tool(ADA, path, || home.shell(script))?;
        Ok(summarize(&home.take_entries()?))
    };
    assert_eq!(
        logged(&absolute("home/svc/home/n/e/w"), "mkdir -p n/e; echo x > n/e/w")?,
        ["mkdir n", "mkdir n/e", "write n/e/w"]
    );
    assert_eq!(logged("n/../n/e/w", "echo y > n/e/w")?, ["write n/e/w"]);
    assert_eq!(logged(&absolute("home/svc/home/in/f"), "echo x > real/f")?, ["write real/f"]);
    assert_eq!(logged(&absolute("home/svc/home/link"), "echo x > link")?, ["write real/t"]);
    assert_eq!(logged(&absolute("home/svc/home/link"), "rm link; echo x > link")?, ["write link"]);
    home.shell("mkdir $'\\xff'; ln -s $'\\xff' bytes")?;
    assert_eq!(logged("bytes/f", "echo x > bytes/f")?, ["write \\xff/f"]);
    for outside in
        ["home/svc/out/f", "home/svc/home/away/f", "home/svc/home/gone", "home/svc/home/system/config.json"]
    {
        assert_eq!(logged(&absolute(outside), "true")?, [""; 0], "{outside}");
    }
    let entry = &{
        home.run_write_tool(ADA, "s", || home.shell("echo 12345 > s"))?;
        home.take_entries()?
    }[0];
    assert_eq!(
        (&entry["sizeBytes"], &entry["actor"], &entry["agentName"], &entry["dispatchId"], &entry["tool"]),
        (&json!(6), &json!("claude-code"), &json!("ada"), &json!("ada"), &json!("Write"))
    );
    let audit_log = std::fs::read_to_string(home.dir().join("system/logs/audit.jsonl"))?;
    assert!(!audit_log.contains("SECRET"));
    Ok(())
}

#[test]
fn thousands_of_changes_in_one_command_are_all_recorded() -> Result<()> {
    let home = AuditedHome::new()?;
    let script =
        "for d in $(seq 60); do mkdir -p p/$d/q; for f in $(seq 100); do echo $f > p/$d/q/$f; done; done";
    assert_eq!(home.run(ADA, script)?.len(), 1 + 60 * 102);
    assert_eq!(home.run(ADA, "cp -r p r")?.len(), 1 + 60 * 102);
    assert_eq!(home.run(ADA, "for f in r/7/q/*; do echo x >> $f; done")?.len(), 100);
    assert_eq!(home.run(ADA, "rm -rf p r")?.len(), 2 * (1 + 60 * 102));
    Ok(())
}

#[test]
fn audit_log_omits_owner_changes_and_names_concurrent_agents() -> Result<()> {
    let home = AuditedHome::new()?;
    home.shell("echo mine > mine; mkdir own")?;
    assert!(home.take_entries()?.is_empty());
    let first = home.begin_command(ADA)?;
    home.shell("echo a > a")?;
    let second = home.begin_command(BOB)?;
    home.shell("echo both > both")?;
    home.end_command(ADA, &first)?;
    home.shell("echo b > b")?;
    home.end_command(BOB, &second)?;
    home.shell("echo mine >> mine")?;
    let entries = home.take_entries()?;
    assert_eq!(summarize(&entries), ["write a", "write both", "write b"]);
    let attribution =
        |index: usize| (entries[index]["agentName"].clone(), entries[index]["ambiguous"].clone());
    assert_eq!(attribution(0), (json!("ada"), json!(null)));
    assert_eq!(attribution(1), (json!("ada, bob"), json!(true)));
    assert_eq!(attribution(2), (json!("bob"), json!(null)));
    assert_eq!(entries[1].get("dispatchId"), None);

    // A file tool's write is attributed by its path, even while another agent's command runs.
    let call = home.begin_command(ADA)?;
    home.run_write_tool(BOB, "w", || home.shell("echo w > w; echo side > side"))?;
    home.end_command(ADA, &call)?;
    let entries = home.take_entries()?;
    let agent_for =
        |path: &str| entries.iter().find(|entry| entry["path"] == path).map(|entry| &entry["agentName"]);
    assert_eq!(
        (agent_for("w"), agent_for("side"), entries.len()),
        (Some(&json!("bob")), Some(&json!("ada")), 2)
    );
    Ok(())
}

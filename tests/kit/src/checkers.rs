//! Debian programs that check a machine's files: units, user-data, shell scripts.
//!
//! Relocatable programs are pinned and fetched into `target/tools`. Others, such as systemd's and nft, come from this
//! machine; missing ones are installed if this user may install packages.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::apt::{self, is_in_path};
use crate::packages::{Deb, DebTool};

const SHELLCHECK: DebTool = DebTool {
    debs: &[Deb {
        name: "shellcheck",
        version: "0.9.0-1",
        sha256: "8c40f8a4ecccf3d746b933853972f1cd1be6df84fc5977d0137269d4debefa4f",
    }],
    path: "usr/bin/shellcheck",
};

/// Debian 12's cloud-init, with the packages that its `schema` command imports; run by Debian's own Python.
const CLOUD_INIT: DebTool = DebTool {
    debs: &[
        Deb {
            name: "cloud-init",
            version: "22.4.2-1+deb12u4",
            sha256: "c18c9b1a999268413f215371ae6382f8705a437b2b24c049d6dbafcc111a1d09",
        },
        Deb {
            name: "python3-attr",
            version: "22.2.0-1",
            sha256: "6a12ea96a8a909445a982975279f96d7b9a1ff96c912efff39abc8d92372694a",
        },
        Deb {
            name: "python3-certifi",
            version: "2022.9.24-1",
            sha256: "121abb6d0af69b57ce7202be38b2db9150e5d627bbaab6c17fe10650d2ced4fc",
        },
        Deb {
            name: "python3-charset-normalizer",
            version: "3.0.1-2",
            sha256: "f547a25ac5349111ef4ea0c54654cf72fed48193eaf1c658f9309aff3715cd38",
        },
        Deb {
            name: "python3-configobj",
            version: "5.0.8-1",
            sha256: "b0760d20e71131ad2bf8c74df31506bffd2e8bd13c212a336a3a93a95ab008d0",
        },
        Deb {
            name: "python3-idna",
            version: "3.3-1+deb12u1",
            sha256: "0bf81fb1906d3aa607482d09aa3bcbab5c263242b1fd1d93be39658fa783af1a",
        },
        Deb {
            name: "python3-json-pointer",
            version: "2.3-2",
            sha256: "ac128b2668ee6632220a3c0bb9ad42f11d51741aa05a87e70e26c90a2265b99f",
        },
        Deb {
            name: "python3-jsonpatch",
            version: "1.32-2",
            sha256: "3e0ea39bad1024afc6f279db4f502395db07b01c0b3e55502083a887a180c00b",
        },
        Deb {
            name: "python3-jsonschema",
            version: "4.10.3-1",
            sha256: "b972212ff557ba07138b4aa7b7e2eb227260eb3fe3fac8e699a0e4b006b0ebc3",
        },
        Deb {
            name: "python3-pyrsistent",
            version: "0.18.1-1+b3",
            sha256: "da9ab57e7889af9d077bbcf50fd7f3f29beb6e8f29b2d828324e971d34d463b3",
        },
        Deb {
            name: "python3-requests",
            version: "2.28.1+dfsg-1",
            sha256: "c75b5c05d8d4a813bd83c3d432ffe65a2ca13e771bc91d4b9787690097598603",
        },
        Deb {
            name: "python3-six",
            version: "1.16.0-4",
            sha256: "fd189e9cecbcf17a1fc20aec30055c8afa9c1eec00cd6e7ab385087a2ab3b0d3",
        },
        Deb {
            name: "python3-urllib3",
            version: "1.26.12-1+deb12u4",
            sha256: "9dd6fef10317e437f2195cb5ea8b38d8e39e02106c5fda7b16d58b4bb9a85886",
        },
        Deb {
            name: "python3-yaml",
            version: "6.0-3+b2",
            sha256: "8d0db0b3099298fe039b94e4c52a6987798a90d23b80de3ac13c3cb75cf622a2",
        },
    ],
    path: "usr/lib/python3/dist-packages",
};

/// Returns a `shellcheck` command, which takes options and files.
pub fn shellcheck() -> Result<Command> {
    Ok(SHELLCHECK.locate_or_fetch()?.command())
}

/// Returns a `cloud-init schema` command, which takes `--config-file FILE`.
pub fn cloud_init_schema() -> Result<Command> {
    let mut command = cloud_init_python()?;
    command.args(["-m", "cloudinit.cmd.main", "schema"]);
    Ok(command)
}

/// Returns a command that parses text as cloud-init does. Each input line is a JSON string with the text to parse; each
/// output line is the result: `{"parsed": …}` or `{"error": "…"}`.
pub fn cloud_init_parser() -> Result<Command> {
    const SCRIPT: &str = "
import json, sys
import yaml
for line in sys.stdin:
    try:
        result = {'parsed': yaml.safe_load(json.loads(line))}
    except yaml.YAMLError as error:
        result = {'error': str(error)}
    print(json.dumps(result), flush=True)
";
    let mut command = cloud_init_python()?;
    command.args(["-c", SCRIPT]);
    Ok(command)
}

fn cloud_init_python() -> Result<Command> {
    let python = Path::new("/usr/bin/python3");
    ensure!(python.exists(), "cloud-init needs Debian's Python ({})", python.display());
    let mut command = Command::new(python);
    command.env_clear().env("PYTHONPATH", CLOUD_INIT.locate_or_fetch()?.path());
    // Use the pinned packages instead of those that are installed for this Python.
    command.args(["-S", "-B"]);
    Ok(command)
}

/// Returns a command for `program`, and installs `package` first if the program is missing.
///
/// # Errors
/// Fails if the program is missing and cannot be installed.
pub fn find_or_install(program: &str, package: &str) -> Result<Command> {
    if !is_in_path(program) {
        apt::install(&[package], &format!("{program} is missing"))?;
        ensure!(is_in_path(program), "{package} is installed, but {program} is still missing");
    }
    Ok(Command::new(program))
}

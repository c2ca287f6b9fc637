//! pigz: multi-threaded gzip.

use anyhow::Result;

use kit::packages::{Deb, DebTool, FetchedProgram};

const PIGZ: DebTool = DebTool {
    path: "usr/bin/pigz",
    debs: &[
        Deb {
            name: "pigz",
            version: "2.6-1",
            sha256: "54a51198fca4e6eae44371277c525d3b7371cc969cd97e9f10ea6efc13acaf1a",
        },
        Deb {
            name: "zlib1g",
            version: "1:1.2.13.dfsg-1",
            sha256: "d7dd1d1411fedf27f5e27650a6eff20ef294077b568f4c8c5e51466dc7c08ce4",
        },
    ],
};

pub fn fetch() -> Result<FetchedProgram> {
    PIGZ.locate_or_fetch()
}

//! HAProxy as a router: TLS on both sides, cookies dropped.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use anyhow::Result;

use super::nginx::{Pem, RunningPeer, Upstreams};
use crate::process::ServerProcess;
use kit::net;
use kit::packages::{Deb, DebTool, FetchedProgram};

const HAPROXY: DebTool = DebTool {
    path: "usr/sbin/haproxy",
    debs: &[
        Deb {
            name: "haproxy",
            version: "2.6.12-1+deb12u4",
            sha256: "97ca097d12b43fc5cb1b17aa5e84957735ef312a2e02cf8a99512fa1abe8a955",
        },
        Deb {
            name: "liblua5.3-0",
            version: "5.3.6-2",
            sha256: "576ad8ef2e9f6ad21f29f0c90dac17448deefee8f3912877c2a0911b77e5d3ca",
        },
        Deb {
            name: "libopentracing-c-wrapper0",
            version: "1.1.3-3+b1",
            sha256: "68013bf6296a776923622c871bed26bc7b6bfe5f84b0fa2707a06382d1db2692",
        },
        Deb {
            name: "libopentracing1",
            version: "1.6.0-4",
            sha256: "af62b62a99979253a79e3443f7dabe13f1f33bc2fc024f99039e3868a67f26f4",
        },
    ],
};

#[derive(Clone)]
pub struct HaProxy {
    program: FetchedProgram,
}

impl HaProxy {
    pub fn fetch() -> Result<Self> {
        Ok(Self { program: HAPROXY.locate_or_fetch()? })
    }

    pub fn start_router(&self, dir: &Path, pem: &Pem, upstreams: &Upstreams<'_>) -> Result<RunningPeer> {
        let server_dir = dir.join("haproxy");
        fs::create_dir_all(&server_dir)?;
        let combined = server_dir.join("front.pem");
        fs::write(&combined, fs::read_to_string(&pem.cert)? + &fs::read_to_string(&pem.key)?)?;
        let address = SocketAddr::from(([127, 0, 0, 1], net::free_port()?));
        let ca = upstreams.trusted_cert.display();
        let backend = |name: &str, target: SocketAddr| {
            format!(
                "backend {name}\n  http-reuse always\n  server one {target} ssl verify required ca-file {ca} \
                 pool-max-conn 256\n"
            )
        };
        let threads = std::thread::available_parallelism()?;
        let conf = format!(
            "global\n  maxconn 8000\n  nbthread {threads}\ndefaults\n  mode http\n  timeout connect 5s\n  \
             timeout client 600s\n  timeout server 600s\n  timeout tunnel 600s\nfrontend front\n  \
             bind {address} ssl crt {pem} backlog 4096\n  http-request del-header Cookie\n  \
             use_backend sockets if {{ path /ws }}\n  default_backend machine\n{machine}{sockets}",
            pem = combined.display(),
            machine = backend("machine", upstreams.upstream),
            sockets = backend("sockets", upstreams.websocket),
        );
        let file = server_dir.join("haproxy.cfg");
        fs::write(&file, conf)?;
        let mut command = self.program.command();
        command.arg("-db").arg("-f").arg(&file);
        let (process, startup_time) = ServerProcess::start(command, address, &server_dir.join("log"))?;
        Ok(RunningPeer { address, process, startup_time })
    }
}

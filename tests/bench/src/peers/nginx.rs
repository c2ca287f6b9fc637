//! nginx as the common TLS upstream, and as a router to compare with.

use std::fmt::Write as _;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

use crate::process::ServerProcess;
use kit::net;
use kit::packages::{Deb, DebTool, FetchedProgram};

const NGINX: DebTool = DebTool {
    path: "usr/sbin/nginx",
    debs: &[Deb {
        name: "nginx",
        // From the Debian release: the security-update archive keeps only the latest version.
        version: "1.22.1-9+deb12u9",
        sha256: "4e7b52f8b31f26d77ffb5c427c41e36223e81b047242ecfa8dc1d7f939734885",
    }],
};

/// A certificate file and its key file.
#[derive(Debug, Clone)]
pub struct Pem {
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Pem {
    pub fn write(dir: &Path, name: &str, cert: &str, key: &str) -> Result<Self> {
        let pem = Self { cert: dir.join(format!("{name}.pem")), key: dir.join(format!("{name}.key")) };
        fs::write(&pem.cert, cert).with_context(|| format!("cannot write {}", pem.cert.display()))?;
        fs::write(&pem.key, key).with_context(|| format!("cannot write {}", pem.key.display()))?;
        Ok(pem)
    }
}

#[derive(Clone)]
pub struct Nginx {
    program: FetchedProgram,
}

/// A running nginx or HAProxy.
pub struct RunningPeer {
    pub address: SocketAddr,
    pub process: ServerProcess,
    /// Time from exec to listening.
    pub startup_time: Duration,
}

/// A router's targets. Their certificates are verified, because the product verifies its upstreams' pinned keys.
pub struct Upstreams<'a> {
    pub upstream: SocketAddr,
    /// The target for upgrades.
    pub websocket: SocketAddr,
    pub trusted_cert: &'a Path,
}

impl Nginx {
    pub fn fetch() -> Result<Self> {
        Ok(Self { program: NGINX.locate_or_fetch()? })
    }

    /// Starts an upstream that serves a small body at `/` and the file `large` at `/large`.
    pub fn start_upstream(&self, dir: &Path, pem: &Pem, large: &Path) -> Result<RunningPeer> {
        let locations = format!(
            "location / {{ default_type text/plain; return 200 \"{}\"; }}\n\
             location = /large {{ default_type application/octet-stream; alias {}; }}",
            "0123456789".repeat(10),
            large.display()
        );
        self.serve(dir, "upstream", pem, "", &locations)
    }

    /// Starts a router: TLS on both sides, persistent connections to the upstream, cookies dropped.
    pub fn start_router(&self, dir: &Path, pem: &Pem, upstreams: &Upstreams<'_>) -> Result<RunningPeer> {
        let pool = |name: &str, address: SocketAddr| {
            format!("upstream {name} {{ server {address}; keepalive 256; keepalive_requests 1000000000; }}\n")
        };
        let pools = pool("machine", upstreams.upstream) + &pool("sockets", upstreams.websocket);
        let mut locations = String::new();
        let common = format!(
            "proxy_http_version 1.1; proxy_set_header Host $host; proxy_set_header Cookie \"\"; \
             proxy_ssl_verify on; proxy_ssl_trusted_certificate {}; proxy_ssl_name localhost; \
             proxy_ssl_protocols TLSv1.2 TLSv1.3; proxy_max_temp_file_size 0; proxy_request_buffering off;",
            upstreams.trusted_cert.display()
        );
        writeln!(
            locations,
            "location / {{ proxy_pass https://machine; proxy_set_header Connection \"\"; {common} }}"
        )?;
        writeln!(
            locations,
            "location /ws {{ proxy_pass https://sockets; proxy_set_header Connection \"Upgrade\"; \
             proxy_set_header Upgrade $http_upgrade; proxy_read_timeout 600s; {common} }}"
        )?;
        self.serve(dir, "nginx", pem, &pools, &locations)
    }

    fn serve(&self, dir: &Path, name: &str, pem: &Pem, pools: &str, locations: &str) -> Result<RunningPeer> {
        let server_dir = dir.join(name);
        fs::create_dir_all(&server_dir)?;
        let address = SocketAddr::from(([127, 0, 0, 1], net::free_port()?));
        let temp_paths: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .iter()
            .map(|kind| format!("{kind}_temp_path {}/{kind};\n", server_dir.display()))
            .collect();
        // A root process's workers would otherwise run as a user who cannot read these files.
        let user = if nix::unistd::geteuid().is_root() { "user root root;" } else { "" };
        let conf = format!(
            "daemon off;\n{user}\npid {server_dir}/pid;\nerror_log stderr error;\nworker_processes auto;\n\
             worker_rlimit_nofile 16384;\nevents {{ worker_connections 8000; }}\nhttp {{\naccess_log off;\n\
             {temp_paths}keepalive_requests 1000000000;\nkeepalive_timeout 600s;\nclient_max_body_size 0;\n\
             ssl_protocols TLSv1.2 TLSv1.3;\ntcp_nodelay on;\n{pools}server {{\nlisten {address} ssl \
             backlog=4096;\nssl_certificate {cert};\nssl_certificate_key {key};\n{locations}\n}}\n}}\n",
            server_dir = server_dir.display(),
            cert = pem.cert.display(),
            key = pem.key.display(),
        );
        let file = server_dir.join("nginx.conf");
        fs::write(&file, conf)?;
        let mut command = self.program.command();
        command.arg("-p").arg(&server_dir).arg("-e").arg("stderr").arg("-c").arg(&file);
        let (process, startup_time) = ServerProcess::start(command, address, &server_dir.join("log"))?;
        Ok(RunningPeer { address, process, startup_time })
    }
}

//! `svc-register`: registers this machine once, and reports boot progress or failure.
//!
//! This module holds the command line, the configuration and the sequence of steps. Retries after a lost response or a
//! restart resend the exact bytes persisted in `RegistrationState`.

mod client;
mod failure;
mod stage;
mod state;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use secrecy::SecretString;

use crate::files::restore_outcome::RestoreOutcome;
use crate::system::config;
use crate::system::config::{Identity, PlatformAccess, init_log};
use crate::system::layout::Layout;
use crate::system::probe;
use crate::system::probe::GatewayClient;
use crate::system::release;
use crate::system::vars;
use client::{RegistrationClient, RegistrationError};
use state::RegistrationState;
use svc_base::applet::{self, Exit, Failure, OrExit};
use svc_base::config::Env;
use svc_base::failpoint;
use svc_http::request_id;
use svc_http::tls::SpkiPin;
use svc_machine::name::ImageVersion;
use svc_store::bundle;
use svc_wire::registration::{BootStageName, Registration, RestoredFiles};

/// Fail points hit during registration.
pub const FAILPOINTS: &[&str] =
    &["register.begin", "register.ready", "register.written", "register.accepted"];

#[derive(clap::Parser)]
#[command(
    name = "svc-register",
    version = applet::version(),
    about = "Registers this machine with the platform, once",
    subcommand_negates_reqs = true
)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Wait for the gateway, then register (the default)
    Register,
    /// Report a stage of the boot; best effort, never fails
    Stage {
        #[arg(value_parser = stage_parser())]
        stage: BootStageName,
    },
    /// Report that the boot failed
    Failure {
        /// The stage that failed
        #[arg(long, value_parser = stage_parser())]
        stage: BootStageName,
        /// Error message; this machine's secrets are removed from it
        #[arg(long)]
        message: String,
    },
}

fn stage_parser() -> impl TypedValueParser<Value = BootStageName> {
    PossibleValuesParser::new(BootStageName::ALL.map(BootStageName::as_str))
        .try_map(|name| name.parse::<BootStageName>())
}

/// Returns the clap command, from which the reference pages are generated.
pub fn command() -> clap::Command {
    <Args as clap::CommandFactory>::command()
}

pub fn run(args: Vec<OsString>) -> ExitCode {
    let args: Args = match applet::parse(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    init_log("svc-register", &Layout::from_process());
    let layout = Layout::from_process();
    applet::block_on(
        "svc-register",
        request_id::run_with_new_id(async move {
            match args.command.unwrap_or(Command::Register) {
                Command::Register => register(&layout).await,
                Command::Stage { stage } => {
                    stage::report(&layout, stage).await;
                    Ok(())
                }
                Command::Failure { stage, message } => failure::report(&layout, stage, &message).await,
            }
        }),
    )
}

struct RegisterConfig {
    identity: Identity,
    platform: PlatformAccess,
    token: SecretString,
    listen: SocketAddr,
    version: ImageVersion,
    bundle_sha256: String,
    gateway_timeout: Duration,
    platform_timeout: Duration,
}

impl RegisterConfig {
    fn read(layout: &Layout, env: &mut Env) -> Option<Self> {
        let identity = Identity::read(env);
        let platform = PlatformAccess::read(env, layout);
        let token = env.required_secret(&vars::REGISTRATION_TOKEN);
        let listen = env.or_default(&vars::GATEWAY_LISTEN);
        // On a machine, this is set in root's `update.env`, which we can't read. Only needed if no release is
        // installed.
        let configured_digest = env.optional::<String>(&vars::SVC_BUNDLE_SHA256);
        let version = config::read_image_version(env);
        let gateway_timeout = Duration::from_secs(env.or_default(&vars::REGISTER_GATEWAY_DEADLINE_SECONDS));
        let platform_timeout = Duration::from_secs(env.or_default(&vars::REGISTER_PLATFORM_DEADLINE_SECONDS));
        // Register the installed release, even if user-data names a different one.
        let version = release::current_version(layout).or(version);
        let installed_digest =
            version.as_ref().and_then(|version| release::read_digest(&layout.release(version)).ok()?);
        let configured_digest = configured_digest.and_then(|text| bundle::parse_digest(&text));
        let bundle_sha256 = installed_digest.or(configured_digest);
        if bundle_sha256.is_none() {
            env.add_error(
                &vars::SVC_BUNDLE_SHA256,
                "must be 64 hexadecimal digits if no release is installed",
            );
        }
        Some(Self {
            identity: identity?,
            platform: platform?,
            token: token?,
            listen,
            version: version?,
            bundle_sha256: bundle_sha256?,
            gateway_timeout,
            platform_timeout,
        })
    }
}

async fn register(layout: &Layout) -> Result<(), Failure> {
    let mut env = config::environment(layout);
    let config = RegisterConfig::read(layout, &mut env);
    let config = env.finish(config)?;
    failpoint::trigger("register.begin").or_exit(Exit::Internal)?;
    let state = RegistrationState::read(layout).or_exit(Exit::Internal)?;
    if let Some(registered) = state.as_ref().filter(|state| state.is_registered(config.identity.machine)) {
        tracing::info!(epoch = %config.identity.epoch, "already registered");
        log_if_key_changed(layout, registered);
        return Ok(());
    }
    let pin = wait_for_gateway(layout, &config).await?;
    failpoint::trigger("register.ready").or_exit(Exit::Internal)?;
    let body = Registration {
        machine_id: config.identity.machine,
        image_version: config.version.clone(),
        bundle_sha256: config.bundle_sha256.clone(),
        tls_spki_sha256: pin.to_string(),
        boot_ms: measure_boot_ms(layout),
        restored_files: read_restored_files(layout),
    };
    let mut state = RegistrationState::reuse_or_create(layout, state, &body).or_exit(Exit::Internal)?;
    failpoint::trigger("register.written").or_exit(Exit::Internal)?;
    let platform = RegistrationClient::new(&config.platform, &config.token).or_exit(Exit::Config)?;
    let response =
        platform.register(state.request_text(), config.platform_timeout).await.map_err(to_failure)?;
    failpoint::trigger("register.accepted").or_exit(Exit::Internal)?;
    state.mark_registered(layout).or_exit(Exit::Internal)?;
    tracing::info!(status = %response.status, epoch = %response.epoch, "registered");
    Ok(())
}

fn read_restored_files(layout: &Layout) -> Option<RestoredFiles> {
    let outcome = RestoreOutcome::read(layout).ok().flatten()?;
    let files = RestoredFiles { as_of: outcome.taken_at.map(Into::into), error: outcome.error };
    (files != RestoredFiles::default()).then_some(files)
}

fn to_failure(error: RegistrationError) -> Failure {
    let exit = match &error {
        RegistrationError::TokenRejected { .. } => Exit::Permission,
        RegistrationError::Unavailable { .. } => Exit::TryAgain,
        RegistrationError::Client(_) | RegistrationError::UnexpectedResponse { .. } => Exit::Internal,
    };
    Failure::new(exit, error)
}

/// Waits for the gateway to become ready and returns its SPKI pin. The gateway generates its key on first start, and we
/// only register a working gateway.
async fn wait_for_gateway(layout: &Layout, config: &RegisterConfig) -> Result<SpkiPin, Failure> {
    let deadline = Instant::now() + config.gateway_timeout;
    loop {
        if let Some(pin) = probe::read_pin(layout).or_exit(Exit::Internal)?
            && GatewayClient::new(config.listen, pin).or_exit(Exit::Config)?.is_ready().await
        {
            return Ok(pin);
        }
        if Instant::now() > deadline {
            let seconds = config.gateway_timeout.as_secs();
            let error = anyhow::anyhow!("gateway at {} not ready within {seconds} s", config.listen);
            return Err(Failure::new(Exit::TryAgain, error));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Returns the milliseconds since cloud-init wrote `boot.env` from user-data. Call once the gateway is ready.
fn measure_boot_ms(layout: &Layout) -> Option<u64> {
    let written = std::fs::metadata(layout.boot_env()).ok()?.modified().ok()?;
    u64::try_from(written.elapsed().ok()?.as_millis()).ok()
}

/// Logs an error if the gateway's key has changed. The platform only accepts the registered key, so it can no longer
/// reach this machine.
fn log_if_key_changed(layout: &Layout, registered: &RegistrationState) {
    if let Ok(Some(pin)) = probe::read_pin(layout)
        && !registered.has_pin(pin)
    {
        tracing::error!("gateway TLS key differs from the registered one: recover the slot");
    }
}

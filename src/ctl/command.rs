//! One function per command: what it sends, and what it prints.

use std::path::Path;
use std::time::Duration;

use http::Method;
use secrecy::SecretString;
use serde_json::{Map, Value, json};
use url::Url;

use super::api::{Answer, Api, CallError};
use super::args::{
    Args, BundleCommand, Command, Delete, Global, List, Provision, Recover, SlotCommand, Wait,
};
use super::show::{self, Accepted, Machine, Machines, Operation, SlotRow, Slots};
use super::{bundle, confirm, wait};
use crate::applet::Failure;
use crate::clock;
use crate::config::Env;
use crate::machine::id::{MachineId, OperationId};
use crate::store::config::StoreConfig;

/// How answers leave: the API's JSON as it came, or text.
#[derive(Clone, Copy)]
enum Form {
    Json,
    Text,
}

impl Form {
    fn print(self, answer: &Answer, text: impl FnOnce() -> Result<String, CallError>) -> Result<(), Failure> {
        match self {
            Self::Json => println!("{}", answer.text.trim_end()),
            Self::Text => print!("{}", text()?),
        }
        Ok(())
    }
}

pub async fn run(args: Args) -> Result<(), Failure> {
    let form = if args.global.json { Form::Json } else { Form::Text };
    match args.command {
        Command::Bundle(BundleCommand::Publish { dir, image_version }) => {
            let mut env = Env::from_process();
            let store = StoreConfig::read(&mut env);
            let published = bundle::publish(&env.finish(store)?.open()?, &dir, &image_version).await?;
            match form {
                Form::Json => println!("{}", published.json()),
                Form::Text => println!("{published}"),
            }
            Ok(())
        }
        command => {
            let api = connect(&args.global)?;
            call(&api, command, form).await
        }
    }
}

async fn call(api: &Api, command: Command, form: Form) -> Result<(), Failure> {
    match command {
        Command::Slot(command) => slot(api, command, form).await,
        Command::Provision(args) => provision(api, args, form).await,
        Command::List(args) => list(api, args, form).await,
        Command::Status { machine } => status(api, machine, form).await,
        Command::Recover(args) => recover(api, args, form).await,
        Command::Delete(args) => delete(api, args, form).await,
        Command::Operation { operation, wait } => self::operation(api, operation, wait, form).await,
        Command::Bundle(_) => unreachable!("bundles go to the store, not to the platform"),
    }
}

fn connect(global: &Global) -> Result<Api, Failure> {
    let mut env = Env::from_process();
    let base = match &global.platform_url {
        Some(url) => Some(url.clone()),
        None => env.required::<Url>("PLATFORM_PUBLIC_URL"),
    };
    if base.as_ref().is_some_and(|base| !is_private(base)) {
        env.mistake(
            "PLATFORM_PUBLIC_URL",
            "must be https (plain http only to this machine): it carries the secret",
        );
    }
    let secret = match &global.secret_file {
        Some(file) => secret_from(&mut env, file),
        None => env.required_secret("PLATFORM_SECRET"),
    };
    let (base, secret) = env.finish(base.zip(secret))?;
    Ok(Api::new(base, &secret, Duration::from_secs(global.timeout))?)
}

fn secret_from(env: &mut Env, file: &Path) -> Option<SecretString> {
    match std::fs::read_to_string(file) {
        Ok(text) if !text.trim().is_empty() => Some(SecretString::from(text.trim())),
        Ok(_) => {
            env.mistake("--secret-file", "the file is empty");
            None
        }
        Err(error) => {
            env.mistake("--secret-file", format!("{}: {error}", file.display()));
            None
        }
    }
}

fn is_private(base: &Url) -> bool {
    let here = match base.host() {
        Some(url::Host::Domain(name)) => name == "localhost",
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    };
    base.scheme() == "https" || (base.scheme() == "http" && here)
}

async fn slot(api: &Api, command: SlotCommand, form: Form) -> Result<(), Failure> {
    match command {
        SlotCommand::Set { user, slot, plan, status, period_end } => {
            let mut body = json!({"idpUserId": user, "slot": slot, "plan": plan, "status": status.as_str()});
            if let Some(end) = period_end {
                body["currentPeriodEnd"] = clock::rfc3339_ms(end).into();
            }
            let answer = api.send(Method::PUT, &["vps", "slots"], Some(&body)).await?;
            form.print(&answer, || Ok(show::slots(&Slots { slots: vec![answer.read::<SlotRow>()?] })))
        }
        SlotCommand::List { user } => {
            let answer = api.get(&["vps", "slots"], &[("idpUserId", user.to_string())]).await?;
            form.print(&answer, || Ok(show::slots(&answer.read()?)))
        }
    }
}

async fn provision(api: &Api, args: Provision, form: Form) -> Result<(), Failure> {
    let mut body = object(json!({"idpUserId": args.user, "slot": args.slot, "handle": args.handle}));
    insert(&mut body, "serverType", args.server_type);
    insert(&mut body, "location", args.location);
    insert(&mut body, "imageVersion", args.image_version);
    if args.preview {
        body.insert("kind".to_owned(), "preview".into());
    }
    let answer = api.send(Method::POST, &["vps", "provision"], Some(&body.into())).await?;
    finish(api, answer, args.wait, form).await
}

async fn recover(api: &Api, args: Recover, form: Form) -> Result<(), Failure> {
    let what = format!(
        "This replaces the machine of {} (slot {}). What its latest snapshot does not hold is lost.",
        args.user, args.slot
    );
    confirm::ask(&what, args.user.as_str(), args.yes)?;
    let mut body = object(json!({"idpUserId": args.user, "slot": args.slot}));
    insert(&mut body, "snapshotKey", args.snapshot);
    if args.allow_empty {
        body.insert("allowEmpty".to_owned(), true.into());
    }
    let answer = api.send(Method::POST, &["vps", "recover"], Some(&body.into())).await?;
    finish(api, answer, args.wait, form).await
}

async fn delete(api: &Api, args: Delete, form: Form) -> Result<(), Failure> {
    let id = args.machine.to_string();
    let machine: Machine = api.get(&["vps", &id], &[]).await?.read()?;
    let what = format!(
        "This deletes machine {id} of {} (slot {}) and its server. Its snapshots stay.",
        machine.idp_user_id, machine.slot
    );
    confirm::ask(&what, &machine.handle, args.yes)?;
    let answer = api.send(Method::DELETE, &["vps", &id], None).await?;
    finish(api, answer, args.wait, form).await
}

/// Prints what was accepted, or with `--wait` what came of it.
async fn finish(api: &Api, answer: Answer, wait: Wait, form: Form) -> Result<(), Failure> {
    let accepted: Accepted = answer.read()?;
    let Some(seconds) = wait.wait else {
        return form.print(&answer, || Ok(show::accepted(&accepted)));
    };
    eprint!("{}", show::accepted(&accepted));
    let within = Duration::from_secs(seconds);
    let operation = accepted.operation_id.as_deref();
    let (answer, machine) = wait::until_settled(api, &accepted.machine_id, operation, within).await?;
    form.print(&answer, || Ok(show::machine(&machine)))
}

async fn list(api: &Api, args: List, form: Form) -> Result<(), Failure> {
    let asked = [
        ("status", args.status.map(|status| status.to_string())),
        ("idpUserId", args.user.map(String::from)),
        ("slot", args.slot.map(String::from)),
        ("handle", args.handle.map(String::from)),
        ("deleted", args.deleted.then(|| "true".to_owned())),
        ("limit", args.limit.map(|limit| limit.to_string())),
        ("cursor", args.cursor),
    ];
    let query: Vec<_> = asked.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    let answer = api.get(&["vps"], &query).await?;
    form.print(&answer, || Ok(show::machines(&answer.read::<Machines>()?)))
}

async fn status(api: &Api, machine: MachineId, form: Form) -> Result<(), Failure> {
    let answer = api.get(&["vps", &machine.to_string()], &[]).await?;
    form.print(&answer, || Ok(show::machine(&answer.read()?)))
}

async fn operation(api: &Api, id: OperationId, wait: Wait, form: Form) -> Result<(), Failure> {
    let path = ["vps", "operations", &id.to_string()];
    let mut answer = api.get(&path, &[]).await?;
    let mut operation: Operation = answer.read()?;
    if let Some(seconds) = wait.wait {
        let within = Duration::from_secs(seconds);
        wait::until_settled(api, &operation.machine_id, Some(&operation.operation_id), within).await?;
        answer = api.get(&path, &[]).await?;
        operation = answer.read()?;
    }
    form.print(&answer, || Ok(show::operation(&operation)))
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

fn insert(body: &mut Map<String, Value>, name: &str, value: Option<impl Into<String>>) {
    if let Some(value) = value {
        body.insert(name.to_owned(), Value::String(value.into()));
    }
}

//! The capabilities of each of the kit's object stores, as probed by [`doctor::probe_store`].

use std::time::Duration;

use kit::stores::StoreKind;
use svc::config::Env;
use svc::platform::doctor;
use svc::platform::store_access_issuer::HostCredentials;
use svc::store::capabilities::{CapabilityNeed, ProbeResult, REPLACE_IN_PARALLEL, RaceLimits, Support};
use svc::store::config::StoreConfig;

use super::files::ProjectFile;
use super::{BEGIN_PREFIX, BEGIN_SUFFIX, END_MARKER, GeneratedSection, table};

const BUCKET: &str = "svc-test";
const RACE_LIMITS: RaceLimits = RaceLimits { rounds: 8, timeout: Duration::from_secs(90) };

const SECTION_NAME: &str = "stores";

/// Reads the current table from the pages, for the quick test, which starts no stores.
pub fn read_current_table(pages: &[ProjectFile]) -> GeneratedSection {
    let marker = format!("{BEGIN_PREFIX}{SECTION_NAME}{BEGIN_SUFFIX}\n");
    let written = pages.iter().find_map(|page| {
        let after = page.path.starts_with("docs/").then(|| page.text.split_once(&marker)).flatten()?.1;
        Some(after.split_once(END_MARKER)?.0.trim().to_owned())
    });
    GeneratedSection::new(SECTION_NAME, written.unwrap_or_default())
}

/// Probes the stores. Records a skip and returns `None` if SeaweedFS cannot be fetched on this machine.
pub fn probe_all() -> Option<GeneratedSection> {
    if let Err(error) = kit::seaweed::fetch(&kit::fetch::target_dir()) {
        kit::skip::record(format_args!("SeaweedFS cannot be fetched: {error:#}"));
        return None;
    }
    svc::http::tls::install_provider();
    let runtime = tokio::runtime::Runtime::new().expect("the runtime must start");
    let columns: Vec<Vec<ProbeResult>> = StoreKind::ALL.map(|kind| runtime.block_on(probe(kind))).into();
    // Whether SeaweedFS accepts two concurrent writers depends on timing, so the page shows counts instead.
    let rows = columns[0].iter().enumerate().map(|(row, first)| {
        let capability = first.capability;
        let mut cells = vec![capability.name.to_owned(), need_text(capability.need).to_owned()];
        for (kind, column) in StoreKind::ALL.into_iter().zip(&columns) {
            assert_eq!(column[row].capability, capability, "the stores have different rows");
            let is_timing_dependent = (kind, capability) == (StoreKind::Seaweedfs, REPLACE_IN_PARALLEL);
            cells.push(if is_timing_dependent {
                "[measured](#races)".to_owned()
            } else {
                cell(&column[row].support)
            });
        }
        cells.push(capability.without.to_owned());
        cells
    });
    let head = ["capability", "svc", "the kit's own", "moto", "SeaweedFS", "without it"];
    Some(GeneratedSection::new(SECTION_NAME, table(&head, rows)))
}

async fn probe(kind: StoreKind) -> Vec<ProbeResult> {
    let dir = tempfile::tempdir().expect("the temporary directory must be created");
    let store = kind.start(dir.path(), BUCKET).await.expect("the store must start");
    let mut pairs = store.env(BUCKET);
    for (name, value) in
        [("STS_ROLE_ARN", "arn:aws:iam::000000000000:role/svc-host"), ("STORE_WRITE_ONCE", "on")]
    {
        pairs.push((name.to_owned(), value.to_owned()));
    }
    let mut env = Env::from_pairs(pairs.iter().map(|(name, value)| (&**name, &**value)));
    let config = StoreConfig::read(&mut env);
    let credentials = HostCredentials::read(&mut env, config.as_ref());
    let (config, credentials) = env.finish(config.zip(credentials)).expect("the configuration must be valid");
    doctor::probe_store(&config, &credentials, RACE_LIMITS).await
}

fn need_text(need: CapabilityNeed) -> &'static str {
    match need {
        CapabilityNeed::Required => "needs it",
        CapabilityNeed::Recommended => "uses it",
        CapabilityNeed::Unused => "does not use it",
    }
}

fn cell(support: &Support) -> String {
    match support {
        Support::Yes => "yes".to_owned(),
        Support::No(_) => "**no**".to_owned(),
        Support::Unknown(_) => "–".to_owned(),
    }
}

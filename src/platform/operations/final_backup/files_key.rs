//! Checks that the platform has the key of the slot's file backup: a later machine could not restore the files without
//! it.

use svc_base::error_chain::format_chain;
use svc_files::{Cache, FilesError, Repository};
use svc_store::key::SlotPrefix;

use super::files::SavedFiles;
use crate::db::machine_row::MachineRow;
use crate::files_keys;
use crate::keys::KeyError;
use crate::operations::leased::LeasedOperation;

/// Returns `files`, or `Unreliable` if the files are completely saved but the platform cannot open the backup. The
/// machine sends its key after its final save, so the caller waits for a while if the key is missing.
pub async fn check_key(leased: &LeasedOperation<'_>, machine: &MachineRow, files: SavedFiles) -> SavedFiles {
    if !matches!(files, SavedFiles::Complete { .. }) {
        return files;
    }
    match find_key_problem(leased, machine).await {
        Some(KeyProblem { problem, can_improve }) => SavedFiles::Unreliable { problem, can_improve },
        None => files,
    }
}

struct KeyProblem {
    problem: String,
    can_improve: bool,
}

async fn find_key_problem(leased: &LeasedOperation<'_>, machine: &MachineRow) -> Option<KeyProblem> {
    let platform = leased.platform;
    let root = SlotPrefix::new(&machine.user, &machine.slot).files();
    let temporary = |problem: String| Some(KeyProblem { problem, can_improve: true });
    let permanent = |problem: &str| Some(KeyProblem { problem: problem.to_owned(), can_improve: false });
    let unchecked = |error: &(dyn std::error::Error + 'static)| {
        let error = format_chain(error);
        tracing::warn!(machine = %machine.id, error, "cannot check the key of the slot's file backup");
        temporary(format!("the platform cannot open the file backup: {error}"))
    };
    let session = match platform.db.session().await {
        Ok(session) => session,
        Err(error) => return unchecked(&error),
    };
    let key = files_keys::find(&session, &platform.seal, (&machine.user, &machine.slot)).await;
    drop(session);
    match key {
        Ok(Some(key)) => match Repository::open(platform.bucket.clone(), root, &key, Cache::none()).await {
            Ok(Some(_)) => None,
            Ok(None) => permanent("the repository of the file backup has no configuration"),
            Err(FilesError::WrongKey) => permanent("the platform's key does not open the file backup"),
            Err(error) => unchecked(&error),
        },
        Ok(None) => temporary("the platform does not have the key of the file backup".to_owned()),
        Err(KeyError::Db(error)) => unchecked(&error),
        Err(_) => permanent("the platform cannot decrypt the key of the file backup"),
    }
}

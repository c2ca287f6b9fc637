//! Checks that the platform has the key of the slot's file backup: a later machine could not restore the files without it.

use svc_base::error_chain::format_chain;
use svc_files::{Cache, FilesError, Repository};
use svc_store::key::SlotPrefix;

use super::files::SavedFiles;
use crate::db::machine_row::MachineRow;
use crate::file_keys;
use crate::keys::KeyError;
use crate::operations::leased::LeasedOperation;

/// Returns `files`, or, if the files are completely saved but the platform cannot open the backup, that they are only on
/// the machine. The machine sends its key after its last save, so the caller waits for a while.
pub async fn check_key(leased: &LeasedOperation<'_>, machine: &MachineRow, files: SavedFiles) -> SavedFiles {
    if !matches!(files, SavedFiles::Complete { .. }) {
        return files;
    }
    match find_key_problem(leased, machine).await {
        Some(problem) => SavedFiles::Unreliable { problem: problem.to_owned(), can_improve: true },
        None => files,
    }
}

async fn find_key_problem(leased: &LeasedOperation<'_>, machine: &MachineRow) -> Option<&'static str> {
    let platform = leased.platform;
    let (bucket, root) = (&platform.bucket, SlotPrefix::new(&machine.user, &machine.slot).files());
    let unknown = |error: &(dyn std::error::Error + 'static)| {
        tracing::warn!(machine = %machine.id, error = %format_chain(error), "cannot check the key of the slot's file backup");
        None
    };
    let session = match platform.db.session().await {
        Ok(session) => session,
        Err(error) => return unknown(&error),
    };
    let key = file_keys::find(&session, &platform.seal, (&machine.user, &machine.slot)).await;
    drop(session);
    match key {
        Ok(Some(key)) => match Repository::open(bucket.clone(), root, &key, Cache::none()).await {
            Ok(_) => None,
            Err(FilesError::WrongKey) => Some("the platform's key does not open the file backup"),
            Err(error) => unknown(&error),
        },
        Ok(None) => match bucket.head(&root.join("config")).await {
            Ok(Some(_)) => Some("the platform does not have the key of the file backup"),
            Ok(None) => None,
            Err(error) => unknown(&error),
        },
        Err(KeyError::Db(error)) => unknown(&error),
        Err(_) => Some("the platform cannot decrypt the key of the file backup"),
    }
}

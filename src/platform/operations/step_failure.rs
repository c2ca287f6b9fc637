//! Classifies the error of a step that creates a machine as the cause of the machine's failure.

use std::error::Error;

use super::step::StepError;
use svc_machine::event::CreationFailure;
use svc_provider::{ErrorKind, ProviderError};
use svc_store::StoreError;
use svc_store::pointer_io::PointerError;
use svc_store::sts::StsError;

impl StepError {
    pub fn creation_failure(&self) -> CreationFailure {
        match self {
            Self::Transient { source, .. } | Self::Permanent { source, .. } => {
                creation_failure(source.as_ref())
            }
            Self::Lost => CreationFailure::Internal,
        }
    }
}

/// Only the provider's own errors are attributed to it. A store error anywhere in the chain is attributed to the store.
pub fn creation_failure(source: &(dyn Error + Send + Sync + 'static)) -> CreationFailure {
    if let Some(error) = source.downcast_ref::<ProviderError>() {
        return match error.kind() {
            ErrorKind::Refused => CreationFailure::ProviderRefused,
            ErrorKind::NotFound
            | ErrorKind::Conflict
            | ErrorKind::Account
            | ErrorKind::Transient
            | ErrorKind::Ambiguous => CreationFailure::ProviderUnavailable,
        };
    }
    if matches!(source.downcast_ref(), Some(PointerError::Fenced(_))) {
        return CreationFailure::Fenced;
    }
    let is_store_error = |error: &(dyn Error + 'static)| {
        error.is::<PointerError>() || error.is::<StoreError>() || error.is::<StsError>()
    };
    let mut cause: Option<&(dyn Error + 'static)> = Some(source);
    while let Some(error) = cause {
        if is_store_error(error) {
            return CreationFailure::StoreFailed;
        }
        cause = error.source();
    }
    CreationFailure::Internal
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::DbError;
    use svc_machine::epoch::Epoch;
    use svc_provider::Cause;
    use svc_store::pointer::Fenced;

    #[test]
    fn creation_failure_names_failed_component() {
        let provider = |kind| {
            let cause =
                Cause::Response { status: 422, code: "invalid_input".to_owned(), message: String::new() };
            StepError::permanent("x", ProviderError::new("create server", kind, cause))
        };
        let fenced = Fenced { fence: Epoch(3), holder: None, mine: Epoch(2) };
        let store = || StoreError::Corrupt { key: "k".to_owned(), why: "w".to_owned() };
        let cases = [
            (provider(ErrorKind::Refused), CreationFailure::ProviderRefused),
            (provider(ErrorKind::Transient), CreationFailure::ProviderUnavailable),
            (StepError::permanent("x", PointerError::Fenced(fenced)), CreationFailure::Fenced),
            (StepError::transient("x", PointerError::Store(store())), CreationFailure::StoreFailed),
            (StepError::transient("x", PointerError::Contended), CreationFailure::StoreFailed),
            (StepError::transient("x", store()), CreationFailure::StoreFailed),
            (StepError::from(DbError::Contended), CreationFailure::Internal),
        ];
        for (error, expected) in cases {
            assert_eq!(error.creation_failure(), expected, "{error:?}");
        }
    }
}

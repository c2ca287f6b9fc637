//! Classifies the error of a step that creates a machine as the cause of the machine's failure.

use std::error::Error;

use super::step::StepError;
use svc_machine::event::CreationFailure;
use svc_provider::{ErrorKind, ProviderError};
use svc_store::StoreError;
use svc_store::pointer::FencedError;
use svc_store::pointer_io::PointerError;
use svc_store::sts::StsError;

impl StepError {
    pub fn creation_failure(&self) -> CreationFailure {
        match self {
            Self::Transient { source, .. } | Self::Permanent { source, .. } => {
                classify_creation_failure(source.as_ref())
            }
            Self::LeaseLost => CreationFailure::Internal,
        }
    }
}

/// Classifies an error by its chain of sources: the outermost error that names a component (the provider, the store, or
/// a fence in the store) determines the result.
pub fn classify_creation_failure(source: &(dyn Error + Send + Sync + 'static)) -> CreationFailure {
    let outermost: &(dyn Error + 'static) = source;
    let mut chain = std::iter::successors(Some(outermost), |&error| error.source());
    chain.find_map(classify_component_error).unwrap_or(CreationFailure::Internal)
}

/// Classifies this error without its sources; `None` if it names no component.
fn classify_component_error(error: &(dyn Error + 'static)) -> Option<CreationFailure> {
    if let Some(error) = error.downcast_ref::<ProviderError>() {
        return Some(match error.kind() {
            ErrorKind::Refused => CreationFailure::ProviderRefused,
            ErrorKind::NotFound
            | ErrorKind::Conflict
            | ErrorKind::Account
            | ErrorKind::Transient
            | ErrorKind::Ambiguous => CreationFailure::ProviderUnavailable,
        });
    }
    if matches!(error.downcast_ref(), Some(PointerError::Fenced(_))) || error.is::<FencedError>() {
        return Some(CreationFailure::Fenced);
    }
    let is_store_error = error.is::<PointerError>() || error.is::<StoreError>() || error.is::<StsError>();
    is_store_error.then_some(CreationFailure::StoreFailed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::DbError;
    use svc_machine::epoch::Epoch;
    use svc_provider::Cause;

    /// An error that wraps another one and names no component.
    #[derive(Debug, thiserror::Error)]
    #[error("cannot create the machine")]
    struct WrapperError(#[source] Box<dyn Error + Send + Sync>);

    #[test]
    fn creation_failure_names_failed_component() {
        let provider = |kind| {
            let cause =
                Cause::Response { status: 422, code: "invalid_input".to_owned(), message: String::new() };
            ProviderError::new("create server", kind, cause)
        };
        let refused = || provider(ErrorKind::Refused);
        let wrapped = |error: Box<dyn Error + Send + Sync>| StepError::permanent("x", WrapperError(error));
        let fenced = FencedError { fence_epoch: Epoch(3), holder: None, writer_epoch: Epoch(2) };
        let store = || StoreError::Corrupt { key: "k".to_owned(), reason: "w".to_owned() };
        let cases = [
            (StepError::permanent("x", refused()), CreationFailure::ProviderRefused),
            (StepError::permanent("x", provider(ErrorKind::Transient)), CreationFailure::ProviderUnavailable),
            (StepError::permanent("x", PointerError::Fenced(fenced)), CreationFailure::Fenced),
            (StepError::transient("x", PointerError::Store(store())), CreationFailure::StoreFailed),
            (StepError::transient("x", PointerError::TooManyConflicts), CreationFailure::StoreFailed),
            (StepError::transient("x", store()), CreationFailure::StoreFailed),
            (StepError::from(DbError::Contended), CreationFailure::Internal),
            (wrapped(Box::new(PointerError::Fenced(fenced))), CreationFailure::Fenced),
            (wrapped(Box::new(refused())), CreationFailure::ProviderRefused),
            (wrapped(Box::new(WrapperError(Box::new(store())))), CreationFailure::StoreFailed),
            (wrapped(Box::new(DbError::Contended)), CreationFailure::Internal),
        ];
        for (error, expected) in cases {
            assert_eq!(error.creation_failure(), expected, "{error:?}");
        }
    }
}

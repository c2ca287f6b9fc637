//! The errors of token verification.

/// The reason why a token of the identity provider is refused.
#[derive(Debug, thiserror::Error)]
pub enum JwtError {
    #[error("the token is malformed")]
    Malformed,
    #[error("the token's algorithm does not match its key")]
    WrongAlgorithm,
    #[error("the token's key is not one of the issuer's")]
    UnknownKey,
    #[error("the token's signature is invalid")]
    InvalidSignature,
    #[error("the token is from another issuer")]
    WrongIssuer,
    #[error("the token is for another audience")]
    WrongAudience,
    #[error("the token is expired or not yet valid")]
    OutsideValidity,
    /// The router's cache has a recent refusal of this token, or the client has sent too many unverified tokens.
    #[error("the token was refused recently, or the client has sent too many unverified tokens")]
    RefusedWithoutCheck,
    /// Verification needs the issuer's keys; the token may be valid.
    #[error("the issuer's keys cannot be fetched")]
    NoKeys,
}

//! The errors of token verification.

/// The reason a token from the identity provider is rejected.
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
    #[error("the token is from a different issuer")]
    WrongIssuer,
    #[error("the token is for a different audience")]
    WrongAudience,
    #[error("the token is expired or not yet valid")]
    OutsideValidity,
    /// Returned only by the router: its cache records a recent rejection of this token, or too many tokens from the
    /// client's address had to be verified.
    #[error(
        "the token was rejected recently, or too many tokens from the client's address had to be verified"
    )]
    RefusedWithoutCheck,
    /// The token could not be verified without the issuer's keys, so it may be valid.
    #[error("the issuer's keys cannot be fetched")]
    NoKeys,
}

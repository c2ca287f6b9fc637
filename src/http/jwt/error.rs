//! Why a token of the identity provider is refused.

/// The reason why a token is refused.
#[derive(Debug, thiserror::Error)]
pub enum JwtError {
    #[error("the token is malformed")]
    Malformed,
    #[error("the token's algorithm is not its key's")]
    Algorithm,
    #[error("the token's key is not one of the issuer's")]
    UnknownKey,
    #[error("the token's signature is invalid")]
    Signature,
    #[error("the token is from another issuer")]
    Issuer,
    #[error("the token is for another audience")]
    Audience,
    #[error("the token is expired or not yet valid")]
    Stale,
    /// It was refused recently.
    #[error("the token was refused before")]
    Refused,
    /// The only reason that does not concern the token.
    #[error("the issuer's keys cannot be fetched")]
    NoKeys,
}

//! Why a registry did not do what it was asked for, in words that say what to do.

use oci_client::errors::{OciDistributionError, OciEnvelope, OciErrorCode};

use crate::error::Error;

/// Explains the errors of a registry.
#[derive(Debug)]
pub(super) struct Refusal {
    /// The image that it was asked for.
    pub(super) image: String,
    pub(super) registry: String,
    /// Whether it was told no name and no password.
    pub(super) is_anonymous: bool,
    /// Whether it was reached without TLS.
    pub(super) is_plain: bool,
}

impl Refusal {
    /// What an error means.
    pub(super) fn of(&self, error: OciDistributionError) -> Error {
        let (image, registry) = (&self.image, &self.registry);
        match &error {
            OciDistributionError::AuthenticationFailure(_)
            | OciDistributionError::UnauthorizedError { .. } => self.status(401, ""),
            OciDistributionError::RegistryError { envelope, .. } => {
                let code = envelope.errors.first().map(|error| &error.code);
                match code {
                    Some(OciErrorCode::Unauthorized) => self.status(401, ""),
                    Some(OciErrorCode::Denied) => self.status(403, &words(envelope)),
                    Some(OciErrorCode::Toomanyrequests) => self.status(429, ""),
                    Some(
                        OciErrorCode::ManifestUnknown
                        | OciErrorCode::NameUnknown
                        | OciErrorCode::NotFound
                        | OciErrorCode::BlobUnknown,
                    ) => self.status(404, ""),
                    _ => self.status(400, &words(envelope)),
                }
            }
            OciDistributionError::ServerError { code, message, .. } => {
                let said = serde_json::from_str::<OciEnvelope>(message);
                self.status(*code, &said.map_or_else(|_| message.clone(), |said| words(&said)))
            }
            OciDistributionError::RequestError(cause) => match cause.status() {
                Some(status) => self.status(status.as_u16(), ""),
                None if cause.is_builder() => Error::system(
                    "TLS cannot be used on this machine; does it have certificates (ca-certificates)?",
                )
                .with_source(error),
                None => {
                    let plain = match self.is_plain {
                        true => String::new(),
                        false => format!(" One without TLS needs --insecure-registry {registry}"),
                    };
                    Error::unreachable(format!(
                        "registry {registry} does not answer; does it run, and is its name right?{plain}"
                    ))
                    .with_source(error)
                }
            },
            OciDistributionError::IoError(_) => {
                Error::system(format!("a layer of {image} cannot be moved")).with_source(error)
            }
            OciDistributionError::DigestError(_) => Error::refused(format!(
                "registry {registry} gave something else than what {image} names; it, or what is between, is broken"
            ))
            .with_source(error),
            _ => Error::refused(format!(
                "registry {registry} answers for {image} as no registry does"
            ))
            .with_source(error),
        }
    }

    fn status(&self, code: u16, said: &str) -> Error {
        let (image, registry) = (&self.image, &self.registry);
        let said = match said.trim() {
            "" => String::new(),
            said => format!(": {said}"),
        };
        match code {
            401 if self.is_anonymous => Error::refused(format!(
                "registry {registry} wants a name and a password for {image} (401), and docker's config.json has none \
                 that can be read; run `docker login {registry}`"
            )),
            401 => Error::refused(format!(
                "registry {registry} does not take the name and the password that docker's config.json has for it \
                 (401), or does not let them have {image}; run `docker login {registry}`"
            )),
            403 => Error::refused(format!(
                "registry {registry} denies {image} to this user (403){said}; ask who runs it for the right, or name \
                 another repository"
            )),
            404 => Error::not_found(format!(
                "registry {registry} has no {image} (404); is its name right, and is its repository there?"
            )),
            429 => Error::unreachable(format!(
                "registry {registry} has too many requests of this user (429); try again later, or log in"
            )),
            500.. => Error::unreachable(format!(
                "registry {registry} cannot do it now ({code}){said}; who runs it finds why in its log, a full disk \
                 perhaps"
            )),
            _ => Error::refused(format!(
                "registry {registry} refuses {image} ({code}){said}"
            )),
        }
    }
}

/// What a registry says itself.
fn words(envelope: &OciEnvelope) -> String {
    let said = envelope
        .errors
        .iter()
        .map(|error| match error.detail.as_str() {
            Some(detail) => format!("{} ({detail})", error.message),
            None => error.message.clone(),
        });
    said.collect::<Vec<_>>().join("; ")
}

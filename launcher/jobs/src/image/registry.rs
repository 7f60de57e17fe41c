//! A registry of images: connections, credentials, and the meaning of its refusals.

use std::fs::File;
use std::future::Future;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::time::Duration;

use accelerator_host::cli::{Error, Result};
use docker_credential::{CredentialRetrievalError, DockerCredential};
use futures_util::{StreamExt, TryStreamExt, stream};
use oci_client::client::{ClientConfig, ClientProtocol};
use oci_client::errors::{OciDistributionError, OciEnvelope, OciErrorCode};
use oci_client::manifest::{OCI_IMAGE_MEDIA_TYPE, OciDescriptor, OciManifest};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use tokio::runtime::{Builder, Runtime};

/// The registries of this machine's user. Names and passwords are those of `docker login`.
#[derive(Debug)]
pub(crate) struct Registries {
    insecure: Vec<String>,
    runtime: Runtime,
}

/// A repository of a registry, with a client for it.
pub(super) struct Repository<'a> {
    pub(super) reference: Reference,
    runtime: &'a Runtime,
    client: Client,
    refusal: Refusal,
}

/// The access to a repository.
#[derive(Clone, Copy, Debug)]
pub(super) enum Access {
    Pull,
    Push,
}

/// The time limit of an answer of a registry, which includes sending a layer.
const ANSWER: Duration = Duration::from_mins(30);
const CONNECT: Duration = Duration::from_secs(10);

/// The bytes of a file that are sent at once.
const BLOCK: u64 = 256 * 1024;

impl Registries {
    /// Makes the client. Registries in `insecure`, `HOST:PORT`, and those of this machine are reached without TLS.
    ///
    /// # Errors
    /// When this machine cannot make connections.
    pub(crate) fn new(insecure: &[String]) -> Result<Self> {
        // Another part of this program may have chosen it before.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = Builder::new_current_thread().enable_all().build();
        Ok(Self {
            insecure: insecure.to_vec(),
            runtime: runtime.map_err(|error| {
                Error::system("connections to registries cannot be made").with_source(error)
            })?,
        })
    }

    /// Opens the repository of an image.
    ///
    /// # Errors
    /// When `reference` is invalid, or its registry does not answer or refuses this user.
    pub(super) fn open(&self, reference: &str, access: Access) -> Result<Repository<'_>> {
        let reference: Reference = reference.parse().map_err(|error| {
            Error::usage(format!(
                "{reference:?} is not a reference of an image, such as registry.example/team/mnist:1"
            ))
            .with_source(error)
        })?;
        let registry = reference.resolve_registry();
        let is_plain = is_here(registry) || self.insecure.iter().any(|known| known == registry);
        let config = ClientConfig {
            protocol: match is_plain {
                true => ClientProtocol::Http,
                false => ClientProtocol::Https,
            },
            use_monolithic_push: true,
            read_timeout: Some(ANSWER),
            connect_timeout: Some(CONNECT),
            user_agent: concat!("accel-jobs/", env!("CARGO_PKG_VERSION")),
            ..ClientConfig::default()
        };
        let auth = credentials(reference.registry())?;
        let refusal = Refusal {
            image: reference.whole(),
            registry: reference.registry().to_owned(),
            is_anonymous: auth == RegistryAuth::Anonymous,
            is_plain,
        };
        let client = Client::try_from(config).map_err(|error| refusal.of(error))?;
        let operation = match access {
            Access::Pull => RegistryOperation::Pull,
            Access::Push => RegistryOperation::Push,
        };
        let known = self
            .runtime
            .block_on(client.auth(&reference, &auth, operation));
        known.map_err(|error| refusal.of(error))?;
        Ok(Repository {
            reference,
            runtime: &self.runtime,
            client,
            refusal,
        })
    }
}

impl Repository<'_> {
    /// Returns the manifest that `reference` names, and its digest.
    pub(super) fn manifest(&self, reference: &Reference) -> Result<(OciManifest, String)> {
        // The registry is known already, by the credentials of `open`.
        let auth = RegistryAuth::Anonymous;
        self.wait(self.client.pull_manifest(reference, &auth))
    }

    /// Writes a blob to `output`, and checks its digest.
    ///
    /// # Errors
    /// When there is none, or `output` cannot be written.
    pub(super) fn pull(&self, blob: &OciDescriptor, output: &mut dyn Write) -> Result<()> {
        self.wait(async {
            let mut blocks = self.client.pull_blob_stream(&self.reference, blob).await?;
            while let Some(block) = blocks.next().await {
                output.write_all(&block?)?;
            }
            Ok(output.flush()?)
        })
    }

    /// Returns `true` if the registry has the blob.
    pub(super) fn has(&self, digest: &str) -> Result<bool> {
        self.wait(self.client.blob_exists(&self.reference, digest))
    }

    /// Mounts a blob from another repository of the registry. Returns false if the registry does not do so.
    pub(super) fn mount(&self, digest: &str, from: &Reference) -> bool {
        let mounted = self.client.mount_blob(&self.reference, from, digest);
        self.runtime.block_on(mounted).is_ok()
    }

    /// Sends a blob: the `size` bytes of `file` from `start` on.
    ///
    /// # Errors
    /// When the registry does not accept it, or the file cannot be read.
    pub(super) fn push_file(&self, digest: &str, file: &File, start: u64, size: u64) -> Result<()> {
        let blocks = file
            .try_clone()
            .and_then(|mut file| {
                file.seek(SeekFrom::Start(start))?;
                Ok(Blocks(file.take(size)))
            })
            .map_err(|error| Error::system("a layer cannot be read").with_source(error))?;
        let blocks = stream::iter(blocks).map_ok(Into::into).map_err(Into::into);
        let pushed = self
            .client
            .push_blob_stream(&self.reference, blocks, digest, Some(size));
        self.wait(pushed).map(|_| ())
    }

    /// Sends a small blob.
    pub(super) fn push_bytes(&self, digest: &str, bytes: &[u8]) -> Result<()> {
        let blob = self
            .client
            .push_blob(&self.reference, bytes.to_vec(), digest);
        self.wait(blob).map(|_| ())
    }

    /// Sends a blob of another repository, without a copy on this machine.
    ///
    /// # Errors
    /// When it does not exist, or the registry does not accept it.
    pub(super) fn copy(&self, blob: &OciDescriptor, from: &Repository<'_>) -> Result<()> {
        let blocks = from.wait(from.client.pull_blob_stream(&from.reference, blob))?;
        let (blocks, size) = (blocks.map_err(Into::into), Some(size(blob)));
        let pushed = self
            .client
            .push_blob_stream(&self.reference, blocks, &blob.digest, size);
        self.wait(pushed).map(|_| ())
    }

    /// Names the image: stores its manifest under the reference.
    pub(super) fn push_manifest(&self, manifest: &[u8]) -> Result<()> {
        let Ok(kind) = OCI_IMAGE_MEDIA_TYPE.parse() else {
            return Err(Error::system("the type of a manifest is no header of HTTP"));
        };
        let named = self
            .client
            .push_manifest_raw(&self.reference, manifest.to_vec(), kind);
        self.wait(named).map(|_| ())
    }

    fn wait<T>(
        &self,
        answer: impl Future<Output = std::result::Result<T, OciDistributionError>>,
    ) -> Result<T> {
        let answer = self.runtime.block_on(answer);
        answer.map_err(|error| self.refusal.of(error))
    }
}

/// Returns the number of bytes of a blob.
pub(super) fn size(blob: &OciDescriptor) -> u64 {
    u64::try_from(blob.size).unwrap_or(0)
}

/// Blocks of a file.
struct Blocks(io::Take<File>);

impl Iterator for Blocks {
    type Item = io::Result<Vec<u8>>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut block = Vec::new();
        match Read::by_ref(&mut self.0)
            .take(BLOCK)
            .read_to_end(&mut block)
        {
            Ok(0) => None,
            Ok(_) => Some(Ok(block)),
            Err(error) => Some(Err(error)),
        }
    }
}

/// Returns `true` if a registry is on this machine, so that nobody can listen in.
fn is_here(registry: &str) -> bool {
    let host = registry.rsplit_once(':').map_or(registry, |(host, _)| host);
    ["localhost", "127.0.0.1", "[::1]"].contains(&host)
}

/// Reads the credentials that `docker login` stored for a registry.
fn credentials(registry: &str) -> Result<RegistryAuth> {
    let key = match registry {
        "docker.io" => "https://index.docker.io/v1/",
        registry => registry,
    };
    match docker_credential::get_credential(key) {
        Ok(DockerCredential::UsernamePassword(name, password)) => {
            Ok(RegistryAuth::Basic(name, password))
        }
        Ok(DockerCredential::IdentityToken(_)) => Err(Error::usage(format!(
            "docker's config.json has an identity token for {registry}, which is not understood here; run `docker login \
             {registry}` with a name and a password or token"
        ))),
        Err(
            CredentialRetrievalError::ConfigNotFound
            | CredentialRetrievalError::ConfigReadError
            | CredentialRetrievalError::NoCredentialConfigured,
        ) => Ok(RegistryAuth::Anonymous),
        Err(error) => Err(Error::usage(format!(
            "what docker's config.json has for {registry} cannot be used; run `docker login {registry}`"
        ))
        .with_source(error)),
    }
}

/// Explains the errors of a registry.
#[derive(Debug)]
struct Refusal {
    image: String,
    registry: String,
    /// True if the registry got no name and no password.
    is_anonymous: bool,
    /// True if the registry was reached without TLS.
    is_plain: bool,
}

impl Refusal {
    fn of(&self, error: OciDistributionError) -> Error {
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

/// Returns the messages of a registry.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_reached_without_tls() {
        for here in [
            "localhost",
            "localhost:5000",
            "127.0.0.1:5000",
            "[::1]:5000",
        ] {
            assert!(is_here(here), "{here}");
        }
        for other in [
            "registry.example",
            "localhost.example:5000",
            "10.0.0.1:5000",
        ] {
            assert!(!is_here(other), "{other}");
        }
    }
}

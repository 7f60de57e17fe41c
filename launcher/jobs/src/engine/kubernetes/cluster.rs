//! The API server: connections, requests, its version, and the meaning of its refusals.

use std::fmt::{self, Debug};
use std::future::Future;
use std::time::Duration;

use accelerator_host::cli::{Error, Result};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::apimachinery::pkg::version::Info;
use kube::api::{ApiResource, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{DynamicObject, Status};
use kube::{Api, Client, Config, Resource};
use serde::de::DeserializeOwned;

use crate::spec::EngineAddress;

/// A cluster, and a namespace of it.
#[derive(Clone)]
pub(super) struct Cluster {
    pub(super) client: Client,
    pub(super) namespace: String,
    /// The address of its API server.
    pub(super) url: String,
}

/// The time limits of a connection and of an answer.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// The pauses before a request to a busy server is repeated.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
];

impl Cluster {
    /// Finds the cluster of the kubeconfig, or the one that this process runs in. Sends no request yet.
    ///
    /// # Errors
    /// When there is neither, or the configuration cannot be read.
    pub(super) async fn find(address: &EngineAddress) -> Result<Self> {
        let wrong = |what: String| {
            move |error: kube::config::KubeconfigError| Error::usage(what).with_source(error)
        };
        let mut config = match Kubeconfig::read() {
            Ok(kubeconfig) => {
                let options = KubeConfigOptions {
                    context: address.context.clone(),
                    ..KubeConfigOptions::default()
                };
                let context = address.context.as_deref().unwrap_or("that is current");
                Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(wrong(format!(
                    "the kubeconfig has no usable context {context}; `kubectl config get-contexts` shows those that it has"
                )))?
            }
            Err(error) => match (Config::incluster(), &address.context) {
                (Ok(config), None) => config,
                _ => {
                    return Err(wrong(
                        "Kubernetes needs a kubeconfig, at KUBECONFIG or ~/.kube/config".to_owned(),
                    )(error));
                }
            },
        };
        config.connect_timeout = Some(CONNECT_LIMIT);
        // `ask` ends sooner, and also repeats requests after an error 500.
        config.default_retry = false;
        let url = config.cluster_url.to_string();
        let namespace = address
            .namespace
            .clone()
            .unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|error| {
            Error::usage(format!("the kubeconfig's way to {url} cannot be used")).with_source(error)
        })?;
        Ok(Self {
            client,
            namespace,
            url,
        })
    }

    /// Returns the same cluster with another namespace.
    pub(super) fn in_namespace(&self, namespace: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            ..self.clone()
        }
    }

    /// Asks the server for its version.
    ///
    /// # Errors
    /// When it does not answer.
    pub(super) async fn version(&self) -> Result<ServerVersion> {
        let info = self
            .ask("its version", || self.client.apiserver_version())
            .await?;
        Ok(ServerVersion::read(&info))
    }

    /// Returns the API of a type in this namespace.
    pub(super) fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Returns the API of a resource in this namespace.
    pub(super) fn dynamic(&self, resource: &ApiResource) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, resource)
    }

    /// Lists the objects that have the label.
    pub(super) async fn labelled<K>(
        &self,
        what: &str,
        api: &Api<K>,
        selector: &str,
    ) -> Result<Vec<K>>
    where
        K: Clone + Debug + DeserializeOwned,
    {
        let parameters = ListParams::default().labels(selector);
        let list = self.ask(what, || api.list(&parameters)).await?;
        Ok(list.items)
    }

    /// Sends a request about `what`, and repeats it if the server is only busy.
    pub(super) async fn ask<T, F>(&self, what: &str, question: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = kube::Result<T>>,
    {
        self.try_ask(question)
            .await
            .map_err(|error| error.into_error(what, self))
    }

    /// Does the same, and returns the error of the API.
    pub(super) async fn try_ask<T, F>(
        &self,
        question: impl Fn() -> F,
    ) -> std::result::Result<T, ApiError>
    where
        F: Future<Output = kube::Result<T>>,
    {
        self.ask_while(is_transient, question).await
    }

    /// Does the same, and repeats the request while `is_transient` returns true for its error.
    pub(super) async fn ask_while<T, F>(
        &self,
        is_transient: fn(&kube::Error) -> bool,
        question: impl Fn() -> F,
    ) -> std::result::Result<T, ApiError>
    where
        F: Future<Output = kube::Result<T>>,
    {
        let mut pauses = PAUSES.iter();
        loop {
            let answer = tokio::time::timeout(ANSWER_LIMIT, question()).await;
            match (answer, pauses.next()) {
                (Ok(Ok(answer)), _) => return Ok(answer),
                (Ok(Err(error)), Some(pause)) if is_transient(&error) => {
                    tokio::time::sleep(*pause).await;
                }
                (Ok(Err(error)), _) => return Err(ApiError::Answered(error)),
                (Err(_), _) => return Err(ApiError::TimedOut(ANSWER_LIMIT)),
            }
        }
    }
}

/// Returns the seconds since 1970.
pub(super) fn seconds(time: &Time) -> u64 {
    u64::try_from(time.0.as_second()).unwrap_or(0)
}

/// The version of an API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ServerVersion {
    major: u32,
    minor: u32,
}

impl ServerVersion {
    /// The version to assume if the server's is unknown.
    pub(super) const CURRENT: Self = Self::new(1, 33);

    /// Makes a version.
    pub(super) const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// Reads the version that a server reports. Some report `20+`.
    pub(super) fn read(info: &Info) -> Self {
        let number = |text: &str| {
            let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
            digits.parse().ok()
        };
        match (number(&info.major), number(&info.minor)) {
            (Some(major), Some(minor)) => Self::new(major, minor),
            _ => Self::CURRENT,
        }
    }

    /// Returns `true` if a Job can number its pods. Older servers drop the field silently.
    pub(super) fn has_indexed_jobs(self) -> bool {
        self >= Self::new(1, 22)
    }

    /// Returns `true` if a Job can have a policy for failures of pods.
    pub(super) fn has_pod_failure_policy(self) -> bool {
        self >= Self::new(1, 31)
    }
}

impl fmt::Display for ServerVersion {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.major, self.minor)
    }
}

/// The reason why there is no answer.
#[derive(Debug)]
pub(super) enum ApiError {
    /// The server refused, or the connection to it failed.
    Answered(kube::Error),
    /// No answer came in this time.
    TimedOut(Duration),
}

/// Returns `true` if the same request may succeed in a moment.
fn is_transient(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 429 | 500 | 503 | 504))
}

/// Returns `true` if the server has not begun to carry out the request.
pub(super) fn is_not_carried_out(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 429)
}

impl ApiError {
    /// Returns the status code of the answer, if there was one.
    pub(super) fn code(&self) -> Option<u16> {
        match self {
            Self::Answered(kube::Error::Api(status)) => Some(status.code),
            Self::Answered(_) | Self::TimedOut(_) => None,
        }
    }

    /// Makes an error that names the object in question (`what`), the cluster, and the remedy.
    pub(super) fn into_error(self, what: &str, cluster: &Cluster) -> Error {
        let place = format!("Kubernetes at {}", cluster.url);
        match self {
            Self::TimedOut(limit) => Error::unreachable(format!(
                "{place} does not answer within {} s about {what}; try again, or look at the control plane",
                limit.as_secs()
            )),
            Self::Answered(kube::Error::Api(status)) => of_status(&status, what, &cluster.namespace, &place),
            Self::Answered(kube::Error::Auth(error)) => Error::refused(format!(
                "the credentials for {place} cannot be had; log in again, as for kubectl"
            ))
            .with_source(error),
            Self::Answered(error @ (kube::Error::Service(_) | kube::Error::HyperError(_))) => {
                Error::unreachable(format!(
                    "{place} cannot be reached; check that `kubectl version` reaches it with the same context"
                ))
                .with_source(error)
            }
            Self::Answered(error) => Error::system(format!("{place} answers about {what} what is not understood"))
                .with_source(error),
        }
    }
}

fn of_status(status: &Status, what: &str, namespace: &str, place: &str) -> Error {
    let said = status.message.trim();
    match status.code {
        401 => Error::refused(format!(
            "{place} does not accept the credentials of this context, whose token may have expired; log in again, \
             as for kubectl"
        )),
        403 if said.contains("exceeded quota") => Error::refused(format!(
            "{what} does not fit the quota of namespace {namespace}: {said}; ask for less, or stop a job"
        )),
        403 => Error::refused(format!(
            "{place} forbids {what} in namespace {namespace}: {said}; ask for that right, or give another --namespace"
        )),
        404 if said.starts_with("namespaces ") => Error::refused(format!(
            "{place} has no namespace {namespace}; give another one by --namespace, or have it made"
        )),
        404 if status
            .details
            .as_ref()
            .is_none_or(|details| details.name.is_empty()) =>
        {
            Error::refused(format!(
                "{place} does not know {what}: {}",
                missing_kind(what)
            ))
        }
        404 => Error::not_found(format!(
            "{what} is not in namespace {namespace} of {place}: {said}"
        )),
        409 => Error::refused(format!(
            "{what} is already in namespace {namespace} of {place}; give another --name, or remove that one: \
             kubectl delete -n {namespace} {what}"
        )),
        400 | 422 => Error::refused(format!("{place} refuses {what}: {said}")),
        429 | 503 | 504 => Error::unreachable(format!(
            "{place} is too busy for {what} ({}: {said}); try again",
            status.code
        )),
        500.. => Error::unreachable(format!(
            "{place} has failed at {what} ({}: {said}); try again, or look at the control plane",
            status.code
        )),
        code => Error::refused(format!("{place} refuses {what} ({code}: {said})")),
    }
}

/// Returns the remedy for a kind of object that a cluster does not know.
fn missing_kind(what: &str) -> &'static str {
    match what {
        what if what.contains("pytorchjob") => {
            "its cluster has no Kubeflow training operator; have one installed, or use --kind job"
        }
        what if what.contains("trainjob") => {
            "its cluster has no Kubeflow Trainer; have it installed, or use --kind job"
        }
        _ => "its version is too old, or not that of Kubernetes",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared() {
        let read = |major: &str, minor: &str| {
            ServerVersion::read(&Info {
                major: major.to_owned(),
                minor: minor.to_owned(),
                ..Info::default()
            })
        };
        assert_eq!(read("1", "20+"), ServerVersion::new(1, 20));
        assert!(!read("1", "20").has_indexed_jobs());
        assert!(read("1", "22").has_indexed_jobs());
        assert!(!read("1", "30").has_pod_failure_policy());
        assert!(
            read("1", "31").has_pod_failure_policy() && read("2", "0").has_pod_failure_policy()
        );
        assert_eq!(read("", "x"), ServerVersion::CURRENT);
    }

    fn text(code: u16, message: &str, what: &str) -> String {
        let status = Status {
            code,
            message: message.to_owned(),
            ..Status::default()
        };
        of_status(&status, what, "team", "Kubernetes at https://k").to_string()
    }

    #[test]
    fn every_refusal_says_what_to_do() {
        for (code, message, what, expected) in [
            (401, "Unauthorized", "its version", "log in again"),
            (
                403,
                "User \"a\" cannot create resource \"jobs\"",
                "job.batch/m",
                "cannot create resource \"jobs\"",
            ),
            (
                403,
                "exceeded quota: q, requested: pods=2",
                "job.batch/m",
                "does not fit the quota of namespace team",
            ),
            (
                404,
                "the server could not find the requested resource",
                "pytorchjob.kubeflow.org/m",
                "training operator",
            ),
            (
                404,
                "not found",
                "trainjob.trainer.kubeflow.org/m",
                "Kubeflow Trainer",
            ),
            (
                404,
                "namespaces \"team\" not found",
                "job.batch/m",
                "has no namespace team",
            ),
            (
                409,
                "already exists",
                "service/m",
                "kubectl delete -n team service/m",
            ),
            (
                422,
                "spec.x: Invalid value",
                "job.batch/m",
                "spec.x: Invalid value",
            ),
            (429, "slow down", "job.batch/m", "try again"),
            (500, "etcd", "job.batch/m", "control plane"),
        ] {
            let text = text(code, message, what);
            assert!(text.contains(expected), "{text}");
            assert!(
                text.contains("Kubernetes at https://k") || code == 403,
                "{text}"
            );
        }
    }

    #[test]
    fn what_may_pass_is_asked_again() {
        let error = |code| {
            kube::Error::Api(Box::new(Status {
                code,
                ..Status::default()
            }))
        };
        assert!(is_transient(&error(429)) && is_transient(&error(500)));
        assert!(!is_transient(&error(409)) && !is_transient(&error(403)));
    }
}

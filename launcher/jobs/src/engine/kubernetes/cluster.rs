//! The API server: how it is reached, and how it is asked.

use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use kube::api::{ApiResource, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::DynamicObject;
use kube::{Api, Client, Config, Resource};
use serde::de::DeserializeOwned;

use super::api_error::{ApiError, is_passing};
use super::version::ServerVersion;
use crate::error::{Error, Result};
use crate::spec::EngineAddress;

/// A cluster, and a namespace of it.
#[derive(Clone)]
pub(super) struct Cluster {
    pub(super) client: Client,
    pub(super) namespace: String,
    /// The address of its API server.
    pub(super) url: String,
}

/// How long a connection, and an answer, may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
const ANSWER_LIMIT: Duration = Duration::from_secs(30);
/// How long a server that is busy is left alone before it is asked again.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(250),
    Duration::from_millis(500),
    Duration::from_secs(1),
];

impl Cluster {
    /// The cluster of the kubeconfig, or the one that this very process runs in. It is not asked yet.
    ///
    /// # Errors
    /// When there is neither, or what there is cannot be read.
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
        // Ours ends sooner, and takes in error 500.
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

    /// The same cluster, another namespace.
    pub(super) fn in_namespace(&self, namespace: &str) -> Self {
        Self {
            namespace: namespace.to_owned(),
            ..self.clone()
        }
    }

    /// Its version.
    ///
    /// # Errors
    /// When it does not answer.
    pub(super) async fn version(&self) -> Result<ServerVersion> {
        let info = self
            .ask("its version", || self.client.apiserver_version())
            .await?;
        Ok(ServerVersion::read(&info))
    }

    /// The objects of a type in this namespace.
    pub(super) fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// The objects of a resource in this namespace.
    pub(super) fn dynamic(&self, resource: &ApiResource) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, resource)
    }

    /// Those objects that have the label.
    ///
    /// # Errors
    /// When the server refuses it or does not answer.
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

    /// An answer to a question about `what`, which is asked again where the server is only busy.
    ///
    /// # Errors
    /// When the server refuses it, or does not answer in time.
    pub(super) async fn ask<T, F>(&self, what: &str, question: impl Fn() -> F) -> Result<T>
    where
        F: Future<Output = kube::Result<T>>,
    {
        self.try_ask(question)
            .await
            .map_err(|error| error.into_error(what, self))
    }

    /// The same, with the error as it is.
    pub(super) async fn try_ask<T, F>(
        &self,
        question: impl Fn() -> F,
    ) -> std::result::Result<T, ApiError>
    where
        F: Future<Output = kube::Result<T>>,
    {
        self.ask_while(is_passing, question).await
    }

    /// The same, asked again while `is_passing` says so of the answer.
    pub(super) async fn ask_while<T, F>(
        &self,
        is_passing: fn(&kube::Error) -> bool,
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
                (Ok(Err(error)), Some(pause)) if is_passing(&error) => {
                    tokio::time::sleep(*pause).await;
                }
                (Ok(Err(error)), _) => return Err(ApiError::Answered(error)),
                (Err(_), _) => return Err(ApiError::TimedOut(ANSWER_LIMIT)),
            }
        }
    }
}

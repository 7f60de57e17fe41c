//! The engine Kubernetes, by its API.
//!
//! `job_image` says which image runs, `objects` what a job is made of; `submission` makes it and `removal` removes it; `owner`, `pods` and `details` say
//! how far it is. All of it is known by the labels of the job, its name and its nonce, and nothing is kept here but the
//! cluster's address.

mod api_error;
mod changes;
mod cluster;
mod details;
mod job_image;
mod logs;
mod nodes;
mod objects;
mod owner;
mod pods;
mod removal;
mod submission;
mod version;

use std::cell::RefCell;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use super::{Engine, LogsRequest, Submitted, Volume, new_token};
use crate::error::{Error, Result};
use crate::job::{JobDetails, JobRecord, NodeUsage};
use crate::output::warn;
use crate::spec::{EngineAddress, JobSpec};
use changes::Changes;
use cluster::Cluster;
use job_image::JobImage;
use objects::Objects;
use version::ServerVersion;

/// Jobs of Kubernetes.
pub(crate) struct KubernetesEngine {
    runtime: Runtime,
    cluster: Cluster,
    /// The job that is waited for, and its changes.
    watched: RefCell<Option<(String, Changes)>>,
}

/// Where the folder of a job keeps the address of the cluster that has it.
const CLUSTER_FILE: &str = "cluster";
/// How long to wait for a change of a job. Some of what is told of it changes with time alone.
const PAUSE: Duration = Duration::from_secs(10);

impl KubernetesEngine {
    /// Finds the cluster of the kubeconfig, or the one that this process runs in. Nothing is asked of it yet.
    ///
    /// # Errors
    /// When there is neither.
    pub(crate) fn connect(address: &EngineAddress) -> Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::system("cannot wait for a network").with_source(error))?;
        let cluster = runtime.block_on(Cluster::find(address))?;
        Ok(Self {
            runtime,
            cluster,
            watched: RefCell::new(None),
        })
    }

    /// The cluster and the namespace in which a job is.
    fn of_job(&self, job: &JobRecord, folder: &Path) -> Result<Cluster> {
        let name = &job.spec.name;
        // A record without the file is that of a submission that was killed.
        if let Ok(url) = fs::read_to_string(folder.join(CLUSTER_FILE))
            && url != self.cluster.url
        {
            return Err(Error::usage(format!(
                "job {name} is at {url}, and this context leads to {}; give the one that leads there by --context",
                self.cluster.url
            )));
        }
        Ok(self.in_namespace_of(job))
    }

    fn in_namespace_of(&self, job: &JobRecord) -> Cluster {
        let namespace = job.id.split_once('/').map(|(namespace, _)| namespace);
        self.cluster
            .in_namespace(namespace.unwrap_or(&self.cluster.namespace))
    }
}

impl Engine for KubernetesEngine {
    fn render(&self, spec: &JobSpec) -> Result<String> {
        let version = match self.runtime.block_on(self.cluster.version()) {
            Err(error) if error.is_unreachable() => {
                warn(&format!(
                    "{error}; these objects are for Kubernetes {}",
                    ServerVersion::CURRENT
                ));
                ServerVersion::CURRENT
            }
            version => version?,
        };
        let mut spec = spec.clone();
        if let Some(password) = spec.env.get_mut("GIT_SYNC_PASSWORD") {
            *password = "(not shown)".to_owned();
        }
        let job_image = JobImage::of(&spec)?;
        Objects::of(job_image.spec(), version, &new_token()?)?.yaml()
    }

    fn submit(&self, spec: &JobSpec, folder: &Path) -> Result<Submitted> {
        let cluster = &self.cluster;
        let file = folder.join(CLUSTER_FILE);
        fs::write(&file, &cluster.url).map_err(|error| {
            Error::system(format!("{} cannot be written", file.display())).with_source(error)
        })?;
        let name = spec.name.as_str();
        let version = self.runtime.block_on(cluster.version())?;
        let job_image = JobImage::of(spec)?;
        let objects = Objects::of(job_image.spec(), version, &new_token()?)?;
        self.runtime
            .block_on(submission::check(cluster, &objects))?;
        let mut created = job_image.push()?;
        created.extend(
            self.runtime
                .block_on(submission::make(cluster, &objects, spec))?,
        );
        Ok(Submitted {
            id: format!("{}/{name}", cluster.namespace),
            created,
        })
    }

    fn get(&self, job: &JobRecord, folder: &Path) -> Result<JobDetails> {
        let cluster = self.of_job(job, folder)?;
        self.runtime.block_on(details::details(&cluster, job))
    }

    fn logs(
        &self,
        job: &JobRecord,
        folder: &Path,
        request: &LogsRequest,
        output: &mut dyn Write,
    ) -> Result<()> {
        let cluster = self.of_job(job, folder)?;
        self.runtime
            .block_on(logs::logs(&cluster, job, request.node, request, output))
    }

    fn stop(&self, job: &JobRecord, folder: &Path) -> Result<()> {
        let cluster = self.of_job(job, folder)?;
        self.runtime.block_on(removal::remove(&cluster, &job.spec))
    }

    fn pause(&self, job: &JobRecord) {
        let name = job.spec.name.to_string();
        let mut watched = self.watched.borrow_mut();
        let changes = match &mut *watched {
            Some((known, changes)) if *known == name => changes,
            watched => {
                let cluster = self.in_namespace_of(job);
                let changes = Changes::of(&cluster, &job.spec);
                &mut watched.insert((name, changes)).1
            }
        };
        self.runtime.block_on(changes.next(PAUSE));
    }

    fn nodes(&self) -> Result<Vec<NodeUsage>> {
        self.runtime.block_on(nodes::nodes(&self.cluster))
    }

    fn volumes(&self) -> Result<Vec<Volume>> {
        self.runtime.block_on(nodes::volumes(&self.cluster))
    }
}

//! The engine Kubernetes, by its API.
//!
//! `objects` describes the parts of a job, `submission` makes and removes them, `details` and `pods` report its state. The
//! objects are found by the job's labels, its name and its nonce; only the cluster's address is stored here.

mod cluster;
mod details;
mod logs;
mod nodes;
mod objects;
mod pods;
mod submission;

use std::cell::RefCell;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use accelerator_host::cli::{Error, Result};
use tokio::runtime::{Builder, Runtime};

use super::{Engine, LogsRequest, Submitted, Volume, new_token};
use crate::image::{BuiltImage, ImageBuild, Registries};
use crate::job::{JobDetails, JobRecord, NodeUsage};
use crate::output::warn;
use crate::spec::{EngineAddress, JobSpec, launcher_here};
use cluster::{Cluster, ServerVersion};
use details::Changes;
use objects::Objects;

pub(crate) struct KubernetesEngine {
    runtime: Runtime,
    cluster: Cluster,
    /// The job that is waited for, and its changes.
    watched: RefCell<Option<(String, Changes)>>,
}

/// The file in the folder of a job that has the address of its cluster.
const CLUSTER_FILE: &str = "cluster";
/// The longest wait for a change of a job. Some of its details change with time alone.
const PAUSE: Duration = Duration::from_secs(10);

impl KubernetesEngine {
    /// Finds the cluster of the kubeconfig, or the one that this process runs in. Sends no request yet.
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

    fn of_job(&self, job: &JobRecord, folder: &Path) -> Result<Cluster> {
        let name = &job.spec.name;
        // If a submission was killed, its record has no such file.
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
            Err(error) if error.is_unreachable() => assumed_version(&error),
            version => version?,
        };
        render_for(version, spec)
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
        self.runtime
            .block_on(submission::remove(&cluster, &job.spec))
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

/// Returns the objects of a job. Without a kubeconfig, they are those for the version that is current.
///
/// # Errors
/// If the cluster does not report its version, the given context does not exist, or the job cannot be described.
pub(crate) fn render(spec: &JobSpec, address: &EngineAddress) -> Result<String> {
    match KubernetesEngine::connect(address) {
        Ok(engine) => engine.render(spec),
        Err(error) if address.context.is_some() => Err(error),
        Err(error) => render_for(assumed_version(&error), spec),
    }
}

/// Returns the version to assume for a cluster that did not say its own.
fn assumed_version(error: &Error) -> ServerVersion {
    warn(&format!(
        "{error}; these objects are for Kubernetes {}",
        ServerVersion::CURRENT
    ));
    ServerVersion::CURRENT
}

fn render_for(version: ServerVersion, spec: &JobSpec) -> Result<String> {
    let mut spec = spec.clone();
    if let Some(password) = spec.env.get_mut("GIT_SYNC_PASSWORD") {
        *password = "(not shown)".to_owned();
    }
    let job_image = JobImage::of(&spec)?;
    Objects::of(job_image.spec(), version, &new_token()?)?.yaml()
}

/// A job as pods see it, and the image that has to be pushed first.
#[derive(Debug)]
struct JobImage {
    spec: JobSpec,
    built: Option<Built>,
}

#[derive(Debug)]
struct Built {
    image: BuiltImage,
    registries: Registries,
    reference: String,
}

impl JobImage {
    /// Builds the image, if one is to be built. Does not push it.
    ///
    /// # Errors
    /// When the program is not there, or cannot run on the base.
    pub(super) fn of(spec: &JobSpec) -> Result<Self> {
        let mut spec = spec.clone();
        let options = &spec.options.kubernetes;
        let (Some(base), Some(reference)) = (options.base_image.clone(), options.push.clone())
        else {
            return Ok(Self { spec, built: None });
        };
        if let [shell, option, _] = &spec.program[..]
            && (shell.as_str(), option.as_str()) == ("sh", "-c")
        {
            return Err(Error::usage(
                "--base-image takes a program and its arguments, a word each; a command of the shell needs --image",
            ));
        }
        let build = ImageBuild {
            program: spec.program_file()?,
            launcher: launcher_here()?,
            includes: options.include.clone(),
            base,
        };
        let registries = Registries::new(&options.insecure_registry)?;
        let image = build.build(&registries)?;
        // By its digest, so that every pod runs this image even if another one is pushed later.
        let repository = without_tag(&reference);
        spec.options.kubernetes.image = Some(format!("{repository}@{}", image.digest()));
        let program = build.program_path()?;
        if let Some(first) = spec.program.first_mut() {
            *first = program;
        }
        Ok(Self {
            spec,
            built: Some(Built {
                image,
                registries,
                reference,
            }),
        })
    }

    /// Returns the job with its image, and with the path of the program in that image.
    pub(super) fn spec(&self) -> &JobSpec {
        &self.spec
    }

    /// Pushes the image that was built. Returns the lines to print.
    pub(super) fn push(&self) -> Result<Vec<String>> {
        let Some(built) = &self.built else {
            return Ok(Vec::new());
        };
        let pushed = built.image.push(&built.registries, &built.reference)?;
        Ok(vec![format!(
            "image {} pushed as {}",
            pushed.reference_by_digest, pushed.reference
        )])
    }
}

/// Returns `host:5000/team/mnist` for `host:5000/team/mnist:1`.
fn without_tag(reference: &str) -> &str {
    match reference.rsplit_once(':') {
        Some((repository, tag)) if !tag.contains('/') => repository,
        _ => reference,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_no_tag() {
        assert_eq!(
            without_tag("host:5000/team/mnist:1"),
            "host:5000/team/mnist"
        );
        assert_eq!(without_tag("host:5000/mnist"), "host:5000/mnist");
        assert_eq!(without_tag("mnist"), "mnist");
    }
}

//! The engines that run jobs, behind one trait.
//!
//! A new engine needs a folder here with an implementation of [`Engine`], a variant of [`EngineKind`], and its arm in
//! [`connect`].

#[cfg(feature = "kubernetes")]
pub(crate) mod kubernetes;
pub(crate) mod local;
#[cfg(feature = "ray")]
pub(crate) mod ray;
#[cfg(feature = "slurm")]
pub(crate) mod slurm;

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use accelerator_host::cli::{Error, Result};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::Serialize;

use crate::job::{JobDetails, JobRecord, NodeUsage};
use crate::spec::{EngineAddress, EngineKind, JobSpec};

/// Connects to an engine.
///
/// # Errors
/// When its program or its configuration is missing.
pub(crate) fn connect(kind: EngineKind, address: &EngineAddress) -> Result<Box<dyn Engine>> {
    // Only engines that are reached over a network have addresses.
    let _ = address;
    match kind {
        EngineKind::Local => Ok(Box::new(local::LocalEngine)),
        #[cfg(feature = "slurm")]
        EngineKind::Slurm => Ok(Box::new(slurm::SlurmEngine::connect()?)),
        #[cfg(feature = "kubernetes")]
        EngineKind::Kubernetes => Ok(Box::new(kubernetes::KubernetesEngine::connect(address)?)),
        #[cfg(feature = "ray")]
        EngineKind::Ray => Ok(Box::new(ray::RayEngine::connect(address)?)),
    }
}

/// Returns the script, objects or request that a submission would send, also where the engine cannot be reached.
///
/// # Errors
/// When the engine cannot run such a job; the message names the option.
pub(crate) fn render(spec: &JobSpec, address: &EngineAddress) -> Result<String> {
    match spec.engine {
        #[cfg(feature = "slurm")]
        EngineKind::Slurm => slurm::SlurmEngine.render(spec),
        #[cfg(feature = "kubernetes")]
        EngineKind::Kubernetes => kubernetes::render(spec, address),
        kind => connect(kind, address)?.render(spec),
    }
}

/// An engine that runs jobs. Callers name jobs by names and ids; the engine keeps nothing between calls.
pub(crate) trait Engine {
    /// Returns the script, objects or request that `submit` would send. Changes nothing.
    ///
    /// # Errors
    /// When the engine cannot run such a job; the message names the option.
    fn render(&self, spec: &JobSpec) -> Result<String>;

    /// Submits a job. `folder` is the job's own on this machine. If this fails, nothing of the job is left.
    ///
    /// # Errors
    /// When the engine refuses it or does not answer.
    fn submit(&self, spec: &JobSpec, folder: &Path) -> Result<Submitted>;

    /// Returns the state of a job.
    ///
    /// # Errors
    /// [`Error::is_not_found`] when the engine has forgotten the job, or has another one with its name or number;
    /// another error when it does not answer.
    fn get(&self, job: &JobRecord, folder: &Path) -> Result<JobDetails>;

    /// Writes the output of an instance.
    ///
    /// # Errors
    /// When the engine refuses it or does not answer, or `output` cannot be written.
    fn logs(
        &self,
        job: &JobRecord,
        folder: &Path,
        request: &LogsRequest,
        output: &mut dyn Write,
    ) -> Result<()>;

    /// Ends a job and removes all of it from the engine. A job that has ended, or is gone, is not an error; another job
    /// that has its name or number is not touched.
    ///
    /// # Errors
    /// When the engine refuses it or does not answer.
    fn stop(&self, job: &JobRecord, folder: &Path) -> Result<()>;

    /// Waits between two questions about one job, until it may have changed.
    fn pause(&self, _job: &JobRecord) {
        thread::sleep(Duration::from_millis(200));
    }

    /// Lists the nodes and their allocated resources.
    ///
    /// # Errors
    /// When the engine refuses it or does not answer.
    fn nodes(&self) -> Result<Vec<NodeUsage>>;

    /// Lists the volumes that jobs can mount.
    ///
    /// # Errors
    /// When the engine has no volumes.
    fn volumes(&self) -> Result<Vec<Volume>> {
        Err(Error::usage(
            "only Kubernetes has volumes that jobs mount by name; give --engine kubernetes",
        ))
    }
}

/// A job that an engine has accepted.
#[derive(Clone, Debug)]
pub(crate) struct Submitted {
    /// The engine's name of the job.
    pub(crate) id: String,
    /// A line per object that was made: `service/mnist created`.
    pub(crate) created: Vec<String>,
}

/// A request for output of a job.
#[derive(Clone, Debug, Default)]
pub(crate) struct LogsRequest {
    /// The node whose output is requested.
    pub(crate) node: usize,
    /// The choice between the output so far and all output until the job ends.
    pub(crate) mode: LogsMode,
    /// The number of last lines to show; `None` for all.
    pub(crate) tail: Option<usize>,
}

/// The choice between the output so far and all output until the job ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LogsMode {
    /// The output so far.
    #[default]
    Once,
    /// The output until the job has ended.
    Follow,
}

/// A volume that jobs mount by its name.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Volume {
    pub(crate) name: String,
    pub(crate) access_mode: String,
    pub(crate) description: String,
    pub(crate) owner: String,
    /// Seconds since 1970.
    pub(crate) created: Option<u64>,
}

/// The name of the file with the job's secret, in the folder of the job.
const TOKEN_FILE: &str = "token";

/// Returns a new secret of agents and ranks, in hexadecimal digits.
///
/// # Errors
/// When the system has no random bytes.
fn new_token() -> Result<String> {
    hexadecimal::<32>()
}

/// Returns a new nonce, in hexadecimal digits. Labels of Kubernetes have no room for a longer one.
///
/// # Errors
/// When the system has no random bytes.
pub(crate) fn new_nonce() -> Result<String> {
    hexadecimal::<16>()
}

/// Returns the path of the secret of the job in this folder.
fn token_path(folder: &Path) -> PathBuf {
    folder.join(TOKEN_FILE)
}

/// Writes a new secret into the folder of a job, which only its owner can read.
///
/// # Errors
/// When the system has no random bytes, or the folder has a secret already.
fn write_token(folder: &Path) -> Result<()> {
    let token = new_token()?;
    let write = || -> io::Result<()> {
        let mut options = OpenOptions::new();
        options.create_new(true).write(true).mode(0o600);
        let mut file = options.open(token_path(folder))?;
        file.write_all(token.as_bytes())
    };
    write()
        .map_err(|error| Error::system("the token of the job cannot be written").with_source(error))
}

/// The file in the folder of a job with the output of its TensorBoard.
const TENSORBOARD_LOG: &str = "tensorboard.log";

/// Returns the address that TensorBoard has printed.
fn tensorboard_address(folder: &Path) -> Option<String> {
    let text = tensorboard_log(folder)?;
    let address = |line: &str| {
        let (_, rest) = line.split_once(" at http")?;
        Some(format!("http{}", rest.split_whitespace().next()?))
    };
    text.lines().find_map(address)
}

/// Returns the last line that TensorBoard has printed.
#[cfg(any(test, feature = "slurm"))]
fn tensorboard_last_line(folder: &Path) -> Option<String> {
    tensorboard_log(folder)?.lines().last().map(str::to_owned)
}

/// Returns the beginning of TensorBoard's log.
fn tensorboard_log(folder: &Path) -> Option<String> {
    let mut log = Vec::new();
    let file = fs::File::open(folder.join(TENSORBOARD_LOG)).ok()?;
    file.take(1 << 20).read_to_end(&mut log).ok()?;
    Some(String::from_utf8_lossy(&log).into_owned())
}

fn hexadecimal<const BYTES: usize>() -> Result<String> {
    let mut bytes = [0; BYTES];
    getrandom(&mut bytes, GetRandomFlags::empty())
        .map_err(|error| Error::system("the system has no random bytes").with_source(error))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_tensorboard_says_is_shown() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(tensorboard_address(folder.path()), None);
        let path = folder.path().join(TENSORBOARD_LOG);
        fs::write(
            &path,
            "some warning\nTensorBoard 2.21.0 at http://n1:40631/ (Press CTRL+C to quit)\n",
        )
        .unwrap();
        assert_eq!(
            tensorboard_address(folder.path()).as_deref(),
            Some("http://n1:40631/")
        );
        fs::write(&path, "bash: tensorboard: command not found\n").unwrap();
        assert_eq!(tensorboard_address(folder.path()), None);
        assert_eq!(
            tensorboard_last_line(folder.path()).as_deref(),
            Some("bash: tensorboard: command not found")
        );
    }
}

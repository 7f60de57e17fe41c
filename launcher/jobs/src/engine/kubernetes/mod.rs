//! The engine Kubernetes.

use std::io::Write;
use std::path::Path;

use super::{Engine, LogsRequest, Submitted};
use crate::error::{Error, Result};
use crate::job::{JobDetails, JobRecord, NodeUsage};
use crate::spec::{EngineAddress, JobSpec};

/// Jobs of Kubernetes.
#[derive(Debug)]
pub(crate) struct KubernetesEngine;

impl KubernetesEngine {
    /// Finds the engine.
    ///
    /// # Errors
    /// When it is not there.
    pub(crate) fn connect(_address: &EngineAddress) -> Result<Self> {
        Err(Error::usage("not built yet"))
    }
}

impl Engine for KubernetesEngine {
    fn render(&self, _spec: &JobSpec) -> Result<String> {
        Err(Error::usage("not built yet"))
    }

    fn submit(&self, _spec: &JobSpec, _folder: &Path) -> Result<Submitted> {
        Err(Error::usage("not built yet"))
    }

    fn get(&self, _job: &JobRecord, _folder: &Path) -> Result<JobDetails> {
        Err(Error::usage("not built yet"))
    }

    fn logs(
        &self,
        _job: &JobRecord,
        _folder: &Path,
        _request: &LogsRequest,
        _output: &mut dyn Write,
    ) -> Result<()> {
        Err(Error::usage("not built yet"))
    }

    fn stop(&self, _job: &JobRecord, _folder: &Path) -> Result<()> {
        Err(Error::usage("not built yet"))
    }

    fn nodes(&self) -> Result<Vec<NodeUsage>> {
        Err(Error::usage("not built yet"))
    }
}

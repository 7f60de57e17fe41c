//! What the driver of a job is told, and what it says: the other side of `gang.py`.

use serde::{Deserialize, Serialize};

use super::answers::RayJob;
use super::client::RayClient;
use crate::job::{Failure, Instance, JobStatus, Role};
use crate::spec::{JobSpec, RayPlacement};

/// The driver.
pub(super) const DRIVER: &str = include_str!("gang.py");

/// What the driver is started with, as JSON in its one argument, which every user of its host can read.
#[derive(Serialize)]
pub(super) struct GangJob<'a> {
    name: &'a str,
    nodes: usize,
    /// The agent of a node. What begins with `./` is in the package.
    command: Vec<String>,
    /// What each node gives.
    bundle: Bundle,
    strategy: RayPlacement,
    max_restarts: u32,
    /// In seconds.
    time_limit: Option<u64>,
    /// Where agents start, other than in the package.
    working_dir: Option<&'a std::path::Path>,
    /// What a TensorBoard shows.
    logdir: Option<&'a std::path::Path>,
}

/// A bundle of a placement group, in Ray's words.
#[derive(Serialize)]
struct Bundle {
    #[serde(rename = "CPU")]
    cpus: usize,
    #[serde(rename = "GPU", skip_serializing_if = "Option::is_none")]
    gpus: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<u64>,
}

impl<'a> GangJob<'a> {
    /// Of a job whose nodes have the launcher and the program at these paths.
    pub(super) fn new(spec: &'a JobSpec, launcher: &str, program: &str) -> Self {
        let command = spec.agent().launcher(launcher).program(program).words();
        let resources = &spec.resources;
        // Ray places nothing that asks for nothing: a core a rank.
        let cpus = resources.cpus.map(usize::from);
        let cpus = cpus
            .or_else(|| spec.nproc_per_node.parse().ok())
            .unwrap_or(1);
        Self {
            name: spec.name.as_str(),
            nodes: spec.nodes.get(),
            command,
            bundle: Bundle {
                cpus,
                gpus: Some(resources.gpus).filter(|gpus| *gpus > 0),
                memory: resources.memory.map(|memory| memory.bytes()),
            },
            strategy: spec.options.ray.placement,
            max_restarts: spec.max_restarts,
            time_limit: spec.time_limit.map(|limit| limit.as_secs()),
            working_dir: spec.working_dir.as_deref(),
            logdir: spec.tensorboard.then_some(spec.logdir.as_path()),
        }
    }
}

/// What the driver knows of its job. Times are seconds since 1970.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct GangState {
    /// Ray's number of the job.
    job_id: String,
    pub(super) status: JobStatus,
    pub(super) reason: Option<String>,
    pub(super) started: Option<f64>,
    pub(super) restarts: u32,
    pub(super) tensorboard: Option<String>,
    instances: Vec<GangInstance>,
    pub(super) failure: Option<Failure>,
}

#[derive(Clone, Debug, Deserialize)]
struct GangInstance {
    name: String,
    status: JobStatus,
    node: Option<String>,
    started: Option<f64>,
    ended: Option<f64>,
    restarts: u32,
    exit_code: Option<i32>,
    reason: Option<String>,
}

impl GangState {
    /// What the driver of a job has written last, where it has begun and its node answers.
    pub(super) fn read(client: &RayClient, id: &str, job: &RayJob) -> Option<Self> {
        let node = job.driver_node_id.as_deref()?;
        let text = client
            .log_file(node, &format!("accel-jobs-{id}.json"))
            .ok()?;
        Self::parse(&text).filter(|state| Some(&state.job_id) == job.job_id.as_ref())
    }

    fn parse(text: &[u8]) -> Option<Self> {
        // In older versions of Ray, chunks of a file begin with a `1` where they could be read.
        serde_json::from_slice(text.strip_prefix(b"1").unwrap_or(text)).ok()
    }

    /// Its instances, node by node.
    pub(super) fn instances(&self) -> Vec<Instance> {
        let instance = |(node, instance): (usize, &GangInstance)| Instance {
            name: instance.name.clone(),
            role: Role::of_node(node),
            status: instance.status,
            node: instance.node.clone(),
            started: instance.started.map(whole),
            ended: instance.ended.map(whole),
            restarts: instance.restarts,
            exit_code: instance.exit_code,
            reason: instance.reason.clone(),
        };
        self.instances.iter().enumerate().map(instance).collect()
    }
}

/// Whole seconds.
pub(super) fn whole(seconds: f64) -> u64 {
    seconds as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_says_is_read() {
        let state = br#"{"job_id": "05000000", "status": "RESTARTING", "reason": "a-worker-0: lost on node 10.77.0.2: The actor
            died because its node has died.", "started": 1795648074.19, "restarts": 1, "tensorboard": null, "instances":
            [{"name": "a-master-0", "restarts": 0, "node": "10.77.0.1", "status": "STOPPED", "started": 1795648074.19,
            "ended": 1795648075.9, "exit_code": null, "reason": null}, {"name": "a-worker-0", "restarts": 1, "node":
            "10.77.0.2", "status": "FAILED", "started": 1795648074.19, "ended": null, "exit_code": null, "reason": "lost on
            node 10.77.0.2"}], "failure": {"instance": "a-worker-0", "exit_code": 75, "reason": "lost on node 10.77.0.2",
            "last_lines": ["joined host 0"]}}"#;
        let text = String::from_utf8_lossy(state).replace('\n', " ");
        for text in [text.clone(), format!("1{text}")] {
            let state = GangState::parse(text.as_bytes()).unwrap();
            assert_eq!(state.status, JobStatus::Restarting);
            assert_eq!(state.failure.as_ref().unwrap().exit_code, Some(75));
            let instances = state.instances();
            assert_eq!(instances[1].role, Role::Worker);
            assert_eq!(instances[0].ended, Some(1_795_648_075));
            assert_eq!((state.restarts, instances[1].restarts), (1, 1));
        }
        assert!(GangState::parse(b"a file").is_none());
    }
}

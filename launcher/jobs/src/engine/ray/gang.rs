//! The other side of `gang.py`: the description of a job for its driver, the driver's report, and the details made of it.

use serde::{Deserialize, Serialize};

use super::client::{RayClient, RayJob, RayStatus};
use crate::job::{Failure, Instance, JobDetails, JobRecord, JobStatus, LAST_LINES, Role};
use crate::output::tail_of;
use crate::spec::{JobSpec, RayPlacement};

/// The driver.
pub(super) const DRIVER: &str = include_str!("gang.py");

/// The job as the driver gets it: JSON in its one argument, which every user of its host can read.
#[derive(Serialize)]
pub(super) struct GangJob<'a> {
    name: &'a str,
    nodes: usize,
    /// The agent of a node. Paths that begin with `./` are in the package.
    command: Vec<String>,
    /// The resources of each node.
    bundle: Bundle,
    strategy: RayPlacement,
    max_restarts: u32,
    /// The time limit in seconds.
    time_limit: Option<u64>,
    /// The folder in which agents start, if not in the package.
    working_dir: Option<&'a std::path::Path>,
    /// The folder that a TensorBoard shows.
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
    /// Describes a job whose nodes have the launcher and the program at these paths.
    pub(super) fn new(spec: &'a JobSpec, launcher: &str, program: &str) -> Self {
        let command = spec.agent().launcher(launcher).program(program).words();
        let resources = &spec.resources;
        // Ray places only bundles that ask for something: one core per rank.
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

/// The driver's report of its job. Times are seconds since 1970.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct GangState {
    /// Ray's number of the job.
    job_id: String,
    status: JobStatus,
    reason: Option<String>,
    started: Option<f64>,
    restarts: u32,
    tensorboard: Option<String>,
    instances: Vec<GangInstance>,
    failure: Option<Failure>,
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
    /// Reads the last report of a job's driver, if the driver has begun and its node answers.
    pub(super) fn read(client: &RayClient, id: &str, job: &RayJob) -> Option<Self> {
        let node = job.driver_node_id.as_deref()?;
        let text = client
            .log_file(node, &format!("accel-jobs-{id}.json"))
            .ok()?;
        Self::parse(&text).filter(|state| Some(&state.job_id) == job.job_id.as_ref())
    }

    fn parse(text: &[u8]) -> Option<Self> {
        // In older versions of Ray, each chunk of a file begins with a `1` if it could be read.
        serde_json::from_slice(text.strip_prefix(b"1").unwrap_or(text)).ok()
    }

    /// Returns its instances, node by node.
    fn instances(&self) -> Vec<Instance> {
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

/// Rounds down to whole seconds.
fn whole(seconds: f64) -> u64 {
    seconds as u64
}

/// Combines Ray's state of a job with the driver's report, which may not exist yet, or no longer.
pub(super) fn details(job: &JobRecord, answer: &RayJob, state: Option<GangState>) -> JobDetails {
    let spec = &job.spec;
    let told = state.as_ref().map(|state| state.status);
    let status = match (answer.status, told) {
        // According to Ray, the driver runs.
        (RayStatus::Running, Some(told)) if !told.is_final() => told,
        (RayStatus::Running, Some(_)) => JobStatus::Running,
        (RayStatus::Running | RayStatus::Pending, _) => JobStatus::Pending,
        (RayStatus::Stopped, _) => JobStatus::Stopped,
        (RayStatus::Succeeded, _) => JobStatus::Succeeded,
        (RayStatus::Failed, _) => JobStatus::Failed,
    };
    // If the driver was killed, only Ray knows why.
    let killed = status == JobStatus::Failed && told != Some(JobStatus::Failed);
    let said = answer
        .message
        .as_deref()
        .and_then(|message| message.lines().next());
    let said = said.map(str::to_owned);
    let gpus = spec.all_gpus();
    JobDetails {
        name: spec.name.to_string(),
        trainer: "RAY".to_owned(),
        status,
        reason: match &state {
            Some(state) if !killed => state.reason.clone(),
            _ if killed || status == JobStatus::Pending => said.clone(),
            _ => None,
        },
        namespace: None,
        priority: None,
        submitted: Some(job.submitted),
        started: state.as_ref().and_then(|state| state.started).map(whole),
        ended: answer.end_time.map(|time| time / 1000),
        restarts: state.as_ref().map_or(0, |state| state.restarts),
        gpus_requested: gpus,
        gpus_allocated: if status.is_active() { gpus } else { 0 },
        instances: match &state {
            Some(state) => instances(state, status),
            None => (0..spec.nodes.get())
                .map(|node| Instance::new(spec.name.as_str(), node, status))
                .collect(),
        },
        tensorboard: state
            .as_ref()
            .and_then(|state| state.tensorboard.clone())
            .filter(|_| status.is_active()),
        failure: match state {
            _ if killed => Some(Failure {
                instance: None,
                exit_code: None,
                reason: said.unwrap_or_else(|| "its driver failed".to_owned()),
                last_lines: last_lines(answer.message.as_deref().unwrap_or_default()),
            }),
            Some(state) if status == JobStatus::Failed => state.failure,
            _ => None,
        },
    }
}

/// Returns the instances of the driver's report; none still runs when the job is over.
fn instances(state: &GangState, status: JobStatus) -> Vec<Instance> {
    let mut instances = state.instances();
    for instance in &mut instances {
        if status.is_final() && !instance.status.is_final() {
            instance.status = status;
        }
    }
    instances
}

/// Returns the last lines of Ray's message, which has those of the log.
fn last_lines(message: &str) -> Vec<String> {
    let log = message.split_once('\n').map_or("", |(_, log)| log);
    let lines = tail_of(log, LAST_LINES).lines();
    lines.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::engine::ray::tests::spec;

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

    #[test]
    fn a_driver_that_has_not_begun_is_shown_by_what_ray_says() {
        let record = JobRecord {
            spec: spec(),
            id: "mnist".to_owned(),
            submitted: 1,
            last: None,
            removed: false,
        };
        let answer = |status: &str, message: &str| -> RayJob {
            serde_json::from_value(json!({"status": status, "message": message})).unwrap()
        };
        let shown = details(
            &record,
            &answer("PENDING", "It may be waiting.\nFor long."),
            None,
        );
        assert_eq!(shown.status, JobStatus::Pending);
        assert_eq!(shown.reason.as_deref(), Some("It may be waiting."));
        assert_eq!(shown.instances[1].name, "mnist-worker-0");
        let shown = details(
            &record,
            &answer("FAILED", "It failed:\nsh: python: not found"),
            None,
        );
        let failure = shown.failure.unwrap();
        assert_eq!(failure.reason, "It failed:");
        assert_eq!(failure.last_lines, ["sh: python: not found"]);
    }
}

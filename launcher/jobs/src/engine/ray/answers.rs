//! The answers of Ray, as far as they are read, and its log of a job, which has the output of all nodes.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::spec::JobSpec;

/// A job of Ray's Jobs API.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct RayJob {
    /// Ray's own number of the job, once its driver has one.
    pub(super) job_id: Option<String>,
    pub(super) status: RayStatus,
    pub(super) message: Option<String>,
    /// Milliseconds since 1970.
    pub(super) end_time: Option<u64>,
    /// The node on which the driver runs.
    pub(super) driver_node_id: Option<String>,
    /// The metadata that the submitter has attached.
    #[serde(default)]
    metadata: Option<BTreeMap<String, Value>>,
    entrypoint: Option<String>,
}

/// The key of the nonce in a job's metadata.
pub(super) const NONCE: &str = "accel-jobs/nonce";

impl RayJob {
    /// Returns `true` if it is the job of this specification, and not another one with its name.
    pub(super) fn is_of(&self, spec: &JobSpec) -> bool {
        let nonce = self.metadata.as_ref().and_then(|all| all.get(NONCE));
        nonce.and_then(Value::as_str) == Some(&spec.nonce)
    }

    /// Returns `true` if Ray made this entry for a job that it watches and can no longer find.
    pub(super) fn is_made_of_nothing(&self) -> bool {
        self.metadata.is_none() && self.entrypoint.as_deref() == Some("Entrypoint not found.")
    }
}

/// Ray's status of a job, which is that of its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum RayStatus {
    Pending,
    Running,
    Stopped,
    Succeeded,
    Failed,
}

impl RayStatus {
    /// Returns `true` if the driver has ended.
    pub(super) fn is_final(self) -> bool {
        matches!(self, Self::Stopped | Self::Succeeded | Self::Failed)
    }
}

/// The output of a job.
#[derive(Deserialize)]
pub(super) struct RayLogs {
    pub(super) logs: String,
}

/// The version of Ray.
#[derive(Deserialize)]
pub(super) struct RayVersion {
    pub(super) ray_version: String,
}

/// Any answer of the state API.
#[derive(Deserialize)]
pub(super) struct StateAnswer<T> {
    pub(super) data: T,
}

/// A list of the state API.
#[derive(Deserialize)]
pub(super) struct StateList<T> {
    pub(super) result: StateRows<T>,
}

/// The rows of a list.
#[derive(Deserialize)]
pub(super) struct StateRows<T> {
    pub(super) result: Vec<T>,
}

/// A node of the state API.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct RayNode {
    pub(super) node_id: String,
    pub(super) node_ip: String,
    pub(super) node_name: Option<String>,
    #[serde(default)]
    pub(super) is_head_node: bool,
    /// `ALIVE` or `DEAD`.
    pub(super) state: String,
    #[serde(default)]
    pub(super) resources_total: BTreeMap<String, f64>,
}

/// The part of `/api/cluster_status` with the used resources of each node.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct RayUsage {
    cluster_status: Option<ClusterStatus>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct ClusterStatus {
    load_metrics_report: LoadMetrics,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct LoadMetrics {
    usage_by_node: Option<BTreeMap<String, BTreeMap<String, [f64; 2]>>>,
}

impl RayUsage {
    /// Returns how much of a resource is used on a node.
    pub(super) fn used(&self, node: &str, resource: &str) -> f64 {
        let report = self
            .cluster_status
            .as_ref()
            .map(|status| &status.load_metrics_report);
        let nodes = report.and_then(|report| report.usage_by_node.as_ref());
        let amounts = nodes.and_then(|nodes| nodes.get(node)?.get(resource));
        amounts.map_or(0.0, |[used, _]| *used)
    }
}

/// The first character of a line that is not from node 0, as in JSON text sequences.
const MARK: char = '\x1e';

/// Returns the output of an instance (node 0 if none is named) in the log of a job; `None` before its driver has begun.
///
/// Ray appends to the log of a job that had the same name, so the driver begins with Ray's number of the job.
pub(super) fn output_of(log: &str, job_id: Option<&str>, instance: Option<&str>) -> Option<String> {
    let begin = format!("{MARK}{{\"job_id\": \"{}\"}}\n", job_id?);
    let (_, log) = log.rsplit_once(begin.as_str())?;
    let mark = instance.map(|name| format!("{MARK}[{name}] "));
    let lines = log.split_inclusive('\n');
    let output = lines.filter_map(|line| match &mark {
        Some(mark) => line.strip_prefix(mark.as_str()),
        None => Some(line).filter(|line| !line.starts_with(MARK)),
    });
    Some(output.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_answers_are_read() {
        // From Ray 2.60, shortened.
        let job = r#"{"type": "SUBMISSION", "job_id": "02000000", "submission_id": "t1", "driver_info": {"id": "02000000",
        "node_ip_address": "10.77.0.1", "pid": "29223"}, "status": "SUCCEEDED", "entrypoint": "python gang.py", "message":
        "Job finished successfully.", "error_type": null, "start_time": 1795648064664, "end_time": 1795648075891,
        "metadata": null, "runtime_env": {}, "driver_agent_http_address": "http://10.77.0.1:52365", "driver_node_id":
        "e7517e", "driver_exit_code": 0}"#;
        let job: RayJob = serde_json::from_str(job).unwrap();
        assert_eq!(job.status, RayStatus::Succeeded);
        assert_eq!(job.driver_node_id.as_deref(), Some("e7517e"));
        assert!(!job.is_made_of_nothing());
        let left = r#"{"type": "SUBMISSION", "job_id": null, "submission_id": "t1", "driver_info": null, "status": "FAILED",
        "entrypoint": "Entrypoint not found.", "message": "Unexpected error occurred", "error_type": null, "start_time":
        null, "end_time": 1795648075891, "metadata": null, "runtime_env": null, "driver_node_id": null}"#;
        let left: RayJob = serde_json::from_str(left).unwrap();
        assert!(left.is_made_of_nothing());

        let nodes = r#"{"result": true, "msg": "", "data": {"result": {"total": 1, "num_after_truncation": 1, "num_filtered":
        1, "result": [{"node_id": "cad2", "node_ip": "10.77.0.2", "is_head_node": false, "state": "ALIVE",
        "state_message": null, "node_name": "10.77.0.2", "resources_total": {"memory": 22032997376.0, "CPU": 2.0}}],
        "partial_failure_warning": "", "warnings": null}}}"#;
        let nodes: StateAnswer<StateList<RayNode>> = serde_json::from_str(nodes).unwrap();
        assert_eq!(nodes.data.result.result[0].resources_total["CPU"], 2.0);

        let usage = r#"{"result": true, "data": {"autoscalingStatus": "", "clusterStatus": {"loadMetricsReport": {"usage": {},
        "usageByNode": {"cad2": {"memory": [0.0, 22295088128.0], "CPU": [1.5, 2.0]}}}}}}"#;
        let usage: StateAnswer<RayUsage> = serde_json::from_str(usage).unwrap();
        assert_eq!(usage.data.used("cad2", "CPU"), 1.5);
        assert_eq!(usage.data.used("cad2", "GPU"), 0.0);
        // From a cluster without its monitor.
        let usage: StateAnswer<RayUsage> =
            serde_json::from_str(r#"{"data": {"clusterStatus": null}}"#).unwrap();
        assert_eq!(usage.data.used("cad2", "CPU"), 0.0);
    }

    #[test]
    fn nodes_are_told_apart() {
        let log = "old\n\x1e{\"job_id\": \"01\"}\nolder\n\x1e{\"job_id\": \"02\"}\n[0] one\n\x1e[a-worker-0] joined\n[1] two\n";
        let output = |instance| output_of(log, Some("02"), instance);
        assert_eq!(output(None).unwrap(), "[0] one\n[1] two\n");
        assert_eq!(output(Some("a-worker-0")).unwrap(), "joined\n");
        assert_eq!(output(Some("a-worker-1")).unwrap(), "");
        assert_eq!(output_of(log, Some("03"), None), None);
        assert_eq!(output_of("sh: python: not found\n", None, None), None);
    }
}

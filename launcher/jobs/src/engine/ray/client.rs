//! The REST API of Ray's dashboard: requests, and the answers as far as they are read.

use std::collections::BTreeMap;
use std::time::Duration;

use accelerator_host::cli::{Error, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::http::{Method, Request, StatusCode};

use crate::spec::JobSpec;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit of an answer; that of an upload is longer.
const TIMEOUT: Duration = Duration::from_secs(60);
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(1800);
const LONGEST_ANSWER: u64 = 1 << 30;
/// The oldest major version of Ray with the APIs that are used here.
const OLDEST: u64 = 2;

/// A dashboard of Ray.
#[derive(Debug)]
pub(super) struct RayClient {
    agent: ureq::Agent,
    address: String,
    /// The bearer token, if the cluster asks for one.
    token: Option<String>,
}

impl RayClient {
    /// Makes the client of the dashboard at `address`. Sends no request yet.
    ///
    /// # Errors
    /// When the address is not that of a dashboard.
    pub(super) fn new(address: &str) -> Result<Self> {
        let address = match address.split_once("://") {
            None if address.contains(':') => format!("http://{address}"),
            Some(("http" | "https", host)) if !host.is_empty() => address.to_owned(),
            _ => {
                return Err(Error::usage(format!(
                    "{address:?} is not the address of Ray's dashboard; give one such as http://HOST:8265 by --ray-address"
                )));
            }
        };
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(CONNECT_TIMEOUT))
            .timeout_global(Some(TIMEOUT))
            .build();
        Ok(Self {
            agent: config.into(),
            address: address.trim_end_matches('/').to_owned(),
            token: std::env::var("RAY_AUTH_TOKEN").ok(),
        })
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Checks that it is a Ray with the APIs that are used here.
    ///
    /// # Errors
    /// When nothing answers, or it is not Ray, or too old.
    pub(super) fn check_version(&self) -> Result<()> {
        let answer: RayVersion = self.get("/api/version")?;
        let major = answer.ray_version.split('.').next().unwrap_or_default();
        match major.parse::<u64>() {
            Ok(major) if major < OLDEST => Err(Error::refused(format!(
                "Ray at {} is {}, which is too old; jobs need Ray {OLDEST}.0 or later",
                self.address, answer.ray_version
            ))),
            _ => Ok(()),
        }
    }

    /// Returns `true` if Ray has the package with this name.
    pub(super) fn has_package(&self, name: &str) -> Result<bool> {
        match self.ask(Method::GET, &package_path(name), None, TIMEOUT) {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Uploads a package.
    ///
    /// # Errors
    /// When Ray does not take it.
    pub(super) fn put_package(&self, name: &str, package: &[u8]) -> Result<()> {
        self.ask(
            Method::PUT,
            &package_path(name),
            Some(package),
            UPLOAD_TIMEOUT,
        )?;
        Ok(())
    }

    /// Submits a job.
    ///
    /// # Errors
    /// When Ray refuses it.
    pub(super) fn submit(&self, request: &Value) -> Result<()> {
        let body = request.to_string();
        self.ask(Method::POST, "/api/jobs/", Some(body.as_bytes()), TIMEOUT)?;
        Ok(())
    }

    /// Returns a job by its submission id.
    ///
    /// # Errors
    /// [`Error::is_not_found`] when Ray has no such job.
    pub(super) fn job(&self, id: &str) -> Result<RayJob> {
        self.get(&format!("/api/jobs/{id}"))
    }

    /// Returns the whole output of a job's driver.
    ///
    /// # Errors
    /// [`Error::is_not_found`] when Ray has no such job.
    pub(super) fn logs(&self, id: &str) -> Result<String> {
        let answer: RayLogs = self.get(&format!("/api/jobs/{id}/logs"))?;
        Ok(answer.logs)
    }

    /// Tells a job to end.
    ///
    /// # Errors
    /// [`Error::is_not_found`] when Ray has no such job.
    pub(super) fn stop(&self, id: &str) -> Result<()> {
        self.ask(Method::POST, &format!("/api/jobs/{id}/stop"), None, TIMEOUT)?;
        Ok(())
    }

    /// Makes Ray forget a job that has ended.
    ///
    /// # Errors
    /// [`Error::is_not_found`] when Ray has no such job.
    pub(super) fn delete(&self, id: &str) -> Result<()> {
        self.ask(Method::DELETE, &format!("/api/jobs/{id}"), None, TIMEOUT)?;
        Ok(())
    }

    /// Reads a file in the folder of logs of a node.
    ///
    /// # Errors
    /// When there is none, or the node does not answer.
    pub(super) fn log_file(&self, node: &str, name: &str) -> Result<Vec<u8>> {
        let path = format!("/api/v0/logs/file?node_id={node}&filename={name}&lines=-1");
        self.ask(Method::GET, &path, None, TIMEOUT)
    }

    /// Lists the nodes, including those that are gone.
    pub(super) fn nodes(&self) -> Result<Vec<RayNode>> {
        let answer: StateAnswer<StateList<RayNode>> = self.get("/api/v0/nodes?limit=10000")?;
        Ok(answer.data.result.result)
    }

    /// Returns the used resources of each node.
    pub(super) fn usage(&self) -> Result<RayUsage> {
        let answer: StateAnswer<RayUsage> = self.get("/api/cluster_status")?;
        Ok(answer.data)
    }

    fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let answer = self.ask(Method::GET, path, None, TIMEOUT)?;
        serde_json::from_slice(&answer).map_err(|error| {
            Error::system(format!(
                "what answers {path} at {} is not Ray's dashboard, or not one that this version knows",
                self.address
            ))
            .with_source(error)
        })
    }

    fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&[u8]>,
        timeout: Duration,
    ) -> Result<Vec<u8>> {
        let asked = format!("{method} {}", path.split('?').next().unwrap_or(path));
        let lost = |error: ureq::Error| {
            Error::unreachable(format!(
                "nothing answers {asked} at {}, where Ray's dashboard should be; start Ray (`ray start --head`), or \
                 give the address of one by --ray-address",
                self.address
            ))
            .with_source(error)
        };
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.address));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if body.is_some() {
            request = request.header("content-type", "application/json");
        }
        let request = request.body(body.unwrap_or_default()).map_err(|error| {
            Error::usage(format!("{} cannot be asked", self.address)).with_source(error)
        })?;
        let request = self
            .agent
            .configure_request(request)
            .timeout_global(Some(timeout))
            .build();
        let mut answer = self.agent.run(request).map_err(lost)?;
        let text = answer
            .body_mut()
            .with_config()
            .limit(LONGEST_ANSWER)
            .read_to_vec()
            .map_err(lost)?;
        match answer.status() {
            status if status.is_success() => Ok(text),
            status => Err(self.refusal(&asked, status, &text)),
        }
    }

    /// Makes an error of an answer that reports one.
    fn refusal(&self, asked: &str, status: StatusCode, text: &[u8]) -> Error {
        let address = &self.address;
        let said = last_line(&String::from_utf8_lossy(text));
        let answers = format!("Ray at {address} answers {asked} with {}", status.as_u16());
        match status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Error::refused(format!(
                "{answers}: you may not do that; set RAY_AUTH_TOKEN to a token of the cluster: {said}"
            )),
            // If a job's own actor does not find something, Ray answers with 500.
            StatusCode::NOT_FOUND | StatusCode::INTERNAL_SERVER_ERROR
                if said.contains("does not exist")
                    || (asked.contains("/packages/") && status == StatusCode::NOT_FOUND) =>
            {
                Error::not_found(format!("Ray at {address}: {said}"))
            }
            StatusCode::NOT_FOUND => Error::refused(format!(
                "{answers}: it has no API for jobs; is it the dashboard of a Ray of version {OLDEST} or later?"
            )),
            StatusCode::PAYLOAD_TOO_LARGE => Error::refused(format!(
                "{answers}: the package of the job is too large for it; leave out --ray-include, or use --no-upload with a \
                 folder that the nodes share"
            )),
            StatusCode::TOO_MANY_REQUESTS
            | StatusCode::BAD_GATEWAY
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::GATEWAY_TIMEOUT => {
                Error::unreachable(format!("{answers}: it is busy, try again: {said}"))
            }
            _ => Error::refused(format!("{answers}: {said}")),
        }
    }
}

fn package_path(name: &str) -> String {
    format!("/api/packages/gcs/{name}")
}

/// Returns the last line of a text, which is the error of a traceback.
fn last_line(text: &str) -> String {
    const LONGEST: usize = 500;
    let line = text.lines().rev().find(|line| !line.trim().is_empty());
    line.unwrap_or("(nothing)").chars().take(LONGEST).collect()
}

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
struct RayLogs {
    logs: String,
}

#[derive(Deserialize)]
struct RayVersion {
    ray_version: String,
}

/// Any answer of the state API.
#[derive(Deserialize)]
struct StateAnswer<T> {
    data: T,
}

/// A list of the state API.
#[derive(Deserialize)]
struct StateList<T> {
    result: StateRows<T>,
}

#[derive(Deserialize)]
struct StateRows<T> {
    result: Vec<T>,
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
    /// Returns the used amount of a resource on a node.
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
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    /// Makes a dashboard that gives this answer once.
    fn answering(status: &str, body: &str) -> RayClient {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let answer = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        );
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            while lines
                .next()
                .is_some_and(|line| line.is_ok_and(|line| !line.is_empty()))
            {}
            stream.write_all(answer.as_bytes()).unwrap();
        });
        RayClient::new(&address).unwrap()
    }

    #[test]
    fn what_ray_refuses_is_said() {
        let traceback =
            "Traceback (most recent call last):\n  File \"x\"\nRuntimeError: it is full\n";
        for (status, body, wanted) in [
            ("401 Unauthorized", "no token", "RAY_AUTH_TOKEN"),
            ("403 Forbidden", "no", "you may not do that"),
            (
                "404 Not Found",
                "Job a does not exist",
                "Job a does not exist",
            ),
            ("404 Not Found", "404: Not Found", "no API for jobs"),
            (
                "400 Bad Request",
                "TypeError: entrypoint",
                "400: TypeError: entrypoint",
            ),
            ("409 Conflict", "taken", "with 409: taken"),
            ("413 Payload Too Large", "", "--no-upload"),
            ("429 Too Many Requests", "later", "try again: later"),
            (
                "500 Internal Server Error",
                traceback,
                "500: RuntimeError: it is full",
            ),
            ("503 Service Unavailable", "", "try again: (nothing)"),
            ("200 OK", "<html>", "not Ray's dashboard"),
        ] {
            let error = answering(status, body).job("a").unwrap_err();
            assert!(error.to_string().contains(wanted), "{status}: {error}");
            assert_eq!(
                error.is_not_found(),
                body.contains("does not exist"),
                "{status}"
            );
            let is_busy = status.starts_with("429") || status.starts_with("503");
            assert_eq!(error.is_unreachable(), is_busy, "{status}");
        }
    }

    #[test]
    fn an_old_ray_is_refused() {
        let version = |ray: &str| {
            answering(
                "200 OK",
                &format!(r#"{{"version": "4", "ray_version": "{ray}"}}"#),
            )
        };
        version("2.60.0").check_version().unwrap();
        let error = version("1.13.0").check_version().unwrap_err();
        assert!(
            error.to_string().contains("1.13.0, which is too old"),
            "{error}"
        );
    }

    #[test]
    fn addresses_are_those_of_dashboards() {
        for (given, used) in [
            ("http://h:8265/", "http://h:8265"),
            ("https://h", "https://h"),
            ("10.0.0.1:8265", "http://10.0.0.1:8265"),
        ] {
            assert_eq!(RayClient::new(given).unwrap().address(), used);
        }
        for given in ["auto", "ray://h:10001", "http://", ""] {
            let error = RayClient::new(given).unwrap_err();
            assert!(error.to_string().contains("--ray-address"), "{error}");
        }
        let nobody = RayClient::new("127.0.0.1:9").unwrap();
        let error = nobody.check_version().unwrap_err();
        assert!(
            error.is_unreachable() && error.to_string().contains("nothing answers"),
            "{error}"
        );
    }

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

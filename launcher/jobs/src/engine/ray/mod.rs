//! The engine Ray.
//!
//! A job is a job of Ray's Jobs API. Ray starts a driver (`gang.py`) once, on its head; the driver starts the agents as
//! actors of a placement group, one per node. Program, launcher and driver travel in a package of files. The driver writes
//! its report next to Ray's log of the job, where `get` reads it through Ray's API of logs.

mod client;
mod gang;
mod package;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use accelerator_host::cli::{Error, Result};
use serde_json::{Value, json};

use super::{Engine, LogsMode, LogsRequest, Submitted};
use crate::job::{JobDetails, JobRecord, NodeUsage, Role};
use crate::output::{shell_line, tail_of};
use crate::spec::{EngineAddress, JobSpec};
use client::{NONCE, RayClient, RayJob, output_of};
use gang::{GangJob, GangState, details};
use package::Package;

#[derive(Debug)]
pub(crate) struct RayEngine {
    client: RayClient,
}

/// Seconds that Ray gives a driver to end its job, instead of 3 s.
const STOP_WAIT: u64 = 60;
/// The longest wait for the end of a job.
const STOP_LIMIT: Duration = Duration::from_secs(STOP_WAIT + 30);
const POLL: Duration = Duration::from_millis(500);
/// Linux starts no program with a longer word or variable. Ray gives the entrypoint to a shell as one word, and the runtime
/// environment to the driver as one variable.
const LONGEST_WORD: usize = (128 << 10) - 1;
/// The bytes that Ray adds to the runtime environment in that variable.
const ADDED_BY_RAY: usize = 1 << 10;
/// The variable with the ranks' variables for the driver (`gang.py`).
const RANK_VARIABLES: &str = "ACCEL_JOBS_ENV";
/// The time in which Ray notices the end of a job.
const WATCH: Duration = Duration::from_millis(2500);

impl RayEngine {
    /// Makes the engine for the dashboard at this address. Sends no request yet.
    ///
    /// # Errors
    /// When the address is not that of a dashboard.
    pub(crate) fn connect(address: &EngineAddress) -> Result<Self> {
        Ok(Self {
            client: RayClient::new(&address.ray())?,
        })
    }

    /// Makes the body of the submission.
    fn request(spec: &JobSpec, package: &Package) -> Result<Value> {
        if spec.priority.is_some() {
            return Err(Error::usage("--priority: Ray has no priorities"));
        }
        let job = GangJob::new(spec, &package.launcher, &package.program);
        let failed = |error| Error::system("cannot write JSON").with_source(error);
        let job = serde_json::to_string(&job).map_err(failed)?;
        let entrypoint = shell_line(["python", "gang.py", &job]);
        // Ray replaces `$NAME` in `env_vars`, so the driver sets the variables. Only Ray's own are there by name.
        let mut env: BTreeMap<_, _> = spec.env.clone();
        env.retain(|name, _| name.starts_with("RAY_"));
        env.entry("RAY_JOB_STOP_WAIT_TIME_S".to_owned())
            .or_insert_with(|| STOP_WAIT.to_string());
        let variables = serde_json::to_string(&spec.env).map_err(failed)?;
        env.insert(RANK_VARIABLES.to_owned(), escaped(&variables));
        let runtime_env = json!({"working_dir": package.uri(), "env_vars": env});
        for (what, length) in [
            ("arguments", entrypoint.len()),
            ("variables", runtime_env.to_string().len() + ADDED_BY_RAY),
        ] {
            if length > LONGEST_WORD {
                return Err(Error::usage(format!(
                    "the program's {what} are too long for Ray, which gives them to a job as one text of {} KiB at most; \
                     put them into a file, and bring it along by --ray-include",
                    (LONGEST_WORD + 1) >> 10
                )));
            }
        }
        Ok(json!({
            "entrypoint": entrypoint,
            "submission_id": spec.name,
            "metadata": {NONCE: spec.nonce},
            "runtime_env": runtime_env,
        }))
    }

    /// Returns exactly this job. Its name is its id at Ray, where another user may have a job with that name.
    fn job(&self, spec: &JobSpec) -> Result<RayJob> {
        self.same(spec, self.client.job(spec.name.as_str())?)
    }

    /// Returns the answer, unless it is about another job.
    fn same(&self, spec: &JobSpec, answer: RayJob) -> Result<RayJob> {
        let name = &spec.name;
        match answer.is_of(spec) {
            true => Ok(answer),
            false => Err(Error::not_found(format!(
                "Ray at {} has another job of the name {name}, and not this one any more",
                self.client.address()
            ))),
        }
    }

    /// Ends a job, if it exists.
    fn end(&self, spec: &JobSpec) -> Result<()> {
        let name = spec.name.as_str();
        let answer = self.client.job(name)?;
        // An interrupted stop may have left an entry without a job.
        if !answer.is_made_of_nothing() && !self.same(spec, answer)?.status.is_final() {
            self.client.stop(name)?;
            self.wait_for_end(spec)?;
        }
        self.remove(spec)
    }

    /// Makes Ray forget a job that has ended.
    ///
    /// Ray checks each job once a second. If the entry is gone before Ray notices the end, Ray makes an entry of a failed
    /// job.
    fn remove(&self, spec: &JobSpec) -> Result<()> {
        let name = spec.name.as_str();
        loop {
            self.client.delete(name)?;
            thread::sleep(WATCH);
            let answer = self.client.job(name)?;
            if !answer.is_of(spec) && !answer.is_made_of_nothing() {
                return Ok(());
            }
        }
    }

    fn wait_for_end(&self, spec: &JobSpec) -> Result<()> {
        let deadline = Instant::now() + STOP_LIMIT;
        while !self.job(spec)?.status.is_final() {
            if Instant::now() > deadline {
                return Err(Error::unreachable(format!(
                    "job {} does not end; Ray at {} shows why",
                    spec.name,
                    self.client.address()
                )));
            }
            thread::sleep(POLL);
        }
        Ok(())
    }
}

/// Writes the same JSON in ASCII and without `$`: Ray expands nothing in it, and it survives every locale.
fn escaped(json: &str) -> String {
    let mut escaped = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii() && c != '$' {
            escaped.push(c);
        } else {
            // Such a character is always in a string.
            for unit in c.encode_utf16(&mut [0; 2]) {
                escaped.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    escaped
}

impl Engine for RayEngine {
    fn render(&self, spec: &JobSpec) -> Result<String> {
        let package = Package::build(spec)?;
        let request = crate::output::json(&Self::request(spec, &package)?)?;
        let address = self.client.address();
        let mut text = format!("PUT {address}/api/packages/gcs/{}\n", package.name);
        for (name, size) in &package.files {
            text.push_str(&format!("  {name} ({size} bytes)\n"));
        }
        Ok(text + &format!("\nPOST {address}/api/jobs/\n{request}"))
    }

    fn submit(&self, spec: &JobSpec, _folder: &Path) -> Result<Submitted> {
        let id = spec.name.as_str();
        let package = Package::build(spec)?;
        let request = Self::request(spec, &package)?;
        self.client.check_version()?;
        // Ray answers a name that is taken with 500 and a traceback.
        match self.client.job(id) {
            Ok(_) => {
                return Err(Error::refused(format!(
                    "Ray at {} has a job {id} already; choose another --name, or stop that one where it was submitted",
                    self.client.address()
                )));
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        let mut created = Vec::new();
        if self.client.has_package(&package.name)? {
            created.push(format!("package/{} unchanged", package.name));
        } else {
            self.client.put_package(&package.name, &package.bytes)?;
            created.push(format!(
                "package/{} uploaded ({} KiB)",
                package.name,
                package.bytes.len() >> 10
            ));
        }
        self.client.submit(&request).inspect_err(|error| {
            if error.is_unreachable() {
                // Ray may have accepted the job; but it did not answer, so it may not answer now.
                let _ = self.end(spec);
            }
        })?;
        created.push(format!("job/{id} created"));
        Ok(Submitted {
            id: id.to_owned(),
            created,
        })
    }

    fn get(&self, job: &JobRecord, _folder: &Path) -> Result<JobDetails> {
        let answer = self.job(&job.spec)?;
        let state = GangState::read(&self.client, job.spec.name.as_str(), &answer);
        Ok(details(job, &answer, state))
    }

    fn logs(
        &self,
        job: &JobRecord,
        _folder: &Path,
        request: &LogsRequest,
        output: &mut dyn Write,
    ) -> Result<()> {
        let name = job.spec.name.as_str();
        // The output of node 0 has no name in the log.
        let instance = (request.node > 0).then(|| Role::instance_name(name, request.node));
        let instance = instance.as_deref();
        // The length of the text that is already shown.
        let mut shown = None;
        loop {
            let asked = Instant::now();
            let answer = self.job(&job.spec)?;
            let is_final = answer.status.is_final();
            let log = self.client.logs(name)?;
            let text = match output_of(&log, answer.job_id.as_deref(), instance) {
                Some(text) => text,
                // Its driver has not begun: Ray's own messages.
                None if is_final => log,
                None => String::new(),
            };
            let begin = shown.filter(|shown| *shown > 0).unwrap_or_else(|| {
                request
                    .tail
                    .map_or(0, |lines| text.len() - tail_of(&text, lines).len())
            });
            let new = text.get(begin..).unwrap_or_default();
            output
                .write_all(new.as_bytes())
                .and_then(|()| output.flush())
                .map_err(|error| {
                    Error::system(format!("the output of job {name} cannot be shown"))
                        .with_source(error)
                })?;
            shown = Some(begin.max(text.len()));
            if is_final || request.mode == LogsMode::Once {
                return Ok(());
            }
            // Ray sends the whole log each time: a long one is asked for less often.
            thread::sleep(POLL.max(4 * asked.elapsed()));
        }
    }

    fn stop(&self, job: &JobRecord, _folder: &Path) -> Result<()> {
        match self.end(&job.spec) {
            // It is gone, or another command has removed it.
            Err(error) if !error.is_not_found() => Err(error),
            _ => Ok(()),
        }
    }

    fn nodes(&self) -> Result<Vec<NodeUsage>> {
        let nodes = self.client.nodes()?;
        let usage = self.client.usage()?;
        let is_alive = |node: &client::RayNode| node.state == "ALIVE";
        let alive: Vec<_> = nodes.iter().filter(|node| is_alive(node)).collect();
        // Ray keeps listing nodes that are gone, even if they have come back.
        let came_again = |node: &client::RayNode| {
            !is_alive(node) && alive.iter().any(|other| other.node_ip == node.node_ip)
        };
        let shown = nodes.iter().filter(|node| !came_again(node));
        let total =
            |node: &client::RayNode, name| node.resources_total.get(name).copied().unwrap_or(0.0);
        Ok(shown
            .map(|node| NodeUsage {
                name: node
                    .node_name
                    .clone()
                    .unwrap_or_else(|| node.node_ip.clone()),
                address: node.node_ip.clone(),
                role: if node.is_head_node {
                    "master"
                } else {
                    "<none>"
                }
                .to_owned(),
                status: match is_alive(node) {
                    true => "ready".to_owned(),
                    false => node.state.to_lowercase(),
                },
                gpus: total(node, "GPU") as usize,
                gpus_allocated: usage.used(&node.node_id, "GPU") as usize,
                cpus: total(node, "CPU"),
                cpus_allocated: usage.used(&node.node_id, "CPU"),
            })
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn spec() -> JobSpec {
        serde_json::from_value(json!({
            "name": "mnist", "nonce": "77", "engine": "ray", "nodes": 2, "nproc_per_node": "2",
            "resources": {"cpus": null, "gpus": 1, "memory": 1 << 30}, "time_limit": {"secs": 90, "nanos": 0},
            "env": {"A": "b c"}, "working_dir": null, "max_restarts": 3, "priority": null, "tensorboard": false,
            "logdir": "/training_logs", "program": ["./mnist", "--text", "it's"], "address": {},
            "options": {"slurm": {}, "kubernetes": {}, "ray": {}},
        }))
        .unwrap()
    }

    fn package() -> Package {
        Package {
            name: "_ray_pkg_0.zip".to_owned(),
            bytes: Vec::new(),
            files: BTreeMap::new(),
            launcher: "./accel-launch".to_owned(),
            program: "./mnist".to_owned(),
        }
    }

    #[test]
    fn the_request_is_rays() {
        let request = RayEngine::request(&spec(), &package()).unwrap();
        let job = r#"{"name":"mnist","nodes":2,"command":["./accel-launch","--nnodes","2","--nproc-per-node","2","#
            .to_owned()
            + r#""--max-restarts","3","--","./mnist","--text","it'\''s"],"bundle":{"CPU":2,"GPU":1,"memory":1073741824},"#
            + r#""strategy":"STRICT_SPREAD","max_restarts":3,"time_limit":90,"working_dir":null,"logdir":null}"#;
        assert_eq!(
            request,
            json!({
                "entrypoint": format!("python gang.py '{job}'"),
                "submission_id": "mnist",
                "metadata": {"accel-jobs/nonce": "77"},
                "runtime_env": {
                    "working_dir": "gcs://_ray_pkg_0.zip",
                    "env_vars": {"ACCEL_JOBS_ENV": r#"{"A":"b c"}"#, "RAY_JOB_STOP_WAIT_TIME_S": "60"},
                },
            })
        );
        assert_eq!(escaped("$A é 𝄞"), r"\u0024A \u00e9 \ud834\udd1e");
        let urgent = JobSpec {
            priority: Some("high".to_owned()),
            ..spec()
        };
        assert!(RayEngine::request(&urgent, &package()).is_err());
        let mut long = spec();
        long.env.insert("LONG".to_owned(), "x".repeat(100 << 10));
        long.program.push("x".repeat(100 << 10));
        assert!(RayEngine::request(&long, &package()).is_ok());
        let refusal = |spec: &JobSpec| {
            let error = RayEngine::request(spec, &package()).unwrap_err();
            error.to_string()
        };
        let mut more = long.clone();
        more.env.insert("MORE".to_owned(), "x".repeat(30 << 10));
        assert!(refusal(&more).contains("variables are too long for Ray"));
        long.program.push("x".repeat(30 << 10));
        assert!(refusal(&long).contains("arguments are too long for Ray"));
    }
}

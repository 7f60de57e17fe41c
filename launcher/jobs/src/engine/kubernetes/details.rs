//! The state of a job, which is that of the objects that run it and of its pods, and the wait for a change of it without
//! polling.

use std::time::Duration;

use accelerator_host::cli::{Error, Result};
use futures_util::FutureExt;
use futures_util::stream::{BoxStream, SelectAll, StreamExt};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Resource;
use kube::api::{ApiResource, WatchEvent, WatchParams};
use kube::core::DynamicObject;
use serde::Deserialize;
use tokio::time::{sleep, timeout};

use super::cluster::{Cluster, seconds};
use super::objects::{TENSORBOARD_PORT, TENSORBOARD_SUFFIX, pytorch_job, selector, train_job};
use super::pods::NodePods;
use crate::job::{Failure, Instance, JobDetails, JobRecord, JobStatus, LAST_LINES, Role};
use crate::output::{now, tail_of};
use crate::spec::{JobSpec, ObjectKind};

/// Asks the cluster for the state of a job.
///
/// # Errors
/// When it has forgotten the job, or does not answer.
pub(super) async fn details(cluster: &Cluster, job: &JobRecord) -> Result<JobDetails> {
    let spec = &job.spec;
    let owners = Owners::find(cluster, spec).await?;
    let mut pods = NodePods::find(cluster, spec).await?;
    if owners.state == OwnerState::Active {
        pods = pods.with_warnings(cluster, &owners.uids).await;
    }
    let mut details = of(spec, job.submitted, &cluster.namespace, &owners, &pods);
    // Pods that were replaced are removed in time.
    let before = job.last.as_ref().map_or(0, |last| last.restarts);
    details.restarts = details.restarts.max(before);
    Ok(details)
}

fn of(
    spec: &JobSpec,
    submitted: u64,
    namespace: &str,
    owners: &Owners,
    pods: &NodePods,
) -> JobDetails {
    let name = spec.name.as_str();
    let instances: Vec<_> = (0..spec.nodes.get())
        .map(|node| pods.instance(name, node, &owners.uids))
        .collect();
    let status = status(&owners.state, &instances);
    let held = instances
        .iter()
        .filter(|instance| instance.status == JobStatus::Running)
        .count();
    let queue = spec.options.kubernetes.queue.as_deref();
    let reason = match (&owners.state, status) {
        (OwnerState::Suspended, _) => Some(match queue {
            Some(queue) => format!("waits in queue {queue}"),
            None => "suspended".to_owned(),
        }),
        (OwnerState::Failed(reason), _) => Some(reason.clone()),
        (_, JobStatus::Pending | JobStatus::Restarting) => instances
            .iter()
            .find_map(|instance| instance.reason.clone()),
        _ => None,
    };
    JobDetails {
        name: name.to_owned(),
        trainer: match spec.options.kubernetes.kind {
            ObjectKind::Job => "JOB",
            ObjectKind::PyTorchJob => "PYTORCHJOB",
            ObjectKind::TrainJob => "TRAINJOB",
        }
        .to_owned(),
        status,
        reason,
        namespace: Some(namespace.to_owned()),
        priority: spec.priority.clone(),
        submitted: Some(submitted),
        started: owners.started,
        ended: owners.ended,
        restarts: instances
            .iter()
            .map(|instance| instance.restarts)
            .max()
            .unwrap_or(0),
        gpus_requested: spec.all_gpus(),
        gpus_allocated: held * spec.resources.gpus,
        failure: (status == JobStatus::Failed)
            .then(|| failure(name, pods))
            .flatten(),
        tensorboard: spec.tensorboard.then(|| port_forward(name, namespace)),
        instances,
    }
}

fn status(state: &OwnerState, instances: &[Instance]) -> JobStatus {
    let all = |statuses: &[JobStatus]| {
        instances
            .iter()
            .all(|instance| statuses.contains(&instance.status))
    };
    match state {
        OwnerState::Failed(_) => JobStatus::Failed,
        OwnerState::Complete => JobStatus::Succeeded,
        OwnerState::Suspended => JobStatus::Pending,
        OwnerState::Active if all(&[JobStatus::Running, JobStatus::Succeeded]) => {
            JobStatus::Running
        }
        OwnerState::Active if instances.iter().any(|instance| instance.restarts > 0) => {
            JobStatus::Restarting
        }
        OwnerState::Active
            if instances.iter().any(|instance| {
                matches!(instance.status, JobStatus::Restarting | JobStatus::Failed)
            }) =>
        {
            JobStatus::Restarting
        }
        OwnerState::Active => JobStatus::Pending,
    }
}

fn failure(job: &str, pods: &NodePods) -> Option<Failure> {
    let ends = pods.ends();
    let first = ends.first()?;
    let message = first
        .terminated
        .and_then(|end| end.message.as_deref())
        .unwrap_or_default();
    Some(Failure {
        instance: Some(Role::instance_name(job, first.node)),
        exit_code: first.terminated.map(|end| end.exit_code),
        reason: first.reason.clone(),
        last_lines: tail_of(message, LAST_LINES)
            .lines()
            .map(str::to_owned)
            .collect(),
    })
}

/// Returns the command that reaches TensorBoard on every cluster.
fn port_forward(job: &str, namespace: &str) -> String {
    format!(
        "http://localhost:9090 while this runs:\n\
         kubectl port-forward -n {namespace} svc/{job}{TENSORBOARD_SUFFIX} 9090:{TENSORBOARD_PORT}"
    )
}

/// The combined state of the objects of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
enum OwnerState {
    /// Waits to be admitted.
    Suspended,
    /// Its pods run, or will.
    Active,
    /// Every pod succeeded.
    Complete,
    /// The cluster gave it up, for this reason.
    Failed(String),
}

/// The objects of one job.
#[derive(Clone, Debug)]
struct Owners {
    state: OwnerState,
    /// Seconds since 1970.
    started: Option<u64>,
    ended: Option<u64>,
    /// The ids by which the cluster distinguishes them from all other objects.
    uids: Vec<String>,
}

/// Seconds that the other Jobs of a job have to end when one has failed.
const SETTLING_SECONDS: u64 = 10;

/// The fields that the three kinds share.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct OwnerStatus {
    conditions: Vec<OwnerCondition>,
    start_time: Option<Time>,
    completion_time: Option<Time>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct OwnerCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    reason: String,
    message: String,
    last_transition_time: Option<Time>,
}

/// Returns the resource of the objects that run a job of that kind.
fn owner_resource(kind: ObjectKind) -> ApiResource {
    match kind {
        ObjectKind::Job => ApiResource::erase::<Job>(&()),
        ObjectKind::PyTorchJob => pytorch_job(),
        ObjectKind::TrainJob => train_job(),
    }
}

impl Owners {
    /// Asks the cluster.
    ///
    /// # Errors
    /// When there are none, or it does not answer.
    async fn find(cluster: &Cluster, spec: &JobSpec) -> Result<Self> {
        let resource = owner_resource(spec.options.kubernetes.kind);
        let api = cluster.dynamic(&resource);
        let found = cluster
            .labelled(&resource.plural, &api, &selector(spec))
            .await?;
        Self::of(&found, now()).ok_or_else(|| {
            Error::not_found(format!(
                "Kubernetes at {} has no {} {} that was submitted from here in namespace {}: it was removed there",
                cluster.url, resource.kind, spec.name, cluster.namespace
            ))
        })
    }

    /// Sums up these objects at that time; `None` if there are none.
    fn of(objects: &[DynamicObject], now: u64) -> Option<Self> {
        let read = |object: &DynamicObject| {
            let status = object.data.get("status").cloned().unwrap_or_default();
            serde_json::from_value::<OwnerStatus>(status).unwrap_or_default()
        };
        let statuses: Vec<_> = objects.iter().map(read).collect();
        let first = statuses.first()?;
        let end = statuses.iter().filter_map(OwnerStatus::end).max();
        // The others end with it, and may explain more.
        let is_settled = statuses.iter().all(OwnerStatus::is_over)
            || end.is_none_or(|end| now >= end + SETTLING_SECONDS);
        let failed = statuses
            .iter()
            .find_map(|status| status.condition("Failed"))
            .filter(|_| is_settled);
        let state = if let Some(condition) = failed {
            OwnerState::Failed(condition.text())
        } else if statuses.iter().all(OwnerStatus::is_complete) {
            OwnerState::Complete
        } else if first.condition("Suspended").is_some() || is_suspended(&objects[0]) {
            OwnerState::Suspended
        } else {
            OwnerState::Active
        };
        Some(Self {
            ended: match state {
                OwnerState::Failed(_) | OwnerState::Complete => end,
                OwnerState::Suspended | OwnerState::Active => None,
            },
            state,
            started: statuses
                .iter()
                .filter_map(|status| status.start_time.as_ref().map(seconds))
                .min(),
            uids: objects
                .iter()
                .filter_map(|object| object.meta().uid.clone())
                .collect(),
        })
    }
}

impl OwnerStatus {
    fn condition(&self, kind: &str) -> Option<&OwnerCondition> {
        let holds =
            |condition: &&OwnerCondition| condition.kind == kind && condition.status == "True";
        self.conditions.iter().find(holds)
    }

    fn is_complete(&self) -> bool {
        let complete = ["Complete", "Succeeded"];
        complete.iter().any(|kind| self.condition(kind).is_some())
    }

    fn is_over(&self) -> bool {
        self.is_complete() || self.condition("Failed").is_some()
    }

    fn end(&self) -> Option<u64> {
        let last = ["Failed", "Complete", "Succeeded"]
            .iter()
            .find_map(|kind| self.condition(kind));
        let time = self
            .completion_time
            .as_ref()
            .or(last?.last_transition_time.as_ref());
        time.map(seconds)
    }
}

impl OwnerCondition {
    fn text(&self) -> String {
        match (self.message.is_empty(), self.reason.is_empty()) {
            (false, false) => format!("{} ({})", self.message, self.reason),
            (true, _) => self.reason.clone(),
            (false, true) => self.message.clone(),
        }
    }
}

/// Returns `true` if the object is suspended, even if the server has not reported that yet.
fn is_suspended(object: &DynamicObject) -> bool {
    let places = ["/spec/suspend", "/spec/runPolicy/suspend"];
    places
        .iter()
        .any(|place| object.data.pointer(place).and_then(|value| value.as_bool()) == Some(true))
}

/// Watches of the pods and the owners of a job.
///
/// An event only means that it is worth asking again. A watch that begins too late for the server's history (410), that
/// breaks, or that is not allowed costs one more question, and no change is missed.
pub(super) struct Changes {
    cluster: Cluster,
    resources: [ApiResource; 2],
    params: WatchParams,
    /// `None` before the first question, and after a watch has ended.
    watches: Option<SelectAll<BoxStream<'static, Watched>>>,
}

/// A change, or the end of a watch.
type Watched = std::result::Result<(), WatchEnded>;

struct WatchEnded;

/// The pause between two questions if there is no watch.
const WITHOUT: Duration = Duration::from_secs(1);

impl Changes {
    /// Makes the watch of a job. It watches nothing yet.
    pub(super) fn of(cluster: &Cluster, spec: &JobSpec) -> Self {
        let kind = spec.options.kubernetes.kind;
        Self {
            cluster: cluster.clone(),
            resources: [ApiResource::erase::<Pod>(&()), owner_resource(kind)],
            params: WatchParams::default().labels(&selector(spec)),
            watches: None,
        }
    }

    /// Waits at most `limit` for a change since the last call. Returns `true` if something may have changed.
    pub(super) async fn next(&mut self, limit: Duration) -> bool {
        let Some(watches) = &mut self.watches else {
            self.watches = self.open().await;
            if self.watches.is_none() {
                sleep(limit.min(WITHOUT)).await;
            }
            // The watch does not report changes before it was opened.
            return true;
        };
        let Ok(first) = timeout(limit, watches.next()).await else {
            return false;
        };
        let mut is_open = matches!(first, Some(Ok(())));
        // Many events come at once: one question is enough for them.
        while is_open && let Some(more) = watches.next().now_or_never() {
            is_open = matches!(more, Some(Ok(())));
        }
        if !is_open {
            self.watches = None;
        }
        true
    }

    async fn open(&self) -> Option<SelectAll<BoxStream<'static, Watched>>> {
        let mut watches = SelectAll::new();
        for resource in &self.resources {
            let api = self.cluster.dynamic(resource);
            // From any version that the server has: it reports all objects, then each change.
            let watch = self
                .cluster
                .try_ask(|| api.watch_metadata(&self.params, "0"))
                .await
                .ok()?;
            let watch = watch.map(|event| match event {
                Ok(WatchEvent::Error(_)) | Err(_) => Err(WatchEnded),
                Ok(_) => Ok(()),
            });
            // The server ends each watch after some minutes; `SelectAll` would continue with the other alone.
            let ends = futures_util::stream::once(async { Err(WatchEnded) });
            watches.push(watch.chain(ends).boxed());
        }
        Some(watches)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::convert::Infallible;
    use std::future::ready;
    use std::sync::{Arc, Mutex};

    use http::{Request, Response};
    use kube::Client;
    use kube::client::Body;
    use serde_json::json;

    use super::*;
    use crate::engine::kubernetes::objects::tests::spec;

    fn state(statuses: &[serde_json::Value]) -> OwnerState {
        let object = |status: &serde_json::Value| {
            DynamicObject::new("m", &pytorch_job()).data(json!({"status": status}))
        };
        Owners::of(&statuses.iter().map(object).collect::<Vec<_>>(), 100)
            .unwrap()
            .state
    }

    #[test]
    fn jobs_of_nodes_are_taken_together() {
        let done = json!({"conditions": [{"type": "Complete", "status": "True"}]});
        let failed = json!({"conditions": [
        {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "Job was active longer"}]});
        assert_eq!(state(&[done.clone(), json!(null)]), OwnerState::Active);
        assert_eq!(state(&[done.clone(), done.clone()]), OwnerState::Complete);
        assert_eq!(
            state(&[done, failed]),
            OwnerState::Failed("Job was active longer (DeadlineExceeded)".to_owned())
        );
        assert!(Owners::of(&[], 0).is_none());
    }

    #[test]
    fn conditions_of_kubeflow_are_read() {
        let of = |kind: &str| {
            json!({"conditions": [
        {"type": "Created", "status": "True"}, {"type": kind, "status": "True"}]})
        };
        assert_eq!(state(&[of("Succeeded")]), OwnerState::Complete);
        assert_eq!(state(&[of("Suspended")]), OwnerState::Suspended);
        assert_eq!(state(&[of("Running")]), OwnerState::Active);
    }

    const ADDED: &str = r#"{"type":"ADDED","object":{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1","metadata":{"name":"m-0"}}}"#;
    const GONE: &str = r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure","code":410,"reason":"Expired","message":"too old resource version"}}"#;

    /// Makes a server that gives these answers, and then refuses all other requests.
    fn changes(answers: &[&str]) -> (Changes, Arc<Mutex<Vec<String>>>) {
        let mut answers: VecDeque<_> = answers.iter().map(|&answer| answer.to_owned()).collect();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let asks = Arc::clone(&asked);
        let answers = Mutex::new(std::mem::take(&mut answers));
        let service = tower::service_fn(move |request: Request<Body>| {
            asks.lock().unwrap().push(request.uri().path().to_owned());
            let (status, body) = match answers.lock().unwrap().pop_front() {
                Some(body) => (200, body),
                None => (
                    403,
                    r#"{"kind":"Status","status":"Failure","code":403}"#.to_owned(),
                ),
            };
            let answer = Response::builder()
                .status(status)
                .body(Body::from(body.into_bytes()));
            ready(Ok::<_, Infallible>(answer.unwrap()))
        });
        let cluster = Cluster {
            client: Client::new(service, "team"),
            namespace: "team".to_owned(),
            url: "https://cluster".to_owned(),
        };
        (Changes::of(&cluster, &spec()), asked)
    }

    #[tokio::test]
    async fn a_watch_that_is_too_old_or_ends_is_begun_again() {
        let gone = format!("{ADDED}\n{GONE}\n");
        let (mut changes, asked) = changes(&[&gone, "", ADDED, ADDED]);
        let limit = Duration::from_secs(60);
        // Opened, told, ended by 410 or its end; and again.
        for expected in [2, 2, 4, 4] {
            assert!(changes.next(limit).await);
            assert_eq!(asked.lock().unwrap().len(), expected);
        }
        assert_eq!(
            asked.lock().unwrap()[..2],
            [
                "/api/v1/namespaces/team/pods",
                "/apis/batch/v1/namespaces/team/jobs"
            ]
        );
    }

    #[tokio::test]
    async fn without_the_right_to_watch_it_is_asked_every_second() {
        let (mut changes, asked) = changes(&[]);
        assert!(changes.next(Duration::ZERO).await && changes.next(Duration::ZERO).await);
        assert_eq!(asked.lock().unwrap().len(), 2);
    }
}

//! The output of an instance, from one pod to the next.

use std::io::{ErrorKind, Write};
use std::time::Duration;

use accelerator_host::cli::{Error, Result, chain};
use futures_util::AsyncBufReadExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::api::LogParams;
use tokio::time::sleep;

use super::cluster::{ApiError, Cluster};
use super::details::{Changes, details};
use super::pods::{self, NodePods};
use crate::engine::{LogsMode, LogsRequest};
use crate::job::JobRecord;
use crate::output::warn;
use crate::spec::JobSpec;

/// The time without output after which a replacement of the pod is looked for.
const SILENCE: Duration = Duration::from_secs(1);
/// The longest wait for a change if no pod has more output.
const PAUSE: Duration = Duration::from_secs(5);

/// Writes the output of node `node`. Following it continues with the pods that replace others, until the job has ended.
///
/// # Errors
/// When the server refuses it, or `output` cannot be written.
pub(super) async fn logs(
    cluster: &Cluster,
    job: &JobRecord,
    node: usize,
    request: &LogsRequest,
    output: &mut dyn Write,
) -> Result<()> {
    let name = job.spec.name.as_str();
    let mut shown = Shown::default();
    let mut tail = request.tail;
    let mut has_warned = false;
    let mut changes = Changes::of(cluster, &job.spec);
    loop {
        // Asked before the pods are, so that the output of the last one is complete.
        let is_over = match request.mode {
            LogsMode::Once => true,
            LogsMode::Follow => match details(cluster, job).await {
                Ok(details) => details.status.is_final(),
                Err(error) if error.is_not_found() => true,
                // It may answer again.
                Err(error) if error.is_unreachable() => {
                    if !std::mem::replace(&mut has_warned, true) {
                        warn(&format!("{}; retrying", chain(&error)));
                    }
                    false
                }
                Err(error) => return Err(error),
            },
        };
        let found = match NodePods::find(cluster, &job.spec).await {
            Err(error) if error.is_unreachable() && !is_over => {
                sleep(SILENCE).await;
                continue;
            }
            found => found?,
        };
        let pods = found.of_node(node);
        // The last lines are those of the last pod that has any.
        let begin = match tail {
            Some(_) => pods.iter().rposition(pods::has_output).unwrap_or(0),
            None => 0,
        };
        for pod in pods.iter().skip(begin).filter(|pod| pods::has_output(pod)) {
            if shown.is_complete(pod) {
                continue;
            }
            let follow = request.mode == LogsMode::Follow && !is_over;
            let successors = follow.then_some(Successors {
                job: &job.spec,
                node,
                changes: &mut changes,
            });
            match show(cluster, pod, successors, tail.take(), &mut shown, output).await? {
                StreamEnd::Complete if !pods::runs(pod) => shown.complete(pod),
                StreamEnd::Complete | StreamEnd::Broken => {}
                StreamEnd::Closed => return Ok(()),
            }
        }
        if is_over {
            return match pods.is_empty() && request.mode == LogsMode::Once {
                true => Err(Error::not_found(format!(
                    "no pod of job {name} has begun on this node; `accel-launch jobs get {name}` says why"
                ))),
                false => Ok(()),
            };
        }
        changes.next(PAUSE).await;
    }
}

/// The part of the output that is already shown.
#[derive(Debug, Default)]
struct Shown {
    complete: Vec<String>,
    pod: String,
    /// The time of its last line.
    last: Option<Timestamp>,
    /// The time of the last line of the stream before this one.
    before: Option<Timestamp>,
}

/// The reason why a stream of output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamEnd {
    /// The container has ended.
    Complete,
    /// The pod's node, or the server, is gone.
    Broken,
    /// Nobody reads `output` any more.
    Closed,
}

impl Shown {
    fn is_complete(&self, pod: &Pod) -> bool {
        self.complete.contains(&pod.name_any())
    }

    fn complete(&mut self, pod: &Pod) {
        self.complete.push(pod.name_any());
    }

    /// Begins a stream of that pod, of which no line is shown twice.
    fn begin(&mut self, pod: &str) {
        if self.pod != pod {
            (self.pod, self.last) = (pod.to_owned(), None);
        }
        self.before = self.last;
    }

    /// Returns `true` if the line with this time is not shown yet. Servers begin at a whole second.
    fn takes(&mut self, time: Option<Timestamp>) -> bool {
        if time.is_some() && time <= self.before {
            return false;
        }
        self.last = time.or(self.last);
        true
    }
}

/// Writes the output of a pod: so far or, with `successors`, until the pod ends or another has taken its place.
async fn show(
    cluster: &Cluster,
    pod: &Pod,
    mut successors: Option<Successors<'_>>,
    tail: Option<usize>,
    shown: &mut Shown,
    output: &mut dyn Write,
) -> Result<StreamEnd> {
    let name = pod.name_any();
    shown.begin(&name);
    let parameters = LogParams {
        container: pods::container_name(pod),
        follow: successors.is_some(),
        since_time: shown.before,
        tail_lines: tail.and_then(|lines| i64::try_from(lines).ok()),
        // A new stream continues from them when one breaks.
        timestamps: true,
        ..LogParams::default()
    };
    let api = cluster.api::<Pod>();
    let stream = match cluster.try_ask(|| api.log_stream(&name, &parameters)).await {
        Ok(stream) => stream,
        // 500 and 502 mean that the kubelet is gone, 400 that the container has not begun, 404 that the pod is gone.
        Err(error)
            if matches!(error, ApiError::TimedOut(_))
                || matches!(error.code(), Some(400 | 404 | 500..)) =>
        {
            if successors.is_none() {
                warn(&format!(
                    "the output of pod {name} is not to be had: its node does not answer"
                ));
            }
            return Ok(StreamEnd::Broken);
        }
        Err(error) => return Err(error.into_error(&format!("pods/log of {name}"), cluster)),
    };
    let mut stream = std::pin::pin!(stream);
    let mut line = Vec::new();
    loop {
        let read = stream.read_until(b'\n', &mut line);
        let read = match tokio::time::timeout(SILENCE, read).await {
            Ok(read) => read,
            // The bytes read so far stay in `line`. A lost node sends nothing any more.
            Err(_) => {
                if let Some(successors) = &mut successors
                    && successors.have_come(cluster, pod).await
                {
                    return Ok(StreamEnd::Broken);
                }
                continue;
            }
        };
        match read {
            Ok(0) if line.is_empty() => return Ok(StreamEnd::Complete),
            Ok(_) => {}
            Err(_) => return Ok(StreamEnd::Broken),
        }
        let (time, text) = split(&line);
        if shown.takes(time) {
            match output.write_all(text).and_then(|()| output.flush()) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::BrokenPipe => {
                    return Ok(StreamEnd::Closed);
                }
                Err(error) => {
                    return Err(Error::system("output cannot be written").with_source(error));
                }
            }
        }
        line.clear();
    }
}

/// The pods that replace one another on a node of a job.
struct Successors<'a> {
    job: &'a JobSpec,
    node: usize,
    changes: &'a mut Changes,
}

impl Successors<'_> {
    /// Returns `true` if another pod has replaced this one.
    async fn have_come(&mut self, cluster: &Cluster, pod: &Pod) -> bool {
        if !self.changes.next(Duration::ZERO).await {
            return false;
        }
        let found = NodePods::find(cluster, self.job).await;
        found.is_ok_and(|found| {
            let pods = found.of_node(self.node);
            pods.last().is_none_or(|last| last.uid() != pod.uid())
        })
    }
}

/// Splits a line into its time and the text.
fn split(line: &[u8]) -> (Option<Timestamp>, &[u8]) {
    let blank = line.iter().position(|byte| *byte == b' ');
    let time = blank.and_then(|blank| std::str::from_utf8(&line[..blank]).ok()?.parse().ok());
    match (time, blank) {
        (Some(time), Some(blank)) => (Some(time), &line[blank + 1..]),
        _ => (None, line),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_shown_once() {
        let (time, text) = split(b"2026-01-01T00:00:00.123456789Z loss 0.5\n");
        assert_eq!(text, b"loss 0.5\n");
        let mut shown = Shown::default();
        shown.begin("a");
        // Two lines may have one time.
        assert!(shown.takes(time) && shown.takes(time));
        shown.begin("a");
        assert!(!shown.takes(time));
        shown.begin("b");
        assert!(shown.takes(time));
        assert_eq!(split(b"no time\n"), (None, &b"no time\n"[..]));
    }
}

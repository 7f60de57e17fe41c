//! Waiting for a change of a job without polling.

use std::time::Duration;

use futures_util::FutureExt;
use futures_util::stream::{BoxStream, SelectAll, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, WatchEvent, WatchParams};
use tokio::time::{sleep, timeout};

use super::cluster::Cluster;
use super::details::owner_resource;
use super::objects::selector;
use crate::spec::JobSpec;

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
type Watched = Result<(), WatchEnded>;

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

    use super::*;
    use crate::engine::kubernetes::objects::tests::spec;

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

//! What an API server says when it refuses something, and what to do about it.

use std::time::Duration;

use kube::core::Status;

use super::cluster::Cluster;
use crate::error::Error;

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum ApiError {
    /// The server, or the way to it, said so.
    Answered(kube::Error),
    /// Nobody said anything for so long.
    TimedOut(Duration),
}

/// Whether the same question may be answered in a moment.
pub(super) fn is_passing(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 429 | 500 | 503 | 504))
}

/// Whether the server has not begun with what it was asked for.
pub(super) fn is_not_carried_out(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 429)
}

impl ApiError {
    /// The status code of the answer, where there was one.
    pub(super) fn code(&self) -> Option<u16> {
        match self {
            Self::Answered(kube::Error::Api(status)) => Some(status.code),
            Self::Answered(_) | Self::TimedOut(_) => None,
        }
    }

    /// As an error that names `what` was asked about, the cluster, and what to do.
    pub(super) fn into_error(self, what: &str, cluster: &Cluster) -> Error {
        let place = format!("Kubernetes at {}", cluster.url);
        match self {
            Self::TimedOut(limit) => Error::unreachable(format!(
                "{place} does not answer within {} s about {what}; try again, or look at the control plane",
                limit.as_secs()
            )),
            Self::Answered(kube::Error::Api(status)) => of_status(&status, what, &cluster.namespace, &place),
            Self::Answered(kube::Error::Auth(error)) => Error::refused(format!(
                "the credentials for {place} cannot be had; log in again, as for kubectl"
            ))
            .with_source(error),
            Self::Answered(error @ (kube::Error::Service(_) | kube::Error::HyperError(_))) => {
                Error::unreachable(format!(
                    "{place} cannot be reached; check that `kubectl version` reaches it with the same context"
                ))
                .with_source(error)
            }
            Self::Answered(error) => Error::system(format!("{place} answers about {what} what is not understood"))
                .with_source(error),
        }
    }
}

fn of_status(status: &Status, what: &str, namespace: &str, place: &str) -> Error {
    let said = status.message.trim();
    match status.code {
        401 => Error::refused(format!(
            "{place} does not accept the credentials of this context, whose token may have expired; log in again, \
             as for kubectl"
        )),
        403 if said.contains("exceeded quota") => Error::refused(format!(
            "{what} does not fit the quota of namespace {namespace}: {said}; ask for less, or stop a job"
        )),
        403 => Error::refused(format!(
            "{place} forbids {what} in namespace {namespace}: {said}; ask for that right, or give another --namespace"
        )),
        404 if said.starts_with("namespaces ") => Error::refused(format!(
            "{place} has no namespace {namespace}; give another one by --namespace, or have it made"
        )),
        404 if status
            .details
            .as_ref()
            .is_none_or(|details| details.name.is_empty()) =>
        {
            Error::refused(format!(
                "{place} does not know {what}: {}",
                missing_kind(what)
            ))
        }
        404 => Error::not_found(format!(
            "{what} is not in namespace {namespace} of {place}: {said}"
        )),
        409 => Error::refused(format!(
            "{what} is already in namespace {namespace} of {place}; give another --name, or remove that one: \
             kubectl delete -n {namespace} {what}"
        )),
        400 | 422 => Error::refused(format!("{place} refuses {what}: {said}")),
        429 | 503 | 504 => Error::unreachable(format!(
            "{place} is too busy for {what} ({}: {said}); try again",
            status.code
        )),
        500.. => Error::unreachable(format!(
            "{place} has failed at {what} ({}: {said}); try again, or look at the control plane",
            status.code
        )),
        code => Error::refused(format!("{place} refuses {what} ({code}: {said})")),
    }
}

/// Who brings a kind of object that a cluster does not know.
fn missing_kind(what: &str) -> &'static str {
    match what {
        what if what.contains("pytorchjob") => {
            "its cluster has no Kubeflow training operator; have one installed, or use --kind job"
        }
        what if what.contains("trainjob") => {
            "its cluster has no Kubeflow Trainer; have it installed, or use --kind job"
        }
        _ => "its version is too old, or not that of Kubernetes",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(code: u16, message: &str, what: &str) -> String {
        let status = Status {
            code,
            message: message.to_owned(),
            ..Status::default()
        };
        of_status(&status, what, "team", "Kubernetes at https://k").to_string()
    }

    #[test]
    fn every_refusal_says_what_to_do() {
        for (code, message, what, expected) in [
            (401, "Unauthorized", "its version", "log in again"),
            (
                403,
                "User \"a\" cannot create resource \"jobs\"",
                "job.batch/m",
                "cannot create resource \"jobs\"",
            ),
            (
                403,
                "exceeded quota: q, requested: pods=2",
                "job.batch/m",
                "does not fit the quota of namespace team",
            ),
            (
                404,
                "the server could not find the requested resource",
                "pytorchjob.kubeflow.org/m",
                "training operator",
            ),
            (
                404,
                "not found",
                "trainjob.trainer.kubeflow.org/m",
                "Kubeflow Trainer",
            ),
            (
                404,
                "namespaces \"team\" not found",
                "job.batch/m",
                "has no namespace team",
            ),
            (
                409,
                "already exists",
                "service/m",
                "kubectl delete -n team service/m",
            ),
            (
                422,
                "spec.x: Invalid value",
                "job.batch/m",
                "spec.x: Invalid value",
            ),
            (429, "slow down", "job.batch/m", "try again"),
            (500, "etcd", "job.batch/m", "control plane"),
        ] {
            let text = text(code, message, what);
            assert!(text.contains(expected), "{text}");
            assert!(
                text.contains("Kubernetes at https://k") || code == 403,
                "{text}"
            );
        }
    }

    #[test]
    fn what_may_pass_is_asked_again() {
        let error = |code| {
            kube::Error::Api(Box::new(Status {
                code,
                ..Status::default()
            }))
        };
        assert!(is_passing(&error(429)) && is_passing(&error(500)));
        assert!(!is_passing(&error(409)) && !is_passing(&error(403)));
    }
}

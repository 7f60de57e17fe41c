//! Pods as servers have shown them.

use serde_json::{Value, json};

use super::pod::{INDEX, REPLICA_INDEX, REPLICA_TYPE};
use super::*;
use crate::engine::kubernetes::objects::NODE_LABEL;

fn pod(name: &str, node: usize, status: Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": name, "labels": {NODE_LABEL: node.to_string()},
            "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"nodeName": "node1", "containers": [{"name": "agent"}]},
        "status": status,
    }))
    .unwrap()
}

fn container(state: Value) -> Value {
    json!([{"name": "agent", "image": "r/m:1", "imageID": "", "ready": false, "restartCount": 0, "state": state}])
}

fn instance(pods: Vec<Pod>) -> Instance {
    NodePods::of(pods, Warnings::default()).instance("m", 1, &[])
}

#[test]
fn the_schedulers_words_are_shown() {
    let waits = pod(
        "a",
        1,
        json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False",
        "reason": "Unschedulable", "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."}]}),
    );
    let instance = instance(vec![waits]);
    assert_eq!(instance.status, JobStatus::Pending);
    assert_eq!(
        instance.reason.unwrap(),
        "Unschedulable: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    );
}

#[test]
fn an_image_that_is_not_there_is_named() {
    let state =
        json!({"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}});
    let waits = pod(
        "a",
        1,
        json!({"phase": "Pending", "containerStatuses": container(state)}),
    );
    assert_eq!(
        instance(vec![waits]).reason.unwrap(),
        "ImagePullBackOff: Back-off pulling image (r/m:1)"
    );
}

#[test]
fn the_pod_before_says_why_there_is_another() {
    let runs = json!({"running": {}});
    let mut lost = pod(
        "a",
        1,
        json!({"phase": "Running", "containerStatuses": container(runs.clone()),
        "conditions": [{"type": "Ready", "status": "False"}]}),
    );
    lost.metadata.deletion_timestamp = lost.metadata.creation_timestamp.clone();
    let alone = instance(vec![lost.clone()]);
    assert_eq!(alone.status, JobStatus::Restarting);
    assert!(
        alone
            .reason
            .unwrap()
            .contains("node node1 of pod a does not answer")
    );
    let new = pod(
        "b",
        1,
        json!({"phase": "Running", "containerStatuses": container(runs)}),
    );
    let again = instance(vec![lost, new]);
    assert_eq!((again.status, again.restarts), (JobStatus::Running, 1));
    assert!(
        again
            .reason
            .unwrap()
            .starts_with("started again, since node node1")
    );
}

#[test]
fn want_of_memory_says_most() {
    let end = |code: i32, reason: &str| {
        let state =
            json!({"terminated": {"exitCode": code, "reason": reason, "message": "last words"}});
        json!({"phase": "Failed", "containerStatuses": container(state)})
    };
    let pods = vec![
        pod("a", 0, end(137, "Error")),
        pod("b", 1, end(75, "Error")),
        pod("c", 2, end(137, "OOMKilled")),
    ];
    let pods = NodePods::of(pods, Warnings::default());
    let ends = pods.ends();
    assert_eq!(
        ends.iter().map(|end| end.node).collect::<Vec<_>>(),
        [2, 0, 1]
    );
    assert!(ends[0].reason.contains("OOMKilled"));
    assert_eq!(
        ends[0].terminated.unwrap().message.as_deref(),
        Some("last words")
    );
}

#[test]
fn pods_of_every_kind_know_their_node() {
    let with = |metadata: Value| -> Option<usize> {
        node_of(&serde_json::from_value(json!({"metadata": metadata})).unwrap())
    };
    assert_eq!(with(json!({"annotations": {INDEX: "3"}})), Some(3));
    assert_eq!(
        with(json!({"labels": {REPLICA_TYPE: "master", REPLICA_INDEX: "0"}})),
        Some(0)
    );
    assert_eq!(
        with(json!({"labels": {REPLICA_TYPE: "worker", REPLICA_INDEX: "1"}})),
        Some(2)
    );
    assert_eq!(with(json!({})), None);
}
